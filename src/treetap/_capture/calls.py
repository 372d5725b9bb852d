# SPDX-License-Identifier: Apache-2.0
"""Calls: values that were heard, with what came out of the walk for them.

Gradients come later than the value, and from other spots: `Session` brings them here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp

from treetap._capture.marks import Label
from treetap._capture.module_paths import Where
from treetap._capture.statistics.reduced import Placed, arranged
from treetap._capture.walk.plans import Choice, Fed, Feeds, Plan, Recorded
from treetap._capture.walk.spots import Axis, Spot
from treetap._core.errors import CaptureError


@dataclass(slots=True, eq=False)
class Call:
    """A value that was heard.

    Attributes:
        spot: The tap.
        label: What it said of the value.
        where: The Module it was in.
        index: How many with the same path and name came before.
        values: Its leaves, if they were asked for.
        flags: What else is known, with its axes: `"taken"`, `"count"`.
        gradients: Cotangents by order of differentiation: a dict from leaf to value.
        states: What was measured of each leaf, or None.
        gradient_states: What was measured of cotangents, as `gradients`.
        parts: The cotangents of values that were computed again, and of the tap.
        gradient_axes: What is in front of cotangents, as `gradients`.
        once: The orders and leaves of cotangents that are computed once.
    """

    spot: Spot
    label: Label
    where: Where
    index: int
    values: list[Any] = field(default_factory=list)
    flags: dict[str, Placed] = field(default_factory=dict)
    gradients: dict[int, dict[int, Any]] = field(default_factory=dict)
    states: list[Any] | None = None
    gradient_states: dict[int, dict[int, Any]] = field(default_factory=dict)
    parts: dict[tuple[int, int], dict[bool, Any]] = field(default_factory=dict)
    gradient_axes: dict[int, dict[int, tuple[Axis, ...]]] = field(default_factory=dict)
    once: set[tuple[int, int]] = field(default_factory=set)

    def fill(self, found: Recorded) -> None:
        """Gives the call what came out at its spot."""
        self.values, self.states = found.leaves, found.states
        spot = self.spot
        for flag, value, has in zip(spot.flags, found.flags, spot.flags_have):
            one = Placed(value, has)
            if flag == "taken" and flag in self.flags:
                one = _both(self.flags[flag], one, spot.levels)
            self.flags[flag] = one

    def fill_gradient(self, spot: Spot, found: Recorded) -> None:
        """The same for what came out at a spot of its gradient."""
        leaves, order = spot.leaves or (), spot.order
        if found.states is not None:
            states = self.gradient_states.setdefault(order, {})
            states.update(zip(leaves, found.states))
        held = self.gradients.setdefault(order, {})
        known = self.gradient_axes.setdefault(order, {})
        for leaf, value, axes in zip(leaves, found.leaves or leaves, spot.axes()):
            parts = self.parts.setdefault((order, leaf), {})
            if spot.is_again and True in parts:
                raise self._refuse_parts("a `checkpoint` inside another")
            # One that is computed again for a backward pass is the same gradient.
            is_new = not (spot.is_again or spot.is_repeated)
            if is_new and (order, leaf) in self.once:
                raise CaptureError(
                    f"The value {self.label.name!r} has more than one gradient: its "
                    "pullback is called more than once. Call the pullback once in the "
                    "function that is observed, or with `jax.vmap` over cotangents."
                )
            self.once |= {(order, leaf)} if is_new else set()
            parts[spot.is_again] = value
            both = len(parts) > 1
            if known.setdefault(leaf, axes) != axes:
                raise self._refuse_parts("`checkpoint` and mapped in one of them")
            if found.leaves:
                held[leaf] = parts[False] + parts[True] if both else value
            if found.states is not None and both:
                raise self._refuse_parts("`checkpoint`, and has no statistics")

    def _refuse_parts(self, where: str) -> CaptureError:
        return CaptureError(
            f"observe: the second derivative of {self.label.name!r} comes in parts: "
            f"the value is computed again under {where}. Observe it without `reduce`, "
            "or without `checkpoint`."
        )


def _both(first: Placed, second: Placed, levels: Sequence[Axis]) -> Placed:
    """Whether two things are so, along the axes of both."""
    held = tuple(sorted({*first.levels, *second.levels}))
    sizes = [levels[n].size for n in held]
    one, two = (arranged(x.array, x.levels, held, sizes) for x in (first, second))
    return Placed(jnp.logical_and(one, two), held)


class Ticket(NamedTuple):
    """What is known of a spot and its ticket, at the level of the capture.

    Attributes:
        spot: The spot; where a ticket is kept, the tap that gave it.
        call: Its call; None if nobody wants it.
        choice: What is done there.
        fed: What is fed there, or where the ticket goes; or None.
    """

    spot: Spot
    call: Call | None
    choice: Choice
    fed: Fed | None


def plan_of(tickets: Sequence[Ticket]) -> tuple[Plan, Feeds]:
    """What is to be done at some spots, and the arrays that are fed there."""
    feeds = [x.fed.arrays if x.fed and x.choice.feed else None for x in tickets]
    return tuple(one.choice for one in tickets), feeds
