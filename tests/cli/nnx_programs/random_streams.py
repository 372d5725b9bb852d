# SPDX-License-Identifier: Apache-2.0
"""Streams of random keys: names, defaults, forks, splits and new seeds."""

import jax
import jax.numpy as jnp
from flax import nnx


def show(name, key):
    print(name, *jax.random.key_data(key).tolist())


class Noisy(nnx.Module):
    """Dropout twice over a dense layer, with noise of its own."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(4, 6, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.rngs = rngs

    def __call__(self, x, *, deterministic=None):
        x = self.drop(self.linear(x), deterministic=deterministic)
        return x + 0.1 * self.rngs.noise.normal(x.shape)


rngs = nnx.Rngs(0, params=1, noise=jax.random.key(5))
show("params", rngs.params())
show("params again", rngs.params())
show("default", rngs())
show("other", rngs.other())
show("noise", rngs["noise"]())
print("uniform", *map(float, rngs.noise.uniform((3,))))
print("normal", *map(float, rngs.normal((2,))))
print("integers", *rngs.params.randint((4,), 0, 100).tolist())
print("has", "noise" in rngs, "absent" in rngs, sorted(rngs))

model = Noisy(nnx.Rngs(params=0, dropout=1, noise=2))
x = jnp.ones((2, 4))
for _ in range(2):
    print("call", float(model(x).sum()), float(model(x, deterministic=True).sum()))

nnx.reseed(model, dropout=1, noise=2)
print("reseeded", float(model(x).sum()))


@nnx.split_rngs(splits=3, only=["dropout", "noise"])
@nnx.vmap(in_axes=(nnx.StateAxes({"dropout": 0, "noise": 0, ...: None}), None))
def ensemble(model, x):
    return model(x).sum()


print("ensemble", *map(float, ensemble(model, x)))
print("counts", int(model.drop.rngs.count[...]), int(model.rngs.noise.count[...]))

forked = nnx.Rngs(9).fork(split=4)
print("forked", forked.default.key[...].shape)


@nnx.vmap(in_axes=0)
def draw(rngs):
    return rngs.uniform(())


print("drawn", *map(float, draw(forked)))

stream = nnx.Rngs(3).params
show("stream", stream())
print(
    "state",
    [type(v).__name__ for _, v in nnx.to_flat_state(nnx.state(model, nnx.RngState))],
)


@nnx.jit
def jitted(model, x):
    return model(x).sum()


print("jitted", float(jitted(model, x)), float(jitted(model, x)))


@jax.jit
def by_key(key):
    return Noisy(nnx.Rngs(key))(jnp.ones((1, 4))).sum()


print("by key", float(by_key(jax.random.key(11))))
