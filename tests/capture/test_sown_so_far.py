# SPDX-License-Identifier: Apache-2.0
"""`module.__captures__`: what a Module has sown so far, while a capture is open."""

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest

import treetap as tt

I = tt.Intermediate  # noqa: E741 - short, as everywhere in these tests
P = tt.Perturbation
ONE = jnp.array(1.0)


class Layer(tt.Module):
    def __call__(self, x):
        self.sow(I, "x", x)
        self.sow(I, "x", x + 1)
        self.sow(I, "total", x, lambda a, b: a + b, lambda: 10.0)
        x = self.perturb("p", x)
        self.seen(self.__captures__)
        return x

    def __init__(self, seen):
        self.seen = seen


class Model(tt.Module):
    def __init__(self, seen):
        self.first, self.second = Layer(seen), Layer(seen)

    def __call__(self, x):
        assert [held.get_value() for held in self.__captures__] == [{}] * len(
            self.__captures__
        )
        self.sow(I, "top", x)
        return self.second(self.first(x) * 2)


def test_it_is_there_while_a_capture_is_open():
    seen = []
    model = Model(seen.append)
    assert not hasattr(model, "__captures__")
    tt.capture(model, I, P)(ONE)
    assert not hasattr(model, "__captures__")
    (first, bent), (second, _) = seen
    assert (type(first), type(bent)) == (I, P)
    assert first["x"] == (1.0, 2.0)
    assert float(first["total"]) == 11.0
    assert second["x"] == (2.0, 3.0)
    assert float(bent["p"]) == 0.0
    assert "top" not in first.get_value()
    assert vars(model).keys() == {"first", "second"}


def test_there_is_one_for_each_kind_that_is_asked_for():
    seen = []
    tt.capture(Model(seen.append), P)(ONE)
    assert [[type(held) for held in each] for each in seen] == [[P], [P]]
    seen.clear()
    inside = tt.capture(Model(seen.append), I)
    tt.capture(lambda x: inside(x)[0], P)(ONE)  # the inner one is read
    assert [[type(held) for held in each] for each in seen] == [[I], [I]]


def test_a_perturbation_is_what_was_added():
    seen = []
    model = Layer(seen.append)
    _, zeros = tt.capture(model, P)(ONE)
    given = tt.State({"p": P(jnp.array(0.5))})
    tt.capture(model, P, init=given)(ONE)
    assert zeros.p[...] == 0.0
    assert [float(held["p"]) for (held,) in seen] == [0.0, 0.5]


def test_under_jit_values_are_traced_and_do_not_outlive_the_trace():
    seen = []

    def look(held):
        tracer = held[0]["x"][0]
        seen.append((isinstance(tracer, jax.core.Tracer), weakref.ref(tracer)))

    model = Model(look)
    call = tt.jit(lambda model, x: model(x))
    _, sown = tt.capture(call, I)(model, ONE)
    assert sown.first.x[...] == (1.0, 2.0)
    gc.collect()
    assert [(traced, ref()) for traced, ref in seen] == [(True, None)] * 2


class Doubles(tt.Module):
    def __init__(self, seen):
        self.seen = seen

    def __call__(self, x):
        self.sow(I, "x", x)
        out = self.twice(x) + self.twice(x)
        self.seen([held.get_value() for held in self.__captures__])
        return out

    def twice(self, x):
        return {"a": x * 2}["a"]


@pytest.mark.parametrize("wrap", [lambda fn: fn, tt.remat])
def test_outputs_of_methods_are_among_them_if_they_are_captured(wrap):
    seen = []

    class Outer(tt.Module):
        def __init__(self):
            self.inner = Doubles(lambda held: None)

        def __call__(self, x):
            y = wrap(lambda m, x: m.twice(x))(self.inner, x)
            seen.append([held.get_value() for held in self.inner.__captures__])
            self.inner(x)
            seen.append([held.get_value() for held in self.inner.__captures__])
            return y

    _, values, outputs = tt.capture(Outer(), I, method_outputs=P)(ONE)
    assert values["inner"]["x"][...] == (1.0,)
    assert outputs["inner"]["twice"][...] == (2.0, 2.0, 2.0)
    sown, returned = seen[-1]
    assert sown == {"x": (1.0,)}
    inside = 0 if wrap is tt.remat else 1  # of a Module that remat rebuilt, no notes
    assert seen[0] == [{}, {"twice": (2.0,)} if inside else {}]
    assert returned == {"twice": (2.0,) * (2 + inside), "__call__": (4.0,)}
    seen.clear()
    tt.capture(Outer(), I)(ONE)
    assert seen[-1] == [{"x": (1.0,)}]


def test_outputs_are_those_of_the_capture_that_asks():
    seen = []
    inner = tt.capture(Doubles(seen.append), I)
    tt.capture(lambda x: inner(x)[0], method_outputs=P)(ONE)
    assert seen == [[{"x": (1.0,)}]]


def test_a_module_of_another_trace_notes_nothing():
    seen = []
    model = Layer(seen.append)
    out, _ = tt.capture(jax.jit(lambda x: model(x)), I)(ONE)
    assert float(out) == 1.0
    assert seen[0][0].get_value() == {}


def test_it_can_only_be_read():
    def write(held):
        model.__captures__ = ()

    model = Layer(write)
    with pytest.raises(AttributeError, match="no setter"):
        tt.capture(model, I)(ONE)
    said = r"'Layer'.*'__captures__' now: .* as `capture\(module, Intermediate\)"
    with pytest.raises(AttributeError, match=said):
        model.__captures__


def test_who_observes_has_none():
    seen = []

    class Asks(tt.Module):
        def __call__(self, x):
            self.sow(I, "x", x)
            seen.append(hasattr(self, "__captures__"))
            return x

    tt.observe(Asks())(ONE)
    assert seen == [False]
