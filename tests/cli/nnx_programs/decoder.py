# SPDX-License-Identifier: Apache-2.0
"""A decoder-only transformer: trained on a pattern, then decoded with a cache."""

import dataclasses

import fingerprints
import jax
import jax.numpy as jnp
import optax
from flax import nnx


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes."""

    vocabulary: int = 11
    width: int = 16
    heads: int = 4
    layers: int = 2
    length: int = 12


class Block(nnx.Module):
    """Attention and a feed-forward network."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(config.width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=config.heads,
            in_features=config.width,
            qkv_features=config.width,
            kernel_init=nnx.initializers.xavier_uniform(),
            use_bias=False,
            decode=False,
            rngs=rngs,
        )
        self.norm2 = nnx.RMSNorm(config.width, rngs=rngs)
        self.up = nnx.Linear(config.width, 32, rngs=rngs)
        self.down = nnx.Linear(32, config.width, rngs=rngs)

    def __call__(self, x, mask=None):
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(nnx.silu(self.up(self.norm2(x))))


class Decoder(nnx.Module):
    """Tokens to logits, with the embedding used twice."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config = config
        self.embed = nnx.Embed(config.vocabulary, config.width, rngs=rngs)
        self.positions = nnx.Param(
            nnx.initializers.normal(0.02)(rngs.params(), (config.length, config.width))
        )
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.norm = nnx.LayerNorm(config.width, use_bias=False, rngs=rngs)

    def __call__(self, tokens, *, start=0, mask=None):
        length = tokens.shape[-1]
        places = jax.lax.dynamic_slice_in_dim(self.positions[...], start, length)
        x = self.embed(tokens) + places
        for block in self.blocks:
            x = block(x, mask)
        return self.embed.attend(self.norm(x))


@nnx.jit
def train_step(model, optimizer, tokens):
    def loss_fn(model):
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        mask = nnx.make_causal_mask(inputs)
        logits = model(inputs, mask=mask)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return losses.mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss, optax.global_norm(grads)


@nnx.jit
def decode_step(model, token, place):
    logits = model(token, start=place)
    return logits[:, -1].argmax(-1), logits.max()


def main():
    config = Config()
    model = Decoder(config, rngs=nnx.Rngs(0))
    print("init", fingerprints.of(model))
    optimizer = nnx.Optimizer(
        model,
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.01)),
        wrt=nnx.Param,
    )
    starts = jnp.arange(8)[:, None]
    tokens = (starts + jnp.arange(config.length)) % config.vocabulary
    for number in range(10):
        loss, norm = train_step(model, optimizer, tokens)
        if number % 5 == 4:
            print("loss", number, float(loss), float(norm))
    for block in model.blocks:
        block.attention.init_cache((2, config.length, config.width))
    model.set_attributes(decode=True)
    print(
        "cache",
        sorted(
            {
                str(path[-1])
                for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Cache))
            }
        ),
    )
    token, found = jnp.array([[1], [6]]), []
    for place in range(6):
        token, top = decode_step(model, token, place)
        found.append(token.tolist())
        print("decoded", place, *token.tolist(), float(top))
        token = token[:, None]
    caches = nnx.pop(model, nnx.Cache)
    print(
        "popped", len(jax.tree.leaves(caches)), len(jax.tree.leaves(nnx.state(model)))
    )


if __name__ == "__main__":
    main()
