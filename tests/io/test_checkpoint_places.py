# SPDX-License-Identifier: Apache-2.0
"""Where checkpoints go: remote storage, many processes, broken folders."""

import contextlib
import os
import threading
import time
import types

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import treetap as tt
from treetap._io import checkpoints

MODEL = {"w": tt.Param(jnp.ones(2))}


@pytest.fixture
def saved(monkeypatch):
    """What Orbax is asked to save, in place of saving it."""
    asked = []

    @contextlib.contextmanager
    def checkpointer(_):
        yield types.SimpleNamespace(
            save=lambda place, args, force: asked.append((str(place), force))
        )

    monkeypatch.setattr(checkpoints, "_checkpointer", checkpointer)
    return asked


def test_remote_storage_is_left_to_orbax(saved):
    tt.save_checkpoint("gs://bucket/last", MODEL, overwrite=True)
    assert saved == [("gs://bucket/last", True)]


def test_several_processes_write_one_folder_after_all_have_looked(
    saved, tmp_path, monkeypatch
):
    met = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(checkpoints, "sync_global_devices", met.append)
    tt.save_checkpoint(tmp_path / "last", MODEL)
    assert met == [f"save_checkpoint {tmp_path / 'last'}"]
    assert saved == [(str(tmp_path / "last"), False)]


def test_what_is_broken_inside_is_told(tmp_path):
    model = {"w": tt.Param(jnp.arange(100_000.0))}
    tt.save_checkpoint(tmp_path / "last", model)
    files = [file for file in (tmp_path / "last").rglob("*") if file.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size)
    os.truncate(largest, 100)
    with pytest.raises(tt.WeightsError, match=r"last is broken: .*OUT_OF_RANGE"):
        tt.restore_checkpoint(tmp_path / "last", model)


def test_a_text_in_the_place_of_an_array_is_told(tmp_path):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "last", {"w": "a text"})
    with pytest.raises(tt.WeightsError, match=r"w \(Param\): stored as StringMetadata"):
        tt.restore_checkpoint(tmp_path / "last", MODEL)


def test_a_target_that_is_being_traced_is_filled(tmp_path):
    tt.save_checkpoint(tmp_path / "last", MODEL)

    @jax.jit
    def call(x):
        restored = tt.restore_checkpoint(tmp_path / "last", {"w": tt.Param(x)})
        return restored["w"] + x

    assert call(jnp.full(2, 4.0)).tolist() == [5.0, 5.0]


def test_an_error_of_orbax_that_is_not_of_files_stays_its_own(tmp_path, monkeypatch):
    @contextlib.contextmanager
    def checkpointer(_):
        def save(place, args):
            raise ValueError("a tree that Orbax does not like")

        yield types.SimpleNamespace(save=save)

    tt.save_checkpoint(tmp_path / "last", MODEL)
    monkeypatch.setattr(checkpoints, "_checkpointer", checkpointer)
    with pytest.raises(ValueError, match=r"^a tree that Orbax does not like$"):
        tt.save_checkpoint(tmp_path / "last", MODEL, overwrite=True)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["last"]
    assert tt.restore_checkpoint(tmp_path / "last", MODEL)["w"].tolist() == [1.0, 1.0]


def test_threads_that_write_on_after_an_interrupt_leave_nothing(tmp_path, monkeypatch):
    @contextlib.contextmanager
    def checkpointer(_):
        def save(place, args):
            def write_on():
                time.sleep(0.2)
                (place.with_name(f"{place.name}.tmp") / "part").mkdir(parents=True)

            threading.Thread(target=write_on).start()
            raise KeyboardInterrupt

        yield types.SimpleNamespace(save=save)

    monkeypatch.setattr(checkpoints, "_checkpointer", checkpointer)
    with pytest.raises(KeyboardInterrupt):
        tt.save_checkpoint(tmp_path / "last", MODEL)
    assert os.listdir(tmp_path) == []
