# SPDX-License-Identifier: Apache-2.0
"""Kept programs: what was compiled for a call serves the next one.

Who calls `patch_grid` or `blame` in a loop gives the same function, other numbers, and
often a lambda that was written in the loop. So the program is kept here, not with the
function: by everything that tracing it depends on. That is the code of the functions
and what it reads (see `closures`), the structure of the arguments with all static
values in it, and the types of the numbers. Numbers are arguments of the program.

**The invariant.** A program that is found is the one that would be traced now. If a
program holds an array from somewhere that cannot be looked at, it is not kept. Settings
and contexts of JAX are part of the key: see `_settings`.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from treetap._core.bounded_cache import BoundedCache
from treetap._core.static_values import exact
from treetap._core.wording import first_few, typed
from treetap._observe.closures import Hole, Opened
from treetap._observe.handlers import PureCall

MAX_KEPT = 64
NUMBERS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)
_log = logging.getLogger("treetap")


class Outline(NamedTuple):
    """A call without its numbers, which a program may keep.

    Attributes:
        opened: The functions.
        call: Their arguments, and what the functions bring along.
    """

    opened: Opened
    call: PureCall

    def parts(self, inputs: Sequence[Any]) -> tuple[tuple[Any, ...], Any, list[Any]]:
        """The functions, their arguments, and all leaves, around other numbers."""
        _, (held, args), _, leaves = self.call.with_inputs(inputs)
        return self.opened.with_held(held), args, leaves

    def unknown_in(self, consts: Iterable[Any]) -> list[Any]:
        """Those constants of a traced program that came from nobody knows where."""
        arrays = [x for x in consts if isinstance(x, jax.Array)]
        return [x for x in arrays if not self.opened.knows(x)]


class KeptProgram(Protocol):
    """What is kept.

    Attributes:
        unknown: Arrays in the program that came from nobody knows where.
    """

    unknown: list[Any]


_kept: BoundedCache[Any, Any] = BoundedCache(MAX_KEPT)
_seen: BoundedCache[Any, Opened] = BoundedCache(MAX_KEPT)  # by code, for messages
_told: BoundedCache[Any, bool] = BoundedCache(MAX_KEPT)


def is_number(value: Any) -> bool:
    """Whether a value is an input of a program, and not a part of it."""
    return isinstance(value, NUMBERS)


class KeptCall:
    """A call of functions, as one of numbers.

    Args:
        what: The public function at work.
        functions: The functions that it calls.
        args: Their arguments, of whatever structure.
        more: Anything else that its program depends on; hashable.
        is_input: Whether a value is an input of the program.

    Attributes:
        outline: The call without its numbers.
        given: The numbers, as they were given.
        inputs: The same as arrays.
    """

    def __init__(
        self,
        what: str,
        functions: tuple[Any, ...],
        args: Any,
        more: tuple[Any, ...] = (),
        is_input: Callable[[Any], bool] = is_number,
    ):
        # A function may change what it reads while it is traced, such as a list that it
        # appends to. What it makes of that is what the next call finds.
        self._again = functools.partial(KeptCall, what, functions, args, more, is_input)
        opened = Opened(functions, args)
        call = PureCall(_nothing, (opened.taken(), args), {}, what, is_input)
        self.what, self.given = what, call.inputs
        self.inputs = list(map(jnp.asarray, call.inputs))
        self.outline = Outline(opened, call.without_inputs())
        static = tuple(value for value in call.values if not is_input(value))
        types, places = tuple(map(jax.typeof, self.inputs)), tuple(call.places)
        facts = exact(tuple(opened.facts)), exact(static)
        structure = call.definition, call.tree, places, _settings()
        self.key = what, facts, structure, types, more

    def run(self, make: Callable[[], Any], use: Callable[[Any], Any]) -> Any:
        """Uses the program that is kept for the call, or one that is made now."""
        program = _kept.get(self.key)
        is_new = program is None
        if program is None:
            program = make()
        out = use(program)
        if program.unknown:
            _kept.discard(self.key)
            self._tell_unknown(program.unknown)
        elif is_new:
            _kept.add(self._again().key, program)
            self._tell_why()
        return out

    def _code(self) -> tuple[Any, ...]:
        return self.what, *self.outline.opened.names

    def _tell_why(self) -> None:
        """Says once which value, that is part of a program, made another necessary."""
        code, now = self._code(), self.outline.opened
        before = _seen.get(code)
        _seen.discard(code)
        _seen.add(code, now)
        for name, old, new in zip(now.names, before.facts if before else (), now.facts):
            is_held = isinstance(old, Hole) or isinstance(new, Hole)
            if not is_held and exact((old,)) != exact((new,)):
                self._tell(
                    (*code, name),
                    f"compiles anew, since `{name}` is {new!r:.80}, and was {old!r:.80}"
                    ": it is part of the program. Give what changes as an array "
                    "(`jnp.asarray`), or as an argument.",
                )
                return

    def _tell_unknown(self, arrays: list[Any]) -> None:
        self._tell(
            (*self._code(), "unknown"),
            f"compiles anew in each call, since the function reads arrays "
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


def _settings() -> int:
    """A number that stands for all that JAX takes into account when it traces.

    JAX does not say what that is. But it keeps what it traced under equal settings, so
    a function that counts its traces counts the settings.
    """
    return _numbered.eval_shape().size


def _nothing() -> None:
    """Stands for a function where only arguments are taken apart."""
