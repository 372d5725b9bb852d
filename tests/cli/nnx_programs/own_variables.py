# SPDX-License-Identifier: Apache-2.0
"""Variable types of one's own, filters, sown values and metadata."""

import fingerprints
import jax
import jax.numpy as jnp
from flax import nnx


class Counter(nnx.Variable):
    """How often something happened."""


class Scale(nnx.Param):
    """A parameter apart from the others."""


class Net(nnx.Module):
    """A layer with its own kinds of state."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.scale = Scale(jnp.full((3,), 2.0), decay=False)
        self.counter = Counter(jnp.array(0))
        self.bag = nnx.Dict(a=nnx.Param(jnp.ones(2)), b=Counter(jnp.array(10)))
        self.stack = nnx.List(
            [nnx.Linear(3, 3, use_bias=False, rngs=rngs) for _ in range(2)]
        )

    def __call__(self, x):
        self.counter[...] += 1
        h = self.linear(x) * self.scale
        self.sow(nnx.Intermediate, "hidden", h)
        for layer in self.stack:
            h = layer(h)
            self.sow(nnx.Intermediate, "hidden", h)
        return h * self.bag["a"].sum()


def names(state):
    return sorted("/".join(map(str, path)) for path, _ in nnx.to_flat_state(state))


model = Net(nnx.Rngs(0))
print("init", fingerprints.of(model))
x = jnp.arange(6.0).reshape(2, 3)
print("out", float(model(x).sum()), float(nnx.jit(lambda m, x: m(x))(model, x).sum()))
print("counter", int(model.counter[...]))
sown = nnx.pop(model, nnx.Intermediate)
hidden = sown["hidden"].get_value()
print("sown", type(hidden).__name__, len(hidden), *(float(h.sum()) for h in hidden))

graphdef, scales, params, counters, rest = nnx.split(
    model, Scale, nnx.Param, Counter, ...
)
print("scales", names(scales))
print("params", names(params))
print("counters", names(counters), names(rest))
for title, chosen in {
    "not": nnx.Not(nnx.Param),
    "all": nnx.All(nnx.Param, nnx.PathContains("stack")),
    "any": nnx.Any(Counter, Scale),
    "or": (Counter, nnx.PathContains("linear")),
    "of type": nnx.OfType(Scale),
    "function": lambda path, value: (
        value.ndim == 1 if hasattr(value, "ndim") else False
    ),
    "nothing": nnx.Nothing(),
    "everything": nnx.Everything(),
}.items():
    print(title, names(nnx.state(model, chosen)))
print("filtered", names(nnx.filter_state(nnx.state(model), Counter)))

total = jax.tree.map(lambda a: a * 0 + 1, params)
ones = nnx.merge(graphdef, scales, total, counters, rest)
print("ones", float(ones(x).sum()), int(ones.counter[...]), ones.scale.decay)

grads = nnx.grad(lambda m: m(x).sum(), argnums=nnx.DiffState(0, Scale))(model)
print("grads", names(grads), *map(float, grads["scale"][...]))

model.counter.set_metadata(note="here")
print("metadata", model.counter.note, model.scale.get_metadata()["decay"])
print("types", type(model.scale).__name__, model.scale.shape, model.scale.dtype)
w = nnx.Param(jnp.arange(4.0))
print(
    "arithmetic",
    float((w + 1).sum()),
    float((2 * w)[1]),
    *map(float, w[1:3]),
    float(w @ w),
)
w[0] = 7.0
w[...] = w[...] * 2
print("set", *map(float, w[...]), float(jnp.sum(w)), len(w))
copied = w.replace(jnp.zeros(2))
print("replaced", copied.shape, type(copied).__name__, float(w.sum()))
print("leaves", [a.shape for a in jax.tree.leaves(nnx.state(model, nnx.Param))])
