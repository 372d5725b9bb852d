# SPDX-License-Identifier: Apache-2.0
"""Training in several processes: the numbers of one, and what happens when one dies.

The processes run `examples/sharded.py`, with eight devices of the CPU among them. Each
has a umask of its own, so the mode of a file says who wrote it.
"""

import contextlib
import importlib
import os
import pathlib
import re
import signal
import socket
import stat
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import treetap as tt

PROGRAM = pathlib.Path(__file__).parents[2] / "examples" / "sharded.py"
sys.path.insert(0, str(PROGRAM.parent))
sharded = importlib.import_module("sharded")

ROWS = 8  # of a batch
PATIENCE = 10  # seconds without a sign of life, after which a process counts as dead
SLACK = 20  # seconds more, for a busy machine to notice and to end
LOST = re.compile("another (one|task) died")  # as the program and JAX say it


def free_port():
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


class Processes:
    """A run of the example in some processes, each with its output in a file."""

    def __init__(self, count, place, *options):
        self.outputs = [place / f"output_{number}.txt" for number in range(count)]
        together = ("--coordinator", f"localhost:{free_port()}", "--processes", count)
        self.started = []
        for number, output in enumerate(self.outputs):
            more = (*together, "--process", number) if count > 1 else ()
            command = map(str, (sys.executable, PROGRAM, *options, *more))
            with output.open("w") as file:
                process = subprocess.Popen(
                    [*command],
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=environment(),
                    umask=UMASKS[number],
                    start_new_session=True,
                )
            self.started.append(process)

    def text(self, number):
        return self.outputs[number].read_text()

    def wait(self, seconds):
        """Waits for all; returns how each ended."""
        deadline = time.monotonic() + seconds
        return [
            process.wait(max(deadline - time.monotonic(), 0.01))
            for process in self.started
        ]

    def wait_for(self, number, text):
        deadline = time.monotonic() + 180
        while text not in self.text(number):
            assert self.started[number].poll() is None, self.text(number)
            assert time.monotonic() < deadline, self.text(number)
            time.sleep(0.02)

    def end(self):
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


UMASKS = [0o022, 0o002, 0o026, 0o006]


def environment():
    kept = {key: text for key, text in os.environ.items() if key != "XLA_FLAGS"}
    return {**kept, "JAX_PLATFORMS": "cpu"}


@contextlib.contextmanager
def running(*args):
    processes = Processes(*args)
    try:
        yield processes
    finally:
        processes.end()


def done(count, place, *options):
    """The losses of a run, which are the same in all its processes."""
    with running(count, place, *options) as processes:
        codes = processes.wait(240)
        texts = [processes.text(number) for number in range(count)]
    assert codes == [0] * count, "\n".join(texts)
    (losses,) = {tuple(re.findall(r"loss (\S+)", text)) for text in texts}
    return np.array(losses, float)


def writer_of(path):
    """The process that wrote a file."""
    mode = stat.S_IMODE(path.stat().st_mode)
    return [0o666 & ~umask for umask in UMASKS].index(mode)


def saved(folder, step):
    """All numbers of a checkpoint, on one device."""
    with jax.set_mesh(sharded.mesh_for("data", AxisType.Auto, jax.devices()[:1])):
        target = tt.eval_shape(lambda: sharded.Run("data"))
        found = tt.restore_checkpoint(folder / f"step_{step}", target)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(found)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A run in one process: its losses, and where it left what it kept."""
    place = tmp_path_factory.mktemp("alone")
    return done(1, place, "--steps", 10, *folders_in(place)), place


@pytest.mark.long
@pytest.mark.parametrize(
    ("count", "way", "mesh"), [(2, "both", "auto"), (4, "fsdp", "explicit")]
)
def test_several_processes_train_and_keep_what_one_does(
    count, way, mesh, alone, tmp_path
):
    options = ("--way", way, "--mesh", mesh, "--steps", 10, *folders_in(tmp_path))
    losses = done(count, tmp_path, *options)
    expected, place = alone
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
    pairs = zip(saved(tmp_path / "saved", 10), saved(place / "saved", 10), strict=True)
    for found, wanted in pairs:
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)

    whole, parts = tt.Store(place / "kept"), tt.Store(tmp_path / "kept")
    assert len(whole) == len(parts) == 10
    assert parts.metadata[7] == {"step": 7}
    for one, other in zip(whole.names, parts.names, strict=True):
        assert one.split("/")[-1] == other.split("/")[-1]
        assert whole[one].shape[0] == 10 * ROWS
        np.testing.assert_allclose(parts[other][:], whole[one][:], rtol=1e-4, atol=2e-4)

    # each process wrote the rows that it had, and no others
    chunk = 1 if way == "fsdp" else ROWS // 2
    files = [p for p in (tmp_path / "kept" / "data").glob("*/c/**/*") if p.is_file()]
    assert len(files) == len(parts.names) * 10 * ROWS // chunk
    for path in files:
        number = int(path.parts[path.parts.index("c") + 1])
        assert writer_of(path) == number * chunk % ROWS // (ROWS // count), path
    for number in range(count):
        written = (tmp_path / "saved" / "step_10").glob(f"ocdbt.process_{number}/d/*")
        assert {writer_of(path) for path in written} == {number}


# One dies.


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run of two processes, to compare with."""
    place = tmp_path_factory.mktemp("undisturbed")
    return done(2, place, "--steps", 40, *folders_in(place)), place


def folders_in(place):
    return ("--folder", place / "saved", "--store", place / "kept")


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_when_one_is_killed_the_other_ends_and_a_restart_goes_on(
    victim, undisturbed, tmp_path
):
    options = ("--steps", 40, *folders_in(tmp_path))
    with running(2, tmp_path, "--patience", PATIENCE, *options) as processes:
        processes.wait_for(victim, "step 7:")
        os.kill(processes.started[victim].pid, signal.SIGKILL)
        codes = processes.wait(PATIENCE + SLACK)
        told = processes.text(1 - victim)
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] != 0
    assert LOST.search(told), told
    assert "step 40:" not in told
    done_before = len(tt.Store(tmp_path / "kept"))
    assert 7 <= done_before < 40

    expected, place = undisturbed
    losses = done(2, tmp_path, *options)
    assert 0 < len(losses) < 40  # it went on, and did not begin again
    assert losses.tolist() == expected[-len(losses) :].tolist()
    pairs = zip(saved(tmp_path / "saved", 40), saved(place / "saved", 40), strict=True)
    for found, wanted in pairs:
        np.testing.assert_array_equal(found, wanted, strict=True)
    whole, again = tt.Store(place / "kept"), tt.Store(tmp_path / "kept")
    assert again.metadata == whole.metadata
    for name in whole.names:
        np.testing.assert_array_equal(again[name][:], whole[name][:])


@pytest.mark.long
def test_a_process_that_fails_by_itself_does_not_leave_the_others_waiting(tmp_path):
    (tmp_path / "kept").write_text("not a folder")
    with running(2, tmp_path, "--store", tmp_path / "kept") as processes:
        codes = processes.wait(120)
        told = processes.text(0)
    assert 0 not in codes
    assert "StoreWriter: " in told
    assert "is a file; a store is a folder" in told
