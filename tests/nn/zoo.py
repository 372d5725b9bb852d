# SPDX-License-Identifier: Apache-2.0
"""The zoo: one table of layers and their variants, for laws that all of them keep.

A row says how a layer is made, what it is called with and what a call writes; a law is
a test parametrised by `rows`. Sizes are tiny, and
most rows give back the shape they take, so that they can be stacked.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treetap as tt

LENGTHS = np.array([1, 3], np.int32)
CONV_MASK = np.array([1, 0, 1], np.float32).reshape(3, 1, 1) * np.ones((1, 4, 4))
ELEMENTS = np.array([True, True, False]).reshape(1, 3, 1)
MULTIPLIED = ("scale", "var", "sigma")
KEYS = np.array([True, False, True]).reshape(1, 1, 1, 3)


@dataclass(frozen=True)
class Ints:
    """An input of whole numbers from 0."""

    shape: tuple[int, ...]
    below: int


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A row of the zoo.

    Attributes:
        name: What it is called.
        factory: Makes the layer from random streams, `dtype` and `param_dtype`.
        inputs: Shapes of the inputs, or `Ints`.
        method: The method that is called.
        options: Keywords of the call.
        writes: The kinds of Variables that a call changes.
        follows_inputs: Whether what is written depends on the inputs.
        is_square: Whether the result is like the first input.
        is_noisy: Whether the result depends on random keys.
        has_dtype: Whether the layer takes a dtype; without one it keeps the inputs'.
        is_widened: Whether the result is a sum with inputs or a carry as they came,
            and so may be wider than `dtype`.
        shows_weights: Whether attention weights are a site.
    """

    name: str
    factory: Callable[..., Any]
    inputs: tuple[Any, ...]
    method: str = "__call__"
    options: Mapping[str, Any] = field(default_factory=dict)
    writes: frozenset[type] = frozenset()
    follows_inputs: bool = False
    is_square: bool = True
    is_noisy: bool = False
    has_dtype: bool = True
    is_widened: bool = False
    shows_weights: bool = False

    def make(self, seed: int = 0, **dtypes: Any) -> Any:
        """A new layer; every seed gives it other numbers.

        It is made abstractly and then filled, which compiles nothing.
        """
        return filled(self.abstract(**dtypes), seed)

    def abstract(self, **dtypes: Any) -> Any:
        """The layer with shapes and types instead of numbers."""
        return tt.eval_shape(lambda: self.factory(streams(), **dtypes))

    def arrays(self, dtype: Any = np.float32, seed: int = 0) -> tuple[jax.Array, ...]:
        """Inputs for a call."""
        draw = np.random.default_rng(seed)
        return tuple(
            jnp.asarray(draw.integers(0, one.below, one.shape), jnp.int32)
            if isinstance(one, Ints)
            else jnp.asarray(draw.normal(size=one), dtype)
            for one in self.inputs
        )

    def call(self, layer: Any, *inputs: Any) -> Any:
        """One call of the layer."""
        return getattr(layer, self.method)(*inputs, **self.options)

    def loss(self, layer: Any, *inputs: Any) -> Any:
        """A number that depends on every element of the result."""
        return weighed(self.call(layer, *inputs))


def pattern(like: Any) -> jax.Array:
    """Different numbers, between -1 and 1, in the shape and dtype of an array."""
    count = np.arange(1, np.size(like) + 1, dtype=np.float32)
    return jnp.asarray(np.cos(count).reshape(np.shape(like)), like.dtype)


def weighed(tree: Any) -> Any:
    """The sum of all elements of a tree of arrays, with different weights."""
    return sum(jnp.sum(leaf * pattern(leaf)) for leaf in jax.tree.leaves(tree))


def streams() -> tt.Rngs:
    """Random streams to make a layer from."""
    return tt.Rngs(params=0, dropout=1, carry=2)


