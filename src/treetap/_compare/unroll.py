# SPDX-License-Identifier: Apache-2.0
"""Loops: pairs of arrays in the order in which their numbers were computed.

A value in a loop over layers has an axis of iterations. It is taken apart into one pair
for each, and the pairs of a loop's body stand iteration by iteration: otherwise what a
wrong layer did to the layers after it would stand before it. Gradients come after all
values, from the end to the start.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from treetap._capture.walk.operations import SCAN, WHILE
from treetap._compare.sources import Entry

MOST = 4096  # iterations that become pairs of their own: of layers, not of tokens


class Pair(NamedTuple):
    """An array of one side, and the same of the other, in the layout of the first.

    Attributes:
        a: Of the first side.
        b: Of the second; None when there is a reason.
        reason: Why they cannot be measured; empty when they can.
        floor: The array of a third run, or None.
    """

    a: Entry
    b: Entry
    reason: str = ""
    floor: Entry | None = None

    @property
    def key(self) -> tuple[str, str]:
        """A name for the pair: the name in the first side, and the part."""
        return self.a.text, self.a.part


def in_order(pairs: Sequence[Pair]) -> list[Pair]:
    """Pairs as they were computed."""
    forward = [pair for pair in pairs if pair.a.part != "grad"]
    backward = [pair for pair in pairs if pair.a.part == "grad"]
    return [*_unrolled(forward, 0, MOST), *reversed(_unrolled(backward, 0, MOST))]


def _unrolled(pairs: Sequence[Pair], level: int, most: int) -> list[Pair]:
    """Pairs of single iterations, of which there are so many at most."""
    found: list[Pair] = []
    for length, run in itertools.groupby(pairs, key=lambda pair: _length(pair, level)):
        group = list(run)
        if length is None or length > most:
            found += group
            continue
        for number in range(length):
            body = [_iteration(pair, level, number) for pair in group]
            found += _unrolled(body, level + 1, most // length)
    return found


def _axis(pair: Pair, level: int) -> int | None:
    """The axis of a pair that the loop at a level has now; those before are gone."""
    site, axes = pair.a.site, pair.a.axes
    # A `while` may have kept one iteration, or many: what is inside it stays together.
    around = itertools.takewhile(lambda name: name != WHILE.name, site.wraps)
    count = sum(name == SCAN.name for name in around)
    scans = [n for n, axis in enumerate(axes) if axis.kind == SCAN.name][:count]
    return scans[level] - level if level < len(scans) else None


def _length(pair: Pair, level: int) -> int | None:
    axis, shape = _axis(pair, level), pair.a.shape
    if axis is None or pair.reason or len(pair.a.layers) < level or axis >= len(shape):
        return None
    return shape[axis] or None


def _iteration(pair: Pair, level: int, number: int) -> Pair:
    axis = _axis(pair, level) or 0
    floor = pair.floor and _taken(pair.floor, axis, number)
    a, b = _taken(pair.a, axis, number), _taken(pair.b, axis, number)
    return Pair(a, b, "", floor)


def _taken(entry: Entry, axis: int, number: int) -> Entry:
    if axis == 0 and number < len(entry.pieces):  # it is there by itself
        return replace(entry.pieces[number], layers=entry.layers)
    shape = (*entry.shape[:axis], *entry.shape[axis + 1 :])
    return replace(
        entry,
        shape=shape,
        read=lambda: entry.read()[(slice(None),) * axis + (number,)],
        layers=(*entry.layers, number),
        own_shape=shape if entry.own_shape == entry.shape else entry.own_shape,
        pieces=(),
    )
