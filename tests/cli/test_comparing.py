# SPDX-License-Identifier: Apache-2.0
"""compare: records in files, targets, and both."""

import numpy as np
import pytest
import targets
from command_line import loaded, named, passed, refused
from rich.cells import cell_len
from safetensors.numpy import save_file

import treetap as tt


@pytest.fixture
def files(tmp_path):
    """Two runs that part in the second block, and what PyTorch's hooks would write."""
    paths = {name: tmp_path / f"{name}.safetensors" for name in ("one", "two", "torch")}
    records = {}
    for name, factory in (("one", targets.with_inputs), ("two", targets.other)):
        model, x = factory()[:2]
        records[name] = tt.observe(model)(x)[1]
        tt.save_record(paths[name], records[name])
    tensors = {
        f"encoder.layer.{n}": np.asarray(records["one"][f"blocks/{n}:__call__"].value).T
        for n in range(2)
    }
    tensors = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    save_file(tensors, paths["torch"])
    return paths


def test_two_records_that_differ(files):
    text = passed("compare", files["one"], files["two"], code=1)
    assert "9 sites compared, 5 differ" in text
    assert "First to differ: blocks/1/up:__call__ (relative error)." in text
    found = loaded("compare", files["one"], files["two"], code=1)
    assert found["first"] == "blocks/1/up:__call__"
    assert not found["agrees"]


def test_two_runs_that_agree(files):
    text = passed("compare", named("with_inputs"), files["one"])
    assert text.endswith("They agree.\n")
    assert "9 sites compared, none differ" in text


def test_two_targets():
    found = loaded("compare", named("with_loss"), named("other"), "--grads", code=1)
    assert found["first"] == "blocks/1/up:__call__"
    assert any(line["site"].endswith("@grad") for line in found["differences"])


def test_targets_are_run_on_the_same_drawn_inputs():
    options = ["--shape", "f32[2,4]", "--eager"]
    found = loaded("compare", named("alone"), named("with_loss"), *options)
    assert found["agrees"]
    assert found["differences"][0]["shapes"] == [[2, 8], [2, 8]]


def test_names_and_layouts_of_another_program(files):
    sites = files["one"], files["torch"], "--select", "blocks/*:__call__"
    rename = "--rename", "blocks/{i}=encoder.layer.{i}"
    assert loaded("compare", *sites, *rename, "--layout", "ab->ba")["agrees"]
    turned = "--layout", "blocks/0=ab->ba", "--layout", "blocks/1=ab->ba"
    assert loaded("compare", *sites, *rename, *turned)["agrees"]
    found = loaded("compare", *sites, *rename, code=1)
    assert found["first"] == "blocks/0:__call__"
    text = refused("compare", *sites)
    assert "no site of `a` has the name of one of `b`" in text


def test_sites_that_may_be_alone(files):
    rename = "--rename", "blocks/{i}:__call__=encoder.layer.{i}", "--layout", "ab->ba"
    sides = files["one"], files["torch"], *rename
    assert len(loaded("compare", *sides, code=1)["only_a"]) == 7
    alone = ("blocks/*/*", ":__call__", "blocks/*:hidden")
    ignored = [part for glob in alone for part in ("--ignore", glob)]
    assert loaded("compare", *sides, *ignored)["agrees"]


def test_tolerances(files):
    sides = files["one"], files["two"]
    assert loaded("compare", *sides, "--tolerance", "10")["agrees"]
    some = "--tolerance", "blocks/1/**=10", "--tolerance", "1e-6"
    found = loaded("compare", *sides, *some, code=1)
    assert found["first"] == "__call__"
    limits = {line["site"]: line["limit"] for line in found["differences"]}
    assert limits["blocks/1/up:__call__"] == 10
    assert limits["blocks/0/up:__call__"] == 1e-6
    assert loaded("compare", *sides, "--absolute", "5")["agrees"]


def test_noise(files):
    sides = files["one"], files["two"], "--noise", files["one"]
    found = loaded("compare", *sides, "--noise-factor", "4", code=1)
    assert found["differences"][0]["floor"] == 0


def test_the_width(files):
    text = passed("compare", files["one"], files["two"], code=1, columns=60)
    table = text.partition("compared")[2]
    assert max(map(cell_len, table.splitlines())) <= 60


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("none.safetensors", "b"), "There is no file none.safetensors."),
        (("a", "b"), "'a' is neither a .safetensors file nor a TARGET"),
        (("ONE", "ONE", "--rename", "a"), "--rename 'a' is written OURS=THEIRS"),
        (("ONE", "ONE", "--rename", "a=b"), "a"),
        (("ONE", "ONE", "--tolerance", "x"), "--tolerance 'x': that is no number"),
        (("ONE", "ONE", "--tolerance", "a="), "--tolerance 'a=': no value"),
        (("ONE", "ONE", *["--tolerance", "1"] * 2), "--tolerance '1': twice"),
        (("ONE", "ONE", "--tolerance", "-1"), "a tolerance is a number from 0"),
        (("ONE", "ONE", "--layout", "bogus"), "compare: a layout is axes such as"),
        (("ONE", "ONE", "--select", "none"), "matches none of 9 sites"),
    ],
)
def test_what_is_refused(options, text, files):
    given = [files["one"] if option == "ONE" else option for option in options]
    message = refused("compare", *given)
    assert text in message
    assert not message.startswith(("TypeError", "ValueError"))


def test_a_broken_file_is_refused(tmp_path, files):
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"nonsense")
    assert "broken.safetensors" in refused("compare", files["one"], broken)
