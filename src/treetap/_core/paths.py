# SPDX-License-Identifier: Apache-2.0
"""Paths, and one level of any JAX pytree.

A path is a tuple of keys from a root to a value: attribute names, dictionary keys,
positions. People read it as `blocks/3/kernel`. `open_container` takes one level off any
container JAX knows, giving plain keys; `Opened.close` puts it together again.
"""

import types
from collections.abc import Callable, Iterable, Sequence
from operator import is_
from typing import Any, NamedTuple

import jax
from jax.tree_util import (
    DictKey,
    FlattenedIndexKey,
    GetAttrKey,
    SequenceKey,
    tree_flatten_with_path,
)

from treetap._core.wording import escaped

Key = Any
Path = tuple[Key, ...]


def show_path(path: Iterable[Key]) -> str:
    """Writes a path as people say it, harmless to print; the root is `(root)`."""
    return escaped("/".join(map(str, path))) or "(root)"


def sort_key(key: Key) -> tuple[bool, str, Key]:
    """Orders keys of mixed types: numbers first, then names, then the rest by type."""
    if isinstance(key, int | float):
        return (False, "", key)
    return (True, type(key).__name__, key if isinstance(key, str) else str(key))


def sorted_keys(keys: Iterable[Key]) -> list[Key]:
    """Sorts keys, of one type or of several."""
    keys = list(keys)
    try:
        return sorted(keys)
    except TypeError:
        return sorted(keys, key=sort_key)


_BARE_KEYS = {GetAttrKey: "name", SequenceKey: "idx"}  # the attributes that have them
_BARE_KEYS |= dict.fromkeys((DictKey, FlattenedIndexKey), "key")


def plain_key(entry: Any) -> Key:
    """The bare key inside one of JAX's key-path entries."""
    name = _BARE_KEYS.get(type(entry))
    return entry if name is None else getattr(entry, name)


def is_named_tuple(kind: type) -> bool:
    """Whether `kind` was made by `namedtuple` or `NamedTuple`."""
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


class Opened(NamedTuple):
    """One level of a container: what it was, its keys, its children."""

    type: type
    keys: tuple[Key, ...]
    definition: Any
    children: Sequence[Any]

    def close(self, children: Iterable[Any]) -> Any:
        """Rebuilds the container around other children."""
        kind = self.type
        if kind is dict:
            found = dict(zip(self.keys, children, strict=True))
            return {key: found[key] for key in self.definition or self.keys}
        if kind in (list, tuple):
            return kind(children)
        if is_named_tuple(kind):
            return kind(*children)
        return self.definition.unflatten(children)


_containers: set[type] = {list, tuple, dict, type(None)}
_leaves: set[type] = {bool, int, float, complex, str, bytes, types.FunctionType}


def is_container(value: Any) -> bool:
    """Whether JAX flattens `value`."""
    kind = type(value)
    if kind in _containers:
        return True
    if kind in _leaves or jax.tree_util.all_leaves([value]):
        return False  # not remembered: the type may be registered later
    _containers.add(kind)
    return True


def open_container(value: Any) -> Opened:
    """Takes one level off a container that JAX knows."""
    kind = type(value)
    if kind is dict:
        keys = tuple(sorted_keys(value))
        # The order of insertion is kept as the definition, and restored by `close`.
        return Opened(kind, keys, tuple(value), [value[key] for key in keys])
    if kind in (list, tuple):
        return Opened(kind, tuple(range(len(value))), None, value)
    if is_named_tuple(kind):
        return Opened(kind, kind._fields, None, value)
    one_level: dict[str, Any] = {"is_leaf": lambda child: child is not value}
    pairs, definition = tree_flatten_with_path(value, **one_level)
    keys = tuple(plain_key(path[0]) for path, _ in pairs)
    return Opened(kind, keys, definition, [child for _, child in pairs])


def copy_containers(value: Any) -> Any:
    """Copies lists, tuples and dicts, sharing everything inside them."""
    kind = type(value)
    if kind is dict:
        return {key: copy_containers(item) for key, item in value.items()}
    if kind is list:
        return [copy_containers(item) for item in value]
    if issubclass(kind, tuple):
        items = [copy_containers(item) for item in value]
        if all(map(is_, items, value)):
            return value
        return kind(*items) if is_named_tuple(kind) else kind(items)
    return value


def find_leaves(
    value: Any, wanted: Callable[[Any], bool], closed: tuple[type, ...] = ()
) -> list[Any]:
    """The parts of a pytree for which `wanted` holds, not looked into any further.

    Values of the types in `closed` are not looked into either.
    """
    found: list[Any] = []
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        part = waiting.pop()
        is_new = id(part) not in seen and not isinstance(part, closed)
        if wanted(part):
            found.append(part)
        elif is_new and is_container(part):
            seen.add(id(part))  # a list may contain itself
            waiting.extend(reversed(open_container(part).children))
    return found
