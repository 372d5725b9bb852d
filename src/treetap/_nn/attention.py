# SPDX-License-Identifier: Apache-2.0
"""Attention: values weighed by how well their keys match a query; and masks for it.

Arrays are `[batch..., length, heads, depth]`. The weights are a site that captures can
select, unless a fused implementation is asked for: that one never has them.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from treetap._capture.listening import listening
from treetap._core.errors import StructureError
from treetap._core.variables.kinds import Intermediate
from treetap._core.wording import typed
from treetap._nn.dtypes import promote_dtype as default_promote
from treetap._nn.parameters import (
    Array,
    Dtype,
    Precision,
    Promote,
    Shape,
    broadcastable,
    check_rate,
    where,
)

Implementation = Literal["xla", "cudnn"] | None


def dot_product_attention(  # noqa: PLR0917 - the arguments are those of NNX
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Dtype | None = None,
    precision: Precision = None,
    module: Any = None,
    promote_dtype: Promote = default_promote,
    is_causal: bool = False,
    implementation: Implementation = None,
) -> jax.Array:
    """Weigh values by the softmax of the products of queries and keys.

    There may be fewer heads of keys and values than of queries: each then serves a
    group of query heads.

    Args:
        query: `[batch..., queries, heads, depth]`.
        key: `[batch..., keys, heads, depth]`.
        value: `[batch..., keys, heads, depth of the values]`.
        bias: Added to the products; broadcasts to `[batch..., heads, queries, keys]`.
        mask: Which keys a query sees; broadcasts to the same shape.
        broadcast_dropout: Whether batch and heads drop the same weights.
        dropout_rng: The key to drop weights with.
        dropout_rate: The share of weights to drop.
        deterministic: Whether to drop none.
        dtype: The dtype to compute in; without it, the one that query, key and value
            promote to. The softmax is in float32 or wider.
        precision: As for `jax.lax.dot_general`.
        module: A Module that sows the weights, as `attention_weights`. Without it they
            are a tap of that name.
        promote_dtype: What brings the arrays to one dtype, called as `promote_dtype`.
        is_causal: Whether a query sees only keys up to its own position.
        implementation: `"xla"` or `"cudnn"`: use `jax.nn.dot_product_attention`, which
            has no weights to show and no dropout.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> x = jnp.ones((1, 5, 2, 4))
        >>> tt.dot_product_attention(x, x, x, is_causal=True).shape
        (1, 5, 2, 4)
    """
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    name = "dot_product_attention"
    shape = weights_shape(name, query, key, value)
    check_rate(name, "dropout_rate", dropout_rate)
    mask = over_weights(name, "mask", mask, shape)
    bias = over_weights(name, "bias", bias, shape)
    dropping = dropout_rate > 0 and not deterministic
    if implementation is not None:
        _check_fused(query, value, dropping, precision, module, implementation)
        bias = None if bias is None else bias.astype(query.dtype)
        arrays = (query, key, value, bias, mask)
        return _fused(arrays, is_causal, implementation)
    if is_causal:
        causal = jnp.tri(*shape[-2:], dtype=bool)  # to its own position, and before
        causal = jnp.reshape(causal, (1,) * (len(shape) - 2) + shape[-2:])
        mask = combine_masks(mask, causal, dtype=bool)
    weights = _weights(query, key, bias, mask, precision, shape)
    if module is not None:
        module.sow(Intermediate, "attention_weights", weights)
    elif listening.value is not None:
        from treetap._capture.emit import tap  # only if somebody listens

        weights = tap(weights, "attention_weights")
    if dropping:
        keep = 1.0 - dropout_rate
        kept = _kept(dropout_rng, keep, shape, broadcast_dropout).astype(weights.dtype)
        weights = weights * (kept / jnp.asarray(keep or 1.0, weights.dtype))
    return _summed(weights, value, precision)


def weights_shape(layer: Any, query: Any, key: Any, value: Any) -> Shape:
    """Return the shape of the weights: `[batch..., heads, queries, keys]`.

    Arrays that do not fit together are refused, in the words for what does not.
    """

    def refuse(what: str) -> StructureError:
        texts = f"query {typed(query)}, key {typed(key)}, value {typed(value)}"
        return StructureError(f"{where(layer)}: {what}; got {texts}.")

    if not query.ndim == key.ndim == value.ndim or query.ndim < 3:
        raise refuse("query, key and value must be of the same rank, at least 3")
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise refuse("batch dims must match")
    if key.shape[-3] != value.shape[-3]:
        raise refuse("key and value lengths must match")
    if query.shape[-1] != key.shape[-1]:
        raise refuse("query and key depths must match")
    if key.shape[-2] != value.shape[-2]:
        raise refuse("key and value heads must match")
    if key.shape[-2] == 0 or query.shape[-2] % key.shape[-2]:
        raise refuse("the query heads must be a multiple of the key heads")
    return (*query.shape[:-3], query.shape[-2], query.shape[-3], key.shape[-3])


def over_weights(
    layer: Any, name: str, given: Array | None, shape: Shape
) -> jax.Array | None:
    """Return a mask or bias with as many axes as the weights, each theirs or 1."""
    if given is None:
        return None
    what = "[batch..., heads, queries, keys]"
    given = broadcastable(layer, name, given, what, shape)
    return given.astype(bool) if name == "mask" else given


def _check_fused(  # noqa: PLR0917 - what a fused implementation may lack
    query: Any, value: Any, dropping: bool, precision: Any, module: Any, name: Any
) -> None:
    """Refuse what a fused implementation cannot do."""
    if name not in ("xla", "cudnn"):
        raise StructureError(
            "dot_product_attention: `implementation` must be None, 'xla' or 'cudnn', "
            f"got {name!r}."
        )
    lacks = {
        "drop weights": dropping,
        "show its weights to `module`": module is not None,
        "compute in a `precision`": precision is not None,
        "take values of another depth": query.shape[-1] != value.shape[-1],
    }
    if asked := [what for what, is_asked in lacks.items() if is_asked]:
        raise StructureError(
            f"dot_product_attention: implementation={name!r} cannot "
            f"{' or '.join(asked)}. Leave `implementation` out."
        )


def _fused(arrays: tuple[Any, ...], causal: bool, name: Any) -> jax.Array:
    """Call JAX's implementation, which knows one batch axis."""
    shape = arrays[0].shape
    batch = shape[:-3]

    def with_one_batch_axis(x: Any) -> Any:
        x = jnp.broadcast_to(x, batch + x.shape[-3:])
        return jnp.reshape(x, (math.prod(batch), *x.shape[-3:]))

    arrays = jax.tree.map(with_one_batch_axis, arrays)  # those that are not None
    out = jax.nn.dot_product_attention(*arrays, is_causal=causal, implementation=name)
    return jnp.reshape(out, shape)


