# SPDX-License-Identifier: Apache-2.0
"""Nested mappings as flat ones and back, with tuple paths or joined strings."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from treetap._core.paths import Key, Path
from treetap._core.trees.state import nested


class _EmptyNode:
    """Stands for an empty mapping in a flat one."""

    def __repr__(self) -> str:
        return "empty_node"


empty_node = _EmptyNode()

IsLeaf = Callable[[Path, Mapping[Key, Any]], bool]


def flatten_to_sequence(
    xs: Mapping[Key, Any], *, is_leaf: IsLeaf | None = None
) -> list[tuple[Path, Any]]:
    """The (path, value) pairs of nested mappings; empty ones are left out.

    Args:
        xs: Nested mappings.
        is_leaf: Tells which mappings to leave whole.
    """
    return [item for item in _items(xs, is_leaf) if item[1] is not empty_node]


def _items(
    value: Any, is_leaf: IsLeaf | None, path: Path = ()
) -> Iterator[tuple[Path, Any]]:
    if not isinstance(value, Mapping) or (is_leaf and is_leaf(path, value)):
        yield path, value
    elif not value and path:
        yield path, empty_node
    else:
        for key, inner in value.items():
            yield from _items(inner, is_leaf, (*path, key))


def _check_mapping(xs: Any, name: str) -> None:
    if not isinstance(xs, Mapping):
        raise TypeError(f"{name}: expected a mapping, got {type(xs).__name__}.")


def flatten_mapping(
    xs: Mapping[Key, Any],
    /,
    *,
    keep_empty_nodes: bool = False,
    is_leaf: IsLeaf | None = None,
    sep: str | None = None,
) -> dict[Any, Any]:
    """Nested mappings as one dict from path to value.

    Args:
        xs: Nested mappings.
        keep_empty_nodes: Keep empty mappings, as `empty_node`.
        is_leaf: Tells which mappings to leave whole.
        sep: Join paths to strings with this.

    Examples:
        >>> from treetap import nnx
        >>> nnx.traversals.flatten_mapping({"a": {"b": 1}}, sep="/")
        {'a/b': 1}
    """
    _check_mapping(xs, "flatten_mapping")
    return {
        path if sep is None else sep.join(map(str, path)): value
        for path, value in _items(xs, is_leaf)
        if keep_empty_nodes or value is not empty_node
    }


def unflatten_mapping(
    xs: Mapping[Any, Any], /, *, sep: str | None = None
) -> dict[Key, Any]:
    """Nested dicts from a mapping of paths; the inverse of `flatten_mapping`.

    Args:
        xs: A mapping from path to value.
        sep: What joined paths are split at.
    """
    _check_mapping(xs, "unflatten_mapping")
    paths = xs if sep is None else (path.split(sep) for path in xs)
    values = ({} if value is empty_node else value for value in xs.values())
    return nested(zip(map(tuple, paths), values))
