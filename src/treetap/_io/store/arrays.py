# SPDX-License-Identifier: Apache-2.0
"""Arrays of a store: one zarr array for each leaf, growing along its first axis.

The rows of all batches lie one after the other. A chunk is what one shard of the first
batch held, so processes write their own and nothing is gathered; each chunk carries a
checksum, and one that is missing is an error, never zeros. Needs tensorstore.

A batch is written and read through a view of its rows that has the axes of the value in
the Record, so a shard's own index says where it belongs.
"""

import math
import pathlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from treetap._core.errors import WeightsError
from treetap._core.wording import quoted, shown
from treetap._io.files import needing, refusing
from treetap._io.record_descriptions import DTYPES, Leaf
from treetap._io.store.contents import Column, JournalContents, row_shape

LARGEST = 2**24  # bytes of a chunk; more is split along rows
JOINED = 2**20  # bytes of a chunk, if it may hold several batches
MOST = 256  # batches in a chunk
PACKINGS = frozenset({"bytes", "zstd", "crc32c"})  # in which chunks are written


def require_tensorstore(name: str) -> None:
    """Refuses to go on without the package that reads and writes the arrays."""
    with needing("tensorstore", "store", name):
        import tensorstore  # noqa: F401 - imported where it is used


def column_for(leaf: Leaf, axis: int | None, is_joined: bool) -> Column:
    """The column that a first value needs; a chunk of it is one shard of the value.

    If batches are written together, it is as many of them as are worth a file.
    """
    value = leaf.value
    shape = part = np.shape(value)
    if isinstance(value, jax.Array):
        part = value.sharding.shard_shape(shape)
    rows = 1 if axis is None else part[axis]
    chunk = [max(1, length) for length in (rows, *row_shape(part, axis))]
    size = math.prod(chunk) * value.dtype.itemsize
    if is_joined and part == shape:
        chunk[0] *= max(1, min(JOINED // max(size, 1), MOST))
    while size > LARGEST and chunk[0] % 2 == 0:
        chunk[0], size = chunk[0] // 2, size // 2
    return Column(
        leaf.text, axis, row_shape(shape, axis), value.dtype.name, tuple(chunk)
    )


def _spec(column: Column, folder: pathlib.Path, **more: Any) -> dict[str, Any]:
    """The spec by which tensorstore creates an array, or opens one that fits it."""
    grid = {"name": "regular", "configuration": {"chunk_shape": [*column.chunk]}}
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{folder}/"},
        "store_data_equal_to_fill_value": True,  # chunks of zeros are written
        "fill_missing_data_reads": False,  # a missing chunk is an error
        "metadata": {"data_type": column.stored.name, "chunk_grid": grid, **more},
    }


def created(column: Column, folder: pathlib.Path, compression: int) -> Any:
    """A future of an empty array; it replaces one that a killed program left."""
    import tensorstore as ts

    squeezed = [{"name": "zstd", "configuration": {"level": compression}}]
    codecs = [
        {"name": "bytes", "configuration": {"endian": "little"}},
        *(squeezed if compression else []),
        {"name": "crc32c"},
    ]
    spec = _spec(column, folder, shape=[0, *column.shape], codecs=codecs)
    return ts.open(spec, create=True, delete_existing=True)


def opened_all(contents: JournalContents, store: pathlib.Path, name: str) -> list[Any]:
    """Opens the arrays of a store, and compares each with what the journal says."""
    columns = enumerate(zip(contents.columns, contents.ends))
    return [_opened(c, c.folder(store, n), rows, name) for n, (c, rows) in columns]


def _opened(column: Column, folder: pathlib.Path, rows: int, name: str) -> Any:
    import tensorstore as ts

    if any(place.is_symlink() for place in (folder.parent, folder, folder / "c")):
        raise WeightsError(f"{name}: {folder} is a link that leads elsewhere.")
    _refuse_size(column, column.chunk, f"{name}: a chunk")
    where = f"{name}: the array of {shown(column.text)}"
    what = f"{where} is broken, missing, or of another store"
    with refusing(what, ValueError, OSError):
        held: Any = ts.open(_spec(column, folder), open=True).result()
    codecs = {codec["name"] for codec in held.codec.to_json()["codecs"]}
    if tuple(held.shape[1:]) != column.shape or codecs - PACKINGS:
        raise WeightsError(
            f"{where} has the shape {held.shape!r}, packed by "
            f"{sorted(codecs)!r:.200}, and the journal says rows of "
            f"{column.shape!r:.200}. It is of another store."
        )
    if held.shape[0] < rows:
        raise WeightsError(
            f"{name}: {shown(column.text)} has {held.shape[0]} rows, and {rows} were "
            f"appended: {folder.parents[1]} was changed by something else."
        )
    return held


def _refuse_size(column: Column, shape: tuple[int, ...], what: str) -> None:
    """Refuses what memory cannot hold; tensorstore would end the program."""
    size = math.prod(shape) * column.stored.itemsize
    try:
        np.empty(size, np.uint8)  # takes no memory as long as nothing is written
    except (MemoryError, ValueError, OverflowError) as error:
        raise MemoryError(
            f"{what} of {shown(column.text)} has {size:,} bytes, more than there is "
            "memory for. Read fewer rows."
        ) from error


def resized(held: Any, rows: int) -> Any:
    """A future of the array with another number of rows."""
    return held.resize(exclusive_max=[rows, *held.shape[1:]], resize_metadata_only=True)


def view(held: Any, axis: int | None, start: int, stop: int) -> Any:
    """Some rows, with the axes of a value in a Record."""
    if axis is None:
        return held[start]
    order = [*range(1, held.ndim)]
    order.insert(axis, 0)
    return held[start:stop].translate_to[0].transpose(order)


def written(
    held: Any, column: Column, values: Sequence[Any], start: int
) -> Iterator[Any]:
    """Writes the values of batches, each shard by itself; gives futures.

    Where a chunk holds several of them they are brought together first.
    """
    if len(values) > 1 and column.rows_of(values[0]) < column.chunk[0]:
        data = np.concatenate([_rows_first(value, column.axis) for value in values])
        yield _write(held[start : start + len(data)], column, data)
        return
    for value in values:
        stop = start + column.rows_of(value)
        rows = view(held, column.axis, start, stop)
        start = stop
        if isinstance(value, jax.Array):
            for shard in value.addressable_shards:
                if shard.replica_id == 0:
                    yield _write(rows[shard.index], column, shard.data)
        elif jax.process_index() == 0:
            yield _write(rows, column, value)


def _rows_first(value: Any, axis: int | None) -> np.ndarray:
    data = np.asarray(value)
    return data[None] if axis is None else np.moveaxis(data, axis, 0)


def _write(rows: Any, column: Column, data: Any) -> Any:
    # Nothing changes the data before they are written, so they need no copy.
    data = np.require(data, requirements="C").view(column.stored)
    return rows.write(data, can_reference_source_data_indefinitely=True)


class StoredArray:
    """The rows of one leaf of a store, read when they are asked for.

    An index is as numpy's: a number, a slice, or an array of numbers for the first
    axis, numbers and slices for the others.

    Attributes:
        text: What the leaf is called.
        shape: Rows of all batches first.
        dtype: The type of numbers.
    """

    __slots__ = ("_held", "column", "dtype", "shape", "text")

    def __init__(self, column: Column, held: Any, rows: int):
        self._held = held
        self.column = column
        self.text = column.text
        self.shape = (rows, *column.shape)
        self.dtype = DTYPES[column.dtype]

    @property
    def ndim(self) -> int:
        """How many axes there are, with that of the rows."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """How much memory all rows would take."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"StoredArray({quoted(self.text)}, {self.dtype}{list(self.shape)})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("StoredArray: its values are in files, and are copied.")
        return np.asarray(self[:], dtype)

    def __getitem__(self, index: Any) -> np.ndarray:
        """Reads rows."""
        return self.begun(index)()

    def begun(self, index: Any) -> Callable[[], np.ndarray]:
        """Begins to read; what it returns waits for the rows, and gives them."""
        items = (list(index) or [...]) if isinstance(index, tuple) else [index]
        dots = [place for place, item in enumerate(items) if item is Ellipsis]
        if len(dots) > 1 or len(items) - len(dots) > self.ndim:
            raise IndexError(f"StoredArray: {index!r} has too many axes for {self}.")
        for place in dots:
            items[place : place + 1] = [slice(None)] * (self.ndim - len(items) + 1)
        places = [self._place(axis, item) for axis, item in enumerate(items)]
        return self._reading(self._held[tuple(places)], f"{index!r:.60}")

    def begun_into(self, out: np.ndarray, start: int) -> Callable[[], Any]:
        """Begins to read rows into an array; what it returns waits for them."""
        import tensorstore as ts

        rows = self._held[start : start + len(out)].translate_to[0]
        target = ts.array(out.view(self.column.stored), copy=False, write=True)
        return partial(self._waited, target.write(rows))

    def begun_value(self, start: int, stop: int) -> Callable[[], np.ndarray]:
        """Begins to read the value of a batch, with the axes that it had."""
        rows = view(self._held, self.column.axis, start, stop)
        return self._reading(rows, f"{start}:{stop}")

    def _reading(self, rows: Any, index: str) -> Callable[[], np.ndarray]:
        _refuse_size(self.column, rows.shape, f"StoredArray: [{index}]")
        return partial(self._finished, rows.read())

    def _finished(self, future: Any) -> np.ndarray:
        return np.require(self._waited(future), requirements="C").view(self.dtype)

    def _waited(self, future: Any) -> Any:
        what = f"Store: rows of {shown(self.text)} are broken or missing"
        with refusing(what, ValueError, OSError):
            return future.result()

    def _place(self, axis: int, item: Any) -> Any:
        """One item of an index, counted from the start, as tensorstore wants it."""
        length = self.shape[axis]
        if isinstance(item, slice):
            places = range(length)[item]
            if places.step == 1:
                return slice(places.start, max(places.start, places.stop))
            if axis:
                raise IndexError(f"StoredArray: {self} is read in steps by rows only.")
            return np.arange(places.start, places.stop, places.step)
        found = np.asarray(item)
        if found.dtype == np.bool_ and found.shape == (length,) and axis == 0:
            found = np.flatnonzero(found)
        is_index = found.dtype.kind in "iu" or found.size == 0
        is_index = is_index and found.ndim <= (axis == 0)
        if not (is_index and np.all((-length <= found) & (found < length))):
            raise IndexError(
                f"StoredArray: {item!r:.60} is no index of axis {axis} of {self}, or "
                "is outside of it."
            )
        found = found.astype(np.int64) % length
        return int(found) if found.ndim == 0 else found
