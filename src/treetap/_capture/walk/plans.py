# SPDX-License-Identifier: Apache-2.0
"""Plans: what is to be done at each spot of a jaxpr, and what is fed into it.

A `Plan` has one `Choice` for each spot: whether its value comes out, what is measured
of it, how something goes in. It is static, part of the key of every program made by it.

What goes in are arrays. They travel through the walk as further inputs of every program
on the way, so that other numbers need no other program. How they are used is part of
the plan: `Adding` for what `perturb` adds to a tap, `Editing` for edits. Along the
loops around a spot an array is either the same for all iterations, or has their axes.

What comes out of a `while` is carried through it: `Kept` says how.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from treetap._capture.edit_points import derived, edit_p, rows_of
from treetap._capture.marks import gradient_p, tap_p
from treetap._capture.statistics.reduced import Reduced, Reduction, arranged, on_each
from treetap._capture.walk import jax_compat
from treetap._capture.walk.jax_compat import Body, body_of
from treetap._capture.walk.spots import Has, Spot
from treetap._core.errors import CaptureError
from treetap._core.wording import typed

Feeds = Sequence[Sequence[Any] | None]


class Fed(NamedTuple):
    """What is fed into one value: how, and the arrays."""

    how: "Feed"
    arrays: list[Any]


class Choice(NamedTuple):
    """What is to be done at a spot.

    Attributes:
        record: Whether its value comes out.
        feed: How something is fed into it; or None.
        iterations: In a `while` loop, how many iterations are kept; 0 for the last one.
        reduce: What is measured of it; or None.
    """

    record: bool
    feed: "Feed | None" = None
    iterations: int = 0
    reduce: Reduction | None = None

    @property
    def is_heard(self) -> bool:
        """Whether anything comes out."""
        return self.record or self.reduce is not None


class Recorded(NamedTuple):
    """What came out at a spot: a tree of JAX, as are lists of these.

    Attributes:
        states: What was measured of each leaf (of one that is not of numbers, None); or
            None if nothing was to be.
        leaves: The leaves, if they were wanted.
        flags: What is said of the value, as the `flags` of the spot.
    """

    states: list[Reduced | None] | None
    leaves: list[Any]
    flags: list[Any]


Plan = tuple[Choice, ...]
Found = list[Recorded | None]  # by spot


class Part(NamedTuple):
    """A body of an operation, and what is to be done at the spots in it.

    Attributes:
        body: The jaxpr.
        spots: The spots in it, as seen from inside.
        plan: What is done at each.
        feeds: What is fed at each.
        start: Where the spots begin among those of the jaxpr around.
    """

    body: Body
    spots: Sequence[Spot] = ()
    plan: Plan = ()
    feeds: Feeds = ()
    start: int = 0

    def by(self, plan: Plan, feeds: Feeds) -> "Part":
        """The same with its part of a plan for all spots of the jaxpr around."""
        place = slice(self.start, self.start + len(self.spots))
        return self._replace(plan=plan[place], feeds=feeds[place])

    @property
    def fed(self) -> list[Any]:
        """What is fed, in one list."""
        return jax.tree.leaves(self.feeds)

    def feeding(self, flat: Sequence[Any]) -> "Part":
        """The same with other arrays to be fed, in one list."""
        tree = jax.tree.structure(self.feeds)
        return self._replace(feeds=jax.tree.unflatten(tree, flat))

    def feeding_types(self) -> "Part":
        """The same without arrays, for programs that get them as further inputs."""
        return self.feeding([jax.typeof(value) for value in self.fed])

    def outers(self) -> list[Any]:
        """Where the axis of an operation belongs in what comes out: a prefix of it."""
        places: list[Any] = []
        for choice, spot in zip(self.plan, self.spots):
            states: Any = choice.reduce.num_apart if choice.reduce else 0
            leaves = list(map(spot.place, spot.has)) if choice.record else []
            flags = list(map(spot.place, spot.flags_have))
            place = Recorded(states, leaves, flags) if choice.is_heard else None
            places.append(place)
        return places

    def with_axis(self, found: Found, put: Callable[[Any, int], Any]) -> Found:
        """What came out, with the axis of an operation put where it belongs."""
        return jax.tree.map(put, found, jax.tree.broadcast(self.outers(), found))

    def fed_outers(self) -> list[int | None]:
        """The same for each value that is fed; None for one without such an axis."""
        return [
            place
            for choice, spot in zip(self.plan, self.spots)
            if choice.feed is not None
            for place in choice.feed.places(spot)
        ]


class Kept(NamedTuple):
    """What a loop without an axis of turns keeps of a spot.

    It carries one more value for each that comes out: the last one, or (`iterations`) a
    buffer for the first so many, or states, to which those of each turn are merged.
    Under mappings JAX carries all with the axes of rows first.

    Attributes:
        asked: What is to come out of the loop.
        spot: The spot, in its body.
        rows: Of a mapped loop, whose rows end one by one: how many there are.
    """

    asked: Choice
    spot: Spot
    rows: tuple[int, ...]

    @property
    def levels(self) -> tuple[int, ...]:
        """The levels that the rows are of."""
        return self.spot.row_levels(self.rows)

    @property
    def choice(self) -> Choice:
        """What comes out of a turn: states are apart for rows, which end one by one."""
        reduce = self.asked.reduce
        by_row = reduce and reduce.by_row(self.levels, self.rows)
        return self.asked._replace(reduce=by_row)

    def _each(self, found: Recorded, order: Callable[[Any, Has], Any]) -> Recorded:
        leaves = map(order, found.leaves, self.spot.has)
        flags = map(order, found.flags, self.spot.flags_have)
        return found._replace(leaves=list(leaves), flags=list(flags))

    def rows_first(self, found: Recorded) -> Recorded:
        """What came out of a turn, repeated along the rows that it has not."""
        levels, rows = self.spot.levels, self.levels

        def first(value: Any, has: Has) -> Any:
            wanted = [*rows, *(n for n in has if n not in rows)]
            return arranged(value, has, wanted, [levels[n].size for n in wanted])

        return self._each(found, first)

    def begun(self, avals: Recorded) -> Recorded:
        """What the loop begins with: states that have seen nothing, and zeros.

        Args:
            avals: Types of what comes out of a turn, the axes of rows first.
        """
        zeros, size = jax.tree.map(jax_compat.zeros_of, avals), self.asked.iterations

        def buffer(value: Any) -> Any:
            return jnp.stack([value] * size, axis=len(self.rows)) if size else value

        return Recorded(zeros.states, *jax.tree.map(buffer, zeros[1:]))

    def renewed(self, before: Recorded, after: Recorded, counter: Any) -> Recorded:
        """What the loop keeps after one more turn; `counter` has those of each row."""
        size, axis = self.asked.iterations, len(self.rows)

        def stored(old: Any, value: Any) -> Any:
            if not size:
                return value
            place = jnp.max(counter)  # rows that have not ended have come equally far
            new = jax.lax.dynamic_update_index_in_dim(old, value, place, axis)
            return jnp.where(place < size, new, old)

        new = on_each(lambda each: each.at_turn(counter), after.states)
        states = on_each(Reduced.merge, before.states, new)
        return Recorded(states, *jax.tree.map(stored, before[1:], after[1:]))

    def ended(self, found: Recorded, counter: Any) -> Recorded:
        """What comes out in the end: axes in order, states of rows together, a count.

        The axis of iterations is between the mappings around the loop and its body's.
        """
        rows = self.levels
        kept = [self.spot.outer - 0.5] if self.asked.iterations else []

        def back(value: Any, has: Has) -> Any:
            held = [*rows, *kept, *(n for n in has if n not in rows)]
            return arranged(value, held, sorted(held))

        found, states = self._each(found, back), found.states
        asked, by_row = self.asked.reduce, self.choice.reduce
        over = asked.no_longer_apart(by_row) if asked and by_row else []
        for place in reversed(over):
            total = functools.partial(Reduced.total, start=place, stop=place + 1)
            states = on_each(total, states)
        return flagged(counter, self.spot, found._replace(states=states))


def flagged(flag: Any, spot: Spot, found: Recorded) -> Recorded:
    """What came out of a branch or a loop, with one more flag; cotangents have none."""
    return found if spot.is_gradient else found._replace(flags=[*found.flags, flag])


def of_each(do: Callable[..., Any], *columns: Sequence[Any]) -> list[Any]:
    """What a function gives for each spot from some columns, whose last is `Found`.

    Nothing comes out where nothing did.
    """
    return [row[-1] and do(*row) for row in zip(*columns)]


class Rewritten(NamedTuple):
    """A body that takes what is fed, too, and gives what comes out.

    Attributes:
        jaxpr: Closed; after its results it gives what comes out, in one list.
        tree: The structure of both together.
    """

    jaxpr: Any
    tree: Any

    def split(self, outs: Sequence[Any]) -> tuple[list[Any], Found]:
        """Its results, and what came out, from all that it gave."""
        return self.tree.unflatten(outs)

    def run(self, values: Sequence[Any]) -> tuple[list[Any], Found]:
        """Runs it: its results, and what came out."""
        return self.split(jax_compat.evaluate(body_of(self.jaxpr), values))

    @property
    def types(self) -> Found:
        """Types of what comes out."""
        return self.split(self.jaxpr.out_avals)[1]


class Feed:
    """How arrays go into a value: a base class."""

    what = ""

    def fixed(self, arrays: Sequence[Any], where: str) -> list[Any]:
        """The arrays as they go into a function with a rule of its own."""
        return list(arrays)

    def places(self, spot: Spot) -> list[int | None]:
        """For each array where the axis of a loop is, or None if it has none."""
        return [None]


@dataclass(frozen=True)
class Adding(Feed):
    """Arrays that are added, one for each leaf; they have the axes of all loops."""

    what = "`perturb`"

    def places(self, spot: Spot) -> list[int | None]:
        """For each array where the axis of a loop is, or None."""
        return list(map(spot.place, spot.has))

    def added(self, values: list[Any], arrays: Sequence[Any]) -> list[Any]:
        """The operands of a tap with the arrays added to them."""
        fed = [value + more for value, more in zip(values, arrays)]
        return fed + values[len(fed) :]


@dataclass(frozen=True)
class Guarding(Feed):
    """Whether the branch is taken that a mark is in, and the number of the branch."""

    number: int

    def guarded(
        self, primitive: Any, params: dict[str, Any], values: list[Any], mask: Any
    ) -> list[Any]:
        """What a mark gives that knows whether its branch is taken."""
        *leaves, ticket = values
        own = {**params, "branches": (self.number, *params.get("branches", ()))}
        if primitive is tap_p:
            maps = params["maps"]
            own["maps"] = tuple(x._replace(mapped=(*x.mapped, False)) for x in maps)
            *out, _, ticket = primitive.bind(*values, mask, **own)
            return [*out, ticket]
        if primitive is gradient_p:
            leaves = [jnp.where(mask, x, jnp.zeros_like(x)) for x in leaves]
        return primitive.bind(*leaves, ticket, **own)


class Axes(NamedTuple):
    """Which axes an array of an edit has in front of those of the value itself.

    Attributes:
        rows: Those of mappings.
        loops: Those of loops and shards.
    """

    rows: bool = False
    loops: bool = False


@dataclass(frozen=True)
class Editing(Feed):
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

    def places(self, spot: Spot) -> list[int | None]:
        """For each array where the axis of a loop is, or None."""
        place = spot.place(spot.has[0])  # all leaves have the same, where one may edit
        found = [(place if axes.rows else 0, axes.loops) for axes in self.axes]
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
                    own = {**params, "maps": (), "recipe": ()}
                    out = edit_p.bind(*out, ticket, **own)
                return out

            return derived(base, recipe, label.tree.num_leaves).call(*operands)

        ins = [0 if axes.rows else None for axes in self.axes]
        for _ in range(rows_of(params["maps"])):
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
                f"edit: the edit of {self.text} gives {typed(new)}, and the value "
                f"there is {typed(old)}. Shapes and types must be the same."
            )
        new = new if new.dtype == kind.dtype else new.astype(kind.dtype)
        return jax_compat.as_varying(new, jax_compat.varying(kind))


def is_inexact(value: Any) -> bool:
    """Whether a value is an array of numbers that may be not finite."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
