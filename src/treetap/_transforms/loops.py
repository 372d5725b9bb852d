# SPDX-License-Identifier: Apache-2.0
"""while_loop and fori_loop: the same function again and again.

What is carried keeps its Variables: the function must return the very Variables it was
given, in the same places, and the caller's Variables hold the final values afterwards.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, Unpack

import jax

from treetap._core.errors import StructureError
from treetap._core.variables.values import is_ref
from treetap._core.variables.variable import raw_values
from treetap._transforms.lift.carry import same_carry
from treetap._transforms.lift.lift import (
    Inputs,
    Inside,
    Lift,
    Options,
    Parted,
    Updates,
    Written,
)

T = TypeVar("T")


class _Loop:
    """The carried value of a while or fori loop.

    Attributes:
        changed: The Variables that a step changes, by number, and their metadata; found
            when the step is traced.
    """

    def __init__(self, value: Any, lift: Lift):
        self.lift = lift
        self.inputs = Inputs({"carry": value}, lift)
        values = self.inputs.values()
        self.parts = Parted(values, map(is_ref, values))  # JAX wants Refs from outside
        self.values = self.parts.handled(values)
        self.changed: dict[int, Any] = {}

    def enter(self, values: Any) -> tuple[Inside, Any]:
        """The value at this level."""
        inside = Inside(self.inputs, self.parts.all(values), self.lift)
        return inside, inside.tree["carry"]

    def step(self, values: Any, body: Callable[[Any], Any]) -> Any:
        """The values after a step."""
        inside, value = self.enter(values)
        with inside.watched():
            out = body(value)
        # With graph updates, statics may not change either.
        start = inside.definition if inside.structure is not None else None
        leaves = same_carry(start, value, out, self.lift.name)
        self.changed |= inside.carried(range(len(inside.leaves)))
        return self.parts.handled(raw_values(leaves))

    def finish(self, values: list[Any]) -> Any:
        """The caller's value with the final numbers."""
        final = dict(enumerate(self.parts.all(values)))
        finals = ([final[number] for number in self.changed],)
        written = Written((tuple(self.changed.items()),))
        self.inputs.finish(None, Updates(finals, written))
        return self.inputs.with_plain(final)["carry"]


def while_loop(
    cond_fun: Callable[[T], Any],
    body_fun: Callable[[T], T],
    init_val: T,
    **options: Unpack[Options],
) -> T:
    """Repeats `body_fun` while `cond_fun` holds.

    Args:
        cond_fun: A function of the carried value; it may not change Variables.
        body_fun: From the carried value to the next; it returns the same Variables.
        init_val: The first value.
        **options: As for `treetap.jit`.
    """
    loop = _Loop(init_val, Lift.of("while_loop", options))

    def cond(values: Any) -> Any:
        inside, value = loop.enter(values)
        holds = cond_fun(value)
        if inside.changed(range(len(inside.leaves))):
            raise StructureError(
                "while_loop: the condition changed a Variable, and JAX drops what it "
                "computes. Change Variables in the body."
            )
        return holds

    body = functools.partial(loop.step, body=body_fun)
    return loop.finish(jax.lax.while_loop(cond, body, loop.values))


def fori_loop(
    lower: Any,
    upper: Any,
    body_fun: Callable[[Any, T], T],
    init_val: T,
    *,
    unroll: int | bool | None = None,
    **options: Unpack[Options],
) -> T:
    """Repeats `body_fun(i, value)` for i from `lower` to `upper`.

    Args:
        lower: The first i.
        upper: One past the last.
        body_fun: From i and the carried value to the next; it returns the same
            Variables.
        init_val: The first value.
        unroll: As for `jax.lax.fori_loop`.
        **options: As for `treetap.jit`.
    """
    loop = _Loop(init_val, Lift.of("fori_loop", options))

    def body(i: Any, values: Any) -> Any:
        return loop.step(values, functools.partial(body_fun, i))

    final = jax.lax.fori_loop(lower, upper, body, loop.values, unroll=unroll)
    return loop.finish(final)
