# SPDX-License-Identifier: Apache-2.0
"""A variational autoencoder: noise from a stream, losses sown on the way."""

import fingerprints
import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Loss(nnx.Variable):
    """A term of the loss."""


class Encoder(nnx.Module):
    """Images to latents."""

    def __init__(self, size: int, hidden: int, latent: int, *, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(size, hidden, rngs=rngs)
        self.mean = nnx.Linear(hidden, latent, rngs=rngs)
        self.spread = nnx.Linear(hidden, latent, rngs=rngs)
        self.rngs = rngs

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.hidden(x.reshape(x.shape[0], -1)))
        mean, std = self.mean(x), jnp.exp(self.spread(x))
        divergence = jnp.mean(
            0.5 * jnp.mean(-jnp.log(std**2) - 1.0 + std**2 + mean**2, axis=-1)
        )
        self.sow(Loss, "divergence", divergence)
        return mean + std * jax.random.normal(self.rngs.noise(), mean.shape)


class VAE(nnx.Module):
    """Both halves."""

    def __init__(self, size=16, hidden=12, latent=3, *, rngs: nnx.Rngs):
        self.latent = latent
        self.encoder = Encoder(size, hidden, latent, rngs=rngs)
        self.decoder = nnx.Sequential(
            nnx.Linear(latent, hidden, rngs=rngs),
            nnx.relu,
            nnx.Linear(hidden, size, rngs=rngs),
        )

    def __call__(self, x):
        return self.decoder(self.encoder(x)).reshape(x.shape)

    def generate(self, z):
        return nnx.sigmoid(self.decoder(z))


model = VAE(rngs=nnx.Rngs(0, noise=1))
print("init", fingerprints.of(model))
images = (jax.random.uniform(jax.random.key(1), (10, 4, 4)) > 0.5).astype(jnp.float32)
optimizer = nnx.Optimizer(model, optax.adam(0.02), wrt=nnx.Param)


@nnx.jit
def train_step(model: VAE, optimizer: nnx.Optimizer, x: jax.Array):
    def loss_fn(model: VAE):
        logits = model(x)
        losses = nnx.pop(model, Loss)
        divergence = sum(jax.tree.leaves(losses), 0.0)
        fit = jnp.mean(optax.sigmoid_binary_cross_entropy(logits, x))
        return fit + 0.1 * divergence, divergence

    (loss, divergence), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, grads)
    return loss, divergence


for number in range(6):
    print("step", number, *map(float, train_step(model, optimizer, images)))


@nnx.jit
def sample(model: VAE, z: jax.Array):
    return model.generate(z)


print("sample", float(sample(model, jnp.ones((2, 3))).sum()))
print("left", [type(v).__name__ for _, v in nnx.to_flat_state(nnx.state(model, Loss))])
values, captured = nnx.capture(model, Loss)(images)
print("captured", float(jax.tree.leaves(captured)[0]), values.shape)
