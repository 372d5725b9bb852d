# SPDX-License-Identifier: Apache-2.0
"""The built-in model: a small character transformer that learns a poem while you wait.

It is there so that `treetap inspect` has something to show before anyone has written a
model. It is trained in the plainest way the library has, and looked at now and then.
"""

from collections.abc import Callable
from importlib import resources
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from treetap._capture.emit import tap
from treetap._core.variables.kinds import Param
from treetap._modules.containers import List
from treetap._modules.module import Module
from treetap._modules.random_streams import Rngs
from treetap._nn.embedding import Embed
from treetap._nn.linear import Linear
from treetap._nn.multihead import MultiHeadAttention
from treetap._nn.normalization import LayerNorm
from treetap._observe.observe import observe
from treetap._observe.records import Record
from treetap._train.optimizer import Optimizer
from treetap._transforms.grad import value_and_grad
from treetap._transforms.jit import jit

# Lewis Carroll, "Jabberwocky", 1871.
POEM = resources.files("treetap._cli").joinpath("jabberwocky.txt").read_text("utf-8")
LETTERS = sorted(set(POEM))
NUMBERS = np.array([LETTERS.index(letter) for letter in POEM], np.int32)
WIDTH, HEADS, BLOCKS, CONTEXT, BATCH = 64, 4, 3, 32, 16
LOOKS = 8


class Block(Module):
    """Attention and a small network, each added to what comes in."""

    def __init__(self, rngs: Rngs):
        self.norm_1 = LayerNorm(WIDTH, rngs=rngs)
        self.attention = MultiHeadAttention(HEADS, WIDTH, rngs=rngs)
        self.norm_2 = LayerNorm(WIDTH, rngs=rngs)
        self.up = Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[batch, time, width]` to the same."""
        x = x + self.attention(self.norm_1(x), is_causal=True)
        hidden = tap(jax.nn.relu(self.up(self.norm_2(x))), "hidden")
        return x + self.down(hidden)


class Poet(Module):
    """A decoder: from letters to scores for the one that follows each."""

    def __init__(self, rngs: Rngs):
        self.letters = Embed(len(LETTERS), WIDTH, rngs=rngs)
        self.places = Embed(CONTEXT, WIDTH, rngs=rngs)
        self.blocks = List([Block(rngs) for _ in range(BLOCKS)])
        self.norm = LayerNorm(WIDTH, rngs=rngs)
        self.head = Linear(WIDTH, len(LETTERS), rngs=rngs)

    def __call__(self, letters: jax.Array) -> jax.Array:
        """`[batch, time]` of letters to `[batch, time, letters]` of scores."""
        x = self.letters(letters) + self.places(jnp.arange(letters.shape[-1]))[None]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(model: Poet, rows: jax.Array) -> jax.Array:
    """The mean loss of `[batch, time + 1]` letters."""
    import optax

    scores = model(rows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(scores, rows[:, 1:]).mean()


class Trained(NamedTuple):
    """A run of training.

    Attributes:
        model: The model.
        losses: One for each step.
        records: What was seen now and then; the last one of the trained model.
        steps: When that was.
    """

    model: Poet
    losses: list[float]
    records: list[Record]
    steps: list[int]


def trained(steps: int, seed: int, select: Any, report: Callable[..., None]) -> Trained:
    """Trains the built-in model.

    Args:
        steps: How many steps.
        seed: Of weights and batches.
        select: Which sites to look at.
        report: Called with the step and its loss, after each.
    """
    import optax

    model = Poet(Rngs(seed))
    optimizer = Optimizer(model, optax.adamw(3e-3), wrt=Param)
    random = np.random.default_rng(seed)

    def batch(size: int) -> jax.Array:
        starts = random.integers(0, len(NUMBERS) - CONTEXT, size)
        return jnp.asarray(NUMBERS[starts[:, None] + np.arange(CONTEXT + 1)])

    @jit
    def train_step(model: Poet, optimizer: Any, rows: jax.Array) -> jax.Array:
        loss, grads = value_and_grad(loss_fn)(model, rows)
        optimizer.update(model, grads)
        return loss

    look = jit(observe(value_and_grad(loss_fn), select, grads=True))
    seen = batch(4)
    # few, evenly spread, the first and the last
    when = sorted({round(steps * n / (LOOKS - 1)) for n in range(LOOKS)})
    losses: list[float] = []
    records: list[Record] = []
    for step in range(steps + 1):
        if step in when:
            records.append(look(model, seen)[1])
        if step < steps:
            losses.append(float(train_step(model, optimizer, batch(BATCH))))
            report(step + 1, losses[-1])
    return Trained(model, losses, records, when)


def written(model: Poet, start: str, count: int) -> str:
    """What the model writes after `start`, the likeliest letter each time."""

    @jax.jit
    def following(model: Poet, rows: jax.Array, last: jax.Array) -> jax.Array:
        return model(rows)[0, last].argmax()

    numbers = [LETTERS.index(letter) for letter in start]
    for _ in range(count):
        window = numbers[-CONTEXT:]
        rows = np.array([window + [0] * (CONTEXT - len(window))], np.int32)
        numbers.append(int(following(model, rows, len(window) - 1)))
    return "".join(LETTERS[number] for number in numbers)
