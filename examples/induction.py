# SPDX-License-Identifier: Apache-2.0
"""Activation patching finds the two heads of an induction circuit.

A model of two layers of attention alone learns to go on with a sequence that repeats.
It needs a head in the first layer that looks at the token before, and one in the second
that looks for what came after the current token the last time. The model is rewarded
for using few heads; which ones it uses is for patching to find out.

    python examples/induction.py
"""

import jax
import jax.numpy as jnp
import optax

import treetap as tt
from treetap import edits

WORDS, HALF, WIDTH, HEADS = 16, 8, 64, 4
LENGTH = 2 * HALF
SIZE = WIDTH // HEADS


class Attention(tt.Module):
    """A layer of attention heads; what each puts out, and where it looks, is tapped."""

    def __init__(self, *, rngs: tt.Rngs):
        self.qkv = tt.Param(rngs.params.normal((3, HEADS, WIDTH, SIZE)) / 8)
        self.out = tt.Param(rngs.params.normal((HEADS, SIZE, WIDTH)) / 8)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The sum of what all heads put out."""
        query, key, value = jnp.einsum("tw,phwd->phtd", x, self.qkv[...])
        scores = jnp.einsum("hsd,htd->hst", query, key) / SIZE**0.5
        is_before = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
        scores = jnp.where(is_before[None], scores, -1e9)
        pattern = tt.tap(jax.nn.softmax(scores), "pattern")
        heads = tt.tap(jnp.einsum("hst,htd->hsd", pattern, value), "heads")
        return jnp.einsum("hsd,hdw->sw", heads, self.out[...])

    def size(self) -> jax.Array:
        """How much the heads are used; the sum of norms makes some exactly nothing."""
        parts = self.out[...], self.qkv[...][2]
        return sum(
            (jnp.sqrt(jnp.sum(part**2, (1, 2)) + 1e-12).sum() for part in parts),
            start=jnp.zeros(()),
        )


class Model(tt.Module):
    """Two layers, and the way from tokens and back."""

    def __init__(self, *, rngs: tt.Rngs):
        self.words = tt.Param(rngs.params.normal((WORDS, WIDTH)))
        self.places = tt.Param(rngs.params.normal((LENGTH, WIDTH)))
        self.layers = tt.List([Attention(rngs=rngs) for _ in range(2)])
        self.back = tt.Param(rngs.params.normal((WIDTH, WORDS)) / 8)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """For each position the logits of the next token."""
        x = self.words[...][tokens] + self.places[...]
        for layer in self.layers:
            x = x + layer(x)
        return x @ self.back[...]


def sequences(
    key: jax.Array, count: int, shortest: int = 4
) -> tuple[jax.Array, jax.Array]:
    """Sequences that repeat, and after how long each does."""

    def one(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        first, second = jax.random.split(key)
        period = jax.random.randint(first, (), shortest, HALF + 1)
        words = jax.random.permutation(second, WORDS)
        return words[jnp.arange(LENGTH) % period], period

    return jax.vmap(one)(jax.random.split(key, count))


def loss_of(model: Model, tokens: jax.Array, periods: jax.Array) -> jax.Array:
    """Of what comes next, from when on it can be known."""
    logits = jax.vmap(model)(tokens)[:, :-1]
    found = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    is_known = jnp.arange(LENGTH - 1)[None] >= periods[:, None]
    return jnp.sum(found * is_known) / jnp.sum(is_known)


Both = tuple[Model, tt.Optimizer[Model]]


def trained(seed: int = 0, steps: int = 1500) -> Model:
    """A model that has learned the task, in one compiled loop."""
    model = Model(rngs=tt.Rngs(seed))
    schedule = optax.cosine_decay_schedule(3e-3, steps)
    optimizer = tt.Optimizer(model, optax.adam(schedule), wrt=tt.Param)

    def loss(model: Model, key: jax.Array) -> jax.Array:
        used = sum((layer.size() for layer in model.layers), start=jnp.zeros(()))
        return loss_of(model, *sequences(key, 64)) + 0.03 * used

    @tt.scan(in_axes=(tt.Carry, 0), out_axes=tt.Carry)
    def step(both: Both, key: jax.Array) -> Both:
        model, optimizer = both
        optimizer.update(model, tt.grad(loss)(model, key))
        return both

    @tt.jit
    def train(both: Both, keys: jax.Array) -> None:
        step(both, keys)

    train((model, optimizer), jax.random.split(jax.random.key(seed + 1), steps))
    return model


class Task:
    """Sequences that repeat, the same with another first half, and a measure."""

    def __init__(self, count: int = 32):
        self.clean, _ = sequences(jax.random.key(3), count, HALF)
        others, _ = sequences(jax.random.key(4), count, HALF)
        self.corrupted = jnp.concatenate([others[:, :HALF], self.clean[:, HALF:]], 1)

    def score(self, logits: jax.Array) -> jax.Array:
        """The log-probability of how the clean sequences go on."""
        found = jax.nn.log_softmax(logits)[:, HALF:-1]
        return jnp.take_along_axis(found, self.clean[:, HALF + 1 :, None], -1).mean()


def patched(model: Model, task: Task) -> tt.PatchGrid:
    """What each head of the clean run, put into the corrupted one, brings back."""
    fn = jax.vmap(model)
    _, record = tt.observe(fn)(task.clean)
    return tt.patch_grid(fn, record, (task.corrupted,), "**:heads", task.score, axis=0)


def without_each(model: Model, task: Task, layer: int) -> jax.Array:
    """The score of the clean run without each head of a layer: its mean instead."""

    def without(head: jax.Array) -> jax.Array:
        mask = (jnp.arange(HEADS) == head)[:, None, None]
        change = {f"**/layers/{layer}:heads": edits.mean(1).where(mask)}
        return task.score(tt.edit(jax.vmap(model), change)(task.clean))

    return jax.jit(jax.vmap(without))(jnp.arange(HEADS))


def main() -> None:
    model, task = trained(), Task()
    grid = patched(model, task)
    print(f"clean {task.score(jax.vmap(model)(task.clean)):.3f}", end="   ")
    print(f"corrupted {grid.baseline:.3f}   (log-probability of the right answer)")
    print("\nhead       patched in    left out")
    for layer in range(2):
        left_out = without_each(model, task, layer)
        for head in range(HEADS):
            gain = grid.effects[layer, head]
            print(f"{layer}.{head}       {gain:+10.3f}  {left_out[head]:+10.3f}")
    print("\nWhat brings the answer back is the induction head; the one without which")
    print("it is lost, in the layer before, is the head of the previous token.")


if __name__ == "__main__":
    main()
