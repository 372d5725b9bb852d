# SPDX-License-Identifier: Apache-2.0
"""Shardings of whole models: specs, named shardings, abstract models."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import treetap as tt
from meshes import mesh_of
from modes import ALL_MODES, SIMPLE_MODES
from treetap._transforms import sharding as _sharding

P = PartitionSpec
KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])


def grid(kind=AxisType.Auto):
    return mesh_of((2, 4), ("data", "model"), kind)


def quiet(value, names, kind=tt.Param, **metadata):
    """A Variable that is annotated and not placed."""
    return kind(value, out_sharding=names, eager_sharding=False, **metadata)


class Affine(tt.Module):
    def __init__(self, rngs):
        init = jax.nn.initializers.lecun_normal()
        init = tt.with_partitioning(init, (None, "model"))
        self.kernel = tt.Param(init(rngs.params(), (8, 16)))
        self.bias = tt.Param(jnp.zeros(16))
        self.seen = jnp.zeros(3)

    def __call__(self, x):
        return x @ self.kernel + self.bias[None]


def make():
    return Affine(tt.Rngs(0))


def unplaced():
    with tt.use_eager_sharding(False):
        return tt.eval_shape(make)


# Specs.


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (("data", None), P("data", None)),
        (P("data"), P("data")),
        ((("data", "model"),), P(("data", "model"))),
        (None, P()),
        ((), P()),
    ],
)
def test_an_annotation_becomes_a_spec(annotation, expected):
    tree = {"w": quiet(jnp.ones((2, 4)), annotation)}
    found = tt.get_partition_spec(tree)["w"]
    assert type(found) is tt.Param
    assert found.get_raw_value() == expected
    assert found.get_metadata() == tree["w"].get_metadata()
    assert isinstance(tree["w"].get_raw_value(), jax.Array)


def test_named_shardings_and_formats_give_their_spec():
    mesh = grid()
    sharding = NamedSharding(mesh, P("model"))
    form = Format(None, sharding)
    for annotation in (sharding, form):
        tree = {"w": quiet(jnp.ones(4), annotation)}
        assert tt.get_partition_spec(tree)["w"].get_raw_value() == P("model")


@pytest.mark.parametrize(
    ("value", "expected"),
    [(jnp.ones(3), P()), (jax.ShapeDtypeStruct((3,), "f4"), P()), (3.0, None)],
)
def test_what_is_not_annotated_is_replicated_if_it_has_a_shape(value, expected):
    found = tt.get_partition_spec({"v": tt.Param(value), "raw": value})
    assert found["v"].get_raw_value() == expected
    assert found["raw"] == expected


def test_logical_names_go_through_the_rules_of_the_context_and_of_the_variable():
    tree = {
        "a": quiet(jnp.ones((2, 4)), ("batch", "embed")),
        "b": quiet(jnp.ones(4), ("own",), sharding_rules=(("own", "model"),)),
    }
    with tt.logical_axis_rules([("batch", "data"), ("embed", None)]):
        found = tt.get_partition_spec(tree)
    assert found["a"].get_raw_value() == P("data", None)
    assert found["b"].get_raw_value() == P("model")


def test_specs_of_modules_and_states_keep_their_form():
    model = unplaced()
    found = tt.get_partition_spec(model)
    assert type(found) is Affine
    assert found is not model
    assert found.kernel.get_raw_value() == P(None, "model")
    assert found.seen == P()
    assert jax.tree.structure(found) == jax.tree.structure(model)
    state = tt.get_partition_spec(tt.state(model))
    assert isinstance(state, tt.State)
    assert state["bias"].get_raw_value() == P()


def test_a_shared_variable_stays_shared():
    shared = quiet(jnp.ones(4), ("model",))
    found = tt.get_partition_spec({"a": shared, "b": shared})
    assert found["a"] is found["b"]


def test_rules_that_disagree_are_refused_with_the_path():
    tree = {"w": [quiet(jnp.ones(4), ("e",), sharding_rules=(("e", "data"),))]}
    with (
        tt.logical_axis_rules([("e", "model")]),
        pytest.raises(tt.MetadataError, match=r"get_partition_spec: .*Param at w/0: "),
    ):
        tt.get_partition_spec(tree)


def test_a_string_is_no_annotation():
    with pytest.raises(tt.MetadataError, match=r"Param at w: .*\('data',\)"):
        tt.get_partition_spec({"w": quiet(jnp.ones(4), "data")})


# Named shardings.


@KINDS
def test_named_shardings_are_over_the_mesh_given(kind):
    mesh = grid(kind)
    found = tt.get_named_sharding(unplaced(), mesh)
    assert found.kernel.get_raw_value() == NamedSharding(mesh, P(None, "model"))
    assert found.bias.get_raw_value() == found.seen == NamedSharding(mesh, P())
    assert tt.get_named_sharding({"n": tt.Variable(3)}, mesh)["n"].get_value() is None


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("nowhere",), r"Param at blocks/1: .*nowhere.*logical_axis_rules"),
        (("model", "model"), r"Param at blocks/1: .*each once"),
        (("data", None, None), r"Param at blocks/1: .*3 entries .*shape \(4, 4\)"),
    ],
)
def test_what_does_not_fit_the_mesh_is_refused_with_the_path(names, message):
    tree = {"blocks": [tt.Param(jnp.ones(2)), quiet(jnp.ones((4, 4)), names)]}
    with pytest.raises(tt.MetadataError, match=f"get_named_sharding: the {message}"):
        tt.get_named_sharding(tree, grid())


# Annotated initializers.


def test_with_partitioning_annotates():
    mesh = grid()
    zeros = jax.nn.initializers.zeros
    init = tt.with_partitioning(zeros, ("data", "model"), mesh, role="kernel")
    kernel = tt.Param(init(jax.random.key(0), (2, 4)))
    assert kernel.sharding == NamedSharding(mesh, P("data", "model"))
    assert kernel.role == "kernel"
    ambient = tt.with_partitioning(zeros, ("data",))
    with jax.set_mesh(mesh):
        bias = tt.Param(ambient(jax.random.key(0), (2,)))
    assert bias.sharding.spec == P("data")
    assert bias.mesh is None


# A model that is sharded from birth.


@KINDS
@ALL_MODES
def test_a_jitted_constructor_gives_a_sharded_model(mode, kind):
    with jax.set_mesh(grid(kind)):
        model = tt.jit(make, **mode)()
        assert model.kernel.sharding.spec == P(None, "model")
        assert len(model.kernel.sharding.device_set) == 8
        out = tt.jit(lambda m, x: m(x), **mode)(model, jnp.ones((2, 8)))
    assert out.shape == (2, 16)
    assert jnp.allclose(model.kernel[...], unsharded().kernel[...])


def unsharded():
    with tt.use_eager_sharding(False):
        return make()


def test_shardings_serve_jax_as_out_shardings():
    mesh = grid()
    with tt.use_eager_sharding(False):
        shardings = tt.get_named_sharding(tt.eval_shape(make), mesh)
        model = jax.jit(make, out_shardings=shardings)()
    assert model.kernel.sharding == NamedSharding(mesh, P(None, "model"))
    assert model.bias.sharding == model.seen.sharding == NamedSharding(mesh, P())


@SIMPLE_MODES
def test_shardings_serve_our_jit_as_prefixes(mode):
    mesh = grid()
    with tt.use_eager_sharding(False):
        shardings = tt.as_pure(tt.get_named_sharding(tt.eval_shape(make), mesh))
        model = tt.jit(make, out_shardings=shardings, **mode)()
    assert model.kernel.sharding == NamedSharding(mesh, P(None, "model"))

    @tt.jit(in_shardings=(shardings, None), **mode)
    def double(model, x):
        model.kernel[...] = model.kernel * 2
        return model(x)

    double(model, jnp.ones((2, 8)))
    assert model.kernel.sharding == NamedSharding(mesh, P(None, "model"))


# Abstract models.


@KINDS
@pytest.mark.parametrize("graph", [False, True])
def test_an_abstract_model_has_shapes_and_shardings(kind, graph):
    mesh = grid(kind)
    graphdef, state = tt.get_abstract_model(make, mesh, graph=graph)
    kernel = state["kernel"].get_raw_value()
    assert isinstance(kernel, jax.ShapeDtypeStruct)
    assert (kernel.shape, kernel.dtype) == ((8, 16), jnp.float32)
    assert kernel.sharding == NamedSharding(mesh, P(None, "model"))
    assert state["bias"].get_raw_value().sharding == NamedSharding(mesh, P())
    assert state["seen"].sharding == NamedSharding(mesh, P())
    assert jax.sharding.get_abstract_mesh().empty
    with jax.set_mesh(mesh):
        assert tt.graphdef(make(), graph=graph) == graphdef
    assert type(tt.merge(graphdef, state)) is Affine


def test_an_abstract_model_takes_values_placed_by_its_shardings():
    _, state = tt.get_abstract_model(make, mesh := grid())
    values = tt.state(unsharded())
    placed = jax.tree.map(
        lambda x, target: jax.device_put(x, target.sharding),
        tt.as_pure(values),
        tt.as_pure(state),
    )
    assert placed["kernel"].sharding == NamedSharding(mesh, P(None, "model"))


def test_logical_rules_hold_while_an_abstract_model_is_made():
    def init():
        return {"w": tt.Param(jnp.ones((4, 8)), out_sharding=("vocab", "embed"))}

    with tt.logical_axis_rules([("vocab", "model"), ("embed", None)]):
        _, state = tt.get_abstract_model(init, grid())
    assert state["w"].sharding.spec == P("model", None)


def test_containers_of_arrays_in_a_variable_are_sharded_alike():
    def init():
        value = {"a": jnp.ones((4, 2)), "b": jnp.ones(4)}
        return {"w": tt.Param(value, out_sharding=("model",), eager_sharding=False)}

    _, state = tt.get_abstract_model(init, mesh := grid())
    for leaf in jax.tree.leaves(state["w"].get_raw_value()):
        assert leaf.sharding == NamedSharding(mesh, P("model"))


def test_a_mesh_of_devices_that_are_not_there_will_do():
    mesh = AbstractMesh((16, 32), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    _, state = tt.get_abstract_model(make, mesh)
    sharding = state["kernel"].sharding
    assert sharding.spec == P(None, "model")
    assert sharding.mesh.shape == {"data": 16, "model": 32}


def test_an_abstract_model_with_an_unknown_axis_is_refused_with_the_path():
    def init():
        return {"blocks": [make(), tt.Param(jnp.ones(4), out_sharding=("modle",))]}

    message = r"get_abstract_model: the Param at blocks/1: .*modle"
    with pytest.raises(tt.MetadataError, match=message):
        tt.get_abstract_model(init, grid())


def test_errors_of_the_constructor_come_through():
    def init():
        raise ValueError("no such size")

    with pytest.raises(ValueError, match=r"^no such size"):
        tt.get_abstract_model(init, grid())


def test_sharing_in_an_abstract_model_needs_graph_mode():
    def init():
        shared = tt.Param(jnp.ones(4))
        return {"a": shared, "b": shared}

    with pytest.raises(tt.AliasError):
        tt.get_abstract_model(init, grid(), graph=False)
    _, state = tt.get_abstract_model(init, grid(), graph=True)
    assert len(tt.to_flat_state(state)) == 1


# Shardings on what is abstract already.

SHAPE = jax.ShapeDtypeStruct((4, 2), jnp.float32)


def test_abstract_variables_get_the_sharding_of_the_ambient_mesh():
    given = {"w": quiet(SHAPE, ("model",)), "b": tt.Param(SHAPE), "x": jnp.ones(2)}
    with jax.set_mesh(grid()):
        found = tt.as_abstract(given)
    assert found["w"].sharding.spec == P("model")
    assert (found["w"].shape, found["w"].dtype) == (SHAPE.shape, SHAPE.dtype)
    assert found["b"] is given["b"]
    assert found["x"] is given["x"]
    assert given["w"].get_raw_value() is SHAPE


def test_the_mesh_of_the_metadata_comes_first():
    mesh = grid()
    found = tt.as_abstract(quiet(SHAPE, ("model",), mesh=mesh))
    assert found.sharding == NamedSharding(mesh, P("model"))
    own = NamedSharding(mesh, P("data"))
    assert tt.as_abstract(quiet(SHAPE, own)).sharding == own


def test_concrete_and_placed_variables_are_left_alone():
    mesh = grid()
    placed = SHAPE.update(sharding=NamedSharding(mesh, P("data")))
    given = {
        "concrete": quiet(jnp.ones(4), ("model",)),
        "placed": quiet(placed, ("model",)),
        "empty": quiet(SHAPE, ()),
    }
    with jax.set_mesh(mesh):
        found = tt.as_abstract(given)
    assert all(found[key] is given[key] for key in given)


def test_as_abstract_says_what_is_missing_and_where():
    with pytest.raises(tt.MetadataError, match=r"as_abstract: .*at m/w: A mesh is req"):
        tt.as_abstract({"m": {"w": quiet(SHAPE, ("model",))}})
    with (
        jax.set_mesh(grid()),
        pytest.raises(tt.MetadataError, match=r"as_abstract: the Param at m/w: .*'zz'"),
    ):
        tt.as_abstract({"m": {"w": quiet(SHAPE, ("zz",))}})


def test_as_abstract_keeps_sharing_in_graph_mode_only():
    shared = quiet(SHAPE, ("model",))
    with jax.set_mesh(grid()):
        found = tt.as_abstract({"a": shared, "b": shared}, graph=True)
        with pytest.raises(tt.AliasError, match="as_abstract"):
            tt.as_abstract({"a": shared, "b": shared}, graph=False)
    assert found["a"] is found["b"]


def test_the_older_name_warns():
    with pytest.warns(DeprecationWarning, match="use `as_abstract`"):
        found = _sharding.abstract_with_sharding(quiet(SHAPE, ("model",), mesh=grid()))
    assert found.sharding.spec == P("model")


# Names of axes that are not there.


@pytest.mark.parametrize("names", [(), ("model",)])
@pytest.mark.parametrize("axis", [1, 2])
def test_D37_removing_from_a_short_annotation_names_what_is_missing(names, axis):
    variable = quiet(jnp.ones((2, 2, 2)), names)
    run = tt.transform_metadata(
        lambda v: None, in_axes=axis, out_axes=axis, partition="layers"
    )
    message = rf"expected 'layers' at axis {axis} of out_sharding .* found None"
    with pytest.raises(tt.MetadataError, match=message):
        run(variable)
    assert variable.out_sharding == names


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_D37_what_was_added_to_an_empty_annotation_can_be_removed(axis):
    seen = []

    @tt.transform_metadata(out_axes=axis, partition="layers")
    def make_one(x):
        return quiet(jnp.ones((2, 2)) * x, ())

    @tt.transform_metadata(in_axes=axis, partition="layers")
    def use(v):
        seen.append(v.out_sharding)

    stacked = tt.vmap(make_one, out_axes=axis)(jnp.arange(3.0))
    assert stacked.out_sharding == (*[None] * axis, "layers")
    tt.vmap(use, in_axes=axis)(stacked)
    assert seen == [(None,) * axis]
    assert stacked.out_sharding == (*[None] * axis, "layers")
