# SPDX-License-Identifier: Apache-2.0
"""Moments: the mean and variance that normalising layers divide by.

They are computed in float32 or wider, whatever the inputs are, over axes of the array
and, if asked, over a named axis of a mapping as well.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from treetap._core.errors import StructureError
from treetap._nn.parameters import text_of, where


class Across(NamedTuple):
    """How to take moments.

    Attributes:
        axis_name: An axis of a surrounding mapping to take the mean over as well.
        axis_index_groups: Which of its indices belong together.
        is_fast: Whether to take the variance from the mean square.
    """

    axis_name: Any = None
    axis_index_groups: Any = None
    is_fast: bool = True

    def mean(self, *values: jax.Array) -> list[jax.Array]:
        """Means over the named axis, in one collective."""
        if self.axis_name is None:
            return list(values)
        groups = self.axis_index_groups
        together = lax.pmean(
            jnp.stack(values),
            self.axis_name,
            axis_index_groups=None if groups is None else [list(g) for g in groups],
        )
        return list(together)


def wide(x: Any) -> jax.Array:
    """The array in float32, or in what is wider."""
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def checked_mask(layer: Any, mask: Any, shape: tuple[int, ...]) -> Any:
    """A mask of the elements that count, of the shape of the inputs."""
    if mask is None:
        return None
    mask = jnp.asarray(mask)
    if mask.dtype != jnp.bool_:
        raise StructureError(
            f"{where(layer)}: `mask` says which elements count, so it must be boolean, "
            f"not {text_of(mask)}."
        )
    fits = mask.ndim <= len(shape) and all(
        m in (1, s) for m, s in zip(mask.shape[::-1], shape[::-1])
    )
    if not fits:
        raise StructureError(
            f"{where(layer)}: `mask` must broadcast to the inputs of shape {shape}, "
            f"got {text_of(mask)}."
        )
    mask = jnp.reshape(mask, (1,) * (len(shape) - mask.ndim) + mask.shape)
    return jnp.broadcast_to(mask, shape)


def _square(x: jax.Array) -> jax.Array:
    return jnp.square(jnp.abs(x)) if jnp.iscomplexobj(x) else jnp.square(x)


def mean_square(
    x: jax.Array, axes: Sequence[int], across: Across, mask: Any
) -> jax.Array:
    """The mean of the squares over axes, which stay with size 1."""
    taken = jnp.mean(_square(x), axis=tuple(axes), keepdims=True, where=mask)
    return across.mean(taken)[0]


def moments(
    x: jax.Array, axes: Sequence[int], across: Across, mask: Any
) -> tuple[jax.Array, jax.Array]:
    """The mean and the biased variance over axes, which stay with size 1."""
    taken = tuple(axes)
    mean = jnp.mean(x, axis=taken, keepdims=True, where=mask)
    if across.is_fast:
        square = jnp.mean(_square(x), axis=taken, keepdims=True, where=mask)
        mean, square = across.mean(mean, square)
        return mean, jnp.maximum(0.0, square - _square(mean))
    (mean,) = across.mean(mean)
    spread = jnp.mean(_square(x - mean), axis=taken, keepdims=True, where=mask)
    return mean, across.mean(spread)[0]
