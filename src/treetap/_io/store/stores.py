# SPDX-License-Identifier: Apache-2.0
"""Stores: the Records of many batches in one folder, read as they are needed.

By site, for the rows of all batches; by batch, for Records as they were; or shuffled,
for training. A store has what was appended when it was opened.
"""

import math
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from treetap._core import display
from treetap._core.errors import CaptureError, StructureError
from treetap._core.wording import escaped, near_to, quoted, shown, typed
from treetap._io.files import refusing, require_path
from treetap._io.record_descriptions import Malformed, rebuilt
from treetap._io.store.arrays import StoredArray, opened_all, require_tensorstore
from treetap._io.store.contents import read_contents
from treetap._observe.records import Record

MIXED = 2**26  # bytes of rows that are mixed with each other


class Store:
    """The Records of many batches, which a `StoreWriter` appended; read lazily.

    What it has is what was appended when it was opened. `store["blocks/3:__call__"]` is
    a `StoredArray` of the rows of all batches, `store.batch(7)` a Record as it was; a
    store is a sequence of these.

    Args:
        path: The folder.

    Attributes:
        metadata: What was told of each batch.

    Examples:
        >>> import tempfile, jax.numpy as jnp, treetap as tt
        >>> _, record = tt.observe(lambda x: tt.tap(2 * x, "a"))(jnp.arange(6))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with tt.StoreWriter(f"{folder}/runs") as writer:
        ...         numbers = [writer.append(record) for _ in range(2)]
        ...     store = tt.Store(f"{folder}/runs")
        ...     store["a"][4:8].tolist(), store.batch(1)["a"].value.tolist()
        ([8, 10, 0, 2], [0, 2, 4, 6, 8, 10])
    """

    def __init__(self, path: str | os.PathLike[str]):
        name = "Store"
        self._folder = pathlib.Path(os.path.abspath(require_path(path, name)))
        require_tensorstore(name)
        contents = read_contents(self._folder, name)
        batches = contents.batches
        self.metadata: tuple[dict[str, Any], ...] = tuple(b.metadata for b in batches)
        self._sites = contents.sites
        self._starts = [[0] * len(contents.columns), *(b.ends for b in batches)]
        arrays = opened_all(contents, self._folder, name)
        self._arrays = [*map(StoredArray, contents.columns, arrays, contents.ends)]
        self._by_text = {array.text: array for array in self._arrays}

    @property
    def names(self) -> tuple[str, ...]:
        """What its arrays are called, in order of execution."""
        return tuple(array.text for array in self._arrays)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __contains__(self, text: object) -> bool:
        return text in self._by_text

    def __getitem__(self, text: str) -> StoredArray:
        """The rows of a site: `blocks/3:__call__`, `blocks/3:__call__@grad`."""
        found = self._by_text.get(text)
        if found is None:
            near = near_to(str(text), self.names, 5, 0.3) or self.names[:8]
            told = ", ".join(map(shown, near)) or "nothing yet"
            raise CaptureError(
                f"Store: there is no {quoted(str(text))}; near it are: {told}."
            )
        return found

    def batch(self, number: int) -> Record:
        """The Record of one batch; its arrays are numpy's."""
        count = len(self)
        if not -count <= number < count:
            raise IndexError(f"Store: there is no batch {number}; there are {count}.")
        number %= count
        starts, stops = self._starts[number : number + 2]
        # All are begun before the first is waited for.
        reads = [*map(StoredArray.begun_value, self._arrays, starts, stops)]
        leaves = [read() for read in reads]
        with refusing(f"Store: {self._folder} is broken", Malformed):
            return rebuilt(self._sites, leaves)

    def __iter__(self) -> Iterator[Record]:
        """The Records of all batches, in order."""
        return map(self.batch, range(len(self)))

    def shuffled(
        self,
        sites: str | Sequence[str],
        rows: int,
        *,
        seed: int = 0,
        epochs: int = 1,
        buffer: int | None = None,
        drop_last: bool = False,
    ) -> Iterator[Any]:
        """Rows in random order, each once in an epoch; the same for the same seed.

        Whole chunks are read, some at a time, in random order; the rows of these are
        mixed. While some are used the next are read.

        Args:
            sites: A site, for arrays of its rows; or several, for tuples of arrays with
                the same rows.
            rows: How many at a time.
            seed: What the order depends on.
            epochs: How often each row comes.
            buffer: How many chunks are mixed with each other; more is more random, and
                takes more memory. By default 16, or as many small ones as have 64 MB.
            drop_last: Leave out what is less than `rows` at the end of an epoch.
        """
        names = [sites] if isinstance(sites, str) else list(sites)
        arrays = [self[text] for text in names]
        counts = {array.text: len(array) for array in arrays}
        if not arrays or len(set(counts.values())) > 1:
            raise StructureError(
                f"Store.shuffled: these have not the same number of rows: {counts}."
            )
        if buffer is None:
            sizes = [math.prod(a.column.chunk) * a.dtype.itemsize for a in arrays]
            buffer = max(16, min(1024, MIXED // sum(sizes)))
        if min(rows, epochs, buffer) < 1:
            raise ValueError("Store.shuffled: rows, epochs and buffer are at least 1.")

        def batches() -> Iterator[Any]:
            for epoch in range(epochs):
                random = np.random.default_rng([seed, epoch])
                for found in _mixed(arrays, rows, random, buffer):
                    if len(found[0]) == rows or not drop_last:
                        yield found[0] if isinstance(sites, str) else found

        return batches()

    def __repr__(self) -> str:
        total = display.readable_bytes(sum(array.nbytes for array in self._arrays))
        lines = [f"  {escaped(array.text)}  {typed(array)}" for array in self._arrays]
        return "\n".join([f"Store: {len(self)} batches, {total}", *lines])


def _mixed(
    arrays: Sequence[StoredArray], rows: int, random: Any, buffer: int
) -> Iterator[tuple[np.ndarray, ...]]:
    """All rows once, mixed within groups of chunks."""
    size, total = max(array.column.chunk[0] for array in arrays), len(arrays[0])
    starts = random.permutation(np.arange(0, total, size))
    groups = [starts[n : n + buffer] for n in range(0, len(starts), buffer)]
    room = min(total, buffer * size + rows)
    # Two sets: one is used while the other is filled.
    pools = [[np.empty((room, *a.shape[1:]), a.dtype) for a in arrays] for _ in "ab"]

    def begun(number: int, end: int) -> tuple[int, list[Any]]:
        """Begins to read a group behind what is left of the one before."""
        waits = []
        for start in groups[number]:
            begin, end = end, end + min(size, total - start)
            for array, pool in zip(arrays, pools[number % 2]):
                waits.append(array.begun_into(pool[begin:end], start))
        return end, waits

    following = begun(0, 0) if groups else (0, [])
    for number in range(len(groups)):
        count, waits = following
        for wait in waits:
            wait()
        held, left = pools[number % 2], 0
        order = random.permutation(count)
        if number + 1 < len(groups):
            left = count % rows
            following = begun(number + 1, left)
        for at in range(0, count - left, rows):
            yield tuple(pool.take(order[at : at + rows], axis=0) for pool in held)
        for pool, after in zip(held, pools[1 - number % 2]):
            after[:left] = pool[order[count - left :]]
