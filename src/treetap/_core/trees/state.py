# SPDX-License-Identifier: Apache-2.0
"""State: what an object holds, as nested mappings from path to Variable or array.

A State wraps a plain nested dict; nested dicts come back as States that write through.
Functions here accept any nested mapping, so a dictionary read from a file does as well.
"""

import re
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, SequenceKey, register_pytree_with_keys

from treetap._core import display
from treetap._core.errors import StructureError
from treetap._core.paths import Key, Path, show_path, sort_key, sorted_keys
from treetap._core.trees.filters import Filter, grouped
from treetap._core.variables.operators import unboxed
from treetap._core.variables.values import is_key
from treetap._core.variables.variable import Variable

Nested = Mapping[Key, Any]


class State(MutableMapping[Key, Any], display.Shown):
    """A nested mapping of Variables and arrays; attributes are items.

    Args:
        mapping: Nested mappings, or pairs. The top level is copied, the rest shared.

    Examples:
        >>> import treetap as tt
        >>> s = tt.State({"a": {"b": 1}})
        >>> s.a.b, s["a"]["b"], "c" in s.a
        (1, 1, False)
    """

    __slots__ = ("_mapping",)

    _mapping: dict[Key, Any]

    def __init__(self, mapping: Nested | Iterable[tuple[Key, Any]] = (), /):
        pairs = mapping.items() if isinstance(mapping, Mapping) else mapping
        plain = {k: v._mapping if isinstance(v, State) else v for k, v in pairs}
        object.__setattr__(self, "_mapping", plain)

    @property
    def raw_mapping(self) -> dict[Key, Any]:
        """The nested dict inside."""
        return self._mapping

    def __getitem__(self, key: Key) -> Any:
        value = self._mapping[key]
        return _view_of(value) if isinstance(value, dict) else value

    def __setitem__(self, key: Key, value: Any) -> None:
        self._mapping[key] = value._mapping if isinstance(value, State) else value

    def __delitem__(self, key: Key) -> None:
        del self._mapping[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._mapping)

    def __len__(self) -> int:
        return len(self._mapping)

    def __getattr__(self, name: str) -> Any:
        if name == "_mapping" or name not in self._mapping:
            raise AttributeError(
                f"{type(self).__name__} has no entry {name!r}; it has "
                f"{sorted_keys(self._mapping) if name != '_mapping' else []}."
            )
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__orig_class__":  # from `State[...](...)`: no entry
            raise AttributeError(name)
        self[name] = value

    def __delattr__(self, name: str) -> None:
        self.__getattr__(name)  # which says what there is
        del self[name]

    def __or__(self, other: "State") -> "State":
        return State(united(self, other)) if other else self

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return same_values(self, other)

    __hash__ = None  # pyright: ignore[reportAssignmentType] - a State changes

    def __reduce__(self) -> Any:
        return type(self), (self._mapping,)

    def _display_parts(self) -> display.Parts:
        items = [(repr(key), value) for key, value in self._mapping.items()]
        return display.Parts("", items, ("({", "})"), ": ")


def _view_of(mapping: dict[Key, Any]) -> State:
    view = object.__new__(State)
    object.__setattr__(view, "_mapping", mapping)
    return view


