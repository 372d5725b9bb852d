# SPDX-License-Identifier: Apache-2.0
"""A learned steering vector: one array, added on the way, changes what a model does.

A small classifier is trained to tell two rings apart, and then left alone. A vector is
learned that, added to its hidden layer, makes it say "outer" everywhere; another layer
or another vector is another number for the same compiled program.

    python examples/steering.py
"""

import jax
import jax.numpy as jnp
import optax

import treetap as tt
from treetap import edits

HIDDEN = "hidden:__call__"


class Rings(tt.Module):
    """A classifier of points in the plane."""

    def __init__(self, *, rngs: tt.Rngs):
        self.hidden = tt.Linear(2, 32, rngs=rngs)
        self.out = tt.Linear(32, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The logits of each point."""
        return self.out(jax.nn.relu(self.hidden(x)))


def points(key: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Points on two rings, and which ring each is on."""
    first, second = jax.random.split(key)
    labels = jax.random.bernoulli(first, 0.5, (count,)).astype(int)
    angle = jax.random.uniform(second, (count,), maxval=2 * jnp.pi)
    radius = 1.0 + labels
    return radius[:, None] * jnp.stack([jnp.cos(angle), jnp.sin(angle)], 1), labels


def loss_of(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """How wrong answers are."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.mean(losses)


def trained(model: Rings, x: jax.Array, labels: jax.Array) -> Rings:
    """The model after some steps."""
    optimizer = tt.Optimizer(model, optax.adam(1e-2), wrt=tt.Param)

    @tt.jit
    def step(model: Rings, optimizer: tt.Optimizer) -> None:
        grads = tt.grad(lambda model: loss_of(model(x), labels))(model)
        optimizer.update(model, grads)

    for _ in range(200):
        step(model, optimizer)
    return model


def steering_vector(model: Rings, x: jax.Array, wanted: jax.Array) -> jax.Array:
    """A vector for the hidden layer that brings about some answers."""
    solver = optax.adam(0.1)

    def loss(vector: jax.Array) -> jax.Array:
        logits = tt.edit(model, {HIDDEN: edits.add(vector)})(x)
        return loss_of(logits, wanted) + 1e-3 * jnp.sum(vector**2)

    @jax.jit
    def step(
        vector: jax.Array, state: optax.OptState
    ) -> tuple[jax.Array, optax.OptState]:
        updates, state = solver.update(jax.grad(loss)(vector), state)
        return optax.apply_updates(vector, updates), state  # pyright: ignore[reportReturnType] - an array as it was

    vector = jnp.zeros(32)
    state = solver.init(vector)
    for _ in range(100):
        vector, state = step(vector, state)
    return vector


def main() -> None:
    """Trains, steers, and says how well both went."""
    x, labels = points(jax.random.key(0), 256)
    model = trained(Rings(rngs=tt.Rngs(0)), x, labels)
    right = jnp.mean(jnp.argmax(model(x), -1) == labels)
    vector = steering_vector(model, x, jnp.ones_like(labels))
    answers = jnp.argmax(tt.edit(model, {HIDDEN: edits.add(vector)})(x), -1)
    print(f"right before: {right:.2f}, 'outer' when steered: {jnp.mean(answers):.2f}")
    assert right > 0.9
    assert jnp.mean(answers) > 0.9


if __name__ == "__main__":
    main()
