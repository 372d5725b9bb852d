# SPDX-License-Identifier: Apache-2.0
"""Measuring: the figures of arrays, and of what reducers know of arrays.

Arrays are measured where they are, sharded or not, in one pass that leaves the states
that reducers have, too: a few small arrays (`Measured`). Large arrays go through a
compiled function, one for each shape and type; small ones on the host go through the
same code with NumPy, since compiling would take longer. States are fetched, those of a
whole record at once (`figures_of_all`), read as columns (what is known of each part of
an array), and put together by part (see `figures`).
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType

from treetap._capture.statistics.arithmetic import (
    Array,
    Numbers,
    as_integers,
    bars,
    numbers_of,
    xp_of,
)
from treetap._capture.statistics.figures import (
    UNMEASURED,
    Bars,
    Figures,
    Parts,
    figures_from,
)
from treetap._capture.statistics.reduced import (
    Reduced,
    is_measured,
    is_reduced,
    mapped,
)
from treetap._capture.statistics.reducers import (
    AbsMax,
    DeadUnits,
    Moments,
    NonFinite,
    Norm,
    StandardReducer,
    as_reducers,
)
from treetap._core.errors import CaptureError
from treetap._core.variables.values import is_gone

BINS = 40
Leaves = list[tuple[Array, list[Array]]]  # each with its masks
SMALL = 2**16  # up to so many numbers on the host are not worth a compilation


class Wanted(NamedTuple):
    """A tree whose figures are wanted: all its leaves together.

    Attributes:
        tree: Of arrays, or of `Reduced`.
        apart: How many first axes of arrays are iterations or shards.
        shards: Which of these axes have the same units: those of shards.
        masks: For each leaf, if given, what counts of it: of some of its first axes.
        has_units: Whether units can be dead; not those of a gradient.
        where: The public name and the site, for messages.
    """

    tree: Any
    apart: int = 0
    shards: tuple[int, ...] = ()
    masks: Sequence[Sequence[Array]] = ()
    has_units: bool = True
    where: str = "figures_of"


def figures_of(tree: Any, *, apart: int = 0, bins: int = BINS) -> Figures:
    """The figures of all arrays in a tree together.

    Args:
        tree: Arrays of any type; keys and what is no array are left out, and a
            `ShapeDtypeStruct` has no figures. Or `Reduced`, for what they know.
        apart: How many first axes to keep apart, too, as `parts`.
        bins: Of the histogram, between the smallest and the largest number.
    """
    return figures_of_all([Wanted(tree, apart)], bins=bins)[0]


def figures_of_all(wanted: Sequence[Wanted], *, bins: int = BINS) -> list[Figures]:
    """The figures of many trees, which are fetched from their devices at once."""
    pending = [_asked(one, bins) for one in wanted]
    fetched = jax.device_get([arrays for arrays, _ in pending])
    with np.errstate(over="ignore", invalid="ignore"):
        return [read(found) for (_, read), found in zip(pending, fetched)]


def _asked(wanted: Wanted, bins: int) -> tuple[Any, Callable[[Any], Figures]]:
    """Small arrays on their way, and what makes figures of them."""
    leaves = jax.tree.leaves(wanted.tree, is_leaf=is_reduced)
    masks = wanted.masks or [()] * len(leaves)
    pairs = [(leaf, own) for leaf, own in zip(leaves, masks) if is_measured(leaf)]
    found = [Measured(leaf) for leaf in leaves if is_reduced(leaf)]
    _refuse_traced(found or pairs, wanted.where)
    is_type = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf, _ in pairs)
    if not found and (is_type or not pairs):
        return (), lambda _: UNMEASURED
    shapes = {np.shape(one.reduced.seen) for one in found}
    shapes = shapes or {np.shape(leaf)[: wanted.apart] for leaf, _ in pairs}
    shape = shapes.pop() if len(shapes) == 1 else ()
    if not found:
        apart = len(shape) if len(shape) == wanted.apart else 0
        how, shape = How(apart, wanted.shards, bins, wanted.has_units), shape[:apart]
        found = measured_arrays(how, pairs)
    return found, functools.partial(_read, wanted, math.prod(shape) if shape else 0)


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


# Arrays are measured.


class How(NamedTuple):
    """How to measure arrays.

    Attributes:
        apart: How many first axes are kept apart.
        shards: Which of these have the same units.
        bins: How many bars there are.
        has_units: Whether units can be dead.
    """

    apart: int
    shards: tuple[int, ...]
    bins: int
    has_units: bool


class Measured(NamedTuple):
    """What is measured of an array, or what reducers know of one.

    Attributes:
        reduced: The states of reducers, with axes for the parts that are kept apart.
        columns: What else is known of each part, by name.
        shared: How many units are dead in all parts that have the same, of how many; or
            None.
    """

    reduced: Reduced
    columns: Mapping[str, Any] = MappingProxyType({})
    shared: Any = None


# What an array is measured with. It may be masked, so the counts of `Moments` hold.
REDUCERS = as_reducers([NonFinite(), Moments(), Norm(), AbsMax()])


def measured_arrays(
    how: How, pairs: Sequence[tuple[Any, Sequence[Array]]]
) -> list[Measured]:
    """What is measured of arrays; nothing of those that are empty.

    Args:
        how: How to measure.
        pairs: The arrays, and for each what counts of it: masks of some of its first
            axes. Bars have the same edges if all are on the same devices.
    """
    leaves = [
        (leaf if isinstance(leaf, jax.Array) else np.asarray(leaf), list(masks))
        for leaf, masks in pairs
        if np.size(leaf)
    ]
    held = jax.tree.leaves(leaves)
    if all(map(_is_at_hand, held)) and sum(leaf.size for leaf, _ in leaves) <= SMALL:
        with np.errstate(all="ignore"):
            return _measured(how, jax.tree.map(np.asarray, leaves))
    held = [leaf for leaf in held if isinstance(leaf, jax.Array)]
    places = {frozenset(each.sharding.device_set) for each in held if each.committed}
    if len(places) < 2:
        return _on_devices(how, leaves)
    alone = [[(leaf, jax.tree.map(np.asarray, masks))] for leaf, masks in leaves]
    return [_on_devices(how, one)[0] for one in alone]


def _is_at_hand(leaf: Array) -> bool:
    """Whether an array can be read without a copy."""
    if isinstance(leaf, np.ndarray):
        return True
    return [each.platform for each in leaf.sharding.device_set] == ["cpu"]


def _on_devices(how: How, leaves: Leaves) -> list[Measured]:
    """What is measured of arrays where they are."""
    held = [getattr(leaf, "sharding", None) for leaf, _ in leaves]
    named = [x for x in held if isinstance(x, jax.NamedSharding)]
    mesh: Any = named[0].mesh if named and len(named[0].device_set) > 1 else None
    is_explicit = mesh and any(kind != AxisType.Auto for kind in mesh.axis_types)
    with jax.set_mesh(mesh) if is_explicit else nullcontext():
        return _compiled(mesh)(how, leaves)


@functools.lru_cache(maxsize=64)
def _compiled(mesh: Any) -> Any:
    """A program whose results are whole on all of a mesh: any process can read them."""
    everywhere = None if mesh is None else jax.NamedSharding(mesh, jax.P())
    return jax.jit(_measured, static_argnums=0, out_shardings=everywhere)


def _measured(how: How, leaves: Leaves) -> list[Measured]:
    if not leaves:
        return []
    several = [numbers_of(leaf, masks) for leaf, masks in leaves]
    xp, lows, highs = several[0].xp, *zip(*(numbers.ends for numbers in several))
    low, high = functools.reduce(xp.minimum, lows), functools.reduce(xp.maximum, highs)
    edges = _edges(low, high, how.bins)
    found = []
    for (leaf, _), numbers in zip(leaves, several):
        part = functools.partial(_part, edges.astype(numbers.real.dtype))
        states, columns, alive = _over_parts(part, how.apart, numbers)
        columns["bars"] = Bars(columns["bars"], edges)
        seen = numbers.xp.ones(leaf.shape[: how.apart], bool)
        reduced = Reduced(seen, states, REDUCERS)
        has_axis = leaf.ndim > how.apart and jnp.issubdtype(leaf.dtype, jnp.inexact)
        has_units = how.has_units and has_axis
        rest = tuple(range(how.apart, leaf.ndim))
        has_run = numbers.xp.any(numbers.is_finite, axis=rest)
        units = _units(alive, has_run, how.shards) if has_units else ({}, None)
        found.append(Measured(reduced, columns | units[0], units[1]))
    return found


def _over_parts(part: Callable[..., Any], apart: int, numbers: Numbers) -> Any:
    """What a function gives for each part along the axes that are kept apart."""
    arrays = numbers.real, numbers.is_finite
    if numbers.xp is jnp:
        return mapped(part, apart)(*arrays)
    shape = numbers.real.shape[:apart]
    found = [part(*(array[place] for array in arrays)) for place in np.ndindex(shape)]

    def stacked(*column: Any) -> np.ndarray:
        return np.reshape(column, (*shape, *np.shape(column[0])))

    return jax.tree.map(stacked, *found)


def _edges(low: Any, high: Any, bins: int) -> Any:
    """Of equal width from the lowest to the highest number; never of no width."""
    xp, largest = xp_of(low), np.finfo(low.dtype).max
    more = xp.maximum(xp.abs(low) / 1024, 0.5)
    more = xp.where(low == high, more, xp.zeros_like(more))
    share = xp.arange(bins + 1, dtype=low.dtype) / bins
    low, high = (xp.clip(x, -largest, largest) for x in (low - more, high + more))
    return low * (1 - share) + high * share


def _part(edges: Any, real: Any, is_finite: Any) -> Any:
    """What is measured of one part: states, columns, and which units are alive."""
    numbers = Numbers(real, is_finite)
    low, high = numbers.ends
    columns = {"low": low, "high": high, "bars": bars(edges, real, is_finite)}
    states = tuple(reducer._of(numbers) for _, reducer in REDUCERS)
    return states, columns, DeadUnits()._of(numbers)


def _units(alive: Any, seen: Any, shards: Sequence[int]) -> tuple[Any, Any]:
    """How many units are dead, where some first axes are apart, of these some shards.

    Args:
        alive: Which units are alive in which part.
        seen: Which parts there are; others say nothing of units they share.
        shards: Which axes of these are shards.

    Returns:
        Columns, and how many are dead on all shards, of how many; or None.
    """
    xp, apart = xp_of(alive), np.ndim(seen)
    dead = xp.sum(~alive, axis=tuple(range(apart, alive.ndim)))
    units = xp.full_like(dead, math.prod(alive.shape[apart:]))
    shards = tuple(axis for axis in shards if axis < apart)
    if not shards:
        return {"dead": dead, "units": units}, None
    has_run, is_alive = xp.any(seen, axis=shards), xp.any(alive, axis=shards)
    has_run = has_run.reshape(has_run.shape + (1,) * (is_alive.ndim - has_run.ndim))
    shared = [xp.sum(has_run & flags) for flags in (~is_alive, xp.ones_like(is_alive))]
    return {"dead": dead, "units": units}, tuple(shared)


# What was fetched is read: as columns, by what is measured, then by part.


def _read(wanted: Wanted, count: int, leaves: list[Measured]) -> Figures:
    """The figures of arrays, so many parts of which are kept."""
    pairs = [_parts_of(wanted, leaf) for leaf in leaves]
    shared = [one for _, one in pairs if one is not None]
    return figures_from([parts for parts, _ in pairs], count, shared)


def _parts_of(wanted: Wanted, leaf: Measured) -> tuple[Parts, Any]:
    """What is known of each part of an array, and of units that are shared."""
    reduced, shared = leaf.reduced, leaf.shared
    apart, nothing = np.ndim(reduced.seen), np.zeros_like(reduced.seen, int)
    found: dict[str, Any] = {"dead": nothing, "units": nothing, **leaf.columns}
    for (_, reducer), state in zip(reduced.reducers, reduced.states):
        if isinstance(reducer, StandardReducer):
            found |= reducer._figures(state)
        has_units = wanted.has_units and isinstance(reducer, DeadUnits)
        if has_units and state.ndim > apart:
            units, shared = _units(state, reduced.seen, wanted.shards)
            found |= units
    bars, seen = found.pop("bars", None), reduced.seen & (found.get("count", 1) != 0)
    columns = {name: np.ravel(column).tolist() for name, column in found.items()}
    if bars is not None:
        counts = as_integers(bars.counts)
        counts = counts.reshape(-1, counts.shape[-1])
        columns["bars"] = [Bars(each, bars.edges) for each in counts]
    rows = zip(*columns.values())
    parts = [dict(zip(columns, row)) for row in rows]
    return [part if n else None for part, n in zip(parts, np.ravel(seen))], shared
