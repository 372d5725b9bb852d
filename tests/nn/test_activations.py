# SPDX-License-Identifier: Apache-2.0
"""PReLU, and activations under the names models use."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from formulas import array, close, numbers

import treetap as tt

NAMES = """
    celu elu gelu glu hard_sigmoid hard_silu hard_swish hard_tanh identity leaky_relu
    log_sigmoid log_softmax logsumexp one_hot relu relu6 selu sigmoid silu soft_sign
    softmax softplus standardize swish tanh
""".split()


@pytest.mark.parametrize("name", NAMES)
def test_activations_are_those_of_jax(name):
    expected = jnp.tanh if name == "tanh" else getattr(jax.nn, name)
    assert getattr(tt, name) is expected


def test_negative_values_are_multiplied_by_the_slope():
    layer = tt.PReLU(0.25)
    x = numbers(2, 3)
    close(layer(array(2, 3)), np.where(x >= 0, x, 0.25 * x))
    assert layer.negative_slope.shape == ()
    assert type(layer.negative_slope) is tt.Param


def test_the_slope_begins_small():
    assert float(tt.PReLU().negative_slope[...]) == pytest.approx(0.01)


def test_zero_stays_zero_and_nan_is_seen():
    found = tt.PReLU(0.25)(jnp.array([0.0, -0.0, jnp.nan, -jnp.inf]))
    np.testing.assert_array_equal(found, [0.0, 0.0, np.nan, -np.inf])


def test_dtypes_of_slope_and_outputs():
    layer = tt.PReLU(0.5, param_dtype=jnp.bfloat16)
    assert layer.negative_slope.dtype == jnp.bfloat16
    assert layer(array(2, 3)).dtype == jnp.float32
    assert tt.PReLU(0.5)(array(2, 3, dtype=jnp.bfloat16)).dtype == jnp.bfloat16
    assert tt.PReLU(0.5, dtype=jnp.float16)(array(2, 3)).dtype == jnp.float16


def test_metadata_of_the_slope():
    assert tt.PReLU(negative_slope_metadata={"role": "slope"}).negative_slope.role == (
        "slope"
    )


def test_the_gradient_of_the_slope_is_the_sum_of_negative_inputs():
    layer = tt.PReLU(0.25)
    grads = tt.grad(lambda layer: jnp.sum(layer(array(2, 3))))(layer)
    close(grads.negative_slope[...], np.minimum(numbers(2, 3), 0).sum())
