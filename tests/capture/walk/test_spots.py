# SPDX-License-Identifier: Apache-2.0
"""Spots: which mappings the rows of a loop are of: JAX tells their number alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treetap as tt


def doubled(x, y):
    def turn(carry):
        return tt.tap((carry[0] * 2, carry[1] + y), "w")

    return jax.lax.while_loop(lambda carry: carry[0] < 10, turn, (x, y))


@pytest.mark.parametrize("inner", [(0, None), (None, 0)])
def test_rows_that_fit_two_mappings_are_refused(inner):
    """Only the rows of one of the mappings end one by one."""
    mapped = jax.vmap(jax.vmap(doubled, inner), inner[::-1])
    starts, steps = jnp.array([1.0, 4.0]), jnp.array([1.0, 2.0])
    with pytest.raises(tt.CaptureError) as caught:
        tt.observe(mapped)(starts, steps)
    assert "'w' is in a `while` loop whose [2] rows end one by one" in str(caught.value)
    assert "inside mappings of [2, 2] rows" in str(caught.value)
    assert "Give the mappings different sizes" in str(caught.value)
    assert mapped(starts, steps)[0].shape == (2, 2)  # nobody listens any longer


@pytest.mark.parametrize("inner", [(0, None), (None, 0)])
def test_rows_of_mappings_of_different_sizes_are_told_apart(inner):
    mapped = jax.vmap(jax.vmap(doubled, inner), inner[::-1])
    starts, steps = jnp.array([1.0, 4.0]), jnp.array([1.0, 2.0, 3.0])
    out, record = tt.observe(mapped)(starts, steps)
    sizes = [axis.size for axis in record["w"].axes[1]]
    assert sizes == ([3, 2] if inner == (0, None) else [2, 3])
    jax.tree.map(np.testing.assert_array_equal, record["w"].value[1], out[1])
