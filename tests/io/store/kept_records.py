# SPDX-License-Identifier: Apache-2.0
"""Records for tests of stores, and a program that appends them until it is killed."""

import itertools
import os
import signal
import sys
import time

import jax
import numpy as np

from treetap._io.store.writers import StoreWriter
from treetap._observe.records import Record, Site


def record_of(number):
    """A Record that its number determines; batches differ in their rows."""
    random = np.random.default_rng(number)
    rows = 1 + number % 5
    wide = random.normal(size=(rows, 40, 30)).astype(np.float32)
    pair = (random.integers(0, 9, (rows, 3)), [random.normal(size=(rows,)) > 0])
    stack = random.normal(size=(4, rows, 2)).astype(np.float16)
    return Record(
        (
            Site(wide, path=("blocks", 0), name="__call__", how="output"),
            Site(pair, path=("blocks", 0), name="pair", grad=(None, [pair[1][0]])),
            Site(stack, path=("../..", "a/b"), name="s", wraps=("scan",)),
            Site(np.float64(number), name="loss", count=np.int32(number)),
        )
    )


def assert_same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def append_for_ever(folder, pipe):
    """Appends, and says of each batch that it is kept."""
    writer = StoreWriter(folder)
    for number in itertools.count(len(writer)):
        assert writer.append(record_of(number), {"number": number}) == number
        os.write(pipe, b"%d\n" % number)


def main():
    """Reads lines `seconds folder`; for each, appends so long and is killed."""
    for line in sys.stdin:
        seconds, folder = line.rstrip("\n").split(" ", 1)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            try:
                append_for_ever(folder, write)
            finally:
                os._exit(1)
        os.close(write)
        time.sleep(float(seconds))
        os.kill(child, signal.SIGKILL)
        with os.fdopen(read, "rb") as pipe:
            told = [int(text) for text in pipe.read().split()]
        _, status = os.waitpid(child, 0)
        how = "killed" if os.WIFSIGNALED(status) else "failed"
        print(how, told[-1] if told else -1, flush=True)


if __name__ == "__main__":
    main()
