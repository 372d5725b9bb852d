# SPDX-License-Identifier: Apache-2.0
"""Results on their way through JAX.

A result that is a plain tree goes as it is. Parts that share something, among each
other or with the arguments, go *packed*: as lists of values, with a static description
that puts them together again outside. So do parts whose prefix speaks leaf by leaf:
their values are sorted into one list for each prefix value.
"""

from typing import Any, NamedTuple

import jax
from jax.tree_util import register_static

from treetap._core.errors import AliasError, StructureError
from treetap._core.settings import Mode
from treetap._core.trees.attributes import is_object
from treetap._core.trees.build import regrow
from treetap._core.trees.flatten import Flattening, take_leaves
from treetap._core.trees.graphdef import GraphDef
from treetap._core.variables.variable import raw_values
from treetap._transforms.lift.prefixes import (
    Spread,
    check_prefix,
    is_entry,
    is_whole,
    values_in,
)


@register_static
class Packing(NamedTuple):
    """How to unpack a part of a result: its description, and the lane of each leaf."""

    graphdef: GraphDef
    of_leaf: tuple[int, ...]


class Packed(NamedTuple):
    """A part of a result as values by lane, and how to put them together."""

    packing: Any
    lanes: tuple[Any, ...]


def _is_packed(value: Any) -> bool:
    return isinstance(value, Packed)


class Results:
    """The results of a transform: where they lie, given by a prefix.

    Args:
        prefix: A prefix of the result.
        mode: The mode of the transform.
        name: The transform.
        argument: The name of the prefix, for messages.
        nothing: A prefix for what has no leaves.
    """

    def __init__(
        self,
        prefix: Any,
        mode: Mode,
        name: str = "",
        argument: str = "",
        nothing: Any = None,
    ):
        check_prefix(prefix, name, argument, mode)
        self.prefix = prefix
        self._is_packing = bool(mode) and any(
            map(is_whole, jax.tree.leaves(prefix, is_leaf=is_entry))
        )

        def for_jax(part: Any) -> Any:
            return Packed(nothing, tuple(_lanes(part))) if is_whole(part) else part

        self.for_jax = prefix
        if self._is_packing:
            self.for_jax = jax.tree.map(for_jax, prefix, is_leaf=is_entry)

    def pack(self, out: Any, walk: Flattening, work: Spread) -> Any:
        """A result as JAX can carry it.

        Args:
            out: What the function returned.
            walk: A walk that numbers objects, those of the arguments first.
            work: A spreading that knows the arguments' prefixes.
        """
        if not self._is_packing and (not walk.graph or _is_plain(out, walk)):
            return out

        def pack(prefix: Any, part: Any) -> Any:
            before = len(work.values)
            if self.prefix is not None:  # all ways to a shared part give it one prefix
                work.follow(prefix, part, ("out",))
            if self._is_packing and is_whole(prefix):
                return _packed(part, walk, _lanes(prefix), work.values[before:])
            return jax.tree.map(
                lambda x: _packed(x, walk) if is_object(x) else x,
                part,
                is_leaf=is_object,
            )

        return jax.tree.map(pack, self.prefix, out, is_leaf=is_entry)


def _is_plain(out: Any, walk: Flattening) -> bool:
    """Whether a result is a tree that shares nothing with itself or the arguments."""
    if walk.graph is Mode.UPDATES:
        return not any(map(is_object, jax.tree.leaves(out, is_leaf=is_object)))
    try:
        take_leaves(out, False, walk.name)
    except (AliasError, StructureError):
        return False
    return True


def _lanes(prefix: Any) -> list[Any]:
    """The distinct values of a prefix for one object."""
    found: list[Any] = []
    for value in values_in(prefix):
        if value not in found:
            found.append(value)
    return found


def _packed(
    part: Any, walk: Flattening, prefixes: list[Any] | None = None, values: Any = ()
) -> Packed:
    """One part, its values in one lane, or in one for each of some prefixes.

    Args:
        part: The part.
        walk: Numbers objects.
        prefixes: The prefixes that make lanes.
        values: The prefix of each leaf.
    """
    before = len(walk.leaves)
    graphdef = walk.definition(part)
    raw = raw_values(walk.leaves[before:])
    if prefixes is None:
        return Packed(Packing(graphdef, (0,) * len(raw)), (raw,))
    of_leaf = tuple(map(prefixes.index, values))
    lanes: list[list[Any]] = [[] for _ in prefixes]
    for lane, value in zip(of_leaf, raw):
        lanes[lane].append(value)
    return Packed(Packing(graphdef, of_leaf), tuple(lanes))


def repack(like: Any, tree: Any, name: str) -> Any:
    """A tree like a result, in the form that the result came from JAX in.

    Args:
        like: The result, packed.
        tree: The tree.
        name: The transform.
    """
    walk = Flattening(tree, Mode.GRAPH, name)

    def repacked(packed: Any, part: Any) -> Any:
        if not _is_packed(packed):
            return part
        before = len(walk.leaves)
        walk.definition(part)
        values = raw_values(walk.leaves[before:])
        if len(values) != len(packed.packing.of_leaf):
            raise StructureError(
                f"{name}: the cotangent of a part of the result has {len(values)} "
                f"leaves, the part has {len(packed.packing.of_leaf)}. Give a tree like "
                "the result."
            )
        return packed._replace(lanes=(values,))

    return jax.tree.map(repacked, like, tree, is_leaf=_is_packed)


def has_packed(out: Any) -> bool:
    """Whether a result has packed parts."""
    return any(map(_is_packed, jax.tree.leaves(out, is_leaf=_is_packed)))


def unpack(out: Any, made: dict[int, Any]) -> Any:
    """A result with its packed parts put together.

    Args:
        out: What came back from JAX.
        made: Objects by number: the caller's, and those made so far.
    """

    def unpacked(part: Any) -> Any:
        if not _is_packed(part):
            return part
        supplies = [iter(lane) for lane in part.lanes]
        values = [next(supplies[lane]) for lane in part.packing.of_leaf]
        return regrow(part.packing.graphdef, values, made)[0]

    return jax.tree.map(unpacked, out, is_leaf=_is_packed)


WHOLE = Results(None, Mode.TREE)
