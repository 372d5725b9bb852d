# SPDX-License-Identifier: Apache-2.0
"""GraphDef: the static description of an object.

Types, static values, kinds and metadata of Variables, and which objects are shared.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from jax.tree_util import register_static

from treetap._core.paths import Key, Opened, Path
from treetap._core.settings import Mode
from treetap._core.static_values import Described
from treetap._core.trees.layout import Structure
from treetap._core.variables.metadata import MISSING, special_of

M = TypeVar("M")


class ObjectSpec(NamedTuple):
    """An object of ours: its class, its layout and statics, its children.

    `kinds` and `metadata` are the children's when all are Variables of a tree.
    """

    number: int | None
    type: type
    structure: Structure
    children: "tuple[Spec, ...]"
    kinds: tuple[Any, ...] | None = None
    metadata: tuple[dict[str, Any], ...] | None = None

    @property
    def keys(self) -> tuple[Key, ...]:
        """The names of the children."""
        return self.structure[0].keys


ContainerSpec = Opened  # a container that JAX knows; its children are descriptions


class VariableSpec(NamedTuple):
    """A Variable: its kind and metadata."""

    number: int | None
    type: type
    metadata: dict[str, Any]


class LeafSpec(NamedTuple):
    """Any other leaf; numbered when it is a `jax.Ref`, which has an identity."""

    number: int | None


class SharedSpec(NamedTuple):
    """Something met before, by its number."""

    shared_with: int


Spec = ObjectSpec | ContainerSpec | VariableSpec | LeafSpec | SharedSpec
PLAIN_LEAF = LeafSpec(None)
NOTHING: Any = MISSING  # the state of what holds no leaf


@register_static
@dataclass(slots=True, repr=False)
class GraphDef(Generic[M]):
    """The static description of an object; equal for objects of equal structure.

    It has no leaves, so it can be an argument of a jitted function. Hashing does not
    need static values or metadata to be hashable.
    """

    spec: Spec
    num_leaves: int
    graph: bool | Mode
    _hash: int | None = field(default=None, init=False, compare=False)

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash((self.num_leaves, self.graph, outline(self.spec)))
        return self._hash

    def __repr__(self) -> str:
        lines = "\n".join(
            f"{'  ' * (len(path) + 1)}{path[-1] if path else '(root)'}: {text_of(part)}"
            for path, part in parts_of(self.spec)
        )
        mode = "graph" if self.graph else "tree"
        return f"GraphDef({mode}, {self.num_leaves} leaves\n{lines}\n)"

    def __reduce__(self) -> Any:
        return GraphDef, (self.spec, self.num_leaves, self.graph)


def outline(spec: Spec) -> Any:
    """The hashable part of a description: types, names and sharing."""
    if isinstance(spec, VariableSpec):  # quicker than `match`; every trace does this
        return spec.number, spec.type
    if isinstance(spec, ObjectSpec):
        below = spec.kinds or tuple(map(outline, spec.children))
        return spec.type, spec.structure[0], below
    if isinstance(spec, ContainerSpec):
        return spec.type, spec.keys, tuple(map(outline, spec.children))
    return spec


def can_change(spec: Spec) -> bool:
    """Whether a static value in a description could be changed in place."""
    return any(
        (isinstance(part, ObjectSpec) and _may_change(part.structure[1]))
        or (isinstance(part, VariableSpec) and _may_change(part.metadata))
        for _, part in parts_of(spec)
    )


def _may_change(facts: Any) -> bool:
    return isinstance(facts, Described) and facts.can_change


def parts_of(spec: Spec, path: Path = ()) -> Iterator[tuple[Path, Spec]]:
    """A description and all those in it with their paths, outer ones first."""
    yield path, spec
    if isinstance(spec, ObjectSpec | ContainerSpec):
        for key, child in zip(spec.keys, spec.children):
            yield from parts_of(child, (*path, key))


def objects_in(spec: Spec) -> Iterator[tuple[Path, ObjectSpec]]:
    """The objects of a description with their paths, outer ones first."""
    return ((at, part) for at, part in parts_of(spec) if isinstance(part, ObjectSpec))


def leaf_paths(spec: Spec) -> Iterator[Path]:
    """The paths of the leaves of a description, in order."""
    leaves = VariableSpec | LeafSpec
    return (path for path, part in parts_of(spec) if isinstance(part, leaves))


def has_shared(spec: Spec) -> bool:
    """Whether a description says that something is shared."""
    return any(isinstance(part, SharedSpec) for _, part in parts_of(spec))


def text_of(spec: Spec) -> str:
    """The text of a description, without its children."""
    match spec:
        case ObjectSpec(_, kind, (layout, statics, _)):
            pairs = zip(layout.static_names, statics)
            shown = ", ".join(f"{name}={value!r}" for name, value in pairs)
            return f"{kind.__name__}({shown})"
        case ContainerSpec(kind):
            return kind.__name__
        case VariableSpec(_, kind, metadata):
            return f"{kind.__name__}{special_of(metadata) or ''}"
        case SharedSpec(number):
            return f"the same as number {number}"
        case _:
            return "leaf"
