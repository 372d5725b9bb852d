# SPDX-License-Identifier: Apache-2.0
"""Packs: the values of many small Variables in a few flat buffers.

**The idea.** JAX takes some time for each buffer that goes into a program or comes out
of one, however small. So the small Variables of an object may travel together, in one
buffer for each dtype and place. A Variable that is packed (a *member*) has no box of
its own, the slot `_box` is empty. Whoever reads it comes to `Variable.__getattr__`, and
so to its pack, which cuts the value out and gives the member a box. A write gives it a
box, too: it knows nothing of packs.

**The invariant.** The buffers hold what a member holds, as long as the member has no
box, or has the box that the pack gave it (`PackContents.boxes`). Any other box was
written.

**Why it is sound.** It is looked at before each use, not believed. `Pack.buffers`
counts the references that members hold, in C: one more for each that has a box. If the
count is as it was without boxes, no member was read or written. Otherwise the members'
boxes are compared with those that were given; what was written goes into new buffers,
and the boxes are taken away (`_take_in`). The count is taken again at the end: a box
that another thread gave in the meantime makes the call go the usual way. A value that
no longer fits its place (another shape, dtype or device) does that, too.

New buffers come as a new `PackContents`, in one write, as a Variable gets a new box: a
reader sees the old contents or the new, never half of each. A member that was read
while a program ran has a box with the value from before; `settle` takes that away.
"""

import functools
import gc
import itertools
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from treetap._core.variables.metadata import PLAIN
from treetap._core.variables.values import is_buffer, is_key
from treetap._core.variables.variable import (
    Variable,
    del_box,
    make,
    own_box,
    pack_of,
    set_box,
    set_pack,
)

FEW = 8  # values that are cut out one by one, before all are at once


class Group(NamedTuple):
    """Values that share a buffer.

    Attributes:
        dtype: Their dtype.
        is_weak: Whether their type is weak.
        sharding: Where they are; None for JAX's choice.
        members: Which ones, as places among the members of the pack.
        shapes: Their shapes.
        offsets: Where each begins, and where the last one ends.
    """

    dtype: Any
    is_weak: bool
    sharding: Any
    members: range
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]

    def buffer_sharding(self) -> Any:
        """Where the buffer is."""
        if isinstance(self.sharding, NamedSharding):
            return NamedSharding(self.sharding.mesh, PartitionSpec())
        return self.sharding

    def split(self, buffer: Any) -> list[Any]:
        """The values in a buffer."""
        bounds = zip(self.offsets, self.offsets[1:], self.shapes)
        return [
            jax.lax.slice(buffer, (start,), (stop,)).reshape(shape)
            for start, stop, shape in bounds
        ]

    def fits(self, value: Any, at: int) -> bool:
        """Whether a value can be in the buffer, at this place."""
        kind = self.dtype, self.is_weak, self.sharding
        return _kind(value) == kind and value.shape == self.shapes[at]


def _kind(value: Any) -> Any:
    """Type and place of a value that may be packed; None for one that may not."""
    if not is_buffer(value) or is_key(value):
        return None
    sharding = value.sharding
    if isinstance(sharding, SingleDeviceSharding):
        return value.dtype, value.weak_type, sharding if value.committed else None
    is_replicated = isinstance(sharding, NamedSharding) and sharding.is_fully_replicated
    if not is_replicated or sharding.mesh.explicit_axes:
        return None
    return value.dtype, value.weak_type, sharding


def layout_of(
    variables: Sequence[Variable[Any]], limit: int
) -> tuple[tuple[Variable[Any], ...], tuple[Group, ...]]:
    """Those Variables that may be packed, in order, and how."""
    found: dict[Any, list[Variable[Any]]] = {}
    for variable in variables:
        kind = _kind(variable._box[0])
        if kind is not None and variable._box[0].nbytes <= limit:
            found.setdefault(kind, []).append(variable)
    members: list[Variable[Any]] = []
    groups: list[Group] = []
    for (dtype, is_weak, sharding), own in found.items():
        if len(own) == 1:
            continue  # a buffer of its own, as it is
        places = range(len(members), len(members) + len(own))
        members += own
        shapes = tuple(variable._box[0].shape for variable in own)
        sizes = [math.prod(shape) for shape in shapes]
        offsets = tuple(itertools.accumulate(sizes, initial=0))
        groups.append(Group(dtype, is_weak, sharding, places, shapes, offsets))
    return tuple(members), tuple(groups)


@dataclass(slots=True, eq=False)
class PackContents:
    """What a pack holds at one time.

    Attributes:
        buffers: One for each group.
        boxes: Those that were given to members which were read, by number.
        values: All values, once they were cut out together.
    """

    buffers: tuple[Any, ...]
    boxes: dict[int, tuple[Any]] = field(default_factory=dict)
    values: list[Any] | None = None


