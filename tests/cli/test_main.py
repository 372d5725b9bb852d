# SPDX-License-Identifier: Apache-2.0
"""sites, summary, blame, completion, and what all commands have in common."""

import os
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner
from command_line import loaded, named, passed, refused, run
from rich.cells import cell_len

import treetap as tt
from treetap._cli.command import guarded

COMMANDS = ("inspect", "sites", "summary", "blame", "compare", "completion", "run-nnx")


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command):
    for option in ("-h", "--help"):
        text = passed(command, option)
        assert "Usage: " in text
    if command not in ("completion", "run-nnx"):
        assert "(model, inputs, loss)    loss(model, *inputs) gives a single" in text


def test_the_commands_are_listed():
    text = passed("--help")
    assert all(f"\n  {command} " in text for command in COMMANDS)
    assert "..." not in text.partition("Commands:")[2]
    assert run().exit_code == 2


def test_an_unknown_option_is_a_usage_error():
    assert "No such option" in refused("inspect", "--no-such-option")
    assert "No such command" in refused("look")


def test_sites():
    text = passed("sites", named("with_loss"))
    lines = text.splitlines()
    assert lines[0].split() == ["site", "how", "type", "memory"]
    assert lines[2].split() == ["blocks/0/up:__call__", "output", "f32[3,8]", "96", "B"]
    assert lines[-1].split() == ["9", "sites", "624", "B"]
    assert "under" in passed("sites", named("scanned")).splitlines()[0]
    found = loaded("sites", named("scanned"), "--select", "**:hidden")
    assert found["bytes"] == 288
    assert found["sites"] == [
        {
            "site": "Block:hidden",
            "how": "tap",
            "type": "float32[3,3,8]",
            "bytes": 288,
            "under": ["scan"],
        }
    ]


def test_sites_of_a_gradient():
    text = passed("sites", named("with_loss"), "--grads")
    assert text.splitlines()[-1].startswith("Gradients take as much again")


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("command", ["sites", "summary"])
def test_widths(command, columns):
    text = passed(command, named("with_loss"), columns=columns)
    assert max(map(cell_len, text.splitlines())) <= columns
    assert "blocks" in text
    assert "…" not in text


def test_summary():
    assert "Net summary" in passed("summary", named("with_loss"))
    found = loaded("summary", named("with_loss"), "--depth", "1")
    assert found["parameters"] == 152
    assert [row["path"] for row in found["rows"]] == [""]
    found = loaded("summary", named("method"))
    assert found["rows"][0]["method"] == "first"


def test_a_summary_is_of_a_module():
    assert "a summary is of a Module" in refused("summary", named("function"))


def test_blame():
    text = passed("blame", named("with_nan"), code=1)
    assert text.startswith("A NaN came in with the argument blocks/1/up/kernel.")
    found = loaded("blame", named("bad_slope"), "--grads", code=1)
    assert found["found"]
    assert (found["kind"], found["operation"], found["backward"]) == (
        "inf",
        "div",
        True,
    )
    assert found["file"].endswith("targets.py")
    assert found["source"].startswith("return jnp.sqrt(")


def test_blame_of_nothing():
    assert passed("blame", named("with_loss"), "--grads") == "All is finite.\n"
    found = loaded("blame", named("with_inputs"), "--grads")
    assert not found["found"]
    assert found["text"] == "All is finite."
    text = passed("blame", named("with_inputs"), "--grads")
    assert text.startswith("All is finite.\nNo loss was given: gradients are those of")


def test_blame_everywhere(tmp_path):
    file = tmp_path / "masked.py"
    file.write_text(
        "import jax.numpy as jnp\n\n\ndef model():\n"
        "    return (lambda x: jnp.where(x > 0, jnp.log(x), 0.0)), jnp.zeros(3)\n"
    )
    assert not loaded("blame", f"{file}:model")["found"]
    found = loaded("blame", f"{file}:model", "--everywhere", code=1)
    assert found["operation"] == "log"
    assert not found["reaches_result"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell):
    text = passed("completion", shell)
    assert "_TREETAP_COMPLETE" in text
    assert f"{shell}_complete" in text


def test_completion_of_another_shell():
    assert "is not one of 'bash', 'zsh', 'fish'" in refused("completion", "tcsh")


def test_run_nnx_hands_over(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom flax import nnx\n\n"
        "print(sys.argv[1:], nnx.Linear.__module__)\nsys.exit(7)\n"
    )
    text = passed("run-nnx", script, "--steps", "3", "-h", code=7)
    assert text.startswith("['--steps', '3', '-h'] treetap.")


def test_the_program_and_its_pipes(tmp_path):
    env = {k: x for k, x in os.environ.items() if k != "COLUMNS"}  # readline sets it

    def program(*args):
        return subprocess.run(
            [sys.executable, "-m", "treetap", *args],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env=env,
        )

    done = program("inspect", named("with_nan"), "--grads")
    assert done.returncode == 1
    assert done.stderr == ""  # no bars
    assert "\x1b" not in done.stdout
    assert "ratio" in done.stdout.splitlines()[1]  # all columns
    done = program("inspect", "nowhere.py:model")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "Error: There is no file nowhere.py.\n"


def test_a_reader_that_goes_away():
    with subprocess.Popen(
        [sys.executable, "-m", "treetap", "sites", named("with_loss")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout
        assert child.stderr
        child.stdout.close()
        assert child.stderr.read() == ""


def test_the_version():
    assert passed("--version").split()[-1] == tt.__version__


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (click.UsageError("no such thing"), 2, "Error: no such thing"),
        (click.exceptions.Exit(7), 7, ""),
    ],
)
def test_what_click_raises_is_for_click(error, code, said):
    @click.command()
    @guarded
    def command():
        raise error

    result = CliRunner().invoke(command)
    assert result.exit_code == code
    assert said in result.stderr
