# SPDX-License-Identifier: Apache-2.0
"""Steps of a training, which tests interrupt, break and repeat."""

import jax.numpy as jnp

import treetap as tt


def loss(model, x):
    return jnp.mean(model(x) ** 2)


def step(model, optimizer, x):
    value, grads = tt.value_and_grad(loss)(model, x)
    optimizer.update(model, grads)
    return value


def two_steps(model, optimizer, x):
    """The step as the body of a scan."""

    def body(both, x):
        return both, step(*both, x)

    run = tt.scan(body, in_axes=(tt.Carry, 0), out_axes=(tt.Carry, 0))
    return run((model, optimizer), jnp.stack([x, 2 * x]))[1]
