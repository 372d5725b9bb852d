# SPDX-License-Identifier: Apache-2.0
"""A variational autoencoder of cax, trained."""

import jax
import optax
from cax.nn.vae import VAE
from flax import nnx

model = VAE(spatial_dims=(8, 8), features=(1, 4, 8), latent_size=3, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
images = jax.random.uniform(jax.random.key(0), (4, 8, 8, 1))


@nnx.jit
def step(model, optimizer):
    def loss_of(model):
        logits, mean, logvar = model(images)
        error = optax.sigmoid_binary_cross_entropy(logits, images).mean()
        return error + (mean**2 + jax.numpy.exp(logvar) - 1 - logvar).mean()

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


losses = [step(model, optimizer) for _ in range(3)]
results = {"params": nnx.to_pure_dict(nnx.state(model)), "losses": losses}
