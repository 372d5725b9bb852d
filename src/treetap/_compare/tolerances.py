# SPDX-License-Identifier: Apache-2.0
"""Limits: how far apart two arrays may be before they count as different.

Without more knowledge the limit depends on the type of numbers. A third run of the same
computation, in float64 or in another order, tells what rounding alone does to each
site: then the limit is a multiple of that.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from treetap._capture.selectors import as_select
from treetap._compare.measures import Measures, coarser, is_exact
from treetap._compare.sources import Entry
from treetap._core.errors import CaptureError
from treetap._core.wording import shown

FACTOR = 8.0
PEAK = 4.0
_TOLERANCES = {"float64": 1e-10, "float32": 2e-5, "float16": 5e-3, "bfloat16": 4e-2}


class Limit(NamedTuple):
    """How large `relative` and `peak` of some Measures may be."""

    relative: float
    peak: float


EXACT = Limit(0.0, 0.0)


def usual(dtype: Any) -> float:
    """The relative error that a deep model may have from rounding alone."""
    found = _TOLERANCES.get(np.dtype(dtype).name)
    return 4 * float(jnp.finfo(dtype).eps) if found is None else found


class Limits:
    """Limits made ready.

    Args:
        tolerance: As for `compare`.
        absolute: As for `compare`.
        factor: As `noise_factor` for `compare`.
        name: The public function at work, for messages.
    """

    def __init__(self, tolerance: Any, absolute: float, factor: float, name: str):
        given = tolerance if isinstance(tolerance, Mapping) else {"**": tolerance}
        self._rules = [(as_select(key), value) for key, value in given.items()]
        numbers = [value for _, value in self._rules if value is not None]
        for number in (*numbers, absolute, factor):
            is_number = isinstance(number, int | float | np.number)
            if not is_number or isinstance(number, bool) or not number >= 0:
                raise ValueError(
                    f"{name}: a tolerance is a number from 0, and this is {number!r}."
                )
        self.absolute, self._factor = float(absolute), float(factor)

    def of(self, a: Entry, b: Entry, floor: Measures | None) -> Limit:
        """The limit for a pair of arrays.

        Args:
            a: Of the first side.
            b: Of the second.
            floor: What rounding alone does there, if that is known.
        """
        dtype = coarser(a.dtype, b.dtype)
        if floor is not None:
            least = 0.0 if is_exact(dtype) else float(jnp.finfo(dtype).eps) / 2
            return Limit(
                self._factor * max(floor.relative, least),
                self._factor * max(floor.peak, 2 * least),
            )
        for select, value in self._rules:
            if value is not None and select(a.site):
                return Limit(float(value), PEAK * float(value))
        if is_exact(dtype):
            return EXACT
        return Limit(usual(dtype), PEAK * usual(dtype))

    def why(self, found: Measures, limit: Limit) -> str:
        """Why a pair counts as different; empty when it does not."""
        if math.isinf(found.max_abs):
            return "not finite in one of them"
        if found.max_abs <= self.absolute:
            return ""
        if found.relative > limit.relative:
            return "relative error"
        return "one number far off" if found.peak > limit.peak else ""


def refuse_noise(missing: list[str], name: str) -> CaptureError:
    """The error for a third run that lacks sites."""
    told = ", ".join(map(shown, missing[:8])) + (" …" if len(missing) > 8 else "")
    return CaptureError(
        f"{name}: `noise` lacks {len(missing)} of the sites compared: {told}. It is a "
        "run of the same computation as `a` or as `b`, with the same names."
    )
