# SPDX-License-Identifier: Apache-2.0
"""Pytrees and dataclasses of one's own, with data, static parts and metrics."""

import dataclasses
import typing as tp

import fingerprints
import jax
import jax.numpy as jnp
from flax import nnx


@nnx.dataclass
class Point(nnx.Pytree):
    """Two numbers and a name."""

    x: jax.Array
    y: jax.Array
    name: str = nnx.static(default="origin")


class Buffer(nnx.Pytree):
    """A list of arrays, changed in place."""

    def __init__(self, size):
        self.items = nnx.data([jnp.zeros(size)])
        self.size = nnx.static(size)

    def add(self, item):
        self.items.append(item)
        return self


@dataclasses.dataclass
class Config:
    """A config in a Module is static."""

    width: int = 4


class Model(nnx.Module):
    """Plain containers of modules and arrays."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config = config
        self.layers = nnx.data(
            [nnx.Linear(config.width, config.width, rngs=rngs) for _ in range(2)]
        )
        self.by_name = nnx.data({"out": nnx.Linear(config.width, 1, rngs=rngs)})
        self.constant = jnp.arange(4.0)
        self.activation: tp.Callable = nnx.relu
        self.optional = nnx.data(None)

    def __call__(self, x):
        for layer in self.layers:
            x = self.activation(layer(x + self.constant))
        return self.by_name["out"](x)

    def __repr__(self):
        return "Model!"


class Loss(nnx.Metric):
    """A metric of one's own."""

    def __init__(self):
        self.total = nnx.metrics.MetricState(jnp.zeros(()))
        self.count = nnx.metrics.MetricState(jnp.zeros((), jnp.int32))

    def reset(self):
        self.total[...] = jnp.zeros(())
        self.count[...] = jnp.zeros((), jnp.int32)

    def update(self, *, loss, **_):
        self.total[...] += loss.sum()
        self.count[...] += loss.size

    def compute(self):
        return self.total[...] / self.count[...]


point = Point(jnp.ones(2), jnp.zeros(2))
print("leaves", len(jax.tree.leaves(point)), point.name)
moved = jax.tree.map(lambda a: a + 1, point)
print("moved", float(moved.x.sum()), moved.name)
print("jit", float(jax.jit(lambda p: p.x.sum() + p.y.sum())(moved)))
buffer = Buffer(3).add(jnp.ones(3))
print("buffer", len(jax.tree.leaves(buffer)), buffer.size)
model = Model(Config(), rngs=nnx.Rngs(0))
print("init", fingerprints.of(nnx.state(model, nnx.Param)))
print("out", float(model(jnp.ones((2, 4))).sum()), repr(model))
paths = sorted(
    "/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model))
)
print("paths", *paths)
print("data", nnx.is_data(model.layers), nnx.is_data(3), nnx.is_data(jnp.ones(1)))
metrics = nnx.MultiMetric(loss=Loss(), mean=nnx.metrics.Average("score"))
metrics.update(loss=jnp.array([1.0, 3.0]), score=jnp.array([5.0, 7.0]))
print("metrics", {name: float(value) for name, value in metrics.compute().items()})
metrics.loss.reset()
print("count", int(metrics.loss.count[...]))
visited = [
    type(node).__name__
    for _, node in nnx.iter_graph(model)
    if isinstance(node, nnx.Module)
]
print("visited", *visited)
sizes = jax.tree.map(jnp.size, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
print("sizes", sizes)
print("total", sum(jax.tree.leaves(sizes)))


class Child(Model):
    """A subclass with another forward."""

    def __call__(self, x):
        return super().__call__(x) * 2


child = Child(Config(), rngs=nnx.Rngs(0))
print("child", float(child(jnp.ones((2, 4))).sum()))
table = nnx.tabulate(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((1, 2)))
print("table", "kernel" in table, "Linear" in table)
swapped = nnx.recursive_map(
    lambda path, node: (
        nnx.Linear(4, 1, rngs=nnx.Rngs(8)) if path == ("by_name", "out") else node
    ),
    model,
)
print("swapped", float(swapped(jnp.ones((2, 4))).sum()))
