# SPDX-License-Identifier: Apache-2.0
"""A store whose writer is killed at any moment: what was acknowledged is there."""

import pathlib
import random
import subprocess
import sys

import pytest
from kept_records import assert_same, record_of

from treetap._io.store.stores import Store

PROGRAM = pathlib.Path(__file__).with_name("kept_records.py")
pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="needs fork, and signals"
)


@pytest.fixture
def program():
    command = [sys.executable, "-W", "ignore", str(PROGRAM)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        yield process
        process.stdin.close()


def kill_often(program, times, folder, seed):
    """Kills a writer many times; every fifth time a new store is begun."""
    moments = random.Random(seed)
    longest = 0.6
    kept = {}
    stores = []
    for time in range(times):
        if time % 5 == 0:
            stores.append(folder / f"store {time}")
            kept[stores[-1]] = -1
        store = moments.choice(stores)
        program.stdin.write(f"{moments.uniform(0, longest):.3f} {store}\n")
        program.stdin.flush()
        how, last = program.stdout.readline().split()
        assert how == "killed"
        if int(last) < 0:  # a busy machine: it needs longer for the first one
            longest = min(2 * longest, 20)
        kept[store] = max(kept[store], int(last))
        check(store, kept[store], start=max(0, kept[store] - 10))
    for store, last in kept.items():
        check(store, last, start=0)
    return kept


def check(folder, last, start):
    """All that was acknowledged is there, and all that is there is as it was."""
    if last < 0 and not list(folder.glob("journal-0.jsonl")):
        return  # killed before there was anything
    store = Store(folder)
    assert len(store) > last
    for number in range(start, len(store)):
        assert store.metadata[number] == {"number": number}
        assert_same(store.batch(number), record_of(number))


def test_every_acknowledged_batch_survives_five_kills(program, tmp_path):
    kept = kill_often(program, 5, tmp_path, seed=0)
    assert max(kept.values()) > 0


@pytest.mark.long
def test_every_acknowledged_batch_survives_fifty_kills(program, tmp_path):
    kept = kill_often(program, 50, tmp_path, seed=1)
    assert sum(kept.values()) > 100
