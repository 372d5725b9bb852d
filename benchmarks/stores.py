# SPDX-License-Identifier: Apache-2.0
"""Stores beside plain numpy files of the same bytes: writing, and reading shuffled.

    python benchmarks/stores.py
    python benchmarks/stores.py --folder /mnt/disk     where to write; a temporary one

The floor of writing is `np.save` of each batch by one process, each file flushed to the
disk with `fsync`; ours is complete on the disk at the end, too, with a journal and
checksums. Beside it stands `np.save` without `fsync`, which leaves the work to the
operating system, and so measures memory as long as that suffices. The floor of reading
is one `.npy` file of all rows, mapped, indexed with shuffled numbers of rows: with its
pages in memory, and with none there, as when data are larger than memory.
"""

import argparse
import functools
import os
import pathlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import timing

import treetap as tt

WIDTH = 512  # numbers of a row: 2 kB
BATCHES = {"33 kB": (16, 200), "4 MB": (2048, 24), "64 MB": (32768, 6)}
BUFFER = 2**28
ROWS = 2**17  # that are read: 256 MB
AT_A_TIME = 4096
FASTEST = 1 / 0.8  # of the floor's time: 0.8 of its speed
WRITING = "store: write batches of "
READING = "store: read shuffled, "


def record_of(x: Any) -> tt.Record:
    return tt.Record((tt.Site(x, name="x"),))


# Writing: each contender writes all batches into a folder, and gives the seconds after
# which its last call for a batch returned.


def by_numpy(folder: pathlib.Path, batches: list[Any], *, is_kept: bool) -> float:
    folder.mkdir()
    for number, x in enumerate(batches):
        with open(folder / f"{number}.npy", "wb") as file:
            np.save(file, x)
            if is_kept:
                file.flush()
                os.fsync(file.fileno())
    return time.perf_counter()


def by_store(folder: pathlib.Path, batches: list[Any], *, buffer: int) -> float:
    with tt.StoreWriter(folder, buffer=buffer) as writer:
        for x in batches:
            writer.append(record_of(x))
        return time.perf_counter()


WRITERS: dict[str, Callable[..., float]] = {
    "numpy, each on disk": functools.partial(by_numpy, is_kept=True),
    "numpy, in memory": functools.partial(by_numpy, is_kept=False),
    "treetap, buffer": functools.partial(by_store, buffer=BUFFER),
    "treetap, each on disk": functools.partial(by_store, buffer=0),
}


def batches_of(rows: int, count: int) -> list[Any]:
    keys = jax.random.split(jax.random.key(0), count)
    return [jax.random.normal(key, (rows, WIDTH)) for key in keys]


def written(folder: pathlib.Path, rounds: int) -> Iterator[tuple[timing.Row, float]]:
    """Rows, and bytes of each."""
    for text, (rows, count) in BATCHES.items():
        batches = batches_of(rows, count)
        jax.block_until_ready(batches)
        times: dict[str, list[float]] = {name: [] for name in WRITERS}
        loops: dict[str, list[float]] = {name: [] for name in WRITERS}
        for number in range(rounds + 1):
            for name, write in WRITERS.items():
                place = folder / "written"
                os.sync()  # nothing of the one before is left to do
                start = time.perf_counter()
                looped = write(place, batches)
                end = time.perf_counter()
                shutil.rmtree(place)
                if number:  # the first is to warm up
                    times[name].append((end - start) / count)
                    loops[name].append((looped - start) / count)
        targets = {"treetap, buffer": FASTEST}
        for row in compared(f"{WRITING}{text}", times, targets):
            yield row, batches[0].nbytes
        loop = {"treetap, buffer": loops["treetap, buffer"]}
        loop = {"numpy, in memory": loops["numpy, in memory"], **loop}
        for row in compared(f"store: hand over batches of {text}", loop, {}):
            yield row, batches[0].nbytes


def compared(
    group: str, times: dict[str, list[float]], targets: dict[str, float]
) -> list[timing.Row]:
    """Rows of what was timed; the first is the floor."""
    floor = next(iter(times.values()))
    return [
        timing.Row(
            group,
            name,
            statistics.median(samples) * 1e6,
            statistics.median(samples) / statistics.median(floor),
            targets.get(name),
        )
        for name, samples in times.items()
    ]


