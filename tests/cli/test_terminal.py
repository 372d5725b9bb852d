# SPDX-License-Identifier: Apache-2.0
"""The program in a real terminal: bars, colours, widths, and Ctrl-C."""

import os
import re
import signal
import sys
import time

import pexpect
import pytest
from command_line import named
from rich.cells import cell_len

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
PATIENCE = 120
# JAX warns of any fork; the child here only becomes another program.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork\\(\\) was called")


def started(*args, columns=100, **env):
    """The program in a terminal of 24 lines."""
    hidden = ("NO_COLOR", "COLUMNS", "LINES", "CI", "FORCE_COLOR")
    clean = {key: value for key, value in os.environ.items() if key not in hidden}
    return pexpect.spawn(
        sys.executable,
        ["-m", "treetap", *args],
        dimensions=(24, columns),
        encoding="utf-8",
        timeout=PATIENCE,
        env={**clean, "TERM": "xterm-256color", **env},
        # Of a suite in the background the program would inherit that it be ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def ended(child):
    """All that a program wrote, and its exit code."""
    child.expect(pexpect.EOF)
    child.close()
    return child.before, child.exitstatus


def lines_of(text):
    return ESCAPES.sub("", text).replace("\r", "\n").splitlines()


@pytest.mark.parametrize("columns", [60, 120])
def test_nothing_is_wider_than_the_terminal(columns):
    text, code = ended(
        started("inspect", named("with_nan"), "--grads", columns=columns)
    )
    assert code == 1
    lines = lines_of(text)
    assert max(map(cell_len, lines)) <= columns
    assert any("Running" in line and "targets.py" in line for line in lines)
    assert "\x1b[1;31m" in text  # the verdict
    assert any(line.startswith("First not finite: blocks/1/up") for line in lines)
    shown = "ratio" in next(line for line in lines if line.startswith("site "))
    assert shown == (columns == 120)


def test_no_colour_where_none_is_wanted():
    text, code = ended(started("sites", named("with_loss"), NO_COLOR="1"))
    assert code == 0
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", text)


def test_training_shows_its_progress(tmp_path):
    out = str(tmp_path / "out.html")
    options = ("--steps", "3", "--select", "**:hidden", "--out", out)
    child = started("inspect", *options, columns=60)
    child.expect("Training .*loss [0-9.]+")
    text, code = ended(child)
    assert code == 0
    assert max(map(cell_len, lines_of(text))) <= 60
    assert os.listdir(tmp_path) == ["out.html"]


def test_control_c():
    child = started("inspect", named("sleeps"))
    child.expect("asleep")
    time.sleep(0.2)
    child.sendintr()
    text, code = ended(child)
    assert code == 130
    assert "Traceback" not in text
    assert "Interrupted." in text
