# SPDX-License-Identifier: Apache-2.0
"""Prefix filters: StateAxes and StateSharding, where they work and where not."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treetap as tt
from modes import SIMPLE_MODES, UPDATES
from treetap import compat, nnx


class Model(tt.Module):
    def __init__(self, size=3):
        self.w = tt.Param(jnp.arange(float(size)))
        self.n = tt.BatchStat(jnp.array(0.0))


def mesh_of_one():
    kinds = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((1,), ("d",), kinds, devices=jax.devices()[:1])


AXES = nnx.StateAxes({nnx.Param: 0, ...: None})


def placed(mesh):
    rows, whole = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())
    return nnx.StateSharding({nnx.Param: rows, ...: whole})


# The objects themselves.


@pytest.mark.parametrize("kind", [nnx.StateAxes, nnx.StateSharding])
def test_rules_may_be_given_as_a_mapping_or_as_pairs(kind):
    one = kind({nnx.Param: 0, ...: None})
    two = kind([(nnx.Param, 0), (..., None)])
    assert one == two
    assert hash(one) == hash(two)
    assert one.filters == (nnx.Param, ...)
    assert one != kind({...: None, nnx.Param: 0})
    assert repr(one).startswith(f"{kind.__name__}(")


def test_axes_and_shardings_of_equal_rules_are_different_things():
    assert nnx.StateAxes({...: 0}) != nnx.StateSharding({...: 0})
    assert nnx.StateAxes({...: 0}).axes == (0,)
    assert nnx.StateSharding({...: 0}).shardings == (0,)


@pytest.mark.parametrize("kind", [nnx.StateAxes, nnx.StateSharding])
def test_a_prefix_filter_is_a_mapping(kind):
    rules = kind({nnx.Param: 0, ...: None})
    assert len(rules) == 2
    assert dict(rules.items()) == {nnx.Param: 0, ...: None}
    assert rules[nnx.Param] == 0
    assert list(rules) == [nnx.Param, ...]


# Axes.


def step(m, x):
    m.w[...] = m.w * x
    m.n[...] = m.n + 1
    return m.w + m.n


STATE = nnx.StateAxes(nnx.State({"w": 0, "n": None}))


@pytest.mark.parametrize("axes", [AXES, STATE], ids=["filters", "a State"])
@pytest.mark.parametrize("jitted", [False, True])
def test_vmap_takes_an_axis_for_each_kind(axes, jitted):
    mapped = compat.vmap(step, in_axes=(axes, None))
    mapped = compat.jit(mapped) if jitted else mapped
    model = Model()
    assert mapped(model, 2.0).tolist() == [1.0, 3.0, 5.0]
    assert model.w[...].tolist() == [0.0, 2.0, 4.0]
    assert float(model.n) == 1.0


def test_the_first_filter_that_takes_a_variable_decides():
    axes = nnx.StateAxes({nnx.PathContains("n"): None, nnx.Variable: 0, nnx.Param: 1})
    model = Model()
    compat.vmap(step, in_axes=(axes, None))(model, 2.0)
    assert model.w[...].tolist() == [0.0, 2.0, 4.0]


def test_filters_see_paths_from_the_object_they_stand_for():
    axes = nnx.StateAxes({lambda path, _: path == ("w",): 0, ...: None})
    model = Model()
    given = {"deep": [model]}
    f = lambda given: step(given["deep"][0], 2.0)
    compat.vmap(f, in_axes=({"deep": [axes]},))(given)
    assert model.w[...].tolist() == [0.0, 2.0, 4.0]


def test_a_new_variable_gets_the_axis_of_its_filter():
    def grow(m, x):
        m.mapped = tt.Param(x)
        m.same = tt.Cache(jnp.array(7.0))
        m.inner = tt.Dict(v=tt.Param(x * 2))

    model = Model()
    compat.vmap(grow, in_axes=(AXES, 0))(model, jnp.arange(3.0))
    assert model.mapped[...].tolist() == [0.0, 1.0, 2.0]
    assert model.inner.v[...].tolist() == [0.0, 2.0, 4.0]
    assert float(model.same) == 7.0


def test_a_result_may_have_an_axis_for_each_kind():
    make = lambda x: (Model(), x)
    axes = nnx.StateAxes({nnx.Param: 1, ...: None})
    model, xs = compat.vmap(make, in_axes=0, out_axes=(axes, 0))(jnp.arange(2.0))
    assert (model.w.shape, model.n.shape) == ((3, 2), ())
    assert xs.tolist() == [0.0, 1.0]
    stacked = nnx.StateAxes({nnx.Param: 1, ...: 0})
    model = compat.scan(lambda x: Model(), in_axes=0, out_axes=stacked)(xs)
    assert (model.w.shape, model.n.shape) == ((3, 2), (2,))


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_pmap_takes_an_axis_for_each_kind():
    model = Model(2)
    out = compat.pmap(step, in_axes=(AXES, None))(model, 3.0)
    assert out.tolist() == [1.0, 4.0]
    assert model.w[...].tolist() == [0.0, 3.0]
    assert float(model.n) == 1.0


def test_a_state_may_be_the_argument():
    model = Model()
    state = nnx.state(model)

    def double(state):
        state["w"][...] = state["w"][...] * 2
        state["n"][...] = state["n"][...] + 1
        return state["w"][...] * 1

    out = compat.vmap(double, in_axes=(AXES,))(state)
    assert out.tolist() == state["w"][...].tolist() == [0.0, 2.0, 4.0]
    assert model.w is state["w"]
    assert float(model.n) == 1.0


def test_an_input_returned_keeps_its_axes():
    model = Model()
    out = compat.vmap(lambda m: m, in_axes=(AXES,), out_axes=AXES)(model)
    assert out is model
    assert model.w[...].tolist() == [0.0, 1.0, 2.0]


# scan.


@pytest.mark.parametrize("axis", [nnx.Carry, None], ids=["Carry", "None"])
def test_scan_carries_one_kind_and_maps_another(axis):
    def add(m, x):
        m.n[...] += m.w * x
        m.w[...] = m.w + 1
        return m.n * 1

    model = Model()
    axes = nnx.StateAxes({nnx.BatchStat: axis, nnx.Param: 0})
    out = compat.scan(add, in_axes=(axes, 0), out_axes=0)(model, jnp.arange(1.0, 4.0))
    assert out.tolist() == [0.0, 2.0, 8.0]
    assert float(model.n) == 8.0
    assert model.w[...].tolist() == [1.0, 2.0, 3.0]


def test_scan_takes_carry_beside_an_axis_for_each_kind():
    def add(total, m):
        m.n[...] += 1
        return total + m.w, m.w * m.n

    model = Model()
    axes = nnx.StateAxes({nnx.BatchStat: nnx.Carry, ...: 0})
    scanned = compat.scan(add, in_axes=(nnx.Carry, axes))
    total, seen = scanned(jnp.array(0.0), model)
    assert float(total) == 3.0
    assert seen.tolist() == [0.0, 2.0, 6.0]
    assert float(model.n) == 3.0


def test_what_a_scan_makes_in_a_mapped_object_is_stacked():
    def grow(m, x):
        m.made = tt.Cache(x * 2)
        m.inner = tt.Dict(v=tt.Cache(jnp.stack([x, x])))
        return x

    model = Model()
    axes = nnx.StateAxes({nnx.Cache: 0, ...: None})
    compat.scan(grow, in_axes=(axes, 0), out_axes=0)(model, jnp.arange(3.0))
    assert model.made[...].tolist() == [0.0, 2.0, 4.0]
    assert model.inner.v.shape == (3, 2)
    assert model.w[...].tolist() == [0.0, 1.0, 2.0]


def test_what_a_scan_makes_where_nothing_is_mapped_is_refused():
    def grow(m, x):
        m.made = tt.Param(x)
        return x

    model = Model()
    axes = nnx.StateAxes({nnx.Param: None, ...: 0})
    model.n = tt.BatchStat(jnp.zeros(3))
    f = compat.scan(grow, in_axes=(axes, 0), out_axes=0)
    with pytest.raises(ValueError, match=r"scan: .*axis None got a new Variable"):
        f(model, jnp.arange(3.0))
    assert not hasattr(model, "made")


@pytest.mark.parametrize("axis", [None, nnx.Carry])
def test_a_result_of_scan_must_be_stacked(axis):
    axes = nnx.StateAxes({nnx.Param: 0, ...: axis})
    with pytest.raises(ValueError, match=r"Cannot broadcast output state\. Got State"):
        compat.scan(lambda x: Model(), in_axes=0, out_axes=axes)


# Shardings.


def test_jit_places_arguments_by_kind():
    def double(m):
        m.w[...] = m.w * 2

    model = Model()
    sharding = placed(mesh_of_one())
    compat.jit(double, in_shardings=(sharding,))(model)
    assert model.w[...].sharding.spec == P("d")
    assert model.n[...].sharding.spec == P()
    assert model.w[...].tolist() == [0.0, 2.0, 4.0]


def test_jit_places_results_by_kind():
    sharding = placed(mesh_of_one())
    model, x = compat.jit(lambda: (Model(), 1.0), out_shardings=(sharding, None))()
    assert model.w[...].sharding.spec == P("d")
    assert model.n[...].sharding.spec == P()
    assert float(x) == 1.0


def test_jit_places_what_is_made_inside_by_kind():
    def grow(m):
        m.made = tt.Param(jnp.arange(2.0))

    model = Model()
    compat.jit(grow, in_shardings=(placed(mesh_of_one()),))(model)
    assert model.made[...].sharding.spec == P("d")
    assert model.made[...].tolist() == [0.0, 1.0]


def test_shard_map_takes_a_specification_for_each_kind():
    specs = nnx.StateSharding({nnx.Param: P("d"), ...: P()})
    options = {"mesh": mesh_of_one(), "in_specs": (specs, P())}
    model = Model()
    out = compat.shard_map(step, **options, out_specs=P("d"))(model, 2.0)
    assert out.tolist() == [1.0, 3.0, 5.0]
    assert float(model.n) == 1.0
    made = compat.shard_map(Model, mesh=options["mesh"], in_specs=(), out_specs=specs)()
    assert made.w[...].tolist() == [0.0, 1.0, 2.0]


# What is refused.

SHARDING = nnx.StateSharding({...: None})
MAPPED = {
    "vmap": lambda prefix, **mode: tt.vmap(step, in_axes=(prefix, 0), **mode),
    "vmap out": lambda prefix, **mode: tt.vmap(step, out_axes=prefix, **mode),
    "pmap": lambda prefix, **mode: tt.pmap(step, in_axes=(prefix, 0), **mode),
    "scan": lambda prefix, **mode: tt.scan(
        step, in_axes=(prefix, 0), out_axes=0, **mode
    ),
    "scan out": lambda prefix, **mode: tt.scan(
        step, in_axes=0, out_axes=(prefix,), **mode
    ),
}
PLACED = {
    "jit": lambda prefix, **mode: tt.jit(step, in_shardings=(prefix, None), **mode),
    "jit out": lambda prefix, **mode: tt.jit(step, out_shardings=prefix, **mode),
    "shard_map": lambda prefix, **mode: tt.shard_map(
        step, mesh=mesh_of_one(), in_specs=(prefix, P()), out_specs=P(), **mode
    ),
}


@SIMPLE_MODES
@pytest.mark.parametrize("name", MAPPED)
def test_axes_by_kind_need_graph_updates(name, mode):
    argument = "out_axes" if "out" in name else "in_axes"
    text = f"`{argument}` cannot contain `StateAxes` objects"
    with pytest.raises(ValueError, match=text) as caught:
        MAPPED[name](nnx.StateAxes({...: 0}), **mode)
    assert str(caught.value).startswith(name.split()[0])


@SIMPLE_MODES
@pytest.mark.parametrize("name", PLACED)
def test_shardings_by_kind_need_graph_updates(name, mode):
    with pytest.raises(ValueError, match="cannot contain `StateSharding` objects") as e:
        PLACED[name](SHARDING, **mode)
    assert str(e.value).startswith(name.split()[0])


@SIMPLE_MODES
def test_jit_partial_has_no_shardings_by_kind(mode):
    with pytest.raises(ValueError, match="cannot contain `StateSharding` objects"):
        tt.jit_partial(step, Model(), in_shardings=(SHARDING, None), **mode)


@pytest.mark.parametrize("name", [*MAPPED, *PLACED])
def test_with_graph_updates_an_object_cannot_be_a_prefix(name):
    with pytest.raises(ValueError, match="Graph nodes are not allowed as prefixes"):
        (MAPPED | PLACED)[name](tt.Dict(w=0, n=None), **UPDATES)


@pytest.mark.parametrize("name", [*MAPPED, *PLACED])
def test_with_graph_updates_a_variable_cannot_be_a_prefix(name):
    with pytest.raises(ValueError, match="Variables prefixes are not supported"):
        (MAPPED | PLACED)[name](tt.Param(0), **UPDATES)


def test_rules_must_take_every_variable():
    f = compat.vmap(step, in_axes=(nnx.StateAxes({nnx.Param: 0}), None))
    with pytest.raises(ValueError, match=r"No filter matched n \(BatchStat\)"):
        f(Model(), 1.0)


def test_the_error_of_rules_that_miss_a_variable_names_the_transform():
    f = compat.vmap(step, in_axes=(nnx.StateAxes({nnx.Param: 0}), None))
    with pytest.raises(ValueError, match=r"^vmap: No filter matched"):
        f(Model(), 1.0)


def test_a_varying_value_on_axis_none_is_refused_by_name():
    def spread(m, x):
        m.n[...] = x

    text = r"at vmap .*\bn\b.*got axis spec None but output was batched on axis 0"
    model = Model()
    with pytest.raises(ValueError, match=text):
        compat.vmap(spread, in_axes=(AXES, 0))(model, jnp.arange(3.0))
    assert float(model.n) == 0.0


def test_different_filters_may_give_a_shared_variable_one_axis():
    model = Model()
    other = nnx.StateAxes({nnx.PathContains("w"): 0, ...: None})

    def double(one, two):
        assert one is two["again"]
        step(one, 2.0)

    compat.vmap(double, in_axes=(AXES, {"again": other}))(model, {"again": model})
    assert model.w[...].tolist() == [0.0, 2.0, 4.0]


def test_different_filters_may_not_give_a_shared_variable_two_axes():
    model = Model()
    other = nnx.StateAxes({...: None})
    f = compat.vmap(lambda one, two: None, in_axes=(AXES, other))
    with pytest.raises(ValueError, match="Inconsistent aliasing detected") as caught:
        f(model, tt.Dict(again=model.w))
    assert "Param" in str(caught.value)
    assert re.search(r"args/0/w: 0\n", str(caught.value))
    assert re.search(r"args/1/again: None\n", str(caught.value))


def test_a_rule_that_is_not_there_is_a_missing_key():
    with pytest.raises(KeyError, match="BatchStat"):
        AXES[nnx.BatchStat]
    assert AXES[nnx.Param] == 0


@pytest.mark.parametrize("value", [tt.Param(jnp.ones(2)), None], ids=["Param", "None"])
def test_a_prefix_that_goes_on_where_nothing_is_inside_is_refused(value):
    kind = type(value).__name__
    message = rf"at args/0: it has entries \['a'\], the {kind} there has nothing ins"
    with pytest.raises(tt.StructureError, match=message):
        tt.vmap(lambda x: x, in_axes=({"a": 0},))(value)


def test_a_prefix_may_be_made_by_a_function():
    model = tt.Dict(w=tt.Param(1.0), inner=tt.Dict(n=tt.Variable(0)))
    made = tt.prefix(model, lambda path, leaf: (path, type(leaf)))
    assert made.w == (("w",), tt.Param)
    assert made.inner.n == (("inner", "n"), tt.Variable)


@pytest.mark.parametrize("namespace", [tt, nnx])
def test_a_prefix_is_one_for_each_variable(namespace):
    shared = tt.Param(1.0)
    model = tt.Dict(a=tt.Dict(w=shared), b=tt.Dict(w=shared))
    rules = {tt.PathContains("a"): 0, ...: 1}
    text = "prefix: the Param found at paths a/w and b/w would have the prefix 0 at"
    with pytest.raises(tt.AliasError, match=text):
        namespace.prefix(model, rules, graph=True)
    assert namespace.prefix(model, {...: 1}, graph=True).b.w == 1
    with pytest.raises(tt.AliasError):
        namespace.prefix(model, {...: 1}, graph=False)


def test_a_prefix_of_an_object_that_holds_itself():
    node = tt.Dict(w=tt.Param(1.0))
    node.me = node
    made = tt.prefix(node, {...: 0}, graph=True)
    assert made.me is made
    assert made.w == 0


def test_a_prefix_follows_a_cycle_as_far_as_it_goes():
    node = tt.Dict(w=tt.Param(jnp.arange(3.0)))
    node.me = node
    axes = {"w": 0, "me": {"w": 0, "me": 0}}
    found = tt.vmap(lambda node: node.me.w * 2, in_axes=(axes,), graph=True)(node)
    assert found.tolist() == [0.0, 2.0, 4.0]


def test_placed_arguments_that_go_the_long_way_use_the_same_program():
    traces = []

    def call(model, x):
        traces.append(1)
        return model["a"].sum() + x

    sharding = NamedSharding(mesh_of_one(), P())
    compiled = tt.jit(call, in_shardings=(sharding, sharding), graph=True)
    shared = tt.Param(jnp.ones(2))
    for _ in range(3):
        assert float(compiled({"a": shared, "b": shared}, 1.0)) == 3.0
    assert len(traces) == 1


def test_a_prefix_may_be_of_an_object_that_holds_itself():
    node = tt.Dict(w=tt.Param(jnp.ones((3, 2))))
    node.me = node
    axes = tt.prefix(node, {...: 0}, graph=True)
    summed = tt.vmap(lambda node: node.w[...].sum(), in_axes=(axes,), graph=True)
    assert summed(node).tolist() == [2.0, 2.0, 2.0]
