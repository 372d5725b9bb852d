# SPDX-License-Identifier: Apache-2.0
"""Arguments by number and by name: those chosen, and those that are static.

A static argument is taken out before arguments are walked, and put back inside.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable
from inspect import Parameter
from itertools import compress
from typing import Any, NamedTuple

import jax

from treetap._core.static_values import Statics, exact


def _as_tuple(given: Any) -> tuple[Any, ...]:
    if given is None:
        return ()
    return tuple(given) if isinstance(given, tuple | list | set) else (given,)


class Positions:
    """Arguments chosen by number or by name, however they are passed.

    Args:
        fn: The function.
        numbers: Numbers of arguments; those below zero count from the end.
        names: Names of arguments.
        what: The transform and which of its arguments these are, for messages.
    """

    def __init__(self, fn: Any, numbers: Any, names: Any, what: str):
        self.numbers = set(_as_tuple(numbers))
        self.names = set(_as_tuple(names))
        kinds: dict[str, Any] = {}  # of a builtin without a signature
        with contextlib.suppress(TypeError, ValueError):
            parameters = inspect.signature(fn).parameters
            kinds = {name: p.kind for name, p in parameters.items()}
        by_place = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        positional = [name for name, kind in kinds.items() if kind in by_place]
        self.numbers |= {i for i, name in enumerate(positional) if name in self.names}
        takes_more = Parameter.VAR_POSITIONAL in kinds.values()
        takes_any = not kinds or Parameter.VAR_KEYWORD in kinds.values()
        if not takes_any and (unknown := sorted(self.names - kinds.keys())):
            raise ValueError(
                f"{what}: there is no argument {unknown[0]!r}. The function takes "
                f"{', '.join(kinds)}."
            )
        for number in list(self.numbers):
            if 0 <= number < len(positional):
                self.names.add(positional[number])
            elif kinds and not takes_more and not -len(positional) <= number < 0:
                raise ValueError(
                    f"{what}: there is no argument number {number}. The function has "
                    f"{len(positional)} positional arguments."
                )

    def __bool__(self) -> bool:
        return bool(self.numbers or self.names)

    def chosen(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """Which of some arguments are chosen; a prefix of them."""
        count, numbers = len(args), self.numbers
        flags = tuple(n in numbers or n - count in numbers for n in range(count))
        return {"args": flags, "kwargs": {name: name in self.names for name in kwargs}}


class _Hole:
    """Stands in the arguments where a static one was taken out."""


jax.tree_util.register_static(_Hole)
HOLE = _Hole()


def count_positional(f: Any) -> int:
    """How many arguments a function has that can be passed by position."""
    kinds = [x.kind for x in inspect.signature(f).parameters.values()]
    return sum(kind <= inspect.Parameter.POSITIONAL_OR_KEYWORD for kind in kinds)


def by_position(
    f: Any, args: Any, kwargs: Any, count: int | None = 0
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by position, and those that can only be passed by keyword.

    Args:
        f: The function.
        args: What it is called with.
        kwargs: The same, by keyword.
        count: To how many arguments defaults are added; None for all. A gap before an
            argument that was given is always filled.
    """
    bound = inspect.signature(f).bind(*args, **kwargs)
    named = [*bound.signature.parameters]
    last = max((named.index(x) + 1 for x in kwargs if x in named), default=0)
    bound.apply_defaults()
    end = None if count is None else max(len(args), last, count)
    rest = {name: value for name, value in bound.kwargs.items() if name in kwargs}
    return bound.args[:end], rest


def positional(
    f: Any, args: Any, kwargs: Any, name: str, argument: str, *, count: int = 0
) -> Any:
    """All arguments by position, for a transform whose prefix counts those."""
    if not kwargs and len(args) >= count:
        return args
    args, rest = by_position(f, args, kwargs, count)
    if rest:
        raise TypeError(
            f"{name}: the arguments {sorted(rest)} could not be resolved to "
            f"positions: they can only be passed by keyword, and `{argument}` has "
            "entries for positional arguments only."
        )
    return args


class StaticArguments(NamedTuple):
    """Static arguments, in a form in which `==` and `hash` are exact.

    Attributes:
        where: Where they stand: numbers and names.
        values: The arguments.
        kinds: See `static_values.exact`.
    """

    where: tuple[int | str, ...] = ()
    values: tuple[Any, ...] = ()
    kinds: tuple[Any, ...] = ()


NO_STATICS = StaticArguments()


def take_statics(
    statics: Positions | None, args: Any, kwargs: Any
) -> tuple[Any, Any, StaticArguments]:
    """The arguments with static ones replaced by a hole, and those."""
    if not statics:
        return args, kwargs, NO_STATICS
    chosen = statics.chosen(args, kwargs)
    taken: dict[int | str, Any] = dict(compress(enumerate(args), chosen["args"]))
    taken |= {name: kwargs[name] for name, flag in chosen["kwargs"].items() if flag}
    rest = tuple(HOLE if n in taken else value for n, value in enumerate(args))
    named = {name: HOLE if name in taken else kwargs[name] for name in kwargs}
    found = StaticArguments((*taken,), *exact((*taken.values(),)))
    return rest, named, found


def put_statics(fn: Callable[..., Any], statics: StaticArguments) -> Callable[..., Any]:
    """`fn` with static arguments put back into their places, as they were described."""
    if not statics.where:
        return fn

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        places, values = list(args), statics.values
        if isinstance(values, Statics):
            values = values.as_described()
        for where, value in zip(statics.where, values):
            target: Any = places if isinstance(where, int) else kwargs
            target[where] = value
        return fn(*places, **kwargs)

    return call
