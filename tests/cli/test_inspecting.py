# SPDX-License-Identifier: Apache-2.0
"""inspect: figures of users' models, of the examples, and of the built-in one."""

import math
import os
import types

import jax.numpy as jnp
import numpy as np
import pytest
import targets
from command_line import loaded, named, passed, refused
from rich.cells import cell_len

import treetap as tt
from treetap._cli import main
from treetap._cli.figures import look_at
from treetap._core.wording import json_number


def test_figures_are_those_of_the_values():
    found = loaded("inspect", named("with_loss"), "--grads")
    model, inputs, loss_fn = targets.with_loss()
    run = tt.observe(tt.value_and_grad(loss_fn), grads=True)
    (loss, _), record = run(model, *inputs)
    assert found["loss"] == pytest.approx(float(loss))
    assert found["loss_of"] == "the target's loss"
    assert found["notes"] == []
    assert [row["site"] for row in found["sites"]] == [site.text for site in record]
    for row, site in zip(found["sites"], record):
        assert row["value"]["mean"] == pytest.approx(float(site.value.mean()), abs=1e-6)
        assert row["value"]["std"] == pytest.approx(float(site.value.std()), rel=1e-4)
        assert row["bytes"] == site.value.nbytes
        assert sum(row["value"]["histogram"]["counts"]) == site.value.size
        norms = [float(jnp.linalg.norm(x)) for x in (site.grad, site.value)]
        assert row["gradient"]["norm"] == pytest.approx(norms[0], rel=1e-4)
        assert row["ratio"] == pytest.approx(norms[0] / norms[1], rel=1e-4)
    assert found["finite"]
    assert found["first_nonfinite"] is None


def test_the_table():
    text = passed("inspect", named("with_loss"), "--grads")
    lines = text.splitlines()
    assert lines[0].endswith("targets.py:with_loss: 9 sites, 624 B, loss 2.564")
    heads = "site type memory histogram mean std max dead grad ratio"
    assert lines[1].split() == heads.split()
    assert lines[3].startswith("blocks/0/up:__call__    f32[3,8]    96 B  ▃▂▂")
    assert lines[-1] == "All is finite."
    assert "\x1b" not in text


def test_without_a_loss_it_is_said_what_is_differentiated():
    said = "No loss was given: gradients are those of the mean of squares"
    assert said in passed("inspect", named("with_inputs"), "--grads")
    found = loaded("inspect", named("with_inputs"), "--grads")
    model, x = targets.with_inputs()
    assert found["loss"] == pytest.approx(float(jnp.mean(model(x) ** 2)))
    assert said in found["notes"][0]
    assert said not in passed("inspect", named("with_inputs"))


def test_the_first_nan_is_marked_and_named():
    text = passed("inspect", named("with_nan"), "--eager", "--grads", code=1)
    assert "First not finite: blocks/1/up:__call__ (3 NaN of 24 numbers)." in text
    (line,) = [line for line in text.splitlines() if "first: 3 NaN" in line]
    assert line.startswith("blocks/1/up:__call__ ")
    found = loaded("inspect", named("with_nan"), "--reduce", code=1)
    assert not found["finite"]
    assert found["first_nonfinite"] == {
        "site": "blocks/1/up:__call__",
        "part": "value",
        "at": None,
        "nonfinite": 3,
    }


def test_a_gradient_that_is_not_finite():
    text = passed("inspect", named("bad_slope"), "--grads", code=1)
    assert "All values are finite. First not finite: gradient of squares" in text
    found = loaded("inspect", named("bad_slope"), "--grads", code=1)
    assert found["first_nonfinite"]["part"] == "gradient"
    assert passed("inspect", named("bad_slope"))


def test_the_iteration_of_a_scan_is_named():
    text = passed("inspect", named("scanned"), code=1)
    assert "First not finite: Block/up:__call__ at [1] (" in text
    row = loaded("inspect", named("scanned"), "--reduce", code=1)["sites"][0]
    assert [part["nonfinite"] for part in row["value"]["parts"]] == [0, 3, 8]


def test_numbers_that_are_not_finite_are_texts_in_json():
    assert [json_number(x) for x in (1.5, math.inf, -math.inf)] == [1.5, "inf", "-inf"]
    assert json_number(math.nan) == "nan"


