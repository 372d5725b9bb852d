# SPDX-License-Identifier: Apache-2.0
"""MultiHeadAttention: projections around attention, and a cache to decode with.

Decoding takes one position at a time: its key and value go into the cache at
`cache_index`, and the query sees what is there. The cache has a length; a step past it
is an error, or, where the index is not known because the call is traced, gives NaN.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from treetap._core.errors import StructureError
from treetap._core.trees.attributes import data
from treetap._core.variables.kinds import Cache
from treetap._core.wording import typed
from treetap._modules.module import Module
from treetap._modules.random_streams import Rngs, RngStream
from treetap._nn.attention import (
    Implementation,
    broadcastable,
    check_shapes,
    dot_product_attention,
)
from treetap._nn.decoding import decoded
from treetap._nn.dropout import forked, next_key
from treetap._nn.dtypes import promote_dtype as default_promote
from treetap._nn.linear import LinearGeneral, given
from treetap._nn.normalization import LayerNorm
from treetap._nn.parameters import (
    NO_METADATA,
    Array,
    Dtype,
    Initializer,
    Metadata,
    Precision,
    Promote,
    check_rate,
    check_rngs,
    check_sizes,
    default_kernel_init,
    where,
)
from treetap.initializers import zeros


class MultiHeadAttention(Module):
    """Attention with several heads.

    Args:
        num_heads: The number of heads.
        in_features: The features of the inputs.
        qkv_features: The features of all heads together; `in_features` without it.
        out_features: The features of the outputs; `in_features` without it.
        num_kv_heads: The number of heads of keys and values, if there are fewer: each
            serves a group of query heads.
        in_kv_features: The features of the inputs for keys and values, if they differ.
        dtype: This and the next, as for `Linear`.
        param_dtype: The dtype of the parameters.
        broadcast_dropout: Whether batch and heads drop the same weights.
        dropout_rate: The share of attention weights to drop.
        deterministic: Whether to drop none; `view`, `train` and `eval` set it.
        precision: As for `jax.lax.dot_general`.
        kernel_init: The initializer of the kernels.
        out_kernel_init: That of the last projection, if it is another.
        bias_init: The initializer of the biases.
        out_bias_init: That of the last projection, if it is another.
        use_bias: Whether projections add a bias.
        attention_fn: What computes the attention, called as `dot_product_attention`.
        decode: Whether calls are steps of decoding; `view` sets it.
        normalize_qk: Whether queries and keys are normalised.
        qkv_promote_dtype: What brings inputs and parameters of the first projections to
            one dtype.
        out_promote_dtype: The same for the last.
        ln_promote_dtype: The same for the normalisation.
        qkv_dot_general: What the first projections compute with.
        out_dot_general: What the last one computes with.
        qkv_dot_general_cls: Deprecated; a class of such functions.
        out_dot_general_cls: Deprecated; a class of such functions.
        rngs: Random streams.
        keep_rngs: Whether to keep a stream to drop weights with.
        kernel_metadata: Metadata of the kernels.
        out_kernel_metadata: Metadata of the last kernel.
        bias_metadata: Metadata of the biases.
        out_bias_metadata: Metadata of the last bias.
        query_ln_scale_metadata: Metadata of the scale that normalises queries.
        key_ln_scale_metadata: Metadata of the scale that normalises keys.
        implementation: As for `dot_product_attention`.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> layer = tt.MultiHeadAttention(2, 8, rngs=tt.Rngs(0))
        >>> x = jnp.ones((1, 5, 8))
        >>> layer(x, is_causal=True).shape
        (1, 5, 8)
        >>> decoder = tt.view(layer, decode=True, batch_size=1, max_length=5)
        >>> decoder(x[:, :1]).shape
        (1, 1, 8)
    """

    num_heads: int
    in_features: int
    qkv_features: int
    out_features: int
    in_kv_features: int
    num_kv_heads: int
    query: LinearGeneral
    key: LinearGeneral
    value: LinearGeneral
    query_ln: LayerNorm | None
    key_ln: LayerNorm | None
    cached_key: Any
    cached_value: Any
    cache_index: Any

    def __init__(  # noqa: PLR0917 - the arguments are those of NNX
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        broadcast_dropout: bool = True,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        precision: Precision = None,
        kernel_init: Initializer = default_kernel_init,
        out_kernel_init: Initializer | None = None,
        bias_init: Initializer = zeros,
        out_bias_init: Initializer | None = None,
        use_bias: bool = True,
        attention_fn: Callable[..., Any] = dot_product_attention,
        decode: bool | None = None,
        normalize_qk: bool = False,
        qkv_promote_dtype: Promote = default_promote,
        out_promote_dtype: Promote = default_promote,
        ln_promote_dtype: Promote = default_promote,
        qkv_dot_general: Callable[..., Any] | None = None,
        out_dot_general: Callable[..., Any] | None = None,
        qkv_dot_general_cls: Any = None,
        out_dot_general_cls: Any = None,
        rngs: Rngs,
        keep_rngs: bool = True,
        kernel_metadata: Metadata = NO_METADATA,
        out_kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
        out_bias_metadata: Metadata = NO_METADATA,
        query_ln_scale_metadata: Metadata = NO_METADATA,
        key_ln_scale_metadata: Metadata = NO_METADATA,
        implementation: Implementation = None,
    ):
        self._set_sizes(
            num_heads=num_heads,
            in_features=in_features,
            qkv_features=in_features if qkv_features is None else qkv_features,
            out_features=in_features if out_features is None else out_features,
            in_kv_features=in_features if in_kv_features is None else in_kv_features,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        )
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.broadcast_dropout = broadcast_dropout
        self.dropout_rate = check_rate(
            type(self).__name__, "dropout_rate", dropout_rate
        )
        self.deterministic = deterministic
        self.precision = precision
        self.use_bias = use_bias
        self.attention_fn = attention_fn
        self.decode = decode
        self.normalize_qk = normalize_qk
        self.qkv_promote_dtype = qkv_promote_dtype
        self.out_promote_dtype = out_promote_dtype
        self.ln_promote_dtype = ln_promote_dtype
        self.qkv_dot_general = qkv_dot_general
        self.out_dot_general = out_dot_general
        self.qkv_dot_general_cls = qkv_dot_general_cls
        self.out_dot_general_cls = out_dot_general_cls
        self.implementation = implementation
        self.head_dim = self._checked_head_dim()
        check_rngs(self, rngs)
        first = (kernel_init, bias_init, kernel_metadata, bias_metadata)
        self._make_projections(first, rngs)
        self._make_norms(query_ln_scale_metadata, key_ln_scale_metadata, rngs)
        last = (
            kernel_init if out_kernel_init is None else out_kernel_init,
            bias_init if out_bias_init is None else out_bias_init,
            out_kernel_metadata or kernel_metadata,
            out_bias_metadata or bias_metadata,
        )
        self._make_last(last, rngs)
        keeps = keep_rngs and dropout_rate > 0
        self.rngs = forked(self, rngs if keeps else None, "dropout")
        self.cached_key = data(None)
        self.cached_value = data(None)
        self.cache_index = data(None)

    def _set_sizes(self, **sizes: int) -> None:
        for name, size in zip(sizes, check_sizes(self, **sizes)):
            setattr(self, name, size)

    def _checked_head_dim(self) -> int:
        if self.num_heads < 1 or self.qkv_features % self.num_heads:
            raise StructureError(
                f"MultiHeadAttention: num_heads={self.num_heads} must divide "
                f"qkv_features={self.qkv_features}."
            )
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise StructureError(
                f"MultiHeadAttention: num_kv_heads={self.num_kv_heads} must divide "
                f"num_heads={self.num_heads}."
            )
        return self.qkv_features // self.num_heads

    def _make_projections(self, first: tuple[Any, ...], rngs: Any) -> None:
        """Makes the projections to queries, keys and values, in this order."""
        kernel_init, bias_init, kernel_metadata, bias_metadata = first
        for name, features, heads in (
            ("query", self.in_features, self.num_heads),
            ("key", self.in_kv_features, self.num_kv_heads),
            ("value", self.in_kv_features, self.num_kv_heads),
        ):
            projection = LinearGeneral(
                features,
                (heads, self.head_dim),
                use_bias=self.use_bias,
                dtype=self.dtype,
                param_dtype=self.param_dtype,
                kernel_init=kernel_init,
                bias_init=bias_init,
                precision=self.precision,
                promote_dtype=self.qkv_promote_dtype,
                dot_general=self.qkv_dot_general,
                dot_general_cls=self.qkv_dot_general_cls,
                rngs=rngs,
                kernel_metadata=kernel_metadata,
                bias_metadata=bias_metadata,
            )
            setattr(self, name, projection)

    def _make_norms(self, query: Metadata, key: Metadata, rngs: Any) -> None:
        """Makes what normalises queries and keys, if they are to be."""
        for name, metadata in (("query_ln", query), ("key_ln", key)):
            norm: Any = data(None)
            if self.normalize_qk:
                norm = LayerNorm(
                    self.head_dim,
                    use_bias=False,
                    dtype=self.dtype,
                    param_dtype=self.param_dtype,
                    promote_dtype=self.ln_promote_dtype,
                    rngs=rngs,
                    scale_metadata=metadata,
                )
            setattr(self, name, norm)

    def _make_last(self, last: tuple[Any, ...], rngs: Any) -> None:
        """Makes the projection from all heads to the outputs."""
        kernel_init, bias_init, kernel_metadata, bias_metadata = last
        self.out = LinearGeneral(
            (self.num_heads, self.head_dim),
            self.out_features,
            axis=(-2, -1),
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=kernel_init,
            bias_init=bias_init,
            precision=self.precision,
            promote_dtype=self.out_promote_dtype,
            dot_general=self.out_dot_general,
            dot_general_cls=self.out_dot_general_cls,
            rngs=rngs,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
        )

    def __call__(
        self,
        inputs_q: Array,
        inputs_k: Array | None = None,
        inputs_v: Array | None = None,
        *,
        mask: Array | None = None,
        deterministic: bool | None = None,
        rngs: Rngs | RngStream | jax.Array | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool = False,
        out_sharding: Any = None,
        qkv_sharding: Any = None,
    ) -> jax.Array:
        """Attention of `inputs_q` to `inputs_k`.

        Args:
            inputs_q: `[batch..., queries, features]`.
            inputs_k: `[batch..., keys, features]`; `inputs_q` without it.
            inputs_v: The same for the values; `inputs_k` without it.
            mask: Which keys a query sees; broadcasts to `[batch..., heads, queries,
                keys]`.
            deterministic: Instead of the layer's own.
            rngs: Random streams, a stream, or a key, instead of the layer's own.
            sow_weights: Whether to sow the attention weights.
            decode: Instead of the layer's own.
            is_causal: Whether a query sees only keys up to its own position.
            out_sharding: The sharding of the result, on an explicit mesh.
            qkv_sharding: The sharding of queries, keys and values.
        """
        inputs_k, inputs_v = self._checked_inputs(inputs_q, inputs_k, inputs_v)
        query = self.query(inputs_q, out_sharding=qkv_sharding)
        key = self.key(inputs_k, out_sharding=qkv_sharding)
        value = self.value(inputs_v, out_sharding=qkv_sharding)
        if self.query_ln is not None and self.key_ln is not None:
            query, key = self.query_ln(query), self.key_ln(key)
        decode = self.decode if decode is None else decode
        step = decoded(self, query, key, value, mask) if decode else None
        if step is not None:
            key, value, mask = step.keys, step.values, step.seen
        elif self.attention_fn is dot_product_attention:
            self._check_attention(query, key, value, mask)
        dropping, dropout_rng = self._dropout(deterministic, rngs)
        x = self.attention_fn(
            query,
            key,
            value,
            mask=mask,
            dropout_rng=dropout_rng,
            dropout_rate=self.dropout_rate,
            broadcast_dropout=self.broadcast_dropout,
            deterministic=not dropping,
            dtype=self.dtype,
            precision=self.precision,
            module=self if sow_weights else None,
            is_causal=is_causal and not decode,
            **given(implementation=self.implementation),
        )
        out = self.out(x, out_sharding=out_sharding)
        if step is None:
            return out
        self.cached_key.set_value(step.keys)
        self.cached_value.set_value(step.values)
        self.cache_index.set_value(step.following)
        return out if step.has_room is None else jnp.where(step.has_room, out, jnp.nan)

    def _checked_inputs(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """The inputs for keys and values."""
        if k is None:
            if v is not None:
                raise StructureError(
                    f"{where(self)}: `inputs_v` is given without `inputs_k`. Give "
                    "both; one array for both goes in `inputs_k`."
                )
            k = q
        v = k if v is None else v
        wanted = (self.in_features, self.in_kv_features, self.in_kv_features)
        for name, array, features in zip(("q", "k", "v"), (q, k, v), wanted):
            if jnp.ndim(array) < 2 or jnp.shape(array)[-1] != features:
                raise StructureError(
                    f"{where(self)}: `inputs_{name}` must be [batch..., length, "
                    f"{features}], got {typed(array)}."
                )
        return k, v

    def _check_attention(self, query: Any, key: Any, value: Any, mask: Any) -> None:
        """Refuses what attention would, before a key is drawn, and says where."""
        check_shapes(where(self), query, key, value)
        shape = (*query.shape[:-3], query.shape[-2], query.shape[-3], key.shape[-3])
        broadcastable(where(self), "mask", mask, shape)

    def _dropout(self, deterministic: bool | None, rngs: Any) -> tuple[bool, Any]:
        """Whether to drop weights, and the key for it."""
        if self.dropout_rate == 0:
            return False, None
        if deterministic is None:
            deterministic = self.deterministic
        if deterministic is None:
            raise StructureError(
                f"{where(self)}: `deterministic` is given neither to the layer nor to "
                "the call, and dropout_rate is not 0."
            )
        if deterministic:
            return False, None
        rngs = self.rngs if rngs is None else rngs
        if rngs is None:
            raise StructureError(
                f"{where(self)}: `deterministic` is False, but no `rngs` argument was "
                "provided to MultiHeadAttention. Give `rngs` to the layer or the call."
            )
        return True, next_key(self, rngs, "dropout")

    # Decoding.

    def init_cache(
        self, input_shape: Sequence[int], dtype: Dtype = jnp.float32
    ) -> None:
        """Makes an empty cache.

        Args:
            input_shape: `[batch..., longest length, features]`.
            dtype: The dtype of what is cached.
        """
        sizes = tuple(input_shape)
        if len(sizes) < 2 or min(sizes) < 0 or sizes[-1] != self.in_kv_features:
            raise StructureError(
                f"{where(self)}: `input_shape` of a cache is [batch..., longest "
                f"length, {self.in_kv_features}], got {sizes}."
            )
        *batch, length, _ = sizes
        shape = (*batch, length, self.num_kv_heads, self.head_dim)
        self.cached_key = Cache(jnp.zeros(shape, dtype))
        self.cached_value = Cache(jnp.zeros(shape, dtype))
        self.cache_index = Cache(jnp.zeros((), jnp.int32))

    def set_view(
        self,
        deterministic: bool | None = None,
        decode: bool | None = None,
        batch_size: int | Sequence[int] | None = None,
        max_length: int | None = None,
    ) -> None:
        """Sets the mode of a view; with both sizes, makes a new cache.

        Args:
            deterministic: Whether to drop no weights.
            decode: Whether calls are steps of decoding.
            batch_size: The size of the batch to decode; several for several axes.
            max_length: How many positions the cache has.
        """
        if (batch_size is None) != (max_length is None):
            missing = "batch_size" if batch_size is None else "max_length"
            raise StructureError(
                f"{where(self)}: a cache needs both sizes; `{missing}` is missing."
            )
        if deterministic is not None:
            self.deterministic = deterministic
        if decode is not None:
            self.decode = decode
        if batch_size is not None and max_length is not None:
            batch = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
            dtype = self.param_dtype if self.dtype is None else self.dtype
            self.init_cache((*batch, max_length, self.in_kv_features), dtype)
