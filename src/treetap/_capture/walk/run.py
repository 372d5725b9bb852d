# SPDX-License-Identifier: Apache-2.0
"""The walk: a jaxpr run again so that marked values come out, or go in.

A survey lists the taps of a jaxpr as `Spot`s, in order of execution. A plan says for
each whether its value is to come out and what is to go in. `Walk.run` then runs the
jaxpr by the plan, operation by operation; those that hold jaxprs are made anew, with
more inputs and more outputs, as the table of `operations` says.

What comes out of a loop or a mapping has its axis in front; what comes out of a branch
is followed by whether the branch was taken, out of a `while` by how often it ran.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from treetap._capture.edit_points import edit_p, unedited
from treetap._capture.marks import TICKET, linear_p, tap_p
from treetap._capture.walk import jax_compat
from treetap._capture.walk.jaxpr_cache import JaxprCache
from treetap._capture.walk.operations import Step, operation_of
from treetap._capture.walk.plans import (
    Adding,
    Choice,
    Editing,
    Found,
    Guarding,
    Part,
    Recorded,
    Rewritten,
    is_inexact,
)
from treetap._capture.walk.spots import Spot
from treetap._capture.walk.survey import INPUTS, Survey, Taps, survey

_rewritten: JaxprCache[Rewritten] = JaxprCache()


class Walk(NamedTuple):
    """How jaxprs are run.

    Attributes:
        keep: Whether the taps stay in, for a capture further out.
        look: What counts as a spot.
    """

    keep: bool = False
    look: Callable[[Any], Survey] = Taps

    def spots(self, jaxpr: Any) -> Sequence[Spot]:
        """The spots of an open jaxpr."""
        return survey(jaxpr, self.look).spots

    def run(self, part: Part, values: Sequence[Any]) -> tuple[list[Any], Found]:
        """Runs a body by a plan: its results, and what came out at each spot."""
        jaxpr = part.body.jaxpr
        work = survey(jaxpr, self.look)
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, part.body.consts))
        env.update(zip(jaxpr.invars, values))
        found: Found = [None] * len(work.spots)

        def note(number: int, values: Sequence[Any]) -> None:
            place, numbers = work.results[number], list(filter(is_inexact, values))
            found[place] = recorded(numbers, part.plan[place], work.spots[place])

        if INPUTS in work.results:
            note(INPUTS, values)
        for n, eqn in enumerate(jaxpr.eqns):
            ins = [jax_compat.read(env, atom) for atom in eqn.invars]
            step = Step(eqn.primitive, eqn.params, ins, self)
            with jax_compat.in_context_of(eqn):
                if eqn.primitive is linear_p and not self.keep:
                    outs = ins[:-1]
                elif (place := work.taps.get(n)) is not None:
                    asked = part.plan[place], work.spots[place], part.feeds[place]
                    outs, found[place] = self.at_spot(step, *asked)
                elif n in work.inner:
                    parts = [one.by(part.plan, part.feeds) for one in work.inner[n]]
                    operation = operation_of(eqn.primitive, eqn.params)
                    outs, inside = operation.run(step, *parts)
                    start = work.inner[n][0].start
                    found[start : start + len(inside)] = inside
                else:
                    outs = jax_compat.bind(eqn.primitive, ins, eqn.params)
                if n in work.results:
                    note(n, outs)
            env.update(zip(eqn.outvars, outs))
        return [jax_compat.read(env, atom) for atom in jaxpr.outvars], found

    def rewritten(self, part: Part) -> Rewritten:
        """A body that takes what is fed, too, and gives what comes out."""
        body, unfed = part.body, part.feeding_types()
        fed = tuple(unfed.fed)

        def made() -> Rewritten:
            def fn(values: Any, fed: Any) -> tuple[list[Any], Found]:
                return self.run(unfed.feeding(fed), values)

            avals = [var.aval for var in body.jaxpr.invars]
            jaxpr, shapes = jax.make_jaxpr(fn, return_shape=True)(avals, fed)
            return Rewritten(jaxpr, jax.tree.structure(shapes))

        key = (self, part.plan, fed, jax.sharding.get_abstract_mesh())
        return _rewritten.get(body.jaxpr, key, made)

    def at_spot(
        self, step: Step, choice: Choice, spot: Spot, feed: Any
    ) -> tuple[list[Any], Recorded | None]:
        """The results of a mark, with what is fed, and what comes out of its operands.

        Args:
            step: The mark.
            choice: What is to be done.
            spot: Where it is.
            feed: The arrays that are fed, if it says how; else None.
        """
        primitive, params, values, _ = step
        how = choice.feed
        if isinstance(how, Adding):
            values = how.added(values, feed)
        if isinstance(how, Editing):
            outs = how.edited(params, values, feed, self.keep)
        elif isinstance(how, Guarding):
            outs = how.guarded(primitive, params, values, feed[0])
        elif self.keep:  # it stays in, for a capture further out
            outs = list(primitive.bind(*values, **params))
        elif primitive is edit_p:
            outs = unedited(*values, **params)
        else:
            outs = [*values, TICKET] if primitive is tap_p else values[:-1]
        return outs, recorded(values, choice, spot)


def recorded(values: Sequence[Any], choice: Choice, spot: Spot) -> Recorded | None:
    """What comes out of the operands of a mark: leaves, then its flags; or None."""
    if not choice.is_heard:
        return None
    count = len(spot.own)
    leaves, flags = list(values[:count]), list(values[count:][: len(spot.flags)])
    states = choice.reduce and choice.reduce.measure(leaves, flags, spot)
    return Recorded(states, leaves if choice.record else [], flags)
