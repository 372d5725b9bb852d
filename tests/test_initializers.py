# SPDX-License-Identifier: Apache-2.0
"""Initializers: those of JAX, and factories for zeros and ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treetap as tt
from treetap import nnx

NAMES = """
    Initializer constant delta_orthogonal glorot_normal glorot_uniform he_normal
    he_uniform kaiming_normal kaiming_uniform lecun_normal lecun_uniform normal ones
    orthogonal truncated_normal uniform variance_scaling xavier_normal xavier_uniform
    zeros
""".split()


@pytest.mark.parametrize("name", NAMES)
def test_initializers_are_those_of_jax(name):
    assert getattr(tt.initializers, name) is getattr(jax.nn.initializers, name)


def test_all_names_are_public_here_and_under_nnx():
    assert sorted(tt.initializers.__all__) == sorted(
        [*NAMES, "ones_init", "zeros_init"]
    )
    assert nnx.initializers is tt.initializers


@pytest.mark.parametrize(
    ("factory", "number"),
    [(tt.initializers.zeros_init, 0), (tt.initializers.ones_init, 1)],
)
def test_factories_of_constants(factory, number):
    made = factory()(jax.random.key(0), (2, 3), jnp.bfloat16)
    assert made.dtype == jnp.bfloat16
    np.testing.assert_array_equal(made, np.full((2, 3), number))
    assert factory()(jax.random.key(0), (2,)).dtype == jnp.float32


def test_factories_give_equal_initializers():
    """Layers made with them have one structure: nothing is compiled twice."""
    assert tt.initializers.zeros_init() is tt.initializers.zeros_init()
    assert tt.initializers.ones_init() is tt.initializers.ones_init()
