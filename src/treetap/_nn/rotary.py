# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: positions as rotations of queries and keys.

Features are taken in pairs, the first half with the second; each pair is turned by an
angle that grows with the position, every pair at a speed of its own. So the product of
a query and a key depends on how far apart they are.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from treetap._core.errors import StructureError
from treetap._core.trees.attributes import data
from treetap._core.variables.values import broadcasts
from treetap._core.variables.variable import Variable
from treetap._core.wording import typed
from treetap._modules.module import Module
from treetap._nn.attention import dot_product_attention
from treetap._nn.parameters import Array, held, where


class RoPE(Module):
    """Turn features by their position (rotary position embedding, arXiv:2104.09864).

    Args:
        theta: How much slower the last pair of features turns than the first.
        embedding_size: The size of the last axis of the inputs, to compute all turns
            once, up to `max_seq_len`; without both, each call computes its own.
        max_seq_len: For how many positions.

    Examples:
        >>> import functools, jax.numpy as jnp, treetap as tt
        >>> rope = tt.RoPE(embedding_size=4, max_seq_len=16)
        >>> rope(jnp.ones((5, 4))).shape
        (5, 4)
        >>> attend = functools.partial(tt.dot_product_attention_with_rope, rope=rope)
        >>> layer = tt.MultiHeadAttention(2, 8, attention_fn=attend, rngs=tt.Rngs(0))
        >>> layer(jnp.ones((1, 5, 8)), is_causal=True).shape
        (1, 5, 8)
    """

    def __init__(
        self,
        theta: float = 10000.0,
        embedding_size: int | None = None,
        max_seq_len: int | None = None,
    ):
        self.theta = theta
        self.cached_cos = self.cached_sin = data(None)
        if (embedding_size is None) != (max_seq_len is None):
            raise StructureError(
                "RoPE: give both `embedding_size` and `max_seq_len`, or neither."
            )
        if embedding_size is not None and max_seq_len is not None:
            cos, sin = self._turns(jnp.arange(max_seq_len), embedding_size)
            self.cached_cos, self.cached_sin = Variable(cos), Variable(sin)

    def __call__(self, x: Array, input_positions: Array | None = None) -> jax.Array:
        """Turn `x`.

        Args:
            x: `[..., length, features]`.
            input_positions: Where each element stands, `[length]` or `[..., length]`;
                0, 1, ... without it.
        """
        x = jnp.asarray(x)
        if x.ndim < 2:
            raise StructureError(
                f"{where(self)}: expected [..., length, features], got {typed(x)}."
            )
        length, features = x.shape[-2:]
        cos, sin = held(self.cached_cos), held(self.cached_sin)
        if cos is not None and 2 * cos.shape[-1] != features:
            raise StructureError(
                f"{where(self)}: expected {2 * cos.shape[-1]} features, got {typed(x)}."
            )
        if input_positions is not None:
            positions = self._checked_positions(input_positions, x)
            cos, sin = self._turns(positions, features)
        elif cos is None or len(cos) < length:
            cos, sin = self._turns(jnp.arange(length), features)
        else:
            cos, sin = cos[:length], sin[:length]
        ahead = (1,) * (x.ndim - cos.ndim)
        cos, sin = (jnp.reshape(turn, ahead + turn.shape) for turn in (cos, sin))
        first, second = jnp.split(
            x.astype(jnp.promote_types(x.dtype, cos.dtype)), 2, -1
        )
        turned = [first * cos - second * sin, second * cos + first * sin]
        return jnp.concatenate(turned, -1)

    def _checked_positions(self, positions: Any, x: jax.Array) -> jax.Array:
        """Return positions, if there is one for each element."""
        positions = jnp.asarray(positions)
        shape, sizes = positions.shape, x.shape[:-1]
        if shape[-1:] != sizes[-1:] or not broadcasts(shape, sizes):
            raise StructureError(
                f"{where(self)}: `input_positions` must broadcast to the positions of "
                f"the inputs, {sizes}, got {typed(positions)}."
            )
        return positions

    def _turns(self, positions: jax.Array, features: int) -> tuple[jax.Array, ...]:
        """Return the cosine and sine of each pair's angle, at each position."""
        if features < 2 or features % 2:
            raise StructureError(
                f"{where(self)}: features are turned in pairs, so their number must be "
                f"positive and even, got {features}."
            )
        speeds = 1.0 / self.theta ** (jnp.arange(0, features, 2) / features)
        speeds = jnp.reshape(speeds, (1,) * positions.ndim + (-1,))
        angles = positions[..., None].astype(speeds.dtype) * speeds
        return jnp.cos(angles), jnp.sin(angles)


def dot_product_attention_with_rope(
    query: Array,
    key: Array,
    value: Array,
    *,
    rope: Callable[..., Any],
    input_positions: Array | None = None,
    **kwargs: Any,
) -> jax.Array:
    """Turn queries and keys by their positions, and attend.

    Args:
        query: `[batch..., queries, heads, depth]`.
        key: `[batch..., keys, heads, depth]`.
        value: `[batch..., keys, heads, depth of the values]`.
        rope: What turns them, a `RoPE`: called with an array without the heads, and
            its positions.
        input_positions: Where the queries stand, and the keys if there are as many:
            `[queries]` or `[batch..., queries]`, or with an axis of heads at the end,
            `[..., queries, heads]`. Other keys stand at 0, 1, ...
        **kwargs: For `dot_product_attention`.
    """
    positions = of_heads(input_positions, query)
    beside = positions if key.shape[-3] == query.shape[-3] else None
    if beside is not None and key.shape[-2] != query.shape[-2]:
        beside = of_heads(input_positions, key)
    query, key = turned(rope, query, positions), turned(rope, key, beside)
    return dot_product_attention(query, key, value, **kwargs)


def turned(rope: Callable[..., Any], x: Array, positions: Any) -> jax.Array:
    """Return each head of `x`, turned by itself."""
    axes = (-2, None if positions is None else -1)
    return jax.vmap(rope, in_axes=axes, out_axes=-2)(x, positions)


def of_heads(positions: Any, x: Array) -> Any:
    """Return positions with an axis of heads at the end; None stays None."""
    if positions is None:
        return None
    positions = jnp.asarray(positions)
    length, heads = x.shape[-3:-1]
    if positions.ndim > 1 and positions.shape[-2:] == (length, heads):
        return positions
    return jnp.broadcast_to(positions[..., None], (*positions.shape, heads))


def has_rope(attention_fn: Any) -> bool:
    """Whether a function is `dot_product_attention_with_rope`, or a partial of it."""
    while isinstance(attention_fn, functools.partial):
        attention_fn = attention_fn.func
    return attention_fn is dot_product_attention_with_rope
