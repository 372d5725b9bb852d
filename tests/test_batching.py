# SPDX-License-Identifier: Apache-2.0
"""pmap and shard_map over host devices; what vmap shares with them is in the laws."""

import jax
import jax.numpy as jnp
import pytest

import treetap as tt

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


def test_pmap_keeps_the_buffers_it_may_take():
    values = tt.Variable(jnp.arange(4.0))
    before = values[...]
    tt.pmap(add, donate_argnums=0)(values, jnp.ones(4))
    assert values[...].tolist() == [1, 2, 3, 4]
    assert before.tolist() == [0, 1, 2, 3]


def test_pmap_takes_static_arguments():
    def scaled(values, x, factor):
        values[...] += x * factor

    values = tt.Variable(jnp.zeros(4))
    mapped = tt.pmap(scaled, static_broadcasted_argnums=2, in_axes=(0, 0, None))
    mapped(values, jnp.ones(4), 3)
    assert values[...].tolist() == [3, 3, 3, 3]
