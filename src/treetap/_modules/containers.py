# SPDX-License-Identifier: Apache-2.0
"""List, Dict and Sequential: containers that are Modules.

An item is an attribute whose name is its position (List) or its key (Dict), so items
are data or static each by itself: Modules and plain functions may stand side by side. A
List's items are renumbered together when one is inserted or removed; a Dict's keys
never hide its methods.
"""

import functools
import inspect
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSequence,
)
from operator import index as as_index
from typing import Any, Generic, TypeVar, overload

from treetap._core import display
from treetap._core.trees.attributes import classify, is_data
from treetap._core.trees.pytree import Pytree, adopt, attributes_of, unseal
from treetap._core.trees.state import same_values
from treetap._modules.module import Module

T = TypeVar("T")


class List(Module, MutableSequence[T], Generic[T]):
    """A list that is a Module; its items are children by position.

    Args:
        items: The items; wrap one in `data` or `static` to decide what it is.

    Examples:
        >>> import jax, treetap as tt
        >>> layers = tt.List([tt.Param(1.0), jax.nn.relu])
        >>> layers.append(tt.Param(2.0))
        >>> [path for path, _ in tt.to_flat_state(tt.state(layers))]
        [(0,), (2,)]
    """

    def __init__(self, items: Iterable[T] | None = None, /):
        self.extend(items or ())

    def _admitted(self, place: int, value: Any) -> tuple[Any, bool]:
        """A value on its way into the list, and whether as data."""
        return classify(type(self).__name__, place, value, None)

    def _items(self) -> list[tuple[Any, bool]]:
        """The items in order, each with its status."""
        attributes, status = attributes_of(self), self._pytree__status
        return [(attributes[i], status[i]) for i in range(len(self))]

    def _renumber(self, items: list[tuple[Any, bool]]) -> None:
        """Stores these items as 0, 1, …, in the place of those there were."""
        self._check_trace()
        attributes = attributes_of(self)
        status = {k: v for k, v in self._pytree__status.items() if type(k) is not int}
        for place in [key for key in attributes if type(key) is int]:
            del attributes[place]
        for place, (value, flag) in enumerate(items):
            attributes[place] = value
            status[place] = flag
            adopt(value, place, self._pytree__place)
        unseal(self, status)

    def _place(self, index: Any) -> int:
        """A position as a number from 0, checked."""
        place, length = as_index(index), len(self)
        if not -length <= place < length:
            raise IndexError(
                f"{type(self).__name__}: index {place} is out of range for "
                f"{length} items."
            )
        return place % length

    def __len__(self) -> int:
        # Positions are stored in order, so the last one tells.
        for key in reversed(attributes_of(self)):
            if type(key) is int:
                return key + 1
        return 0

    def __iter__(self) -> Iterator[T]:
        return iter([value for value, _ in self._items()])

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> "List[T]": ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            part = List()
            part._renumber(self._items()[index])
            return part
        return attributes_of(self)[self._place(index)]

    def __setitem__(self, index: Any, value: Any) -> None:
        items = self._items()
        if isinstance(index, slice):
            places = range(*index.indices(len(items)))
            values = list(value)
            if len(values) != len(places):
                raise ValueError(
                    f"{type(self).__name__}: cannot assign {len(values)} items to a "
                    f"slice of {len(places)}."
                )
        else:
            places, values = [self._place(index)], [value]
        for place, item in zip(places, values, strict=True):
            old, status = items[place]
            # A value that was declared data, like `data(1)`, leaves its place data.
            declared = True if status and not is_data(old) else None
            items[place] = classify(type(self).__name__, place, item, declared)
        self._renumber(items)

    def __delitem__(self, index: int | slice) -> None:
        items = self._items()
        del items[index if isinstance(index, slice) else self._place(index)]
        self._renumber(items)

    def insert(self, index: int, value: T) -> None:
        """Puts an item before position `index`."""
        items = self._items()
        items.insert(index, self._admitted(index, value))
        self._renumber(items)

    def append(self, value: T) -> None:
        """Adds an item at the end."""
        self._check_trace()
        place = len(self)
        value, is_data_item = self._admitted(place, value)
        status = {**self._pytree__status, place: is_data_item}
        attributes_of(self)[place] = value
        adopt(value, place, self._pytree__place)
        unseal(self, status)

    def extend(self, values: Iterable[T]) -> None:
        """Adds items at the end."""
        items, start = self._items(), len(self)
        items += [self._admitted(start + i, x) for i, x in enumerate(values)]
        self._renumber(items)

    def reverse(self) -> None:
        """Turns the order of the items around."""
        self._renumber(self._items()[::-1])

    def __add__(self, other: Iterable[T]) -> "List[T]":
        return _joined(self, other)

    def __radd__(self, other: Iterable[T]) -> "List[T]":
        return _joined(other, self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, List | list):
            return NotImplemented
        return len(self) == len(other) and all(map(_same_item, self, other))

    __hash__ = object.__hash__  # as a Module

    def _remove_child(self, key: Any) -> None:
        if type(key) is int:
            del self[key]
        else:
            super()._remove_child(key)

    def __dir__(self) -> Iterable[str]:
        own = [key for key in attributes_of(self) if isinstance(key, str)]
        return sorted({*dir(type(self)), *own})

    def _display_parts(self) -> display.Parts:
        held = attributes_of(self)
        names = [name for name in held if isinstance(name, str) and name[0] != "_"]
        named = [(name, held[name]) for name in names]
        items = [("", value) for value, _ in self._items()]
        return display.Parts("", named + items, ("([", "])"))


