# SPDX-License-Identifier: Apache-2.0
"""A functional training loop on `nnx.TrainState`, with statistics beside parameters."""

import fingerprints
import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Net(nnx.Module):
    """A small network with a norm and noise."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.first = nnx.Linear(4, 8, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.8, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.last = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(nnx.relu(self.norm(self.first(x)))))


class TrainState(nnx.TrainState):
    """With all that is no parameter."""

    rest: nnx.State


model = Net(rngs=nnx.Rngs(0, dropout=1))
print("init", fingerprints.of(model))
model.train()
graphdef, params, rest = nnx.split(model, nnx.Param, ...)
state = TrainState.create(graphdef, params=params, rest=rest, tx=optax.adam(0.02))
x = jax.random.normal(jax.random.key(2), (12, 4))
labels = jnp.argmax(x[:, :3], axis=1)


@jax.jit
def train_step(state: TrainState, x: jax.Array, labels: jax.Array):
    """One step; the new state, and what there is to report."""

    def loss_fn(params):
        rest = jax.tree.map(lambda x: x, state.rest)  # Variables of this trace
        model = nnx.merge(state.graphdef, params, rest)
        logits = model(x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), (logits, nnx.state(model, nnx.Not(nnx.Param)))

    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, (logits, rest)), grads = grad_fn(state.params)
    accuracy = jnp.mean(jnp.argmax(logits, axis=1) == labels)
    return state.apply_gradients(grads, rest=rest), loss, accuracy


for _ in range(5):
    state, loss, accuracy = train_step(state, x, labels)
    print("step", int(state.step), float(loss), float(accuracy))
trained = nnx.merge(state.graphdef, state.params, state.rest)
trained.eval()
print("evaluated", float(jnp.mean(jnp.argmax(trained(x), axis=1) == labels)))
print("mean", float(jnp.sum(trained.norm.mean[...])))
