# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of statistics: what is measured of numbers, each thing once.

The reducers measure with it inside of a program, and figures are measured with it of
arrays that are there. It is written for both NumPy and JAX: arrays go through the one
that they are of (`xp`). NumPy is for small arrays on the host, where compiling would
take longer than measuring.

A count is exact beyond 32 bits: a high and a low word, along a last axis of two. What
is counted is computed within the reduction: XLA does so with the operands of one that
has several. Those of a single one it may write out first (for CPUs it cuts it into
windows), and a mask of a value is then as large as the value.
"""

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray

_WIDE = (np.float64, np.int64, np.uint64)


def xp_of(value: Any) -> ModuleType:
    """What an array is computed with: NumPy or JAX's."""
    return np if isinstance(value, np.ndarray | np.generic) else jnp


def as_real(value: Array) -> Any:
    """A value in float32, or float64 if it is as wide as that, or with NumPy.

    Booleans are 0 and 1, complex numbers their magnitudes.
    """
    xp = xp_of(value)
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        value = xp.abs(value)
    is_wide = xp is np or value.dtype in _WIDE
    return value.astype(xp.float64 if is_wide else xp.float32)


def zeroed(real: Array, is_finite: Array) -> Any:
    """The numbers that count, and zeros where the others are."""
    xp = xp_of(real)
    return xp.where(is_finite, real, xp.zeros_like(real))


class Numbers:
    """The numbers of an array, as they are measured.

    Attributes:
        real: All of them, as `as_real` has them; zeros where they do not count.
        is_finite: Which count and are finite.
    """

    def __init__(self, real: Any, is_finite: Any):
        self.real, self.is_finite, self.xp = real, is_finite, xp_of(real)

    @functools.cached_property
    def finite(self) -> Any:
        """The finite ones, and zeros where the others are."""
        return zeroed(self.real, self.is_finite)

    @functools.cached_property
    def largest(self) -> Any:
        """The largest magnitude."""
        return self.xp.max(self.xp.abs(self.finite))

    @functools.cached_property
    def ends(self) -> tuple[Any, Any]:
        """The lowest and the highest; infinities the wrong way if there is none."""
        low = self.xp.min(self.real, where=self.is_finite, initial=np.inf)
        return low, self.xp.max(self.real, where=self.is_finite, initial=-np.inf)

    @functools.cached_property
    def scale(self) -> Any:
        """What to multiply them with before they are squared.

        It is a power of two, so that nothing is rounded, and mostly 1. Squares of what
        is multiplied neither overflow, nor does their sum; nor do all of them vanish.
        """
        xp, largest = self.xp, self.largest
        limit, down, up = _SCALES[np.dtype(largest.dtype)]
        scale = xp.where(largest > 2.0**limit, 2.0**-down, 1.0)
        scale = xp.where(largest < 2.0**-limit, 2.0**up, scale)
        return scale.astype(largest.dtype)


# By type: from which power of two on numbers are large, by which they are then made
# smaller, and by which those are made larger that are as small.
_SCALES = {np.dtype(np.float32): (40, 90, 80), np.dtype(np.float64): (400, 600, 600)}


def numbers_of(value: Array, masks: Sequence[Array] = ()) -> Numbers:
    """The numbers of an array.

    Args:
        value: The array.
        masks: What counts of it: of some of its first axes.
    """
    real = as_real(value)
    is_finite = xp_of(real).isfinite(real)
    for mask in masks:
        kept = mask.reshape(mask.shape + (1,) * (real.ndim - mask.ndim))
        real, is_finite = zeroed(real, kept), is_finite & kept
    return Numbers(real, is_finite)


# Counts.


def counted(masks: Sequence[Array], axes: Sequence[int] | None = None) -> list[Any]:
    """How often each of two or more masks is true, over all axes or some."""
    if xp_of(masks[0]) is np:
        lows = [np.sum(mask, axis=axes, dtype=np.uint32) for mask in masks]
    else:
        ones = [mask.astype(jnp.uint32) for mask in masks]
        lows = reduced_together(ones, 0, jnp.add, axes)
    return list(map(as_count, lows))


def reduced_together(
    operands: Sequence[Any],
    start: int,
    how: Callable[[Any, Any], Any],
    axes: Sequence[int] | None = None,
) -> Sequence[Any]:
    """Operands of one type, each reduced over all axes or some."""
    return jax.lax.reduce(
        operands,
        [np.array(start, operands[0].dtype)] * len(operands),
        lambda first, second: [how(a, b) for a, b in zip(first, second)],
        range(operands[0].ndim) if axes is None else axes,
    )


def as_count(low: Any) -> Any:
    """A number below 2**32 as a count."""
    zeros = low ^ low  # spread over a mesh as it is, which new zeros are not
    return xp_of(low).stack([zeros, low], axis=-1)


def count_of(number: int) -> Any:
    """A number that is known as a count."""
    return np.array([number >> 32, number % 2**32], np.uint32)


def counts_added(first: Any, second: Any) -> jax.Array:
    """The sum of two counts."""
    low = first[..., 1] + second[..., 1]
    carried = (low < first[..., 1]).astype(jnp.uint32)
    return jnp.stack([first[..., 0] + second[..., 0] + carried, low], axis=-1)


def as_number(count: Any, dtype: Any = np.float32) -> Any:
    """A count as one number, rounded."""
    high, low = (count[..., n].astype(dtype) for n in (0, 1))
    return high * 2.0**32 + low


def as_integers(counts: Any) -> np.ndarray:
    """Counts as NumPy's integers."""
    words = np.asarray(counts).astype(np.int64)
    return (words[..., 0] << 32) + words[..., 1]


# Histograms: a number on an edge is in the upper bin, one outside in the outermost.


def bars(edges: Array, real: Array, is_finite: Array) -> Any:
    """How many numbers are in each bin, with NumPy or JAX."""
    if xp_of(real) is not np:
        return bars_by_edge(edges, real, is_finite)
    places = np.searchsorted(edges[1:-1], real[is_finite], side="right")
    found = np.bincount(places, minlength=len(edges) - 1)
    return as_count(found.astype(np.uint32))


def bars_by_edge(edges: Any, real: Array, is_finite: Array) -> jax.Array:
    """Compares with every edge, whatever widths are.

    How many numbers lie above each edge is counted, and bars are differences. Nothing
    of the size of the numbers is written out, and what is sharded stays where it is;
    to look for the place of each number would need both, and is slower on CPUs, too.
    The edges are in two halves, as two operands of one reduction; the first edge counts
    all, the last one may count none.
    """
    bins = len(edges) - 1
    ends = jnp.array([-jnp.inf]), jnp.full(bins % 2, jnp.inf)
    lower = jnp.concatenate([ends[0], jnp.asarray(edges)[1:-1], ends[1]])
    halves = lower.astype(real.dtype).reshape(2, -1, *[1] * real.ndim)
    masks = [is_finite[None] & (real[None] >= half) for half in halves]
    axes = range(1, real.ndim + 1)
    above = jnp.concatenate(counted(masks, axes))[:bins]
    return above - jnp.concatenate([above[1:], jnp.zeros_like(above[:1])])
