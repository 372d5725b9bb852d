# SPDX-License-Identifier: Apache-2.0
"""Two spirals, a small network, plain `jax.jit` and optax: the library in one file.

A model is an ordinary JAX tree, so `jax.jit`, `jax.value_and_grad` and optax take it as
it is. Run with `make demo`.
"""

import itertools

import jax
import jax.numpy as jnp
import optax

import treetap as tt


class Linear(tt.Module):
    """A matrix and a bias."""

    def __init__(self, features_in: int, features_out: int, *, rngs: tt.Rngs):
        kernel = rngs.params.lecun_normal()((features_in, features_out))
        self.kernel = tt.Param(kernel)
        self.bias = tt.Param(jnp.zeros(features_out))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps the last axis."""
        return x @ self.kernel + self.bias[...]


class Classifier(tt.Module):
    """A few layers with a nonlinearity in between."""

    def __init__(self, sizes: list[int], *, rngs: tt.Rngs):
        pairs = itertools.pairwise(sizes)
        self.layers = tt.List([Linear(i, o, rngs=rngs) for i, o in pairs])

    def __call__(self, x: jax.Array) -> jax.Array:
        """One logit per point."""
        *hidden, last = self.layers
        for layer in hidden:
            x = jnp.tanh(layer(x))
        return last(x)[..., 0]


def spirals(count: int, rngs: tt.Rngs) -> tuple[jax.Array, jax.Array]:
    """Points on two interleaved spirals, with a little noise, and which is which."""
    labels = jnp.arange(count) % 2
    angle = 3.5 * jnp.pi * jnp.sqrt(rngs.data.uniform((count,)))
    turned = angle + labels * jnp.pi
    points = angle[:, None] * jnp.stack([jnp.cos(turned), jnp.sin(turned)], axis=-1)
    return points / 5 + 0.02 * rngs.data.normal((count, 2)), labels


def loss_fn(model: Classifier, points: jax.Array, labels: jax.Array) -> jax.Array:
    losses = optax.sigmoid_binary_cross_entropy(model(points), labels)
    return losses.mean()


def main() -> None:
    rngs = tt.Rngs(params=0, data=1)
    model = Classifier([2, 32, 32, 1], rngs=rngs)
    points, labels = spirals(512, rngs)
    print(model)

    optimizer = optax.adam(0.01)
    opt_state = optimizer.init(model)

    @jax.jit
    def train_step(model, opt_state):
        loss, grads = jax.value_and_grad(loss_fn)(model, points, labels)
        updates, opt_state = optimizer.update(grads, opt_state, model)
        return optax.apply_updates(model, updates), opt_state, loss

    print("\n step    loss   accuracy")
    for step in range(1001):
        model, opt_state, loss = train_step(model, opt_state)
        if step % 200 == 0:
            accuracy = ((model(points) > 0) == labels).mean()
            print(f"{step:5d} {loss:7.4f}   {accuracy:8.1%}")

    print("\nWhat the model holds:")
    for path, variable in tt.to_flat_state(tt.state(model)):
        print(f"  {'/'.join(map(str, path)):<18} {variable.shape}")


if __name__ == "__main__":
    main()
