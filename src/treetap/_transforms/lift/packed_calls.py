# SPDX-License-Identifier: Apache-2.0
"""Packed calls: calls of a compiled function in which small Variables travel together.

**The idea.** Each buffer that goes into a program or comes out of it takes time, and a
model may have hundreds of small ones. So the small Variables of an object share one
buffer for each dtype: a `Pack`. The program takes the buffers of packs, cuts the values
out, runs the function, and puts what it changed into new buffers. What is large, or is
no plain array, travels by itself as ever.

**The invariant.** A program for packs gives the results of the program it is made from,
for it traces the same function; only the way of the values is another. A `PackedCall`
is one way to call that, for Variables that are in packs; it stands with the verified
arguments of a cached call, so that it is used for those objects only.

**Why it is sound.** Whether the buffers hold what the Variables hold is looked at in
each call (`Pack.buffers`); if they cannot, the call is `NOT_APPLICABLE` and made the
usual way. All that a program changed, buffers and other values, is written in one step,
under the locks of the packs. A function that changes more than values raises
`Unpackable` while it is traced, before anything has run.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from treetap._core.trace_level import EAGER, current_trace
from treetap._core.trees.pytree import variables_below
from treetap._core.variables.packed_values import Group, Pack, PackContents, layout_of
from treetap._core.variables.variable import Variable, pack_of, write_boxes
from treetap._transforms.lift.call_cache import (
    NOT_APPLICABLE,
    CachedCall,
    VerifiedArguments,
)
from treetap._transforms.lift.lift import Updates
from treetap._transforms.lift.program import refuse_donated_twice

SMALL = 4096  # bytes

Layout = tuple[Group, ...]
Home = tuple[int, int, int]  # number of the pack, of the group, place in it


class Unpackable(Exception):
    """More than values was changed: the usual way can do that."""


class Note(NamedTuple):
    """What a program returned.

    Attributes:
        groups: New buffers: the pack, and the group in it.
        alone: Leaves, by number, whose new values come by themselves.
    """

    groups: tuple[tuple[int, int], ...]
    alone: tuple[int, ...]


class PackedProgram:
    """The program of a cached call, for packs of some layouts.

    Args:
        cached: The cached call.
        layouts: The layouts of the packs.
        homes: For each leaf of the arguments, where it is packed, or None.
    """

    def __init__(
        self, cached: CachedCall, layouts: Sequence[Layout], homes: Sequence[Any]
    ):
        program = cached.program
        flags = program.key.donated
        self._definition = program.key.definition
        self._layouts, self._homes = layouts, homes
        self.notes: list[Note] = []
        # What is not packed: Variables first.
        own = cached.numbers
        alone = [n for n, home in enumerate(homes) if home is None]
        self.rest = sorted(alone, key=lambda n: n not in own)
        given = {home[0] for n, home in enumerate(homes) if home and flags[n]}
        self.donated = [number in given for number in range(len(layouts))]
        self._donates = any(flags)
        self._given = [flags[n] for n in self.rest]
        self._numbers = sorted(self.rest, key=lambda n: not flags[n])
        back = {n: i for i, n in enumerate(self._numbers)}

        def run(donated: Any, kept: Any) -> Any:
            buffers = {**donated[0], **kept[0]}
            rest = [*donated[1], *kept[1]]
            held = [
                [group.split(buffer) for group, buffer in zip(layout, buffers[number])]
                for number, layout in enumerate(layouts)
            ]
            values = [
                rest[back[n]] if home is None else held[home[0]][home[1]][home[2]]
                for n, home in enumerate(homes)
            ]
            out, updates = program.traced(program.key, values)
            return self._results(out, updates, buffers, held)

        run.__name__ = run.__qualname__ = program.traced.__name__
        self.run = jax.jit(run, donate_argnums=0, **program.options)

    def _results(self, out: Any, updates: Updates, buffers: Any, held: Any) -> Any:
        written = updates.written
        if not written.has_values_only or len(written.groups) != 1:
            raise Unpackable
        news: dict[tuple[int, int], dict[int, Any]] = {
            (number, place): {}
            for number, layout in enumerate(self._layouts)
            for place in range(len(layout) if self.donated[number] else 0)
        }
        alone: dict[int, Any] = {}
        for (number, _), value in zip(written.groups[0], updates.values[0]):
            home = self._homes[number]
            if home is not None and _is_alike(value, held[home[0]][home[1]][home[2]]):
                news.setdefault(home[:2], {})[home[2]] = value
            else:
                alone[number] = value
        made = [
            _renewed(self._layouts[n][g], buffers[n][g], changed)
            for (n, g), changed in news.items()
        ]
        note = Note(tuple(news), tuple(alone))
        if note not in self.notes:
            self.notes.append(note)
        return made, list(alone.values()), out, ((),) * self.notes.index(note)

    def parted(self, buffers: list[Any], values: list[Any]) -> tuple[Any, Any]:
        """The arguments of the program: what is donated, and the rest."""
        pairs = list(enumerate(buffers))
        if not self._donates:
            return ({}, []), (dict(pairs), values)
        first = [*compress(values, self._given)]
        second = [x for x, flag in zip(values, self._given) if not flag]
        refuse_donated_twice(self._definition, self._numbers, first, second)
        given = {n: x for n, x in pairs if self.donated[n]}
        kept = {n: x for n, x in pairs if not self.donated[n]}
        return (given, first), (kept, second)


def _is_alike(value: Any, before: Any) -> bool:
    """Whether a new value can be where the old one was."""
    return (
        isinstance(value, jax.Array)
        and value.shape == before.shape
        and value.dtype == before.dtype
        and jax.typeof(value).weak_type == jax.typeof(before).weak_type
    )


def _renewed(group: Group, buffer: Any, new: dict[int, Any]) -> Any:
    """A buffer with some of its values changed."""
    parts, done = [], 0
    for place in sorted(new):  # what is between is taken over in one piece
        start, stop = group.offsets[place : place + 2]
        parts += [buffer[done:start], new[place].ravel()]
        done = stop
    buffer = jnp.concatenate([*parts, buffer[done:]])
    if isinstance(group.sharding, NamedSharding):
        buffer = jax.lax.with_sharding_constraint(buffer, group.buffer_sharding())
    return buffer


class PackedCall:
    """Calls with objects that were verified, their small Variables packed.

    Args:
        program: The program.
        packs: The packs, and the members of each.
        owners: All Variables, by the number of the leaf.
    """

    def __init__(
        self,
        program: PackedProgram,
        packs: list[tuple[Pack, tuple[Variable[Any], ...]]],
        owners: dict[int, Variable[Any]],
    ):
        self._program = program
        self._packs = packs
        self._owners = owners
        # In the same order everywhere, so that nobody waits for one another.
        self._locks = sorted((pack.lock for pack, _ in packs), key=id)
        self._rest = [owners[n] for n in program.rest if n in owners]

    def __call__(self, plain: Sequence[Any]) -> Any:
        """The result; `NOT_APPLICABLE` if something is there that packs cannot hold."""
        if current_trace() is not EAGER:
            return NOT_APPLICABLE
        program = self._program
        buffers: list[tuple[Any, ...]] = []
        for pack, members in self._packs:
            held = pack.buffers(members)
            if held is None:
                return NOT_APPLICABLE
            buffers.append(held)
        values = [variable._box[0] for variable in self._rest]
        values += plain
        before = [pack.contents for pack, _ in self._packs]
        try:
            made, alone, out, note = program.run(*program.parted(buffers, values))
        except Unpackable:
            return NOT_APPLICABLE
        groups, numbers = program.notes[len(note)]
        changed: dict[int, list[Any]] = {}
        for (number, place), buffer in zip(groups, made):
            changed.setdefault(number, list(buffers[number]))[place] = buffer
        targets = [self._owners[n] for n in numbers]
        targets += [self._packs[number][0].cell for number in changed]
        news = [*alone, *[PackContents(tuple(each)) for each in changed.values()]]
        with contextlib.ExitStack() as stack:
            for lock in self._locks:
                stack.enter_context(lock)
            write_boxes(targets, zip(news))
            for (pack, members), contents in zip(self._packs, before):
                pack.settle(members, contents)
        return out


def packed_call(
    cached: CachedCall, verified: VerifiedArguments, roots: Sequence[Any], limit: int
) -> PackedCall | None:
    """A way to call with packs; None if there is nothing to pack.

    Args:
        cached: The cached call.
        verified: The arguments.
        roots: The outermost objects in them; each gets a pack of its own.
        limit: What is small, in bytes.
    """
    if verified.trace is not EAGER:
        return None
    owners = cached.by_number(verified.variables)
    packs: list[tuple[Pack, tuple[Variable[Any], ...]]] = []
    homes: dict[int, Home] = {}
    for root in roots:
        members, layout = layout_of(list(variables_below(root)), limit)
        if not members:
            continue
        places = {
            id(members[place]): (len(packs), number, at)
            for number, group in enumerate(layout)
            for at, place in enumerate(group.members)
        }
        homes.update({n: places[id(v)] for n, v in owners.items() if id(v) in places})
        pack = pack_of(members[0])
        if pack is None or not pack.is_of(members) or pack.layout != layout:
            pack = Pack(members, layout, limit)
        packs.append((pack, members))
    if not packs:
        return None
    layouts = tuple(pack.layout for pack, _ in packs)
    count = len(cached.program.key.donated)
    leaf_homes = tuple(homes.get(number) for number in range(count))
    make = functools.partial(PackedProgram, cached, layouts, leaf_homes)
    program = cached.packed_programs.made((layouts, leaf_homes), make)
    return PackedCall(program, packs, owners)


def maker_for(pack: Any, name: str) -> Callable[..., PackedCall | None] | None:
    """What makes packed calls, for the option of `jit`; None if none are wanted."""
    if not isinstance(pack, bool | int) or pack < 0:
        raise TypeError(
            f"{name}: `pack` is True, False or a number of bytes, got {pack!r}."
        )
    limit = SMALL if pack is True else int(pack)
    return functools.partial(packed_call, limit=limit) if limit else None