def test_bits_say_that_something_is_not_finite_but_not_what():
    fn = lambda x: tt.tap(jnp.log(x), "log")
    _, record = tt.observe(fn, reduce=[tt.AllFinite(), tt.AbsMax()])(jnp.zeros(2))
    look = look_at(record)
    assert "(not finite" in look.verdict


def test_the_built_in_model_as_json(monkeypatch, tmp_path):
    """All but the training, which takes a while."""
    _, record = tt.observe(lambda x: tt.tap(x * 2, "doubled"))(jnp.ones(2))
    found = types.SimpleNamespace(
        records=[record] * 2, losses=[3.0, 2.0], steps=[0, 1], model=None
    )
    monkeypatch.setattr(main, "trained", lambda *_: found)
    monkeypatch.setattr(main, "written", lambda *_: "'Twas brillig")
    out = str(tmp_path / "poet.html")
    told = loaded("inspect", "--out", out)
    assert told["written"] == "'Twas brillig"
    assert (told["losses"], told["steps"], told["out"]) == ([3.0, 2.0], [0, 1], [out])
    assert [row["site"] for row in told["sites"]] == ["doubled"]


def test_statistics_only():
    values = loaded("inspect", named("with_loss"), "--grads")
    reduced = loaded("inspect", named("with_loss"), "--grads", "--reduce")
    for one, two in zip(values["sites"], reduced["sites"]):
        assert one["type"] == two["type"]
        assert one["bytes"] == two["bytes"]
        for name in ("mean", "std", "abs_max", "norm", "dead"):
            assert two["value"][name] == pytest.approx(one["value"][name], abs=1e-6)
        assert two["gradient"]["norm"] == pytest.approx(one["gradient"]["norm"])


@pytest.mark.parametrize("factory", ["shared", "method", "function", "by_name"])
def test_compiled_or_not(factory):
    found = loaded("inspect", named(factory), "--grads")
    plain = loaded("inspect", named(factory), "--eager")
    means = [[s["value"]["mean"] for s in one["sites"]] for one in (found, plain)]
    np.testing.assert_allclose(*means, atol=1e-6)


@pytest.mark.parametrize("command", ["inspect", "sites", "blame", "summary"])
def test_inputs_that_are_no_arrays(command):
    options = ["--grads"] if command == "inspect" else []
    factory = "flagged" if command == "sites" else "flagged_by_name"
    assert loaded(command, named(factory), *options)


def test_a_model_that_looks_at_values():
    text = refused("inspect", named("looks"))
    assert "TracerBoolConversionError" in text
    assert "try --eager" in text
    assert "in looks.<locals>.fn: if x.sum() > 0:" in text
    assert len(loaded("inspect", named("looks"), "--eager")["sites"]) == 1
    (site,) = loaded("inspect", named("looks"), "--eager", "--reduce")["sites"]
    assert site["value"]["count"] == 3


def test_selectors():
    found = loaded("inspect", named("with_loss"), "--select", "**:hidden")
    assert [s["site"] for s in found["sites"]] == ["blocks/0:hidden", "blocks/1:hidden"]
    two = ["--select", "blocks/0", "--select", "blocks/1/up"]
    found = loaded("inspect", named("with_loss"), *two)
    assert [s["site"] for s in found["sites"]] == [
        "blocks/0:hidden",
        "blocks/0:__call__",
        "blocks/1/up:__call__",
    ]


def test_a_selector_that_takes_nothing():
    text = refused("inspect", named("with_loss"), "--select", "blocks/7")
    assert "Select('blocks/7') matches none of 9 sites. Near it are" in text


@pytest.mark.parametrize("factory", ["with_nan", "with_loss"])
def test_narrow_terminals(factory):
    code = 1 if factory == "with_nan" else 0
    text = passed("inspect", named(factory), "--grads", code=code, columns=60)
    lines = text.splitlines()
    assert max(map(cell_len, lines)) <= 60
    assert "…" not in text
    heads = next(line for line in lines if line.startswith("site ")).split()
    assert {"site", "std", "max"} <= set(heads)
    assert "Too narrow to show: " in text


# What can go wrong.


