# SPDX-License-Identifier: Apache-2.0
"""Patching finds a known circuit: the two heads of an induction task.

Which heads make it up is known from where they look, and from which heads the model
uses at all; patching has to find the same two without knowing either.
"""

import pathlib
import sys

import jax
import numpy as np
import pytest

import treetap as tt

sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples"))
import induction
from induction import HALF, HEADS, LENGTH
from keep_induction import kept

ROWS = np.arange(LENGTH)
MODELS = [
    pytest.param(kept, id="kept"),
    pytest.param(induction.trained, id="trained", marks=pytest.mark.long),
]


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    made = request.param()
    assert induction.loss_of(made, *induction.sequences(jax.random.key(2), 64)) < 0.1
    return made


@pytest.fixture(scope="module")
def circuit(model):
    """The one head of each layer that is used, and where it looks."""
    used = [np.linalg.norm(layer.out[...], axis=(1, 2)) > 0.1 for layer in model.layers]
    assert [int(mask.sum()) for mask in used] == [1, 1]
    heads = [int(np.argmax(mask)) for mask in used]
    _, record = tt.observe(jax.vmap(model), "**:pattern")(induction.Task().clean)
    first, second = (np.asarray(site.value) for site in record)
    # Beginning with the second half; before it there is nothing to be found.
    assert first[:, heads[0], ROWS[1:HALF], ROWS[1:HALF] - 1].mean() > 0.5
    later = ROWS[HALF:]
    assert second[:, heads[1], later, later - HALF + 1].mean() > 0.7
    return heads


def test_patching_brings_the_answer_back_by_the_induction_head(model, circuit):
    task = induction.Task()
    grid = induction.patched(model, task)
    assert grid.effects.shape == (2, HEADS)
    place, head, effect = grid.top(1)[0]
    assert (place, head) == ("layers/1:heads", circuit[1])
    clean = task.score(jax.vmap(model)(task.clean))
    assert effect > 0.9 * float(clean - grid.baseline)
    others = np.delete(np.asarray(grid.effects[1]), circuit[1])
    assert np.abs(others).max() < 0.05 * effect


def test_without_the_head_of_the_token_before_the_answer_is_lost(model, circuit):
    task = induction.Task()
    clean = task.score(jax.vmap(model)(task.clean))
    for layer, head in enumerate(circuit):
        lost = np.asarray(clean - induction.without_each(model, task, layer))
        assert int(np.argmax(lost)) == head
        assert lost[head] > 1.0
        assert np.abs(np.delete(lost, head)).max() < 0.05 * lost[head]


def test_the_example_shows_both(model, circuit, monkeypatch, capsys):
    monkeypatch.setattr(induction, "trained", lambda: model)
    induction.main()
    rows = capsys.readouterr().out.splitlines()
    chosen = [row.split() for row in rows if row[:3] in ("0.0", "0.1", "0.2", "0.3")]
    lost = {name: float(left_out) for name, _, left_out in chosen}
    assert min(lost, key=lost.__getitem__) == f"0.{circuit[0]}"
