# SPDX-License-Identifier: Apache-2.0
"""The training example: it learns, and a killed run goes on with the same numbers."""

import json
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

ROOT = pathlib.Path(__file__).parents[2]
SMALL = """
    --batch 4 --context 16 --width 16 --heads 2 --layers 1 --checkpoint-every 10
    --look-every 20
""".split()


def command(out, *options):
    program = ROOT / "examples" / "chars.py"
    return [sys.executable, str(program), *SMALL, "--out", str(out), *options]


def run(out, *options):
    return subprocess.run(
        command(out, *options), capture_output=True, text=True, check=False
    )


def final(out, step):
    """Everything a checkpoint holds, as numpy arrays."""
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(out / f"step_{step}")
    return jax.tree_util.tree_leaves_with_path(jax.tree.map(as_numpy, restored))


def as_numpy(value):
    is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(value) if is_key else value)


def killed_in_the_middle(out, steps):
    """Starts a run and kills it, without a word, some time after its second save."""
    process = subprocess.Popen(
        command(out, "--steps", str(steps)), stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not (out / "step_20").exists():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (out / f"step_{steps}").exists()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed")
    done = run(out, "--steps", "100")
    assert done.returncode == 0, done.stderr
    return out, done.stdout


@pytest.mark.long
def test_a_run_that_was_killed_ends_with_the_same_numbers(undisturbed, tmp_path):
    killed_in_the_middle(tmp_path, 100)
    done = run(tmp_path, "--steps", "100")
    assert done.returncode == 0, done.stderr
    assert "going on at step" in done.stdout
    expected, found = final(undisturbed[0], 100), final(tmp_path, 100)
    assert len(expected) == len(found) > 50  # model, optimizer, metrics, streams
    for (path, one), (other, two) in zip(expected, found):
        assert path == other
        np.testing.assert_array_equal(one, two, strict=True)


def test_it_learns_shows_and_logs(undisturbed):
    out, text = undisturbed
    assert "blocks/0/attention:attention_weights" in text
    entries = [
        json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()
    ]
    assert [entry["step"] for entry in entries] == [20, 40, 60, 80, 100]
    assert entries[-1]["loss"] < 0.8 * entries[0]["loss"]
    assert entries[-1]["activations"]["blocks/0:__call__"]["std"] > 0


def test_a_text_that_is_too_short_is_refused(tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("abc")
    done = run(tmp_path / "out", "--text", str(short))
    assert done.returncode == 1
    assert "The text has 3 characters" in done.stderr
