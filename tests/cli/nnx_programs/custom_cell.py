# SPDX-License-Identifier: Apache-2.0
"""A recurrent cell of one's own, in `nnx.RNN` and in a scan by hand."""

import fingerprints
import jax
import jax.numpy as jnp
from flax import nnx


class LeakyCell(nnx.RNNCellBase):
    """A carry that leaks, by a share that is learned."""

    def __init__(self, in_features: int, hidden_features: int, *, rngs: nnx.Rngs):
        self.in_features, self.hidden_features = in_features, hidden_features
        self.input = nnx.Linear(in_features, hidden_features, rngs=rngs)
        self.recurrent = nnx.Linear(
            hidden_features,
            hidden_features,
            use_bias=False,
            kernel_init=nnx.initializers.orthogonal(),
            rngs=rngs,
        )
        self.leak = nnx.Param(jnp.full((hidden_features,), 0.3))

    def __call__(self, carry, inputs):
        new = nnx.tanh(self.input(inputs) + self.recurrent(carry))
        carry = (1 - self.leak) * carry + self.leak * new
        return carry, carry

    def initialize_carry(self, input_shape, rngs=None, carry_init=None):
        batch = input_shape[: -self.num_feature_axes]
        return jnp.zeros((*batch, self.hidden_features))

    @property
    def num_feature_axes(self) -> int:
        return 1


rngs = nnx.Rngs(7)
rnn = nnx.RNN(LeakyCell(3, 5, rngs=rngs), return_carry=True)
print("init", fingerprints.of(rnn))
x = jax.random.normal(jax.random.key(0), (2, 6, 3))
carry, ys = rnn(x, seq_lengths=jnp.array([6, 3]))
print("shapes", ys.shape, carry.shape)
print("sums", float(jnp.sum(ys)), float(jnp.sum(carry)))

cell = LeakyCell(3, 5, rngs=nnx.Rngs(8))


@nnx.scan(in_axes=(None, nnx.Carry, 1), out_axes=(nnx.Carry, 1))
def unroll(cell: LeakyCell, carry: jax.Array, x: jax.Array):
    """One step of the cell."""
    return cell(carry, x)


last, seen = unroll(cell, cell.initialize_carry(x[:, 0].shape), x)
print("by hand", seen.shape, float(jnp.sum(last)))


def loss_fn(cell):
    _, seen = unroll(cell, cell.initialize_carry(x[:, 0].shape), x)
    return jnp.mean(seen**2)


grads = nnx.grad(loss_fn)(cell)
for path, value in nnx.to_flat_state(grads):
    print("/".join(map(str, path)), float(jnp.sum(value[...] ** 2)))
both = nnx.Bidirectional(rnn.__class__(cell), nnx.RNN(LeakyCell(3, 5, rngs=rngs)))
print("both ways", both(x).shape, float(jnp.mean(both(x) ** 2)))
