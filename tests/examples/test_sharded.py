# SPDX-License-Identifier: Apache-2.0
"""The example of sharded training in one process: it resumes, and keeps activations.

That its numbers are right, in all ways and in several processes, is seen to by
`trust/test_sharded_training.py` and `trust/test_many_processes.py`.
"""

import importlib
import pathlib
import re
import sys

import pytest

import treetap as tt

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))
sharded = importlib.import_module("sharded")


@pytest.fixture
def losses(monkeypatch, capsys):
    """Runs the program, and gives the losses it prints by their step."""

    def run(*options):
        monkeypatch.setattr(sys, "argv", ["sharded.py", *map(str, options)])
        sharded.main()
        return dict(re.findall(r"step (\d+): loss (\S+)", capsys.readouterr().out))

    return run


@pytest.mark.long
def test_a_run_is_resumed_from_its_last_checkpoint(losses, tmp_path):
    folders = ("--folder", tmp_path / "saved", "--store", tmp_path / "kept")
    options = ("--save-every", 2, *folders)
    first = losses("--steps", 5, *options)
    assert list(first) == ["1", "2", "3", "4", "5"]
    (tmp_path / "saved" / "step_9.orbax-checkpoint-tmp-1").mkdir()  # was not finished
    again = losses("--steps", 6, *options)
    assert list(again) == ["5", "6"]  # the fifth was not saved
    assert again["5"] == first["5"]
    store = tt.Store(tmp_path / "kept")
    assert [each["step"] for each in store.metadata] == [0, 1, 2, 3, 4, 5]
    assert store["model/layers:__call__"].shape == (48, 2, 16, 32)

    plain = losses("--steps", 6)
    assert plain["1"] == first["1"]
    assert float(plain["6"]) == pytest.approx(float(again["6"]), rel=2e-6)


def test_errors_of_one_process_are_left_alone(tmp_path):
    (tmp_path / "kept").write_text("not a folder")
    with pytest.raises(FileExistsError, match="is a file"), sharded.told_at_once(None):
        tt.StoreWriter(tmp_path / "kept")


def test_the_remedy_says_where_a_restart_goes_on(tmp_path):
    assert sharded.last_step(None) == sharded.last_step(tmp_path) == 0
    for name in ("step_5", "step_10", "step_15.orbax-checkpoint-tmp-3"):
        (tmp_path / name).mkdir()
    assert "after step 10" in sharded.remedy(tmp_path)
    assert "Nothing was saved" in sharded.remedy(None)
