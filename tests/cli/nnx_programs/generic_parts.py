# SPDX-License-Identifier: Apache-2.0
"""Types with parameters: `GraphDef[Model]`, `State[...]`, annotated dataclasses."""

import dataclasses
from typing import Generic, TypeVar

import fingerprints
import jax
import jax.numpy as jnp
from flax import nnx

M = TypeVar("M", bound=nnx.Module)


class Net(nnx.Module):
    """One layer."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(3, 2, rngs=rngs)
        self.count = nnx.BatchStat(jnp.array(0))

    def __call__(self, x):
        self.count[...] += 1
        return self.linear(x)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Parts(Generic[M]):
    """A model in parts, to hand to jax.jit."""

    graphdef: nnx.GraphDef[M] = dataclasses.field(metadata={"static": True})
    params: nnx.State[str, nnx.Param[jax.Array]]
    rest: nnx.GraphState

    @classmethod
    def of(cls, model: M) -> "Parts[M]":
        """The parts of a model."""
        return cls(*nnx.split(model, nnx.Param, ...))

    def whole(self) -> M:
        """The model."""
        return nnx.merge(self.graphdef, self.params, self.rest)


@nnx.dataclass
class Pair(nnx.Pytree):
    """Attributes told apart by their annotations."""

    values: nnx.Data[list[jax.Array]]
    name: nnx.Static[str]
    weight: nnx.Param[jax.Array]


@jax.jit
def apply(parts: Parts[Net], x: jax.Array):
    """The result, and the parts after it."""
    model = parts.whole()
    return model(x), Parts.of(model)


parts = Parts.of(Net(rngs=nnx.Rngs(1)))
print("init", fingerprints.of(parts.whole()))
x = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)
for _ in range(3):
    y, parts = apply(parts, x)
print("y", float(jnp.sum(y)), "count", int(parts.whole().count[...]))
pair = Pair([jnp.ones(2), jnp.zeros(3)], "pair", nnx.Param(jnp.full(2, 0.5)))
leaves, treedef = jax.tree.flatten(pair)
print("leaves", len(leaves), jax.tree.unflatten(treedef, leaves).name)
doubled = jax.tree.map(lambda a: a * 2, pair)
print("doubled", float(jnp.sum(doubled.weight[...])), float(doubled.values[0].sum()))
print("subscripts", nnx.Variable[int] is not None, nnx.GraphDef[Net] is not None)
