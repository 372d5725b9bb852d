# SPDX-License-Identifier: Apache-2.0
"""pmap and shard_map over host devices; what vmap shares with them is in the laws."""

import jax
import jax.numpy as jnp
import pytest

import treetap as tt
from modes import ALL_MODES, SIMPLE_MODES
from small_models import Scaled
from treetap import nnx

pytestmark = pytest.mark.skipif(len(jax.devices()) < 4, reason="needs four devices")


def add(variable, x):
    variable[...] += x
    return variable[...] * 1


def test_pmap_maps_over_devices_and_writes_back():
    variable = tt.Variable(jnp.zeros(4))
    out = tt.pmap(add)(variable, jnp.arange(4.0))
    assert out.tolist() == variable[...].tolist() == [0, 1, 2, 3]
    assert len(variable.sharding.device_set) == 4


def test_pmap_knows_axis_names_and_decorates():
    @tt.pmap(axis_name="i", in_axes=(None, 0))
    def mean(variable, x):
        variable[...] = jax.lax.pmean(x, "i")

    variable = tt.Variable(jnp.array(0.0))
    mean(variable, jnp.arange(4.0))
    assert variable[...] == 1.5


def mesh_of():
    kinds = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((4,), ("x",), axis_types=kinds)


def test_shard_map_gives_each_device_its_shard():
    variable = tt.Variable(jnp.zeros(4))
    mapped = tt.shard_map(
        add, mesh=mesh_of(), in_specs=jax.P("x"), out_specs=jax.P("x")
    )
    assert mapped(variable, jnp.arange(4.0)).tolist() == [0, 1, 2, 3]
    assert variable[...].tolist() == [0, 1, 2, 3]


def test_shard_map_binds_keywords_to_positions():
    mapped = tt.shard_map(add, mesh=mesh_of(), in_specs=jax.P(), out_specs=jax.P())
    variable = tt.Variable(jnp.zeros(4))
    mapped(variable, x=1.0)
    assert variable[...].tolist() == [1, 1, 1, 1]


def test_shard_map_has_no_specification_for_what_only_goes_by_keyword():
    @tt.shard_map(mesh=mesh_of(), in_specs=jax.P(), out_specs=jax.P())
    def scaled(x, *, factor):
        return x * factor

    with pytest.raises(TypeError, match=r"shard_map: .*\['factor'\] could not be"):
        scaled(jnp.zeros(4), factor=2.0)


def test_a_varying_value_in_a_replicated_variable_is_refused_by_jax():
    @tt.shard_map(mesh=mesh_of(), in_specs=(jax.P(), jax.P("x")), out_specs=jax.P())
    def assign(variable, x):
        variable[...] = x[0]

    with pytest.raises(ValueError, match=r"replicat|vma|varying"):
        assign(tt.Variable(jnp.array(0.0)), jnp.arange(4.0))


