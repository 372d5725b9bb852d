# SPDX-License-Identifier: Apache-2.0
"""Calls: values that were heard, with what came out of the walk for them.

A spot gives states, leaves and flags, in one list; a `Call` has them by what they are.
Gradients come later than the value, and from other spots: `Session` brings them here.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp

from treetap._capture.marks import Label
from treetap._capture.module_paths import Where
from treetap._capture.walk.plans import Choice, Fed, Feeds, Plan
from treetap._capture.walk.spots import Spot
from treetap._core.errors import CaptureError


@dataclass(slots=True, eq=False)
class Call:
    """A value that was heard.

    Attributes:
        spot: The tap.
        label: What it said of the value.
        where: The Module it was in.
        index: How many with the same path and name came before.
        values: Its leaves, or None if they were not asked for.
        flags: What else is known: `"taken"`, `"count"`.
        gradients: Cotangents by order of differentiation: a dict from leaf to value.
        states: What was measured of each leaf, or None.
        gradient_states: What was measured of cotangents, as `gradients`.
        parts: The cotangents of values that were computed again, and of the tap.
    """

    spot: Spot
    label: Label
    where: Where
    index: int
    values: list[Any] | None = None
    flags: dict[str, Any] = field(default_factory=dict)
    gradients: dict[int, dict[int, Any]] = field(default_factory=dict)
    states: list[Any] | None = None
    gradient_states: dict[int, dict[int, Any]] = field(default_factory=dict)
    parts: dict[tuple[int, int], dict[bool, Any]] = field(default_factory=dict)

    @property
    def order(self) -> int:
        """How often it was differentiated."""
        return self.spot.identity.order

    @property
    def wraps(self) -> tuple[str, ...]:
        """The operations around it that shape its value."""
        return self.spot.geometry.wraps

    @property
    def own(self) -> tuple[Any, ...]:
        """Types of its leaves at the tap itself."""
        return self.spot.geometry.own

    @property
    def avals(self) -> tuple[Any, ...]:
        """Types of its leaves as they come out."""
        geometry = self.spot.geometry
        return geometry.avals[: len(geometry.avals) - len(geometry.flags)]

    def fill(self, spot: Spot, values: Any, choice: Choice) -> None:
        """Gives the call what its spot gave: states, leaves, then flags."""
        states = choice.states_at(spot)
        if choice.reduce is not None:
            self.states = choice.reduce.shaped(spot.geometry.own, values[:states])
            values = values[states:]
        count = len(self.avals) if choice.record else 0
        self.values = list(values[:count]) if choice.record else None
        for flag, value in zip(spot.geometry.flags, values[count:]):
            if flag == "taken" and flag in self.flags:
                self.flags[flag] = jnp.logical_and(self.flags[flag], value)
            else:
                self.flags[flag] = value

    def fill_gradient(self, spot: Spot, values: Any, choice: Choice) -> None:
        """The same for what a spot of its gradient gave."""
        leaves, order = spot.identity.leaves or (), spot.identity.order
        states = choice.states_at(spot)
        if choice.reduce is not None:
            found = choice.reduce.shaped(spot.geometry.own, values[:states])
            self.gradient_states.setdefault(order, {}).update(zip(leaves, found))
        held = self.gradients.setdefault(order, {})
        for leaf, value in zip(leaves, values[states:] or leaves):
            parts = self.parts.setdefault((order, leaf), {})
            if spot.identity.is_again and True in parts:
                raise self._refuse_parts("a `checkpoint` inside another")
            parts[spot.identity.is_again] = value
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

    calls: list[Call | None]
    plan: Plan
    held: list[Fed | None]

    @property
    def feeds(self) -> Feeds:
        """The arrays that are fed at each."""
        pairs = zip(self.plan, self.held)
        return [fed.arrays if fed and choice.feed else None for choice, fed in pairs]
