# SPDX-License-Identifier: Apache-2.0
"""scan: keyword arguments, and Variables that it carries."""

import jax.numpy as jnp
import pytest

import treetap as tt
from modes import ALL_MODES


@ALL_MODES
def test_scan_binds_keyword_arguments(mode):
    def step(total, x, *, unused=0):
        total[...] += x
        return total, x * 2

    total = tt.Variable(jnp.array(0.0))
    out, seen = tt.scan(step, **mode)(total, x=jnp.arange(3.0))
    assert out is total
    assert float(total) == 3.0
    assert seen.tolist() == [0.0, 2.0, 4.0]
    out, _ = tt.scan(step, **mode)(x=jnp.arange(3.0), total=total)
    assert out is total
    assert float(total) == 6.0


@ALL_MODES
def test_scan_refuses_keyword_only_arguments_which_have_no_axis(mode):
    def step(total, x, *, factor=1.0):
        return total + x * factor, x

    f = tt.scan(step, **mode)
    with pytest.raises((TypeError, ValueError), match="factor"):
        f(jnp.array(0.0), jnp.arange(3.0), factor=2.0)


@ALL_MODES
def test_scan_carries_a_changed_variable_on_axis_none(mode):
    v = tt.Variable(jnp.array(0.0))

    def step(v, x):
        v[...] += 1
        return x

    tt.scan(step, in_axes=(None, 0), out_axes=0, **mode)(v, jnp.arange(3.0))
    assert float(v) == 3.0
