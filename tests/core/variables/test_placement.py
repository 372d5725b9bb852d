# SPDX-License-Identifier: Apache-2.0
"""Placing Variables on a mesh when they are made, on eight host devices."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import treetap as tt

pytestmark = pytest.mark.skipif(
    len(jax.devices()) < 8, reason="a mesh of 2 x 4 needs eight devices"
)


def mesh_of(kind=AxisType.Auto, names=("data", "model"), kinds=None):
    return jax.make_mesh((2, 4), names, axis_types=kinds or (kind,) * 2)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_variable_is_placed_on_the_ambient_mesh(kind):
    with jax.set_mesh(mesh_of(kind)):
        variable = tt.Param(jnp.ones((4, 8)), out_sharding=("data", "model"))
    assert variable.sharding.spec == PartitionSpec("data", "model")
    assert variable.out_sharding == ("data", "model")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_annotations_may_be_specs_or_shardings(kind):
    mesh = mesh_of(kind)
    spec = PartitionSpec("data", None)
    with jax.set_mesh(mesh):
        by_spec = tt.Param(jnp.ones((4, 8)), out_sharding=spec)
        by_sharding = tt.Param(jnp.ones((4, 8)), out_sharding=NamedSharding(mesh, spec))
    assert by_spec.sharding.spec == spec
    assert by_sharding.sharding.spec == spec


def test_a_mesh_may_be_given_as_metadata():
    variable = tt.Param(jnp.ones(8), out_sharding=("model",), mesh=mesh_of())
    assert variable.sharding.spec == PartitionSpec("model")


def test_logical_names_go_through_rules():
    rules = [("embed", "model"), ("batch", "data")]
    with jax.set_mesh(mesh_of()), tt.logical_axis_rules(rules):
        variable = tt.Param(jnp.ones((2, 8)), out_sharding=("batch", "embed"))
    assert variable.sharding.spec == PartitionSpec("data", "model")
    with jax.set_mesh(mesh_of()):
        own = tt.Param(
            jnp.ones(8),
            out_sharding=(("a", "b"),),
            sharding_rules=[("a", "data"), ("b", "model")],
        )
    assert own.sharding.spec == PartitionSpec(("data", "model"))


def test_rules_that_disagree_are_refused():
    with (
        jax.set_mesh(mesh_of()),
        tt.logical_axis_rules([("embed", "model")]),
        pytest.raises(tt.MetadataError, match="'embed' is mapped to 'model' by"),
    ):
        tt.Param(
            jnp.ones(8), out_sharding=("embed",), sharding_rules=[("embed", "data")]
        )


def test_without_a_mesh_the_annotation_is_shown():
    with pytest.raises(tt.MetadataError, match=r"A mesh is required.*\('data',\)"):
        tt.Param(jnp.ones(8), out_sharding=("data",))


def test_two_meshes_are_refused():
    sharding = NamedSharding(mesh_of(), PartitionSpec("data"))
    other = mesh_of(names=("x", "y"))
    with pytest.raises(tt.MetadataError, match="was made for"):
        tt.Param(jnp.ones(8), out_sharding=sharding, mesh=other)


def test_mixed_axis_types_are_refused():
    mesh = mesh_of(kinds=(AxisType.Auto, AxisType.Explicit))
    with pytest.raises(tt.MetadataError, match="mixes axis types"):
        tt.Param(jnp.ones(8), out_sharding=("data",), mesh=mesh)


@pytest.mark.parametrize("annotation", [None, ()])
def test_no_annotation_places_nothing(annotation):
    assert tt.Param(jnp.ones(8), out_sharding=annotation)[...].shape == (8,)


def test_placement_can_be_switched_off():
    quiet = tt.Param(jnp.ones(8), out_sharding=("data",), eager_sharding=False)
    assert quiet.get_metadata("eager_sharding") is False
    with tt.use_eager_sharding(False):
        assert not tt.using_eager_sharding()
        tt.Param(jnp.ones(8), out_sharding=("data",))
    assert tt.using_eager_sharding()


def test_writing_keeps_the_sharding():
    with jax.set_mesh(mesh_of()):
        variable = tt.Param(jnp.ones((4, 8)), out_sharding=("data", "model"))
        before = variable.sharding
        variable[...] = jnp.zeros((4, 8))
        assert variable.sharding == before
        variable[...] = variable[...] + 1.0
        assert variable.sharding == before


def test_abstract_values_are_left_alone():
    abstract = jax.ShapeDtypeStruct((8,), jnp.float32)
    variable = tt.Param(abstract, out_sharding=("data",), mesh=mesh_of())
    assert variable.get_raw_value() is abstract


def test_placement_works_in_a_jitted_constructor():
    class Model(tt.Module):
        def __init__(self):
            self.w = tt.Param(jnp.ones((4, 8)), out_sharding=("data", "model"))

    with jax.set_mesh(mesh_of()):
        model = jax.jit(Model)()
    assert model.w.sharding.spec == PartitionSpec("data", "model")


def test_with_metadata_carries_the_annotation():
    init = tt.with_metadata(jax.nn.initializers.ones, out_sharding=("model",))
    with jax.set_mesh(mesh_of()):
        variable = tt.Param(init(jax.random.key(0), (8,)))
    assert variable.sharding.spec == PartitionSpec("model")


def test_one_name_alone_is_one_axis():
    with jax.set_mesh(mesh_of()):
        variable = tt.Param(jnp.ones((4, 8)), out_sharding="data")
    assert variable.sharding.spec == PartitionSpec("data")


def test_a_name_the_mesh_does_not_have_is_refused_with_the_names_it_has():
    with (
        jax.set_mesh(mesh_of()),
        pytest.raises(tt.MetadataError, match=r"\['nowhere'\].*\['data', 'model'\]"),
    ):
        tt.Param(jnp.ones((4, 8)), out_sharding=("nowhere",))


def test_eval_shape_refuses_such_a_name_too():
    def make():
        return tt.Param(jnp.ones(4), out_sharding=("nowhere",))

    with (
        jax.set_mesh(mesh_of()),
        tt.use_eager_sharding(False),
        pytest.raises(tt.MetadataError, match="nowhere"),
    ):
        tt.eval_shape(make)


def test_eager_sharding_is_fixed_in_every_form():
    v = tt.Param(jnp.ones(2), role="kernel")
    before = v.get_metadata()
    message = "'eager_sharding' of a Param is fixed when it is made.*v.copy"
    for change in (
        lambda: v.set_metadata(eager_sharding=False),
        lambda: v.set_metadata("eager_sharding", False),
        lambda: v.set_metadata({"role": "bias", "eager_sharding": False}),
    ):
        with pytest.raises(tt.MetadataError, match=message):
            change()
    with pytest.raises(tt.MetadataError, match="'eager_sharding' of a Param is requ"):
        v.del_metadata("eager_sharding")
    with pytest.raises(tt.MetadataError, match="eager_sharding are fixed"):
        tt.set_metadata({"v": v}, role="bias", eager_sharding=False)
    assert v.get_metadata() == before
