# SPDX-License-Identifier: Apache-2.0
"""eval_shape and make_jaxpr: looking at a function without running it."""

import functools
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import treetap as tt
from modes import ALL_MODES
from treetap import compat, nnx


def test_shared_inputs_are_for_graph_mode():
    v = tt.Param(jnp.array(1.0))
    for graph in (False, True):
        for look in (
            functools.partial(tt.eval_shape, lambda a, b: a * b, graph=graph),
            tt.make_jaxpr(lambda a, b: a * b, graph=graph),
        ):
            refused = pytest.raises(ValueError, match="Duplicate Param")
            with nullcontext() if graph else refused:
                look(v, v)
    model = tt.Dict(a=tt.Dict(w=v), b=tt.Dict(w=v))
    found = nnx.eval_shape(lambda m: m.a.w + m.b.w, model, graph_updates=False)
    assert found.shape == ()


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
@ALL_MODES
@pytest.mark.parametrize("explicit", [False, True])
def test_eval_shape_attaches_shardings(mode, explicit):
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2,), ("a",), (kind,))

    def make():
        return tt.Dict(w=tt.Param(jnp.zeros((4, 2)), out_sharding=("a", None)))

    with jax.set_mesh(mesh):
        abstract = tt.eval_shape(make, **mode)
    value = abstract.w.get_value()
    assert isinstance(value, jax.ShapeDtypeStruct)
    assert value.shape == (4, 2)
    assert isinstance(value.sharding, NamedSharding)
    assert value.sharding.spec == PartitionSpec("a", None)


def test_with_graph_updates_variables_without_annotation_are_replicated_on_the_mesh():
    mesh = jax.make_mesh((1,), ("a",), (jax.sharding.AxisType.Auto,))

    def make():
        return tt.Dict(w=tt.Param(jnp.zeros((4, 2))))

    with jax.set_mesh(mesh):
        found, plain = compat.eval_shape(make), tt.eval_shape(make)
    assert found.w.get_value().sharding.spec == PartitionSpec()
    assert found.w.get_value().sharding.mesh.axis_names == ("a",)
    assert plain.w.get_value().sharding is None
    assert compat.eval_shape(make).w.get_value().sharding is None


def test_with_graph_updates_shared_inputs_may_be_looked_at():
    v = tt.Param(jnp.array(1.0))
    found = compat.eval_shape(lambda a, b: {"same": a is b, "a": a, "b": b}, v, v)
    assert found["a"] is found["b"]
    assert found["a"] is not v
    assert found["a"].get_value().shape == ()
    assert float(v) == 1.0


@ALL_MODES
def test_eval_shape_gives_an_abstract_copy_of_what_was_made_outside(mode):
    model = tt.Dict(w=tt.Param(jnp.ones(3)))
    for look in (lambda: model, lambda: (model, 1.0)[0], lambda: tt.Dict(m=model).m):
        made = tt.eval_shape(look, **mode)
        assert made is not model
        assert type(made.w) is tt.Param
        assert isinstance(made.w.get_raw_value(), jax.ShapeDtypeStruct)
        assert made.w.shape == (3,)
    assert isinstance(model.w.get_raw_value(), jax.Array)
    state = tt.eval_shape(lambda: tt.state(model), **mode)
    assert state["w"].shape == (3,)
    with pytest.raises(tt.StructureError, match=r"captured|different trace level"):
        tt.jit(lambda: model, **mode)()
