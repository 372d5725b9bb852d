# SPDX-License-Identifier: Apache-2.0
"""Files and texts from anybody are read or refused, and nothing else happens.

Each reader gets good inputs with damage made for it: see `hostile.py`. Neither time nor
memory is spent beyond measure, nothing outside of the folder is touched, and the error
is one of those that are documented. `fuzz/run.py` tries many more.
"""

import os
import random
import sys

import guards
import hostile
import mutations
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
QUICK = {"journal": 40, "arrays": 40, "chunks": 25, "packed": 25, "compare": 60}


@pytest.fixture
def folder(tmp_path):
    """A folder with something beside it that nobody may touch."""
    (tmp_path / "outside.txt").write_text("untouched")
    (tmp_path / "inside").mkdir()
    yield str(tmp_path / "inside")
    assert (tmp_path / "outside.txt").read_text() == "untouched"
    assert sorted(os.listdir(tmp_path)) == ["inside", "outside.txt"]


def run(name, folder, count, seed):
    """Tries some inputs; how many were read, and how many refused."""
    target, source = hostile.TARGETS[name], random.Random(seed)
    seeds = target.seeds()
    outcomes = [guards.tried(target, data, folder) for data in seeds]
    for number in range(count):
        data = source.choice(seeds)
        for _ in range(source.choice([1, 1, 2, 3])):
            data = target.mutate(data, source)
        try:
            outcomes.append(guards.tried(target, data, folder))
        except guards.Finding as finding:
            what = f"{name}, input {number} of seed {seed}: {str(finding)!a}"
            raise AssertionError(what) from None  # whose text may not be printable
    return outcomes


@pytest.mark.parametrize("name", hostile.TARGETS)
def test_damaged_inputs_are_read_or_refused(name, folder):
    outcomes = run(name, folder, QUICK.get(name, 150), seed=0)
    assert "refused" in outcomes


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", hostile.TARGETS)
def test_many_damaged_inputs_are_read_or_refused(name, seed, folder):
    outcomes = run(name, folder, 20 * QUICK.get(name, 150), seed)
    assert "refused" in outcomes
    assert "read" in outcomes or name == "weights"


# The guards themselves.


def with_reader(read):
    return guards.Target(list, mutations.raw_bytes, read, (ValueError,))


def touch_outside(data, folder):
    with open(os.path.join(folder, "..", "outside.txt")) as opened:
        opened.read()


def take_memory(data, folder):
    bytearray(10 << 30)


def fill_memory(data, folder):
    assert len(b"x" * ((guards.MEGABYTES + 100) << 20))


def refuse_unprintably(data, folder):
    raise ValueError("\x1b[2J")


def refuse_otherwise(data, folder):
    raise KeyError("x")


def unpickle(data, folder):
    import pickle

    pickle.loads(b"cos\nsystem\n.")


@pytest.mark.parametrize(
    ("read", "told"),
    [
        (touch_outside, "touched outside"),
        (take_memory, "MemoryError"),
        (fill_memory, "MB more memory"),
        (refuse_unprintably, "control characters"),
        (refuse_otherwise, "KeyError"),
        (unpickle, "pickle.find_class"),
    ],
)
def test_what_a_reader_may_not_do_is_found(read, told, folder):
    with pytest.raises(guards.Finding, match=told):
        guards.tried(with_reader(read), b"", folder)


def test_a_slow_reader_is_found(folder, monkeypatch):
    monkeypatch.setattr(guards, "SECONDS", -1.0)
    with pytest.raises(guards.Finding, match="s for 0 bytes"):
        guards.tried(with_reader(lambda data, folder: None), b"", folder)


def test_damage_is_done():
    source = random.Random(0)
    for target in hostile.TARGETS.values():
        for data in target.seeds():
            others = {target.mutate(data, source) for _ in range(20)}
            assert len(others - {data}) > 10


def test_checksums_of_chunks_are_those_of_the_format():
    assert mutations.crc32c(b"123456789") == 0xE3069283
