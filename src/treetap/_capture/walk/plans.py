# SPDX-License-Identifier: Apache-2.0
"""Plans: what is to be done at each spot of a jaxpr, and what is fed into it.

A `Plan` has one `Choice` for each spot: whether its value comes out, what is measured
of it, how something goes in. It is static, part of the key of every program made by it.

What goes in are arrays. They travel through the walk as further inputs of every program
on the way, so that other numbers need no other program. How they are used is part of
the plan: `Adding` for what `perturb` adds to a tap, `Editing` for edits. Along the
loops around a spot an array is either the same for all iterations, or has their axes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from treetap._capture.edit_points import derived, edit_p
from treetap._capture.statistics.reduced import Reduction
from treetap._capture.walk import jax_compat
from treetap._capture.walk.jax_compat import Body
from treetap._capture.walk.spots import Spot
from treetap._core.errors import CaptureError

Feeds = Sequence[Sequence[Any] | None]


class Fed(NamedTuple):
    """What is fed into one value: how, and the arrays."""

    how: "Adding | Editing"
    arrays: list[Any]


class Choice(NamedTuple):
    """What is to be done at a spot.

    Attributes:
        record: Whether its value comes out.
        feed: How something is fed into it; or None.
        iterations: In a `while` loop, how many iterations are kept; 0 for the last one.
        reduce: What is measured of it; its states come out first.
    """

    record: bool
    feed: "Adding | Editing | None" = None
    iterations: int = 0
    reduce: Reduction | None = None

    @property
    def is_heard(self) -> bool:
        """Whether anything comes out."""
        return self.record or self.reduce is not None

    def states_at(self, spot: Spot) -> int:
        """How many arrays the states are, at a spot."""
        return 0 if self.reduce is None else self.reduce.width(spot.geometry.own)

    def width_at(self, spot: Spot) -> int:
        """How many arrays come out at a spot: states, leaves and flags."""
        if not self.is_heard:
            return 0
        rest = spot.geometry.avals if self.record else spot.geometry.flags
        return self.states_at(spot) + len(rest)


Plan = tuple[Choice, ...]
Found = list[list[Any] | None]  # by spot, what came out there


def flat_feeds(feeds: Feeds) -> list[Any]:
    """What is fed, in one list."""
    return [value for feed in feeds if feed is not None for value in feed]


def shaped_feeds(plan: Plan, flat: Sequence[Any]) -> Feeds:
    """The inverse of `flat_feeds`."""
    supply = iter(flat)
    return [
        [next(supply) for _ in range(choice.feed.width)] if choice.feed else None
        for choice in plan
    ]


def flat_found(found: Found) -> list[Any]:
    """What came out, in one list."""
    return [value for values in found if values is not None for value in values]


class Part(NamedTuple):
    """A body, and what is to be done at the spots in it.

    Attributes:
        body: The jaxpr.
        spots: The spots in it.
        plan: What is done at each.
        feeds: What is fed at each.
    """

    body: Body
    spots: Sequence[Spot]
    plan: Plan
    feeds: Feeds

    @property
    def fed(self) -> list[Any]:
        """What is fed, in one list."""
        return flat_feeds(self.feeds)

    def feeding(self, flat: Sequence[Any]) -> "Part":
        """The same with other arrays to be fed, in one list."""
        return self._replace(feeds=shaped_feeds(self.plan, flat))

    def shaped(self, flat: Sequence[Any]) -> Found:
        """The inverse of `flat_found`, for what came out of this body."""
        supply = iter(flat)
        return [
            [next(supply) for _ in range(choice.width_at(spot))]
            if choice.is_heard
            else None
            for choice, spot in zip(self.plan, self.spots)
        ]

    def outers(self) -> list[int]:
        """For each value that comes out, where the axis of an operation belongs."""
        places: list[int] = []
        for choice, spot in zip(self.plan, self.spots):
            states = choice.states_at(spot)
            places += [choice.reduce.rows] * states if choice.reduce else []
            places += [spot.geometry.outer] * (choice.width_at(spot) - states)
        return places

    def fed_outers(self) -> list[int | None]:
        """The same for each value that is fed; None for one without such an axis."""
        return [
            place
            for choice, spot in zip(self.plan, self.spots)
            if choice.feed
            for place in choice.feed.places(spot.geometry.outer)
        ]

    def flagged(self, flat: Sequence[Any], flag: Any) -> Found:
        """What came out of a branch or a loop, followed by what is said of it."""
        return [
            values if values is None or spot.identity.is_gradient else [*values, flag]
            for values, spot in zip(self.shaped(flat), self.spots)
        ]

    # What a loop without an axis of turns keeps. It carries one more value for each
    # that comes out: the last one, or (`iterations`) a buffer for the first so many, or
    # states, to which those of each turn are merged. `counter` counts the turns; under
    # mappings, those of each row.

    def by_row(self, rows: int) -> "Part":
        """The same with states apart for rows of a mapped loop: they end one by one."""
        plan = tuple(
            choice._replace(reduce=choice.reduce.by_row(rows))
            if choice.reduce is not None and choice.reduce.rows < rows
            else choice
            for choice in self.plan
        )
        return self._replace(plan=plan)

    def buffers(self, avals: Sequence[Any], rows: int) -> list[Any]:
        """What the loop begins with: states that have seen nothing, and zeros."""
        sizes: list[int] = []
        for choice, spot in zip(self.plan, self.spots):
            states = choice.states_at(spot)
            sizes += [0] * states
            sizes += [choice.iterations] * (choice.width_at(spot) - states)
        return [_buffer(aval, size, rows) for aval, size in zip(avals, sizes)]

    def renewed(self, old: Any, new: Any, counter: Any) -> list[Any]:
        """What the loop keeps after one more turn."""
        kept: list[Any] = []
        pairs = zip(self.shaped(old), self.shaped(new))
        for choice, spot, (before, after) in zip(self.plan, self.spots, pairs):
            if before is None or after is None:
                continue
            count = choice.states_at(spot)
            if choice.reduce is not None:
                own = spot.geometry.own
                kept += choice.reduce.merge(own, before[:count], after[:count])
            kept += [
                _stored(held, value, counter, choice.iterations)
                for held, value in zip(before[count:], after[count:])
            ]
        return kept

    def ended(self, by_row: "Part", flat: Sequence[Any], counter: Any) -> Found:
        """What comes out in the end: states with rows together, then the count."""
        found = by_row.flagged(flat, counter)
        for n, (asked, choice) in enumerate(zip(self.plan, by_row.plan)):
            if asked.reduce is not None and choice is not asked:
                spot, values = self.spots[n], found[n] or []
                count, own = asked.states_at(spot), spot.geometry.own
                rows = choice.reduce.rows if choice.reduce else 0
                states = asked.reduce.joined(own, values[:count], rows)
                found[n] = [*states, *values[count:]]
        return found


def _buffer(aval: Any, size: int, rows: int) -> Any:
    """Zeros for the last value of a loop, or for its first so many."""
    zeros = jax_compat.zeros_like_aval(aval)
    if not size:
        return zeros
    return jnp.stack([zeros] * size, axis=rows)  # after the rows of a mapped loop


def _stored(old: Any, value: Any, counter: Any, size: int) -> Any:
    """What is kept of a value after one more turn."""
    if not size:
        return value
    place = jnp.max(counter)  # rows that have not ended have come equally far
    axis = counter.ndim
    new = jax.lax.dynamic_update_index_in_dim(old, value, place, axis)
    return jnp.where(place < size, new, old)


class Adding(NamedTuple):
    """Arrays that are added, one for each leaf; they have the axes of all loops."""

    width: int
    what = "`perturb`"

    def fixed(self, arrays: Sequence[Any], where: str) -> list[Any]:
        """The arrays as they go into a function with a rule of its own."""
        return list(arrays)

    def places(self, outer: int) -> list[int | None]:
        """For each array where the axis of a loop is, or None."""
        return [outer] * self.width

    def added(self, values: list[Any], arrays: Sequence[Any]) -> list[Any]:
        """The operands of a tap with the arrays added to them."""
        fed = [value + more for value, more in zip(values, arrays)]
        return fed + values[len(fed) :]


class Axes(NamedTuple):
    """Which axes an array of an edit has in front of those of the value itself.

    Attributes:
        rows: Those of mappings.
        loops: Those of loops and shards.
    """

    rows: bool = False
    loops: bool = False


class Editing(NamedTuple):
    """Edits, one after the other.

    Attributes:
        text: The site, for errors.
        tree: The structure of the edits.
        axes: For each of their arrays, the axes it has.
    """

    text: str
    tree: Any
    axes: tuple[Axes, ...]
    what = "`edit`"

    def fixed(self, arrays: Sequence[Any], where: str) -> list[Any]:
        """The arrays, refused if they are differentiated."""

        @jax.custom_jvp
        def same(array: Any) -> Any:
            return array

        @same.defjvp
        def _(primals: Any, tangents: Any) -> Any:
            raise CaptureError(
                f"edit: {self.text} is inside a {where}, whose rule has no derivative "
                "with respect to the edit. Move the tap outside, or stop the gradient "
                "of the edit's arrays."
            )

        return [same(array) if is_inexact(array) else array for array in arrays]

    @property
    def width(self) -> int:
        """How many arrays there are."""
        return len(self.axes)

    def places(self, outer: int) -> list[int | None]:
        """For each array where the axis of a loop is, or None."""
        found = [(outer if axes.rows else 0, axes.loops) for axes in self.axes]
        return [place if loops else None for place, loops in found]

    def edited(
        self, params: dict[str, Any], values: Any, arrays: Any, keep: bool
    ) -> list[Any]:
        """What `edit_p` gives with the edits in the place of the identity.

        Args:
            params: Its parameters.
            values: Its operands.
            arrays: The arrays of the edits.
            keep: Whether it stays in, for somebody who edits further out.
        """
        label, recipe = params["label"], params["recipe"]
        ticket = values[-1]

        def call(operands: Any, arrays: Any) -> list[Any]:
            def base(*leaves: Any) -> list[Any]:
                out = self._applied(label.tree, leaves, arrays)
                if keep:
                    out = edit_p.bind(*out, ticket, label=label, rows=0, recipe=())
                return out

            return derived(base, recipe, label.tree.num_leaves).call(*operands)

        ins = [0 if axes.rows else None for axes in self.axes]
        for _ in range(params["rows"]):
            call = jax.vmap(call, in_axes=(0, ins))
        return call(list(values[:-1]), list(arrays))

    def _applied(self, tree: Any, leaves: Any, arrays: Any) -> list[Any]:
        value = jax.tree.unflatten(tree, leaves)
        for edit in jax.tree.unflatten(self.tree, arrays):
            value = edit(value)
        out, found = jax.tree.flatten(value)
        if found != tree:
            raise CaptureError(
                f"edit: the edit of {self.text} gives {found}, and the value there is "
                f"{tree}. An edit gives what it gets, with other numbers."
            )
        return [self._checked(new, old) for new, old in zip(out, leaves)]

    def _checked(self, new: Any, old: Any) -> Any:
        """A leaf after the edit, refused if it is of another shape or type."""
        new, kind = jnp.asarray(new), jax.typeof(old)
        is_fit = new.shape == kind.shape and (
            new.dtype == kind.dtype
            or (new.weak_type and jnp.result_type(new, old) == kind.dtype)
        )
        if not is_fit:
            raise CaptureError(
                f"edit: the edit of {self.text} gives {_text(new)}, and the value "
                f"there is {_text(old)}. Shapes and types must be the same."
            )
        new = new.astype(kind.dtype)
        axes = tuple(jax_compat.varying(old))
        return jax_compat.as_varying(new, axes) if axes else new


def is_inexact(value: Any) -> bool:
    """Whether a value is an array of numbers that may be not finite."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _text(value: Any) -> str:
    return f"{value.dtype}{list(jnp.shape(value))}".replace(" ", "")
