# SPDX-License-Identifier: Apache-2.0
"""Filters: small predicates that pick values out of a tree.

A filter is anything `predicate_of` accepts: a type, a tag, `...`, a function of
(path, value), or several in a list. Predicates are values: equal ones compare equal and
hash alike, so they can key a cache. `grouped` sends each value to the first filter that
takes it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any as AnyType
from typing import get_origin

from treetap._core.errors import FilterError
from treetap._core.paths import Path, show_path
from treetap._core.wording import first_few

# The ones here are compared and hashed by content.
Predicate = Callable[[Path, AnyType], bool]
Filter = AnyType  # a type, str, bool, None, ..., list, tuple or Predicate


@dataclass(frozen=True, slots=True, repr=False)
class _OfOne:
    """A predicate that prints as it is made: with its first field by place."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({getattr(self, fields(self)[0].name)!r})"


@dataclass(frozen=True, slots=True, repr=False)
class OfType(_OfOne):
    """Takes values that are instances of `type`."""

    type: AnyType

    def __call__(self, path: Path, value: AnyType) -> bool:
        return isinstance(value, self.type)


@dataclass(frozen=True, slots=True, repr=False)
class WithTag(_OfOne):
    """Takes values whose attribute `tag` equals `tag`."""

    tag: str

    def __call__(self, path: Path, value: AnyType) -> bool:
        return getattr(value, "tag", None) == self.tag


@dataclass(frozen=True, slots=True)
class PathContains:
    """Takes values with `key` among the keys of their path.

    Args:
        key: The key to look for.
        exact: Equal keys only; otherwise `key` may be a part of one.
    """

    key: AnyType
    exact: bool = True

    def __repr__(self) -> str:
        return f"PathContains({self.key!r}, exact={self.exact})"

    def __call__(self, path: Path, value: AnyType) -> bool:
        if self.exact:
            return self.key in path
        return any(str(self.key) in str(part) for part in path)


@dataclass(frozen=True, slots=True, init=False)
class PathIn:
    """Takes values whose whole path is one of `paths`."""

    paths: frozenset[Path]

    def __init__(self, *paths: Path):
        object.__setattr__(self, "paths", frozenset(paths))

    def __repr__(self) -> str:
        return f"PathIn({', '.join(map(repr, sorted(self.paths, key=show_path)))})"

    def __call__(self, path: Path, value: AnyType) -> bool:
        return path in self.paths


@dataclass(frozen=True, slots=True, init=False)
class _Combined:
    predicates: tuple[Predicate, ...]

    def __init__(self, *filters: Filter):
        object.__setattr__(self, "predicates", tuple(map(predicate_of, filters)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.predicates))})"


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Any(_Combined):
    """Takes what at least one of the filters takes; without filters, nothing."""

    def __call__(self, path: Path, value: AnyType) -> bool:
        return any(predicate(path, value) for predicate in self.predicates)


@dataclass(frozen=True, slots=True, init=False, repr=False)
class All(_Combined):
    """Takes what every one of the filters takes; without filters, everything."""

    def __call__(self, path: Path, value: AnyType) -> bool:
        return all(predicate(path, value) for predicate in self.predicates)


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Not(_OfOne):
    """Takes what the filter does not take."""

    predicate: Predicate

    def __init__(self, filter: Filter, /):
        object.__setattr__(self, "predicate", predicate_of(filter))

    def __call__(self, path: Path, value: AnyType) -> bool:
        return not self.predicate(path, value)


@dataclass(frozen=True, slots=True)
class Everything:
    """Takes every value."""

    def __call__(self, path: Path, value: AnyType) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Nothing:
    """Takes no value."""

    def __call__(self, path: Path, value: AnyType) -> bool:
        return False


def predicate_of(filter: Filter) -> Predicate:
    """Turns a filter literal into a predicate.

    Examples:
        >>> import treetap as tt
        >>> from treetap._core.trees.filters import predicate_of
        >>> predicate_of(["noise", "dropout"])
        Any(WithTag('noise'), WithTag('dropout'))
    """
    if is_catch_all(filter):
        return Everything()
    if filter is None or filter is False:
        return Nothing()
    if isinstance(filter, str):
        return WithTag(filter)
    if isinstance(kind := get_origin(filter) or filter, type):
        return OfType(kind)  # `Param[jax.Array]` means `Param`
    if isinstance(filter, list | tuple):
        return Any(*filter)
    if callable(filter):
        predicate: AnyType = filter
        return predicate
    raise TypeError(
        f"Invalid filter {filter!r} of type {type(filter).__name__}. A filter is a "
        "type, a tag (str), `...`, a bool, None, a function of (path, value), or a "
        "list of filters."
    )


def predicates_of(filters: Sequence[Filter]) -> list[Predicate]:
    """Predicates for several filters; a catch-all may only stand at the end."""
    predicates = [predicate_of(filter) for filter in filters]
    take_all = list(map(is_catch_all, filters))
    if take_all != sorted(take_all):
        place = take_all.index(True)
        raise FilterError(
            "`...` or `True` can only be used as the last filters: "
            f"{filters[place]!r} stands at position {place} of {list(filters)!r}, and "
            "nothing would reach the filters after it."
        )
    return predicates


def is_catch_all(filter: Filter) -> bool:
    """Whether a filter says that it takes everything."""
    return filter is Ellipsis or filter is True


Flat = list[tuple[Path, AnyType]]


def grouped(
    flat: Iterable[tuple[Path, AnyType]], filters: Sequence[Filter], name: str = ""
) -> list[Flat]:
    """Sends each value to the first filter that takes it.

    Args:
        flat: The values with their paths.
        filters: A catch-all may only stand at the end.
        name: The function that refuses values left over; without one they are dropped.
    """
    predicates = [*predicates_of(filters), Everything()]
    groups: list[Flat] = [[] for _ in predicates]
    pairs = list(zip(predicates, groups))
    for item in flat:
        for predicate, group in pairs:
            if predicate(*item):
                group.append(item)
                break
    rest = groups.pop()
    if name and rest:
        shown = [f"{show_path(path)} ({type(value).__name__})" for path, value in rest]
        raise FilterError(
            f"{name}: Non-exhaustive filters, got a non-empty remainder: "
            f"{first_few(shown, 5)}. Add `...` as the last filter to take the rest."
        )
    return groups