def same_values(first: Any, second: Any) -> bool:
    """Whether two nested mappings have the same paths, kinds, metadata and numbers."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(
            same_values(first[key], second[key]) for key in first
        )
    if first is second:
        return True
    leaves, structure = jax.tree.flatten(first)
    others, other_structure = jax.tree.flatten(second)
    return structure == other_structure and all(map(_same_leaf, leaves, others))


def _same_leaf(first: Any, second: Any) -> bool:
    if first is second:
        return True
    is_array = hasattr(first, "shape") or hasattr(second, "shape")
    if not is_array or isinstance(first, jax.ShapeDtypeStruct | jax.Ref):
        return bool(first == second)
    dtype: Any = getattr(first, "dtype", None)
    if getattr(second, "dtype", None) != dtype:
        return False
    if is_key(first):
        first, second = jax.random.key_data(first), jax.random.key_data(second)
    may_be_nan = dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
    return np.array_equal(first, second, equal_nan=may_be_nan)


def register_state(
    kind: type[State], extra_of: Callable[[Any], Any], make: Callable[..., State]
) -> None:
    """Registers a kind of State with JAX: its items are children, by sorted keys.

    Args:
        kind: The class.
        extra_of: What is static in one of them, beside its keys.
        make: Makes one from what is static and a dict.
    """

    def flatten(state: State) -> Any:
        mapping = state._mapping
        keys = tuple(sorted_keys(mapping))
        return tuple(mapping[key] for key in keys), (keys, extra_of(state))

    def flatten_with_keys(state: State) -> Any:
        children, aux = flatten(state)
        return tuple(zip(map(DictKey, aux[0]), children, strict=True)), aux

    def unflatten(aux: Any, children: Iterable[Any]) -> State:
        return make(aux[1], dict(zip(aux[0], children, strict=True)))

    register_pytree_with_keys(kind, flatten_with_keys, unflatten, flatten)


register_state(State, lambda state: None, lambda _, mapping: _view_of(mapping))


class FlatState(Sequence[tuple[Path, Any]]):
    """A sequence of (path, value), sorted by path; immutable.

    Examples:
        >>> import treetap as tt
        >>> tt.to_flat_state({"b": 1, "a": {"c": 2}}).paths
        (('a', 'c'), ('b',))
    """

    __slots__ = ("leaves", "paths")

    paths: tuple[Path, ...]
    leaves: list[Any]

    def __init__(self, items: Iterable[tuple[Path, Any]], /, *, sort: bool = True):
        pairs = list(items)
        if sort:
            pairs.sort(key=lambda item: tuple(map(sort_key, item[0])))
        self.paths = tuple(path for path, _ in pairs)
        self.leaves = [leaf for _, leaf in pairs]

    @overload
    def __getitem__(self, index: int) -> tuple[Path, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> "FlatState": ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            items = zip(self.paths[index], self.leaves[index], strict=True)
            return FlatState(items, sort=False)
        return self.paths[index], self.leaves[index]

    def __len__(self) -> int:
        return len(self.paths)

    def __iter__(self) -> Iterator[tuple[Path, Any]]:
        return zip(self.paths, self.leaves, strict=True)

    def __repr__(self) -> str:
        lines = [f"({path!r}, {leaf!r})" for path, leaf in self]
        return f"FlatState([{display.block(lines) if lines else ''}])"

    def to_nested_state(self) -> State:
        """The same content as a nested State."""
        return from_flat_state(self)

    def split(self, *filters: Filter) -> Any:
        """As `split_state`, giving FlatStates."""
        groups = grouped(self, filters, "FlatState.split")
        return one_or_all([FlatState(group, sort=False) for group in groups])

    def filter(self, *filters: Filter) -> Any:
        """As `filter_state`, giving FlatStates."""
        groups = grouped(self, filters)
        return one_or_all([FlatState(group, sort=False) for group in groups])

    @staticmethod
    def merge(*flats: Iterable[tuple[Path, Any]]) -> "FlatState":
        """The union of several; later ones win."""
        return FlatState({path: leaf for flat in flats for path, leaf in flat}.items())


def _flatten_with_keys(flat: FlatState) -> Any:
    return [(SequenceKey(i), x) for i, x in enumerate(flat.leaves)], flat.paths


register_pytree_with_keys(
    FlatState,
    _flatten_with_keys,
    lambda paths, leaves: FlatState(zip(paths, leaves, strict=True), sort=False),
    lambda flat: (flat.leaves, flat.paths),
)


def one_or_all(items: list[Any]) -> Any:
    """The only item, or all as a tuple: what filters give."""
    return items[0] if len(items) == 1 else tuple(items)


def is_branch(value: Any) -> bool:
    """Whether a value is an inner part of a nested mapping."""
    return type(value) is dict or isinstance(value, Mapping)  # most are dicts


def flat_items(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every (path, value) of a nested mapping, depth first, in sorted order.

    A value that is no mapping stands at the root by itself.
    """
    if not is_branch(value):
        yield path, value
        return
    for key in sorted_keys(value):
        yield from flat_items(value[key], (*path, key))


def from_items(items: Iterable[tuple[Path, Any]]) -> Any:
    """What `flat_items` went through: nested dicts, or the one value at the root."""
    items = list(items)
    return items[0][1] if items and items[0][0] == () else nested(items)


def nested(items: Iterable[tuple[Path, Any]]) -> dict[Key, Any]:
    """Builds nested dicts from (path, value) pairs; a later pair wins."""
    root: dict[Key, Any] = {}
    for path, value in items:
        if not path:
            raise StructureError("A nested mapping cannot hold a value at its root.")
        *parents, last = path
        inner = root
        for depth, key in enumerate(parents):
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                raise StructureError(
                    f"{show_path(path[: depth + 1])} is a value and also the start of "
                    f"{show_path(path)}; a path can be only one of them."
                )
        if isinstance(inner.get(last), dict) and not isinstance(value, dict):
            raise StructureError(
                f"{show_path(path)} is a value and also the start of other paths; "
                "a path can be only one of them."
            )
        inner[last] = value
    return root


def to_flat_state(state: Nested) -> FlatState:
    """The content of a nested mapping as a FlatState, sorted by path."""
    return FlatState(flat_items(state), sort=False)


def from_flat_state(
    flat_state: Mapping[Path, Any] | Iterable[tuple[Path, Any]],
    *,
    cls: Callable[[dict[Key, Any]], Any] = State,
) -> Any:
    """A nested State from paths and values.

    Args:
        flat_state: A FlatState, a mapping from path to value, or pairs.
        cls: What to make of the nested dict.
    """
    is_mapping = isinstance(flat_state, Mapping)
    items: Any = flat_state.items() if is_mapping else flat_state
    return cls(nested(items))


def to_pure_dict(
    state: Nested, extract_fn: Callable[[Any], Any] | None = None
) -> dict[Key, Any]:
    """Plain nested dicts with the values of the Variables.

    Args:
        state: A nested mapping.
        extract_fn: What to do with each leaf; by default, take a Variable's value out.
    """
    extract = extract_fn or unboxed

    def pure(mapping: Nested) -> dict[Key, Any]:
        return {
            key: pure(value) if is_branch(value) else extract(value)
            for key, value in mapping.items()
        }

    return pure(state)


