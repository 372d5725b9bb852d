# SPDX-License-Identifier: Apache-2.0
"""Decoding: one position of attention, with a cache of those before.

A step says what the cache will hold, and leaves writing to the layer: nothing has
changed if something after it fails. A step past the end is an error, or, where the
index is not known because the call is traced, gives NaN and leaves the cache alone.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.experimental import checkify

from treetap._core.errors import StructureError
from treetap._nn.attention import over_weights
from treetap._nn.parameters import where


class Step(NamedTuple):
    """One position decoded.

    Attributes:
        keys: All keys, with the new one.
        values: All values, with the new one.
        following: Where the next position goes.
        seen: Which of them the query sees.
        has_room: Whether there was room, if that is known only when the program runs.
    """

    keys: jax.Array
    values: jax.Array
    following: jax.Array
    seen: jax.Array
    has_room: Any

    def write(self, layer: Any) -> None:
        """Put it into the cache of a layer."""
        layer.cached_key.set_value(self.keys)
        layer.cached_value.set_value(self.values)
        layer.cache_index.set_value(self.following)


def decoded(layer: Any, query: Any, key: Any, value: Any, mask: Any) -> Step:
    """Return what the cache will hold with this position, and what the query sees."""
    if layer.cached_key is None or layer.cached_value is None:
        raise StructureError(
            f"{where(layer)}: decoding needs a cache. Make one with `view(model, "
            "decode=True, batch_size=..., max_length=...)` or `init_cache`."
        )
    *batch, length, heads, depth = layer.cached_key.get_value().shape
    expected = (*batch, 1, heads, depth)
    if key.shape != expected or query.shape[:-2] != expected[:-2]:
        raise StructureError(
            f"{where(layer)}: the cache takes one position at a time for a batch of "
            f"{tuple(batch)}: keys {expected}, got {key.shape} and queries "
            f"{query.shape}."
        )
    index = layer.cache_index.get_value()
    has_room = _has_room(layer, index, length)
    axis = len(batch)  # of positions

    def put(cached: Any, new: jax.Array) -> jax.Array:
        old, new = cached.get_value(), new.astype(cached.dtype)
        if has_room is not None:
            kept = lax.dynamic_slice_in_dim(old, index, 1, axis)
            new = jnp.where(has_room, new, kept)
        return lax.dynamic_update_slice_in_dim(old, new, index, axis)

    shape = (*(1,) * (axis + 2), length)
    seen = lax.broadcasted_iota(jnp.int32, shape, axis + 2) <= index
    if mask is not None:
        weights = (*batch, layer.num_heads, 1, length)
        mask = over_weights(layer, "mask", mask, weights)
        seen = jnp.logical_and(seen, mask)
    step = 1 if has_room is None else has_room.astype(index.dtype)
    keys, values = put(layer.cached_key, key), put(layer.cached_value, value)
    return Step(keys, values, index + step, seen, has_room)


def _has_room(layer: Any, index: Any, length: int) -> Any:
    """Refuse a step past the end; return whether there is room, if not known yet."""
    if isinstance(index, Tracer):
        has_room = index < length
        checkify.debug_check(
            has_room,
            f"{where(layer)}: the cache of {length} positions is full.",
        )
        return has_room
    if int(index) >= length:
        raise StructureError(
            f"{where(layer)}: the cache of {length} positions is full. Make a "
            "longer one with `view(model, decode=True, batch_size=..., "
            "max_length=...)`."
        )
    return None
