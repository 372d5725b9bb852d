# SPDX-License-Identifier: Apache-2.0
"""Plans: what is to be done at each spot of a jaxpr, and what is fed into it.

A `Plan` has one `Choice` for each spot: whether its value comes out, what is measured
of it, how something goes in. It is static, part of the key of every program made by it.

What goes in are arrays. They travel through the walk as further inputs of every program
on the way, so that other numbers need no other program. How they are used is part of
the plan: `Adding` for what `perturb` adds to a tap, `Editing` for edits. Along the
loops around a spot an array is either the same for all iterations, or has their axes.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from treetap._capture.edit_points import derived, edit_p, rows_of
from treetap._capture.marks import gradient_p, tap_p
from treetap._capture.statistics.reduced import Reduced, Reduction, on_each
from treetap._capture.walk import jax_compat
from treetap._capture.walk.jax_compat import Body
from treetap._capture.walk.spots import Spot
from treetap._core.errors import CaptureError

Feeds = Sequence[Sequence[Any] | None]


class Fed(NamedTuple):
    """What is fed into one value: how, and the arrays."""

    how: "Adding | Editing | Guarding"
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
    feed: "Adding | Editing | Guarding | None" = None
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
        return jax.tree.leaves(self.feeds)

    def feeding(self, flat: Sequence[Any]) -> "Part":
        """The same with other arrays to be fed, in one list."""
        supply = iter(flat)
        feeds = [
            [next(supply) for _ in range(choice.feed.width)] if choice.feed else None
            for choice in self.plan
        ]
        return self._replace(feeds=feeds)

    def outers(self) -> list[Any]:
        """Where the axis of an operation belongs in what comes out: a prefix of it."""
        places: list[Any] = []
        for choice, spot in zip(self.plan, self.spots):
            of_states: Any = choice.reduce.num_apart if choice.reduce else 0
            leaves = list(map(spot.place, spot.has)) if choice.record else []
            flags = list(map(spot.place, spot.flags_have))
            place = Recorded(of_states, leaves, flags)
            places.append(place if choice.is_heard else None)
        return places

    def with_axis(self, found: Found, put: Callable[[Any, int], Any]) -> Found:
        """What came out, with the axis of an operation put where it belongs."""

        def placed(place: int, part: Any) -> Any:
            return jax.tree.map(lambda value: put(value, place), part)

        return jax.tree.map(placed, self.outers(), found)

    def fed_outers(self) -> list[int | None]:
        """The same for each value that is fed; None for one without such an axis."""
        return [
            place
            for choice, spot in zip(self.plan, self.spots)
            if choice.feed
            for place in choice.feed.places(spot)
        ]

    def flagged(self, found: Found, flag: Any) -> Found:
        """What came out of a branch or a loop, with one more flag."""
        return [
            one
            if one is None or spot.is_gradient
            else one._replace(flags=[*one.flags, flag])
            for one, spot in zip(found, self.spots)
        ]

    # What a loop without an axis of turns keeps. It carries one more value for each
    # that comes out: the last one, or (`iterations`) a buffer for the first so many, or
    # states, to which those of each turn are merged. `counter` counts the turns; under
    # mappings, those of each row.

    def by_row(self, rows: Sequence[int]) -> "Part":
        """The same with states apart for rows of a mapped loop: they end one by one."""
        plan = tuple(
            choice._replace(
                reduce=choice.reduce
                and choice.reduce.by_row(spot.row_levels(rows), rows),
            )
            for choice, spot in zip(self.plan, self.spots)
        )
        return self._replace(plan=plan)

    def rows_first(self, found: Found, rows: Sequence[int]) -> Found:
        """What came out of a turn, with the axes of rows first, as JAX carries it."""

        def first(spot: Spot, one: Recorded) -> Recorded:
            levels = spot.row_levels(rows)

            def each(values: list[Any], has: Sequence[Any]) -> list[Any]:
                return [spot.rows_first(x, own, levels) for x, own in zip(values, has)]

            leaves, flags = each(one.leaves, spot.has), each(one.flags, spot.flags_have)
            return one._replace(leaves=leaves, flags=flags)

        return [one and first(spot, one) for spot, one in zip(self.spots, found)]

    def rows_back(self, found: Found, rows: Sequence[int]) -> Found:
        """What the loop has kept, with its axes in order."""

        def back(choice: Choice, spot: Spot, one: Recorded) -> Recorded:
            levels = spot.row_levels(rows)

            def each(values: list[Any], has: Sequence[Any]) -> list[Any]:
                count = choice.iterations
                return [
                    spot.rows_back(x, own, levels, count) for x, own in zip(values, has)
                ]

            leaves, flags = each(one.leaves, spot.has), each(one.flags, spot.flags_have)
            return one._replace(leaves=leaves, flags=flags)

        trios = zip(self.plan, self.spots, found)
        return [one and back(choice, spot, one) for choice, spot, one in trios]

    def buffers(self, avals: Found, rows: int) -> Found:
        """What the loop begins with: states that have seen nothing, and zeros.

        Args:
            avals: Types of what comes out of a turn, the axes of rows first.
            rows: How many such axes there are.
        """

        def begun(choice: Choice, one: Recorded) -> Recorded:
            states = jax.tree.map(jax_compat.zeros_like_aval, one.states)
            buffer = functools.partial(_buffer, size=choice.iterations, rows=rows)
            return Recorded(states, *jax.tree.map(buffer, one[1:]))

        return [one and begun(choice, one) for choice, one in zip(self.plan, avals)]

    def renewed(self, old: Found, new: Found, counter: Any) -> Found:
        """What the loop keeps after one more turn."""

        def kept(choice: Choice, before: Recorded, after: Recorded) -> Recorded:
            states = on_each(Reduced.merge, before.states, after.states)
            stored = functools.partial(_stored, counter, choice.iterations)
            return Recorded(states, *jax.tree.map(stored, before[1:], after[1:]))

        each = zip(self.plan, old, new)
        return [one and more and kept(choice, one, more) for choice, one, more in each]

    def ended(self, by_row: "Part", found: Found, counter: Any) -> Found:
        """What comes out in the end: states with rows together, then the count."""

        def together(asked: Choice, choice: Choice, one: Recorded) -> Recorded:
            if asked.reduce is None or choice.reduce is None:
                return one
            states, known = one.states, enumerate(choice.reduce.apart)
            unknown = range(len(choice.reduce.rows) - len(asked.reduce.rows))
            over = [*unknown, *(n for n, x in known if x not in asked.reduce.apart)]
            for place in reversed(over):
                total = functools.partial(Reduced.total, start=place, stop=place + 1)
                states = on_each(total, states)
            return one._replace(states=states)

        trios = zip(self.plan, by_row.plan, found)
        whole = [one and together(asked, choice, one) for asked, choice, one in trios]
        return self.flagged(whole, counter)


class Rewritten(NamedTuple):
    """A body that takes what is fed, too, and gives what comes out.

    Attributes:
        jaxpr: Closed; after its results it gives what comes out, in one list.
        num_outs: How many results there are.
        tree: The structure of what comes out.
    """

    jaxpr: Any
    num_outs: int
    tree: Any

    def split(self, outs: Sequence[Any]) -> tuple[list[Any], Found]:
        """Its results, and what came out, from all that it gave."""
        own, rest = outs[: self.num_outs], outs[self.num_outs :]
        return list(own), self.tree.unflatten(rest)


def _buffer(aval: Any, size: int, rows: int) -> Any:
    """Zeros for the last value of a loop, or for its first so many."""
    zeros = jax_compat.zeros_like_aval(aval)
    if not size:
        return zeros
    return jnp.stack([zeros] * size, axis=rows)  # after the rows of a mapped loop


def _stored(counter: Any, size: int, old: Any, value: Any) -> Any:
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

    def places(self, spot: Spot) -> list[int | None]:
        """For each array where the axis of a loop is, or None."""
        return list(map(spot.place, spot.has))

    def added(self, values: list[Any], arrays: Sequence[Any]) -> list[Any]:
        """The operands of a tap with the arrays added to them."""
        fed = [value + more for value, more in zip(values, arrays)]
        return fed + values[len(fed) :]


class Guarding(NamedTuple):
    """Whether the branch is taken that a mark is in, and the number of the branch."""

    number: int
    width = 1

    def fixed(self, arrays: Sequence[Any], where: str) -> list[Any]:
        """The condition, as it goes into a function with a rule of its own."""
        return list(arrays)

    def places(self, spot: Spot) -> list[int | None]:
        """It is the same in all iterations."""
        return [None]

    def guarded(
        self, primitive: Any, params: dict[str, Any], values: list[Any], mask: Any
    ) -> list[Any]:
        """What a mark gives that knows whether its branch is taken."""
        *leaves, ticket = values
        own = {**params, "branches": (self.number, *params.get("branches", ()))}
        if primitive is tap_p:
            maps = params["maps"]
            own["maps"] = tuple(
                one._replace(mapped=(*one.mapped, False)) for one in maps
            )
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
                f"edit: the edit of {self.text} gives {_text(new)}, and the value "
                f"there is {_text(old)}. Shapes and types must be the same."
            )
        new = new if new.dtype == kind.dtype else new.astype(kind.dtype)
        axes = tuple(jax_compat.varying(old))
        return jax_compat.as_varying(new, axes) if axes else new


def is_inexact(value: Any) -> bool:
    """Whether a value is an array of numbers that may be not finite."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _text(value: Any) -> str:
    return f"{value.dtype}{list(jnp.shape(value))}".replace(" ", "")
