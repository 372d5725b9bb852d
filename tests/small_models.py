# SPDX-License-Identifier: Apache-2.0
"""A layer that scales, and what observations of models made of it are asked."""

import jax.numpy as jnp

import treetap as tt

ONE = jnp.array(1.0)


class Layer(tt.Module):
    def __init__(self, by=2.0):
        self.by = tt.Param(jnp.array(by))

    def __call__(self, x):
        return x * self.by


def forward(model, x):
    return model(x)


def paths(fn, *args):
    """Paths of the calls of layers, in order of execution."""
    _, record = tt.observe(fn, "**:__call__")(*args)
    return [site.path for site in record if site.path]


def texts_of(fn, *args):
    """What all sites are called, in order of execution."""
    return [site.text for site in tt.observe(fn)(*args)[1]]


class Scaled(tt.Module):
    """Holds a static value that can change without being noticed."""

    def __init__(self, scale):
        self.options = {"scale": scale}

    def __call__(self, x):
        return x * self.options["scale"]
