# SPDX-License-Identifier: Apache-2.0
"""Layouts: which attributes an object has, in which order, and which are data.

Objects with the same attributes share one Layout. It reads children and statics out of
an attribute dictionary, and puts them back in the original order, without a Python
loop. Two Layouts are equal when they have the same data and static attributes; the
order of assignment is remembered, but takes no part in equality.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any
from weakref import WeakValueDictionary

from jax.tree_util import GetAttrKey, SequenceKey

from treetap._core.paths import Key, sorted_keys
from treetap._core.static_values import exact

Getter = Callable[[Any], tuple[Any, ...]]
# Layout, static values, and kinds: see `static_values.exact`.
Structure = tuple["Layout", tuple[Any, ...], tuple[Any, ...]]
Flat = tuple[tuple[Any, ...], Structure]  # children, and what is around them


def getter(names: Sequence[Key]) -> Getter:
    """A function that reads some items of a holder as a tuple, in C for two or more."""
    if not names:
        return lambda holder: ()
    if len(names) == 1:
        (name,) = names
        return lambda holder: (holder[name],)
    return itemgetter(*names)


def _entry(key: Key) -> Any:
    """JAX's key-path entry for an attribute, or for a position in a List."""
    return SequenceKey(key) if isinstance(key, int) else GetAttrKey(key)


class Sealed(dict[Key, bool]):
    """The status of a Layout's attributes: shared by objects, and never changed.

    An object that has its children cached has its Layout's status; one that is being
    changed has a plain dict of its own.
    """

    __slots__ = ()


class Layout:
    """The attributes of an object; made by `layout_of`, never changed.

    Attributes:
        keys: Names of the data attributes, sorted: the order of children. The items
            of a List have their positions for names.
        static_names: Names of the static attributes, sorted.
        status: Name to is-data, in order of assignment.
        children_of, statics_of: Read those values from an attribute dictionary.
        arrange: Puts children followed by statics into the order of `status`.
    """

    def __init__(self, status: Mapping[Key, bool], ordered: bool = False):
        self.ordered = ordered
        self.status = Sealed(status)
        self.keys = tuple(sorted_keys(n for n, is_data in status.items() if is_data))
        self.static_names = tuple(sorted_keys(n for n, d in status.items() if not d))
        self.entries = tuple(map(_entry, self.keys))
        self.children_of = getter(self.keys)
        self.statics_of = getter(self.static_names)
        sources = dict(zip(self.keys + self.static_names, range(len(status))))
        self.arrange = getter([sources[name] for name in status])
        order = tuple(status) if ordered else None
        self._compared = self.keys, self.static_names, order

    def flat(self, attributes: dict[Any, Any]) -> "Flat":
        """Children and structure of an object with these attributes."""
        statics = self.statics_of(attributes)
        return self.children_of(attributes), structure_of(self, statics)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._compared == other._compared

    def __hash__(self) -> int:
        return hash(self._compared)

    def __repr__(self) -> str:
        return f"Layout(data={list(self.keys)}, static={list(self.static_names)})"

    def __reduce__(self) -> Any:
        return layout_of, (dict(self.status), self.ordered)


def structure_of(layout: Layout, statics: tuple[Any, ...]) -> Structure:
    """The static part of an object: what JAX compares, mostly with tuples alone."""
    return layout, *exact(statics)


_known: "WeakValueDictionary[Any, Layout]" = WeakValueDictionary()


def layout_of(status: Mapping[Key, bool], ordered: bool = False) -> Layout:
    """The Layout for these attributes; the same object for the same ones.

    Args:
        status: Name to is-data, in order of assignment.
        ordered: Whether the order is to count in comparisons.
    """
    key = (ordered, *status.items())
    layout = _known.get(key)
    if layout is None:
        layout = _known.setdefault(key, Layout(status, ordered))
    return layout
