# SPDX-License-Identifier: Apache-2.0
"""Figures: what an array is like, in a few numbers on the host.

They are put together from what was measured of one part of one array (`Part`),
whether of its numbers or by reducers. Of a part only some things are known; of several
parts together is known what is known of each. `measures` makes the parts, and all that
is done here is done in float64.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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


# What is known of one part of one array, or of several together: figures by name, and
# how many numbers are `finite`, how many units are `dead`, of how many `units`.
Part = dict[str, Any]
Parts = list[Part | None]  # None: nothing was seen


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
        whole = {**whole, "dead": dead, "units": units}
    return _as_figures(whole, tuple(map(_as_figures, apart)))


def _as_figures(part: Part | None, parts: tuple[Figures, ...] = ()) -> Figures:
    if part is None:
        return Figures(count=0, nan=0, infinite=0, parts=parts)
    known = dict(part)
    finite, dead, units = (known.pop(name, None) for name in _ASIDE)
    if finite is not None and "nan" not in known:
        known["unsorted"] = known["count"] - finite
    if finite == 0:  # of nothing there is no mean
        known = {name: known[name] for name in _COUNTS if name in known}
    elif units:
        known["dead"] = dead / units
    return Figures(**known, parts=parts)


def _together(given: Sequence[Part | None]) -> Part | None:
    """Several parts as one: what is not known of one of them, is of none."""
    parts = [part for part in given if part is not None]
    if len(parts) < 2:
        return parts[0] if parts else None
    held = [part for part in parts if part.get("finite") != 0]
    found: Part = {}
    for name, join in _JOINED.items():
        of = parts if join is sum else held
        if of and all(name in part for part in of):
            found[name] = join([part[name] for part in of])
    if held and all("mean" in part for part in held):
        found |= _moments_together(held)
    return found


def _moments_together(parts: Sequence[Part]) -> Part:
    means, counts = ([part[name] for part in parts] for name in ("mean", "finite"))
    shares = [count / sum(counts) for count in counts]
    mean = sum(share * each for share, each in zip(shares, means))
    # a length, so that no square overflows
    away = [math.hypot(part["std"], part["mean"] - mean) for part in parts]
    std = math.hypot(*(math.sqrt(s) * each for s, each in zip(shares, away)))
    return {"mean": mean, "std": std}


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
_ASIDE = ("finite", "dead", "units")
_JOINED: dict[str, Callable[[list[Any]], Any]] = {
    **dict.fromkeys(_COUNTS + _ASIDE, sum),
    "low": min,
    "high": max,
    "abs_max": max,
    "norm": lambda norms: math.hypot(*norms),
    "bars": _bars_together,
}
