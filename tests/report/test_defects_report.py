# SPDX-License-Identifier: Apache-2.0
"""Defects of NNX's tables that ours must not have."""

import jax.numpy as jnp
import pytest

import treetap as tt

X = jnp.ones((2, 3))


def test_D36_total_parameters_counts_params_only():
    class Model(tt.Module):
        def __init__(self):
            self.norm = tt.BatchNorm(3, rngs=tt.Rngs(0))
            self.dropout = tt.Dropout(0.5, rngs=tt.Rngs(0))

        def __call__(self, x):
            return self.dropout(self.norm(x))

    text = tt.tabulate(Model(), X, console_kwargs={"force_terminal": False})
    lines = [line.strip() for line in text.splitlines()]
    assert "Total Parameters: 6 (24 B)" in lines
    assert "BatchStat: 6 (24 B)" in lines
    assert "RngState: 2 (12 B)" in lines
    assert tt.summary(Model(), X).parameters == 6


@pytest.mark.parametrize("name", ["summary", "tabulate"])
def test_D43_a_method_that_raises_leaves_everything_as_it_was(name):
    class Fails(tt.Module):
        def __init__(self):
            self.linear = tt.Linear(3, 3, rngs=tt.Rngs(0))
            self.dropout = tt.Dropout(0.5, rngs=tt.Rngs(0))

        def __call__(self, x):
            self.dropout(self.linear(x))
            raise RuntimeError("on purpose")

    model = Fails()
    classes = (Fails, tt.Linear, tt.Dropout, tt.RngStream)
    before = [dict(vars(cls)) for cls in classes]
    with pytest.raises(RuntimeError, match="on purpose"):
        getattr(tt, name)(model, X)
    assert [dict(vars(cls)) for cls in classes] == before
    assert int(model.dropout.rngs.count[...]) == 0
    assert set(vars(model)) == {"linear", "dropout"}
    with tt.set_graph_mode(False):
        assert tt.summary(model.linear, X).parameters == 12
