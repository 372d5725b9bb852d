# SPDX-License-Identifier: Apache-2.0
"""ott's velocity field and U-Net under a flow-matching loss, with its running mean."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from ott.neural.networks.velocity_field.ema import EMA
from ott.neural.networks.velocity_field.mlp import MLP
from ott.neural.networks.velocity_field.unet import UNet


def trained(model, optimizer, ema, shape):
    @nnx.jit
    def step(model, optimizer, ema, key):
        first, last, at = jax.random.split(key, 3)
        x0 = jax.random.normal(first, shape)
        x1 = jax.random.normal(last, shape) + 1.0
        t = jax.random.uniform(at, shape[:1])
        wide = t.reshape(-1, *[1] * (len(shape) - 1))

        def loss_of(model):
            velocity = model(t, wide * x1 + (1 - wide) * x0)
            return ((velocity - (x1 - x0)) ** 2).mean()

        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        ema(model)
        return loss

    keys = jax.random.split(jax.random.key(0), 3)
    losses = jnp.stack([step(model, optimizer, ema, key) for key in keys])
    states = [nnx.state(model), nnx.state(ema)]
    return losses, [nnx.to_pure_dict(state) for state in states]


results = {}
for name, model, shape in [
    ("mlp", MLP(2, hidden_dims=(16, 16), rngs=nnx.Rngs(0)), (8, 2)),
    (
        "unet",
        UNet(
            shape=(8, 8, 3),
            model_channels=32,
            num_res_blocks=1,
            attention_resolutions=(2,),
            channel_mult=(1, 2),
            num_heads=2,
            rngs=nnx.Rngs(0),
        ),
        (2, 8, 8, 3),
    ),
]:
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    results[name] = trained(model, optimizer, EMA(model, decay=0.9), shape)
