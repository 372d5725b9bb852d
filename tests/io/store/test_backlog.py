# SPDX-License-Identifier: Apache-2.0
"""Batches written by a thread: order, bounds, errors, kills, and the same numbers."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kept_records import assert_same, record_of

import treetap as tt
from treetap._io.store import arrays, writers
from treetap._io.store.backlog import Backlog
from treetap._io.store.stores import Store
from treetap._io.store.writers import StoreWriter
from treetap._observe.records import Record, Site

BUFFER = 2**20


def record_with(value):
    return Record((Site(value, name="x"),))


# The backlog itself.


class Slow:
    """Writes when it is told to, and notes what."""

    def __init__(self):
        self.groups = []
        self.go = threading.Event()
        self.begun = threading.Event()

    def __call__(self, batches):
        self.begun.set()
        assert self.go.wait(30)
        self.groups.append(batches)


@pytest.fixture
def slow():
    slow = Slow()
    yield slow
    slow.go.set()


def test_batches_keep_their_order_and_are_written_together(slow):
    backlog = Backlog(slow, 5, 100)
    assert backlog.put("a", 10) == 5
    assert slow.begun.wait(30)
    assert [backlog.put(text, 10) for text in "bcd"] == [6, 7, 8]
    assert len(backlog) == 9
    slow.go.set()
    backlog.flush()
    assert slow.groups == [["a"], ["b", "c", "d"]]
    assert len(backlog) == 9


def test_who_hands_over_more_than_there_is_room_for_waits(slow):
    backlog = Backlog(slow, 0, 100)
    backlog.put("a", 60)
    assert slow.begun.wait(30)
    backlog.put("b", 40)
    third = threading.Thread(target=backlog.put, args=("c", 1))
    third.start()
    third.join(0.1)
    assert third.is_alive()
    assert len(backlog) == 2
    slow.go.set()
    third.join(30)
    backlog.flush()
    assert [text for group in slow.groups for text in group] == ["a", "b", "c"]


def test_a_batch_larger_than_the_limit_goes_alone(slow):
    slow.go.set()
    backlog = Backlog(slow, 0, 100)
    for text in "abc":
        backlog.put(text, 1000)
    backlog.flush()
    assert slow.groups == [["a"], ["b"], ["c"]]


def test_many_threads_hand_over_at_once():
    found = []
    backlog = Backlog(found.extend, 0, 50)
    numbers = []

    def hand_over(start):
        numbers.extend(
            (backlog.put(n, 1 + n % 30), n) for n in range(start, start + 200)
        )

    threads = [threading.Thread(target=hand_over, args=(n,)) for n in (0, 1000, 2000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    backlog.flush()
    assert [batch for _, batch in sorted(numbers)] == found
    assert len(found) == 600


def fail(_):
    raise OSError(28, "no space left")


def test_an_error_comes_once_and_what_waited_is_not_written(slow):
    written = []

    def write(batches):
        slow(batches)
        if len(slow.groups) == 1:
            fail(batches)
        written.extend(batches)

    backlog = Backlog(write, 7, 100)
    backlog.put("a", 1)
    assert slow.begun.wait(30)
    backlog.put("b", 1)
    slow.go.set()
    with pytest.raises(OSError, match="no space left") as caught:
        backlog.flush()
    (note,) = caught.value.__notes__
    assert note.startswith("StoreWriter: batches from 7 on were not kept. Append them")
    assert len(backlog) == 7
    backlog.flush()
    assert backlog.put("c", 1) == 7
    backlog.flush()
    assert written == ["c"]


def test_who_waits_for_room_is_told_of_the_error(slow):
    def write(batches):
        slow(batches)
        fail(batches)

    backlog = Backlog(write, 0, 10)
    backlog.put("a", 10)
    threading.Timer(0.1, slow.go.set).start()
    with pytest.raises(OSError, match="no space left"):
        backlog.put("b", 10)
    assert len(backlog) == 0


def test_an_error_of_a_forgotten_backlog_is_printed(monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda it: told.append(it.exc_value))
    backlog = Backlog(fail, 0, 10)
    backlog.put("a", 1)
    while backlog._held:
        time.sleep(0.001)
    backlog._thread.shutdown()
    del backlog
    gc.collect()
    assert [str(error) for error in told] == ["[Errno 28] no space left"]


# Stores.


def test_a_buffer_changes_no_number(tmp_path):
    for buffer in (0, 1, BUFFER):
        folder = tmp_path / f"runs {buffer}"
        with StoreWriter(folder, buffer=buffer) as writer:
            for number in range(30):
                assert writer.append(record_of(number), {"n": number}) == number
                assert len(writer) == number + 1
        store = Store(folder)
        assert [told["n"] for told in store.metadata] == [*range(30)]
        for number, record in enumerate(store):
            assert_same(record, record_of(number))
        assert store["../../a/b:s"]._held.shape == store["../../a/b:s"].shape


def test_a_store_with_a_buffer_is_continued_without_and_again_with_one(tmp_path):
    for number, buffer in enumerate([BUFFER, 0, BUFFER, 0]):
        with StoreWriter(tmp_path / "runs", buffer=buffer) as writer:
            for part in range(3):
                record = record_of(3 * number + part)
                assert writer.append(record) == 3 * number + part
    for number, record in enumerate(Store(tmp_path / "runs")):
        assert_same(record, record_of(number))


def test_small_batches_share_chunks(tmp_path):
    with StoreWriter(tmp_path / "runs", buffer=BUFFER) as writer:
        for number in range(600):
            site = Site(np.float64(number), name="loss")
            writer.append(Record((site, *record_with(np.full((4, 8), number)))))
    store = Store(tmp_path / "runs")
    np.testing.assert_array_equal(store["loss"][:], np.arange(600))
    np.testing.assert_array_equal(store["x"][:, 0], np.repeat(np.arange(600), 4))
    chunks = [p for p in (tmp_path / "runs/data").rglob("c/*") if p.name != "c"]
    assert len([path for path in chunks if path.parent.name == "c"]) == 2 * 3


def test_flush_puts_all_on_the_disk(tmp_path):
    with StoreWriter(tmp_path / "runs", buffer=BUFFER) as writer:
        for number in range(5):
            writer.append(record_of(number))
        writer.flush()
        store = Store(tmp_path / "runs")
        assert len(store) == 5
        assert_same(store.batch(4), record_of(4))


def test_arrays_may_change_after_they_are_handed_over(tmp_path, monkeypatch):
    real, go = arrays.written, threading.Event()

    def later(*args):
        assert go.wait(30)
        return real(*args)

    monkeypatch.setattr(writers, "written", later)
    value = np.ones((2, 3))
    with StoreWriter(tmp_path / "runs", buffer=BUFFER) as writer:
        writer.append(record_with(value))
        value[:] = 7
        go.set()
    np.testing.assert_array_equal(Store(tmp_path / "runs")["x"][:], np.ones((2, 3)))


def test_a_value_given_away_before_it_was_written_is_told(tmp_path, monkeypatch):
    value = jnp.ones((2, 3))
    with StoreWriter(tmp_path / "runs", buffer=BUFFER) as writer:
        writer.append(record_with(jnp.zeros((2, 3))))
        writer.flush()
        real = writer._settle

        def settle():
            value.delete()
            real()

        with monkeypatch.context() as patch:
            patch.setattr(writer, "_settle", settle)
            writer.append(record_with(value))
            with pytest.raises(RuntimeError, match="deleted") as caught:
                writer.flush()
        assert "must not be donated or deleted before" in caught.value.__notes__[-1]
        assert writer.append(record_with(jnp.full((2, 3), 2.0))) == 1
    np.testing.assert_array_equal(Store(tmp_path / "runs")["x"][2:], np.full((2, 3), 2))


def test_an_error_of_the_model_is_not_lost(tmp_path):
    def broken(x):
        raise ValueError("no such thing")

    @jax.jit
    def model(x):
        return jax.pure_callback(broken, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    with StoreWriter(tmp_path / "runs", buffer=BUFFER) as writer:
        writer.append(record_with(jnp.ones((2, 3))))

        def append():
            """Either of these raises, as soon as JAX comes to it."""
            writer.append(record_with(model(jnp.ones((2, 3)))))
            writer.flush()

        with pytest.raises(jax.errors.JaxRuntimeError, match="no such thing"):
            append()
        assert len(writer) == 1
        assert writer.append(record_with(jnp.ones((2, 3)))) == 1


@pytest.mark.parametrize("call", ["append", "flush", "close"])
def test_an_error_of_the_disk_is_raised_by_the_next_call(call, tmp_path, monkeypatch):
    writer = StoreWriter(tmp_path / "runs", buffer=BUFFER)
    writer.append(record_of(0))
    writer.flush()
    with monkeypatch.context() as patch:
        patch.setattr(writer._journal, "write", fail)
        writer.append(record_of(1))
        while writer._backlog._held:
            time.sleep(0.001)
    arguments = [record_of(2)] if call == "append" else []
    with pytest.raises(OSError, match="no space left"):
        getattr(writer, call)(*arguments)
    if call == "close":
        writer.close()
        writer = StoreWriter(tmp_path / "runs", buffer=BUFFER)
    assert len(writer) == 1
    assert writer.append(record_of(1)) == 1
    writer.close()
    assert_same(Store(tmp_path / "runs").batch(1), record_of(1))


def test_what_does_not_fit_is_refused_at_once(tmp_path):
    with StoreWriter(tmp_path / "runs", buffer=BUFFER) as writer:
        writer.append(record_with(np.ones((2, 3))))
        with pytest.raises(tt.StructureError, match="x is float64"):
            writer.append(record_with(np.ones((2, 4))))
        assert writer.append(record_with(np.ones((2, 3)))) == 1
    for buffer in (-1, 1.5, True):
        with pytest.raises(ValueError, match="`buffer` is bytes from 0"):
            StoreWriter(tmp_path / "runs", buffer=buffer)


PROGRAM = """
import os, sys
from kept_records import record_of
from treetap._io.store.writers import StoreWriter
writer = StoreWriter(sys.argv[1], buffer=2**20)
number = len(writer)
while True:
    for _ in range(7):
        assert writer.append(record_of(number), {"number": number}) == number
        number += 1
    if "--end" in sys.argv:
        break
    writer.flush()
    os.write(1, b"%d\\n" % number)
