# SPDX-License-Identifier: Apache-2.0
"""Functions of values that are kept between calls, so that JAX traces them once.

JAX keeps what it has traced by the identity of the traced function. `cond`, `scan`, the
other loops and `remat` give it one that they make: from the user's function, for
arguments of one structure. Made anew in each call it would be traced in each call. So
it is kept, as long as the user's function lives.

**What must hold.** A trace has as constants what a function sees beside its arguments:
what it closes over, and the globals that it names. These belong to the key, by
identity, as far as they can be found. If a Variable or an object is among them, whose
value changes without a trace of it, nothing is kept, and each call is traced.
"""

import functools
import weakref
from collections.abc import Callable, Hashable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeVar

import jax

from treetap._core.bounded_cache import BoundedCache
from treetap._core.trees.attributes import is_object
from treetap._transforms.lift.lift import Lift
from treetap._transforms.lift.program import MAX_PROGRAMS, Key
from treetap._transforms.lift.structure_watch import policy_for

MAX_KEPT = MAX_PROGRAMS  # for one function

T = TypeVar("T")

_kept: "weakref.WeakKeyDictionary[Any, BoundedCache[Hashable, Any]]"
_kept = weakref.WeakKeyDictionary()


class _Same(tuple[Any, ...]):
    """Values that are equal if they are the same ones; it keeps them alive."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and [*map(id, self)] == [*map(id, other)]

    def __hash__(self) -> int:
        return hash(tuple(map(id, self)))


def kept(
    functions: tuple[Any, ...],
    key: Key,
    lift: Lift,
    make: Callable[..., T],
    *options: Hashable,
) -> T:
    """What was made for the same functions, if nothing can have changed.

    Args:
        functions: The user's functions.
        key: What describes the arguments.
        lift: The lift.
        make: Makes it, from functions that stand for these and do not keep them alive.
        *options: What else it depends on.
    """
    seen = _Same(value for fn in functions for value in _seen_by(fn))
    can_last = key.lasts and all(map(_can_be_key, functions))
    if not can_last or any(map(_holds_objects, (*functions, *seen))):
        return make(*functions)
    first, *others = map(weakref.ref, functions)
    cache = _kept.setdefault(functions[0], BoundedCache(MAX_KEPT))
    whole = (*others, key, lift, policy_for(lift.policy), options, seen)
    return cache.made(whole, lambda: make(*map(_Weakly, (first, *others))))


class _Weakly:
    """Calls a function that it does not keep alive."""

    def __init__(self, reference: Callable[[], Any]):
        self.reference = reference

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.reference()(*args, **kwargs)


def _can_be_key(fn: Any) -> bool:
    """Whether a function has an identity: a method has none, it is made when asked."""
    return type(fn).__hash__ is object.__hash__ and bool(type(fn).__weakrefoffset__)


def _holds_objects(value: Any) -> bool:
    return any(map(is_object, jax.tree.leaves(value, is_leaf=is_object)))


def _seen_by(fn: Any) -> list[Any]:
    """What a function sees beside its arguments, and what functions it calls see.

    Globals are looked at in the function's own file only: other files have functions
    that do not change.
    """
    found: dict[int, Any] = {}
    left, file = [fn], getattr(fn, "__globals__", None)
    while left:
        for value in _seen_directly(left.pop(), file):
            if id(value) not in found:
                found[id(value)] = value
                left.append(value)
    return [*found.values()]


def _seen_directly(value: Any, file: Any) -> Iterator[Any]:
    if isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, FunctionType):
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
        for cell in value.__closure__ or ():
            with_value = cell != type(cell)()  # an empty one has nothing to give
            yield from (cell.cell_contents,) if with_value else ()
        if value.__globals__ is file:
            names = _names_in(value.__code__)
            yield from (file[name] for name in names if name in file)
    elif hasattr(value, "__wrapped__") and not isinstance(value, type):
        yield value.__wrapped__


@functools.lru_cache(maxsize=4096)
def _names_in(code: CodeType) -> frozenset[str]:
    """The globals that a function names, and attributes, which look the same."""
    inner = (_names_in(x) for x in code.co_consts if isinstance(x, CodeType))
    return frozenset(code.co_names).union(*inner)
