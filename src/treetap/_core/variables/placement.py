# SPDX-License-Identifier: Apache-2.0
"""Placement: from a Variable's `out_sharding` annotation to a sharded array.

An annotation names mesh axes, or logical axes that rules map to mesh axes. Placing
happens once, when a Variable is made; later writes keep the array's own sharding. Where
a compiler would choose, `constrain_to_annotation` tells it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from treetap._core.errors import MetadataError
from treetap._core.scopes import scoped
from treetap._core.variables.values import is_key

Rules = Sequence[tuple[str, Any]]

_context_rules: ContextVar[Rules] = ContextVar("logical_axis_rules", default=())


@contextmanager
def logical_axis_rules(rules: Rules) -> Iterator[None]:
    """Maps logical axis names to mesh axes while the block runs.

    Args:
        rules: Pairs of a logical name and a mesh axis (a name, several, or None).

    Examples:
        >>> import treetap as tt
        >>> with tt.logical_axis_rules([("embed", "model")]):
        ...     pass
    """
    with scoped(_context_rules, tuple((name, axis) for name, axis in rules)):
        yield


def merged_rules(own: Rules | None) -> dict[str, Any]:
    """The rules of the context together with a Variable's own."""
    merged: dict[str, Any] = dict(_context_rules.get())
    for name, axis in own or ():
        if merged.setdefault(name, axis) != axis:
            raise MetadataError(
                f"The logical axis {name!r} is mapped to {merged[name]!r} by "
                f"`logical_axis_rules` and to {axis!r} by `sharding_rules`. "
                "Keep one of them."
            )
    return merged


def partition_spec(annotation: Any, rules: Rules | None) -> PartitionSpec:
    """Turns an annotation of axis names into a PartitionSpec over mesh axes."""
    names = merged_rules(rules)
    annotation = (annotation,) if isinstance(annotation, str) else annotation

    def mesh_axis(entry: Any) -> Any:
        if isinstance(entry, tuple | list):
            return tuple(mesh_axis(part) for part in entry)
        return names.get(entry, entry) if isinstance(entry, str) else entry

    return PartitionSpec(*map(mesh_axis, annotation))


def mesh_of(metadata: Mapping[str, Any]) -> Any:
    """The mesh to place on: the metadata's, the annotation's, or the ambient one."""
    annotation = metadata.get("out_sharding")
    own = metadata.get("mesh")
    inside = getattr(getattr(annotation, "sharding", annotation), "mesh", None)
    if own is not None and inside is not None and own != inside:
        raise MetadataError(
            f"The metadata `mesh` is {own}, but `out_sharding` was made for {inside}."
        )
    ambient = jax.sharding.get_abstract_mesh()
    known = (own, inside, None if ambient.empty else ambient)
    return next((mesh for mesh in known if mesh is not None), None)


def resolve_sharding(metadata: Mapping[str, Any]) -> Any:
    """The sharding (or layout format) that the metadata ask for; None if none."""
    annotation = metadata.get("out_sharding")
    if annotation is None or (isinstance(annotation, tuple | list) and not annotation):
        return None
    inner = getattr(annotation, "sharding", annotation)  # a Format holds a sharding
    mesh = mesh_of(metadata)
    if mesh is None:
        raise MetadataError(
            f"A mesh is required to place a Variable with out_sharding={annotation!r}. "
            "Make it under `jax.set_mesh(mesh)`, pass `mesh=` as metadata, or switch "
            "placement off with `use_eager_sharding(False)`."
        )
    if isinstance(inner, NamedSharding):
        return annotation
    spec = partition_spec(inner, metadata.get("sharding_rules"))
    used = jax.tree.leaves(tuple(spec))
    if unknown := [n for n in used if isinstance(n, str) and n not in mesh.axis_names]:
        raise MetadataError(
            f"out_sharding={annotation!r} names the mesh axes {unknown}, but the mesh "
            f"has {list(mesh.axis_names)}. Use one of those, or map the name to one "
            "with `logical_axis_rules`."
        )
    return NamedSharding(mesh, spec)


def place(value: Any, metadata: Mapping[str, Any]) -> Any:
    """Returns `value` placed as its metadata ask; abstract values are left alone."""
    sharding = resolve_sharding(metadata)
    if sharding is None or isinstance(value, jax.ShapeDtypeStruct):
        return value
    mesh = getattr(sharding, "sharding", sharding).mesh
    kinds = set(mesh.axis_types)
    if kinds == {AxisType.Auto}:
        return jax.lax.with_sharding_constraint(value, sharding)
    if kinds == {AxisType.Explicit}:
        return jax.sharding.reshard(value, sharding)
    raise MetadataError(
        f"The mesh mixes axis types {mesh.axis_types}. Variables can be placed on a "
        "mesh whose axes are all Auto or all Explicit."
    )


def constrain_to_annotation(value: Any, metadata: Mapping[str, Any]) -> Any:
    """Returns `value`, computed inside a `jit`, to lie as its Variable is annotated.

    On Auto axes the compiler chooses where results lie. A parameter that it moves has a
    step compiled again. What cannot be known here is left to it: without a mesh, where
    rules are no longer in force, and on other axes than the annotation is for.
    """
    is_told = metadata.get("out_sharding") is not None and metadata["eager_sharding"]
    if not is_told or not isinstance(value, Tracer):
        return value
    try:
        sharding = resolve_sharding(metadata)
        if sharding is None:
            return value
        inner = getattr(sharding, "sharding", sharding)
        around = jax.sharding.get_abstract_mesh()
        if {*around.axis_types, *inner.mesh.axis_types} != {AxisType.Auto}:
            return value
        inner.shard_shape(value.shape)
    except (MetadataError, ValueError):
        return value
    return jax.lax.with_sharding_constraint(value, sharding)


def put(value: Any, sharding: Any) -> Any:
    """`jax.device_put`, of random keys to devices of other processes too."""
    if not is_key(value) or sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    numbers = jax.device_put(jax.random.key_data(value), sharding)
    return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(value))
