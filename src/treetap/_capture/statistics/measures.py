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

from treetap._capture.statistics.arithmetic import (
    Array,
    Numbers,
    as_integers,
    bars,
    has_spread_axes,
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
from treetap._capture.statistics.reduced import is_measured, is_reduced, mapped
from treetap._capture.statistics.reducers import (
    AbsMax,
    AllFinite,
    DeadUnits,
    Moments,
    NonFinite,
    Norm,
    StandardReducer,
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
        found = [Measured(leaf.seen, leaf.states) for leaf in reduced]
        _refuse_traced(found, wanted.where)
        held = [[reducer for _, reducer in leaf.reducers] for leaf in reduced]
        shapes = {np.shape(leaf.seen) for leaf in reduced}
        shape = shapes.pop() if len(shapes) == 1 else ()
        return found, functools.partial(_read, held, wanted, _num_parts(shape))
    masks = wanted.masks or [()] * len(leaves)
    pairs = [(leaf, own) for leaf, own in zip(leaves, masks) if is_measured(leaf)]
    _refuse_traced(pairs, wanted.where)
    if not pairs or any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf, _ in pairs):
        return (), lambda _: UNMEASURED
    apart, shape = wanted.apart, np.shape(pairs[0][0])[: wanted.apart]
    if len(shape) < apart or any(np.shape(x)[:apart] != shape for x, _ in pairs):
        apart, shape = 0, ()
    shards = tuple(axis for axis in wanted.shards if axis < apart)
    how = How(apart, shards, bins, wanted.has_units)
    pairs = [
        (leaf if isinstance(leaf, jax.Array) else np.asarray(leaf), list(own))
        for leaf, own in pairs
        if np.size(leaf)
    ]
    found = measured_arrays(how, *map(list, zip(*pairs))) if pairs else []
    held = [REDUCERS] * len(found)
    return found, functools.partial(_read, held, wanted, _num_parts(shape))


def _num_parts(shape: Sequence[int]) -> int:
    return math.prod(shape) if shape else 0


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


class Units(NamedTuple):
    """Which units are dead.

    Attributes:
        dead: How many of them are, in each part.
        count: How many there are; 0 if none can be dead.
        shared: How many are dead in all parts that have the same, of how many; or None.
    """

    dead: Any = 0
    count: Any = 0
    shared: Any = None


class Measured(NamedTuple):
    """What is measured of an array, or what reducers know of one.

    Attributes:
        seen: Which parts there are; its axes are those that are kept apart.
        states: Of reducers; these axes come first.
        units: Of the array.
        columns: What else is known of each part, by name.
        edges: Of the bars, if these are among the columns.
    """

    seen: Any
    states: Sequence[Any]
    units: Units = Units()
    columns: Mapping[str, Any] = MappingProxyType({})
    edges: Any = None


# What an array is measured with. It may be masked, so the counts of `Moments` hold.
REDUCERS = (NonFinite(), Moments(), Norm(), AbsMax())


def measured_arrays(
    how: How, leaves: list[Array], masks: list[list[Array]]
) -> list[Measured]:
    """What is measured of arrays that are not empty.

    Args:
        how: How to measure.
        leaves: The arrays. Their bars have the same edges if all are on the same
            devices.
        masks: For each, what counts of it: of some of its first axes.
    """
    held = jax.tree.leaves([leaves, masks])
    if all(map(_is_at_hand, held)) and sum(leaf.size for leaf in leaves) <= SMALL:
        with np.errstate(all="ignore"):
            return _measured(how, *jax.tree.map(np.asarray, [leaves, masks]))
    held = [leaf for leaf in held if isinstance(leaf, jax.Array)]
    places = {frozenset(each.sharding.device_set) for each in held if each.committed}
    if len(places) < 2:
        return _on_devices(how, leaves, masks)
    flags = jax.tree.map(np.asarray, masks)
    return [_on_devices(how, [x], [own])[0] for x, own in zip(leaves, flags)]


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
    held = [getattr(leaf, "sharding", None) for leaf in leaves]
    named = [x for x in held if isinstance(x, jax.sharding.NamedSharding)]
    return named[0].mesh if named and len(named[0].device_set) > 1 else None


def _has_explicit_axes(mesh: Any) -> bool:
    kinds = () if mesh is None else mesh.axis_types
    return any(kind != jax.sharding.AxisType.Auto for kind in kinds)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _compiled(how: How, mesh: Any, leaves: Any, masks: Any) -> list[Measured]:
    found = _measured(how, leaves, masks)
    return jax.tree.map(functools.partial(_everywhere, mesh), found)


def _everywhere(mesh: Any, leaf: jax.Array) -> jax.Array:
    """A small array on every device of the mesh, so that any process can read it."""
    if mesh is None:
        return leaf
    whole = jax.sharding.NamedSharding(mesh, jax.P(*[None] * np.ndim(leaf)))
    if has_spread_axes(leaf):
        return jax.sharding.reshard(leaf, whole)
    if _has_explicit_axes(mesh):
        return leaf
    return jax.lax.with_sharding_constraint(leaf, whole)


def _measured(
    how: How, leaves: Sequence[Any], masks: Sequence[Sequence[Any]]
) -> list[Measured]:
    several = list(map(numbers_of, leaves, masks))
    xp, lows, highs = several[0].xp, *zip(*(numbers.ends for numbers in several))
    low, high = functools.reduce(xp.minimum, lows), functools.reduce(xp.maximum, highs)
    edges = _edges(low, high, how.bins)
    found = []
    for leaf, numbers in zip(leaves, several):
        part = functools.partial(_part, edges.astype(numbers.real.dtype))
        states, columns, alive = _over_parts(part, how.apart, numbers)
        seen = np.ones(leaf.shape[: how.apart], bool)
        has_axis = leaf.ndim > how.apart and jnp.issubdtype(leaf.dtype, jnp.inexact)
        has_units = how.has_units and has_axis
        units = _units(alive, how.apart, how.shards) if has_units else Units()
        found.append(Measured(seen, states, units, columns, edges))
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
    xp = xp_of(low)
    more = xp.maximum(xp.abs(low) / 1024, 0.5)
    more = xp.where(low == high, more, xp.zeros_like(more))
    share = xp.arange(bins + 1, dtype=low.dtype) / bins
    return (low - more) * (1 - share) + (high + more) * share


def _part(edges: Any, real: Any, is_finite: Any) -> Any:
    """What is measured of one part: states, columns, and which units are alive."""
    numbers = Numbers(real, is_finite)
    low, high = numbers.ends
    columns = {"low": low, "high": high, "bars": bars(edges, real, is_finite)}
    states = [reducer._of(numbers) for reducer in REDUCERS]
    return states, columns, DeadUnits()._of(numbers)


def _units(alive: Any, apart: int, shards: Sequence[int]) -> Units:
    """Which units are dead, where some first axes are apart, of these some shards."""
    xp = xp_of(alive)
    dead = xp.sum(~alive, axis=tuple(range(apart, alive.ndim)))
    nowhere = ~xp.any(alive, axis=tuple(shards))
    shared = (xp.sum(nowhere), nowhere.size) if shards else None
    return Units(dead, math.prod(alive.shape[apart:]), shared)


# What was fetched is read: as columns, by what is measured, then by part.


def _read(
    held: Sequence[Sequence[Any]], wanted: Wanted, parts: int, leaves: list[Measured]
) -> Figures:
    """The figures of arrays, from what each was measured with."""
    if wanted.has_units:
        leaves = [_with_units(*pair, wanted.shards) for pair in zip(held, leaves)]
    shared = [leaf.units.shared for leaf in leaves if leaf.units.shared is not None]
    return figures_from(list(map(_parts_of, held, leaves)), parts, shared)


def _with_units(reducers: Any, leaf: Measured, shards: Sequence[int]) -> Measured:
    apart = np.ndim(leaf.seen)
    axes = [axis for axis in shards if axis < apart]
    for reducer, state in zip(reducers, leaf.states):
        if isinstance(reducer, DeadUnits) and state.ndim > apart:
            return leaf._replace(units=_units(state, apart, axes))
    return leaf


def _parts_of(reducers: Sequence[Any], leaf: Measured) -> Parts:
    """What is known of each part of an array, from what is known by column."""
    flat = functools.partial(_flat, axes=np.ndim(leaf.seen))
    seen, states = flat(leaf.seen), jax.tree.map(flat, leaf.states)
    columns: dict[str, Any] = {name: flat(x) for name, x in leaf.columns.items()}
    if "bars" in columns:
        counts = as_integers(columns["bars"])
        columns["bars"] = [Bars(each, leaf.edges) for each in counts]
    # What `Moments` counts is more than the bit of `AllFinite`.
    pairs = zip(reducers, states)
    for reducer, state in sorted(pairs, key=lambda x: not isinstance(x[0], AllFinite)):
        if isinstance(reducer, StandardReducer):
            columns |= reducer._figures(state)
    if "nan" in columns:  # which was told from infinities
        columns.pop("unsorted", None)
    columns["dead"] = np.broadcast_to(np.ravel(leaf.units.dead), seen.size)
    columns["units"] = np.full(seen.size, leaf.units.count)
    seen = seen & (columns.get("count", 1) != 0)
    rows = zip(*(x if isinstance(x, list) else x.tolist() for x in columns.values()))
    return [
        dict(zip(columns, row)) if is_seen else None for row, is_seen in zip(rows, seen)
    ]


def _flat(part: Any, axes: int) -> np.ndarray:
    """A part of a state with one first axis instead of so many."""
    part = np.asarray(part)
    return part.reshape(math.prod(part.shape[:axes]), *part.shape[axes:])
