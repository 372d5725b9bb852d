# SPDX-License-Identifier: Apache-2.0
"""Two spirals, a small network, an optimizer: the library in one file.

Model, optimizer and metrics go into one jitted step and change in place; afterwards a
look inside shows what every layer puts out. Run with `make demo`.
"""

import itertools

import jax
import jax.numpy as jnp
import optax

import treetap as tt


class Classifier(tt.Module):
    """A few layers with a nonlinearity in between."""

    def __init__(self, sizes: list[int], *, rngs: tt.Rngs):
        pairs = itertools.pairwise(sizes)
        self.layers = tt.List([tt.Linear(i, o, rngs=rngs) for i, o in pairs])

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


@tt.jit
def train_step(
    model: Classifier,
    optimizer: tt.Optimizer[Classifier],
    points: jax.Array,
    labels: jax.Array,
) -> jax.Array:
    """One step; model and optimizer are changed in place."""
    loss, grads = tt.value_and_grad(loss_fn)(model, points, labels)
    optimizer.update(model, grads)
    return loss


def main() -> None:
    rngs = tt.Rngs(params=0, data=1)
    model = Classifier([2, 32, 32, 1], rngs=rngs)
    optimizer = tt.Optimizer(model, optax.adam(0.01), wrt=tt.Param)
    points, labels = spirals(512, rngs)
    print(tt.summary(model, points))

    print(" step    loss   accuracy")
    for step in range(1001):
        loss = train_step(model, optimizer, points, labels)
        if step % 200 == 0:
            accuracy = ((model(points) > 0) == labels).mean()
            print(f"{step:5d} {loss:7.4f}   {accuracy:8.1%}")

    print("\nWhat every layer puts out, and how the loss depends on it:")
    observed = tt.observe(tt.value_and_grad(loss_fn), grads=True)
    _, record = observed(model, points, labels)
    for site in record:
        spread, slope = site.value.std(), jnp.linalg.norm(site.grad)
        print(f"  {site.text:<20} spread {spread:6.3f}   gradient {slope:8.5f}")


if __name__ == "__main__":
    main()
