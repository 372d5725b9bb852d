# SPDX-License-Identifier: Apache-2.0
"""Summing: one pass over arrays that leaves a few numbers of each, where they are.

Large arrays go through a compiled function, one for each shape and type; what is
sharded stays where it is, and only the sums are on all devices. Small arrays on the
host go through the same code with NumPy, since compiling would take longer. Numbers
that are not finite are counted and left out. `measures` fetches the sums.
"""

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

SMALL = 2**16  # up to so many numbers on the host are not worth a compilation


class How(NamedTuple):
    """How to measure.

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


class Sums(NamedTuple):
    """What is measured of a leaf; axes that are apart come first.

    Attributes:
        numbers: A scale; the mean, variance and sum of squares of numbers that were
            multiplied by it; the lowest, the highest number, the largest magnitude.
        counts: How many numbers count, are NaN, are infinite; dead units; bars.
        shared: How many units are dead on all shards, of how many; or None.
        units: How many units there are, or 0.
        edges: Of the bars.
    """

    numbers: Any
    counts: Any
    shared: Any
    units: Any
    edges: Any


def sums_of(how: How, leaves: Sequence[Any], masks: Sequence[Any]) -> list[Sums]:
    """The sums of arrays that are not empty.

    Args:
        how: How to measure.
        leaves: The arrays. Their bars have the same edges if all are on the same
            devices.
        masks: What counts of them; each has some of their first axes.
    """
    on_host = all(map(_is_at_hand, (*leaves, *masks)))
    if on_host and sum(leaf.size for leaf in leaves) <= SMALL:
        arrays = [np.asarray(leaf) for leaf in leaves]
        with np.errstate(all="ignore"):
            return _sums(np, how, arrays, [np.asarray(mask) for mask in masks])
    held = [leaf for leaf in (*leaves, *masks) if isinstance(leaf, jax.Array)]
    places = {frozenset(each.sharding.device_set) for each in held if each.committed}
    if len(places) < 2:
        return _on_devices(how, tuple(leaves), tuple(masks))
    flags = tuple(np.asarray(mask) for mask in masks)
    groups = [_on_devices(how, (leaf,), flags) for leaf in leaves]
    return [sums for group in groups for sums in group]


def _on_devices(how: How, leaves: Any, masks: Any) -> list[Sums]:
    """The sums of arrays, taken where they are."""
    mesh = _mesh_of(leaves)
    with jax.set_mesh(mesh) if _has_explicit_axes(mesh) else nullcontext():
        return _compiled(how, mesh, leaves, masks)


def _is_at_hand(leaf: Any) -> bool:
    """Whether an array can be read without a copy."""
    if isinstance(leaf, np.ndarray):
        return True
    devices = leaf.sharding.device_set
    return len(devices) == 1 and all(each.platform == "cpu" for each in devices)


def _mesh_of(leaves: Sequence[Any]) -> Any:
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
def _compiled(how: How, mesh: Any, leaves: Any, masks: Any) -> list[Sums]:
    sums = _sums(jnp, how, leaves, masks)
    return jax.tree.map(functools.partial(_everywhere, mesh), sums)


def _everywhere(mesh: Any, leaf: Any) -> Any:
    """A small array on every device of the mesh, so that any process can read it."""
    if mesh is None:
        return leaf
    whole = jax.sharding.NamedSharding(mesh, jax.P(*[None] * leaf.ndim))
    if _is_explicit(leaf):
        return jax.sharding.reshard(leaf, whole)
    if _has_explicit_axes(mesh):
        return leaf
    return jax.lax.with_sharding_constraint(leaf, whole)


def _is_explicit(leaf: Any) -> bool:
    """Whether the type of an array says how it is spread."""
    spec = getattr(getattr(jax.typeof(leaf), "sharding", None), "spec", ())
    return any(axis is not None for axis in spec)


# What follows is written for both NumPy and JAX: `xp` is one of them.


def _sums(xp: Any, how: How, leaves: Any, masks: Any) -> list[Sums]:
    kept = [_kept(xp, leaf, masks) for leaf in leaves]
    reals = [_real(xp, leaf) for leaf in leaves]
    finite = [mask & xp.isfinite(real) for mask, real in zip(kept, reals)]
    ends = [_ends(xp, real, mask) for real, mask in zip(reals, finite)]
    low = functools.reduce(xp.minimum, [low for low, _ in ends])
    high = functools.reduce(xp.maximum, [high for _, high in ends])
    edges = _edges(xp, low, high, how.bins)
    found = []
    for leaf, real, mask, is_finite in zip(leaves, reals, kept, finite):
        row = functools.partial(_row, (xp, edges.astype(real.dtype)))
        parts = real, mask, is_finite, mask & (leaf != 0)
        numbers, counts, alive = _over_rows(xp, row, how.apart, parts)
        has_axis = leaf.ndim > how.apart and jnp.issubdtype(leaf.dtype, jnp.inexact)
        units = leaf.shape[-1] if how.has_units and has_axis else 0
        shared = None
        if how.shards and units:
            dead = ~xp.any(alive, axis=how.shards)
            shared = xp.stack([xp.sum(dead), xp.asarray(dead.size)])
        found.append(Sums(numbers, counts, shared, xp.asarray(units), edges))
    return found


def _over_rows(xp: Any, row: Any, apart: int, parts: Any) -> Any:
    """What a function gives for each row along the axes that are kept apart."""
    if xp is jnp:
        for _ in range(apart):
            row = jax.vmap(row)
        return row(*parts)
    shape = parts[0].shape[:apart]
    found = [row(*(part[place] for part in parts)) for place in np.ndindex(shape)]
    stacked = [np.stack(column) for column in zip(*found)]
    return [column.reshape((*shape, *column.shape[1:])) for column in stacked]


def _kept(xp: Any, leaf: Any, masks: Sequence[Any]) -> Any:
    """Which numbers count."""
    kept, shape = xp.equal(leaf, leaf) | True, leaf.shape  # spread as the leaf is
    for mask in masks:
        fits = mask.shape == shape[: mask.ndim]
        fitting = mask if fits else xp.any(mask)
        after = (1,) * (len(shape) - fitting.ndim)
        kept = kept & xp.broadcast_to(fitting.reshape(fitting.shape + after), shape)
    return kept


def _real(xp: Any, value: Any) -> Any:
    """A value in float32, or float64 if it is as wide as that, or on the host."""
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        value = xp.abs(value)
    is_wide = xp is np or value.dtype in (jnp.float64, jnp.int64, jnp.uint64)
    return value.astype(xp.float64 if is_wide else xp.float32)


def _ends(xp: Any, real: Any, is_finite: Any) -> tuple[Any, Any]:
    """The lowest and the highest number; infinities the wrong way if there is none."""
    low = xp.min(xp.where(is_finite, real, xp.full_like(real, xp.inf)))
    high = xp.max(xp.where(is_finite, real, xp.full_like(real, -xp.inf)))
    return low, high


def _edges(xp: Any, low: Any, high: Any, bins: int) -> Any:
    """Of equal width from the lowest to the highest number; never of no width."""
    more = xp.maximum(xp.abs(low) / 1024, 0.5)
    more = xp.where(low == high, more, xp.zeros_like(more))
    share = xp.arange(bins + 1, dtype=low.dtype) / bins
    return (low - more) * (1 - share) + (high + more) * share


_SCALES = {np.dtype(np.float32): (40, 90), np.dtype(np.float64): (400, 600)}


def _row(given: Any, real: Any, kept: Any, is_finite: Any, is_alive: Any) -> Any:
    """What is measured of one part."""
    xp, edges = given
    zeros = xp.zeros_like(real)
    numbers = xp.where(is_finite, real, zeros)
    largest = xp.max(xp.abs(numbers))
    limit, step = _SCALES[np.dtype(real.dtype)]
    # A power of two: squares neither overflow nor vanish, and nothing is rounded.
    scale = xp.where(largest > 2.0**limit, 2.0**-step, 1.0)
    scale = xp.where((largest > 0) & (largest < 2.0**-limit), 2.0**step, scale)
    scale = scale.astype(real.dtype)
    many = xp.maximum(xp.sum(is_finite, dtype=xp.uint32), 1).astype(real.dtype)
    scaled = numbers * scale
    mean = xp.sum(scaled) / many
    away = xp.where(is_finite, scaled - mean, zeros)
    variance, squares = xp.sum(away * away) / many, xp.sum(scaled * scaled)
    alive = xp.any(is_alive, axis=tuple(range(real.ndim - 1)))
    masks = kept, kept & xp.isnan(real), kept & xp.isinf(real), ~alive
    tallies = xp.stack([xp.sum(mask, dtype=xp.uint32) for mask in masks])
    ends = _ends(xp, real, is_finite)
    found = xp.stack([scale, mean, variance, squares, *ends, largest])
    return found, xp.concatenate([tallies, _bars(xp, edges, real, is_finite)]), alive


def _bars(xp: Any, edges: Any, real: Any, is_finite: Any) -> Any:
    """How many numbers lie in each bin; one on an edge is in the upper one."""
    if xp is np:
        places = np.searchsorted(edges[1:-1], real[is_finite], side="right")
        return np.bincount(places, minlength=len(edges) - 1).astype(np.uint32)
    if _is_explicit(real):
        return bars_by_edge(edges, real, is_finite)
    return jax.lax.platform_dependent(
        edges, real, is_finite, cpu=bars_by_place, default=bars_by_edge
    )


def bars_by_edge(edges: Any, real: Any, is_finite: Any) -> Any:
    """Compares with every edge; quick where many numbers are handled at once."""
    inner = edges[1:-1].reshape((1,) * real.ndim + (len(edges) - 2,))
    is_above = is_finite[..., None] & (real[..., None] >= inner)
    above = jnp.sum(is_above, axis=tuple(range(real.ndim)), dtype=jnp.uint32)
    total = jnp.sum(is_finite, dtype=jnp.uint32)[None]
    above = jnp.concatenate([total, above, jnp.zeros_like(total)])
    return above[:-1] - above[1:]


def bars_by_place(edges: Any, real: Any, is_finite: Any) -> Any:
    """Computes the place of every number, which may be off by one; quick on a CPU."""
    last = len(edges) - 2
    width = (edges[-1] / 2 - edges[0] / 2) / (last + 1)
    place = (jnp.where(is_finite, real / 2, edges[0] / 2) - edges[0] / 2) / width
    place = jnp.clip(place, 0, last).astype(jnp.int32)
    place = jnp.where(real >= edges[place + 1], place + 1, place)
    place = jnp.where(real < edges[place], place - 1, place)
    place = jnp.clip(place, 0, last)
    return jnp.zeros(last + 1, jnp.uint32).at[place].add(is_finite.astype(jnp.uint32))
