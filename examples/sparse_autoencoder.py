# SPDX-License-Identifier: Apache-2.0
"""Activations of a model over many batches, kept in a store, explained by features.

A small network learns to add two numbers modulo a prime. What its hidden layer puts out
is appended to a store batch by batch; a sparse autoencoder, trained on shuffled rows of
the store, finds features that are seldom active and together make up the activations:
one for each of the numbers.

    python examples/sparse_autoencoder.py [FOLDER]

The store is made in FOLDER, and is continued if it is there; a temporary one otherwise.
"""

import pathlib
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax

import treetap as tt

PRIME, WIDTH, FEATURES = 23, 64, 128
SPARSITY = 1.0
SITE = "hidden:__call__"


class Adder(tt.Module):
    """Adds two numbers modulo a prime."""

    def __init__(self, *, rngs: tt.Rngs):
        self.numbers = tt.Embed(PRIME, WIDTH, rngs=rngs)
        self.hidden = tt.Linear(WIDTH, WIDTH, rngs=rngs)
        self.out = tt.Linear(WIDTH, PRIME, rngs=rngs)

    def __call__(self, pairs: jax.Array) -> jax.Array:
        """Scores of the sums of `[batch, 2]` numbers."""
        x = self.numbers(pairs).sum(axis=1)
        return self.out(jax.nn.relu(self.hidden(x)))


class SparseAutoencoder(tt.Module):
    """Features of which few are active, and the activations that they make up."""

    def __init__(self, width: int, features: int, *, rngs: tt.Rngs):
        self.encode = tt.Linear(width, features, rngs=rngs)
        self.decode = tt.Linear(features, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The activations as the features make them up, and the features."""
        features = jax.nn.relu(self.encode(x))
        return self.decode(features), features


def sum_loss(model: Adder, pairs: jax.Array) -> jax.Array:
    labels = pairs.sum(axis=1) % PRIME
    losses = optax.softmax_cross_entropy_with_integer_labels(model(pairs), labels)
    return losses.mean()


def sparse_loss(model: SparseAutoencoder, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    made_up, features = model(x)
    directions = jnp.linalg.norm(model.decode.kernel[...], axis=1)
    sizes = (features * directions[None]).sum(axis=1)
    error = ((made_up - x) ** 2).sum(axis=1).mean()
    return error + SPARSITY * sizes.mean(), (features > 0).mean()


@tt.jit
def train_adder(
    model: Adder, optimizer: tt.Optimizer[Adder], pairs: jax.Array
) -> jax.Array:
    loss, grads = tt.value_and_grad(sum_loss)(model, pairs)
    optimizer.update(model, grads)
    return loss


@tt.jit
def train_autoencoder(
    model: SparseAutoencoder,
    optimizer: tt.Optimizer[SparseAutoencoder],
    x: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    step = tt.value_and_grad(sparse_loss, has_aux=True)
    (loss, active), grads = step(model, x)
    optimizer.update(model, grads)
    return loss, active


def trained_adder() -> Adder:
    model = Adder(rngs=tt.Rngs(0))
    optimizer = tt.Optimizer(model, optax.adamw(3e-3), wrt=tt.Param)
    random = np.random.default_rng(0)
    for step in range(601):
        pairs = jnp.asarray(random.integers(0, PRIME, (256, 2)))
        loss = train_adder(model, optimizer, pairs)
        if step % 200 == 0:
            print(f"adder         step {step:4d}   loss {loss:7.4f}")
    return model


def pairs_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, PRIME, (128, 2))


def collect(model: Adder, folder: pathlib.Path, batches: int = 40) -> tt.Store:
    """Appends what the hidden layer puts out; continues where it was stopped."""
    observed = tt.observe(tt.jit(lambda model, pairs: model(pairs)), SITE)
    with tt.StoreWriter(folder, buffer=2**28) as writer:
        for number in range(len(writer), batches):
            _, record = observed(model, jnp.asarray(pairs_of(number)))
            writer.append(record, {"seed": number})
    return tt.Store(folder)


def explained(store: tt.Store, scale: float) -> SparseAutoencoder:
    """An autoencoder of activations whose squares are 1 on average."""
    model = SparseAutoencoder(WIDTH, FEATURES, rngs=tt.Rngs(1))
    optimizer = tt.Optimizer(model, optax.adam(3e-3), wrt=tt.Param)
    rows = store.shuffled(SITE, 256, seed=0, epochs=40, drop_last=True)
    for step, x in enumerate(rows):
        loss, active = train_autoencoder(model, optimizer, jnp.asarray(x / scale))
        if step % 200 == 0:
            print(f"autoencoder   step {step:4d}   loss {loss:7.4f}", end="")
            print(f"   {active:5.1%} of the features active")
    return model


def main() -> None:
    model = trained_adder()
    with tempfile.TemporaryDirectory() as temporary:
        given = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else None
        store = collect(model, given or pathlib.Path(temporary) / "activations")
        print(store)
        scale = float(np.sqrt((store[SITE][:1024] ** 2).mean()))
        autoencoder = explained(store, scale)
        x = jnp.asarray(store[SITE][:] / scale)
        seeds = [batch["seed"] for batch in store.metadata]
    made_up, features = autoencoder(x)
    error = ((made_up - x) ** 2).sum() / ((x - x.mean(axis=0)) ** 2).sum()
    print(f"the features explain {1 - error:.1%} of the variance")

    # a feature is what a number of the pair adds to the activations
    pairs = np.concatenate([pairs_of(seed) for seed in seeds])
    has = (pairs[:, :, None] == np.arange(PRIME)).any(axis=1)
    for feature in np.argsort(-features.mean(axis=0))[:5]:
        active = np.asarray(features[:, feature] > 0)
        number = int(has[active].mean(axis=0).argmax())
        share = has[active, number].mean()
        print(f"feature {feature:3d}: {active.mean():5.1%} of the pairs,", end=" ")
        print(f"of these {share:6.1%} with the number {number}")


if __name__ == "__main__":
    main()
