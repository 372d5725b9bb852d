# SPDX-License-Identifier: Apache-2.0
"""while_loop and fori_loop: the same function again and again.

What is carried keeps its Variables: the function must return the very Variables it was
given, in the same places, and the caller's Variables hold the final values afterwards.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, Unpack

import jax

from treetap._core.errors import StructureError
from treetap._core.trees.graphdef import GraphDef
from treetap._core.variables.values import is_ref
from treetap._core.variables.variable import raw_values
from treetap._transforms.lift.arguments import NO_STATICS
from treetap._transforms.lift.carry import Carried, Moved, written_at
from treetap._transforms.lift.kept_traces import kept
from treetap._transforms.lift.lift import (
    Inputs,
    Inside,
    Lift,
    Options,
    Parted,
    Updates,
    Written,
)
from treetap._transforms.lift.program import Key

T = TypeVar("T")


@dataclass(eq=False)
class _Loop:
    """A while or fori loop over values of one structure; kept between calls.

    Args:
        source: What to rebuild the carried value from: see `Inputs.outline`.
        parts: Which of its values JAX carries. It wants Refs from outside.
        lift: The lift.
        body: The function that is repeated.
        condition: Tells whether a while loop goes on.

    Attributes:
        step, holds: Both as JAX is given them, the same objects in each call.
        changed: The Variables that a step changes, by number, and their metadata; found
            when the step is traced.
        moved: What it puts elsewhere, also found then.
    """

    source: Inputs | GraphDef
    parts: Parted
    lift: Lift
    body: Callable[..., Any]
    condition: Callable[..., Any] | None = None
    changed: dict[int, Any] = field(default_factory=dict, init=False)
    moved: Moved = field(default_factory=Moved, init=False)

    def __post_init__(self) -> None:
        self.step, self.holds = partial(self._step), partial(self._holds)

    def _enter(self, values: Any) -> tuple[Inside, Any]:
        """The value at this level."""
        inside = Inside(self.source, self.parts.all(values), self.lift)
        return inside, inside.tree["carry"]

    def _step(self, *given: Any) -> Any:
        """The values after a step, from a number if there is one, and the values."""
        *index, values = given
        inside, value = self._enter(values)
        carried = Carried(inside, value, may_move=self.condition is None)
        with inside.watched(carried.members):
            out = self.body(*index, value)
        # With graph updates, statics may not change either.
        leaves, self.moved = carried.after(out, inside.structure is not None)
        self.changed |= inside.carried(range(len(inside.leaves)))
        return self.parts.handled(raw_values(leaves))

    def _holds(self, values: Any) -> Any:
        """Whether a while loop goes on."""
        inside, value = self._enter(values)
        holds = self.condition(value) if self.condition else True
        if inside.changed(range(len(inside.leaves))):
            raise StructureError(
                "while_loop: the condition changed a Variable, and JAX drops what it "
                "computes. Change Variables in the body."
            )
        return holds


def _repeated(
    value: Any,
    lift: Lift,
    functions: tuple[Callable[..., Any], ...],
    how: Callable[[_Loop, Any], Any],
) -> Any:
    """A carried value after a loop.

    Args:
        value: The value before it.
        lift: The lift.
        functions: The body, and the condition of a while loop.
        how: Runs JAX's loop.
    """
    inputs = Inputs({"carry": value}, lift)
    values = inputs.values()
    parts = Parted(values, map(is_ref, values))
    make = partial(_Loop, inputs.outline(), parts, lift)
    key = Key(inputs.definition, NO_STATICS, (), None)
    loop = make(*functions) if parts.fixed else kept(functions, key, lift, make)
    final = dict(enumerate(parts.all(how(loop, parts.handled(values)))))
    places, facts = written_at(loop.changed, loop.moved)
    finals = ([final[place] for place in places],)
    inputs.finish(None, Updates(finals, Written((facts,))))
    return inputs.with_plain(final, loop.moved)["carry"]


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
    lift = Lift.of("while_loop", options)

    def how(loop: _Loop, values: Any) -> Any:
        return jax.lax.while_loop(loop.holds, loop.step, values)

    return _repeated(init_val, lift, (body_fun, cond_fun), how)


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
    lift = Lift.of("fori_loop", options)

    def how(loop: _Loop, values: Any) -> Any:
        return jax.lax.fori_loop(lower, upper, loop.step, values, unroll=unroll)

    return _repeated(init_val, lift, (body_fun,), how)
