# SPDX-License-Identifier: Apache-2.0
"""Figures: what an array is like, in a few numbers on the host.

They are put together from rows: what was measured of one part of one array, whether of
its numbers or by reducers. A row knows only some things; of several rows together is
known what each of them knows. `measures` makes the rows. All is done in float64.
"""

import math
from collections.abc import Sequence
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


class Row(NamedTuple):
    """One part of one leaf, or several together; None where it was not measured."""

    total: int | None = None
    finite: int | None = None
    mean: float | None = None
    std: float | None = None
    low: float | None = None
    high: float | None = None
    abs_max: float | None = None
    norm: float | None = None
    dead: int = 0
    units: int = 0
    nan: int | None = None
    infinite: int | None = None
    unsorted: int | None = None
    counts: np.ndarray | None = None
    edges: np.ndarray | None = None


Rows = list[Row | None]  # None: nothing was seen


def figures_from(by_leaf: list[Rows], rows: int, shared: Sequence[Any]) -> Figures:
    """All rows together, and those of each part."""
    every = [row for leaf in by_leaf for row in leaf]
    parts = ()
    if rows:
        parts = tuple(
            _as_figures(_together([leaf[n] for leaf in by_leaf])) for n in range(rows)
        )
    total = _together(every)
    if total is not None and shared:
        dead, units = (sum(int(pair[n]) for pair in shared) for n in (0, 1))
        total = total._replace(dead=dead, units=units)
    return _as_figures(total, parts)


def _as_figures(row: Row | None, parts: tuple[Figures, ...] = ()) -> Figures:
    if row is None:
        return Figures(count=0, nan=0, infinite=0, parts=parts)
    if row.finite == 0:  # of nothing there is no mean
        row = Row(
            row.total, 0, nan=row.nan, infinite=row.infinite, unsorted=row.unsorted
        )
    bars = None
    if row.counts is not None and row.edges is not None:
        bars = Bars(row.counts, row.edges)
    return Figures(
        count=row.total,
        mean=row.mean,
        std=row.std,
        low=row.low,
        high=row.high,
        abs_max=row.abs_max,
        norm=row.norm,
        dead=row.dead / row.units if row.units else None,
        nan=row.nan,
        infinite=row.infinite,
        bars=bars,
        parts=parts,
        unsorted=row.unsorted,
    )


def _together(given: Sequence[Row | None]) -> Row | None:
    """Several rows as one; what one of them does not know, none knows."""
    rows = [row for row in given if row is not None]
    if len(rows) < 2:
        return rows[0] if rows else None
    found = Row(
        total=_sum([row.total for row in rows]),
        finite=_sum([row.finite for row in rows]),
        dead=sum(row.dead for row in rows),
        units=sum(row.units for row in rows),
        nan=_sum([row.nan for row in rows]),
        infinite=_sum([row.infinite for row in rows]),
        unsorted=_sum([row.unsorted for row in rows]),
    )
    rows = [row for row in rows if row.finite != 0]
    mean, std = _moments(rows)
    norms: list[Any] = [row.norm for row in rows]
    counts, edges = _bars_together(rows)
    return found._replace(
        mean=mean,
        std=std,
        low=_best(min, [row.low for row in rows]),
        high=_best(max, [row.high for row in rows]),
        abs_max=_best(max, [row.abs_max for row in rows]),
        norm=None if None in norms else math.hypot(*norms),
        counts=counts,
        edges=edges,
    )


def _sum(values: Sequence[Any]) -> Any:
    return None if None in values else sum(values)


def _best(choose: Any, values: Sequence[Any]) -> Any:
    return None if None in values or not values else choose(values)


def _moments(rows: Sequence[Row]) -> tuple[float | None, float | None]:
    means: list[Any] = [row.mean for row in rows]
    stds: list[Any] = [row.std for row in rows]
    if None in means or None in stds or not rows:
        return None, None
    counts = [row.finite or 0 for row in rows]
    shares = [count / sum(counts) for count in counts]
    mean = sum(share * each for share, each in zip(shares, means))
    # a length, so that no square overflows
    away = [math.hypot(std, each - mean) for std, each in zip(stds, means)]
    return mean, math.hypot(*(math.sqrt(s) * each for s, each in zip(shares, away)))


def _bars_together(rows: Sequence[Row]) -> tuple[Any, Any]:
    edges: list[Any] = [row.edges for row in rows]
    counts: list[Any] = [row.counts for row in rows]
    if not rows or edges[0] is None or any(each is None for each in counts):
        return None, None
    for each in edges[1:]:
        if each is not edges[0] and not np.array_equal(each, edges[0]):
            return None, None
    return np.sum(counts, axis=0), edges[0]


# Flat, by tag: for loggers.

_SCALARS = ("mean", "std", "low", "high", "abs_max", "norm", "dead", "nonfinite")


def scalars_of(figures: Figures, grad: Figures | None) -> dict[str, float]:
    """Figures of a value and its gradient by name; all are finite, or NaN."""
    found = _numbers_of(figures)
    if grad is not None:
        found |= {f"grad/{name}": value for name, value in _numbers_of(grad).items()}
        if grad.norm is not None and figures.norm is not None:
            ratio = grad.norm / figures.norm if figures.norm else math.nan
            found["grad/ratio"] = ratio if math.isfinite(ratio) else math.nan
    return found


def _numbers_of(figures: Figures) -> dict[str, float]:
    pairs = [(name, getattr(figures, name)) for name in _SCALARS]
    return {
        name: float(value) if math.isfinite(value) else math.nan
        for name, value in pairs
        if value is not None
    }


def bars_of(figures: Figures, grad: Figures | None) -> dict[str, Bars]:
    """Histograms of a value and its gradient, as far as there are any."""
    both = {"values": figures.bars, "grad/values": grad.bars if grad else None}
    return {name: bars for name, bars in both.items() if bars is not None}
