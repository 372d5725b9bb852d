# SPDX-License-Identifier: Apache-2.0
"""Several processes at one store, played by one: where they meet and what they tell.

`test_several_processes.py` runs real ones.
"""

import jax
import numpy as np
import pytest
from kept_records import assert_same, record_of

from treetap._io.store import writers
from treetap._io.store.stores import Store
from treetap._io.store.writers import StoreWriter


class Others:
    """The other process: does and says what it is told to."""

    def __init__(self, monkeypatch):
        self.met = []
        self.failed = [False, False]
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setattr(writers, "sync_global_devices", self.met.append)
        monkeypatch.setattr(writers, "process_allgather", self.gathered)

    def gathered(self, mine):
        return np.array([bool(mine) or self.failed[0], self.failed[1]])


@pytest.fixture
def others(monkeypatch):
    return Others(monkeypatch)


def test_processes_meet_before_one_changes_what_another_reads(others, tmp_path):
    folder = tmp_path / "runs"
    with StoreWriter(folder) as writer:
        writer.append(record_of(0))
    words = [text.split()[1] for text in others.met]
    assert words == ["folder", "journals", "read", "told"]
    assert all(text.endswith(str(folder)) for text in others.met)


def test_what_fails_in_another_process_fails_here(others, tmp_path):
    with StoreWriter(tmp_path / "runs") as writer:
        writer.append(record_of(0))
        others.failed = [False, True]
        with pytest.raises(OSError, match=r"writing failed in processes \[1\]"):
            writer.append(record_of(1))
        assert len(writer) == 1
        others.failed = [False, False]
        assert writer.append(record_of(1)) == 1


def test_another_process_opens_what_the_first_has_grown(others, monkeypatch, tmp_path):
    """Processes in turn: the first writes what the second finds."""
    folder = tmp_path / "runs"
    with StoreWriter(folder) as first:
        monkeypatch.setattr(jax, "process_index", lambda: 1)
        with StoreWriter(folder) as second:
            monkeypatch.setattr(jax, "process_index", lambda: 0)
            first.append(record_of(0))
            second.append(record_of(0))
            assert (len(first), len(second)) == (1, 1)
    monkeypatch.undo()
    assert_same(Store(folder).batch(0), record_of(0))
