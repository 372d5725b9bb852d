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
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

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
from treetap._transforms.lift.lift import Updates, Written
from treetap._transforms.lift.program import Key, Program

SMALL = 4096  # bytes

# For each leaf where it is packed, as the number of the buffer and the place in it.
Homes = Sequence[tuple[int, int] | None]


class Unpackable(Exception):
    """More than values was changed: the usual way can do that."""


def packed_program(
    cached: CachedCall, groups: Sequence[Group], homes: Homes
) -> Program:
    """The program of a cached call, for buffers of some groups.

    It has leaves of its own: those of the arguments that are not packed, under their
    numbers, and the buffers, numbered after all those. A buffer with a donated value in
    it is donated, and always comes out anew. (No buffer is an array that stands
    anywhere else, so none of them is ever found to be donated twice.)

    Args:
        cached: The cached call.
        groups: The groups of all packs.
        homes: For each leaf of the arguments, where it is packed, or None.
    """
    program, count = cached.program, len(homes)
    flags = program.key.donated
    alone = [n for n, home in enumerate(homes) if home is None]
    given = {home[0] for n, home in enumerate(homes) if home and flags[n]}

    def traced(key: Key, values: Sequence[Any]) -> Any:
        rest, buffers = iter(values[: len(alone)]), values[len(alone) :]
        held = [group.split(buffer) for group, buffer in zip(groups, buffers)]
        leaves = [
            next(rest) if home is None else held[home[0]][home[1]] for home in homes
        ]
        out, updates = program.traced(program.key, leaves)
        written = updates.written
        if not written.has_values_only or len(written.groups) != 1:
            raise Unpackable
        news: dict[int, dict[int, Any]] = {number: {} for number in sorted(given)}
        changed: dict[int, Any] = {}
        for (n, _), value in zip(written.groups[0], updates.values[0]):
            home = homes[n]
            if home is not None and _is_alike(value, leaves[n]):
                news.setdefault(home[0], {})[home[1]] = value
            else:
                changed[n] = value
        made = {
            count + number: _renewed(groups[number], buffers[number], new)
            for number, new in news.items()
        }
        made |= changed
        note = Written((tuple((n, None) for n in made),), has_flat_parts=False)
        return out, Updates((list(made.values()),), note)

    traced.__name__ = program.traced.__name__
    donated = *flags, *(number in given for number in range(len(groups)))
    key = replace(program.key, donated=donated)
    own = [*range(count, len(donated)), *(n for n in alone if n in cached.own)]
    others = [n for n in alone if n not in cached.own]
    return Program(key, own, others, traced, program.options)


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


@dataclass(eq=False)
class PackedCall:
    """Calls with objects that were verified, their small Variables packed.

    Attributes:
        program: The program.
        packs: The packs, and the members of each.
        owners: All Variables, by the number of the leaf.
        homes: For each leaf of the arguments, where it is packed, or None.
    """

    program: Program
    packs: list[tuple[Pack, tuple[Variable[Any], ...]]]
    owners: dict[int, Variable[Any]]
    homes: Homes

    def __post_init__(self) -> None:
        packs, owners, homes = self.packs, self.owners, self.homes
        # In the same order everywhere, so that nobody waits for one another.
        self._locks = sorted((pack.lock for pack, _ in packs), key=id)
        self._rest = [owners[n] for n in owners if homes[n] is None]
        # By number, as the program counts them: the pack, and the buffer in it.
        sizes = [len(pack.layout) for pack, _ in packs]
        pairs = [(n, at) for n, size in enumerate(sizes) for at in range(size)]
        self._buffers = dict(enumerate(pairs, len(homes)))
        self._written: dict[int, Any] = {}

    def _written_by(self, number: int) -> tuple[list[tuple[int, int]], list[Any]]:
        """What comes out with a note: buffers, and then values of Variables."""
        if number not in self._written:
            (group,) = self.program.written[number].groups
            buffers = [self._buffers[n] for n, _ in group if n in self._buffers]
            alone = [self.owners[n] for n, _ in group if n in self.owners]
            self._written[number] = buffers, alone
        return self._written[number]

    def __call__(self, plain: list[Any]) -> Any:
        """The result; `NOT_APPLICABLE` if something is there that packs cannot hold."""
        if current_trace() is not EAGER:
            return NOT_APPLICABLE
        program = self.program
        buffers: list[tuple[Any, ...]] = []
        for pack, members in self.packs:
            held = pack.buffers(members)
            if held is None:
                return NOT_APPLICABLE
            buffers.append(held)
        values = [*chain.from_iterable(buffers)]
        values += [variable._box[0] for variable in self._rest]
        before = [pack.contents for pack, _ in self.packs]
        try:
            (made,), out, note = program.run(*program.parted(values, plain))
        except Unpackable:
            return NOT_APPLICABLE
        places, alone = self._written_by(len(note))
        changed: dict[int, list[Any]] = {}
        for (number, place), buffer in zip(places, made):
            changed.setdefault(number, list(buffers[number]))[place] = buffer
        targets = [*alone, *[self.packs[number][0].cell for number in changed]]
        news = made[len(places) :]
        news += [PackContents(tuple(each)) for each in changed.values()]
        with contextlib.ExitStack() as stack:
            for lock in self._locks:
                stack.enter_context(lock)
            write_boxes(targets, zip(news))
            for (pack, members), contents in zip(self.packs, before):
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
    if verified.trace is not EAGER or cached.program.key.groups is not None:
        return None
    owners = dict(zip(cached.own, verified.variables))
    packs: list[tuple[Pack, tuple[Variable[Any], ...]]] = []
    groups: list[Group] = []
    homes: dict[int, tuple[int, int]] = {}
    for root in roots:
        members, layout = layout_of(list(variables_below(root)), limit)
        if not members:
            continue
        places = {
            id(members[place]): (number, at)
            for number, group in enumerate(layout, len(groups))
            for at, place in enumerate(group.members)
        }
        groups += layout
        homes.update({n: places[id(v)] for n, v in owners.items() if id(v) in places})
        pack = pack_of(members[0])
        if pack is None or not pack.is_of(members) or pack.layout != layout:
            pack = Pack(members, layout, limit)
        packs.append((pack, members))
    if not packs:
        return None
    count = len(cached.program.key.donated)
    all_homes = tuple(homes.get(number) for number in range(count))
    make = functools.partial(packed_program, cached, groups, all_homes)
    program = cached.packed_programs.made((*groups, all_homes), make)
    return PackedCall(program, packs, owners, all_homes)


def maker_for(pack: Any, name: str) -> Callable[..., PackedCall | None] | None:
    """What makes packed calls, for the option of `jit`; None if none are wanted."""
    if not isinstance(pack, bool | int) or pack < 0:
        raise TypeError(
            f"{name}: `pack` is True, False or a number of bytes, got {pack!r}."
        )
    limit = SMALL if pack is True else int(pack)
    return functools.partial(packed_call, limit=limit) if limit else None
