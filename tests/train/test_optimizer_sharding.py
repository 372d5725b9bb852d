# SPDX-License-Identifier: Apache-2.0
"""Where the state of an optimizer lies when the model is spread over devices."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import treetap as tt
from meshes import mesh_of

P = PartitionSpec


def sharded(mesh, **metadata):
    with jax.set_mesh(mesh):
        kernel = tt.Param(jnp.ones((8, 4)), out_sharding=("data", "model"), **metadata)
        return {"kernel": kernel, "bias": tt.Param(jnp.zeros(4))}


def specs(tree):
    return {
        path: getattr(leaf[...].sharding, "spec", None)
        for path, leaf in tt.to_flat_state(tt.state(tree))
        if leaf[...].ndim > 1
    }


KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)


@KINDS
def test_the_state_is_sharded_as_its_parameter(kind):
    mesh = mesh_of((4, 2), ("data", "model"), kind)
    model = sharded(mesh)
    optimizer = tt.Optimizer(model, optax.adam(0.1), wrt=tt.Param)  # needs no mesh
    mu = optimizer.opt_state[0].mu.kernel
    assert mu.out_sharding == ("data", "model")
    wanted = NamedSharding(mesh, PartitionSpec("data", "model"))
    assert mu[...].sharding == wanted

    @tt.jit
    def step(model, optimizer):
        loss = lambda model: (model["kernel"][...] ** 2).sum()
        optimizer.update(model, tt.grad(loss)(model))

    with jax.set_mesh(mesh):
        step(model, optimizer)
        optimizer.update(model, tt.state(model))
    assert model["kernel"][...].sharding.is_equivalent_to(wanted, 2)
    assert mu[...].sharding.is_equivalent_to(wanted, 2)


@KINDS
def test_an_optimizer_made_inside_jit_is_sharded_too(kind):
    mesh = mesh_of((4, 2), ("data", "model"), kind)

    @tt.jit
    def make():
        kernel = tt.Param(jnp.ones((8, 4)), out_sharding=("data", "model"))
        return tt.Optimizer({"kernel": kernel}, optax.adam(0.1), wrt=tt.Param)

    with jax.set_mesh(mesh):
        optimizer = make()
    wanted = NamedSharding(mesh, PartitionSpec("data", "model"))
    nu = optimizer.opt_state[0].nu.kernel[...]
    assert nu.sharding.is_equivalent_to(wanted, 2)


def test_the_state_may_have_a_sharding_of_its_own():
    mesh = mesh_of((4, 2), ("data", "model"))
    model = sharded(mesh, optimizer_sharding=("model", None))
    with jax.set_mesh(mesh):
        optimizer = tt.Optimizer(model, optax.adam(0.1), wrt=tt.Param)
    mu = optimizer.opt_state[0].mu.kernel
    assert mu.out_sharding == ("model", None)
    assert not mu.has_metadata("optimizer_sharding")
    assert mu[...].sharding.spec == PartitionSpec("model", None)
    with pytest.raises(tt.MetadataError, match="mesh is required"):
        tt.Optimizer(model, optax.adam(0.1), wrt=tt.Param)
    for none in (None, ()):
        model["kernel"].set_metadata(optimizer_sharding=none)
        optimizer = tt.Optimizer(model, optax.adam(0.1), wrt=tt.Param)
        assert optimizer.opt_state[0].mu.kernel.out_sharding == none


def test_state_of_another_shape_is_sharded_where_the_axes_are_the_same():
    mesh = mesh_of((4, 2), ("data", "model"))
    model = sharded(mesh)
    with jax.set_mesh(mesh):
        memory = tt.Optimizer(model, optax.scale_by_lbfgs(3), wrt=tt.Param)
        factors = tt.Optimizer(
            model, optax.adafactor(0.1, min_dim_size_to_factor=2), wrt=tt.Param
        )
    kept = memory.opt_state.diff_params_memory.kernel
    assert kept.shape == (3, 8, 4)
    assert kept.out_sharding == PartitionSpec(None, "data", "model")
    assert kept[...].sharding.spec == PartitionSpec(None, "data", "model")
    row = factors.opt_state[0].v_row.kernel
    assert row.ndim == 1
    assert not row.has_metadata("out_sharding")
    outside = tt.Optimizer(model, optax.scale_by_lbfgs(3), wrt=tt.Param)
    kept = outside.opt_state.diff_params_memory.kernel
    assert kept.out_sharding == PartitionSpec(None, "data", "model")


def test_values_that_optax_puts_elsewhere_are_brought_to_their_parameter():
    mesh = mesh_of((4, 2), ("data", "model"))
    model = sharded(mesh)
    astray = optax.GradientTransformation(
        lambda params: jax.tree.map(lambda x: jnp.zeros(x.shape), params),
        lambda grads, state, params: (grads, state),
    )
    optimizer = tt.Optimizer(model, astray, wrt=tt.Param)
    wanted = model["kernel"][...].sharding
    assert optimizer.opt_state.kernel[...].sharding == wanted


def test_an_abstract_state_has_the_sharding_of_its_parameter():
    mesh = mesh_of((4, 2), ("data", "model"))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    kernel = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=sharding)
    model = {"kernel": tt.Param(kernel)}
    optimizer = tt.Optimizer(model, optax.adam(0.1), wrt=tt.Param)
    assert optimizer.opt_state[0].mu.kernel.get_raw_value().sharding == sharding
    assert optimizer.opt_state[0].count.get_raw_value().sharding is None


def test_the_state_of_a_parameter_in_a_ref_is_in_a_ref():
    mesh = mesh_of((4, 2), ("data", "model"))
    model = sharded(mesh, ref=True)
    optimizer = tt.Optimizer(model, optax.trace(0.9), wrt=tt.Param)
    kept = optimizer.opt_state.trace.kernel
    assert isinstance(kept.get_raw_value(), jax.Ref)
    optimizer.update(model, tt.as_pure(tt.state(model)))
    assert kept[...].tolist() == [[1.0] * 4] * 8
    assert model["kernel"][...].tolist() == [[2.0] * 4] * 8


class Gated(tt.Module):
    """A kernel that is split, and a scale that a compiler would split likewise."""

    def __init__(self, **metadata):
        self.kernel = tt.Param(jnp.ones((8, 16)), out_sharding=(None, "data"))
        self.scale = tt.Param(jnp.ones(16), out_sharding=P(), **metadata)

    def __call__(self, x):
        return (x @ self.kernel) * self.scale[None]


@tt.jit
def gated_step(model, optimizer, x):
    grads = tt.grad(lambda model: (model(x) ** 2).mean())(model)
    optimizer.update(model, grads)


def places_after(steps, model, step=gated_step):
    mesh = model.kernel[...].sharding.mesh
    optimizer = tt.Optimizer(model, optax.adam(0.1), wrt=tt.Param)
    x = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("data")))
    for _ in range(steps):
        step(model, optimizer, x)
    moments = optimizer.opt_state[0]
    return [tree.scale[...].sharding.spec for tree in (model, moments.mu, moments.nu)]


def test_a_compiled_step_leaves_parameters_and_state_where_they_are():
    with jax.set_mesh(mesh_of((8,), ("data",))):
        assert places_after(2, Gated()) == [P()] * 3
        # and where nothing is said, or nothing shall be placed, it may move them
        moved = places_after(1, Gated(eager_sharding=False))
    assert moved == [P("data")] * 3


def test_a_step_without_a_mesh_or_with_rules_that_are_gone_is_left_to_the_compiler():
    mesh = mesh_of((8,), ("data",))
    with jax.set_mesh(mesh):
        model = Gated()
    assert len(places_after(1, model)) == 3  # no mesh is around
    with jax.set_mesh(mesh), tt.logical_axis_rules([("rows", "data")]):
        model = {"w": tt.Param(jnp.ones((8, 4)), out_sharding=("rows",))}
    optimizer = tt.Optimizer(model, optax.adam(0.1), wrt=tt.Param)
    with jax.set_mesh(mesh):
        tt.jit(lambda m, o: o.update(m, tt.state(m)))(model, optimizer)
    assert model["w"][...].sharding.spec == P("data")


@pytest.mark.parametrize("spec", [P(), P("data")])
def test_a_step_in_shards_is_left_alone(spec):
    mesh = mesh_of((8,), ("data",))

    @tt.jit
    @tt.shard_map(mesh=mesh, in_specs=(spec, P()), out_specs=None)
    def step(kernel, optimizer):
        optimizer.update({"w": kernel}, {"w": jnp.ones(kernel.shape)})

    with jax.set_mesh(mesh):
        kernel = tt.Param(jnp.ones((8, 4)), out_sharding=spec)
        step(kernel, tt.Optimizer({"w": kernel}, optax.sgd(0.5), wrt=tt.Param))
    assert kernel[...].tolist() == [[0.5] * 4] * 8


def test_a_step_for_each_row_is_left_alone():
    with jax.set_mesh(mesh_of((8,), ("data",))):
        kernel = tt.Param(jnp.ones((8, 4)), out_sharding=("data",))
        optimizer = tt.Optimizer({"w": kernel}, optax.sgd(0.5), wrt=tt.Param)

        @tt.vmap(in_axes=(0, None))
        def step(row, optimizer):
            optimizer.update({"w": row}, {"w": jnp.ones(row.shape)})

        step(kernel, optimizer)
    assert kernel[...].tolist() == [[0.5] * 4] * 8
