# SPDX-License-Identifier: Apache-2.0
"""Graph updates over several calls: traces, aliases, branches, loops, methods."""

import jax.numpy as jnp
import pytest

import treetap as tt
from modes import UPDATES
from treetap import compat, nnx


class Part(tt.Module):
    def __init__(self, w=1.0):
        self.w = tt.Param(jnp.array(w))


class Model(tt.Module):
    def __init__(self):
        self.a = Part(1.0)
        self.b = Part(2.0)
        self.parts = tt.List([Part(3.0)])
        self.scale = tt.data(jnp.array(5.0))


# Tracing again.


def test_a_new_structure_is_traced_once():
    traces = []

    @compat.jit
    def grow(m):
        traces.append(len(m.parts))
        if len(m.parts) < 3:
            m.parts.append(Part(m.a.w))

    model = Model()
    for _ in range(5):
        grow(model)
    assert traces == [1, 2, 3]
    assert len(model.parts) == 3
    other = Model()
    for _ in range(3):
        grow(other)
    assert traces == [1, 2, 3]


def test_swapping_equal_parts_is_never_traced_again():
    traces = []

    @compat.jit
    def swap(m):
        traces.append(1)
        m.a, m.b = m.b, m.a
        m.a.w[...] = m.a.w + 10

    model = Model()
    a, b = model.a, model.b
    for _ in range(3):
        swap(model)
    assert traces == [1]
    assert model.a is b
    assert (float(a.w), float(b.w)) == (11.0, 22.0)


def test_a_shared_reference_is_another_structure():
    traces = []

    @compat.jit
    def share(m):
        traces.append(m.a is m.b)
        m.b = m.a

    model = Model()
    for _ in range(3):
        share(model)
    assert traces == [False, True]
    assert model.b is model.a


def test_the_stages_of_jit_carry_structure_out():
    def grow(m):
        m.c = Part(m.a.w * 2)
        return m.c

    model = Model()
    lowered = compat.jit(grow).lower(model)
    assert compat.jit(grow).eval_shape(model).w.shape == ()
    assert not hasattr(model, "c")
    compiled = lowered.compile()
    part = compiled(model)
    assert model.c is part
    assert float(part.w) == 2.0
    with pytest.raises(TypeError, match="another structure"):
        compiled(model)


# Aliases, branches, loops and methods.


@pytest.mark.parametrize("transform", [compat.vmap, compat.scan])
def test_all_ways_to_a_part_must_agree_on_its_axis(transform):
    part = tt.Dict(w=tt.Param(jnp.ones(2)))
    f = transform(lambda one, two: jnp.zeros(()), in_axes=(0, None), out_axes=0)
    text = r"Inconsistent aliasing detected(.|\n)*Param(.|\n)*: 0\n(.|\n)*: None"
    with pytest.raises(ValueError, match=text):
        f(tt.Dict(p=part), part)


def test_an_object_inside_cannot_be_put_where_it_has_another_axis():
    def move(one, two):
        two.p = one.w

    one, two = tt.Dict(w=tt.Param(jnp.ones(2))), tt.Dict()
    f = compat.vmap(move, in_axes=(0, None), out_axes=0)
    with pytest.raises(ValueError, match="Inconsistent aliasing"):
        f(one, two)
    assert "p" not in two


def test_branches_must_change_structure_alike():
    def grow(m):
        m.c = Part(m.a.w)

    model = Model()
    with pytest.raises(TypeError, match=r"cond: .*different\s+ways"):
        compat.cond(True, grow, lambda m: None, model)
    assert not hasattr(model, "c")


def test_branches_may_put_different_values_into_one_structure():
    def put(factor):
        def grow(m):
            m.c = Part(m.a.w * factor)
            m.scale = m.scale * factor

        return grow

    model = Model()
    compat.switch(jnp.array(1), [put(2), put(3), put(4)], model)
    assert (float(model.c.w), float(model.scale)) == (3.0, 15.0)


def test_loops_give_back_the_object_itself_and_refuse_another_structure():
    def double(i, m):
        m.a.w[...] = m.a.w * 2
        return m

    def grow(i, m):
        m.c = Part()
        return m

    model = Model()
    assert compat.fori_loop(0, 3, double, model) is model
    condition, body = (lambda m: m.a.w < 30), (lambda m: double(0, m))
    assert compat.while_loop(condition, body, model) is model
    assert float(model.a.w) == 32.0
    with pytest.raises(ValueError, match="changed its structure"):
        compat.fori_loop(0, 3, grow, model)
    assert not hasattr(model, "c")


def test_methods_decorated_in_a_class_change_their_object():
    class Growing(nnx.Module):
        def __init__(self):
            self.parts = nnx.List([])

        @nnx.jit
        def grow(self, w):
            self.parts.append(Part(w))
            return self

        @nnx.remat
        def count(self):
            self.size = len(self.parts)

    growing = Growing()
    assert growing.grow(1.0).grow(2.0) is growing
    growing.count()
    assert [float(part.w) for part in growing.parts] == [1.0, 2.0]
    assert growing.size == 2


def test_the_settings_and_the_options_choose_the_mode():
    def grow(m):
        m.note = "new"

    with tt.set_graph_mode(True), tt.set_graph_updates(True):
        f = tt.jit(grow)
    for wrapped in (f, tt.jit(grow, **UPDATES), nnx.jit(grow)):
        model = Model()
        wrapped(model)
        assert model.note == "new"
    model = Model()
    nnx.jit(grow, graph_updates=False, on_structure_change="ignore")(model)
    assert not hasattr(model, "note")


