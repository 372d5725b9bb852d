# SPDX-License-Identifier: Apache-2.0
"""What was compiled serves the next call, and never one that is different."""

import functools
import logging
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treetap as tt
from treetap._observe import kept_programs

X, Y = jnp.arange(6.0).reshape(2, 3), jnp.ones((2, 3))
COMPILED = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, _, **__: (
        COMPILED.append(name) if name.endswith("backend_compile_duration") else None
    )
)


@pytest.fixture(autouse=True)
def _nothing_kept():
    for cache in (kept_programs._kept, kept_programs._seen, kept_programs._told):
        cache.clear()


class Net(tt.Module):
    def __init__(self, seed):
        self.inner = tt.Linear(3, 3, rngs=tt.Rngs(seed))
        self.scale = [1.0]

    def __call__(self, x):
        return jnp.sin(self.inner(x)) * self.scale[0]


def first(out):
    return out[0, 0]


def is_inner(site):
    return site.path[-1:] == ("inner",)


def effect(fn, x, metric=first, tool=tt.patch_grid):
    """The effect of the patch of a site, and whether something compiled for it."""
    _, clean = tt.observe(fn, is_inner)(Y * 2)
    del COMPILED[:]
    grid = tool(fn, clean, (x,), "**", metric)
    return float(grid.effects[0]), bool(COMPILED)


def expected(fn, x, metric=first):
    _, clean = tt.observe(fn, is_inner)(Y * 2)
    patched = tt.edit(fn, {is_inner: clean[0]})(x)
    return float(metric(patched) - metric(fn(x)))


MODEL = Net(0)


def test_other_numbers_prompts_and_models_compile_nothing():
    for tool in (tt.patch_grid, tt.attribution):
        for n, (seed, x) in enumerate([(0, X), (0, Y), (1, X), (2, X + 1)]):
            model = Net(seed)
            found, compiled = effect(model, x, tool=tool)
            assert compiled == (n == 0)
            if tool is tt.patch_grid:
                np.testing.assert_allclose(found, expected(model, x), rtol=1e-4)


def closing_over(model):
    return lambda x: model(x)


def test_a_model_that_is_closed_over_is_an_argument():
    model = Net(0)
    before, _ = effect(closing_over(model), X)
    model.inner.kernel[...] *= 0.5
    after, compiled = effect(closing_over(model), X)
    assert not compiled
    assert after != before
    np.testing.assert_allclose(after, expected(model, X), rtol=1e-4)


def of_the_global(x):
    return MODEL(x)


def test_a_global_model_is_an_argument(monkeypatch):
    found, _ = effect(of_the_global, X)
    np.testing.assert_allclose(found, expected(MODEL, X), rtol=1e-4)
    other = Net(9)
    monkeypatch.setitem(globals(), "MODEL", other)
    found, compiled = effect(of_the_global, X)
    assert not compiled
    np.testing.assert_allclose(found, expected(other, X), rtol=1e-4)


def calling(inner):
    return lambda x: inner(x)


def calling_first(held):
    return lambda x: held["models"][0](x)


@pytest.mark.parametrize(
    "bring",
    [
        lambda model: model.__call__,
        lambda model: functools.partial(lambda m, x: m(x), model),
        lambda model: functools.partial(lambda x, m: m(x), m=model),
        lambda model: jax.vmap(model),
        lambda model: lambda x, m=model: m(x),
        lambda model: lambda x, *, m=model: m(x),
        lambda model: calling(lambda x: model(x)),
        lambda model: calling_first({"models": [model]}),
    ],
)
def test_however_a_model_is_brought_along(bring):
    for n, model in enumerate((Net(0), Net(1))):
        found, compiled = effect(bring(model), X)
        assert compiled == (n == 0)
        np.testing.assert_allclose(found, expected(model, X), rtol=1e-4)


def test_a_function_that_calls_itself():
    def made(model):
        def fn(x, depth=2):
            return model(x) if depth == 0 else fn(x, depth - 1)

        return fn

    for n, model in enumerate((Net(0), Net(1))):
        found, compiled = effect(made(model), X)
        assert compiled == (n == 0)
        np.testing.assert_allclose(found, expected(model, X), rtol=1e-4)


FACTOR = 1.0
FACTORS = types.SimpleNamespace(factor=1.0)


def scaled_by_global(x):
    return MODEL(x) * FACTOR


def scaled_by_attribute(x):
    return MODEL(x) * FACTORS.factor


def helper(x):
    return x * FACTOR


class Reading(Net):
    def __call__(self, x):
        return helper(super().__call__(x))


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: scaled_by_global, ("FACTOR", None)),
        (lambda: scaled_by_attribute, ("FACTORS", "factor")),
        (lambda: Reading(0), ("FACTOR", None)),
    ],
)
def test_what_code_reads_is_never_what_it_was(monkeypatch, make, change):
    name, attribute = change
    before, _ = effect(make(), X)
    if attribute:
        monkeypatch.setattr(globals()[name], attribute, 3.0)
    else:
        monkeypatch.setitem(globals(), name, 3.0)
    after, _ = effect(make(), X)
    np.testing.assert_allclose(after, 3 * before, rtol=1e-4)


