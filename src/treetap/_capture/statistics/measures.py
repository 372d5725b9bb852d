# SPDX-License-Identifier: Apache-2.0
"""Measuring: the figures of arrays, computed where the arrays are.

They are computed where the array is, sharded or not, and only they are fetched: those
of a whole record at once (`figures_of_all`). They are about finite numbers; the others
are counted. Figures can also be had from what reducers know (`reduced`), as far as
these have measured. `Site.figures` and `Record.figures` are made of this.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from treetap._capture.statistics.figures import (
    UNMEASURED,
    Figures,
    Row,
    Rows,
    figures_from,
)
from treetap._capture.statistics.reduced import Reduced, is_measured
from treetap._capture.statistics.reducers import (
    AbsMax,
    AllFinite,
    DeadUnits,
    Histogram,
    Moments,
    NonFinite,
    Norm,
)
from treetap._capture.statistics.sums import How, Sums, sums_of
from treetap._core.errors import CaptureError
from treetap._core.variables.values import is_gone

BINS = 40


class Wanted(NamedTuple):
    """A tree whose figures are wanted: all its leaves together.

    Attributes:
        tree: Of arrays, or of `Reduced`.
        apart: How many first axes of arrays are iterations or shards.
        shards: Which of these axes have the same units: those of shards.
        masks: What counts of arrays; each has some of their first axes.
        has_units: Whether units can be dead; not those of a gradient.
        where: The public name and the site, for messages.
    """

    tree: Any
    apart: int = 0
    shards: tuple[int, ...] = ()
    masks: tuple[Any, ...] = ()
    has_units: bool = True
    where: str = "figures_of"


def figures_of(tree: Any, *, apart: int = 0, bins: int = BINS) -> Figures:
    """The figures of all arrays in a tree together.

    Args:
        tree: Arrays of any type; keys and what is no array are left out, and a
            `ShapeDtypeStruct` has no figures.
        apart: How many first axes to keep apart, too, as `parts`.
        bins: Of the histogram, between the smallest and the largest number.
    """
    return figures_of_all([Wanted(tree, apart)], bins=bins)[0]


def figures_of_reduced(tree: Any) -> Figures:
    """The figures that reducers have measured, from a tree of `Reduced`."""
    return figures_of_all([Wanted(tree)])[0]


def figures_of_all(wanted: Sequence[Wanted], *, bins: int = BINS) -> list[Figures]:
    """The figures of many trees, which are fetched from their devices at once."""
    pending = [_asked(one, bins) for one in wanted]
    fetched = jax.device_get([arrays for arrays, _ in pending])
    with np.errstate(over="ignore", invalid="ignore"):
        return [build(found) for (_, build), found in zip(pending, fetched)]


_Build = Callable[[Any], Figures]


def _asked(wanted: Wanted, bins: int) -> tuple[Any, _Build]:
    """Small arrays on their way, and what makes figures of them."""
    leaves = jax.tree.leaves(wanted.tree, is_leaf=_is_reduced)
    reduced = [leaf for leaf in leaves if _is_reduced(leaf)]
    if reduced:
        states = [(leaf.seen, leaf.states) for leaf in reduced]
        _refuse_traced(states, wanted.where)
        held = [[reducer for _, reducer in leaf.reducers] for leaf in reduced]
        return states, functools.partial(_of_states, held, wanted)
    leaves = [leaf for leaf in leaves if is_measured(leaf)]
    _refuse_traced(leaves, wanted.where)
    if not leaves or any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        return (), lambda _: UNMEASURED
    arrays = [
        leaf if isinstance(leaf, jax.Array) else np.asarray(leaf) for leaf in leaves
    ]
    apart, shape = wanted.apart, np.shape(arrays[0])[: wanted.apart]
    if any(np.shape(leaf)[:apart] != shape or leaf.ndim < apart for leaf in arrays):
        apart, shape = 0, ()
    shards = tuple(axis for axis in wanted.shards if axis < apart)
    how = How(apart, shards, bins, wanted.has_units)
    arrays = [leaf for leaf in arrays if leaf.size]
    found = sums_of(how, arrays, wanted.masks) if arrays else []
    return found, functools.partial(_of_sums, math.prod(shape) if apart else 0)


def _is_reduced(value: Any) -> bool:
    return isinstance(value, Reduced)


def _refuse_traced(tree: Any, where: str) -> None:
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, Tracer):
            raise CaptureError(
                f"{where}: the value is being traced, and figures are numbers on the "
                "host. Return the Record from the compiled function and ask outside."
            )
        if is_gone(leaf):
            raise CaptureError(
                f"{where}: the value was donated to another function and is gone. Ask "
                "for figures before, or do not donate it."
            )


# What was fetched.


def _of_sums(rows: int, leaves: list[Sums]) -> Figures:
    """The figures of values."""
    shared = [sums.shared for sums in leaves if sums.shared is not None]
    return figures_from([_rows_of(sums) for sums in leaves], rows, shared)


def _rows_of(sums: Sums) -> Rows:
    numbers = sums.numbers.reshape(-1, sums.numbers.shape[-1]).tolist()
    counts = sums.counts.reshape(-1, sums.counts.shape[-1]).astype(np.int64)
    units, found = int(sums.units), []
    for row, tallies in zip(numbers, counts):
        kept, nan, infinite, dead = tallies[:4].tolist()
        scale, mean, variance, squares, low, high, largest = row
        finite = kept - nan - infinite
        found.append(
            Row(
                total=kept,
                finite=finite,
                mean=mean / scale,
                std=math.sqrt(variance) / scale,
                low=low,
                high=high,
                abs_max=largest,
                norm=math.sqrt(squares) / scale,
                dead=dead if units else 0,
                units=units,
                nan=nan,
                infinite=infinite,
                counts=tallies[4:] if finite else None,
                edges=sums.edges if finite else None,
            )
            if kept
            else None
        )
    return found


# What reducers know.


def _of_states(held: list[list[Any]], wanted: Wanted, found: list[Any]) -> Figures:
    """The figures that are in the states of reducers."""
    by_leaf, shared = [], []
    apart = np.shape(found[0][0])
    for reducers, (flags, states) in zip(held, found):
        seen = np.asarray(flags)
        known: list[dict[str, Any]] = [{} for _ in range(seen.size)]
        flat = functools.partial(_flat, axes=seen.ndim)
        for reducer, state in zip(reducers, states):
            _read(reducer, jax.tree.map(flat, state), known)
            if isinstance(reducer, DeadUnits) and wanted.has_units:
                _read_dead(state, seen, wanted.shards, known, shared)
        by_leaf.append(
            [Row(**row) if is_seen else None for row, is_seen in zip(known, seen.flat)]
        )
        if seen.shape != apart:
            apart = ()
    return figures_from(by_leaf, math.prod(apart) if apart else 0, shared)


def _flat(part: Any, axes: int) -> np.ndarray:
    """A part of a state with one first axis instead of so many."""
    part = np.asarray(part)
    return part.reshape(math.prod(part.shape[:axes]), *part.shape[axes:])


def _numbers(counts: Any) -> list[int]:
    """Counts of two words each."""
    words = np.asarray(counts).astype(object)
    return (words[..., 0] * 2**32 + words[..., 1]).tolist()


def _read(reducer: Any, state: Any, known: list[dict[str, Any]]) -> None:
    """Adds what a reducer knows to each row."""
    columns: dict[str, Any] = {}
    match reducer:
        case Moments():
            finite, bad = _numbers(state.count), _numbers(state.nonfinite)
            columns = {
                "total": [a + b for a, b in zip(finite, bad)],
                "finite": finite,
                "unsorted": bad,
                "mean": state.mean.astype(np.float64).tolist(),
                "std": np.sqrt(state.variance.astype(np.float64)).tolist(),
            }
        case NonFinite():
            nan, total = _numbers(state.nan), _numbers(state.total)
            signs = zip(_numbers(state.positive), _numbers(state.negative))
            infinite = [a + b for a, b in signs]
            columns = {"total": total, "nan": nan, "infinite": infinite}
            counts = zip(total, nan, infinite)
            columns["finite"] = [a - b - c for a, b, c in counts]
        case AbsMax():
            columns = {"abs_max": state.tolist()}
        case Norm():
            largest, squares = (part.astype(np.float64) for part in state)
            columns = {"norm": (largest * np.sqrt(squares)).tolist()}
        case AllFinite():
            bad = [int(not good) for good in state.tolist()]
            if "unsorted" not in known[0]:
                columns = {"unsorted": bad}
        case Histogram():
            edges = _edges_of(reducer)
            counts = np.asarray(_numbers(state), np.int64)
            columns = {"counts": list(counts), "edges": [edges] * len(counts)}
        case _:
            return
    for name, column in columns.items():
        for row, value in zip(known, column):
            row[name] = value


@functools.lru_cache(maxsize=64)
def _edges_of(reducer: Histogram) -> np.ndarray:
    nothing = jnp.zeros((reducer.bins, 2), jnp.uint32)
    return np.asarray(reducer.finish(nothing).edges)


def _read_dead(
    alive: Any, seen: Any, shards: Any, known: list[dict[str, Any]], shared: list[Any]
) -> None:
    """Adds the dead units to each row, and those that are dead in all shards."""
    if alive.ndim == seen.ndim:  # of a scalar
        return
    units = alive.shape[-1]
    for row, mask in zip(known, alive.reshape(-1, units)):
        row["dead"], row["units"] = int(np.sum(~mask)), units
    axes = tuple(axis for axis in shards if axis < seen.ndim)
    if axes:
        dead = ~np.any(alive, axis=axes)
        shared.append((dead.sum(), dead.size))