def filled(abstract: Any, seed: int) -> Any:
    """The layer that an abstract one describes, with numbers that tell it apart.

    Parameters and statistics lie around zero, or around one where they multiply; each
    stream has a key of its own; counters and caches are at zero.
    """
    graphdef, state = tt.split(abstract)
    draw = np.random.default_rng(seed)
    flat = tt.to_flat_state(state)
    for path, variable in flat:
        shape, dtype = variable.shape, variable.dtype
        if isinstance(variable, tt.RngKey):
            value: Any = jax.random.key(int(draw.integers(1000)))
        elif isinstance(variable, tt.Param | tt.BatchStat):
            middle, spread = (1.0, 0.2) if path[-1] in MULTIPLIED else (0.0, 0.5)
            value = jnp.asarray(middle + spread * draw.uniform(-1, 1, shape), dtype)
        else:
            value = jnp.asarray(np.zeros(shape), dtype)
        variable.set_value(value)
    return tt.merge(graphdef, tt.from_flat_state(flat))


def values_of(tree: Any) -> dict[Any, np.ndarray]:
    """What the Variables of an object hold, by path; keys as their numbers."""
    return {path: raw(variable) for path, variable in tt.to_flat_state(tt.state(tree))}


def raw(variable: Any) -> np.ndarray:
    """What a Variable holds, as numpy has it."""
    value = variable.get_value()
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value)