def test_losses_that_are_refused():
    text = refused("inspect", named("gives_two_losses"), "--grads")
    assert "the loss returned ('float32[]', 'float32[3,4]')" in text
    text = refused("inspect", named("no_gradient"), "--grads")
    assert "no value has a gradient" in text


def test_nothing_to_differentiate():
    text = refused("inspect", named("integers"), "--grads")
    assert "nothing to differentiate by" in text


def test_no_floating_output(tmp_path):
    file = tmp_path / "rounded.py"
    file.write_text(
        "import jax.numpy as jnp\n\n\ndef model():\n"
        "    return (lambda x: (x > 0)), jnp.ones(3)\n"
    )
    text = refused("inspect", f"{file}:model", "--grads")
    assert "no floating output to take a loss of" in text


def test_a_loss_of_a_method(tmp_path):
    file = tmp_path / "method.py"
    file.write_text(
        "import treetap as tt\n\n\ndef model():\n"
        "    net = tt.Linear(2, 2, rngs=tt.Rngs(0))\n"
        "    return net.__call__, None, lambda model, x: 0.0\n"
    )
    text = refused("inspect", f"{file}:model", "--grads", "--shape", "f32[1,2]")
    assert "Return the Module" in text


@pytest.mark.parametrize("kind", ["html", "safetensors"])
def test_outputs(kind, tmp_path):
    out = tmp_path / f"out.{kind}"
    text = passed("inspect", named("with_loss"), "--grads", "--out", out)
    assert f"Wrote {out}." in text
    if kind == "html":
        assert "blocks/0/up" in out.read_text()
    else:
        record = tt.load_record(out)
        assert len(record) == 9
        assert all(site.grad is not None for site in record)
    assert os.listdir(tmp_path) == [out.name]


def test_statistics_make_a_report_and_no_record(tmp_path):
    out = tmp_path / "out.html"
    found = loaded("inspect", named("with_loss"), "--reduce", "--out", out)
    assert found["out"] == [str(out)]
    assert "blocks/0" in out.read_text()
    options = "--reduce", "--out", tmp_path / "out.safetensors"
    assert "--reduce keeps no values" in refused("inspect", named("raises"), *options)


def test_outputs_that_are_refused(tmp_path):
    target = named("raises"), "--out"  # before anything of it is run
    assert "ends in .html or .safetensors" in refused("inspect", *target, "out.txt")
    folder = tmp_path / "none"
    text = refused("inspect", *target, folder / "out.html")
    assert f"there is no folder {folder}" in text
    (tmp_path / "dir.html").mkdir()
    assert "is a folder" in refused("inspect", *target, tmp_path / "dir.html")


@pytest.mark.parametrize("kind", ["html", "safetensors"])
def test_a_file_that_cannot_be_written_stays_as_it_is(kind, tmp_path, monkeypatch):
    out = tmp_path / f"out.{kind}"
    out.write_text("before")

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    text = refused("inspect", named("with_loss"), "--out", out)
    assert "No space left on device" in text
    assert out.read_text() == "before"
    assert os.listdir(tmp_path) == [out.name]


def test_a_folder_that_cannot_be_written_to(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *args: False)  # root may write anywhere
    text = refused("inspect", named("raises"), "--out", tmp_path / "out.html")
    assert "nothing can be written in the folder" in text


# The built-in model.


@pytest.mark.long
def test_the_built_in_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = loaded("inspect", "--steps", "9", "--select", "blocks/0/attention")
    assert os.listdir(tmp_path) == ["treetap-report.html"]
    assert found["finite"]
    assert found["steps"][0] == 0
    assert found["steps"][-1] == len(found["losses"]) == 9
    assert found["losses"][-1] < 0.9 * found["losses"][0]
    names = [row["site"] for row in found["sites"]]
    assert names == [
        f"blocks/0/attention:{x}" for x in ("attention_weights", "__call__")
    ]
    assert found["written"].startswith("'Twas")


def test_options_of_a_target_need_one():
    text = refused("inspect", "--shape", "f32[2]")
    assert "Name a TARGET" in text
    assert "Name a TARGET" in refused("inspect", "--reduce")
    assert "there is no folder" in refused("inspect", "--out", "none/out.html")