"""


def program(folder, *more):
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(folder), *more]
    paths = [os.path.dirname(__file__), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
@pytest.mark.parametrize("turns", [3, pytest.param(15, marks=pytest.mark.long)])
def test_what_was_flushed_survives_kills_and_the_rest_is_whole(turns, tmp_path):
    random = np.random.default_rng(turns)
    flushed = 0
    for _ in range(turns):
        with program(tmp_path / "runs") as process:
            wanted = flushed + 7 * int(random.integers(1, 4))
            while flushed < wanted:
                flushed = int(process.stdout.readline())
            time.sleep(random.uniform(0, 0.05))
            os.kill(process.pid, signal.SIGKILL)
            rest = process.stdout.read().split()
        flushed = max(flushed, *map(int, rest), 0)
        store = Store(tmp_path / "runs")
        assert len(store) >= flushed
        for number, record in enumerate(store):
            assert store.metadata[number] == {"number": number}
            assert_same(record, record_of(number))
        flushed = len(store)


def test_a_program_that_ends_without_closing_writes_what_it_handed_over(tmp_path):
    with program(tmp_path / "runs", "--end") as process:
        assert process.wait(60) == 0
    assert len(Store(tmp_path / "runs")) == 7


# Labels.


@pytest.mark.parametrize("buffer", [0, BUFFER])
def test_labels_are_kept_beside_the_values(buffer, tmp_path):
    with StoreWriter(tmp_path / "runs", buffer=buffer) as writer:
        for number in range(6):
            x = np.arange(8.0).reshape(4, 2) + 8 * number
            writer.append(record_with(x), labels={"even": x[:, 0].astype(np.int32)})
        with pytest.raises(
            tt.StructureError, match="has labels, and the Record has no"
        ):
            writer.append(record_with(x))
    store = Store(tmp_path / "runs")
    assert store.names == ("x", "labels.even")
    for x, label in store.shuffled(["x", "labels.even"], 5):
        np.testing.assert_array_equal(x[:, 0], label)
    assert store.batch(2)["labels"].value["even"].tolist() == [16, 18, 20, 22]
