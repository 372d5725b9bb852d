# SPDX-License-Identifier: Apache-2.0
"""observe around a compiled function gives what it gives inside of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treetap as tt
from treetap._observe import around_compiled

X = jnp.arange(3.0)


@pytest.fixture(autouse=True)
def _nothing_kept():
    around_compiled._programs.clear()


class Counter(tt.Module):
    def __init__(self):
        self.w = tt.Param(jnp.asarray(2.0))
        self.calls = tt.Variable(jnp.asarray(0))

    def __call__(self, x, factor=1.0):
        self.calls[...] += 1
        return tt.tap(x * self.w[...], "h") * factor


def plain(x, n=2):
    for _ in range(n):
        x = tt.tap(jnp.sin(x), "s")
    return x


def texts(record):
    return [site.text for site in record]


def test_values_sites_and_results_are_those_of_a_compiled_observe():
    out, record = tt.observe(jax.jit(plain))(X)
    expected, inside = jax.jit(tt.observe(plain))(X)
    np.testing.assert_array_equal(out, expected)
    assert texts(record) == texts(inside) == ["s", "s#1"]
    for one, two in zip(record, inside):
        np.testing.assert_array_equal(one.value, two.value)
        assert one.axes == two.axes


def test_a_second_call_traces_nothing():
    traces = []

    @jax.jit
    def fn(x):
        traces.append(1)
        return plain(x)

    observed = tt.observe(fn, "s")
    observed(X)
    count = len(traces)
    assert count <= 2
    observed(X + 1)
    tt.observe(fn, "s")(X * 2)
    assert len(traces) == count


@pytest.mark.parametrize(
    "options", [{"static_argnums": 1}, {"static_argnames": "n"}, {"donate_argnums": 0}]
)
@pytest.mark.parametrize("jit", [jax.jit, tt.jit])
def test_static_and_donated_arguments_are_as_the_function_has_them(jit, options):
    observed = tt.observe(jit(plain, **options))
    is_static = "donate_argnums" not in options
    for n in (2, 3, 2) if is_static else (None, None):
        given = (X + 0,) if n is None else (X + 0, n)
        out, record = observed(*given)
        np.testing.assert_allclose(out, plain(X, n or 2), rtol=1e-6)
        assert len(record) == (n or 2)


def test_an_argument_may_become_static_later():
    @functools.partial(jax.jit, static_argnames="mode")
    def fn(x, mode="sin"):
        return tt.tap(jnp.sin(x) if mode == "sin" else jnp.cos(x), "y")

    observed = tt.observe(fn)
    np.testing.assert_allclose(observed(X)[0], jnp.sin(X), rtol=1e-6)
    np.testing.assert_allclose(observed(X, mode="cos")[0], jnp.cos(X), rtol=1e-6)
    np.testing.assert_allclose(observed(X)[0], jnp.sin(X), rtol=1e-6)


def test_modules_change_as_the_function_changes_them():
    model = Counter()
    step = tt.jit(lambda model, x, factor: model(x, factor))
    observed = tt.observe(step)
    for n in (1, 2, 3):
        model.w[...] = jnp.asarray(float(n))
        out, record = observed(model, X, factor=2.0)
        np.testing.assert_allclose(out, X * n * 2)
        assert int(model.calls) == n
        assert texts(record) == ["__call__", "h"] or "h" in texts(record)
    kept = jax.jit(lambda model, x: model(x))
    tt.observe(kept)(model, X)
    assert int(model.calls) == 3  # JAX's own gives copies


def test_gradients_and_statistics():
    loss = tt.jit(jax.value_and_grad(lambda x: jnp.sum(tt.tap(x * 3, "h") ** 2)))
    observed = tt.observe(loss, grads=True)
    for x in (X, X + 1):
        (_, grads), record = observed(x)
        np.testing.assert_allclose(record["h"].grad, 6 * x)
        np.testing.assert_allclose(grads, 18 * x)
    _, record = tt.observe(jax.jit(plain), reduce=[tt.AbsMax()])(X)
    assert record[0].value is None
    assert "absmax" in "".join(record[0].stats).replace("_", "")


def test_inside_of_something_else_it_is_as_before():
    fn = jax.jit(plain)
    with jax.disable_jit():
        assert texts(tt.observe(fn)(X)[1]) == ["s", "s#1"]
    _, record = jax.vmap(tt.observe(fn))(jnp.stack([X, X]))
    assert record[0].value.shape == (2, 3)
    (_, inner), outer = tt.observe(tt.observe(fn))(X)
    assert texts(inner) == texts(outer)


def test_selectors_may_change_their_mind():
    names = {"a"}
    fn = jax.jit(lambda x: tt.tap(x, "a") + tt.tap(x, "b"))
    observed = tt.observe(fn, lambda site: site.name in names)
    assert texts(observed(X)[1]) == ["a"]
    names.add("b")
    assert texts(observed(X)[1]) == ["a", "b"]
    with pytest.raises(tt.CaptureError, match="matches none of 2 sites"):
        tt.observe(fn, "c")(X)
