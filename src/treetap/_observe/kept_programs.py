# SPDX-License-Identifier: Apache-2.0
"""Kept programs: what was compiled for a call serves the next one.

Who calls `patch_grid` or `blame` in a loop gives the same function, other numbers, and
often a lambda that was written in the loop. So the program is kept here, not with the
function: by everything that tracing it depends on. That is the code of the functions
and what it reads (see `closures`), the structure of the arguments with all static
values in it, and the types of the numbers. Numbers are arguments of the program.

**The invariant.** A program that is found is the one that would be traced now. If a
program holds an array from somewhere that cannot be looked at, it is not kept. Settings
and contexts of JAX are part of every `jax.jit`'s key, so a program
traces inside of one, or has `settings` in its key.
"""

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from treetap._core.bounded_cache import BoundedCache
from treetap._core.static_values import exact
from treetap._core.wording import first_few, typed
from treetap._observe.closures import Opened, classes_in, read_by
from treetap._observe.handlers import PureCall

MAX_KEPT = 64
NUMBERS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)
_log = logging.getLogger("treetap")


def is_number(value: Any) -> bool:
    """Whether a value is an input of a program, and not a part of it."""
    return isinstance(value, NUMBERS)


class Outline(NamedTuple):
    """A call without its numbers, which a program may keep.

    Attributes:
        opened: The functions.
        call: Their arguments, and what the functions bring along.
    """

    opened: Opened
    call: PureCall

    @classmethod
    def of(
        cls,
        opened: Opened,
        held: Sequence[Any],
        args: Any,
        what: str,
        is_input: Callable[[Any], bool] = is_number,
    ) -> "tuple[Outline, PureCall]":
        """That of a call of functions; and the call itself, with its numbers."""
        call = PureCall(_nothing, (held, args), {}, what, is_input)
        return cls(opened, call.without_inputs()), call

    def parts(self, inputs: Sequence[Any]) -> tuple[tuple[Any, ...], Any, list[Any]]:
        """The functions, their arguments, and all leaves, around other numbers."""
        _, (held, args), _, leaves = self.call.with_inputs(inputs)
        return self.opened.with_held(held), args, leaves


class KeptProgram:
    """A program, and what it depends on beside its key.

    Args:
        opened: The functions that it calls.

    Attributes:
        unknown: Arrays in it that came from nobody knows where.
    """

    def __init__(self, opened: Opened):
        self.opened = opened
        self.unknown: list[Any] = []
        self._classes: set[type] = set()
        self._read = read_by(())

    def is_of(self, value: Any) -> None:
        """Notes that it is traced with the code of the classes of objects."""
        self._classes |= classes_in(value)
        self._read = read_by(self._classes)

    def look_at(self, consts: Iterable[Any]) -> None:
        """Notes the constants of what was traced, which came from anywhere."""
        arrays = [x for x in consts if isinstance(x, jax.Array)]
        known = (self.opened.knows, self._read.knows)
        self.unknown += [x for x in arrays if not any(knows(x) for knows in known)]

    def is_up_to_date(self) -> bool:
        """Whether the methods of classes read what they read when it was traced."""
        return not self._classes or read_by(self._classes).key == self._read.key


_kept: BoundedCache[Any, KeptProgram] = BoundedCache(MAX_KEPT)
_seen: BoundedCache[Any, Opened] = BoundedCache(MAX_KEPT)  # by code, for messages
_told: BoundedCache[Any, bool] = BoundedCache(MAX_KEPT)

Program = TypeVar("Program", bound=KeptProgram)
R = TypeVar("R")


class KeptCall(Generic[Program]):
    """A call of functions by a program that is kept.

    Args:
        what: The public function at work.
        functions: The functions that it calls.
        more: Anything else that its program depends on; hashable.

    Attributes:
        opened: The functions.
        held: What they bring along.
    """

    def __init__(self, what: str, functions: tuple[Any, ...], *more: Any):
        self.what, self.functions, self.more = what, functions, more
        self.opened = Opened(functions)
        self.held = self.opened.taken()

    def run(self, make: Callable[[Opened], Program], use: Callable[[Program], R]) -> R:
        """Uses the program that is kept for the call, or one that is made now."""
        key = self.what, self.opened.key, *self.more
        program: Any = _kept.get(key)
        if program is not None and not program.is_up_to_date():
            _kept.discard(key)
            program = None
        is_new = program is None
        program = make(self.opened) if program is None else program
        out = use(program)
        if program.unknown:
            _kept.discard(key)
            self._tell_unknown(program.unknown)
        elif is_new:
            # A function may change what it reads while it is traced, such as a list
            # that it appends to. What it makes of that is what the next call finds.
            key = self.what, Opened(self.functions).key, *self.more
            _kept.add(key, program)
            self._tell_why()
        return out

    def _tell_why(self) -> None:
        """Says once which value, that is part of a program, made another necessary."""
        code, now = (self.what, *self.opened.heads), self.opened
        before = _seen.get(code)
        _seen.discard(code)
        _seen.add(code, now)
        old_values = before.values if before else ()
        for name, old, new in zip(now.names, old_values, now.values):
            if exact((old,)) != exact((new,)):
                self._tell(
                    (*code, name),
                    f"compiles anew, since `{name}` is {new!r:.80}, and was {old!r:.80}"
                    ": it is part of the program. Give what changes as an array "
                    "(`jnp.asarray`), or as an argument.",
                )
                return

    def _tell_unknown(self, arrays: list[Any]) -> None:
        self._tell(
            (self.what, *self.opened.heads, "unknown"),
            "compiles anew in each call, since the function reads arrays "
            f"({first_few([typed(x) for x in arrays])}) from where it cannot be seen "
            "whether they change. Give the Module, or the arrays, as an argument.",
        )

    def _tell(self, key: Any, text: str) -> None:
        if _told.get(key) is None:
            _told.add(key, True)
            _log.warning("%s: %s", self.what, text)


_counter = itertools.count()


@jax.jit
def _numbered() -> jax.Array:
    return jnp.zeros(next(_counter), bool)


def settings() -> int:
    """A number that stands for all that JAX takes into account when it traces.

    JAX does not say what that is. But it keeps what it traced under equal settings, so
    a function that counts its traces counts the settings.
    """
    return _numbered.eval_shape().size


def _nothing() -> None:
    """Stands for a function where only arguments are taken apart."""
