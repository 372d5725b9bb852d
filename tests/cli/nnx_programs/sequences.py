# SPDX-License-Identifier: Apache-2.0
"""Recurrent networks over padded sequences, in one and both directions."""

import fingerprints
import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Tagger(nnx.Module):
    """An embedding, a bidirectional LSTM, a GRU and a head."""

    def __init__(self, vocabulary, width, tags, rngs):
        self.embed = nnx.Embed(num_embeddings=vocabulary, features=width, rngs=rngs)
        self.both = nnx.Bidirectional(
            nnx.RNN(nnx.OptimizedLSTMCell(width, width, rngs=rngs)),
            nnx.RNN(nnx.LSTMCell(width, width, rngs=rngs)),
            rngs=rngs,
        )
        self.rnn = nnx.RNN(nnx.GRUCell(2 * width, width, rngs=rngs), return_carry=True)
        self.head = nnx.Linear(width, tags, rngs=rngs)

    def __call__(self, tokens, lengths):
        x = self.both(self.embed(tokens), seq_lengths=lengths)
        carry, x = self.rnn(x, seq_lengths=lengths)
        return carry, self.head(x)


tokens = jax.random.randint(jax.random.key(0), (4, 6), 0, 9)
lengths = jnp.array([6, 3, 5, 1])
model = Tagger(9, 5, 3, nnx.Rngs(0))
print("parameters", sum(p.size for p in jax.tree.leaves(nnx.state(model, nnx.Param))))
for path, value in nnx.to_flat_state(nnx.state(model, nnx.Param)):
    print(
        "param",
        "/".join(map(str, path)),
        value.shape,
        round(float(jnp.abs(value[...]).sum()), 4),
    )
carry, logits = nnx.jit(Tagger.__call__)(model, tokens, lengths)
print("carry", float(carry.sum()), float(logits.sum()), logits.shape)
optimizer = nnx.Optimizer(model, optax.rmsprop(0.01), wrt=nnx.Param)


@nnx.jit
def step(model, optimizer, lengths):
    def loss_fn(model):
        _, logits = model(tokens, lengths)
        mask = jnp.arange(6)[None] < lengths[:, None]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens % 3)
        return jnp.where(mask, losses, 0).sum() / mask.sum()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


for number in range(4):
    print("loss", number, float(step(model, optimizer, lengths)))

cell = nnx.SimpleCell(3, 4, rngs=nnx.Rngs(1))
print("init cell", fingerprints.of(nnx.Linear(3, 4, rngs=nnx.Rngs(1))))
carry = cell.initialize_carry((2, 3), nnx.Rngs(2))
for _ in range(3):
    carry, y = cell(carry, jnp.ones((2, 3)))
print("cell", float(y.sum()), carry.shape)
reverse = nnx.RNN(
    nnx.GRUCell(3, 4, rngs=nnx.Rngs(3)), reverse=True, keep_order=True, time_major=True
)
print("reverse", float(reverse(jnp.ones((5, 2, 3))).sum()))
