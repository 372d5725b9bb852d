# SPDX-License-Identifier: Apache-2.0
"""Names from files may hold anything; what is printed of them is harmless."""

import io

import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
from safetensors.numpy import save_file

import treetap as tt

BAD = "layer\x1b[2J\x1b]0;title\x07\rline\nnext\u202e\x9b1m"


def check_harmless(text):
    for line in text.splitlines():
        assert line.isprintable(), repr(line)


def tapped(x):
    return tt.tap(x, BAD)


@pytest.fixture
def files(tmp_path):
    record = tt.observe(tapped)(jnp.ones(2))[1]
    tt.save_record(tmp_path / "record", record)
    save_file({BAD: np.ones(2, np.float32)}, tmp_path / "a.safetensors")
    save_file({BAD: np.zeros(2, np.float32)}, tmp_path / "b.safetensors")
    return tmp_path


def test_records(files):
    record = tt.load_record(files / "record")
    for text in (repr(record), repr(record[0]), record._repr_html_(), record[0].text):
        check_harmless(text)
    check_harmless("".join(record.figures()))
    check_harmless("".join(record.to_scalars()))
    with pytest.raises(tt.CaptureError) as error:
        record.select("other")
    check_harmless(str(error.value))
    assert record[record[0].text] is record[0]


def test_stores(tmp_path):
    with tt.StoreWriter(tmp_path / "store") as writer:
        writer.append(tt.observe(tapped)(jnp.ones((2, 3)))[1])
    store = tt.Store(tmp_path / "store")
    check_harmless(repr(store))
    with pytest.raises(tt.CaptureError) as error:
        store["other"]
    check_harmless(str(error.value))


def test_comparisons(files):
    found = tt.compare(files / "a.safetensors", files / "b.safetensors")
    check_harmless(repr(found))
    console = rich.console.Console(file=io.StringIO(), force_terminal=False)
    console.print(found)
    check_harmless(console.file.getvalue())


def test_summaries_and_errors():
    class Model(tt.Module):
        def __init__(self):
            self.parts = tt.Dict({BAD: tt.Linear(2, 2, rngs=tt.Rngs(0))})

        def __call__(self, x):
            return self.parts[BAD](x)

    model = Model()
    check_harmless(repr(model))
    check_harmless(str(tt.summary(model, jnp.ones((1, 2)))))
    check_harmless(repr(tt.sites(model, jnp.ones((1, 2)))))
    with pytest.raises(ValueError, match="Linear") as error:
        model(jnp.ones((1, 3)))
    check_harmless(str(error.value))
    found = tt.blame(model)(jnp.full((1, 2), jnp.inf))
    assert found is not None
    check_harmless(str(found))
    check_harmless(repr(found))