def test_branches_may_change_different_plain_arrays():
    def one(m):
        m.scale = m.scale * 2

    def two(m):
        m.a.w[...] = m.a.w * 3

    model = Model()
    compat.cond(jnp.array(True), one, two, model)
    assert (float(model.scale), float(model.a.w)) == (10.0, 1.0)
    compat.cond(jnp.array(False), one, two, model)
    assert (float(model.scale), float(model.a.w)) == (10.0, 3.0)


@pytest.mark.parametrize("name", ["scan", "fori_loop", "while_loop"])
def test_a_plain_array_of_a_carried_object_is_carried(name):
    def add(m):
        m.scale = m.scale + m.a.w
        return m

    model = Model()
    loops = {
        "scan": lambda: compat.scan(lambda m, x: (add(m), x))(model, jnp.arange(3.0)),
        "fori_loop": lambda: compat.fori_loop(0, 3, lambda i, m: add(m), model),
        "while_loop": lambda: compat.while_loop(lambda m: m.scale < 8, add, model),
    }
    loops[name]()
    assert float(model.scale) == 8.0


def test_a_static_attribute_of_an_object_carried_by_scan_may_change():
    def step(m, x):
        m.note = "seen"
        return m, x

    model = Model()
    model.note = "fresh"
    back, _ = compat.scan(step)(model, jnp.arange(3.0))
    assert back is model
    assert model.note == "seen"


@pytest.mark.parametrize("grows", [False, True])
def test_donated_objects_end_with_live_arrays(grows):
    def f(m):
        if grows:
            m.note = "new"
        m.a.w[...] = m.a.w + 1

    model = Model()
    given = model.a.w[...]
    step = compat.jit(f, donate_argnums=0)
    for _ in range(3):
        step(model)
    assert given.is_deleted()
    assert (float(model.scale), float(model.a.w), float(model.b.w)) == (5.0, 4.0, 2.0)
    assert hasattr(model, "note") == grows


@pytest.mark.parametrize("axis", [0, None])
def test_a_mapped_argument_may_hold_another_that_gets_something_new(axis):
    def join(one, two):
        one.other = two
        two.made = tt.Param(two.w * 3)

    one, two = tt.Dict(), tt.Dict(w=tt.Param(jnp.arange(2.0)))
    compat.vmap(join, in_axes=axis, axis_size=2)(one, two)
    assert one.other is two
    assert two.made[...].tolist() == [0.0, 3.0]


class Weighted(tt.Module):
    def __init__(self):
        self.w = tt.Param(jnp.array(3.0))
        self.offset = tt.data(jnp.array(1.0))
        self.kind = "plain"

    def double(self):
        return self.w * 2


@pytest.mark.parametrize(
    "decorator",
    [compat.jit, compat.remat, compat.vmap(in_axes=0)],
    ids=["jit", "remat", "vmap"],
)
def test_a_wrapped_constructor_method_works_with_graph_updates(decorator):
    class Wrapped(tt.Module):
        @decorator
        def __init__(self, x):
            self.w = tt.Param(x * 2)
            self.kind = "wrapped"

    model = Wrapped(jnp.arange(3.0))
    assert model.w[...].tolist() == [0.0, 2.0, 4.0]
    assert model.kind == "wrapped"


def create(model):
    model.extra = tt.Param(1.0)


def replace(model):
    model.offset = model.offset + 1


def remove(model):
    del model.w


CALLS = {
    "jit": lambda f, model, mode: tt.jit(f, **mode)(model),
    "vmap": lambda f, model, mode: tt.vmap(f, in_axes=None, axis_size=2, **mode)(model),
    "remat": lambda f, model, mode: tt.remat(f, **mode)(model),
    "grad": lambda f, model, mode: tt.grad(
        lambda model: (f(model), model.offset * 1)[1], **mode
    )(model),
    "cond": lambda f, model, mode: tt.cond(True, f, f, model, **mode),
    "scan": lambda f, model, mode: tt.scan(
        lambda model, x: (f(model), x)[1], in_axes=(None, 0), out_axes=0, **mode
    )(model, jnp.arange(2.0)),
    "fori_loop": lambda f, model, mode: tt.fori_loop(
        0, 2, lambda i, model: (f(model), model)[1], model, **mode
    ),
    "checkify": lambda f, model, mode: tt.checkify(f, **mode)(model),
}


@pytest.mark.parametrize("name", [name for name in CALLS if name != "fori_loop"])
def test_changed_static_attributes_arrive_with_graph_updates(name):
    def change(model):
        model.kind = "other"

    model = Weighted()
    CALLS[name](change, model, UPDATES)
    assert model.kind == "other"


@pytest.mark.parametrize("name", ["jit", "vmap", "remat", "grad", "cond", "checkify"])
def test_changed_data_attributes_arrive_with_graph_updates(name):
    model = Weighted()
    w = model.w
    CALLS[name](create, model, UPDATES)
    assert (type(model.extra), float(model.extra)) == (tt.Param, 1.0)
    CALLS[name](replace, model, UPDATES)
    assert float(model.offset) == 2.0
    assert model.w is w
    CALLS[name](remove, model, UPDATES)
    assert not hasattr(model, "w")


@pytest.mark.parametrize("change", [create, replace])
def test_a_scan_has_no_place_for_a_new_array_in_what_it_does_not_map(change):
    model = Weighted()
    with pytest.raises(ValueError, match=r"scan: an object on axis None got a new"):
        CALLS["scan"](change, model, UPDATES)
    assert sorted(vars(model)) == sorted(vars(Weighted()))
    assert float(model.offset) == 1.0
