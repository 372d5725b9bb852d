# SPDX-License-Identifier: Apache-2.0
"""Marks: values under `checkpoint`: computed again, and the same numbers throughout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treetap as tt

X = jnp.array([0.3, 0.7])
WEIGHTS, ROWS = jnp.ones((48, 64, 64)) / 64, jnp.ones((32, 64))

near = np.testing.assert_allclose


def step(x):
    h = tt.tap(jnp.sin(x) * x, "h")
    return jnp.exp(h) * h


def scanned(step):
    body = lambda x, _: (step(x) * 0.3, None)
    return lambda x: jax.lax.scan(body, x, None, length=4)[0]


def first(fn):
    return jax.grad(lambda x: (fn(x) ** 2).sum())


def second(fn):
    return jax.grad(lambda x: (first(fn)(x) ** 2).sum())


def dots(fn):
    return jax.checkpoint(fn, policy=jax.checkpoint_policies.dots_saveable)


REMATS = {
    "remat": jax.checkpoint,
    "remat of remat": lambda fn: jax.checkpoint(jax.checkpoint(fn)),
    "jit of remat": lambda fn: jax.jit(jax.checkpoint(fn)),
    "policy": dots,
}


@pytest.mark.parametrize("name", REMATS)
@pytest.mark.parametrize("grad", [first, second])
@pytest.mark.parametrize("place", ["around", "inside"])
def test_values_and_gradients_are_those_without_checkpoint(name, grad, place):
    wrap = REMATS[name]
    fn = wrap(scanned(step)) if place == "around" else scanned(wrap(step))
    out, record = tt.observe(grad(fn), grads=True)(X)
    same, plain = tt.observe(grad(scanned(step)), grads=True)(X)
    near(out, same, rtol=1e-4)
    assert len(record) == len(plain) == 1
    near(record["h"].value, plain["h"].value, rtol=1e-4)
    pairs = zip(
        jax.tree.leaves(record["h"].grad),
        jax.tree.leaves(plain["h"].grad),
        strict=True,
    )
    for value, expected in pairs:
        near(value, expected, rtol=1e-3, atol=1e-5)


class Perturbing(tt.Module):
    def __call__(self, x):
        h = self.perturb("h", jnp.sin(x))
        return (jnp.exp(h) * h).sum()


@pytest.mark.parametrize("jitted", [False, True])
def test_what_is_added_to_a_value_is_added_when_it_is_computed_again(jitted):
    model = Perturbing()
    wrap = jax.jit if jitted else lambda fn: fn
    init = tt.State({"h": tt.Perturbation(jnp.array([0.5, -0.5]))})

    def captured(remat):
        call = remat(lambda model, x: model(x))
        fn = wrap(jax.grad(call, argnums=1))
        return tt.capture(fn, tt.Perturbation, init=init)(model, X)[0]

    def by_hand(x):
        h = jnp.sin(x) + jnp.array([0.5, -0.5])
        return (jnp.exp(h) * h).sum()

    near(captured(jax.checkpoint), jax.grad(by_hand)(X), rtol=1e-5)
    near(captured(lambda fn: fn), jax.grad(by_hand)(X), rtol=1e-5)


def test_a_mapped_value_is_computed_again():
    fn = jax.vmap(first(jax.checkpoint(lambda x: step(x[None]))))
    _, record = tt.observe(fn, grads=True)(X)
    _, plain = tt.observe(jax.vmap(first(lambda x: step(x[None]))), grads=True)(X)
    near(record["h"].grad, plain["h"].grad, rtol=1e-5)
    near(record["h"].value, plain["h"].value, rtol=1e-6)


def test_nested_captures_hear_a_value_once_each():
    inner = tt.observe(first(jax.checkpoint(step)), grads=True)
    (_, seen), record = tt.observe(inner)(X)
    near(seen["h"].value, record["h"].value)
    near(seen["h"].grad, tt.observe(first(step), grads=True)(X)[1]["h"].grad)


def memory(fn):
    used = jax.jit(fn).lower(WEIGHTS, ROWS).compile().memory_analysis()
    return used.temp_size_in_bytes + used.output_size_in_bytes


@pytest.mark.parametrize("place", ["around", "inside"])
def test_marked_values_are_not_kept_for_the_backward_pass(place):
    def block(x, w):
        h = tt.tap(jnp.tanh(x @ w), "h")
        return tt.tap(jnp.sin(h) @ w, "out"), None

    inside = jax.checkpoint(block) if place == "inside" else block

    def deep(weights, x):
        return jax.lax.scan(inside, x, weights)[0]

    whole = jax.checkpoint(deep) if place == "around" else deep
    grad = jax.grad(lambda weights, x: whole(weights, x).sum())
    options = {"reduce": [tt.AbsMax()], "grads": True}
    assert memory(tt.observe(grad, **options)) < 1.1 * memory(grad)


def test_statistics_of_second_derivatives_that_come_in_parts_are_refused():
    fn = second(jax.checkpoint(step))
    with pytest.raises(tt.CaptureError, match="comes in parts"):
        tt.observe(fn, grads=True, reduce=[tt.AbsMax()])(X)


def test_a_linear_value_that_is_computed_again_may_be_transposed():
    fn = jax.checkpoint(lambda x, v: x * tt.tap(v * 2, "h"))

    def call(v):
        slope = lambda v: jax.grad(fn)(3.0, v)
        return jax.linear_transpose(slope, v)(5.0)[0]

    assert float(tt.observe(call)(1.0)[0]) == call(1.0) == 10.0


def test_second_derivatives_under_two_checkpoints_are_refused():
    fn = second(lambda x: jax.checkpoint(lambda x: jax.checkpoint(step)(x) * x)(x))
    with pytest.raises(tt.CaptureError, match=r"under a `checkpoint` inside another"):
        tt.observe(fn, grads=True)(X)
    near(tt.observe(fn)(X)[0], fn(X), rtol=1e-5)


def test_second_derivatives_of_which_one_part_is_mapped_are_refused():
    fn = jax.checkpoint(lambda w: jnp.sin(tt.tap(jnp.sin(w), "h")))

    def both(w, x):
        out, pull = jax.vjp(fn, w)
        return out + x * pull(1.0)[0]

    slopes = jax.vmap(jax.grad(both), (None, 0))
    args = jnp.array(0.5), X
    with pytest.raises(tt.CaptureError, match=r"'h' comes in parts.*mapped in one of"):
        tt.observe(slopes, grads=True)(*args)
    out, record = tt.observe(slopes)(*args)
    near(out, slopes(*args), rtol=1e-6)
    near(record["h"].value, jnp.sin(0.5), rtol=1e-6)
