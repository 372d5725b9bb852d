# SPDX-License-Identifier: Apache-2.0
"""Sharding helpers: the shardings of a whole model, read off its annotations.

A Variable says by its metadata `out_sharding` how it is to lie on a mesh (see
`placement`). Here a tree of Variables becomes a tree of specs or of shardings, as
`jit` takes them for `out_shardings`, or a tree of abstract arrays that know their
sharding, as a restored checkpoint wants them. Values are never read, only their shapes;
what does not fit the mesh is refused with the path of the Variable.
"""

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from treetap._core.errors import MetadataError
from treetap._core.paths import show_path
from treetap._core.settings import Mode, resolve_graph, use_eager_sharding
from treetap._core.trees.build import rebuilt
from treetap._core.trees.sharing import places
from treetap._core.trees.split import split
from treetap._core.variables.metadata import VariableMetadata, with_metadata
from treetap._core.variables.placement import partition_spec, resolve_sharding
from treetap._core.variables.variable import Variable, make
from treetap._transforms.lift.lift import Lift, refuse_bound_method

T = TypeVar("T")

NOWHERE = PartitionSpec()  # no axis is split


def _spec_of(metadata: Mapping[str, Any]) -> PartitionSpec | None:
    """The spec that an annotation asks for, with names of mesh axes; None if none."""
    annotation = metadata.get("out_sharding")
    if annotation is None:
        return None
    inner = getattr(annotation, "sharding", annotation)  # a Format holds a sharding
    if isinstance(inner, NamedSharding):
        return inner.spec
    if isinstance(inner, str):
        raise MetadataError(
            f"out_sharding={inner!r} is a string; it must name every axis: "
            f"({inner!r},) for the first one."
        )
    return partition_spec(inner, metadata.get("sharding_rules"))


def _checked(make_sharding: Callable[[], T], value: Any) -> T:
    """A sharding, once it is known to fit its mesh and the value."""
    try:
        sharding: Any = make_sharding()
    except MetadataError:
        raise
    except Exception as error:  # an axis the mesh has not, or one named twice
        raise MetadataError(
            f"{error} Name axes of the mesh, each once; logical names are mapped to "
            "them by `logical_axis_rules` or the metadata `sharding_rules`."
        ) from None
    spec = getattr(sharding, "sharding", sharding).spec
    shape = getattr(value, "shape", None)
    if shape is not None and len(spec) > len(shape):
        raise MetadataError(
            f"{spec} has {len(spec)} entries for a value of shape {tuple(shape)}. Give "
            "one for each dimension, or fewer."
        )
    return sharding


def _sharding_of(spec: PartitionSpec, value: Any, mesh: Any) -> NamedSharding:
    return _checked(lambda: NamedSharding(mesh, spec), value)


def _mapped(
    tree: T,
    name: str,
    variable: Callable[[Variable[Any]], Any],
    leaf: Callable[[Any], Any] = lambda value: value,
    graph: bool = True,
) -> T:
    """The same tree with other values; an error says at which path it arose."""

    def at_its_path(found: Variable[Any]) -> Any:
        try:
            return variable(found)
        except MetadataError as error:
            path = next(path for path, value in places(tree) if value is found)
            where = f"the {type(found).__name__} at {show_path(path)}"
            raise MetadataError(f"{name}: {where}: {error}") from None

    return rebuilt(tree, graph, name, variable=at_its_path, leaf=leaf)


def _with_value(variable: Variable[Any], value: Any) -> Any:
    return make(type(variable), value, variable._metadata)


def _with_specs(tree: T, name: str, made: Callable[[PartitionSpec, Any], Any]) -> T:
    """The tree with what is made of spec and value in place of each value."""

    def leaf(value: Any) -> Any:
        return made(NOWHERE, value) if hasattr(value, "shape") else None

    def variable(found: Variable[Any]) -> Any:
        raw = found.get_raw_value()
        spec = _spec_of(found._metadata)
        return _with_value(found, leaf(raw) if spec is None else made(spec, raw))

    return _mapped(tree, name, variable, leaf)


def get_partition_spec(tree: T) -> T:
    """The tree with each Variable's value replaced by its PartitionSpec.

    Args:
        tree: A Module, a State, or any tree of Variables and arrays, concrete or
            abstract.

    Returns:
        The same tree. A value without an annotation has the spec `P()` if it has a
        shape, else None; logical names have gone through the rules.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> w = tt.Param(
        ...     jnp.ones((2, 4)), out_sharding=("embed", None), eager_sharding=False
        ... )
        >>> with tt.logical_axis_rules([("embed", "model")]):
        ...     specs = tt.get_partition_spec({"w": w})
        >>> tuple(specs["w"].get_raw_value())
        ('model', None)
    """
    return _with_specs(tree, "get_partition_spec", lambda spec, value: spec)


def get_named_sharding(tree: T, mesh: Mesh | AbstractMesh) -> T:
    """The tree with each Variable's value replaced by its NamedSharding.

    The result serves as `out_shardings` or `in_shardings` of a jit.

    Args:
        tree: As for `get_partition_spec`.
        mesh: The mesh to shard over; every axis that is named must be one of its own.

    Returns:
        The same tree, with None where `get_partition_spec` has None.

    Examples:
        >>> import jax, jax.numpy as jnp, treetap as tt
        >>> mesh = jax.make_mesh((1,), ("model",))
        >>> w = tt.Param(jnp.ones(4), out_sharding=("model",), eager_sharding=False)
        >>> tt.get_named_sharding({"w": w}, mesh)["w"].spec
        P('model',)
    """
    made = functools.partial(_sharding_of, mesh=mesh)
    return _with_specs(tree, "get_named_sharding", made)


