# SPDX-License-Identifier: Apache-2.0
"""What users print: Variables, States, containers, tables of a model."""

import fingerprints
import jax.numpy as jnp
from flax import nnx


class Block(nnx.Module):
    """A layer that is called by another method, too."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(4), role="scale")

    def __call__(self, x):
        return self.forward(x)

    def forward(self, x):
        return self.linear(x) * self.scale


class Net(nnx.Module):
    """Two blocks, one of them called twice."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.first, self.second = Block(rngs=rngs), Block(rngs=rngs)
        self.width, self.mode, self.dtype = 4, "train", jnp.float32

    def __call__(self, x, mode="train", mask=None):
        x = self.first.forward(x)
        x = self.second(self.first(x))
        return self.second(x[:1])


class Settings(nnx.Module):
    """Nothing but statics and small arrays."""

    def __init__(self):
        self.name, self.sizes, self.rate = "net", (1, 2), 0.5
        self.table = jnp.arange(6).reshape(2, 3)
        self.dtype = jnp.bfloat16
        self.nothing = None


model = Net(rngs=nnx.Rngs(0))
print("init", fingerprints.of(model))
print(nnx.Param(jnp.arange(4.0), role="k"))
print(nnx.Variable(3, tag="count"), nnx.Param(jnp.zeros((), jnp.bfloat16)))
print(nnx.State({"a": nnx.Param(jnp.array([[1.0, 2.0]])), "b": nnx.BatchStat(2)}))
print(nnx.List([1, "a", nnx.Param(2.0)]), nnx.Dict(a=1, b=nnx.Param(jnp.ones(2))))
print(nnx.to_flat_state(nnx.state(model, "scale")))
print(nnx.to_flat_state(nnx.state(model, nnx.PathContains("scale"))))
print(Settings())
print(nnx.StateAxes({"a": 0, ...: None}), nnx.PathContains("x"), nnx.Everything())
plain = {"width": 200, "force_terminal": False}
for options in ({}, {"depth": 1}, {"compute_flops": True, "compute_vjp_flops": True}):
    table = nnx.tabulate(model, jnp.ones((2, 4)), console_kwargs=plain, **options)
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")]
        if len(cells) > 1:
            print(" | ".join(cells))
print("mode: eval" in nnx.tabulate(model, jnp.ones((2, 4)), mode="eval"))
