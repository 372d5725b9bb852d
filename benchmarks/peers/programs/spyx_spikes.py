# SPDX-License-Identifier: Apache-2.0
"""A spiking network of spyx, unrolled over time and trained."""

import jax
import optax
from flax import nnx
from spyx import nn

model = nn.Sequential(
    nnx.Linear(6, 12, rngs=nnx.Rngs(0)),
    nn.LIF((12,), rngs=nnx.Rngs(1)),
    nnx.Linear(12, 3, rngs=nnx.Rngs(2)),
    nn.LI((3,), rngs=nnx.Rngs(3)),
)
optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
spikes = jax.random.bernoulli(jax.random.key(0), 0.5, (10, 4, 6)).astype("float32")


@nnx.jit
def step(model, optimizer):
    def loss_of(model):
        traces, _ = nn.run(model, spikes)
        return (traces.mean(0) ** 2).mean()

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


losses = [step(model, optimizer) for _ in range(3)]
results = {"params": nnx.to_pure_dict(nnx.state(model)), "losses": losses}
