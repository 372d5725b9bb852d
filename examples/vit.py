# SPDX-License-Identifier: Apache-2.0
"""ViT: an image classifier, and a loader for Hugging Face checkpoints.

    python examples/vit.py            a small random checkpoint, every layer checked
    python examples/vit.py FOLDER     a folder with config.json and safetensors

The first prints the error of every layer's output against one by `transformers`. Images
are `[batch, height, width, channels]`; the model has no dropout.
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
KNOWN = {"hidden_act": "gelu", "qkv_bias": True}


@dataclass(frozen=True)
class Config:
    """The sizes of a ViT for square images."""

    image: int = 224
    patch: int = 16
    channels: int = 3
    width: int = 768
    hidden: int = 3072
    layers: int = 12
    heads: int = 12
    labels: int = 1000
    epsilon: float = 1e-12

    @classmethod
    def from_hf(cls, folder: pathlib.Path) -> "Config":
        """Reads `config.json` of a Hugging Face folder."""
        found = json.loads((folder / "config.json").read_text())
        if found.get("model_type") != "vit":
            raise ValueError(
                f"Config.from_hf: {folder} holds a model of type "
                f"{found.get('model_type')!r}, and this is for 'vit'."
            )
        if unlike := {k: found[k] for k, v in KNOWN.items() if found.get(k, v) != v}:
            raise ValueError(
                f"Config.from_hf: {folder} asks for {unlike}; this model has {KNOWN}."
            )
        return cls(
            image=found["image_size"],
            patch=found["patch_size"],
            channels=found["num_channels"],
            width=found["hidden_size"],
            hidden=found["intermediate_size"],
            layers=found["num_hidden_layers"],
            heads=found["num_attention_heads"],
            labels=len(found.get("id2label", "01")),  # two unless named
            epsilon=found["layer_norm_eps"],
        )


class Patches(tt.Module):
    """An image as a sequence: a token for the class, then the patches, row by row."""

    def __init__(self, config: Config, *, rngs: tt.Rngs):
        self.config = config
        size, width = (config.patch, config.patch), config.width
        length = (config.image // config.patch) ** 2 + 1
        self.project = tt.Conv(
            config.channels, width, size, strides=size, padding="VALID", rngs=rngs
        )
        self.class_token = tt.Param(0.02 * rngs.params.normal((1, 1, width)))
        self.positions = tt.Param(0.02 * rngs.params.normal((1, length, width)))

    def __call__(self, images: jax.Array) -> jax.Array:
        """Makes `[batch, 1 + patches, width]`."""
        config = self.config
        wanted = (config.image, config.image, config.channels)
        if images.ndim != 4 or images.shape[1:] != wanted:
            raise ValueError(
                f"Patches: images of {images.shape}, and the model is for [batch, "
                f"height, width, channels] of (batch, {', '.join(map(str, wanted))})."
            )
        x = self.project(images).reshape(len(images), -1, config.width)
        first = jnp.broadcast_to(self.class_token[...], (len(images), 1, config.width))
        return jnp.concatenate([first, x], axis=1) + self.positions


class MLP(tt.Module):
    """Two matrices with a nonlinearity in between."""

    def __init__(self, config: Config, *, rngs: tt.Rngs):
        self.up = tt.Linear(config.width, config.hidden, rngs=rngs)
        self.down = tt.Linear(config.hidden, config.width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps each position by itself."""
        return self.down(jax.nn.gelu(self.up(x), approximate=False))


