# SPDX-License-Identifier: Apache-2.0
"""EqualFunctions: a static value made of functions that compares by what they are.

Python compares functions by identity, so two optax transformations made by the same
call are unequal, and a jitted step would be traced again for each. Here functions are
equal when they run the same code in the same module with equal contents: closure,
defaults, the parts of a `functools.partial` or of a bound method. Plain contents are
compared by value and type (1, True and 1.0 differ; nan equals nan), tuples, lists and
dicts item by item, optax's own objects and frozen dataclasses by their attributes.
Arrays and all other objects are compared by identity: no `__eq__` of theirs is called.

Contents are read when two are compared, not before: one that has been changed since
compares as what it is now. The hash takes no part in that.
"""

import dataclasses
import functools
import types
from collections.abc import Iterable
from typing import Any

import numpy as np

from treetap._core.trees.state import State

_BY_VALUE = (bool, int, str, bytes, type(None), type(...))
_Opened = tuple[tuple[Any, ...], Iterable[Any]]


class EqualFunctions:
    """Holds a value made of functions; equal to others whose functions do the same.

    Args:
        value: A function, or a tuple, list or dict with functions at any depth.

    Examples:
        >>> from treetap._train.comparable_functions import EqualFunctions
        >>> def times(n):
        ...     return lambda x: n * x
        >>> EqualFunctions(times(2)) == EqualFunctions(times(2))
        True
        >>> EqualFunctions(times(2)) == EqualFunctions(times(2.0))
        False
    """

    __slots__ = ("value",)

    value: Any

    def __init__(self, value: Any):
        object.__setattr__(self, "value", value)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} cannot be changed.")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EqualFunctions):
            return NotImplemented
        return _same(self.value, other.value)

    def __hash__(self) -> int:
        head, inside = _opened(self.value)
        if isinstance(self.value, tuple):  # its items cannot be replaced
            return hash((head, *(_opened(item)[0] for item in inside)))
        return hash(head)

    def __copy__(self) -> "EqualFunctions":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "EqualFunctions":
        return self  # as Python copies functions

    def __reduce__(self) -> Any:
        return EqualFunctions, (self.value,)

    def __repr__(self) -> str:
        return repr(self.value)


def _same(first: Any, second: Any) -> bool:
    """Whether two values are alike at every depth; each pair is looked at once."""
    waiting = [(first, second)]
    seen: set[tuple[int, int]] = set()  # so that cycles end
    kept: list[Any] = []  # an identity means something only while its object lives
    while waiting:
        one, two = waiting.pop()
        if one is two or (id(one), id(two)) in seen:
            continue
        seen.add((id(one), id(two)))
        kept += (one, two)
        head, inside = _opened(one)
        other_head, other_inside = _opened(two)
        inside, other_inside = tuple(inside), tuple(other_inside)
        if head != other_head or len(inside) != len(other_inside):
            return False
        waiting.extend(zip(inside, other_inside))
    return True


def _opened(value: Any) -> _Opened:
    """One level of a value: a head that is compared with `==`, and what is inside."""
    kind: Any = type(value)
    if kind is types.FunctionType:
        cells = tuple(map(_content, value.__closure__ or ()))
        more = value.__defaults__, value.__kwdefaults__
        return (kind, value.__code__, id(value.__globals__)), (*cells, *more)
    if kind is types.MethodType:
        return (kind,), (value.__func__, value.__self__)
    if kind is functools.partial:
        return (kind,), (value.func, value.args, value.keywords)
    if kind in _BY_VALUE:
        return (kind, value), ()
    if kind in (float, complex):
        return (kind, repr(value)), ()  # tells 0.0 from -0.0, and not nan from nan
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return (kind, value.tobytes()), ()
    if isinstance(value, np.dtype):
        return (np.dtype, value), ()
    return _opened_container(kind, value)


def _opened_container(kind: Any, value: Any) -> _Opened:
    """One level of a container, or of an object that is made of its attributes."""
    if isinstance(value, tuple) or kind is list:
        return (kind,), value
    if kind is frozenset:
        return (kind,), sorted(value, key=repr)
    if kind is State:
        return (kind,), (value.raw_mapping,)
    if kind in (dict, types.MappingProxyType):
        return (kind,), (*value.keys(), *value.values())
    if _is_frozen(kind):
        fields = dataclasses.fields(value)
        return (kind,), [getattr(value, field.name) for field in fields]
    is_optax = str(kind.__module__).partition(".")[0] == "optax"
    if is_optax and kind.__eq__ is object.__eq__ and hasattr(value, "__dict__"):
        return (kind,), (vars(value),)
    return (id(value),), ()


def _is_frozen(kind: Any) -> bool:
    """Whether objects of a type are records that compare by their fields."""
    how = vars(kind).get("__dataclass_params__")
    return how is not None and how.frozen and how.eq


_EMPTY = object()  # what a variable holds before its first assignment


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY
