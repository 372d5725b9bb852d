# SPDX-License-Identifier: Apache-2.0
"""Spellings of earlier releases, still met in the wild; they warn and work."""

import warnings

import fingerprints
import jax
import jax.numpy as jnp
import optax
from flax import nnx

warnings.simplefilter("ignore")


class Counter(nnx.Module):
    """Values by `.value`."""

    def __init__(self, rngs):
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (3, 2)))
        self.count = nnx.Variable(jnp.array(0))
        self.inner = nnx.Linear(2, 2, rngs=rngs)

    def __call__(self, x):
        self.count.value += 1
        return self.inner(x @ self.weight.value)


model = Counter(nnx.Rngs(0))
print("init", fingerprints.of(model))
x = jnp.ones((4, 3))
print("out", float(model(x).sum()), int(model.count.value))
model.weight.value = model.weight.value * 2
print("doubled", float(model(x).sum()))
state = nnx.state(model)
print("pure", sorted(state.to_pure_dict()), len(state.flat_state()))
print("raw", model.weight.raw_value.shape)
optimizer = nnx.ModelAndOptimizer(model, optax.adam(1e-2), wrt=nnx.Param)


@nnx.jit
def step(optimizer, x):
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(optimizer.model)
    optimizer.update(grads)
    return loss


print("loss", *(float(step(optimizer, x)) for _ in range(3)))
graphdef, params, rest = (
    model.split(nnx.Param, ...)
    if hasattr(model, "split")
    else nnx.split(model, nnx.Param, ...)
)
print("filter", len(nnx.state(model).filter(nnx.Param).flat_state()))
first, second = nnx.state(model).split(nnx.Param, ...)
print("split", len(first), len(second), len(nnx.State.merge(first, second)))


@nnx.jit
def metric_step(metrics, values):
    metrics.update(values=values)


average = nnx.metrics.Average()
metric_step(average, jnp.arange(4.0))
average.update(values=jnp.array([10.0]))
print("average", float(average.compute()))
welford = nnx.metrics.Welford()
welford.update(values=jnp.arange(5.0))
found = welford.compute()
print(
    "welford",
    float(found.mean),
    float(found.standard_deviation),
    float(found.standard_error_of_mean),
)
for name, child in model.iter_children():
    if isinstance(child, nnx.Module):
        print("child", name, type(child).__name__)
for path, module in model.iter_modules():
    print("module", path, type(module).__name__)
model.set_attributes(nnx.Linear, use_bias=True)
print(
    "abstract",
    [
        leaf.shape
        for leaf in jax.tree.leaves(
            nnx.state(nnx.eval_shape(lambda: Counter(nnx.Rngs(0))), nnx.Param)
        )
    ],
)
