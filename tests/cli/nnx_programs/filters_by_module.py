# SPDX-License-Identifier: Apache-2.0
"""Names imported from NNX's submodules, as libraries on top of it do."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.nnx import filterlib, graphlib, rnglib, statelib, variablelib
from flax.nnx.nn import dtypes, initializers, linear
from flax.nnx.training import metrics, optimizer


class Head(nnx.Module):
    """A layer that libraries freeze, and one that they train."""

    def __init__(self, *, rngs: rnglib.Rngs):
        self.body = linear.Linear(
            4, 4, kernel_init=linear.default_kernel_init, rngs=rngs
        )
        self.head = linear.Linear(
            4, 2, kernel_init=initializers.lecun_normal(), rngs=rngs
        )

    def __call__(self, x):
        (x,) = dtypes.promote_dtype((x,), dtype=jnp.float32)
        return self.head(nnx.relu(self.body(x)))


def trainable(path, value) -> bool:
    """Whether a parameter is trained."""
    return "head" in path and issubclass(value.type, variablelib.Param)


model = Head(rngs=rnglib.Rngs(0))
only_head = filterlib.All(variablelib.Param, trainable)
is_head = filterlib.to_predicate(only_head)
for path, value in statelib.to_flat_state(nnx.state(model)):
    print("/".join(path), is_head(path, value))
graphdef, head, rest = graphlib.split(model, only_head, ...)
print("sizes", len(jax.tree.leaves(head)), len(jax.tree.leaves(rest)))
print(
    "types", isinstance(head, statelib.State), isinstance(graphdef, graphlib.GraphDef)
)

tuned = optimizer.Optimizer(model, optax.sgd(0.1), wrt=only_head)
measured = metrics.MultiMetric(
    loss=metrics.Average("loss"), accuracy=metrics.Accuracy()
)
x = jax.random.normal(jax.random.key(4), (8, 4))
labels = (x[:, 0] > 0).astype(jnp.int32)


def loss_fn(model):
    logits = model(x)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), logits


before = model.body.kernel[...]
for _ in range(4):
    diff = nnx.DiffState(0, only_head)
    grad_fn = nnx.value_and_grad(loss_fn, argnums=diff, has_aux=True)
    (loss, logits), grads = grad_fn(model)
    tuned.update(model, grads)
    measured.update(loss=loss, logits=logits, labels=labels)
found = measured.compute()
print("loss", float(found["loss"]), "accuracy", float(found["accuracy"]))
print("body stays", bool(jnp.array_equal(before, model.body.kernel[...])))
