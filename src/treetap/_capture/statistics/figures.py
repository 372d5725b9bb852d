# SPDX-License-Identifier: Apache-2.0
"""Figures: what an array is like, in a few numbers on the host.

They are put together from what was measured of one part of one array (`PartFigures`),
whether of its numbers or by reducers. Of a part only some things are known; of several
parts together is known what is known of each. `measures` makes the parts, and all that
is done here is done in float64.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np


class Bars(NamedTuple):
    """A histogram.

    Attributes:
        counts: How many numbers are in each bin.
        edges: Where bins begin, and where the last one ends: one more.
    """

    counts: np.ndarray
    edges: np.ndarray


@dataclass(frozen=True, eq=False)
class Figures:
    """What an array is like, in numbers; None where it was not measured.

    Attributes:
        count: How many numbers there are, finite or not.
        mean: The mean of the finite ones, as everything that follows.
        std: The standard deviation, not corrected for the sample's size.
        low: The smallest number; only from values.
        high: The largest number; only from values.
        abs_max: The largest magnitude.
        norm: The Euclidean norm.
        dead: The share of units, along the last axis, that are 0 everywhere; None for
            scalars, integers and gradients.
        nan: How many numbers are NaN.
        infinite: How many are infinite.
        bars: The histogram.
        parts: The same for each iteration of a scan, or shard, the last axis fastest;
            they have no parts of their own, and the edges of their bars are the same.
        unsorted: How many numbers are not finite, where NaN was not told from
            infinities; at least so many, if a single bit was kept of each part.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> _, record = tt.observe(lambda x: tt.tap(x, "x"))(jnp.array([3.0, -4.0]))
        >>> found = record["x"].figures
        >>> found.mean, found.norm, found.low, found.nonfinite
        (-0.5, 5.0, -4.0, 0)
    """

    count: int | None = None
    mean: float | None = None
    std: float | None = None
    low: float | None = None
    high: float | None = None
    abs_max: float | None = None
    norm: float | None = None
    dead: float | None = None
    nan: int | None = None
    infinite: int | None = None
    bars: Bars | None = field(default=None, repr=False)
    parts: tuple["Figures", ...] = field(default=(), repr=False)
    unsorted: int | None = None

    @property
    def nonfinite(self) -> int | None:
        """How many numbers are NaN or infinite."""
        if self.nan is None or self.infinite is None:
            return self.unsorted
        return self.nan + self.infinite


UNMEASURED = Figures()


@dataclass(frozen=True, eq=False)
class PartFigures:
    """What is known of one part of one array, or of several together.

    Attributes:
        known: The figures, but for dead units.
        finite: How many numbers are finite, if it is known.
        dead: How many units are dead.
        units: Of how many.
    """

    known: Figures
    finite: int | None = None
    dead: int = 0
    units: int = 0


Parts = list[PartFigures | None]  # None: nothing was seen


def figures_from(by_leaf: list[Parts], count: int, shared: Sequence[Any]) -> Figures:
    """All parts together, and each by itself.

    Args:
        by_leaf: For each array what is known of its parts.
        count: How many parts are kept; 0 if only the whole is wanted.
        shared: For each array how many units are dead in all parts, and of how many, if
            the units of its parts are the same.
    """
    apart = [_together([parts[n] for parts in by_leaf]) for n in range(count)]
    whole = _together([part for parts in by_leaf for part in parts])
    if whole is not None and shared:
        dead, units = (sum(int(pair[n]) for pair in shared) for n in (0, 1))
        whole = replace(whole, dead=dead, units=units)
    return _as_figures(whole, tuple(map(_as_figures, apart)))


def _as_figures(part: PartFigures | None, parts: tuple[Figures, ...] = ()) -> Figures:
    if part is None:
        return Figures(count=0, nan=0, infinite=0, parts=parts)
    if part.finite == 0:  # of nothing there is no mean
        counts = {name: getattr(part.known, name) for name in _COUNTS}
        return Figures(**counts, parts=parts)
    share = part.dead / part.units if part.units else None
    return replace(part.known, dead=share, parts=parts)


def _together(given: Sequence[PartFigures | None]) -> PartFigures | None:
    """Several parts as one: what is not known of one of them, is of none."""
    parts = [part for part in given if part is not None]
    if len(parts) < 2:
        return parts[0] if parts else None
    every = [part.known for part in parts]
    held = [part for part in parts if part.finite != 0]
    some = [part.known for part in held]
    mean, std = _moments_together(held)
    counts = {name: _joined(sum, every, name) for name in _COUNTS}
    others = {name: _joined(join, some, name) for name, join in _JOINED.items()}
    finite: list[Any] = [part.finite for part in parts]
    return PartFigures(
        Figures(**counts, **others, mean=mean, std=std),
        finite=None if None in finite else sum(finite),
        dead=sum(part.dead for part in parts),
        units=sum(part.units for part in parts),
    )


def _joined(
    join: Callable[[list[Any]], Any], known: Sequence[Figures], name: str
) -> Any:
    """What is known of all parts, put together by a function; else None."""
    values = [getattr(figures, name) for figures in known]
    return None if None in values or not values else join(values)


def _moments_together(
    parts: Sequence[PartFigures],
) -> tuple[float | None, float | None]:
    means: list[Any] = [part.known.mean for part in parts]
    stds: list[Any] = [part.known.std for part in parts]
    if None in means or None in stds or not parts:
        return None, None
    counts = [part.finite or 0 for part in parts]
    shares = [count / sum(counts) for count in counts]
    mean = sum(share * each for share, each in zip(shares, means))
    # a length, so that no square overflows
    away = [math.hypot(std, each - mean) for std, each in zip(stds, means)]
    return mean, math.hypot(*(math.sqrt(s) * each for s, each in zip(shares, away)))


def _bars_together(several: list[Bars]) -> Bars | None:
    """The sums of histograms, if their edges are the same."""
    edges = several[0].edges
    for bars in several[1:]:
        if bars.edges is not edges and not np.array_equal(bars.edges, edges):
            return None
    return Bars(np.sum([bars.counts for bars in several], axis=0), edges)


# How figures of several parts are put together: counts of all parts, what follows of
# those in which anything is finite.
_COUNTS = ("count", "nan", "infinite", "unsorted")
_JOINED: dict[str, Callable[[list[Any]], Any]] = {
    "low": min,
    "high": max,
    "abs_max": max,
    "norm": lambda norms: math.hypot(*norms),
    "bars": _bars_together,
}