def test_static_values_that_change_in_place_are_seen():
    model, factors = Net(0), [1.0]
    fn = lambda x: model(x) * factors[0]
    before, _ = effect(fn, X)
    factors[0] = 2.0
    second, _ = effect(fn, X)
    model.scale[0] = 2.0
    third, _ = effect(fn, X)
    np.testing.assert_allclose([second, third], [2 * before, 4 * before], rtol=1e-4)


def test_metrics_are_the_same_if_their_code_and_closures_are(caplog):
    model = Net(0)

    def reading(place):
        return lambda out: out.ravel()[place]

    for n, place in enumerate([0, 2, 4]):
        found, compiled = effect(model, X, metric=reading(jnp.asarray(place)))
        assert compiled == (n == 0)
        np.testing.assert_allclose(
            found, expected(model, X, reading(place)), rtol=1e-3, atol=1e-6
        )
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "treetap"):
        for place in (0, 2, 4):
            found, compiled = effect(model, X, metric=reading(place))
            assert compiled
            np.testing.assert_allclose(
                found, expected(model, X, reading(place)), rtol=1e-3, atol=1e-6
            )
    (told,) = caplog.records
    assert "patch_grid: compiles anew, since `place` is 2, and was 0" in told.message
    assert "`jnp.asarray`" in told.message


class Opaque:
    """Has what Python does not describe."""

    def __init__(self, model):
        self.models = {1: model}.values()

    def __call__(self, x):
        (model,) = self.models
        return model(x)


def test_what_cannot_be_seen_is_not_kept(caplog):
    model = Net(0)
    for tool in (tt.patch_grid, tt.attribution):
        caplog.clear()
        values = []
        for _ in range(2):
            found, compiled = effect(Opaque(model), X, tool=tool)
            assert compiled
            values.append(found)
            model.inner.kernel[...] *= 0.5
        assert values[0] != values[1]
        (told,) = caplog.records
        assert "compiles anew in each call" in told.message
        assert "float32[3,3]" in told.message


def test_settings_of_jax_are_part_of_a_program():
    model, compiled = Net(0), []
    for precision in ("bfloat16", "highest", "bfloat16"):
        with jax.default_matmul_precision(precision):
            compiled.append(effect(model, X)[1])
            del COMPILED[:]
            assert not tt.blame(model)(X)
            compiled.append(bool(COMPILED))
    assert compiled == [True, True, True, True, False, False]


def test_nothing_that_was_given_is_kept_alive():
    import gc
    import weakref

    model = Net(0)
    fn = closing_over(model)
    effect(fn, X)
    alive = weakref.ref(model)
    array = weakref.ref(model.inner.kernel.get_raw_value())
    del model, fn
    gc.collect()
    assert alive() is None
    assert array() is None


def test_few_programs_are_kept():
    for n in range(kept_programs.MAX_KEPT + 3):
        call = kept_programs.KeptCall("f", (lambda: 0,), n)
        call.run(kept_programs.KeptProgram, lambda program: None)
    assert len(kept_programs._kept) == kept_programs.MAX_KEPT


def test_a_function_that_notes_its_traces_is_traced_once():
    traces = []

    def fn(x):
        traces.append(len(x))
        return tt.tap(MODEL(x), "y")

    _, clean = tt.observe(fn, "y")(Y)
    for tool in (tt.patch_grid, tt.attribution):
        del traces[:]
        for x in (X, Y, X * 2):
            tool(fn, clean, (x,), "y", first)
        assert len(traces) == 1
    assert not tt.blame(fn)(X)
    count = len(traces)
    assert not tt.blame(fn)(Y)
    assert len(traces) == count


def test_functions_that_edit_are_the_same_if_their_code_is():
    fn = jax.jit(lambda x: tt.tap(x * 2, "h") + 1)
    model, factor = Net(0), tt.Variable(jnp.asarray(1.0))

    def by_an_array(n):
        array = jnp.asarray(float(n))
        return lambda h: h * array

    makes = [
        by_an_array,
        lambda n: lambda h: h * factor[...],
        lambda n: lambda h: model.inner.bias[...][0] + n * 0 + h * factor[...],
    ]
    for make in makes:
        for n in (1, 2, 3):
            factor[...] = jnp.asarray(float(n))
            model.inner.bias[...] = jnp.full(3, 10.0 * n)
            jnp.asarray(2.0) * n
            del COMPILED[:]
            out = tt.edit(fn, {"h": make(n)})(jnp.asarray(3.0))
            change = make(n)
            np.testing.assert_allclose(out, change(jnp.asarray(6.0)) + 1)
            if make is not makes[2]:
                assert bool(COMPILED) == (n == 1)
