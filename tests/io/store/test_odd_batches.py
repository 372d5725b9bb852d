# SPDX-License-Identifier: Apache-2.0
"""Stores and records at their edges: odd keys and types, large batches, no locks."""

import jax.numpy as jnp
import numpy as np
import pytest
from kept_records import assert_same, record_of

from treetap._core.errors import CaptureError, WeightsError
from treetap._io.record_file import load_record, save_record
from treetap._io.store import journals, writers
from treetap._io.store.stores import Store
from treetap._io.store.writers import StoreWriter
from treetap._observe.records import Record, Site


def test_metadata_is_a_mapping(tmp_path):
    with StoreWriter(tmp_path / "runs") as writer:
        with pytest.raises(TypeError, match="is a mapping of what JSON has: it is a l"):
            writer.append(record_of(0), ["step", 1])
        assert len(writer) == 0


def test_large_batches_are_kept_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("treetap._io.store.arrays.LARGEST", 64)
    record = Record((Site(np.arange(64.0).reshape(16, 4), name="x"),))
    with StoreWriter(tmp_path / "runs") as writer:
        writer.append(record)
    assert_same(Store(tmp_path / "runs").batch(0), record)
    chunks = [file for file in (tmp_path / "runs" / "data").rglob("c/*") if file]
    assert len(chunks) == 8


@pytest.mark.parametrize("key", [None, True, 1.5, (1, None)])
def test_keys_of_dicts_are_what_they_were(key, tmp_path):
    record = Record((Site({key: np.ones((1, 2))}, name="x"),))
    with StoreWriter(tmp_path / "runs") as writer:
        writer.append(record)
    (found,) = Store(tmp_path / "runs").batch(0)[0].value
    assert found == key
    assert type(found) is type(key)


def test_a_journal_of_something_else_is_refused(tmp_path):
    with StoreWriter(tmp_path / "runs") as writer:
        writer.append(record_of(0))
    file = next(iter((tmp_path / "runs").glob("*journal*")))
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[1:]))  # whole lines, but not from the first
    with pytest.raises(WeightsError, match="is not the journal of a store"):
        Store(tmp_path / "runs")


def test_where_there_are_no_locks_a_store_is_written_without(tmp_path, monkeypatch):
    monkeypatch.setattr(journals, "fcntl", None)
    with StoreWriter(tmp_path / "runs") as writer:
        writer.append(record_of(0))
    assert_same(Store(tmp_path / "runs").batch(0), record_of(0))


def test_folders_are_not_flushed_where_they_cannot_be(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(writers, "to_disk", flushed.append)
    StoreWriter(tmp_path / "runs").close()
    assert flushed == [tmp_path / "runs", tmp_path]
    monkeypatch.setattr(writers.sys, "platform", "win32")
    StoreWriter(tmp_path / "runs").close()
    assert len(flushed) == 2


def test_a_record_of_other_processes_is_not_saved_in_one_file(tmp_path, monkeypatch):
    record = Record((Site(jnp.ones(2), name="x"),))
    elsewhere = property(lambda self: False)
    monkeypatch.setattr(type(record[0].value), "is_fully_addressable", elsewhere)
    with pytest.raises(CaptureError, match="x lies on devices of other processes"):
        save_record(tmp_path / "run.safetensors", record)
    assert not list(tmp_path.iterdir())


def test_a_record_of_types_that_jax_does_not_have_is_refused(tmp_path):
    file = tmp_path / "run.safetensors"
    save_record(file, Record((Site(np.zeros(4, np.uint8), name="x"),)))
    data = file.read_bytes()
    changed = data.replace(b'"U8","shape":[4]', b'"F4","shape":[8]')
    assert changed != data
    file.write_bytes(changed)
    with pytest.raises(WeightsError, match="tensor 'x' is F4, which JAX does not have"):
        load_record(file)
