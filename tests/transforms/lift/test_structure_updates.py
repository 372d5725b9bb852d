# SPDX-License-Identifier: Apache-2.0
"""Graph updates: structure changed inside a transform is changed outside."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import treetap as tt
from treetap import compat, nnx


class Part(tt.Module):
    def __init__(self, w=1.0):
        self.w = tt.Param(jnp.array(w))


class Model(tt.Module):
    def __init__(self):
        self.a = Part(1.0)
        self.b = Part(2.0)
        self.parts = tt.List([Part(3.0)])
        self.table = tt.Dict(n=tt.Variable(jnp.array(4.0)))
        self.scale = tt.data(jnp.array(5.0))
        self.kind = "plain"


def sharded(f):
    mesh = jax.make_mesh((1,), ("d",), devices=jax.devices()[:1])
    return compat.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P())


def beside_a_gradient(f):
    loss = lambda *args: (jnp.zeros(()), f(*args))
    return lambda *args: compat.grad(loss, has_aux=True)(*args)[1]


def beside_a_pullback(f):
    loss = lambda *args: (jnp.zeros(()), f(*args))
    return lambda *args: compat.vjp(loss, *args, has_aux=True)[2]


def with_a_rule(f):
    ruled = compat.custom_vjp(f)
    ruled.defvjp(lambda *args: (f(*args), None), lambda residual, g: None)
    return ruled


def broadcast(f):
    return compat.vmap(f, in_axes=None, out_axes=None, axis_size=2)


# Each transform as a function from `f` to a function that does what `f` does.
WRAPS = {
    "jit": compat.jit,
    "remat": compat.remat,
    "vmap": broadcast,
    "shard_map": sharded,
    "grad": beside_a_gradient,
    "vjp": beside_a_pullback,
    "custom_vjp": with_a_rule,
    "cond": lambda f: lambda *args: compat.cond(True, f, f, *args),
    "switch": lambda f: lambda *args: compat.switch(1, [f, f], *args),
    "checkify": lambda f: lambda *args: compat.checkify(f)(*args)[1],
    "jit of jit": lambda f: compat.jit(compat.jit(f)),
    "jit of grad": lambda f: compat.jit(beside_a_gradient(f)),
    "jit of vmap": lambda f: compat.jit(broadcast(f)),
    "vmap of jit": lambda f: broadcast(compat.jit(f)),
    "grad of remat": lambda f: beside_a_gradient(compat.remat(f)),
}
EVERY = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)


@EVERY
def test_swapped_objects_are_swapped_outside(wrap):
    def swap(m):
        m.a, m.b = m.b, m.a

    model = Model()
    a, b, w = model.a, model.b, model.a.w.get_raw_value()
    wrap(swap)(model)
    assert model.a is b
    assert model.b is a
    assert a.w.get_raw_value() is w or wrap is sharded


@EVERY
def test_new_attributes_appear(wrap):
    def grow(m):
        m.c = Part(m.a.w * 3)
        m.c.deep = tt.Dict(v=tt.BatchStat(m.b.w * 10))
        m.note = "new"

    model = Model()
    a = model.a
    wrap(grow)(model)
    assert (type(model.c), float(model.c.w)) == (Part, 3.0)
    assert (type(model.c.deep.v), float(model.c.deep.v)) == (tt.BatchStat, 20.0)
    assert model.note == "new"
    assert model.a is a


@EVERY
def test_removed_attributes_are_gone(wrap):
    def prune(m):
        del m.a, m.kind, m.scale

    model = Model()
    b = model.b
    wrap(prune)(model)
    assert sorted(vars(model)) == sorted(set(vars(Model())) - {"a", "kind", "scale"})
    assert model.b is b


@EVERY
def test_static_attributes_and_plain_arrays_change(wrap):
    def change(m):
        m.kind = "other"
        m.scale = m.scale * m.a.w

    model = Model()
    model.a.w[...] = jnp.array(7.0)
    wrap(change)(model)
    assert (model.kind, float(model.scale)) == ("other", 35.0)


@EVERY
def test_an_attribute_may_become_another_kind_of_thing(wrap):
    def change(m):
        m.a = tt.Dict(x=m.a)
        m.scale = tt.static("text")
        m.kind = tt.data(tt.Param(jnp.array(9.0)))

    model = Model()
    a = model.a
    wrap(change)(model)
    assert type(model.a) is tt.Dict
    assert model.a.x is a
    assert model.scale == "text"
    assert float(model.kind) == 9.0


@EVERY
def test_an_object_may_come_to_hold_itself(wrap):
    def close(m):
        m.me = m
        m.a.up = m

    model = Model()
    wrap(close)(model)
    assert model.me is model
    assert model.a.up is model
    assert float(model.me.a.up.b.w) == 2.0


@EVERY
def test_new_shared_references_are_shared_outside(wrap):
    def share(m):
        m.one = m.two = tt.Param(m.a.w * 6)
        m.again = m.a
        m.inner = m.b.w
        m.inner[...] = m.inner * 2

    model = Model()
    a, w = model.a, model.b.w
    wrap(share)(model)
    assert model.one is model.two
    assert float(model.one) == 6.0
    assert model.again is model.a is a
    assert model.inner is model.b.w is w
    assert float(w) == 4.0


@EVERY
def test_a_replaced_variable_is_a_new_one(wrap):
    def replace(m):
        m.a.w = tt.BatchStat(m.a.w + 1)

    model = Model()
    a, old = model.a, model.a.w
    wrap(replace)(model)
    assert model.a is a
    assert (type(a.w), float(a.w), float(old)) == (tt.BatchStat, 2.0, 1.0)


@EVERY
def test_parts_move_from_one_argument_to_another(wrap):
    def move(one, two):
        two.a = one.a
        del one.a
        two.a.w[...] = two.a.w + two.b.w

    one, two = Model(), Model()
    a = one.a
    wrap(move)(one, two)
    assert two.a is a
    assert not hasattr(one, "a")
    assert float(a.w) == 3.0


@EVERY
def test_an_input_is_returned_as_itself(wrap):
    model = Model()
    found = wrap(lambda m: [m.a, {"whole": m, "w": m.b.w}])(model)
    assert found[0] is model.a
    assert found[1]["whole"] is model
    assert found[1]["w"] is model.b.w


@EVERY
def test_a_new_object_returned_and_kept_is_one(wrap):
    def grow(m):
        m.c = Part(8.0)
        return m.c, m.c.w

    model = Model()
    part, w = wrap(grow)(model)
    assert model.c is part
    assert part.w is w
    assert float(w) == 8.0


@EVERY
def test_containers_change_in_place(wrap):
    def change(m):
        m.parts.append(Part(m.a.w * 30))
        m.parts.append(m.parts.pop(0))
        m.table["k"] = tt.Variable(m.a.w * 40)
        del m.table["n"]

    model = Model()
    parts, table, first = model.parts, model.table, model.parts[0]
    wrap(change)(model)
    assert model.parts is parts
    assert model.table is table
    assert [float(part.w) for part in parts] == [30.0, 3.0]
    assert parts[1] is first
    assert list(table) == ["k"]
    assert float(table["k"]) == 40.0


@EVERY
def test_plain_lists_and_dicts_in_attributes_change(wrap):
    def change(m):
        m.held["list"].append(m.held["list"][0])
        m.held["new"] = jnp.array(2.0)

    model = tt.Dict(held=tt.data({"list": [tt.Param(jnp.array(1.0))]}))
    given = model.held["list"][0]
    wrap(change)(model)
    assert [v is given for v in model.held["list"]] == [True, True]
    assert float(model.held["new"]) == 2.0


@EVERY
def test_cycles_pass_and_can_be_cut(wrap):
    def cut(m):
        assert m.a.up is m
        m.a.w[...] = m.a.up.b.w * 5
        m.a.up = m.b

    model = Model()
    model.a.up = model
    wrap(cut)(model)
    assert model.a.up is model.b
    assert float(model.a.w) == 10.0


@EVERY
def test_objects_that_are_no_pytrees_pass(wrap):
    class Plain(nnx.Module, pytree=False):
        def __init__(self):
            self.w = nnx.Param(jnp.array(1.0))

    def change(m):
        m.w[...] = m.w + 1
        m.extra = Plain()
        return m

    model = Plain()
    assert wrap(change)(model) is model
    assert float(model.w) == 2.0
    assert (type(model.extra), float(model.extra.w)) == (Plain, 1.0)


@EVERY
def test_what_did_not_change_keeps_its_objects_and_arrays(wrap):
    def change(m):
        m.a.note = 1

    model = Model()
    variables = [model.a.w, model.b.w, model.parts[0].w, model.table.n]
    arrays = [v.get_raw_value() for v in variables]
    scale, parts = model.scale, model.parts
    wrap(change)(model)
    assert model.a.note == 1
    found = [model.a.w, model.b.w, model.parts[0].w, model.table.n]
    assert all(one is two for one, two in zip(found, variables))
    are_same = [v.get_raw_value() is array for v, array in zip(found, arrays)]
    assert all(are_same) or wrap is sharded  # which puts all of them in their places
    assert model.scale is scale or wrap is sharded
    assert model.parts is parts


@EVERY
def test_an_exception_changes_nothing(wrap):
    def change(m):
        m.a, m.b = m.b, m.a
        m.parts.append(Part())
        m.kind = "other"
        m.scale = m.scale * 2
        m.b.w[...] = m.b.w * 2
        m.b.w.set_metadata(role="new")
        raise KeyError("inside")

    model = Model()
    a, scale, w = model.a, model.scale, model.a.w.get_raw_value()
    with pytest.raises(KeyError, match="inside"):
        wrap(change)(model)
    assert model.a is a
    assert (len(model.parts), model.kind) == (1, "plain")
    assert model.scale is scale
    assert a.w.get_raw_value() is w
    assert "role" not in a.w.get_metadata()


@EVERY
def test_a_captured_object_cannot_be_put_into_an_argument(wrap):
    outer = Part()

    def keep(m):
        m.c = outer

    model = Model()
    text = "Cannot extract graph node from different trace level"
    with pytest.raises(ValueError, match=text):
        wrap(keep)(model)
    assert not hasattr(model, "c")


@EVERY
@pytest.mark.parametrize("kind", ["variable", "module"])
def test_a_captured_object_cannot_be_returned(wrap, kind):
    outer = Part()
    given = outer if kind == "module" else outer.w
    text = "Cannot extract graph node from different trace level"
    with pytest.raises(ValueError, match=text):
        wrap(lambda m: given)(Model())


@pytest.mark.parametrize("kind", ["variable", "module"])
@pytest.mark.parametrize("name", ["jit", "remat", "cond", "checkify"])
def test_a_captured_object_cannot_be_returned_where_no_argument_is_one(name, kind):
    outer = Part()
    given = outer if kind == "module" else outer.w
    text = "Cannot extract graph node from different trace level"
    with pytest.raises(ValueError, match=text):
        WRAPS[name](lambda x: given)(jnp.array(1.0))


@EVERY
def test_an_object_of_a_closure_may_not_be_changed(wrap):
    outer = Model()

    def change(m):
        outer.parts.append(m.a)

    text = "Cannot mutate '.*' from different trace level"
    with pytest.raises(tt.TraceContextError, match=text):
        wrap(change)(Model())
    assert len(outer.parts) == 1


def test_a_transform_inside_may_not_change_an_object_of_a_closure():
    model = Model()

    def grow(m):
        m.note = "new"

    with pytest.raises(tt.TraceContextError, match="Cannot mutate 'Model'"):
        compat.jit(lambda x: compat.jit(grow)(model))(1.0)
    assert not hasattr(model, "note")


@pytest.mark.parametrize("name", ["jit", "vmap"])
def test_a_captured_object_without_variables_is_refused_too(name):
    wrap = WRAPS[name]
    outer = tt.Dict(size=2)

    def keep(m):
        m.c = outer

    text = "extract graph node from different trace level"
    with pytest.raises((ValueError, tt.TraceContextError), match=text):
        wrap(keep)(Model())
    with pytest.raises((ValueError, tt.TraceContextError), match=text):
        wrap(lambda m: outer)(Model())


@pytest.mark.parametrize("name", ["fori_loop", "scan"])
def test_an_object_of_an_outer_level_cannot_be_given_new_arrays(name):
    model = Part()
    model.raw = jnp.ones(2)

    def body(model):
        model.raw = model.raw * 2
        return model

    def call(x):
        mode = {"graph": True, "graph_updates": True}
        if name == "fori_loop":
            made = tt.fori_loop(0, 2, lambda _, model: body(model), model, **mode)
        else:
            axes = {"in_axes": (tt.Carry, 0), "out_axes": (tt.Carry, 0)}
            step = tt.scan(lambda model, x: (body(model), x), **axes, **mode)
            made, _ = step(model, jnp.ones(2))
        return made.raw * x

    with pytest.raises(tt.TraceContextError, match="Cannot mutate 'Part'"):
        jax.jit(call)(1.0)
    assert model.raw.tolist() == [1.0, 1.0]