def assert_close(found: Any, wanted: Any, rtol: float = 1e-5, atol: float = 1e-5):
    """Two trees have one structure, and nearly equal arrays."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted)):
        one, other = np.asarray(one), np.asarray(other)
        assert one.shape == other.shape
        if one.dtype.kind not in "iub":
            one, other = one.astype(np.float64), other.astype(np.float64)
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol)


ZOO: dict[str, Entry] = {}


def add(name: str, factory: Callable[..., Any], *inputs: Any, **more: Any) -> None:
    """Adds a row; keywords that a row does not know are options of the call."""
    known = {key: more.pop(key) for key in [*more] if key in Entry.__annotations__}
    writes = frozenset(known.pop("writes", ()))
    entry = Entry(
        name=name, factory=factory, inputs=inputs, options=more, writes=writes, **known
    )
    assert name not in ZOO
    ZOO[name] = entry


def of(cls: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """A factory of one layer."""
    return lambda rngs, **dtypes: cls(*args, rngs=rngs, **kwargs, **dtypes)


X = (2, 3, 4)
IMAGE = (2, 4, 4, 2)

# Linear maps.

add("linear", of(tt.Linear, 4, 4), X)
add("linear_narrow", of(tt.Linear, 4, 3), (2, 4), is_square=False)
add("linear_no_bias", of(tt.Linear, 4, 4, use_bias=False), X)
add("linear_vector", of(tt.Linear, 4, 4), (4,))
add("linear_general", of(tt.LinearGeneral, (3, 4), (3, 4), axis=(-2, -1)), X)
add(
    "linear_general_middle",
    of(tt.LinearGeneral, (2, 4), 3, axis=(0, 2)),
    X,
    is_square=False,
)
add("linear_general_batch", of(tt.LinearGeneral, 4, 4, batch_axis={0: 2}), X)
add("einsum", of(tt.Einsum, "bta,ac->btc", (4, 4), (4,)), X)
add(
    "einsum_heads",
    of(tt.Einsum, "nta,hab->nthb", (2, 4, 3), (2, 3)),
    X,
    is_square=False,
)
add("embed", of(tt.Embed, 5, 4), Ints((2, 3), 5), is_square=False)
add("embed_attend", of(tt.Embed, 4, 4), X, method="attend")

# Convolutions.

add("conv", of(tt.Conv, 4, 4, 3), X)
add("conv_2d", of(tt.Conv, 2, 2, (3, 3)), IMAGE)
add("conv_strided", of(tt.Conv, 2, 3, (2, 2), strides=2), IMAGE, is_square=False)
add("conv_circular", of(tt.Conv, 4, 4, 3, padding="CIRCULAR"), X)
add("conv_reflect", of(tt.Conv, 4, 4, 3, padding="REFLECT"), X)
add("conv_causal", of(tt.Conv, 4, 4, 2, padding="CAUSAL", kernel_dilation=2), X)
add("conv_grouped", of(tt.Conv, 4, 4, 3, feature_group_count=2), X)
add("conv_masked", of(tt.Conv, 4, 4, 3, mask=CONV_MASK), X)
add("conv_no_batch", of(tt.Conv, 4, 4, 3), (3, 4))
add("conv_two_batch_axes", of(tt.Conv, 4, 4, 3), (2, 2, 3, 4))
add("conv_transpose", of(tt.ConvTranspose, 4, 4, 3), X)
add(
    "conv_transpose_valid",
    of(tt.ConvTranspose, 2, 3, (2, 2), strides=2, padding="VALID"),
    IMAGE,
    is_square=False,
)
add("conv_transpose_circular", of(tt.ConvTranspose, 4, 4, 3, padding="CIRCULAR"), X)
add("conv_transpose_causal", of(tt.ConvTranspose, 4, 4, 3, padding="CAUSAL"), X)
add("conv_transpose_kernel", of(tt.ConvTranspose, 4, 4, 3, transpose_kernel=True), X)

# Normalisation.

STATS = {"writes": [tt.BatchStat]}
MOMENTS = {"follows_inputs": True, **STATS}
add("batch_norm", of(tt.BatchNorm, 4), X, **MOMENTS)
add("batch_norm_eval", of(tt.BatchNorm, 4, use_running_average=True), X)
add("batch_norm_masked", of(tt.BatchNorm, 4), X, mask=ELEMENTS, **MOMENTS)
add("layer_norm", of(tt.LayerNorm, 4), X)
add(
    "layer_norm_two_axes",
    of(tt.LayerNorm, 12, reduction_axes=(1, 2), feature_axes=(1, 2)),
    X,
)
add("layer_norm_two_passes", of(tt.LayerNorm, 4, use_fast_variance=False), X)
add("rms_norm", of(tt.RMSNorm, 4), X)
add("group_norm", of(tt.GroupNorm, 4, num_groups=2), X)
add("group_norm_size", of(tt.GroupNorm, 4, None, 2), X)
add("instance_norm", of(tt.InstanceNorm, 4), X)


def spectral(rngs, *, inner=tt.Linear, sizes=(4, 4), param_dtype=jnp.float32, **more):
    dtype = more.pop("dtype", None)
    layer = inner(*sizes, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
    return tt.SpectralNorm(layer, n_steps=2, param_dtype=param_dtype, rngs=rngs, **more)


def weight(rngs, *, inner=tt.Linear, sizes=(4, 4), param_dtype=jnp.float32, **more):
    dtype = more.pop("dtype", None)
    layer = inner(*sizes, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
    return tt.WeightNorm(layer, param_dtype=param_dtype, rngs=rngs, **more)


fixed = functools.partial
add("spectral_norm", spectral, X, **STATS)
add("spectral_norm_eval", fixed(spectral, update_stats=False), X)
add("spectral_norm_conv", fixed(spectral, inner=tt.Conv, sizes=(4, 4, 3)), X, **STATS)
add("weight_norm", weight, X)
add("weight_norm_conv", fixed(weight, inner=tt.Conv, sizes=(4, 4, 3)), X)

# Dropout. Streams have no dtype.

DRAWS = {"writes": [tt.RngCount]}


def dropout(rngs, **options):
    return tt.Dropout(0.5, rngs=rngs, **options)


DROPS = {"is_noisy": True, "has_dtype": False, **DRAWS}
add("dropout", dropout, X, **DROPS)
add("dropout_off", fixed(dropout, deterministic=True), X, has_dtype=False)
add("dropout_broadcast", fixed(dropout, broadcast_dims=(1,)), X, **DROPS)

# Attention.


def decoder(rngs, **dtypes):
    layer = tt.MultiHeadAttention(2, 4, rngs=rngs, **dtypes)
    return tt.view(layer, decode=True, batch_size=2, max_length=4)


attention = fixed(of, tt.MultiHeadAttention, 2, 4)
WEIGHTS = {"shows_weights": True}
add("attention", attention(), X, **WEIGHTS)
add("attention_cross", attention(in_kv_features=5), X, (2, 4, 5), **WEIGHTS)
add("attention_causal", attention(), X, is_causal=True, **WEIGHTS)
add("attention_masked", attention(), X, mask=KEYS, **WEIGHTS)
add("attention_grouped", attention(num_kv_heads=1), X, **WEIGHTS)
add("attention_normalized", attention(qkv_features=8, normalize_qk=True), X, **WEIGHTS)
add(
    "attention_dropout",
    attention(dropout_rate=0.5, deterministic=False),
    X,
    is_noisy=True,
    **WEIGHTS,
    **DRAWS,
)
add(
    "attention_decode",
    decoder,
    (2, 1, 4),
    writes=[tt.Cache],
    follows_inputs=True,
    **WEIGHTS,
)
add("attention_fused", attention(implementation="xla"), X, is_causal=True)

# Recurrence. An RNN draws a key for each part of the carry.


def rnn(rngs, *, cell=tt.GRUCell, more=None, **dtypes):
    return tt.RNN(cell(4, 4, rngs=rngs, **dtypes), **(more or {}))


def bidirectional(rngs, *, more=None, **dtypes):
    ahead, back = rnn(rngs, **dtypes), rnn(rngs, **dtypes)
    return tt.Bidirectional(ahead, back, **(more or {}))


CARRY = {"is_widened": True}
add("rnn_lstm", fixed(rnn, cell=tt.LSTMCell), X, **CARRY)
add("rnn_optimized_lstm", fixed(rnn, cell=tt.OptimizedLSTMCell), X, **CARRY)
add("rnn_gru", rnn, X, **CARRY)
add("rnn_simple", fixed(rnn, cell=tt.SimpleCell, dtype=None), X)
add("rnn_reverse", fixed(rnn, more={"reverse": True}), X, **CARRY)
add(
    "rnn_reverse_in_order",
    fixed(rnn, more={"reverse": True, "keep_order": True}),
    X,
    seq_lengths=LENGTHS,
    **CARRY,
)
add("rnn_time_major", fixed(rnn, more={"time_major": True}), X, **CARRY)
add(
    "rnn_carry",
    fixed(rnn, cell=tt.LSTMCell, more={"return_carry": True}),
    X,
    seq_lengths=LENGTHS,
    is_square=False,
    **CARRY,
)
add("bidirectional", fixed(bidirectional, more={"merge_fn": jnp.add}), X, **CARRY)
add(
    "bidirectional_carry",
    fixed(bidirectional, more={"return_carry": True}),
    X,
    seq_lengths=LENGTHS,
    is_square=False,
    **CARRY,
)
add(
    "gru_cell",
    of(tt.GRUCell, 4, 4),
    (2, 4),
    (2, 4),
    is_square=False,
    is_widened=True,
)

# Adapters and activations.


def lora_with_base(rngs, **dtypes):
    base = tt.Linear(4, 4, rngs=rngs, **dtypes)
    return tt.LoRA(4, 2, 4, base_module=base, rngs=rngs, **dtypes)


def lora_linear(rngs, *, dtype=None, param_dtype=jnp.float32):
    own = {"dtype": dtype, "param_dtype": param_dtype}
    more = {"lora_dtype": dtype, "lora_param_dtype": param_dtype}
    return tt.LoRALinear(4, 4, lora_rank=2, rngs=rngs, **own, **more)


def prelu(rngs, **dtypes):
    return tt.PReLU(0.3, **dtypes)


add("lora", of(tt.LoRA, 4, 2, 4), X)
add("lora_with_base", lora_with_base, X)
add("lora_linear", lora_linear, X)
add("prelu", prelu, X)

# Functions and layers, one after another.


def largest(x):
    return tt.max_pool(x, (2,), padding="SAME")


def smallest(x):
    return tt.min_pool(x, (2,), (2,), ((1, 1),))


def average(x):
    return tt.avg_pool(x, (2,), padding="SAME", count_include_pad=False)


def pooled(rngs, *, pool, **dtypes):
    return tt.Sequential(tt.Linear(4, 4, rngs=rngs, **dtypes), pool)


def classifier(rngs, **dtypes):
    return tt.Sequential(
        tt.Linear(4, 6, rngs=rngs, **dtypes),
        tt.BatchNorm(6, momentum=0.9, rngs=rngs, **dtypes),
        tt.gelu,
        tt.Dropout(0.5, rngs=rngs),
        tt.Linear(6, 4, rngs=rngs, **dtypes),
    )


class Block(tt.Module):
    """A transformer's block: attention and two linear maps, each beside a shortcut."""

    def __init__(self, rngs, **dtypes):
        self.norms = tt.List([tt.LayerNorm(4, rngs=rngs, **dtypes) for _ in range(2)])
        self.attention = tt.MultiHeadAttention(2, 4, rngs=rngs, **dtypes)
        self.up = tt.Linear(4, 8, rngs=rngs, **dtypes)
        self.down = tt.Linear(8, 4, rngs=rngs, **dtypes)
        self.dropout = tt.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x), is_causal=True)
        wide = tt.gelu(self.up(self.norms[1](x)))
        return x + self.dropout(self.down(wide))


