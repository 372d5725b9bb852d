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
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from treetap._capture.statistics.arithmetic import (
    Array,
    alive_units,
    as_real,
    bars,
    counted,
    ends_of,
    has_spread_axes,
    largest_of,
    moments,
    scale_for,
    zeroed,
)
from treetap._capture.statistics.figures import (
    UNMEASURED,
    Bars,
    Figures,
    PartFigures,
    Parts,
    figures_from,
)
from treetap._capture.statistics.reduced import is_measured, is_reduced
from treetap._capture.statistics.reducers import (
    AbsMax,
    AllFinite,
    DeadUnits,
    Histogram,
    Moments,
    MomentsFound,
    NonFinite,
    NonFiniteFound,
    Norm,
)
from treetap._core.errors import CaptureError
from treetap._core.variables.values import is_gone

BINS = 40
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
    reduced = [leaf for leaf in leaves if is_reduced(leaf)]
    if reduced:
        states = [(leaf.seen, leaf.states) for leaf in reduced]
        _refuse_traced(states, wanted.where)
        held = [[reducer for _, reducer in leaf.reducers] for leaf in reduced]
        return states, functools.partial(_read_reduced, held, wanted)
    masks = wanted.masks or [()] * len(leaves)
    masks = [own for leaf, own in zip(leaves, masks) if is_measured(leaf)]
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
    masks = [own for leaf, own in zip(arrays, masks) if leaf.size]
    arrays = [leaf for leaf in arrays if leaf.size]
    found = measured_arrays(how, arrays, masks) if arrays else []
    return found, functools.partial(_read_measured, math.prod(shape) if apart else 0)


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


class MeasuredParts(NamedTuple):
    """What is measured of a part of an array, in the form that reducers have.

    Attributes:
        moments: As of `Moments`, of numbers in a unit: see `norm`.
        nonfinite: As of `NonFinite`.
        norm: As of `Norm`: the unit, and the sum of squares in it.
        ends: The lowest and the highest number, and the largest magnitude.
        bars: As of `Histogram`.
    """

    moments: MomentsFound
    nonfinite: NonFiniteFound
    norm: tuple[Array, Array]
    ends: tuple[Array, Array, Array]
    bars: Array


class Measured(NamedTuple):
    """What is measured of an array.

    Attributes:
        states: Of its parts; the axes that are kept apart come first.
        dead: How many units are dead, in each part.
        edges: Of the bars.
        units: How many units there are, or 0.
        shared: How many units are dead on all shards, of how many; or None.
    """

    states: MeasuredParts
    dead: Array
    edges: Any
    units: Array
    shared: Array | None


def measured_arrays(
    how: How, leaves: Sequence[Array], masks: Sequence[Sequence[Array]]
) -> list[Measured]:
    """What is measured of arrays that are not empty.

    Args:
        how: How to measure.
        leaves: The arrays. Their bars have the same edges if all are on the same
            devices.
        masks: For each, what counts of it: of some of its first axes.
    """
    both = list(leaves), list(map(list, masks))
    held = jax.tree.leaves(both)
    if all(map(_is_at_hand, held)) and sum(leaf.size for leaf in leaves) <= SMALL:
        with np.errstate(all="ignore"):
            return _measured(np, how, *jax.tree.map(np.asarray, both))
    held = [leaf for leaf in held if isinstance(leaf, jax.Array)]
    places = {frozenset(each.sharding.device_set) for each in held if each.committed}
    if len(places) < 2:
        return _on_devices(how, *both)
    flags = jax.tree.map(np.asarray, both[1])
    groups = [_on_devices(how, [x], [own]) for x, own in zip(leaves, flags)]
    return [found for group in groups for found in group]


def _is_at_hand(leaf: Array) -> bool:
    """Whether an array can be read without a copy."""
    if isinstance(leaf, np.ndarray):
        return True
    devices = leaf.sharding.device_set
    return len(devices) == 1 and all(each.platform == "cpu" for each in devices)


def _on_devices(
    how: How, leaves: list[Array], masks: list[list[Array]]
) -> list[Measured]:
    """What is measured of arrays where they are."""
    mesh = _mesh_of(leaves)
    with jax.set_mesh(mesh) if _has_explicit_axes(mesh) else nullcontext():
        return _compiled(how, mesh, leaves, masks)


def _mesh_of(leaves: Sequence[Array]) -> Any:
    """The mesh that leaves are spread over, if there is one."""
    for leaf in leaves:
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, jax.sharding.NamedSharding):
            return sharding.mesh if len(sharding.device_set) > 1 else None
    return None


def _has_explicit_axes(mesh: Any) -> bool:
    kinds = () if mesh is None else mesh.axis_types
    return any(kind != jax.sharding.AxisType.Auto for kind in kinds)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _compiled(how: How, mesh: Any, leaves: Any, masks: Any) -> list[Measured]:
    found = _measured(jnp, how, leaves, masks)
    return jax.tree.map(functools.partial(_everywhere, mesh), found)


