# SPDX-License-Identifier: Apache-2.0
"""Spots: the taps of a jaxpr, as the walk knows them.

A `Spot` says three things, which are of use to different readers: what the value is and
where in the model it is (who hears it); what arrays come out for it, and which of their
axes are whose (who takes the arrays apart); and its `Flow`: which tap a cotangent
belongs to, and on which ways out its ticket goes (who brings the two together; see
`marks` for tickets).

A spot is as seen from one jaxpr. Seen from outside an operation that holds the jaxpr,
the same tap has more scopes, may have one more axis or flag, and its ticket comes and
goes by operands and results of the operation.

*Axes.* The `levels` of a spot are the mappings, loops and shards that it is in, the
outermost first. An array that comes out for it has, in front and in this order, the
axes of some of them: `has` says of which, for each leaf. A loop gives its axis to
everything that comes out of it. A mapping gives it to what it maps, as the tap itself
has noted (`marks.Mapping`); nothing is read from shapes.

Where does a loop belong among the mappings? Some of these are further out than the
loop: `outer` counts them, as seen from the body, and the loop is the next level. A tap
knows how many mappings it is in. How many of them are between the tap and its jaxpr,
the name stacks on the way say, where JAX leaves a mark for each; the others are further
out. Each operation on the way out takes off those that its own name stack speaks of.

Under mappings a `while` may have a condition for each row, and rows that end one by
one. Then JAX gives all that the loop carries the axes of these rows, and so it is with
what comes out.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from treetap._capture.edit_points import edit_p
from treetap._capture.marks import Label, again_p, gradient_p, tap_p
from treetap._capture.name_stacks import Scope
from treetap._core.errors import CaptureError

MARKS = (tap_p, gradient_p, again_p, edit_p)


VMAP = "vmap"  # the kind of an axis that is no operation's


class Axis(NamedTuple):
    """An axis that a value has in front of its own.

    Attributes:
        kind: What gave it: `"vmap"`, `"scan"`, `"shard_map"` or `"while"`.
        size: How many places there are along it.
        name: What it was called, or None.
    """

    kind: str
    size: int
    name: str | None = None


UNKEPT = -1  # the size of an axis of iterations that nobody asked for
Has = tuple[int, ...]  # the levels whose axes an array has in front, outermost first


def _united(has: Has, more: Has) -> Has:
    """The levels of both."""
    return tuple(sorted({*has, *more}))


class Wrap(NamedTuple):
    """What an operation does to the values that come out of it.

    Attributes:
        name: The operation.
        size: Of the axis that it adds; None if it adds none.
        flag: What follows a value: `"taken"` or `"count"`; or empty.
        rows: Of a loop whose rows end one by one: how many there are.
    """

    name: str
    size: int | None
    flag: str
    rows: tuple[int, ...] = ()


class Flow(NamedTuple):
    """Where the ticket of a spot comes from, and where it goes.

    A variable may hold the tickets of several taps: JAX lets branches share what they
    keep for the way back, and each puts its own in.

    Attributes:
        of: For a gradient, the spot of its value, if that is in the same jaxpr; more
            than one if it cannot be told which.
        sources: For a gradient, the inputs that may bring the ticket of its value.
        tickets: For a tap, the outputs that take its ticket out.
    """

    of: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()
    tickets: tuple[int, ...] = ()

    def shifted(self, base: int, first: int) -> "Flow":
        """The same for one of more spots, and operands that are inputs."""
        of = tuple(base + n for n in self.of)
        return Flow(of, tuple(first + n for n in self.sources), self.tickets)


class Spot(NamedTuple):
    """A tap in a jaxpr: see the module's text.

    Attributes:
        label: What its tap says of the value.
        scopes: What the scopes around it say, outermost first.
        own: Types of its leaves at the tap itself.
        bases: Shapes of its leaves without any axes in front.
        has: For each leaf, which levels give it an axis.
        levels: The mappings, loops and shards around it, outermost first.
        outer: How many of these are mappings further out than the jaxpr.
        moved: Which leaves were differentiated, each time.
        leaves: For a gradient, which leaves of the value it belongs to.
        is_again: Whether it is a tap's value computed again, or the gradient of one.
        is_repeated: Whether a backward pass may compute it again, all else alike.
        is_edit: Whether it is where a value may be edited; its tap comes before.
        wraps: The operations around it that shape its value, outermost first.
        flags: What is said of its value: `"taken"` or `"count"`, the innermost first.
        flags_have: For each flag, which levels give it an axis.
        flow: Where its ticket comes from, and where it goes.
        branches: Which branches of the `cond`s around it is in, outermost first.
        hidden_in: What it is inside of that a walk cannot enter; empty if nothing.
    """

    label: Label
    scopes: tuple[Scope, ...]
    own: tuple[Any, ...]
    bases: tuple[tuple[int, ...], ...]
    has: tuple[Has, ...]
    levels: tuple[Axis, ...] = ()
    outer: int = 0
    moved: tuple[tuple[int, ...], ...] = ()
    leaves: tuple[int, ...] | None = None
    is_again: bool = False
    is_repeated: bool = False
    is_edit: bool = False
    wraps: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    flags_have: tuple[Has, ...] = ()
    flow: Flow = Flow()
    branches: tuple[int, ...] = ()
    hidden_in: str = ""

    def is_of(self, other: "Spot") -> bool:
        """Whether it may belong to a tap that its ticket may come from.

        A variable holds tickets of several taps only if these are in different
        branches. The way back goes through the same branches as the way there.
        """
        return self.label == other.label and self.branches == other.branches

    @property
    def name(self) -> str:
        """What its value is called."""
        return self.label.name

    @property
    def order(self) -> int:
        """How often it was differentiated."""
        return len(self.moved)

    @property
    def is_gradient(self) -> bool:
        """Whether this is a cotangent."""
        return self.leaves is not None

    @property
    def is_tap(self) -> bool:
        """Whether this is a value, told for the first time."""
        return self.leaves is None and not (self.is_again or self.is_edit)

    @property
    def avals(self) -> tuple[Any, ...]:
        """Types of its leaves as they come out."""
        if not self.levels:
            return tuple([getattr(own, "aval", own) for own in self.own])
        return tuple(
            jax.ShapeDtypeStruct((*(axis.size for axis in axes), *base), own.dtype)
            if hasattr(own, "dtype")
            else own
            for own, axes, base in zip(self.own, self.axes(), self.bases)
        )

    def axes(self) -> tuple[tuple[Axis, ...], ...]:
        """For each leaf the axes it has in front."""
        return tuple(tuple(self.levels[n] for n in has) for has in self.has)

    def place(self, has: Has) -> int:
        """Where the axis of an operation around belongs in an array."""
        return sum(n < self.outer for n in has)

    def wrapped(self, wrap: Wrap | None, number: int = 0) -> "Spot":
        """The spot as seen from outside an operation; cotangents have no flags.

        Args:
            wrap: What the operation does; None if nothing.
            number: Of the body that the spot is in.
        """
        if wrap is None:
            return self
        rows, spot = self.row_levels(wrap.rows), self
        if wrap.flag and not self.is_gradient:
            flags, flags_have = (*self.flags, wrap.flag), (*self.flags_have, ())
            spot = spot._replace(flags=flags, flags_have=flags_have)
        if wrap.flag == "taken":
            spot = spot._replace(branches=(number, *self.branches))
        spot = spot._replace(wraps=(wrap.name, *self.wraps))
        # Of a `while` it is a place for the iterations that may be kept.
        size = UNKEPT if wrap.flag == "count" else wrap.size
        if size is None:
            return spot
        place, own = self.outer, () if size == UNKEPT else (self.outer,)

        def within(has: Has) -> Has:
            """The levels of an array, in one more, and with its rows."""
            return _united(tuple(n + (n >= place) for n in _united(has, rows)), own)

        levels = list(self.levels)
        levels.insert(place, Axis(wrap.name, size))
        return spot._replace(
            levels=tuple(levels),
            has=tuple(map(within, spot.has)),
            flags_have=tuple(map(within, spot.flags_have)),
        )

    def keeping(self, iterations: int) -> "Spot":
        """The same with an axis for the iterations of a `while` that are kept."""
        if not iterations:
            return self
        loops = [n for n, axis in enumerate(self.levels) if axis.size == UNKEPT]
        levels = list(self.levels)
        for n in loops:
            levels[n] = levels[n]._replace(size=iterations)
        has = tuple(_united(one, tuple(loops)) for one in self.has)
        return self._replace(levels=tuple(levels), has=has)

    def seen_from(self, scopes: tuple[Scope, ...], mappings: int, flow: Flow) -> "Spot":
        """The spot as seen from outside an operation.

        Args:
            scopes: Those that the operation is in.
            mappings: How many mappings its name stack speaks of.
            flow: Where the ticket comes from and goes, out there.
        """
        outer = max(0, self.outer - mappings)
        return self._replace(scopes=(*scopes, *self.scopes), outer=outer, flow=flow)

    # The rows of a loop under mappings.

    def row_levels(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Which levels the rows of a loop are of, that the spot is in the body of.

        JAX tells their numbers alone. Where these fit several mappings it is an error.
        """
        sizes = [axis.size for axis in self.levels[: self.outer]]
        if len(sizes) < len(rows):
            return ()  # a value of whose mappings nothing is known
        some = itertools.combinations(range(len(sizes)), len(rows))
        fitting = [one for one in some if [sizes[n] for n in one] == list(rows)]
        if len(fitting) == 1:
            return fitting[0]
        raise CaptureError(
            f"{self.name!r} is in a `while` loop whose {list(rows)} rows end one by "
            f"one, inside mappings of {sizes} rows. Which of them these are cannot be "
            "told. Give the mappings different sizes, or map the same things in all."
        )