class Block(tt.Module):
    """Attention and an MLP, each added to what they read."""

    def __init__(self, config: Config, *, rngs: tt.Rngs):
        width, epsilon = config.width, config.epsilon
        self.norm_1 = tt.LayerNorm(width, epsilon=epsilon, rngs=rngs)
        self.attn = tt.MultiHeadAttention(config.heads, width, rngs=rngs)
        self.norm_2 = tt.LayerNorm(width, epsilon=epsilon, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Each position sees all others."""
        x = x + self.attn(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class ViT(tt.Module):
    """A stack of blocks over the patches; the class is read from the first token."""

    def __init__(self, config: Config, *, rngs: tt.Rngs):
        self.config = config
        self.patches = Patches(config, rngs=rngs)
        self.blocks = tt.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.norm = tt.LayerNorm(config.width, epsilon=config.epsilon, rngs=rngs)
        self.head = tt.Linear(config.width, config.labels, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Scores of the classes: `[batch, labels]`."""
        x = self.patches(images)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def stored(name: str, axes: str) -> Any:
    """A tensor of a layer: its name and its axes, there and here."""
    return tt.tensor(f"vit.encoder.layer.{{i}}.{name}").rearrange(axes)


RULES = {
    "patches/project/kernel": tt.tensor(
        "vit.embeddings.patch_embeddings.projection.weight"
    ).rearrange("out in h w -> h w in out"),
    "patches/project/bias": "vit.embeddings.patch_embeddings.projection.bias",
    "patches/class_token": "vit.embeddings.cls_token",
    "patches/positions": "vit.embeddings.position_embeddings",
    "blocks/{i}/norm_1/scale": stored("layernorm_before.weight", "d -> d"),
    "blocks/{i}/norm_1/bias": stored("layernorm_before.bias", "d -> d"),
    "blocks/{i}/attn/out/kernel": stored(
        "attention.output.dense.weight", "d (h k) -> h k d"
    ),
    "blocks/{i}/attn/out/bias": stored("attention.output.dense.bias", "d -> d"),
    "blocks/{i}/attn/{part}/kernel": stored(  # query, key, value
        "attention.attention.{part}.weight", "(h k) d -> d h k"
    ),
    "blocks/{i}/attn/{part}/bias": stored(
        "attention.attention.{part}.bias", "(h k) -> h k"
    ),
    "blocks/{i}/norm_2/scale": stored("layernorm_after.weight", "d -> d"),
    "blocks/{i}/norm_2/bias": stored("layernorm_after.bias", "d -> d"),
    "blocks/{i}/mlp/up/kernel": stored("intermediate.dense.weight", "m d -> d m"),
    "blocks/{i}/mlp/up/bias": stored("intermediate.dense.bias", "m -> m"),
    "blocks/{i}/mlp/down/kernel": stored("output.dense.weight", "d m -> m d"),
    "blocks/{i}/mlp/down/bias": stored("output.dense.bias", "d -> d"),
    "norm/scale": "vit.layernorm.weight",
    "norm/bias": "vit.layernorm.bias",
    "head/kernel": tt.tensor("classifier.weight").transpose(),
    "head/bias": "classifier.bias",
}


def load(folder: str | pathlib.Path) -> ViT:
    """A model with the weights of a Hugging Face folder, in float32."""
    config = Config.from_hf(pathlib.Path(folder))
    model = tt.eval_shape(lambda: ViT(config, rngs=tt.Rngs(0)))  # shapes alone
    tt.load_weights(folder, model, rules=RULES, ignore=["*pooler*"], cast=True)
    return model


def main() -> None:
    forward = tt.jit(lambda model, images: model(images))
    folder = folder_argument("vit")
    model, expected = load(folder), expected_of(folder)
    config = model.config
    blank = np.zeros((1, config.channels, config.image, config.image), np.float32)
    pixels = expected.get("pixel_values", blank)
    with jax.default_matmul_precision("highest"):
        images = jnp.asarray(pixels.transpose(0, 2, 3, 1))
        logits, record = tt.observe(forward)(model, images)
    if expected:
        show(compare(record, expected, sites.VIT), f"ViT of {folder}")
    else:
        print(record)
        print("the likeliest class of a grey image:", logits.argmax(-1).tolist())


if __name__ == "__main__":
    main()
