# SPDX-License-Identifier: Apache-2.0
"""How far two arrays are from each other, and how far they may be.

`measure` computes distances in float64. Arrays are gone through in pieces, so a large
one that is mapped from a file never stands in memory whole. Values that are not finite
are equal when both are the same; one that has no equal makes every distance infinite.

`Limits` says when two arrays count as different. Without more knowledge the limit
depends on the type of numbers. A third run of the same computation, in float64 or in
another order, shows what rounding alone does to each site: then the limit is a multiple
of that.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from treetap._compare.sources import Entry, by_selector

FACTOR = 8.0
PEAK = 4.0
_TOLERANCES = {"float64": 1e-10, "float32": 2e-5, "float16": 5e-3, "bfloat16": 4e-2}
PIECE = 2**18  # numbers at a time


class Measures(NamedTuple):
    """Distances between two arrays `a` and `b` of one shape.

    Attributes:
        max_abs: The largest difference of two numbers.
        relative: The norm of the difference over the norm of `b`.
        peak: The largest difference over the largest number of `b`.
        cosine: Of the angle between them; 1 when both are zero.
        ulp: The largest distance in steps of the coarser type; None for integers.
        unequal: How many numbers are not the same.
        size: How many there are.
    """

    max_abs: float
    relative: float
    peak: float
    cosine: float
    ulp: float | None
    unequal: int
    size: int


def is_exact(dtype: Any) -> bool:
    """Whether numbers of a type are equal or not, without a distance in steps."""
    return not jnp.issubdtype(dtype, jnp.inexact)


def coarser(a: Any, b: Any) -> np.dtype[Any]:
    """Of two types of numbers the one with fewer digits; floats before integers."""
    floats = [dtype for dtype in (a, b) if not is_exact(dtype)]
    if not floats:
        return np.dtype(a)
    return np.dtype(max(floats, key=lambda dtype: float(jnp.finfo(dtype).eps)))


def measure(a: np.ndarray, b: np.ndarray) -> Measures:
    """How far `a` is from `b`, which have the same shape."""
    step = coarser(a.dtype, b.dtype)
    step = step if is_exact(step) else jnp.finfo(step).dtype  # of complex ones: real
    wide = [side for side in (a, b) if side.dtype in (np.float64, np.complex128)]
    scale = _scale(max(map(_largest, wide), default=1.0))
    sums, peaks = np.zeros(5), np.zeros(4)
    for pieces in _pieces(a, b):
        more, high = _measured(*pieces, step, scale)
        sums, peaks = sums + more, np.maximum(peaks, high)
    apart, first, second, product = sums[:4].tolist()
    most, largest, steps, is_torn = peaks.tolist()
    unequal = int(sums[4])
    if is_exact(a.dtype) and is_exact(b.dtype):  # float64 has not all integers
        unequal = int(np.count_nonzero(a != b))
        most = max(most, float(unequal > 0))
    ulp = None if is_exact(step) else steps
    if is_torn:
        lost, worst = math.inf, None if ulp is None else math.inf
        return Measures(lost, lost, lost, math.nan, worst, unequal, a.size)
    norms = math.sqrt(first) * math.sqrt(second)
    cosine = product / norms if norms else 0.0
    cosine = min(1.0, max(-1.0, cosine)) if apart else 1.0
    relative = _ratio(math.sqrt(apart), math.sqrt(second))
    return Measures(most, relative, _ratio(most, largest), cosine, ulp, unequal, a.size)


def _measured(
    a: np.ndarray, b: np.ndarray, step: np.dtype[Any], scale: float
) -> tuple[list[Any], list[Any]]:
    """What a piece of each adds to the sums over all, and what is largest in it.

    Returns:
        The sums of difference², a², b² and a·b, and how many are unequal; the largest
        difference, number and distance in steps, and whether a value that is not finite
        tears the two apart.
    """
    same, is_torn = a == b, False
    finite = np.isfinite(a) & np.isfinite(b)
    if not finite.all():
        same |= np.isnan(a) & np.isnan(b)
        is_torn = (~finite & ~same).any()
        a, b = a[finite], b[finite]
    unequal = same.size - np.count_nonzero(same)
    with np.errstate(over="ignore"):
        apart = a - b
    steps = _steps(a, b, step) if unequal and not is_exact(step) else 0.0
    peaks = [np.abs(apart).max(initial=0), np.abs(b).max(initial=0), steps, is_torn]
    if scale != 1:
        a, b = a * scale, b * scale
        apart = a - b
    pairs = ((apart, apart), (a, a), (b, b), (a, b))
    # without the threads of a matrix library, which wait for each other
    return [*(np.einsum("i,i->", *pair) for pair in pairs), unequal], peaks


def _ratio(above: float, below: float) -> float:
    if above == 0:
        return 0.0
    return above / below if below else math.inf


def _scale(largest: float) -> float:
    """By what to multiply so that squares neither overflow nor vanish."""
    if largest == 0 or 1e-140 < largest < 1e140:
        return 1.0
    return 2.0 ** -max(-1000, min(1000, round(math.log2(largest))))


def _flat(array: np.ndarray) -> Iterator[np.ndarray]:
    """Pieces of an array in float64; a complex number is two."""
    rows: Any = array.reshape(-1) if array.flags.c_contiguous else array.flat
    for start in range(0, array.size, PIECE):
        piece = np.asarray(rows[start : start + PIECE])
        wide = np.complex128 if np.iscomplexobj(piece) else np.float64
        with np.errstate(invalid="ignore"):  # of NaNs that signal
            piece = np.ascontiguousarray(piece, wide)
        yield piece.view(np.float64)


def _pieces(a: np.ndarray, b: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    if np.iscomplexobj(a) != np.iscomplexobj(b):  # then both have two parts
        with np.errstate(invalid="ignore"):
            a, b = (side.astype(np.complex128) for side in (a, b))
    return zip(_flat(a), _flat(b))


def _largest(array: np.ndarray) -> float:
    sizes = map(np.abs, _flat(array))
    return max((s.max(initial=0, where=np.isfinite(s)) for s in sizes), default=0.0)


_BITS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def _steps(x: np.ndarray, y: np.ndarray, dtype: np.dtype[Any]) -> float:
    """The largest number of steps of a type of floats between two finite numbers."""
    if x.size == 0:
        return 0.0
    bits = _BITS[dtype.itemsize]
    with np.errstate(over="ignore", invalid="ignore"):
        raw = [side.astype(dtype).view(bits) for side in (x, y)]
    if (raw[0] ^ raw[1]).min() >= 0:  # all on the same side of zero
        return float((np.maximum(*raw) - np.minimum(*raw)).max())
    places = [(side & np.iinfo(bits).max).astype(np.uint64) for side in raw]
    apart = np.maximum(*places) - np.minimum(*places)
    return float(np.where((raw[0] ^ raw[1]) < 0, places[0] + places[1], apart).max())


# Limits.


def usual(dtype: np.dtype[Any]) -> float:
    """The relative error that a deep model may have from rounding alone."""
    if is_exact(dtype):
        return 0.0
    return _TOLERANCES.get(dtype.name, 4 * float(jnp.finfo(dtype).eps))


class Limits:
    """Limits made ready.

    Args:
        tolerance: As for `compare`.
        absolute: As for `compare`.
        factor: As `noise_factor` for `compare`.
    """

    def __init__(self, tolerance: Any, absolute: float, factor: float):
        self._rules = by_selector(tolerance)
        for number in (*(value for _, value in self._rules), absolute, factor):
            is_number = isinstance(number, int | float | np.number)
            if not is_number or isinstance(number, bool) or not number >= 0:
                raise ValueError(
                    f"compare: a tolerance is a number from 0, and this is {number!r}."
                )
        self.absolute, self._factor = float(absolute), float(factor)

    def of(self, a: Entry, b: Entry, floor: Measures | None) -> tuple[float, float]:
        """What `relative` and `peak` of a pair of arrays may be.

        Args:
            a: Of the first side.
            b: Of the second.
            floor: What rounding alone does there, if that is known.
        """
        dtype = coarser(a.dtype, b.dtype)
        if floor is not None:
            least = 0.0 if is_exact(dtype) else float(jnp.finfo(dtype).eps) / 2
            relative = self._factor * max(floor.relative, least)
            return relative, self._factor * max(floor.peak, 2 * least)
        given = (value for select, value in self._rules if select(a.site))
        relative = float(next(given, usual(dtype)))
        return relative, PEAK * relative

    def why(self, found: Measures, relative: float, peak: float) -> str:
        """Why a pair counts as different; empty when it does not."""
        if math.isinf(found.max_abs):
            return "not finite in one of them"
        if found.max_abs <= self.absolute:
            return ""
        if found.relative > relative:
            return "relative error"
        return "one number far off" if found.peak > peak else ""
