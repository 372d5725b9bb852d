# SPDX-License-Identifier: Apache-2.0
"""Calls: values that were heard, with what came out of the walk for them.

A spot gives states, leaves and flags, in one list; a `Call` has them by what they are.
Gradients come later than the value, and from other spots: `Session` brings them here.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from treetap._capture.module_paths import Where
from treetap._capture.walk.plans import Fed
from treetap._capture.walk.run import Choice, Spot
from treetap._core.errors import CaptureError


class Call:
    """A value that was heard.

    Attributes:
        spot: The tap.
        label: What it said of the value.
        where: The Module it was in.
        index: How many with the same path and name came before.
        wraps: The operations around it that shape its value.
        order: How often it was differentiated.
        avals: Types of its leaves.
        values: Its leaves, or None if they were not asked for.
        flags: What else is known: `"taken"`, `"count"`.
        gradients: Cotangents by order of differentiation: a dict from leaf to value.
        own: Types of its leaves at the tap itself.
        states: What was measured of each leaf, or None.
        gradient_states: What was measured of cotangents, as `gradients`.
        parts: The cotangents of values that were computed again, and of the tap.
    """

    __slots__ = (
        *("avals", "flags", "gradient_states", "gradients", "index", "label"),
        *("order", "own", "parts", "spot", "states", "values", "where", "wraps"),
    )

    def __init__(self, spot: Spot, where: Where):
        self.spot = spot
        self.label = spot.label
        self.where = where
        self.index = 0
        self.wraps = spot.wraps
        self.order = spot.order
        count = len(spot.avals) - len(spot.flags)
        self.avals = spot.avals[:count]
        self.values: list[Any] | None = None
        self.flags: dict[str, Any] = {}
        self.gradients: dict[int, dict[int, Any]] = {}
        self.own = spot.own
        self.states: list[Any] | None = None
        self.gradient_states: dict[int, dict[int, Any]] = {}
        self.parts: dict[tuple[int, int], dict[bool, Any]] = {}

    def fill(self, spot: Spot, values: Any, choice: Choice) -> None:
        """Gives the call what its spot gave: states, leaves, then flags."""
        states = choice.states_at(spot)
        if choice.reduce is not None:
            self.states = choice.reduce.shaped(spot.own, values[:states])
            values = values[states:]
        count = len(self.avals) if choice.record else 0
        self.values = list(values[:count]) if choice.record else None
        for flag, value in zip(spot.flags, values[count:]):
            if flag == "taken" and flag in self.flags:
                self.flags[flag] = jnp.logical_and(self.flags[flag], value)
            else:
                self.flags[flag] = value

    def fill_gradient(self, spot: Spot, values: Any, choice: Choice) -> None:
        """The same for what a spot of its gradient gave."""
        leaves = spot.leaves or ()
        states = choice.states_at(spot)
        if choice.reduce is not None:
            found = choice.reduce.shaped(spot.own, values[:states])
            self.gradient_states.setdefault(spot.order, {}).update(zip(leaves, found))
        held = self.gradients.setdefault(spot.order, {})
        for leaf, value in zip(leaves, values[states:] or leaves):
            parts = self.parts.setdefault((spot.order, leaf), {})
            if spot.is_again and True in parts:
                raise self._refuse_parts("a `checkpoint` inside another")
            parts[spot.is_again] = value
            if choice.record:
                both = len(parts) > 1
                held[leaf] = parts[False] + parts[True] if both else value
            if choice.reduce is not None and len(parts) > 1:
                raise self._refuse_parts("`checkpoint`, and has no statistics")

    def _refuse_parts(self, where: str) -> CaptureError:
        return CaptureError(
            f"observe: the second derivative of {self.label.name!r} comes in parts: "
            f"the value is computed again under {where}. Observe it without `reduce`, "
            "or without `checkpoint`."
        )


class Planned(NamedTuple):
    """What is to be done at some spots.

    Attributes:
        calls: The calls that are wanted, or None.
        plan: What is done there.
        held: What their tickets stand for: see `plans`; or None.
    """

    calls: list[Any]
    plan: list[Choice]
    held: list[Fed | None]

    @property
    def feeds(self) -> list[Any]:
        """The arrays that are fed at each."""
        pairs = zip(self.plan, self.held)
        return [fed.arrays if fed and choice.feed else None for choice, fed in pairs]