def _weights(  # noqa: PLR0917 - the parts of one formula
    query: Any, key: Any, bias: Any, mask: Any, precision: Any, shape: Shape
) -> jax.Array:
    """Return the weights, `[batch..., heads, queries, keys]`."""
    dtype = query.dtype
    query = query / jnp.sqrt(query.shape[-1]).astype(dtype)
    heads = key.shape[-2]
    grouped = (*query.shape[:-2], heads, query.shape[-2] // heads, query.shape[-1])
    query = jnp.reshape(query, grouped)
    logits = jnp.einsum("...qhgd,...khd->...hgqk", query, key, precision=precision)
    logits = jnp.reshape(logits, shape)
    logits = logits.astype(jnp.promote_types(dtype, jnp.float32))
    if bias is not None:
        logits = logits + bias.astype(logits.dtype)
    if mask is not None:
        lowest = jnp.asarray(jnp.finfo(logits.dtype).min, logits.dtype)
        logits = jnp.where(mask, logits, lowest)
    return jax.nn.softmax(logits).astype(dtype)


def _kept(key: Any, keep: float, shape: Shape, together: bool) -> jax.Array:
    """Return which weights to keep."""
    if key is None:
        raise StructureError(
            "dot_product_attention: weights are to be dropped, but there is no "
            "`dropout_rng`. Give one, or say `deterministic=True`."
        )
    if together:
        shape = (1,) * (len(shape) - 2) + shape[-2:]
    return jax.random.bernoulli(key, keep, shape)


def _summed(weights: jax.Array, value: jax.Array, precision: Any) -> jax.Array:
    """Return the values, weighed: `[batch..., queries, heads, depth]`."""
    *batch, heads, queries, keys = weights.shape
    groups = value.shape[-2]
    grouped = jnp.reshape(weights, (*batch, groups, heads // groups, queries, keys))
    out = jnp.einsum("...hgqk,...khd->...qhgd", grouped, value, precision=precision)
    return jnp.reshape(out, (*batch, queries, heads, value.shape[-1]))


def make_attention_mask(
    query_input: Array,
    key_input: Array,
    pairwise_fn: Callable[..., Any] = jnp.multiply,
    extra_batch_dims: int = 0,
    dtype: Dtype = jnp.float32,
) -> jax.Array:
    """Make a mask from something about each query and each key.

    Args:
        query_input: `[batch..., queries]`.
        key_input: `[batch..., keys]`.
        pairwise_fn: Whether the two go together.
        extra_batch_dims: How many axes of size 1 to put in front.
        dtype: The dtype of the mask.

    Returns:
        `[batch..., 1, queries, keys]`.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> words = jnp.array([[1, 1, 0]])  # the last is padding
        >>> tt.make_attention_mask(words, words)[0, 0]
        Array([[1., 1., 0.],
               [1., 1., 0.],
               [0., 0., 0.]], dtype=float32)
    """
    if extra_batch_dims < 0:
        raise StructureError(
            "make_attention_mask: `extra_batch_dims` must be a non-negative integer, "
            f"got {extra_batch_dims}."
        )
    one, two = jnp.asarray(query_input), jnp.asarray(key_input)
    if not (1 <= one.ndim == two.ndim and _broadcast(one.shape[:-1], two.shape[:-1])):
        raise StructureError(
            "make_attention_mask: expected [batch..., queries] and [batch..., keys], "
            f"got {typed(one)} and {typed(two)}."
        )
    mask = pairwise_fn(jnp.expand_dims(one, -1), jnp.expand_dims(two, -2))
    axes = (*range(extra_batch_dims), extra_batch_dims + mask.ndim - 2)
    return jnp.expand_dims(mask, axes).astype(dtype)


def make_causal_mask(
    x: Array, extra_batch_dims: int = 0, dtype: Dtype = jnp.float32
) -> jax.Array:
    """Make a mask by which each position sees itself and those before it.

    Args:
        x: `[batch..., length]`; only the shape counts.
        extra_batch_dims: How many axes of size 1 to put in front.
        dtype: The dtype of the mask.

    Returns:
        `[batch..., 1, length, length]`.
    """
    shape = np.shape(x)
    if not shape:
        raise StructureError(
            "make_causal_mask: expected [batch..., length], got a single value."
        )
    positions = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    return make_attention_mask(
        positions, positions, jnp.greater_equal, extra_batch_dims, dtype
    )


def _broadcast(one: tuple[int, ...], two: tuple[int, ...]) -> bool:
    """Whether sizes agree or are 1."""
    return all(n == m or 1 in (n, m) for n, m in zip(one, two))


def combine_masks(*masks: Array | None, dtype: Dtype = jnp.float32) -> Any:
    """Make a mask of what all masks let through; None if there is none.

    Args:
        *masks: Masks of one rank, or None.
        dtype: The dtype of the result.
    """
    arrays = [jnp.asarray(mask) for mask in masks if mask is not None]
    if not arrays:
        return None
    texts = ", ".join(map(typed, arrays))
    if len({array.ndim for array in arrays}) != 1:
        raise StructureError(f"combine_masks: masks must have the same rank: {texts}.")
    if not all(_broadcast(arrays[0].shape, array.shape) for array in arrays):
        raise StructureError(f"combine_masks: masks must broadcast: {texts}.")
    truths = (array.astype(bool) for array in arrays)
    return functools.reduce(jnp.logical_and, truths).astype(dtype)