# Reading.


def from_numpy(folder: pathlib.Path, seed: int) -> Iterator[np.ndarray]:
    rows = np.load(folder / "rows.npy", mmap_mode="r")
    order = np.random.default_rng(seed).permutation(len(rows))
    for at in range(0, len(order), AT_A_TIME):
        yield rows[order[at : at + AT_A_TIME]]


def from_store(folder: pathlib.Path, seed: int) -> Iterator[np.ndarray]:
    return tt.Store(folder / "rows").shuffled("x", AT_A_TIME, seed=seed)


READERS = {"numpy, mapped": from_numpy, "treetap": from_store}


def forget(folder: pathlib.Path) -> None:
    """Tells the operating system to keep no page of these files in memory."""
    for file in folder.rglob("*"):
        if file.is_file():
            handle = os.open(file, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def read(folder: pathlib.Path, rounds: int) -> Iterator[tuple[timing.Row, float]]:
    for text, (rows, _) in BATCHES.items():
        place = folder / "read"
        place.mkdir()
        whole = np.concatenate([np.asarray(x) for x in batches_of(rows, ROWS // rows)])
        np.save(place / "rows.npy", whole)
        with tt.StoreWriter(place / "rows", buffer=BUFFER) as writer:
            for x in np.split(whole, ROWS // rows):
                writer.append(record_of(x))
        for where in ("in memory", "on disk"):
            times: dict[str, list[float]] = {name: [] for name in READERS}
            for number in range(rounds + 1):
                for name, reader in READERS.items():
                    if where == "on disk":
                        os.sync()
                        forget(place)
                    start = time.perf_counter()
                    count = sum(len(x) for x in reader(place, number))
                    end = time.perf_counter()
                    if count != ROWS:
                        raise AssertionError(f"{name} gave {count} rows")
                    if number:
                        times[name].append(end - start)
            group = f"{READING}batches of {text} {where}"
            targets = {"treetap": FASTEST} if where == "on disk" else {}
            for row in compared(group, times, targets):
                yield row, whole.nbytes
        shutil.rmtree(place)


# A model that runs on.


def steps(folder: pathlib.Path, rounds: int) -> Iterator[tuple[timing.Row, float]]:
    """Steps of a model whose activations are kept, beside those of one alone."""
    is_gpu = jax.default_backend() == "gpu"
    width, count, length = 1024, 60, 200 if is_gpu else 1

    @jax.jit
    def model(x: Any) -> tuple[Any, Any]:
        y, kept = jax.lax.scan(lambda x, _: (jnp.tanh(x @ weight), x), x, length=length)
        return y, kept[-1]

    weight = jax.random.normal(jax.random.key(0), (width, width)) / width**0.5
    x = jax.random.normal(jax.random.key(1), (1024, width))
    jax.block_until_ready(model(x))

    def run(append: Callable[[Any], Any]) -> None:
        out = x
        for _ in range(count):
            out, kept = model(out)
            append(kept)
        jax.block_until_ready(out)

    times: dict[str, list[float]] = {"alone": [], "treetap, buffer": []}
    for _ in range(rounds):
        start = time.perf_counter()
        run(lambda _: None)
        times["alone"].append((time.perf_counter() - start) / count)
        with tt.StoreWriter(folder / "steps", buffer=BUFFER) as writer:
            writer.append(record_of(x))
            writer.flush()
            start = time.perf_counter()
            run(lambda kept: writer.append(record_of(kept)))
            times["treetap, buffer"].append((time.perf_counter() - start) / count)
        shutil.rmtree(folder / "steps")
    targets = {"treetap, buffer": 1.05} if is_gpu else {}
    for row in compared("store: a step of which 4 MB are kept", times, targets):
        yield row, x.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--folder", type=pathlib.Path, help="on the disk to measure")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found: list[tuple[timing.Row, float]] = []
        for part in (written, read, steps):
            for row, size in part(pathlib.Path(folder), options.rounds):
                found.append((row, size))
                speed = size / row.microseconds / 1e3
                print(f"{row.group} | {row.name} | {speed:.3f} GB/s", flush=True)
    rows = [row for row, _ in found]
    print(timing.table(rows))
    timing.write(options.json, rows)


if __name__ == "__main__":
    main()