def _joined(first: Iterable[T], second: Iterable[T]) -> "List[T]":
    """A new List of the items of one and those of another."""
    if not isinstance(first, List | list) or not isinstance(second, List | list):
        return NotImplemented
    joined = List(first)
    joined.extend(second)
    return joined


def _same_item(first: Any, second: Any) -> bool:
    """Whether items are equal: Modules as Python has it, the rest by value."""
    if isinstance(first, Module) or isinstance(second, Module):
        return bool(first == second)
    return same_values(first, second)


class ByName(Pytree):
    """Base of what holds its items as attributes, and lists them by name."""

    def __iter__(self) -> Iterator[str]:
        return iter(list(attributes_of(self)))

    def __len__(self) -> int:
        return len(attributes_of(self))

    def __contains__(self, name: object) -> bool:
        return name in attributes_of(self)


@functools.cache
def _class_names(cls: type) -> frozenset[str]:
    return frozenset(name for base in cls.__mro__ for name in vars(base))


class Dict(Module, ByName, MutableMapping[str, T], Generic[T]):
    """A dict that is a Module; its items are children by key, and also attributes.

    Args:
        items: A mapping, or pairs.
        **more: More items.

    Examples:
        >>> import treetap as tt
        >>> d = tt.Dict(a=tt.Param(1.0))
        >>> d.a[...], list(d)
        (1.0, ['a'])
    """

    # Programs iterate over items, so two orders are two structures.
    _pytree__ordered = True

    def __init__(
        self, items: Mapping[str, T] | Iterable[tuple[str, T]] = (), /, **more: T
    ):
        self.update(dict(items, **more))

    def __getattribute__(self, name: str) -> Any:
        # An item must not hide a method of the same name.
        cls = type(self)
        if name in attributes_of(self) and name in _class_names(cls):
            held = inspect.getattr_static(cls, name)
            return held.__get__(self, cls) if hasattr(held, "__get__") else held
        return super().__getattribute__(name)

    def __getitem__(self, key: str) -> T:
        return attributes_of(self)[key]

    def __setitem__(self, key: str, value: T) -> None:
        if not isinstance(key, str):
            raise TypeError(
                f"{type(self).__name__}: keys are strings, got {key!r} of type "
                f"{type(key).__name__}."
            )
        self.__setattr__(key, value)

    def __delitem__(self, key: str) -> None:
        if key not in attributes_of(self):
            raise KeyError(key)
        self.__delattr__(key)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return self.keys() == other.keys() and all(
            _same_item(value, other[key]) for key, value in self.items()
        )

    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType] - as a Module

    def _display_parts(self) -> display.Parts:
        items = [(repr(key), value) for key, value in attributes_of(self).items()]
        return display.Parts("", items, ("({", "})"), ": ")


class Sequential(Module):
    """Calls one thing after another.

    The first gets the arguments; a tuple returned becomes positional arguments of the
    next, a dict keyword arguments, anything else its one argument. Keyword arguments of
    the call go to every layer that takes them. Iterating gives the layers.

    Args:
        *fns: Modules or functions.

    Examples:
        >>> import treetap as tt
        >>> tt.Sequential(lambda x: (x, x + 1), lambda x, y: x * y)(3)
        12
        >>> tt.Sequential(abs, lambda x, scale=1: x * scale)(-3, scale=2)
        6
    """

    def __init__(self, *fns: Callable[..., Any]):
        self.layers = List(fns)

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        return iter(self.layers)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the layers.

        Args:
            *args: Arguments of the first layer.
            **kwargs: Keyword arguments, of any layer.
        """
        result: Any = args[0] if len(args) == 1 else (args or kwargs or None)
        named: dict[str, Any] = {}
        for place, layer in enumerate(self.layers):
            if not callable(layer):
                raise TypeError(
                    f"Sequential: layer {place} is a {type(layer).__name__}, which "
                    "cannot be called."
                )
            taken = _taken(layer, len(args), kwargs)
            if twice := named.keys() & taken:
                raise TypeError(
                    f"Sequential: layer {place} gets {sorted(twice)} twice: from the "
                    "layer before it, and from the call."
                )
            result = layer(*args, **named, **taken)
            args, named = (result,), {}
            if isinstance(result, tuple):
                args = result
            elif isinstance(result, dict):
                args, named = (), result
        return result


def _taken(
    fn: Callable[..., Any], positional: int, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Those keyword arguments that a function takes, beside so many positional ones."""
    try:
        parameters = [*inspect.signature(fn).parameters.values()] if kwargs else []
    except (TypeError, ValueError):
        return {}  # a builtin without a signature
    filled = {x.name for x in parameters[:positional] if x.kind is not x.KEYWORD_ONLY}
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    known = {x.name for x in parameters if x.kind in by_name}
    if any(x.kind is x.VAR_KEYWORD for x in parameters):
        known = kwargs.keys()
    return {key: x for key, x in kwargs.items() if key in known and key not in filled}
