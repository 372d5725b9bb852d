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
from treetap._nn.attention import combine_masks, over_weights
from treetap._nn.parameters import where


class Step(NamedTuple):
    """One position decoded.

    Attributes:
        keys: All keys, with the new one.
        values: All values, with the new one.
        following: Where the next position goes.
        seen: Which of them the query sees.
        has_room: Whether there was room; a traced step has no effect otherwise.
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
    has_room = index < length if isinstance(index, Tracer) else int(index) < length
    _check_room(layer, has_room, length)
    axis = len(batch)  # of positions

    def put(cached: Any, new: jax.Array) -> jax.Array:
        old, new = cached.get_value(), new.astype(cached.dtype)
        if has_room is not True:
            kept = lax.dynamic_slice_in_dim(old, index, 1, axis)
            new = jnp.where(has_room, new, kept)
        return lax.dynamic_update_slice_in_dim(old, new, index, axis)

    shape = (*(1,) * (axis + 2), length)
    written = lax.broadcasted_iota(jnp.int32, shape, axis + 2) <= index
    mask = over_weights(layer, "mask", mask, (*batch, layer.num_heads, 1, length))
    seen = combine_masks(written, mask, dtype=bool)
    following = index + jnp.asarray(has_room, index.dtype)
    keys, values = put(layer.cached_key, key), put(layer.cached_value, value)
    return Step(keys, values, following, seen, has_room)


def _check_room(layer: Any, has_room: Any, length: int) -> None:
    """Refuse a step past the end; a traced one is refused under `checkify`."""
    message = f"{where(layer)}: the cache of {length} positions is full."
    if isinstance(has_room, Tracer):
        checkify.debug_check(has_room, message)
    elif not has_room:
        raise StructureError(
            f"{message} Make a longer one with `view(model, decode=True, "
            "batch_size=..., max_length=...)`."
        )
