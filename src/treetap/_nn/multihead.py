# SPDX-License-Identifier: Apache-2.0
"""MultiHeadAttention: projections around attention, and a cache to decode with.

The projections to queries, keys and values, and the one of the result, are
`LinearGeneral`s. In a step of decoding (see `decoding`), keys and values of the steps
before come out of a cache.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from treetap._core.errors import StructureError
from treetap._core.trees.attributes import data
from treetap._core.variables.kinds import Cache
from treetap._core.wording import typed
from treetap._modules.random_streams import Rngs, RngStream
from treetap._nn.attention import (
    Implementation,
    dot_product_attention,
    over_weights,
    weights_shape,
)
from treetap._nn.decoding import decoded
from treetap._nn.dropout import forked, key_of_call
from treetap._nn.dtypes import promote_dtype as default_promote
from treetap._nn.linear import LinearGeneral, given
from treetap._nn.normalization import LayerNorm
from treetap._nn.parameters import (
    NO_METADATA,
    Arguments,
    Array,
    Dtype,
    Initializer,
    Layer,
    Metadata,
    Precision,
    Promote,
    as_tuple,
    check_rate,
    check_rngs,
    check_sizes,
    chosen,
    default_kernel_init,
    mode_of_call,
    where,
)
from treetap._nn.rotary import has_rope
from treetap.initializers import zeros


class MultiHeadAttention(Layer):
    """Attend with several heads at once.

    Args:
        num_heads: The number of heads.
        in_features: The features of the inputs.
        qkv_features: The features of all heads together; `in_features` without it.
        out_features: The features of the outputs; `in_features` without it.
        num_kv_heads: The number of heads of keys and values, if there are fewer: each
            serves a group of query heads.
        in_kv_features: The features of the inputs for keys and values, if they differ.
        dtype: The dtype to compute in; without it, the one that inputs and parameters
            promote to.
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
        normalize_qk: Whether queries and keys are normalized.
        qkv_promote_dtype: What brings inputs and parameters of the first projections to
            one dtype.
        out_promote_dtype: The same for the last.
        ln_promote_dtype: The same for the normalization.
        qkv_dot_general: What the first projections compute with.
        out_dot_general: What the last one computes with.
        qkv_dot_general_cls: Deprecated; a class of such functions.
        out_dot_general_cls: Deprecated; a class of such functions.
        rngs: Random streams; `params` gives one key to each parameter.
        keep_rngs: Whether to keep a stream to drop weights with.
        kernel_metadata: Metadata of the kernels.
        out_kernel_metadata: Metadata of the last kernel.
        bias_metadata: Metadata of the biases.
        out_bias_metadata: Metadata of the last bias.
        query_ln_scale_metadata: Metadata of the scale that normalizes queries.
        key_ln_scale_metadata: Metadata of the scale that normalizes keys.
        implementation: `"xla"` or `"cudnn"`: use `jax.nn.dot_product_attention`, which
            has no weights to show and no dropout.

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
        self.num_heads = self._size("num_heads", num_heads)
        self.in_features = self._size("in_features", in_features)
        self.qkv_features = self._size("qkv_features", qkv_features, in_features)
        self.out_features = self._size("out_features", out_features, in_features)
        self.in_kv_features = self._size("in_kv_features", in_kv_features, in_features)
        self.num_kv_heads = self._size("num_kv_heads", num_kv_heads, num_heads)
        self._keep_options(locals())
        self.broadcast_dropout = broadcast_dropout
        self.dropout_rate = check_rate(self, "dropout_rate", dropout_rate)
        self.deterministic = deterministic
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
        self._make_parts(locals())
        keeps = keep_rngs and dropout_rate > 0
        self.rngs = forked(self, rngs if keeps else None, "dropout")
        self.cached_key = self.cached_value = self.cache_index = data(None)

    def _size(self, name: str, size: int | None, default: int | None = None) -> int:
        """Return a size, or its default, as Python's integer."""
        return check_sizes(self, **{name: default if size is None else size})[0]

    def _checked_head_dim(self) -> int:
        """Return the features of a head, if all have as many."""
        pairs = (("num_heads", "qkv_features"), ("num_kv_heads", "num_heads"))
        for part, whole in pairs:
            count, total = getattr(self, part), getattr(self, whole)
            if count < 1 or total % count:
                raise StructureError(
                    f"MultiHeadAttention: {part}={count} must divide {whole}={total}."
                )
        return self.qkv_features // self.num_heads

    def _make_parts(self, arguments: Arguments) -> None:
        """Make projections and norms, in the order in which they draw their keys."""
        heads = (self.num_heads, self.head_dim)
        kv_heads = (self.num_kv_heads, self.head_dim)
        project = functools.partial(self._projection, arguments)
        self.query = project("qkv", self.in_features, heads)
        self.key = project("qkv", self.in_kv_features, kv_heads)
        self.value = project("qkv", self.in_kv_features, kv_heads)
        self.query_ln = self._norm(arguments, "query_ln")
        self.key_ln = self._norm(arguments, "key_ln")
        self.out = project("out", heads, self.out_features)

    def _projection(
        self, arguments: Arguments, which: str, inputs: Any, outputs: Any
    ) -> LinearGeneral:
        """Make a linear map to heads, or from them.

        Args:
            arguments: Those of the constructor.
            which: `"qkv"` or `"out"`: whose options to compute with.
            inputs: The sizes of the axes that are summed over.
            outputs: The sizes of the new axes.
        """
        alike = ("use_bias", "dtype", "param_dtype", "precision", "rngs")
        options = chosen(arguments, *alike)
        for name in ("promote_dtype", "dot_general", "dot_general_cls"):
            options[name] = arguments[f"{which}_{name}"]
        for name in ("kernel_init", "bias_init", "kernel_metadata", "bias_metadata"):
            own = which == "out" and arguments[f"out_{name}"]
            options[name] = own or arguments[name]
        axis = (-2, -1) if which == "out" else -1
        return LinearGeneral(inputs, outputs, axis=axis, **options)

    def _norm(self, arguments: Arguments, name: str) -> LayerNorm | None:
        """Make what normalizes the queries or the keys, if they are to be."""
        if not self.normalize_qk:
            return data(None)
        return LayerNorm(
            self.head_dim,
            use_bias=False,
            promote_dtype=self.ln_promote_dtype,
            scale_metadata=arguments[f"{name}_scale_metadata"],
            **chosen(arguments, "dtype", "param_dtype", "rngs"),
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
        input_positions: Array | None = None,
    ) -> jax.Array:
        """Attend from `inputs_q` to `inputs_k`.

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
            input_positions: Where the queries stand, for an `attention_fn` that wants
                to know, as `dot_product_attention_with_rope`; that one is told the
                place in the cache without it.
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
            input_positions = self._positions(step, input_positions)
            key, value, mask = step.keys, step.values, step.seen
        elif self.attention_fn is dot_product_attention:
            # What attention would refuse, before a key is drawn, and saying where.
            over_weights(self, "mask", mask, weights_shape(self, query, key, value))
        dropout_rng = self._dropout_key(deterministic, rngs)
        x = self.attention_fn(
            query,
            key,
            value,
            mask=mask,
            dropout_rng=dropout_rng,
            dropout_rate=self.dropout_rate,
            broadcast_dropout=self.broadcast_dropout,
            deterministic=dropout_rng is None,
            dtype=self.dtype,
            precision=self.precision,
            module=self if sow_weights else None,
            is_causal=is_causal and not decode,
            **given(
                implementation=self.implementation, input_positions=input_positions
            ),
        )
        out = self.out(x, out_sharding=out_sharding)
        if step is None:
            return out
        step.write(self)
        return out if step.has_room is True else jnp.where(step.has_room, out, jnp.nan)

    def _positions(self, step: Any, given: Any) -> Any:
        """Where a query that is decoded stands: as given, or if attention asks."""
        if given is not None or not has_rope(self.attention_fn):
            return given
        place = step.following - jnp.asarray(step.has_room, jnp.int32)
        return jnp.reshape(place, (1,))

    def _checked_inputs(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """Return the inputs for keys and values."""
        if k is None and v is not None:
            raise StructureError(
                f"{where(self)}: `inputs_v` is given without `inputs_k`. Give both; "
                "one array for both goes in `inputs_k`."
            )
        k = q if k is None else k
        v = k if v is None else v
        others = self.in_kv_features
        wanted = (("q", q, self.in_features), ("k", k, others), ("v", v, others))
        for name, array, features in wanted:
            if jnp.ndim(array) < 2 or jnp.shape(array)[-1] != features:
                raise StructureError(
                    f"{where(self)}: `inputs_{name}` must be [batch..., length, "
                    f"{features}], got {typed(array)}."
                )
        return k, v

    def _dropout_key(self, deterministic: bool | None, rngs: Any) -> Any:
        """Return the key to drop weights with; None for dropping none."""
        if self.dropout_rate == 0 or mode_of_call(self, "deterministic", deterministic):
            return None
        return key_of_call(self, rngs, "dropout")

    # Decoding.

    def init_cache(
        self, input_shape: Sequence[int], dtype: Dtype = jnp.float32
    ) -> None:
        """Make an empty cache.

        Args:
            input_shape: `[batch..., longest length, features]`.
            dtype: The dtype of what is cached.
        """
        sizes = tuple(input_shape)
        if len(sizes) < 2 or min(sizes) < 0 or sizes[-1] != self.in_kv_features:
            raise StructureError(
                f"{where(self)}: `input_shape` of a cache must be [batch..., longest "
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
        """Set the mode of a view; with both sizes, make a new cache.

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
            sizes = (*as_tuple(batch_size), max_length, self.in_kv_features)
            dtype = self.param_dtype if self.dtype is None else self.dtype
            self.init_cache(sizes, dtype)
