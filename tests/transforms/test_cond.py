# SPDX-License-Identifier: Apache-2.0
"""cond, switch and checkify: branches, and errors that name the call."""

import jax.numpy as jnp
import pytest

import treetap as tt
from modes import ALL_MODES


class Model(tt.Module):
    def __init__(self, w=3.0):
        self.w = tt.Param(jnp.array(w))
        self.calls = tt.Variable(jnp.array(0))
        self.kind = "plain"

    def square(self):
        return self.w * self.w


def count(model):
    model.calls[...] += 1


@pytest.mark.parametrize("name", ["cond", "switch"])
def test_alias_errors_name_the_transform_that_was_called(name):
    v = tt.Param(1.0)

    def body(a, b):
        return a * b

    calls = {
        "cond": lambda: tt.cond(True, body, body, v, v),
        "switch": lambda: tt.switch(0, [body, body], v, v),
    }
    with pytest.raises(ValueError, match="Duplicate Param") as caught:
        calls[name]()
    other = {"cond": "switch", "switch": "cond"}[name]
    assert name in str(caught.value)
    assert other not in str(caught.value)


@ALL_MODES
def test_checkify_binds_keyword_arguments(mode):
    model = Model()

    def step(model, x):
        count(model)
        return model.w * x

    error, out = tt.checkify(step, **mode)(model=model, x=2.0)
    assert error.get() is None
    assert float(out) == 6.0
    assert int(model.calls) == 1