def _everywhere(mesh: Any, leaf: jax.Array) -> jax.Array:
    """A small array on every device of the mesh, so that any process can read it."""
    if mesh is None:
        return leaf
    whole = jax.sharding.NamedSharding(mesh, jax.P(*[None] * leaf.ndim))
    if has_spread_axes(leaf):
        return jax.sharding.reshard(leaf, whole)
    if _has_explicit_axes(mesh):
        return leaf
    return jax.lax.with_sharding_constraint(leaf, whole)


def _measured(
    xp: ModuleType, how: How, leaves: Sequence[Any], masks: Sequence[Sequence[Any]]
) -> list[Measured]:
    kept = [_kept(xp, leaf, own) for leaf, own in zip(leaves, masks)]
    reals = [as_real(xp, leaf) for leaf in leaves]
    finite = [mask & xp.isfinite(real) for mask, real in zip(kept, reals)]
    ends = [ends_of(xp, real, mask) for real, mask in zip(reals, finite)]
    low = functools.reduce(xp.minimum, [low for low, _ in ends])
    high = functools.reduce(xp.maximum, [high for _, high in ends])
    edges = _edges(xp, low, high, how.bins)
    found = []
    for leaf, real, mask, is_finite in zip(leaves, reals, kept, finite):
        part = functools.partial(_part, xp, edges.astype(real.dtype))
        states, alive = _over_parts(xp, part, how.apart, (real, mask, is_finite))
        has_axis = leaf.ndim > how.apart and jnp.issubdtype(leaf.dtype, jnp.inexact)
        units = leaf.shape[-1] if how.has_units and has_axis else 0
        dead = xp.sum(~alive, axis=tuple(range(how.apart, alive.ndim)))
        shared = None
        if how.shards and units:
            nowhere = ~xp.any(alive, axis=how.shards)
            shared = xp.stack([xp.sum(nowhere), xp.asarray(nowhere.size)])
        found.append(Measured(states, dead, edges, xp.asarray(units), shared))
    return found


def _over_parts(xp: ModuleType, part: Any, apart: int, arrays: Any) -> Any:
    """What a function gives for each part along the axes that are kept apart."""
    if xp is jnp:
        for _ in range(apart):
            part = jax.vmap(part)
        return part(*arrays)
    shape = arrays[0].shape[:apart]
    found = [part(*(array[place] for array in arrays)) for place in np.ndindex(shape)]

    def stacked(*column: Any) -> np.ndarray:
        return np.reshape(column, (*shape, *np.shape(column[0])))

    return jax.tree.map(stacked, *found)


def _kept(xp: ModuleType, leaf: Any, masks: Sequence[Any]) -> Any:
    """Which numbers count."""
    kept, shape = xp.equal(leaf, leaf) | True, leaf.shape  # spread as the leaf is
    for mask in masks:
        after = (1,) * (len(shape) - mask.ndim)
        kept = kept & xp.broadcast_to(mask.reshape(mask.shape + after), shape)
    return kept


def _edges(xp: ModuleType, low: Any, high: Any, bins: int) -> Any:
    """Of equal width from the lowest to the highest number; never of no width."""
    more = xp.maximum(xp.abs(low) / 1024, 0.5)
    more = xp.where(low == high, more, xp.zeros_like(more))
    share = xp.arange(bins + 1, dtype=low.dtype) / bins
    return (low - more) * (1 - share) + (high + more) * share


def _part(xp: ModuleType, edges: Any, real: Any, kept: Any, is_finite: Any) -> Any:
    """What is measured of one part: the states, and which units are alive."""
    numbers = zeroed(xp, real, is_finite)
    largest = largest_of(xp, numbers)
    scale = scale_for(xp, largest)
    scaled = numbers * scale
    others = [kept & mask(real) for mask in (xp.isnan, xp.isposinf, xp.isneginf)]
    total, *bad = counted(xp, [kept, *others])
    finite, bad_together = counted(xp, [is_finite, kept & ~is_finite])
    states = MeasuredParts(
        MomentsFound(finite, *moments(xp, scaled, is_finite, finite), bad_together),
        NonFiniteFound(*bad, total=total),
        (1 / scale, xp.sum(scaled * scaled)),
        (*ends_of(xp, real, is_finite), largest),
        bars(xp, edges, real, is_finite),
    )
    return states, alive_units(xp, kept & (real != 0))


# What was fetched is read: as columns, by what is measured, then by part.

Columns = dict[str, np.ndarray]


def _read_measured(parts: int, leaves: list[Measured]) -> Figures:
    """The figures of arrays."""
    shared = [leaf.shared for leaf in leaves if leaf.shared is not None]
    return figures_from([_parts_of(leaf) for leaf in leaves], parts, shared)