def spot_of(primitive: Any, params: Any, values: Any) -> Spot:
    """The spot of a mark, seen from inside it, by its operands: variables or values."""
    label, maps = params["label"], params["maps"]
    own = tuple(getattr(value, "aval", None) or jax.typeof(value) for value in values)
    is_tap, is_edit = primitive is tap_p, primitive is edit_p
    # After the leaves of a tap come its guards, after those of others the ticket. That
    # of a tap is its last result.
    count = label.tree.num_leaves if is_tap else len(own) - 1
    guards = len(own) - count if is_tap else 0
    flow = Flow(tickets=(len(own),)) if is_tap else Flow(sources=(count,))
    mapped = [one.mapped for one in reversed(maps)]
    has = [  # all operands of an edit are mapped alike
        tuple(n for n, flags in enumerate(mapped) if flags[0 if is_edit else leaf])
        for leaf in range(count + guards)
    ]
    bases = [aval.shape[len(each) :] for aval, each in zip(own, has)]
    return Spot(
        label,
        (),
        own[:count],
        tuple(bases[:count]),
        tuple(has[:count]),
        tuple(Axis(VMAP, one.size, one.name) for one in reversed(maps)),
        len(maps),
        params.get("moved", ()),
        params.get("leaves"),
        primitive is again_p or params.get("is_again", False),
        is_edit=is_edit,
        branches=params.get("branches", ()),
        flags=("taken",) * guards,
        flags_have=tuple(has[count:]),
        flow=flow,
    )


def plain_spot(label: Label, scopes: tuple[Scope, ...], own: tuple[Any, ...]) -> Spot:
    """The spot of a value of whose axes nothing is known, or that has none."""
    shapes = tuple([getattr(value, "shape", ()) for value in own])
    return Spot(label, scopes, own, shapes, ((),) * len(own))