class Pack:
    """The buffers that hold the values of small Variables of one object.

    It does not hold on to the Variables; they hold on to it.

    Args:
        members: The Variables, in the order of the layout's groups.
        layout: How to pack them.
        limit: What was small, in bytes.
    """

    def __init__(
        self, members: Sequence[Variable[Any]], layout: tuple[Group, ...], limit: int
    ):
        self.layout = layout
        self.limit = limit
        self._is_broken = True  # until all is in place: an interrupt may come before
        self.lock = threading.RLock()
        self._places = {id(member): place for place, member in enumerate(members)}
        values = [member._box[0] for member in members]
        buffers = [_joined(own, [values[at] for at in own.members]) for own in layout]
        # A cell like a Variable, so that one call writes those and packs alike.
        self.cell = make(Variable, PackContents(tuple(buffers)), PLAIN)
        for member in members:
            before = pack_of(member)
            if before is not None:
                before._is_broken = True  # it has only some of its members left
            set_pack(member, self)
            del_box(member)
        self._count = _count(members)
        self._is_broken = False

    @property
    def contents(self) -> PackContents:
        """What it holds now."""
        return self.cell._box[0]

    def is_of(self, members: Sequence[Variable[Any]]) -> bool:
        """Whether these are its members, in this order, and all still are."""
        are_same = not self._is_broken and [*self._places] == [*map(id, members)]
        return are_same and all(pack_of(member) is self for member in members)

    def buffers(self, members: Sequence[Variable[Any]]) -> tuple[Any, ...] | None:
        """The buffers, holding what the members hold; None if they cannot.

        A member that has a box was read or written.
        """
        if self._is_broken:
            return None
        if _count(members) != self._count and not self._take_in(members):
            return None
        return self.contents.buffers

    def _take_in(self, members: Sequence[Variable[Any]]) -> bool:
        """Takes the boxes of members away, and what was written into the buffers."""
        with self.lock:
            contents = self.contents
            held = enumerate(map(own_box, members))
            boxes = {place: box for place, box in held if box is not None}
            given = contents.boxes.get
            changed = {n: box[0] for n, box in boxes.items() if given(n) is not box}
            buffers: list[Any] = []
            for group, buffer in zip(self.layout, contents.buffers):
                places = enumerate(group.members)
                new = {at: changed[place] for at, place in places if place in changed}
                if not all(group.fits(value, at) for at, value in new.items()):
                    return False
                buffers.append(_with(group, buffer, new) if new else buffer)
            if changed:
                set_box(self.cell, (PackContents(tuple(buffers)),))
            else:
                contents.boxes = {}
            _take_away(boxes, members)
            return _count(members) == self._count

    def read(self, member: Variable[Any]) -> tuple[Any]:
        """Gives a member its box."""
        with self.lock:
            box = own_box(member)
            if box is None:
                contents, place = self.contents, self._places[id(member)]
                box = contents.boxes[place] = (self._value(contents, place),)
                set_box(member, box)
            return box

    def _value(self, contents: PackContents, place: int) -> Any:
        if contents.values is not None:
            return contents.values[place]
        pairs = list(zip(self.layout, contents.buffers))
        with jax.ensure_compile_time_eval():
            if len(contents.boxes) < FEW:
                group, buffer = next(x for x in pairs if place in x[0].members)
                at = group.members.index(place)
                take = _taker(group.shapes[at], group.sharding)
                return take(buffer, group.offsets[at])
            values = [x for group, buffer in pairs for x in _splitter(group)(buffer)]
        contents.values = values
        return values[place]

    def settle(self, members: Sequence[Variable[Any]], before: PackContents) -> None:
        """Takes away boxes with values from before, given while a program ran."""
        _take_away(before.boxes, members)


def _take_away(boxes: dict[int, Any], members: Sequence[Variable[Any]]) -> None:
    """Takes boxes from the members that still have them."""
    for place, box in boxes.items():
        if own_box(members[place]) is box:
            del_box(members[place])


def _count(members: Sequence[Variable[Any]]) -> int:
    """How much the members refer to: one more for each that has a box; quick, in C."""
    return len(gc.get_referents(*members))


def _joined(group: Group, values: list[Any]) -> Any:
    return jax.jit(_join, out_shardings=group.buffer_sharding())(values)


def _join(values: list[Any]) -> Any:
    return jnp.concatenate([value.ravel() for value in values])


def _with(group: Group, buffer: Any, new: dict[int, Any]) -> Any:
    """A buffer with some of its values changed."""
    if len(new) < FEW and not group.is_weak:  # it would be no longer
        for at, value in new.items():
            buffer = _put(buffer, value, group.offsets[at])
        return buffer
    values = dict(enumerate(_splitter(group)(buffer))) | new
    return _joined(group, list(values.values()))


@jax.jit
def _put(buffer: Any, value: Any, start: Any) -> Any:
    return jax.lax.dynamic_update_slice(buffer, value.ravel(), (start,))


@functools.lru_cache(maxsize=1024)
def _taker(shape: tuple[int, ...], sharding: Any) -> Any:
    size = math.prod(shape)

    def take(buffer: Any, start: Any) -> Any:
        return jax.lax.dynamic_slice(buffer, (start,), (size,)).reshape(shape)

    return jax.jit(take, out_shardings=sharding)


@functools.lru_cache(maxsize=128)
def _splitter(group: Group) -> Any:
    return jax.jit(group.split, out_shardings=group.sharding)
