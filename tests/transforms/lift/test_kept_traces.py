# SPDX-License-Identifier: Apache-2.0
"""How often branches, loops and remat trace a function, and when again."""

import gc
import weakref

import jax.numpy as jnp
import pytest

import treetap as tt
from modes import ALL_MODES

pytestmark = pytest.mark.keeps_traces

traced: list[str] = []
scale = 2.0
shared = tt.Param(jnp.array(1.0))


class Model(tt.Module):
    def __init__(self):
        self.x = tt.Param(jnp.array(2.0))


def grow(model):
    traced.append("grow")
    model.x[...] += 1
    return model.x[...] * 1


def keep(model):
    traced.append("keep")
    return model.x[...] * 1


def is_small(model):
    traced.append("test")
    return model.x < 5


def grown(model):
    grow(model)
    return model


def scaled(x):
    traced.append("scaled")
    return x * scale


def shifted(x):
    return x + shared[...]


def helped(x):
    return shifted(x) * 1


CALLS = {
    "cond": lambda model, mode: tt.cond(model.x > 4, keep, grow, model, **mode),
    "switch": lambda model, mode: tt.switch(1, [keep, grow], model, **mode),
    "while": lambda model, mode: tt.while_loop(is_small, grown, model, **mode),
    "remat": lambda model, mode: tt.remat(grow, **mode)(model),
}


@ALL_MODES
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_five_eager_calls_trace_each_function_once(call, mode):
    model = Model()
    traced.clear()
    for _ in range(5):
        call(model, mode)
    assert len(traced) == len(set(traced))
    assert float(model.x) >= 5.0


def test_each_kind_of_value_has_a_trace_of_its_own():
    traced.clear()
    for x in (jnp.ones(2), jnp.ones(3), jnp.ones(2)):
        assert tt.cond(True, scaled, scaled, x).shape == x.shape
    assert len(traced) == 2


@pytest.mark.parametrize("fn", [shifted, helped])
def test_variables_from_outside_are_read_in_each_call(fn):
    shared[...] = 1.0
    rematted, loop = tt.remat(fn), tt.scan(lambda c, t: (fn(c), t))
    for value in (1.0, 5.0):
        shared[...] = value
        one = jnp.array(0.0)
        assert float(tt.cond(True, fn, fn, one)) == value
        assert float(rematted(one)) == value
        assert float(tt.fori_loop(0, 2, lambda i, c: fn(c), one)) == 2 * value
        assert float(loop(one, jnp.arange(2.0))[0]) == 2 * value


def test_what_a_function_sees_from_outside_belongs_to_it(monkeypatch):
    assert float(tt.cond(True, scaled, scaled, 1.0)) == 2.0
    monkeypatch.setitem(globals(), "scale", 7.0)
    assert float(tt.cond(True, scaled, scaled, 1.0)) == 7.0
    factor = 3.0

    def times(x):
        return x * factor

    assert float(tt.cond(True, times, times, 1.0)) == 3.0
    factor = 4.0
    assert float(tt.cond(True, times, times, 1.0)) == 4.0


def test_functions_are_not_kept_alive():
    def branch(model):
        return model.x[...] * 2

    tt.cond(True, branch, branch, Model())
    gone = weakref.ref(branch)
    del branch
    gc.collect()
    assert gone() is None


def test_bound_methods_are_traced_in_each_call():
    class Doubling:
        factor = 2.0

        def call(self, x):
            return x * self.factor

    doubling = Doubling()
    assert float(tt.cond(True, doubling.call, doubling.call, 1.0)) == 2.0
    doubling.factor = 3.0
    assert float(tt.cond(True, doubling.call, doubling.call, 1.0)) == 3.0
