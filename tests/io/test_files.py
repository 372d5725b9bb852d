# SPDX-License-Identifier: Apache-2.0
"""Paths of files: what is no path is refused in our words, everywhere."""

import jax.numpy as jnp
import pytest

import treetap as tt

CALLS = {
    "save_weights": lambda model: tt.save_weights(model, "weights.safetensors"),
    "load_weights": lambda model: tt.load_weights(model, "weights.safetensors"),
    "save_checkpoint": lambda model: tt.save_checkpoint(model, "folder"),
    "restore_checkpoint": lambda model: tt.restore_checkpoint(model, "folder"),
    "save_record": lambda model: tt.save_record(model, "record.safetensors"),
    "load_record": lambda model: tt.load_record(model),
    "Store": lambda model: tt.Store(model),
    "StoreWriter": lambda model: tt.StoreWriter(model),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_model_where_the_path_belongs_is_refused(name):
    model = {"w": tt.Param(jnp.ones(2))}
    with pytest.raises(
        TypeError,
        match=f"{name}: expected the path .* first, got a dict. Write `{name}\\(path",
    ):
        CALLS[name](model)
