# SPDX-License-Identifier: Apache-2.0
"""patch_grid and attribution: all patches at once are the patches one by one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treetap as tt
from treetap import edits

CLEAN, CORRUPTED = jnp.array([0.3, -0.7, 1.1]), jnp.array([0.1, 0.5, -0.4])


def model(x):
    def step(carry, w):
        return jnp.sin(tt.tap(carry * w, "h")) + carry, None

    x = jax.lax.scan(step, x, jnp.array([1.0, 2.0, 3.0]))[0]
    return tt.tap(x**2, "square") + tt.tap(jnp.cos(x), "cosine")


def record_of(fn, x):
    return tt.observe(fn)(x)[1]


@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_grid_is_the_loop_over_patches(batch_size):
    clean = record_of(model, CLEAN)
    grid = tt.patch_grid(
        model, clean, (CORRUPTED,), "**", jnp.sum, batch_size=batch_size
    )
    baseline = jnp.sum(model(CORRUPTED))
    expected = []
    for n in range(3):
        change = edits.replace(clean["h"].value).at(n)
        expected.append(jnp.sum(tt.edit(model, {"h": change})(CORRUPTED)))
    for name in ("square", "cosine"):
        expected.append(jnp.sum(tt.edit(model, {name: clean[name]})(CORRUPTED)))
    assert grid.places == ("h[0]", "h[1]", "h[2]", "square", "cosine")
    np.testing.assert_allclose(grid.baseline, baseline, rtol=1e-6)
    np.testing.assert_allclose(
        grid.effects, jnp.stack(expected) - baseline, rtol=1e-4, atol=1e-5
    )


def test_a_grid_along_an_axis():
    clean = record_of(model, CLEAN)
    grid = tt.patch_grid(model, clean, (CORRUPTED,), "h", jnp.sum, axis=0)
    assert grid.effects.shape == (3, 3)
    mask = jnp.zeros(3, bool).at[2].set(True)
    change = edits.replace(clean["h"].value).at(1).where(mask)
    found = jnp.sum(tt.edit(model, {"h": change})(CORRUPTED)) - grid.baseline
    np.testing.assert_allclose(grid.effects[1, 2], found, rtol=1e-4, atol=1e-5)


def test_a_grid_is_one_program_and_one_look():
    traces = []

    def fn(x):
        traces.append(1)
        return model(x)

    clean = record_of(model, CLEAN)
    grid = tt.patch_grid(fn, clean, (CORRUPTED,), "**", jnp.sum)
    assert len(traces) == 1
    assert len(grid.effects) == 5


def test_a_mapped_function_is_patched_as_the_function_sees_it():
    batch = jnp.stack([CLEAN, CLEAN + 1, CLEAN * 2, -CLEAN])
    worse = jnp.roll(batch, 1, axis=1)
    mapped = jax.vmap(model)
    for axis, shape in ((None, (5,)), (0, (5, 3))):
        whole = tt.patch_grid(
            mapped, record_of(mapped, batch), (worse,), "**", jnp.sum, axis=axis
        )
        assert whole.effects.shape == shape
        assert whole.places == ("h[0]", "h[1]", "h[2]", "square", "cosine")
        rows = [
            tt.patch_grid(model, record_of(model, x), (y,), "**", jnp.sum, axis=axis)
            for x, y in zip(batch, worse)
        ]
        total = jnp.sum(jnp.stack([row.effects for row in rows]), 0)
        np.testing.assert_allclose(whole.effects, total, rtol=1e-4, atol=1e-4)
        one = tt.attribution(
            mapped, record_of(mapped, batch), (worse,), "**", jnp.sum, axis=axis
        )
        rows = [
            tt.attribution(model, record_of(model, x), (y,), "**", jnp.sum, axis=axis)
            for x, y in zip(batch, worse)
        ]
        total = jnp.sum(jnp.stack([row.effects for row in rows]), 0)
        np.testing.assert_allclose(one.effects, total, rtol=1e-4, atol=1e-4)


def test_attribution_is_the_difference_times_the_gradient():
    clean = record_of(model, CLEAN)
    found = tt.attribution(model, clean, (CORRUPTED,), "**", jnp.sum, axis=0)
    (_, _), worse = tt.observe(
        jax.value_and_grad(lambda x: jnp.sum(model(x))), grads=True
    )(CORRUPTED)
    wanted = [
        (clean[name].value - worse[name].value) * worse[name].grad
        for name in ("h", "square", "cosine")
    ]
    wanted = jnp.concatenate([jnp.reshape(x, (-1, 3)) for x in wanted])
    np.testing.assert_allclose(found.effects, wanted, rtol=1e-5)


def test_attribution_is_exact_where_all_is_linear():
    def linear(x):
        def step(carry, w):
            return tt.tap(carry * w, "h") + carry, None

        return tt.tap(jax.lax.scan(step, x, jnp.array([1.0, 2.0]))[0], "out")

    clean = record_of(linear, CLEAN)
    for axis in (None, -1):
        arguments = linear, clean, (CORRUPTED,), "**", jnp.sum
        exact = tt.patch_grid(*arguments, axis=axis)
        found = tt.attribution(*arguments, axis=axis)
        assert found.places == exact.places
        np.testing.assert_allclose(found.effects, exact.effects, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found.baseline, exact.baseline, rtol=1e-6)


class Sower(tt.Module):
    def __call__(self, x):
        self.sow(tt.Intermediate, "x", x)
        return {"a": x, "b": tt.tap(x, "b")}


def test_bad_patches_are_refused():
    clean = record_of(model, CLEAN)
    with pytest.raises(tt.CaptureError, match="matches none of 3 sites"):
        tt.patch_grid(model, clean, (CORRUPTED,), "g", jnp.sum)
    with pytest.raises(tt.CaptureError, match=r"h has the shape \(3,\), and no axis 1"):
        tt.patch_grid(model, clean, (CORRUPTED,), "h", jnp.sum, axis=1)
    sown = record_of(Sower(), CLEAN)
    with pytest.raises(tt.CaptureError, match="attribution: x is sow of 1 arrays"):
        tt.attribution(Sower(), sown, (CORRUPTED,), "x", jnp.sum)
    with pytest.raises(tt.CaptureError, match="is output of 2 arrays"):
        tt.patch_grid(Sower(), sown, (CORRUPTED,), "__call__", jnp.sum)

    def uneven(x):
        return tt.tap(x, "x").sum() + tt.tap(x[:2], "y").sum()

    with pytest.raises(tt.CaptureError, match="different sizes along axis 0"):
        tt.patch_grid(
            uneven, record_of(uneven, CLEAN), (CORRUPTED,), "**", jnp.sum, axis=0
        )
    grid = tt.patch_grid(model, clean, (CORRUPTED,), "h", lambda out: out[None, None])
    with pytest.raises(tt.CaptureError, match="not a single number"):
        grid.top()


@jax.custom_vjp
def times_two(x):
    return x * 2


times_two.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 100,))


def test_a_grid_that_is_differentiated_keeps_the_rules_of_functions():
    def fn(x):
        return times_two(tt.tap(x, "x")) + x

    clean = record_of(fn, CLEAN)

    def effect(x):
        return tt.patch_grid(fn, clean, (x,), "x", jnp.sum).baseline

    np.testing.assert_allclose(jax.grad(effect)(CORRUPTED), 101.0)
    np.testing.assert_allclose(jax.jit(effect)(CORRUPTED), effect(CORRUPTED))
    found = jax.vmap(effect)(jnp.stack([CORRUPTED, CLEAN]))
    np.testing.assert_allclose(found[0], effect(CORRUPTED), rtol=1e-6)


def test_clean_values_are_read_in_each_call():
    _, record = tt.observe(lambda x: tt.tap(x, "x") * 1)(CLEAN)
    value = np.array(record["x"].value)
    clean = tt.Record((dataclasses.replace(record["x"], value=value),))
    found = []
    for factor in (1, 3):
        value *= factor
        grid = tt.patch_grid(
            lambda x: tt.tap(x, "x") * 1, clean, (jnp.zeros(3),), "x", jnp.sum
        )
        found.append(float(grid.effects[0]))
    np.testing.assert_allclose(found, [CLEAN.sum(), 3 * CLEAN.sum()], rtol=1e-5)