_NUMBER = re.compile(r"-?[0-9]+")


def _fitting_key(mapping: Nested, key: Key) -> Key:
    """`key`, or the number it spells when the mapping has that instead."""
    if key in mapping or not (isinstance(key, str) and _NUMBER.fullmatch(key)):
        return key
    return int(key) if int(key) in mapping else key


def _replaced(old: Any, new: Any) -> Any:
    return old.replace(new) if isinstance(old, Variable) else new


def replace_by_pure_dict(
    state: State, pure_dict: Nested, replace_fn: Callable[[Any, Any], Any] | None = None
) -> None:
    """Writes plain nested dicts into a State, in place; other entries are kept.

    Args:
        state: What to change.
        pure_dict: Nested dicts of values; numbers may be spelled as strings.
        replace_fn: Makes the new leaf from the old one and the value.
    """
    replace = replace_fn or _replaced
    planned: list[tuple[dict[Key, Any], Key, Any]] = []

    def plan(mapping: dict[Key, Any], values: Nested, path: Path) -> None:
        for given, value in values.items():
            key = _fitting_key(mapping, given)
            if key not in mapping:
                raise StructureError(
                    f"replace_by_pure_dict: {show_path((*path, given))} is not in the "
                    f"State; at {show_path(path)} it has {sorted_keys(mapping)}."
                )
            if isinstance(mapping[key], dict):
                if not is_branch(value):
                    raise StructureError(
                        f"replace_by_pure_dict: {show_path((*path, key))} is a "
                        f"{type(value).__name__}, but the State has a level there: "
                        f"{sorted_keys(mapping[key])}."
                    )
                plan(mapping[key], value, (*path, key))
            else:
                planned.append((mapping, key, replace(mapping[key], value)))

    plan(state.raw_mapping, pure_dict, ())
    for mapping, key, leaf in planned:
        mapping[key] = leaf


def restore_int_paths(pure_dict: Nested) -> dict[Key, Any]:
    """Turns keys that spell numbers into numbers, at every level."""
    return {
        int(key) if isinstance(key, str) and key.isdecimal() else key: (
            restore_int_paths(value) if is_branch(value) else value
        )
        for key, value in pure_dict.items()
    }


def state_groups(found: Any, filters: Sequence[Filter], name: str = "") -> list[Any]:
    """One State for each filter; without filters one, of all.

    Args:
        found: A nested mapping, or a value that stands at the root by itself.
        filters: Each value goes to the first that takes it.
        name: As for `grouped`.
    """
    groups = [found]
    if filters:
        groups = map(from_items, grouped(flat_items(found), filters, name))
    return [State(group) if is_branch(group) else group for group in groups]


def split_state(state: Nested, first: Filter, /, *filters: Filter) -> Any:
    """Groups a State by filters; each value goes to the first that takes it.

    Values left over are an error. One filter gives a State, several give a tuple.
    """
    return one_or_all(state_groups(state, [first, *filters], "split_state"))


def filter_state(state: Nested, first: Filter, /, *filters: Filter) -> Any:
    """As `split_state`, but values left over are dropped."""
    return one_or_all(state_groups(state, [first, *filters]))


def merge_state(
    state: Nested, /, *states: Nested, cls: Callable[[Any], Any] = State
) -> Any:
    """The union of several States; a path that two of them have is an error.

    With `first | second` the second wins.

    Examples:
        >>> import treetap as tt
        >>> dict(tt.merge_state({"a": 1}, {"b": 2}))
        {'a': 1, 'b': 2}
    """
    if not states:
        return state
    start: Any = united({}, state)
    for other in states:
        start = united(start, other, is_strict=True)
    return cls(start)


def united(
    first: Nested, second: Nested, path: Path = (), *, is_strict: bool = False
) -> dict[Key, Any]:
    """Two nested mappings in one; where both have a value, the second's, or none."""
    union = dict(first)
    for key, value in second.items():
        known = union.get(key, {})
        if is_branch(value) and is_branch(known):
            union[key] = united(known, value, (*path, key), is_strict=is_strict)
        elif key in union and is_branch(value) != is_branch(known):
            raise StructureError(
                f"{show_path((*path, key))} is a value in one State and the start of "
                "other paths in another; a path can be only one of them."
            )
        elif is_strict and key in union and known is not value:
            raise StructureError(
                f"merge_state: two States have a value at {show_path((*path, key))}. "
                "Take one of them out, or let the second win: `first | second`."
            )
        else:
            union[key] = value
    return union


def map_state(f: Callable[[Path, Any], Any], state: Nested) -> State:
    """A State of `f(path, value)` for every value."""
    return State(nested((path, f(path, value)) for path, value in flat_items(state)))


def diff_state(state: Nested, other: Nested) -> State:
    """The entries of `state` whose paths `other` does not have."""
    known = {path for path, _ in flat_items(other)}
    return State(nested(item for item in flat_items(state) if item[0] not in known))
