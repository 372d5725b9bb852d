# SPDX-License-Identifier: Apache-2.0
"""Small models to train, and what plain optax makes of them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import treetap as tt

X = ((jnp.arange(8) % 7 - 3) / 4).reshape(4, 2)
Y = jnp.ones((4, 3))


class Linear(tt.Module):
    def __init__(self, rngs, **metadata):
        init = jax.nn.initializers.lecun_normal()
        self.kernel = tt.Param(init(rngs.params(), (2, 3)), **metadata)
        self.bias = tt.Param(jnp.zeros(3))

    def __call__(self, x):
        return x @ self.kernel + self.bias[None]


class Model(tt.Module):
    """A layer with a counter, a statistic and a random stream beside it."""

    def __init__(self, rngs):
        self.layer = Linear(rngs)
        self.mean = tt.BatchStat(jnp.zeros(2))
        self.calls = tt.Variable(jnp.array(0))
        self.rngs = rngs.fork()

    def __call__(self, x):
        self.calls[...] += 1
        self.mean[...] = 0.5 * self.mean + 0.5 * x.mean(0)
        return self.layer(x + 0.0 * self.rngs.normal(x.shape))


def loss_of(model, x=X, y=Y):
    return ((model(x) - y) ** 2).mean()


def arrays(tree):
    return jax.tree.map(np.asarray, tt.to_pure_dict(tt.state(tree, tt.Param)))


def assert_close(one, two, **options):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6, **options),
        one,
        two,
    )


def pure_loss(params):
    return ((X @ params["kernel"] + params["bias"][None] - Y) ** 2).mean()


def reference(tx, steps, extra=lambda value, grads: {}):
    """Parameters and state after some steps of plain optax on a dict."""
    params = arrays(Linear(tt.Rngs(0)))
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(pure_loss)(params)
        updates, state = tx.update(grads, state, params, **extra(value, grads))
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = step(params, state)
    return params, state
