# SPDX-License-Identifier: Apache-2.0
"""Counts: how often something is true of a value, without writing out where.

A count is exact beyond 32 bits: a high and a low word, along a last axis of two. What
is counted is computed within the reduction: XLA does so with the operands of one that
has several. Those of a single one it may write out first (for CPUs it cuts it into
windows), and a mask of a value is then as large as the value.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def counted(masks: Sequence[Any], axes: Sequence[int] | None = None) -> list[Any]:
    """How often each of two or more masks is true, over all axes or some."""
    ones = [mask.astype(jnp.uint32) for mask in masks]
    lows = reduced_together(ones, 0, jnp.add, axes)
    return [jnp.stack([jnp.zeros_like(low), low], axis=-1) for low in lows]


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


def count_of(number: int) -> Any:
    """A number as a count."""
    return jnp.array([number >> 32, number % 2**32], jnp.uint32)


def counts_added(first: Any, second: Any) -> Any:
    """The sum of two counts."""
    low = first[..., 1] + second[..., 1]
    carried = (low < first[..., 1]).astype(jnp.uint32)
    return jnp.stack([first[..., 0] + second[..., 0] + carried, low], axis=-1)


def as_number(count: Any) -> Any:
    """A count as one number, rounded."""
    high, low = (count[..., n].astype(jnp.float32) for n in (0, 1))
    return high * 2.0**32 + low