add("max_pool", fixed(pooled, pool=largest), X)
add("min_pool", fixed(pooled, pool=smallest), X, is_square=False)
add("avg_pool", fixed(pooled, pool=average), X)
add(
    "sequential",
    classifier,
    X,
    writes=[tt.BatchStat, tt.RngCount],
    follows_inputs=True,
    is_noisy=True,
)
add("block", Block, X, is_noisy=True, is_widened=True, **DRAWS, **WEIGHTS)


def rows(
    chosen: Iterable[str] = ZOO,
    *,
    modes: Mapping[str, Any] | None = None,
    quick: Iterable[str] = ZOO,
) -> pytest.MarkDecorator:
    """Parametrises a test by rows of the zoo, as `entry`.

    Args:
        chosen: Which rows.
        modes: Modes to run each in, as `mode`.
        quick: Rows that run always, in the first mode; of other modes only
            `sequential`. The others are for long runs.
    """
    quick, params = set(quick), []
    for name in chosen:
        for place, (text, mode) in enumerate((modes or {"": None}).items()):
            is_quick = name in quick and (place == 0 or name == "sequential")
            more = [] if is_quick else [pytest.mark.long]
            values = (ZOO[name],) if modes is None else (ZOO[name], mode)
            label = f"{name}-{text}" if text else name
            params.append(pytest.param(*values, id=label, marks=more))
    names = ["entry"] if modes is None else ["entry", "mode"]
    return pytest.mark.parametrize(names, params)


@contextlib.contextmanager
def hasty_compiling() -> Iterator[None]:
    """Compiles with less care for speed: these programs run once.

    They are forgotten at the end. JAX keeps even the programs of eager operations, and
    those of careless compiling may round otherwise than those that other tests expect.
    """
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
        jax.clear_caches()


# Rows for each way of handling state.
FEW = ("spectral_norm", "attention_decode", "rnn_gru", "sequential")
SQUARE = [name for name, entry in ZOO.items() if entry.is_square]
FOLLOWING = [name for name, entry in ZOO.items() if entry.follows_inputs]
