# SPDX-License-Identifier: Apache-2.0
"""A neural cellular automaton trained to become an image."""

import jax.numpy as jnp
import optax
from cax.core.perceive import ConvPerceive
from cax.core.update import NCAUpdate
from flax import nnx

CHANNELS = 8


class Automaton(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.perceive = ConvPerceive(
            channel_size=CHANNELS, perception_size=3 * CHANNELS, rngs=rngs
        )
        self.update = NCAUpdate(
            channel_size=CHANNELS,
            perception_size=3 * CHANNELS,
            hidden_layer_sizes=(16,),
            cell_dropout_rate=0.5,
            rngs=rngs,
        )

    def __call__(self, state):
        return self.update(state, self.perceive(state), None)


@nnx.jit
def train(model, optimizer, state):
    def loss_of(model):
        carry = nnx.StateAxes({nnx.RngState: nnx.Carry, ...: None})
        grow = nnx.scan(
            lambda model, state, _: (model(state), None),
            in_axes=(carry, nnx.Carry, 0),
            out_axes=(nnx.Carry, 0),
        )
        grown, _ = grow(model, state, jnp.arange(4))
        return ((grown[..., :4] - 0.5) ** 2).mean()

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


model = Automaton(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
state = jnp.zeros((8, 8, CHANNELS)).at[4, 4, 3:].set(1.0)
losses = [train(model, optimizer, state) for _ in range(3)]
results = {
    "params": nnx.to_pure_dict(nnx.state(model)),
    "losses": losses,
    "grown": model(state),
}
