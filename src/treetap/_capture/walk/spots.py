# SPDX-License-Identifier: Apache-2.0
"""Spots: the taps of a jaxpr, as the walk knows them.

A spot is three things, which are of use to different readers:

- its `Identity`: what the value is, and where in the model it is (who hears it);
- its `Geometry`: what arrays come out for it, and which of their axes are whose (who
  takes the arrays apart);
- its `Flow`: which tap a cotangent belongs to, and on which ways out its ticket goes
  (who brings the two together; see `marks` for tickets).

A spot is as seen from one jaxpr. Seen from outside an operation that holds the jaxpr,
the same tap has more scopes, may have one more axis or flag, and its ticket comes and
goes by operands and results of the operation.

*Axes.* Read from the front, a value that comes out has the axes of mappings (`vmap`)
further out than the jaxpr, then those of loops and shards, outermost first, then its
own, of which the first may be of mappings inside the jaxpr. `outer` counts the first
group; so an operation that adds an axis puts it at `outer`. How many mappings there are
between a tap and a jaxpr the name stacks say, how many in all the tap itself (`rows`):
the difference is `outer`, and each operation on the way out takes off those that its
name stack speaks of.
"""

from typing import Any, NamedTuple

import jax

from treetap._capture.edit_points import edit_p
from treetap._capture.marks import Label, again_p, gradient_p, tap_p
from treetap._capture.name_stacks import mappings_in, scopes_in

MARKS = (tap_p, gradient_p, again_p, edit_p)


class Identity(NamedTuple):
    """What a spot is, and where in the model.

    Attributes:
        label: What its tap says of the value.
        order: How often it was differentiated.
        scopes: The names of the scopes around it, outermost first.
        leaves: For a gradient, which leaves of the value it belongs to.
        is_again: Whether it is a tap's value computed again, or the gradient of one.
        is_edit: Whether it is where a value may be edited; its tap comes before.
    """

    label: Label
    order: int
    scopes: tuple[str, ...]
    leaves: tuple[int, ...] | None = None
    is_again: bool = False
    is_edit: bool = False

    @property
    def is_gradient(self) -> bool:
        """Whether this is a cotangent."""
        return self.leaves is not None

    @property
    def is_tap(self) -> bool:
        """Whether this is a value, told for the first time."""
        return self.leaves is None and not (self.is_again or self.is_edit)


class Wrap(NamedTuple):
    """What an operation does to the values that come out of it.

    Attributes:
        name: The operation.
        size: Of the axis that it adds; None if it adds none.
        flag: What follows a value: `"taken"` or `"count"`; or empty.
    """

    name: str
    size: int | None
    flag: str


class Geometry(NamedTuple):
    """What comes out for a spot.

    Attributes:
        avals: Types of its values: the leaves, then one for each flag.
        own: Types of the leaves at the tap itself.
        outer: How many of its first axes are of mappings further out than the jaxpr.
        rows: How many of its own first axes are of mappings.
        wraps: The operations around it that shape its value, outermost first.
        sizes: Of the axes that these add, outermost first.
        flags: What follows the leaves: `"taken"` or `"count"`.
    """

    avals: tuple[Any, ...]
    own: tuple[Any, ...]
    outer: int = 0
    rows: int = 0
    wraps: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    flags: tuple[str, ...] = ()

    def wrapped(self, wrap: Wrap, is_gradient: bool) -> "Geometry":
        """The same as seen from outside an operation; cotangents have no flags."""
        avals, sizes, flags = self.avals, self.sizes, self.flags
        if wrap.size is not None:
            sizes = wrap.size, *sizes
            avals = tuple(_with_axis(aval, wrap.size, self.outer) for aval in avals)
        if wrap.flag and not is_gradient:
            kind = bool if wrap.flag == "taken" else "int32"
            avals = (*avals, jax.ShapeDtypeStruct((), kind))
            flags = (*flags, wrap.flag)
        wraps = wrap.name, *self.wraps
        return Geometry(avals, self.own, self.outer, self.rows, wraps, sizes, flags)


def _with_axis(aval: Any, size: int, outer: int) -> Any:
    place = min(outer, len(aval.shape))
    shape = (*aval.shape[:place], size, *aval.shape[place:])
    return jax.ShapeDtypeStruct(shape, aval.dtype)


class Flow(NamedTuple):
    """Where the ticket of a spot comes from, and where it goes.

    Attributes:
        of: For a gradient, the spot of its value, if that is in the same jaxpr.
        source: For a gradient, the input that brings the ticket of its value.
        tickets: For a tap, the outputs that take its ticket out.
    """

    of: int | None = None
    source: int | None = None
    tickets: tuple[int, ...] = ()

    def moved(self, base: int, first: int) -> "Flow":
        """The same for one of more spots, and an operand that is an input."""
        of, source, tickets = self
        if of is not None:
            return Flow(of=base + of)
        return Flow(None, None if source is None else first + source, tickets)


class Spot(NamedTuple):
    """A tap in a jaxpr: see the module's text."""

    identity: Identity
    geometry: Geometry
    flow: Flow = Flow()

    @property
    def name(self) -> str:
        """What its value is called."""
        return self.identity.label.name

    def wrapped(self, wrap: Wrap) -> "Spot":
        """The spot as seen from outside an operation that adds an axis or a flag."""
        geometry = self.geometry.wrapped(wrap, self.identity.is_gradient)
        return Spot(self.identity, geometry, self.flow)

    def seen_from(self, scopes: tuple[str, ...], mappings: int, flow: Flow) -> "Spot":
        """The spot as seen from outside an operation.

        Args:
            scopes: Those that the operation is in.
            mappings: How many mappings its name stack speaks of.
            flow: Where the ticket comes from and goes, out there.
        """
        identity, geometry = self.identity, self.geometry
        if scopes:
            identity = identity._replace(scopes=(*scopes, *identity.scopes))
        if mappings and geometry.outer:
            geometry = geometry._replace(outer=max(0, geometry.outer - mappings))
        return Spot(identity, geometry, flow)


def spot_of(primitive: Any, params: Any, values: Any, name_stack: Any) -> Spot:
    """The spot of a single tap, by its operands: variables or values."""
    label, rows = params["label"], params["rows"]
    outer = max(0, rows - mappings_in(name_stack))
    avals = tuple(getattr(value, "aval", None) or jax.typeof(value) for value in values)
    flags: tuple[str, ...] = ()
    if primitive is tap_p:
        own = avals[: label.tree.num_leaves]
        flags = ("taken",) * (len(avals) - len(own))
    else:
        own = avals = avals[:-1]  # the last one is the ticket
    is_edit = primitive is edit_p
    identity = Identity(
        label,
        params.get("order", 0),
        scopes_in(name_stack),
        None if primitive is tap_p or is_edit else params.get("leaves"),
        primitive is again_p or params.get("is_again", False),
        is_edit,
    )
    return Spot(identity, Geometry(avals, own, outer, rows, flags=flags))