@pytest.mark.parametrize("graph", [False, True])
def test_pmap_refuses_refs_where_jax_would_delete_them(graph, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
    variable = tt.Variable(jnp.zeros(4), ref=True)
    with pytest.raises(tt.StructureError, match="pmap: the Variable at args/0 holds"):
        tt.pmap(add, graph=graph)(variable, jnp.arange(4.0))
    assert variable[...].tolist() == [0, 0, 0, 0]


def test_pmap_keeps_the_buffers_it_may_take():
    values = tt.Variable(jnp.arange(4.0))
    before = values[...]
    tt.pmap(add, donate_argnums=0)(values, jnp.ones(4))
    assert values[...].tolist() == [1, 2, 3, 4]
    assert before.tolist() == [0, 1, 2, 3]


def test_pmap_traces_once_for_arguments_of_one_structure():
    traces = []

    def counted(model, x):
        traces.append(1)
        model["count"][...] += x
        return x * model.get("scale", 1)

    def model_of(**more):
        return {"count": tt.Variable(jnp.zeros(4)), **more}

    mapped, model = tt.pmap(counted), model_of()
    for n in range(3):
        assert mapped(model, jnp.ones(4)).tolist() == [1] * 4
        assert model["count"][...].tolist() == [n + 1] * 4
    assert len(traces) == 2  # as by JAX: on one device first, on four then
    other = model_of()
    mapped(other, jnp.ones(4))
    assert other["count"][...].tolist() == [1] * 4
    assert len(traces) == 2
    assert mapped(model_of(scale=jnp.full(4, 2.0)), jnp.ones(4)).tolist() == [2] * 4
    assert len(traces) == 3


def test_pmap_compiles_for_each_static_argument_and_axis():
    traces = []

    def scaled(x, factor):
        traces.append(factor)
        return x * factor

    mapped = tt.pmap(scaled, static_broadcasted_argnums=1)
    for factor in (2, 2, 2.0, 3, 2):
        assert mapped(jnp.ones(4), factor).tolist() == [factor] * 4
    assert [(type(x), x) for x in traces] == [(int, 2), (float, 2.0), (int, 3)]


def test_pmap_sees_a_static_value_that_changed():
    model = Scaled(2.0)
    mapped = tt.pmap(lambda model, x: model(x), in_axes=(None, 0))
    assert mapped(model, jnp.ones(4)).tolist() == [2] * 4
    model.options["scale"] = 3.0
    assert mapped(model, jnp.ones(4)).tolist() == [3] * 4


def test_an_observed_pmap_has_the_names_of_its_caller():
    model = tt.List([tt.Linear(2, 2, rngs=tt.Rngs(n)) for n in range(2)])
    mapped = tt.pmap(lambda layer, x: layer(x), in_axes=(None, 0))

    class Net(tt.Module):
        def __init__(self):
            self.layers = model

        def __call__(self, x):
            for layer in self.layers:
                x = mapped(layer, x)
            return x

    net, x = Net(), jnp.ones((4, 2))
    net(x)  # the mapped function is known already
    _, record = tt.observe(net, "layers/*:__call__")(x)
    assert [site.text for site in record] == ["layers/0:__call__", "layers/1:__call__"]


def test_pmap_takes_static_arguments():
    def scaled(values, x, factor):
        values[...] += x * factor

    values = tt.Variable(jnp.zeros(4))
    mapped = tt.pmap(scaled, static_broadcasted_argnums=2, in_axes=(0, 0, None))
    mapped(values, jnp.ones(4), 3)
    assert values[...].tolist() == [3, 3, 3, 3]


def square(model):
    return model.w * model.w


@SIMPLE_MODES
@pytest.mark.parametrize("transform", [tt.vmap, tt.scan])
def test_mapping_refuses_transform_metadata(mode, transform):
    with pytest.raises((TypeError, ValueError), match="transform_metadata"):
        transform(square, transform_metadata={"partition": "a"}, **mode)


@ALL_MODES
def test_axes_may_be_lists(mode):
    stacked = jnp.arange(3.0)
    out = tt.vmap(lambda a, b: a * b, in_axes=[0, None], **mode)(stacked, 2.0)
    assert out.tolist() == [0.0, 2.0, 4.0]
    total, seen = tt.scan(
        lambda c, x: (c + x, c),
        in_axes=[tt.Carry, 0],
        out_axes=[tt.Carry, 0],
        **mode,
    )(jnp.array(0.0), stacked)
    assert float(total) == 3.0
    assert seen.tolist() == [0.0, 0.0, 1.0]


NNX_SPECS = {
    "one": (lambda: jax.P("x"), ("x",)),
    "filters": (lambda: nnx.StateSharding({nnx.Param: jax.P("x"), ...: jax.P()}), ()),
}


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("specs", NNX_SPECS.values(), ids=NNX_SPECS)
def test_shard_map_puts_variables_where_its_specs_say_with_graph_updates(specs, write):
    make, count_spec = specs
    model = tt.Dict(w=tt.Param(jnp.ones(4)), n=tt.BatchStat(jnp.zeros(4)))

    def change(model):
        if write:
            model.w[...] += 1

    mapped = {"mesh": mesh_of(), "in_specs": (make(),), "out_specs": jax.P()}
    nnx.shard_map(change, **mapped)(model)
    assert model.w[...].sharding.spec == jax.P("x")
    assert model.n[...].sharding.spec == jax.P(*count_spec)
    assert model.w[...].tolist() == [1.0 + write] * 4


@ALL_MODES
def test_a_state_of_prefixes_is_a_prefix(mode):
    model = tt.Dict(w=tt.Param(jnp.ones(4)), inner=tt.Dict(n=tt.Param(jnp.zeros(4))))
    state = tt.state(model)

    def grow(state):
        state["w"][...] += 1
        return state["w"][...].sum() + state["inner"]["n"][...].sum()

    specs = tt.State({"w": jax.P("x"), "inner": jax.P()})
    mapped = {"mesh": mesh_of(), "in_specs": (specs,), "out_specs": jax.P("x")}
    sums = tt.shard_map(lambda s: grow(s)[None], **mapped, **mode)(state)
    assert sums.tolist() == [2.0] * 4
    assert model.w[...].tolist() == [2.0] * 4
    axes = tt.State({"w": 0, "inner": None})
    assert tt.vmap(grow, in_axes=(axes,), **mode)(state).tolist() == [3.0] * 4


PREFIXES = {
    "vmap": ("in_axes", "out_axes"),
    "pmap": ("in_axes", "out_axes"),
    "scan": ("in_axes", "out_axes"),
    "shard_map": ("in_specs", "out_specs"),
    "jit": ("in_shardings", "out_shardings"),
}


@pytest.mark.parametrize("name", PREFIXES)
@pytest.mark.parametrize("place", [0, 1])
def test_a_module_as_prefix_is_refused_by_name_with_graph_updates(name, place):
    argument = PREFIXES[name][place]
    given = {"in_specs": jax.P(), "out_specs": jax.P(), "mesh": mesh_of()}
    given = given if name == "shard_map" else {"in_axes": 0, "out_axes": 0}
    given = {} if name == "jit" else given
    prefix = tt.Dict(w=0)
    with pytest.raises(tt.StructureError, match=rf"{name}: Graph .*`{argument}`.*Dict"):
        getattr(nnx, name)(lambda m: m, **given | {argument: (prefix,)})
