# SPDX-License-Identifier: Apache-2.0
"""Files that earlier versions wrote are still read, whatever was moved since."""

import base64
import json
import pathlib
import pickle
import subprocess
import sys

import jax
import numpy as np
import pytest

import treetap as tt

FOLDER = pathlib.Path(__file__).parents[1] / "data" / "earlier"
PICKLES = {
    name: base64.b64decode(text)
    for name, text in json.loads((FOLDER / "pickles.json").read_text()).items()
}


def model():
    first, last = (tt.Rngs(0, dropout=1) for _ in range(2))
    return tt.Sequential(
        tt.Linear(2, 3, rngs=first), jax.nn.relu, tt.Linear(3, 2, rngs=last)
    )


def as_numbers(value):
    """A leaf as an array; a random key as its data."""
    if jax.dtypes.issubdtype(getattr(value, "dtype", None), jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value)


def test_a_record_has_its_kinds_when_nothing_else_was_imported():
    code = (
        "import sys, treetap as tt\n"
        "kinds = {site.kind for site in tt.load_record(sys.argv[1])}\n"
        "assert kinds == {tt.Intermediate}, kinds\n"
    )
    file = str(FOLDER / "record.safetensors")
    subprocess.run([sys.executable, "-c", code, file], check=True)


@pytest.mark.parametrize("name", PICKLES)
def test_pickles_are_read_and_name_no_module_twice(name):
    value = pickle.loads(PICKLES[name])
    again = pickle.loads(PICKLES[name])
    assert type(value) is type(again)
    module = type(value).__module__
    assert getattr(sys.modules[module], type(value).__name__) is type(value)
    if not name.startswith("optimizer"):  # whose functions are made anew by each read
        assert jax.tree.structure(value) == jax.tree.structure(again)


LAYERS = [name for name in PICKLES if name.startswith("layer ")]


@pytest.mark.parametrize("name", LAYERS)
def test_layers_from_pickles_are_the_public_ones(name):
    layer = pickle.loads(PICKLES[name])
    assert type(layer) is getattr(tt, name.removeprefix("layer "))
    assert isinstance(layer, tt.Module)
    for _, variable in tt.to_flat_state(tt.state(layer)):
        assert np.isfinite(as_numbers(variable.get_value())).all()


def test_numbers_in_pickles_are_those_of_the_same_model():
    loaded = pickle.loads(PICKLES["layer Sequential"])
    for (path, a), (other, b) in zip(
        tt.to_flat_state(tt.state(loaded)),
        tt.to_flat_state(tt.state(model())),
        strict=True,
    ):
        assert path == other
        np.testing.assert_array_equal(as_numbers(a[...]), as_numbers(b[...]))


def test_what_was_split_can_be_merged():
    layer = tt.merge(*pickle.loads(PICKLES["split"]))
    assert layer(np.ones((1, 2), np.float32)).shape == (1, 3)


def test_checkpoints_weights_records_and_stores_are_read():
    expected = model().layers[0].kernel
    empty = jax.tree.map(lambda leaf: leaf * 0, model())
    restored = tt.restore_checkpoint(FOLDER / "checkpoint", empty)
    np.testing.assert_array_equal(restored.layers[0].kernel, expected)
    tt.load_weights(FOLDER / "weights.safetensors", empty)
    np.testing.assert_array_equal(empty.layers[0].kernel, expected)
    record = tt.load_record(FOLDER / "record.safetensors")
    expected = pickle.loads(PICKLES["record"])
    assert [str(site) for site in record] == [str(site) for site in expected]
    store = tt.Store(FOLDER / "store")
    assert len(store) == 2


def test_the_class_of_modules_is_found_where_it_was():
    assert pickle.loads(b"ctreetap._modules\nModule\n.") is tt.Module
    with pytest.raises(AttributeError, match="'Modul'"):
        pickle.loads(b"ctreetap._modules\nModul\n.")
