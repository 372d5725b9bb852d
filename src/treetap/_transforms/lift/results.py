# SPDX-License-Identifier: Apache-2.0
"""Results on their way through JAX.

A result that is a plain tree goes as it is. A part that shares something, with another
part or with the arguments, goes as a `FlatPart`: lists of values, and a static
description that puts them together again outside. So does a part whose prefix speaks
leaf by leaf: its values are sorted into one list for each prefix value.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.tree_util import register_static

from treetap._core.errors import AliasError, StructureError
from treetap._core.settings import Mode
from treetap._core.trees.attributes import is_object
from treetap._core.trees.build import regrow
from treetap._core.trees.flatten import Flattening, take_leaves
from treetap._core.trees.graphdef import GraphDef
from treetap._core.variables.values import is_ref
from treetap._core.variables.variable import raw_values
from treetap._transforms.lift.prefixes import (
    Spread,
    check_prefix,
    distinct,
    is_entry,
    is_whole,
    values_in,
)


@register_static
class PartDef(NamedTuple):
    """How to rebuild a part of a result: a description, and the group of each leaf."""

    graphdef: GraphDef
    of_leaf: tuple[int, ...]


class FlatPart(NamedTuple):
    """A part of a result as values, grouped by prefix, and how to put them together."""

    definition: Any  # a PartDef; in a prefix, that of what has no leaves
    groups: tuple[Any, ...]


def _is_flat_part(value: Any) -> bool:
    return isinstance(value, FlatPart)


@dataclass(eq=False)
class Results:
    """The results of a transform: where they lie, given by a prefix.

    Attributes:
        prefix: A prefix of the result.
        mode: The mode of the transform.
        name: The transform.
        argument: The name of the prefix, for messages.
        nothing: A prefix for what has no leaves.
    """

    prefix: Any
    mode: Mode
    name: str = ""
    argument: str = ""
    nothing: Any = None

    def __post_init__(self) -> None:
        check_prefix(self.prefix, self.name, self.argument, self.mode)
        parts = jax.tree.leaves(self.prefix, is_leaf=is_entry)
        self._goes_flat = bool(self.mode) and any(map(is_whole, parts))
        # The prefix as JAX is given it.
        self.for_jax = jax.tree.map(self._for_jax, self.prefix, is_leaf=is_entry)

    def _for_jax(self, part: Any) -> Any:
        if not (self._goes_flat and is_whole(part)):
            return part
        return FlatPart(self.nothing, tuple(distinct(values_in(part))))

    def flatten(self, out: Any, walk: Flattening, spreading: Any = None) -> Any:
        """A result as JAX can carry it.

        Args:
            out: What the function returned.
            walk: A walk that numbers objects, those of the arguments first.
            spreading: One that knows the arguments' prefixes.
        """
        if not self._goes_flat and (not walk.graph or _is_plain(out, walk)):
            return out
        work: Spread = spreading or Spread(walk.name, "the out prefix")

        def flatten(prefix: Any, part: Any) -> Any:
            before = len(work.values)
            if self.prefix is not None:  # all ways to a shared part give it one prefix
                work.follow(prefix, part, ("out",))
            if self._goes_flat and is_whole(prefix):
                prefixes = distinct(values_in(prefix))
                return _flat(part, walk, prefixes, work.values[before:])
            return jax.tree.map(
                lambda x: _flat(x, walk) if _has_identity(x) else x,
                part,
                is_leaf=is_object,
            )

        return jax.tree.map(flatten, self.prefix, out, is_leaf=is_entry)


def _has_identity(value: Any) -> bool:
    """Whether a part of a result may be one of the arguments itself."""
    return is_object(value) or is_ref(value)


def _is_plain(out: Any, walk: Flattening) -> bool:
    """Whether a result is a tree that shares nothing with itself or the arguments."""
    if walk.graph is Mode.UPDATES:
        return not any(map(_has_identity, jax.tree.leaves(out, is_leaf=is_object)))
    try:
        take_leaves(out, False, walk.name)
    except (AliasError, StructureError):
        return False
    return True


def _flat(
    part: Any, walk: Flattening, prefixes: Sequence[Any] = (None,), values: Any = ()
) -> FlatPart:
    """One part, its values in one group for each of some prefixes.

    Args:
        part: The part.
        walk: Numbers objects.
        prefixes: The prefixes that make groups.
        values: The prefix of each leaf; all have None by default.
    """
    before = len(walk.leaves)
    graphdef = walk.definition(part)
    raw = raw_values(walk.leaves[before:])
    of_leaf = tuple(map(prefixes.index, values or [None] * len(raw)))
    groups = tuple(
        [value for number, value in zip(of_leaf, raw) if number == group]
        for group in range(len(prefixes))
    )
    return FlatPart(PartDef(graphdef, of_leaf), groups)


def as_tuple(out: Any, count: int, demand: str) -> tuple[Any, ...]:
    """What a function returned, which must be a tuple of so many items.

    Args:
        out: The result.
        count: How many items it must have.
        demand: Who demands that, for the message.
    """
    if isinstance(out, tuple) and len(out) == count:
        return out
    found = f"{len(out)} items" if isinstance(out, tuple) else f"a {type(out).__name__}"
    raise StructureError(f"{demand}; it returned {found}.")


def flatten_like(like: Any, tree: Any, name: str) -> Any:
    """A tree like a result, in the form that the result came from JAX in.

    Args:
        like: The result, with its flat parts.
        tree: The tree.
        name: The transform.
    """
    walk = Flattening(tree, Mode.GRAPH, name)

    def flattened(form: Any, part: Any) -> Any:
        if not _is_flat_part(form):
            return part
        flat = _flat(part, walk)
        count, wanted = len(flat.groups[0]), len(form.definition.of_leaf)
        if count != wanted:
            raise StructureError(
                f"{name}: the cotangent of a part of the result has {count} leaves, "
                f"the part has {wanted}. Give a tree like the result."
            )
        return form._replace(groups=flat.groups)

    return jax.tree.map(flattened, like, tree, is_leaf=_is_flat_part)


def has_flat_parts(out: Any) -> bool:
    """Whether parts of a result went flat."""
    return any(map(_is_flat_part, jax.tree.leaves(out, is_leaf=_is_flat_part)))


def rebuild(out: Any, made: dict[int, Any]) -> Any:
    """A result with its flat parts put together.

    Args:
        out: What came back from JAX.
        made: Objects by number: the caller's, and those made so far.
    """

    def rebuilt(part: Any) -> Any:
        if not _is_flat_part(part):
            return part
        supplies = [iter(group) for group in part.groups]
        values = [next(supplies[group]) for group in part.definition.of_leaf]
        return regrow(part.definition.graphdef, values, made=made)[0]

    return jax.tree.map(rebuilt, out, is_leaf=_is_flat_part)


WHOLE = Results(None, Mode.TREE)
