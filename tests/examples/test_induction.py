# SPDX-License-Identifier: Apache-2.0
"""Patching finds a known circuit: the two heads of an induction task.

A model of two layers of attention alone learns to go on with a sequence that repeats.
It needs a head that looks at the token before, in the first layer, and in the second
one that looks for where the current token was before, and copies what came next.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treetap as tt
from treetap import edits

WORDS, HALF, WIDTH, HEADS = 16, 8, 64, 2
LENGTH = 2 * HALF


class Attention(tt.Module):
    def __init__(self, *, rngs):
        def weights():
            return tt.Param(rngs.params.normal((3, HEADS, WIDTH, WIDTH // HEADS)) / 8)

        self.qkv = weights()
        self.out = tt.Param(rngs.params.normal((HEADS, WIDTH // HEADS, WIDTH)) / 8)

    def __call__(self, x):
        q, k, v = jnp.einsum("tw,phwd->phtd", x, self.qkv[...])
        scores = jnp.einsum("hsd,htd->hst", q, k) / (WIDTH // HEADS) ** 0.5
        causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
        scores = jnp.where(causal[None], scores, -1e9)
        pattern = tt.tap(jax.nn.softmax(scores), "pattern")
        heads = tt.tap(jnp.einsum("hst,htd->hsd", pattern, v), "heads")
        return jnp.einsum("hsd,hdw->sw", heads, self.out[...])


class Model(tt.Module):
    def __init__(self, *, rngs):
        self.words = tt.Param(rngs.params.normal((WORDS, WIDTH)))
        self.places = tt.Param(rngs.params.normal((LENGTH, WIDTH)))
        self.layers = tt.List([Attention(rngs=rngs) for _ in range(2)])
        self.back = tt.Param(rngs.params.normal((WIDTH, WORDS)) / 8)

    def __call__(self, tokens):
        x = self.words[...][tokens] + self.places[...]
        for layer in self.layers:
            x = x + layer(x)
        return x @ self.back[...]


def sequences(key, count, shortest=4):
    """Sequences that repeat after some time, and after how long each does."""

    def one(key):
        first, second = jax.random.split(key)
        period = jax.random.randint(first, (), shortest, HALF + 1)
        words = jax.random.permutation(second, WORDS)
        return words[jnp.arange(LENGTH) % period], period

    return jax.vmap(one)(jax.random.split(key, count))


def loss_of(model, tokens, periods):
    """Of what comes next, from when on it can be known."""
    logits = jax.vmap(model)(tokens)[:, :-1]
    found = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    known = jnp.arange(LENGTH - 1)[None] >= periods[:, None]
    return jnp.sum(found * known) / jnp.sum(known)


@pytest.fixture(scope="module")
def model():
    definition, weights = tt.split(Model(rngs=tt.Rngs(0)))
    solver = optax.adam(optax.cosine_decay_schedule(3e-3, 1000))

    def loss(weights, key):
        return loss_of(tt.merge(definition, weights), *sequences(key, 64))

    def step(held, key):
        weights, state = held
        updates, state = solver.update(jax.grad(loss)(weights, key), state)
        return (optax.apply_updates(weights, updates), state), None

    keys = jax.random.split(jax.random.key(1), 1000)
    train = jax.jit(lambda held: jax.lax.scan(step, held, keys)[0])
    weights, _ = train((weights, solver.init(weights)))
    trained = tt.merge(definition, weights)
    assert loss_of(trained, *sequences(jax.random.key(2), 64)) < 0.3
    return trained


def test_patching_finds_the_previous_token_head_and_the_induction_head(model):
    tokens = sequences(jax.random.key(3), 1, HALF)[0][0]
    _, record = tt.observe(model)(tokens)
    rows = np.arange(LENGTH)
    first, second = (record[f"layers/{n}:pattern"].value for n in range(2))
    previous = np.asarray(first[:, rows[1:], rows[1:] - 1].mean(1))
    later = rows[HALF:]
    induction = np.asarray(second[:, later, later - HALF + 1].mean(1))

    # The clean run repeats itself; in the corrupted one the first half is another.
    others = sequences(jax.random.key(4), 1, HALF)[0][0]
    corrupted = jnp.concatenate([others[:HALF], tokens[HALF:]])

    def metric(logits):
        right = jax.nn.log_softmax(logits)[rows[HALF:-1], tokens[HALF + 1 :]]
        return jnp.mean(right)

    grid = tt.patch_grid(model, record, (corrupted,), "**:heads", metric, axis=0)
    assert grid.effects.shape == (2, HEADS)
    effects = np.asarray(grid.effects[1])
    assert ((effects > effects.max() / 2) == (induction > 0.5)).all()
    assert effects.max() > 5.0  # and the answer is there again

    # Without the head of the token before, nothing is left of it.
    def without(head):
        mask = (jnp.arange(HEADS) == head)[:, None, None]
        change = edits.mean(1).where(mask)
        return metric(tt.edit(model, {"layers/0:heads": change})(tokens))

    scores = jax.vmap(without)(jnp.arange(HEADS))
    assert int(np.argmin(scores)) == int(np.argmax(previous))
