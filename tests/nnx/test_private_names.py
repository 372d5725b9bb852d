# SPDX-License-Identifier: Apache-2.0
"""Private names of NNX that programs use: they show what is there, and write back."""

import jax.numpy as jnp
import pytest

import treetap as tt
from treetap import nnx


def test_the_kind_of_a_variable():
    variable = nnx.Param(jnp.ones(2))
    assert variable.type is variable.var_type is nnx.Param
    assert nnx.Param(1.0, type="mine").type == "mine"
    assert variable.to_state().type is nnx.Param
    assert variable._raw_value is variable.get_raw_value()
    assert variable._can_update


def test_sharding_names_warn():
    variable = nnx.Param(jnp.ones(2), out_sharding=("a",), eager_sharding=False)
    with pytest.warns(DeprecationWarning, match="use 'out_sharding'"):
        assert variable.sharding_names == ("a",)
    with pytest.warns(DeprecationWarning):
        assert nnx.Param(1.0).sharding_names is None


def test_metadata_may_be_assigned_as_a_whole():
    variable = nnx.Param(jnp.ones(2), a=1)
    other = variable.copy()
    variable._var_metadata = {**variable._var_metadata, "b": 2}
    assert (variable.a, variable.b) == (1, 2)
    object.__setattr__(variable, "_var_metadata", {**other._var_metadata, "c": 3})
    assert variable.get_metadata(exclude_required=True) == {"a": 1, "c": 3}
    assert not other.has_metadata("c")


def test_metadata_may_be_changed_one_by_one():
    variable = nnx.Param(jnp.ones(2), a=1)
    held = variable._var_metadata
    held["b"] = 2
    held.update(c=3)
    assert held.pop("a") == 1
    del held["b"]
    assert variable.get_metadata(exclude_required=True) == {"c": 3}
    assert dict(held) == variable.get_metadata()
    with pytest.raises(tt.MetadataError, match="is fixed"):
        held["ref"] = True
    assert held["ref"] is False


def test_other_attributes_cannot_be_set():
    with pytest.raises(AttributeError, match="cannot be set"):
        nnx.Param(1.0)._metadata = {}


def test_how_many_programs_were_compiled():
    calls = nnx.jit(lambda model, x: model(x))
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    for rows in (1, 1, 2):
        calls(model, jnp.ones((rows, 1)))
    assert calls.jitted_fn._cache_size() == 2
    fixed = nnx.cached_partial(calls, model)
    fixed(jnp.ones((3, 1)))
    assert fixed.func.jitted_fn._cache_size() == 3


def test_a_graph_state_has_its_two_halves():
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    whole = nnx.unpack(model)
    assert whole._graphdef == nnx.graphdef(model)
    assert type(whole._state) is nnx.State
    assert whole._state.kernel is model.kernel


def test_the_nodes_of_a_graphdef():
    model = nnx.Sequential(nnx.Linear(1, 1, rngs=nnx.Rngs(0)))
    types = [node.type for node in nnx.graphdef(model).nodes]
    assert types == [nnx.Sequential, nnx.List, nnx.Linear, nnx.Param, nnx.Param]


def test_filters_of_axes_answer_for_a_variable():
    axes = nnx.StateAxes({nnx.Param: 0, nnx.PathContains("b"): 1})
    assert axes.map_prefix(("a",), nnx.Param(1.0)) == 0
    assert axes.map_prefix(("b",), nnx.Cache(1.0)) == 1
    with pytest.raises(tt.StructureError, match="StateAxes: No filter matched a"):
        axes.map_prefix(("a",), nnx.Cache(1.0))


def test_what_an_object_keeps_beside_its_attributes():
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    assert model._pytree__state.trace_state.is_valid()
    assert not model._pytree__state.initializing
    status = model._pytree__nodes
    assert (status["kernel"], status["use_bias"]) == (True, False)
    assert set(status) - set(vars(model)) == {"_pytree__nodes", "_pytree__state"}
