# SPDX-License-Identifier: Apache-2.0
"""A model that keeps its configuration, with lists, dtypes and functions in it."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import fingerprints
import jax
import jax.numpy as jnp
import optax
from flax import nnx


@dataclasses.dataclass
class BlockConfig:
    """What a block is made of."""

    widths: list[int]
    activation: Callable[[jax.Array], jax.Array] = nnx.gelu
    dtype: Any = jnp.float32


@dataclasses.dataclass
class Config:
    """What the model is made of, and how it is trained."""

    features: int
    blocks: list[BlockConfig]
    training: dict[str, float] = dataclasses.field(default_factory=dict)


class Block(nnx.Module):
    """Layers of the widths in a configuration, around a residual."""

    def __init__(self, features: int, config: BlockConfig, *, rngs: nnx.Rngs):
        self.config = config
        sizes = [features, *config.widths, features]
        self.layers = nnx.List(
            [
                nnx.Linear(a, b, dtype=config.dtype, rngs=rngs)
                for a, b in itertools.pairwise(sizes)
            ]
        )

    def __call__(self, x):
        y = x
        for layer in self.layers:
            y = self.config.activation(layer(y))
        return x + y


class Model(nnx.Module):
    """Blocks, and a head."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config = config
        self.blocks = nnx.List(
            [Block(config.features, each, rngs=rngs) for each in config.blocks]
        )
        self.head = nnx.Linear(config.features, 1, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


config = Config(
    features=6,
    blocks=[BlockConfig([8, 5]), BlockConfig([4], activation=jnp.tanh)],
    training={"rate": 0.05},
)
model = Model(config, rngs=nnx.Rngs(3))
print("init", fingerprints.of(model))
optimizer = nnx.Optimizer(model, optax.sgd(config.training["rate"]), wrt=nnx.Param)
x = jax.random.normal(jax.random.key(0), (16, 6))
y = jnp.sum(x[:, :2] * x[:, 1:3], axis=1, keepdims=True)


@nnx.jit
def train_step(model: Model, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array):
    """One step down the gradient."""

    def loss_fn(model):
        return jnp.mean((model(x) - y) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


for step in range(4):
    print("step", step, float(train_step(model, optimizer, x, y)))

graphdef, state = nnx.split(model)
again = nnx.merge(graphdef, state)
print("widths", again.config.blocks[0].widths, again.blocks[1].config.widths)
print("same config", again.config == config)
print("loss", float(jnp.mean((again(x) - y) ** 2)))
