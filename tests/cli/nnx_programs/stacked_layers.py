# SPDX-License-Identifier: Apache-2.0
"""Blocks made by vmap and applied by scan, with rematerialisation and dropout."""

import fingerprints
import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Block(nnx.Module):
    """A residual block."""

    def __init__(self, width, rngs: nnx.Rngs):
        self.linear = nnx.Linear(width, width, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.array(0))

    def __call__(self, x):
        self.calls[...] += 1
        return x + self.dropout(nnx.gelu(self.linear(self.norm(x))))


class Stack(nnx.Module):
    """Several blocks, their parameters along one axis."""

    def __init__(self, width, depth, rngs: nnx.Rngs):
        self.depth = depth

        @nnx.split_rngs(splits=depth)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def create(rngs):
            return Block(width, rngs=rngs)

        self.blocks = create(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def forward(block, x):
            return block(x)

        return forward(self.blocks, x)


@nnx.jit
def step(model, optimizer, x, y):
    def loss_fn(model):
        return jnp.mean((model(x) - y) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def main():
    model = Stack(8, depth=5, rngs=nnx.Rngs(params=1, dropout=2))
    print("init", fingerprints.of(model))
    print(
        "shapes", jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    )
    x = jax.random.normal(jax.random.key(0), (4, 8))
    y = jnp.roll(x, 1, axis=-1)
    optimizer = nnx.Optimizer(model, optax.sgd(0.05, momentum=0.9), wrt=nnx.Param)
    for number in range(4):
        print("loss", number, float(step(model, optimizer, x, y)))
    print("calls", *model.blocks.calls[...].tolist())
    model.eval()
    print("output", float(model(x).sum()), float(jnp.abs(model(x)).max()))

    @nnx.scan(in_axes=(nnx.Carry, None, 0), out_axes=(nnx.Carry, 0), length=3)
    def several(carry, scale, row):
        carry = carry + scale * row
        return carry, carry.sum()

    carry, sums = several(jnp.zeros(8), 2.0, x[:3])
    print("plain scan", float(carry.sum()), *map(float, sums))

    axes = nnx.StateAxes({nnx.Param: 0, ...: None})

    class Plain(nnx.Module):
        def __init__(self, rngs):
            self.weight = nnx.Param(rngs.params.normal((3, 8)))
            self.total = nnx.Variable(jnp.zeros(()))

    @nnx.vmap(in_axes=(axes, None), out_axes=0)
    def apply(plain, x):
        return (plain.weight * x).sum()

    print("state axes", *map(float, apply(Plain(nnx.Rngs(5)), x[0])))


main()
