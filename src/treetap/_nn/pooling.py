# SPDX-License-Identifier: Apache-2.0
"""Pooling: windows that slide over the middle axes of an array.

Inputs are `[batch..., window axes..., features]`, with any number of batch axes.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from treetap._core.errors import StructureError
from treetap._core.wording import typed
from treetap._nn.parameters import Array, as_static, is_positive

Padding = str | Sequence[tuple[int, int]]


def pool(  # noqa: PLR0917 - the arguments are those of NNX
    inputs: Array,
    init: Any,
    reduce_fn: Callable[..., Any],
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Padding = "VALID",
) -> jax.Array:
    """Reduce each window.

    Args:
        inputs: `[batch..., window axes..., features]`.
        init: What the reduction begins with; the dtype of the inputs must hold it.
        reduce_fn: The reduction, of two arrays.
        window_shape: The size of the window on each of its axes.
        strides: How far the window moves on each; by 1 without it.
        padding: `"SAME"`, `"VALID"`, or how much before and after each window axis.

    Examples:
        >>> import jax, jax.numpy as jnp, treetap as tt
        >>> tt.pool(jnp.ones((1, 4, 1)), 0.0, jax.lax.add, (2,), (2,))[0, :, 0]
        Array([2., 2.], dtype=float32)
    """
    inputs = jnp.asarray(inputs)
    window = _numbers("window_shape", window_shape)
    steps = (1,) * len(window) if strides is None else _numbers("strides", strides)
    if len(steps) != len(window):
        raise StructureError(
            f"pool: window_shape={window} and strides={steps} must be equally long."
        )
    batch = inputs.ndim - len(window) - 1
    if batch < 0:
        raise StructureError(
            f"pool: a window of {window} needs inputs with {len(window)} axes and the "
            f"features after them, got {typed(inputs)}."
        )
    start = np.asarray(init, inputs.dtype)
    if not jnp.issubdtype(inputs.dtype, jnp.inexact) and start != init:
        raise StructureError(
            f"pool: `init` is {init}, which {inputs.dtype} cannot hold."
        )
    ahead = (1,) * batch
    return lax.reduce_window(
        inputs,
        start,
        reduce_fn,
        (*ahead, *window, 1),
        (*ahead, *steps, 1),
        _padding(padding, len(window), batch),
    )


def _numbers(name: str, value: Any) -> tuple[int, ...]:
    """Return sizes given as any sequence."""
    sizes = as_static(value)
    if not isinstance(sizes, tuple) or not all(map(is_positive, sizes)):
        raise StructureError(
            f"pool: `{name}` must be a sequence of positive integers, one for each "
            f"window axis; got {value!r}."
        )
    return sizes


def _padding(padding: Any, axes: int, batch: int) -> Any:
    """Return padding of all axes."""
    if isinstance(padding, str) and padding.upper() in ("SAME", "SAME_LOWER", "VALID"):
        return padding.upper()
    given = padding if isinstance(padding, Sequence) else ()
    pairs = [tuple(pair) if isinstance(pair, Sequence) else () for pair in given]
    if len(pairs) != axes or any(len(pair) != 2 for pair in pairs):
        raise StructureError(
            f"pool: `padding` must be a name, or a pair for each of the {axes} window "
            f"axes; got {padding!r}."
        )
    return [(0, 0)] * batch + pairs + [(0, 0)]


def avg_pool(
    inputs: Array,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Padding = "VALID",
    count_include_pad: bool = True,
) -> jax.Array:
    """Average each window.

    Args:
        inputs: `[batch..., window axes..., features]`.
        window_shape: The size of the window on each of its axes.
        strides: How far the window moves on each; by 1 without it.
        padding: `"SAME"`, `"VALID"`, or how much before and after each window axis.
        count_include_pad: Whether added zeros count as elements of the window.
    """
    total = pool(inputs, 0.0, lax.add, window_shape, strides, padding)
    if count_include_pad:
        return total / math.prod(window_shape)
    axes = len(window_shape) + 1
    ones = jnp.ones((1,) * (total.ndim - axes) + (*np.shape(inputs)[-axes:-1], 1))
    count = pool(ones, 0.0, lax.add, window_shape, strides, padding)
    return total / count.astype(total.dtype)


def max_pool(
    inputs: Array,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Padding = "VALID",
) -> jax.Array:
    """Take the largest element of each window.

    Args:
        inputs: `[batch..., window axes..., features]`.
        window_shape: The size of the window on each of its axes.
        strides: How far the window moves on each; by 1 without it.
        padding: `"SAME"`, `"VALID"`, or how much before and after each window axis.
    """
    return pool(
        inputs, _bound(inputs, -np.inf), lax.max, window_shape, strides, padding
    )


def min_pool(
    inputs: Array,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Padding = "VALID",
) -> jax.Array:
    """Take the smallest element of each window.

    Args:
        inputs: `[batch..., window axes..., features]`.
        window_shape: The size of the window on each of its axes.
        strides: How far the window moves on each; by 1 without it.
        padding: `"SAME"`, `"VALID"`, or how much before and after each window axis.
    """
    return pool(inputs, _bound(inputs, np.inf), lax.min, window_shape, strides, padding)


def _bound(inputs: Array, infinity: float) -> Any:
    """Return an infinity, or the end of the range of integers."""
    dtype = jnp.asarray(inputs).dtype
    if dtype == jnp.bool_:
        return infinity > 0
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        return limits.min if infinity < 0 else limits.max
    return infinity