def _parts_of(leaf: Measured) -> Parts:
    flat = functools.partial(_flat, axes=leaf.dead.ndim)
    states, dead = jax.tree.map(flat, (leaf.states, leaf.dead))
    columns: dict[str, Any] = _of_moments(states.moments, unit=states.norm[0])
    columns |= _of_nonfinite(states.nonfinite) | _of_norm(states.norm)
    columns |= zip(("low", "high", "abs_max"), states.ends)
    columns |= _of_bars(states.bars, leaf.edges)
    del columns["unsorted"]  # NaN and infinities were told apart
    if leaf.units:
        columns |= {"dead": dead, "units": np.full(dead.size, leaf.units)}
    return _as_parts(columns, columns["count"] > 0)


def _read_reduced(
    held: list[list[Any]], wanted: Wanted, found: list[tuple[Any, Any]]
) -> Figures:
    """The figures that are in the states of reducers."""
    by_leaf: list[Parts] = []
    shared: list[Any] = []
    shapes = {np.shape(flags) for flags, _ in found}
    apart = shapes.pop() if len(shapes) == 1 else ()
    for reducers, (flags, states) in zip(held, found):
        seen = np.asarray(flags)
        columns: dict[str, Any] = {}
        for reducer, state in zip(reducers, states):
            flat = jax.tree.map(functools.partial(_flat, axes=seen.ndim), state)
            columns |= _columns_of(reducer, flat, columns)
            has_units = isinstance(reducer, DeadUnits) and state.ndim > seen.ndim
            if has_units and wanted.has_units:
                parts, units = flat.shape
                columns |= {"dead": (~flat).sum(1), "units": np.full(parts, units)}
                axes = tuple(axis for axis in wanted.shards if axis < seen.ndim)
                if axes:
                    dead = ~np.any(state, axis=axes)
                    shared.append((dead.sum(), dead.size))
        by_leaf.append(_as_parts(columns, seen.ravel()))
    return figures_from(by_leaf, math.prod(apart) if apart else 0, shared)


def _flat(part: Any, axes: int) -> np.ndarray:
    """A part of a state with one first axis instead of so many."""
    part = np.asarray(part)
    return part.reshape(math.prod(part.shape[:axes]), *part.shape[axes:])


def _as_parts(columns: dict[str, Any], seen: np.ndarray) -> Parts:
    """What is known of each part, from what is known by column."""
    lists = {
        name: column.tolist() if isinstance(column, np.ndarray) else column
        for name, column in columns.items()
    }
    counted = {"finite", "dead", "units"} & lists.keys()

    def part(n: int) -> PartFigures:
        known = {name: column[n] for name, column in lists.items()}
        others = {name: known.pop(name) for name in counted}
        return PartFigures(Figures(**known), **others)

    return [part(n) if is_seen else None for n, is_seen in enumerate(seen)]


def _columns_of(reducer: Any, state: Any, known: dict[str, Any]) -> dict[str, Any]:
    """What a reducer knows of each part."""
    match reducer:
        case Moments():
            return _of_moments(state)
        case NonFinite():
            return _of_nonfinite(state)
        case Norm():
            return _of_norm(state)
        case AbsMax():
            return {"abs_max": state}
        case AllFinite() if "unsorted" not in known:
            return {"unsorted": (~state).astype(int)}
        case Histogram():
            return _of_bars(state, _edges_of(reducer))
        case _:
            return {}


def _of_moments(state: MomentsFound, unit: Any = 1.0) -> Columns:
    finite, bad = _numbers(state.count), _numbers(state.nonfinite)
    mean, variance = (np.asarray(x, np.float64) for x in (state.mean, state.variance))
    return {
        "count": finite + bad,
        "finite": finite,
        "unsorted": bad,
        "mean": mean * unit,
        "std": np.sqrt(variance) * unit,
    }


def _of_nonfinite(state: NonFiniteFound) -> Columns:
    nan, positive, negative, total = map(_numbers, state)
    infinite = positive + negative
    finite = total - nan - infinite
    return {"count": total, "finite": finite, "nan": nan, "infinite": infinite}


def _of_norm(state: tuple[Any, Any]) -> Columns:
    unit, squares = (part.astype(np.float64) for part in state)
    return {"norm": unit * np.sqrt(squares)}


def _of_bars(state: Any, edges: np.ndarray) -> dict[str, list[Bars]]:
    return {"bars": [Bars(counts, edges) for counts in _numbers(state)]}


def _numbers(counts: Any) -> np.ndarray:
    """Counts of two words each."""
    words = np.asarray(counts).astype(np.int64)
    return (words[..., 0] << 32) + words[..., 1]


@functools.lru_cache(maxsize=64)
def _edges_of(reducer: Histogram) -> np.ndarray:
    nothing = jnp.zeros((reducer.bins, 2), jnp.uint32)
    return np.asarray(reducer.finish(nothing).edges)
