# SPDX-License-Identifier: Apache-2.0
"""A generator and a discriminator trained against each other, two optimizers."""

import fingerprints
import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Generator(nnx.Module):
    """Noise to small images."""

    def __init__(self, latent, rngs):
        self.latent = latent
        self.project = nnx.Linear(latent, 2 * 2 * 8, rngs=rngs)
        self.norm = nnx.GroupNorm(8, num_groups=2, rngs=rngs)
        self.up = nnx.ConvTranspose(8, 4, (4, 4), strides=(2, 2), rngs=rngs)
        self.out = nnx.Conv(4, 1, (3, 3), rngs=rngs)
        self.rngs = rngs.fork()

    def __call__(self, count):
        noise = self.rngs.noise.normal((count, self.latent))
        x = self.project(noise).reshape(count, 2, 2, 8)
        x = nnx.leaky_relu(self.norm(x), negative_slope=0.2)
        return jnp.tanh(self.out(nnx.leaky_relu(self.up(x))))


class Discriminator(nnx.Module):
    """Small images to a score."""

    def __init__(self, rngs):
        self.layers = nnx.Sequential(
            nnx.Conv(1, 8, (3, 3), strides=2, padding="SAME", rngs=rngs),
            nnx.leaky_relu,
            lambda x: x.reshape(x.shape[0], -1),
            nnx.Linear(32, 1, rngs=rngs),
        )

    def __call__(self, x):
        return self.layers(x)[..., 0]


def cross_entropy(logits, target):
    return optax.sigmoid_binary_cross_entropy(logits, jnp.full_like(logits, target))


@nnx.jit(static_argnames="count")
def step(generator, discriminator, g_opt, d_opt, real, *, count):
    def d_loss(discriminator, generator):
        fake = jax.lax.stop_gradient(generator(count))
        on_real = cross_entropy(discriminator(real), 1.0).mean()
        return on_real + cross_entropy(discriminator(fake), 0.0).mean()

    def g_loss(generator, discriminator):
        return cross_entropy(discriminator(generator(count)), 1.0).mean()

    loss_d, grads = nnx.value_and_grad(d_loss)(discriminator, generator)
    d_opt.update(discriminator, grads)
    on_params = nnx.DiffState(0, nnx.Param)
    loss_g, grads = nnx.value_and_grad(g_loss, argnums=on_params)(
        generator, discriminator
    )
    g_opt.update(generator, grads)
    return loss_d, loss_g


def main():
    generator = Generator(4, nnx.Rngs(params=0, noise=1))
    discriminator = Discriminator(nnx.Rngs(7))
    print("init generator", fingerprints.of(generator))
    print("init discriminator", fingerprints.of(discriminator))
    g_opt = nnx.Optimizer(generator, optax.adam(1e-3, b1=0.5), wrt=nnx.Param)
    d_opt = nnx.Optimizer(discriminator, optax.adam(1e-3, b1=0.5), wrt=nnx.Param)
    keys = jax.random.split(jax.random.key(3), 5)
    for number, key in enumerate(keys):
        real = jax.random.uniform(key, (8, 4, 4, 1)) - 0.5
        losses = step(generator, discriminator, g_opt, d_opt, real, count=8)
        print("step", number, *(float(loss) for loss in losses))
    images = nnx.jit(lambda generator: generator(3))(generator)
    print("images", float(jnp.abs(images).mean()), *images.shape)
    print("draws", int(generator.rngs.noise.count[...]))


main()