def with_partitioning(
    initializer: Callable[..., Any],
    sharding: Any,
    mesh: Mesh | None = None,
    **metadata: Any,
) -> Callable[..., VariableMetadata[Any]]:
    """Wraps an initializer so that the Variable made from it is annotated.

    Args:
        initializer: The initializer.
        sharding: The annotation `out_sharding`: an axis name or None for each
            dimension, a PartitionSpec or a NamedSharding.
        mesh: The mesh to place the Variable on; the ambient one by default.
        **metadata: More metadata.

    Examples:
        >>> import jax, treetap as tt
        >>> init = tt.with_partitioning(jax.nn.initializers.zeros, (None, "model"))
        >>> with tt.use_eager_sharding(False):
        ...     kernel = tt.Param(init(jax.random.key(0), (2, 4)))
        >>> kernel.out_sharding
        (None, 'model')
    """
    return with_metadata(initializer, out_sharding=sharding, mesh=mesh, **metadata)


def get_abstract_model(
    init_fn: Callable[[], Any], mesh: Mesh | AbstractMesh, *, graph: bool | None = None
) -> tuple[Any, Any]:
    """The shapes and shardings of a model that is never made.

    Args:
        init_fn: Makes the model; it is traced under the mesh.
        mesh: The mesh. An abstract one serves to plan for devices that are not there.
        graph: Keep shared references instead of refusing them.

    Returns:
        The GraphDef, and a State whose Variables hold `jax.ShapeDtypeStruct`s with a
        NamedSharding each: the target for a checkpoint to be restored.

    Examples:
        >>> import jax, jax.numpy as jnp, treetap as tt
        >>> mesh = jax.make_mesh((1,), ("model",))
        >>> def init():
        ...     return {"w": tt.Param(jnp.ones((2, 4)), out_sharding=(None, "model"))}
        >>> graphdef, state = tt.get_abstract_model(init, mesh)
        >>> state["w"].shape, state["w"].sharding.spec
        ((2, 4), P(None, 'model'))
    """
    refuse_bound_method(init_fn, "get_abstract_model")
    is_graph = resolve_graph(graph)
    lift = Lift("get_abstract_model", Mode(is_graph))

    traced = functools.partial(lift.abstract, init_fn, lift.inputs((), {}))
    is_abstract = isinstance(mesh, AbstractMesh)
    under: Any = jax.sharding.use_abstract_mesh if is_abstract else jax.set_mesh

    def placed(value: Any, spec: PartitionSpec = NOWHERE) -> Any:
        if not isinstance(value, jax.ShapeDtypeStruct):
            return value
        return value.update(sharding=_sharding_of(spec, value, mesh))

    def variable(found: Variable[Any]) -> Any:
        spec = _spec_of(found._metadata) or NOWHERE
        raw = jax.tree.map(lambda x: placed(x, spec), found.get_raw_value())
        return _with_value(found, raw)

    def annotated(model: Any) -> Any:
        return _mapped(model, lift.name, variable, placed, is_graph)

    try:
        with under(mesh):
            model = traced()
    except Exception as error:
        raise _with_path(lambda: annotated(traced())) or error from None
    graphdef, state = split(annotated(model), graph=is_graph)
    return graphdef, state


def _with_path(build: Callable[[], Any]) -> MetadataError | None:
    """Why a model cannot be made under a mesh, if it is for an annotation.

    A Variable that cannot be placed does not know its path; left unplaced, it has one.
    """
    try:
        with use_eager_sharding(False):
            build()
    except Exception as error:  # if there is more to it, the first error tells
        return error if isinstance(error, MetadataError) else None
    return None


def as_abstract(tree: T, graph: bool | None = None) -> T:
    """The tree with shardings on abstract Variables that are annotated.

    Args:
        tree: Any tree of Variables, such as `eval_shape` gives.
        graph: Keep shared references instead of refusing them.

    Returns:
        A new tree. Variables that hold a `jax.ShapeDtypeStruct` without a sharding, and
        have an `out_sharding`, are copies with a NamedSharding over the mesh of their
        metadata, or the ambient one; all other values are those given.

    Examples:
        >>> import jax, jax.numpy as jnp, treetap as tt
        >>> mesh = jax.make_mesh((1,), ("model",))
        >>> shape = jax.ShapeDtypeStruct((4,), jnp.float32)
        >>> w = tt.Param(shape, out_sharding=("model",), eager_sharding=False)
        >>> with jax.set_mesh(mesh):
        ...     tt.as_abstract({"w": w})["w"].sharding.spec
        P('model',)
    """

    def variable(found: Variable[Any]) -> Any:
        raw = found.get_raw_value()
        is_unplaced = isinstance(raw, jax.ShapeDtypeStruct) and raw.sharding is None
        if not (is_unplaced and _spec_of(found._metadata)):
            return found
        sharding = _checked(lambda: resolve_sharding(found._metadata), raw)
        return _with_value(found, raw.update(sharding=sharding))

    return _mapped(tree, "as_abstract", variable, graph=resolve_graph(graph))


def abstract_with_sharding(tree: T, graph: bool | None = None) -> T:
    """Deprecated: use `as_abstract`."""
    text = "`abstract_with_sharding` is deprecated; use `as_abstract`."
    warnings.warn(text, DeprecationWarning, stacklevel=2)
    return as_abstract(tree, graph)
