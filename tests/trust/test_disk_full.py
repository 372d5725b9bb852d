# SPDX-License-Identifier: Apache-2.0
"""Disks that are full: what was kept stays, the error says what to do, and it goes on.

A limit on the size of files stands for a full disk, wherever tests run; where a small
disk can be mounted, one is filled to the last byte.
"""

import contextlib
import errno
import itertools
import os
import resource
import subprocess
import sys
import threading

import jax.numpy as jnp
import numpy as np
import pytest

import treetap as tt
from treetap._observe.records import Record, Site

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs limits")
ROOM = "make room"


@contextlib.contextmanager
def full_at(size):
    """No file can grow beyond a size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def record_of(number):
    wide = np.full((32, 32), number, np.float32)
    return Record((Site(wide, name="wide"), Site(np.float64(number), name="loss")))


def numbers_in(folder):
    store = tt.Store(folder)
    found = [store.batch(n) for n in range(len(store))]
    for number, record in enumerate(found):
        assert (record["wide"].value == number).all()
    return [float(record["loss"].value) for record in found]


def append_in_vain(writer, folder, sizes):
    """Appends while files cannot grow; what was acknowledged is there."""
    for size in sizes:
        number = len(writer)
        with full_at(size), pytest.raises(OSError, match=ROOM) as caught:
            writer.append(record_of(number))
        assert str(folder) in str(caught.value)
        assert "StoreWriter" in str(caught.value)
        assert len(writer) == number
        assert numbers_in(folder) == [*range(number)]


def test_a_store_keeps_what_it_acknowledged_and_goes_on(tmp_path):
    folder = tmp_path / "runs"
    with tt.StoreWriter(folder) as writer:
        writer.append(record_of(0))
        append_in_vain(writer, folder, [0, 100, 300, 450, 2000])
        writer.append(record_of(len(writer)))
        append_in_vain(writer, folder, [300, 500])
        count = len(writer)
    with tt.StoreWriter(folder) as writer:
        assert writer.append(record_of(count)) == count
    assert numbers_in(folder) == [*range(count + 1)]


@pytest.mark.parametrize("size", [0, 30, 120, 250, 400, 1000])
def test_a_store_that_could_not_be_begun_is_begun_later(size, tmp_path):
    folder = tmp_path / "runs"

    def begin():
        with tt.StoreWriter(folder) as writer:
            writer.append(record_of(0))

    with full_at(size), pytest.raises(OSError, match=ROOM) as caught:
        begin()
    assert str(folder) in str(caught.value)
    assert "tensorstore_spec" not in str(caught.value)
    with tt.StoreWriter(folder) as writer:
        assert writer.append(record_of(0)) == 0
    assert numbers_in(folder) == [0]


@pytest.mark.parametrize("call", range(1, 5))
@pytest.mark.parametrize("function", ["write", "fsync"])
def test_a_store_whose_journal_has_no_room(function, call, tmp_path, monkeypatch):
    folder = tmp_path / "runs"
    real, calls = getattr(os, function), []

    def limited(*args):
        calls.append(args)
        if len(calls) == call:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    with tt.StoreWriter(folder) as writer:
        writer.append(record_of(0))
        monkeypatch.setattr(os, function, limited)
        for number in range(1, call):
            assert writer.append(record_of(number)) == number
        with pytest.raises(OSError, match=ROOM) as caught:
            writer.append(record_of(call))
        assert caught.value.errno == errno.ENOSPC
        assert str(folder / "journal-0.jsonl") in str(caught.value)
        monkeypatch.undo()
        assert len(writer) == call
        assert writer.append(record_of(call)) == call
    assert numbers_in(folder) == [*range(call + 1)]


MODEL = {"w": tt.Param(jnp.ones((60, 60)))}
SAVERS = {
    "a.safetensors": lambda path: tt.save_weights(path, MODEL),
    "r.safetensors": lambda path: tt.save_record(path, record_of(1)),
    "a.html": lambda path: tt.report(record_of(1)).save(path),
}


@pytest.mark.parametrize("size", [0, 100, 3000])
@pytest.mark.parametrize("name", SAVERS)
def test_a_file_is_as_it_was_and_nothing_lies_beside_it(name, size, tmp_path):
    path, save = tmp_path / name, SAVERS[name]
    save(path)  # compiled by now: for GPUs that needs files, too
    path.unlink()
    with full_at(size), pytest.raises(OSError, match="could not be written") as caught:
        save(path)
    assert str(path) in str(caught.value)
    assert os.listdir(tmp_path) == []
    save(path)
    before = path.read_bytes()
    with full_at(size), pytest.raises(OSError, match="could not be written"):
        save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [name]
    save(path)


@pytest.mark.parametrize("size", [0, 200])
def test_the_old_checkpoint_stays(size, tmp_path):
    path = tmp_path / "last"
    tt.save_checkpoint(path, MODEL)
    new = {"w": tt.Param(jnp.zeros((60, 60)))}
    with full_at(size), pytest.raises(OSError, match=ROOM) as caught:
        tt.save_checkpoint(path, new, overwrite=True)
    assert str(caught.value).startswith("save_checkpoint: ")
    assert str(path) in str(caught.value)
    assert os.listdir(tmp_path) == ["last"]
    assert (tt.restore_checkpoint(path, new)["w"] == 1).all()
    tt.save_checkpoint(path, new, overwrite=True)
    assert (tt.restore_checkpoint(path, new)["w"] == 0).all()


def test_events_that_cannot_be_written_are_told(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    # the thread of tensorboard that writes ends with the error, too
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    before = {*threading.enumerate()}
    writer = tt.EventWriter(tmp_path)
    writing = [thread for thread in threading.enumerate() if thread not in before]
    with full_at(60):
        writer.add_scalar("loss", 1.0, 1)
        with pytest.raises(OSError, match=r"File too large.*make room"):
            writer.flush()
        for thread in writing:
            thread.join(10)
    writer = tt.EventWriter(tmp_path / "closed")
    with full_at(60):
        writer.add_scalar("loss", 1.0, 1)
        with pytest.raises(OSError, match="could not be written"):
            writer.close()
    with tt.EventWriter(tmp_path / "other") as other:
        other.add_scalar("loss", 1.0, 1)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 256 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("nothing can be mounted here")
    yield place
    # What a checkpoint that failed still writes may keep it busy for a while; then it
    # goes when that ends.
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def append_for_ever(writer):
    for number in itertools.count():
        assert writer.append(record_of(number)) == number


def test_a_disk_filled_to_the_last_byte(small_disk):
    folder = small_disk / "runs"
    filler = small_disk / "filler"
    filler.write_bytes(bytes(120_000))
    with tt.StoreWriter(folder) as writer:
        with pytest.raises(OSError, match="No space left on device") as caught:
            append_for_ever(writer)
        assert ROOM in str(caught.value)
        kept = len(writer)
        assert kept > 2
        assert numbers_in(folder) == [*range(kept)]
        path = small_disk / "a.safetensors"
        with pytest.raises(OSError, match=ROOM):
            tt.save_weights(path, MODEL)
        with pytest.raises(OSError, match=ROOM):
            tt.save_checkpoint(small_disk / "last", MODEL)
        assert sorted(os.listdir(small_disk)) == ["filler", "runs"]
        filler.unlink()
        assert writer.append(record_of(kept)) == kept
    assert numbers_in(folder) == [*range(kept + 1)]
    tt.save_weights(path, MODEL)
