# SPDX-License-Identifier: Apache-2.0
"""Small models that several test files use in place of real ones."""

import jax.numpy as jnp

import treetap as tt


class Linear(tt.Module):
    def __init__(self, din=2, dout=3, bias=True):
        self.w = tt.Param(jnp.ones((din, dout)))
        self.b = tt.Param(jnp.zeros(dout)) if bias else None
        self.dout = dout

    def __call__(self, x):
        return x @ self.w + self.b


def bent(x):
    return jnp.tanh(x)


class Net(tt.Module):
    def __init__(self):
        self.first = Linear(2, 3)
        self.layers = tt.List([Linear(3, 3), bent])
        self.calls = tt.Variable(0)
        self.scale = jnp.ones(3)

    def __call__(self, x):
        self.calls[...] += 1
        return self.layers[0](self.first(x)) * self.scale


# The paths of the leaves of `Net`.
PATHS = (
    ("calls",),
    ("first", "b"),
    ("first", "w"),
    ("layers", 0, "b"),
    ("layers", 0, "w"),
    ("scale",),
)


class Noise(tt.Module):
    """In place of Dropout: a mode, a rate, a stream."""

    def __init__(self, rngs=None):
        self.rate = 0.5
        self.deterministic = False
        self.rngs = tt.data(None if rngs is None else rngs.dropout.fork())

    def set_view(self, deterministic: bool | None = None):
        if deterministic is not None:
            self.deterministic = deterministic


class Averaging(tt.Module):
    """In place of BatchNorm."""

    def __init__(self):
        self.use_running_average = False
        self.mean = tt.BatchStat(jnp.zeros(2))


class Model(tt.Module):
    """One of both, with their modes."""

    def __init__(self):
        self.noise = Noise()
        self.norm = Averaging()

    @property
    def size(self):
        return 2


def modes_of(model):
    return model.noise.deterministic, model.norm.use_running_average, model.noise.rate
