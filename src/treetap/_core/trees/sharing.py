# SPDX-License-Identifier: Apache-2.0
"""Sharing: the same object at several places, and the errors that name the places.

Walks that only need to know *whether* something is shared keep no paths; when the
answer is yes they come here, and the places are looked up for the message.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from treetap._core.errors import AliasError, CycleError, StructureError
from treetap._core.paths import Path, show_path
from treetap._core.trees.attributes import Node
from treetap._core.trees.filters import Filter, predicate_of
from treetap._core.trees.pytree import opened
from treetap._core.variables.values import is_gone
from treetap._core.variables.variable import Variable
from treetap._core.wording import first_few


def places(
    root: Any, path: Path = (), seen: set[int] | None = None
) -> Iterator[tuple[Path, Any]]:
    """Every value below a root with its path; an object's inside is visited once."""
    seen = set() if seen is None else seen
    yield path, root
    inside = opened(root)
    if inside is None or id(root) in seen:
        return
    if isinstance(root, Node):
        seen.add(id(root))
    for key, child in zip(*inside):
        yield from places(child, (*path, key), seen)


def name_lost(error: BaseException, name: str, root: Any) -> None:
    """Adds to an error which values below a root are gone, if any are.

    A program that fails keeps the buffers it was given.
    """
    lost = [(path, value) for path, value in places(root) if _is_lost(value)]
    found = [f"{show_path(path)} ({type(value).__name__})" for path, value in lost]
    if found:
        error.add_note(
            f"{name}: these were given away (donated) and are gone: "
            f"{first_few(found)}. Give them new values, from a checkpoint for "
            "instance. What is not donated survives a program that fails."
        )


def _is_lost(value: Any) -> bool:
    if not isinstance(value, Variable):
        return is_gone(value)
    try:
        return any(map(is_gone, jax.tree.leaves(value._box[0])))
    except (RuntimeError, ValueError):  # packed, and the pack is gone
        return True


def first_two_places(root: Any, wanted: Any) -> tuple[list[Path], bool]:
    """The first two paths to a value, and whether something on the way holds itself.

    `places` enters an object once. So the second path either ends at the value, or at
    something around it that stands twice; what follows is then as in the first path.
    What stands twice holds itself if its second place is below the first.
    """
    identities: dict[Path, int] = {}
    around: dict[int, int] = {}  # the value and what it is in, with their depths
    found: Path = ()
    for path, value in places(root):
        if (depth := around.get(id(value))) is not None:
            is_below = path[:depth] == found[:depth]
            return [found, (*path, *found[depth:])], is_below
        identities[path] = id(value)
        if value is wanted:
            found = path
            around = {identities[path[:n]]: n for n in range(len(path) + 1)}
    return [found], False


TREE_MODE = "tree mode does not support shared references"


def refuse_shared(
    name: str, root: Any, value: Any, reason: str = TREE_MODE
) -> AliasError:
    """The error for a value that stands at two places of a tree.

    Args:
        name: The function that was asked for a tree.
        root: The tree.
        value: What stands twice.
        reason: Why that cannot be.
    """
    found, is_cyclic = first_two_places(root, value)
    paths, kind = [*map(show_path, found)], type(value).__name__
    shown = " and ".join(paths)
    if is_cyclic:
        text = (
            f"{name}: Cycle detected: the {kind} found at paths {shown} contains "
            f"itself, and a tree does not support shared references. Remove the "
            f"reference, or use graph mode: `{name}(..., graph=True)`."
        )
        return CycleError(text, name, kind, paths)
    text = (
        f"{name}: Duplicate {kind} found at paths {shown}: {reason}. Keep one of them, "
        f"give the other place a copy (`treetap.clone`), or use graph mode: "
        f"`{name}(..., graph=True)`."
    )
    return AliasError(text, name, kind, paths)


def refuse_pytree_false(name: str, root: Any, value: Any) -> StructureError:
    """The error for an object that JAX must not flatten."""
    path = next(path for path, at in places(root) if at is value)
    return StructureError(
        f"{name}: {type(value).__name__} is declared with pytree=False, so it cannot "
        f"be part of a tree. Found at path {show_path(path)}. Use graph mode: "
        f"`{name}(..., graph=True)`."
    )


_WITH_IDENTITY = Node | Variable | jax.Array | jax.Ref | np.ndarray


def find_duplicates(node: Any, /, *, only: Filter = ...) -> list[list[Path]]:
    """The paths of objects, Variables and arrays that stand at several places.

    Args:
        node: Any tree of Modules, Variables and arrays.
        only: Which values to look at.

    Examples:
        >>> import treetap as tt
        >>> shared = tt.Param(1.0)
        >>> tt.find_duplicates({"a": shared, "b": [shared]})
        [[('a',), ('b', 0)]]
    """
    wanted = predicate_of(only)
    found: dict[int, list[Path]] = {}
    kept: list[Any] = []  # an identity means something only while its object lives
    for path, value in places(node):
        if isinstance(value, _WITH_IDENTITY) and wanted(path, value):
            kept.append(value)
            found.setdefault(id(value), []).append(path)
    return [paths for paths in found.values() if len(paths) > 1]
