# SPDX-License-Identifier: Apache-2.0
"""A Llama-style decoder, with a cache to generate, and a loader for Hugging Face.

    python examples/llama.py            a small random checkpoint, every layer checked
    python examples/llama.py FOLDER     a folder with config.json and safetensors

The first prints the error of every layer's output against one by `transformers`. The
layers are one `Block` whose parameters have a leading axis, and `scan` runs over it: a
deep model compiles as fast as a shallow one. RMSNorm, rotary positions, grouped keys
and values, SwiGLU.
"""

import dataclasses
import functools
import json
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec
from reference import sites
from reference.compare import compare, expected_of, folder_argument, show

import treetap as tt


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a Llama; `scaling` is Llama 3's way to more positions.

    On a mesh, `split` says how what goes from layer to layer lies: `P("data")` if each
    device has a part of the batch.
    """

    vocabulary: int = 32000
    positions: int = 2048
    width: int = 4096
    hidden: int = 11008
    layers: int = 32
    heads: int = 32
    kv_heads: int = 32
    head_size: int = 128
    epsilon: float = 1e-6
    theta: float = 10000.0
    scaling: tuple[float, ...] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False
    dtype: Any = jnp.float32
    split: PartitionSpec | None = None

    @classmethod
    def from_hf(cls, folder: pathlib.Path) -> "Config":
        """Reads `config.json` of a Hugging Face folder."""
        found = json.loads((folder / "config.json").read_text())
        # older files have two entries for what is now one
        rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        asked = (found.get("model_type"), found.get("hidden_act", "silu"), kind)
        known = [("llama", "silu", "default"), ("llama", "silu", "llama3")]
        if asked not in known:
            raise ValueError(
                f"Config.from_hf: {folder} asks for a model of type, activation and "
                f"rotary positions {asked}; this one is for {known}."
            )
        names = "factor low_freq_factor high_freq_factor"
        names = f"{names} original_max_position_embeddings".split()
        width, heads = found["hidden_size"], found["num_attention_heads"]
        return cls(
            vocabulary=found["vocab_size"],
            positions=found["max_position_embeddings"],
            width=width,
            hidden=found["intermediate_size"],
            layers=found["num_hidden_layers"],
            heads=heads,
            kv_heads=found.get("num_key_value_heads") or heads,
            head_size=found.get("head_dim") or width // heads,
            epsilon=found["rms_norm_eps"],
            theta=rope.get("rope_theta", found.get("rope_theta", 10000.0)),
            scaling=tuple(rope[n] for n in names) if kind == "llama3" else None,
            attention_bias=found.get("attention_bias", False),
            mlp_bias=found.get("mlp_bias", False),
            tied=found.get("tie_word_embeddings", False),
        )


def frequencies(config: Config) -> jax.Array:
    """How fast each pair of features turns, in radians per position."""
    powers = jnp.arange(0, config.head_size, 2) / config.head_size
    found = config.theta**-powers
    if config.scaling is None:
        return found
    factor, low, high, positions = config.scaling
    turns = positions * found / (2 * math.pi)
    kept = jnp.clip((turns - low) / (high - low), 0, 1)
    return found * (kept + (1 - kept) / factor)


def rotated(x: jax.Array, positions: jax.Array, config: Config) -> jax.Array:
    """Heads turned by their position; a feature's pair is half a head away."""
    angles = positions[:, None] * frequencies(config)[None]
    cos, sin = (f(angles)[None, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x, 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1)


def laid_out(x: jax.Array, split: PartitionSpec | None) -> jax.Array:
    return x if split is None else jax.lax.with_sharding_constraint(x, split)


class KVCache(tt.Module):
    """Room for the keys and values of some positions, in all layers."""

    def __init__(self, config: Config, batch: int, size: int):
        shape = (config.layers, batch, size, config.kv_heads, config.head_size)
        self.keys = tt.Cache(jnp.zeros(shape, config.dtype))
        self.values = tt.Cache(jnp.zeros(shape, config.dtype))
        self.length = tt.Cache(jnp.zeros(config.layers, jnp.int32))

    def check(self, batch: int, count: int) -> None:
        """Refuses positions that there is no room for, if that can be known now."""
        _, rows, size, *_ = self.keys.shape
        taken = 0 if isinstance(self.length[...], Tracer) else int(self.length[0])
        if batch != rows or taken + count > size:
            raise ValueError(
                f"KVCache: {count} more positions for a batch of {batch} do not fit: "
                f"{taken} of {size} are taken, by a batch of {rows}."
            )

    def extend(self, keys: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Appends to one layer, and returns all; NaN where there is no room."""
        start, count = self.length[...], keys.shape[1]
        has_room = start + count <= self.keys.shape[1]
        for held, new in ((self.keys, keys), (self.values, values)):
            put = jnp.where(has_room, new.astype(held.dtype), jnp.nan)
            held[...] = jax.lax.dynamic_update_slice(held[...], put, (0, start, 0, 0))
        self.length[...] = start + count
        return self.keys[...], self.values[...]


class Attention(tt.Module):
    """Attention in which several heads share their keys and values."""

    def __init__(self, config: Config, *, rngs: tt.Rngs):
        self.config = config
        options = {"use_bias": config.attention_bias, "param_dtype": config.dtype}
        linear = functools.partial(tt.Linear, **options, rngs=rngs)
        size, kv_size = (n * config.head_size for n in (config.heads, config.kv_heads))
        self.query = linear(config.width, size)
        self.key = linear(config.width, kv_size)
        self.value = linear(config.width, kv_size)
        self.out = linear(size, config.width)

    def __call__(self, x: jax.Array, cache: KVCache | None = None) -> jax.Array:
        """Each position sees itself and those before it, in the cache too."""
        config = self.config
        split = (*x.shape[:-1], -1, config.head_size)
        query, key = self.query(x).reshape(split), self.key(x).reshape(split)
        value = self.value(x).reshape(split)
        start = 0 if cache is None else cache.length[...]
        positions = start + jnp.arange(x.shape[1])
        query, key = (rotated(heads, positions, config) for heads in (query, key))
        if cache is not None:
            key, value = cache.extend(key, value)
        mask = jnp.arange(key.shape[1])[None] <= positions[:, None]
        out = tt.dot_product_attention(query, key, value, mask=mask[None, None])
        return self.out(out.reshape(*x.shape[:-1], -1))


class MLP(tt.Module):
    """SwiGLU: one matrix opens and shuts what another lets through."""

    def __init__(self, config: Config, *, rngs: tt.Rngs):
        options = {"use_bias": config.mlp_bias, "param_dtype": config.dtype}
        linear = functools.partial(tt.Linear, **options, rngs=rngs)
        self.gate = linear(config.width, config.hidden)
        self.up = linear(config.width, config.hidden)
        self.down = linear(config.hidden, config.width)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps each position by itself."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(tt.Module):
    """Attention and an MLP, each added to what they read; one layer, or a stack."""

    def __init__(self, config: Config, *, rngs: tt.Rngs):
        self.split = config.split
        options = {"epsilon": config.epsilon, "param_dtype": config.dtype}
        self.norm_1 = tt.RMSNorm(config.width, **options, rngs=rngs)
        self.attn = Attention(config, rngs=rngs)
        self.norm_2 = tt.RMSNorm(config.width, **options, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x: jax.Array, cache: KVCache | None = None) -> jax.Array:
        """Runs one layer."""
        x = laid_out(x, self.split)
        x = laid_out(x + self.attn(self.norm_1(x), cache), self.split)
        return laid_out(x + self.mlp(self.norm_2(x)), self.split)

    def in_turn(self, x: jax.Array, cache: KVCache | None = None) -> jax.Array:
        """Runs the layers of a stack one after the other."""
        axes = {"in_axes": (0, tt.Carry, 0), "out_axes": tt.Carry}
        return tt.scan(lambda layer, x, cache: layer(x, cache), **axes)(self, x, cache)


class Llama(tt.Module):
    """A decoder."""

    def __init__(self, config: Config, *, rngs: tt.Rngs):
        self.config = config
        options = {"param_dtype": config.dtype, "rngs": rngs}
        self.tokens = tt.Embed(config.vocabulary, config.width, **options)
        stack = tt.vmap(lambda rngs: Block(config, rngs=rngs))
        self.layers = stack(rngs.split(config.layers))
        self.norm = tt.RMSNorm(config.width, epsilon=config.epsilon, **options)
        head = functools.partial(tt.Linear, config.width, config.vocabulary)
        self.head = None if config.tied else head(use_bias=False, **options)

    def __call__(self, ids: jax.Array, cache: KVCache | None = None) -> jax.Array:
        """Scores for the next token; with a cache, `ids` follow those seen before."""
        if cache is not None:
            cache.check(*ids.shape)
        x = self.norm(self.layers.in_turn(self.tokens(ids), cache))
        return self.tokens.attend(x) if self.head is None else self.head(x)


def following(ids: jax.Array, model: Llama, cache: KVCache) -> jax.Array:
    return model(ids, cache)[:, -1:].argmax(-1)


@functools.partial(tt.jit, static_argnames="steps")
def generate(model: Llama, ids: jax.Array, steps: int) -> jax.Array:
    """Appends the likeliest tokens, one at a time, each seeing all before it."""
    batch, length = ids.shape
    if not 1 <= steps <= model.config.positions - length:
        raise ValueError(
            f"generate: {length} tokens and {steps} steps, and there are "
            f"{model.config.positions} positions. Take at least one step, and fewer."
        )
    cache = KVCache(model.config, batch, length + steps)
    scan = tt.scan(
        lambda token, *rest: (following(token, *rest), token[:, 0]),
        in_axes=(tt.Carry, None, None),
        out_axes=(tt.Carry, 1),
        length=steps - 1,
    )
    last, tokens = scan(following(ids, model, cache), model, cache)
    return jnp.concatenate([ids, tokens, last], axis=1)


PARTS = {  # of a layer: here, and in a checkpoint
    "norm_1": "input_layernorm",
    "attn/query": "self_attn.q_proj",
    "attn/key": "self_attn.k_proj",
    "attn/value": "self_attn.v_proj",
    "attn/out": "self_attn.o_proj",
    "norm_2": "post_attention_layernorm",
    "mlp/gate": "mlp.gate_proj",
    "mlp/up": "mlp.up_proj",
    "mlp/down": "mlp.down_proj",
}


def stacked(name: str) -> Any:
    """One tensor for each layer in the file, with the outputs of a matrix first."""
    return tt.tensor(f"model.layers.{{i}}.{name}").transpose().stack()


RULES = {
    "tokens/embedding": "model.embed_tokens.weight",
    **{f"layers/{a}/kernel": stacked(f"{b}.weight") for a, b in PARTS.items()},
    **{f"layers/{a}/scale": stacked(f"{b}.weight") for a, b in PARTS.items()},
    **{f"layers/{a}/bias": stacked(f"{b}.bias") for a, b in PARTS.items()},
    "norm/scale": "model.norm.weight",
    "head/kernel": tt.tensor("lm_head.weight").transpose(),
}


def load(folder: str | pathlib.Path, *, dtype: Any = jnp.float32) -> Llama:
    """A model with the weights of a Hugging Face folder, in a dtype of your choice."""
    config = dataclasses.replace(Config.from_hf(pathlib.Path(folder)), dtype=dtype)
    model = tt.eval_shape(lambda: Llama(config, rngs=tt.Rngs(0)))  # shapes alone
    unused = ["*.rotary_emb.inv_freq", *(["lm_head.weight"] if config.tied else [])]
    tt.load_weights(folder, model, rules=RULES, ignore=unused, cast=True)
    return model


def main() -> None:
    forward = tt.jit(lambda model, ids: model(ids))
    folder = folder_argument("llama")
    model, expected = load(folder), expected_of(folder)
    ids = jnp.asarray(expected.get("input_ids", np.arange(8)[None]), jnp.int32)
    with jax.default_matmul_precision("highest"):
        _, record = tt.observe(forward)(model, ids)
        print("generated:", generate(model, ids, 8)[:, ids.shape[1] :].tolist())
    if expected:
        names = sites.llama(model.config.layers, model.config.tied)
        show(compare(record, expected, names), f"Llama of {folder}")
    else:
        print(record)


if __name__ == "__main__":
    main()
