# SPDX-License-Identifier: Apache-2.0
"""GPT-2: the model, and a loader for Hugging Face checkpoints.

    python examples/gpt2.py            a small random checkpoint, every layer checked
    python examples/gpt2.py FOLDER     a folder with config.json and safetensors

The first prints the error of every layer's output against one by `transformers`. The
model has no dropout; queries, keys and values are three matrices here and one there.
"""

import json
import pathlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from reference import sites
from reference.compare import compare, expected_of, folder_argument, show

import treetap as tt

# What the model does always, and a config may ask otherwise.
KNOWN = {
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Config:
    """The sizes of a GPT-2."""

    vocabulary: int = 50257
    positions: int = 1024
    width: int = 768
    hidden: int = 3072
    layers: int = 12
    heads: int = 12
    epsilon: float = 1e-5

    @classmethod
    def from_hf(cls, folder: pathlib.Path) -> "Config":
        """Reads `config.json` of a Hugging Face folder."""
        found = json.loads((folder / "config.json").read_text())
        if found.get("model_type") != "gpt2":
            raise ValueError(
                f"Config.from_hf: {folder} holds a model of type "
                f"{found.get('model_type')!r}, and this is for 'gpt2'."
            )
        if unlike := {k: found[k] for k, v in KNOWN.items() if found.get(k, v) != v}:
            raise ValueError(
                f"Config.from_hf: {folder} asks for {unlike}; this model has {KNOWN}."
            )
        return cls(
            vocabulary=found["vocab_size"],
            positions=found["n_positions"],
            width=found["n_embd"],
            hidden=found.get("n_inner") or 4 * found["n_embd"],
            layers=found["n_layer"],
            heads=found["n_head"],
            epsilon=found["layer_norm_epsilon"],
        )


class MLP(tt.Module):
    """Two matrices with a nonlinearity in between."""

    def __init__(self, config: Config, *, rngs: tt.Rngs):
        self.up = tt.Linear(config.width, config.hidden, rngs=rngs)
        self.down = tt.Linear(config.hidden, config.width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps each position by itself."""
        return self.down(jax.nn.gelu(self.up(x), approximate=True))


class Block(tt.Module):
    """Attention and an MLP, each added to what they read."""

    def __init__(self, config: Config, *, rngs: tt.Rngs):
        width, epsilon = config.width, config.epsilon
        self.norm_1 = tt.LayerNorm(width, epsilon=epsilon, rngs=rngs)
        self.attn = tt.MultiHeadAttention(config.heads, width, rngs=rngs)
        self.norm_2 = tt.LayerNorm(width, epsilon=epsilon, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Each position sees those before it."""
        x = x + self.attn(self.norm_1(x), is_causal=True)
        return x + self.mlp(self.norm_2(x))


class GPT2(tt.Module):
    """A decoder whose scores for the next token use the table of tokens again."""

    def __init__(self, config: Config, *, rngs: tt.Rngs):
        self.config = config
        self.tokens = tt.Embed(config.vocabulary, config.width, rngs=rngs)
        self.positions = tt.Embed(config.positions, config.width, rngs=rngs)
        self.blocks = tt.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.norm = tt.LayerNorm(config.width, epsilon=config.epsilon, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Scores for the next token at each position: `[batch, length, vocabulary]`."""
        length = ids.shape[-1]
        if length > self.config.positions:
            raise ValueError(
                f"GPT2: {length} tokens, and there are {self.config.positions} "
                "positions. Pass fewer."
            )
        positions = self.positions(jnp.arange(length)[None])
        x = tt.tap(self.tokens(ids) + positions, "embedded")
        for block in self.blocks:
            x = block(x)
        return self.tokens.attend(self.norm(x))


def stored(name: str) -> Any:
    """A tensor of a checkpoint; those without a head have no prefix."""
    return tt.tensor(f"transformer.{name}", name)


KERNEL, BIAS = (stored(f"h.{{i}}.attn.c_attn.{name}") for name in ("weight", "bias"))
RULES = {
    "tokens/embedding": stored("wte.weight"),
    "positions/embedding": stored("wpe.weight"),
    "blocks/{i}/norm_{n}/scale": stored("h.{i}.ln_{n}.weight"),
    "blocks/{i}/norm_{n}/bias": stored("h.{i}.ln_{n}.bias"),
    **{
        f"blocks/{{i}}/attn/{name}/kernel": KERNEL.part(n, of=3, axis=1).rearrange(
            "d (h k) -> d h k"
        )
        for n, name in enumerate(("query", "key", "value"))
    },
    **{
        f"blocks/{{i}}/attn/{name}/bias": BIAS.part(n, of=3).rearrange("(h k) -> h k")
        for n, name in enumerate(("query", "key", "value"))
    },
    "blocks/{i}/attn/out/kernel": stored("h.{i}.attn.c_proj.weight").rearrange(
        "(h k) d -> h k d"
    ),
    "blocks/{i}/attn/out/bias": stored("h.{i}.attn.c_proj.bias"),
    "blocks/{i}/mlp/up/kernel": stored("h.{i}.mlp.c_fc.weight"),
    "blocks/{i}/mlp/up/bias": stored("h.{i}.mlp.c_fc.bias"),
    "blocks/{i}/mlp/down/kernel": stored("h.{i}.mlp.c_proj.weight"),
    "blocks/{i}/mlp/down/bias": stored("h.{i}.mlp.c_proj.bias"),
    "norm/scale": stored("ln_f.weight"),
    "norm/bias": stored("ln_f.bias"),
}
# Masks that old files hold, and the table of tokens once more.
IGNORED = ("*.attn.bias", "*.attn.masked_bias", "lm_head.weight")


def load(folder: str | pathlib.Path) -> GPT2:
    """A model with the weights of a Hugging Face folder, in float32."""
    config = Config.from_hf(pathlib.Path(folder))
    model = tt.eval_shape(lambda: GPT2(config, rngs=tt.Rngs(0)))  # shapes alone
    tt.load_weights(folder, model, rules=RULES, ignore=IGNORED, cast=True)
    return model


def main() -> None:
    forward = tt.jit(lambda model, ids: model(ids))
    folder = folder_argument("gpt2")
    model, expected = load(folder), expected_of(folder)
    ids = jnp.asarray(expected.get("input_ids", np.arange(8)[None]), jnp.int32)
    with jax.default_matmul_precision("highest"):
        logits, record = tt.observe(forward)(model, ids)
    if expected:
        show(compare(record, expected, sites.GPT2), f"GPT-2 of {folder}")
    else:
        print(record)
        print("the likeliest next tokens:", logits.argmax(-1).tolist())


if __name__ == "__main__":
    main()
