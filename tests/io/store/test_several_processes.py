# SPDX-License-Identifier: Apache-2.0
"""Several processes append to one store, each the shards that it has."""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest
from several_processes import value_of

from treetap._io.store.stores import Store

PROGRAM = pathlib.Path(__file__).with_name("several_processes.py")


def run(folder, first, last, count=2):
    with socket.socket() as found:
        found.bind(("localhost", 0))
        address = f"localhost:{found.getsockname()[1]}"
    flags = "--xla_force_host_platform_device_count=2"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(PROGRAM), address, str(count)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with contextlib.ExitStack() as stack:
        processes = []
        for number in range(count):
            rest = [str(number), str(folder), str(first), str(last)]
            process = subprocess.Popen([*command, *rest], env=environment, **pipes)
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        for process in processes:
            out, err = process.communicate(timeout=60)
            assert out.strip().endswith("appended"), err


def check(folder, count):
    store = Store(folder)
    assert len(store) == count
    whole = np.concatenate([value_of(number) for number in range(count)])
    for name in ("rows", "columns", "same"):
        np.testing.assert_array_equal(store[name][:], whole)
    np.testing.assert_array_equal(store["loss"][:], np.arange(count))


@pytest.mark.long
def test_two_processes_append_and_one_reads(tmp_path):
    folder = tmp_path / "runs"
    run(folder, 0, 3)
    check(folder, 3)
    chunks = [p for p in folder.rglob("data/*-rows/c/*/*") if p.is_file()]
    assert len(chunks) == 3 * 4  # a chunk is a shard

    # one was killed before it could tell of the third batch
    journal = folder / "journal-1.jsonl"
    journal.write_bytes(journal.read_bytes()[:-5])
    check(folder, 2)
    run(folder, 2, 5)
    check(folder, 5)
