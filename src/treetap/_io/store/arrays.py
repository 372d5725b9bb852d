# SPDX-License-Identifier: Apache-2.0
"""Arrays of a store: one zarr array for each leaf, growing along its first axis.

The rows of all batches lie one after the other. A chunk is what one shard of the first
batch held, so processes write their own and nothing is gathered; each chunk carries a
checksum, and one that is missing is an error, never zeros. Needs tensorstore.
"""

import math
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np

from treetap._core.errors import WeightsError
from treetap._core.wording import quoted, shown, words_of
from treetap._io.record_descriptions import DTYPES

LARGEST = 2**26  # bytes of a chunk; more is split along rows
PACKINGS = frozenset({"bytes", "zstd", "crc32c"})  # in which chunks are written
_NATIVE = frozenset(
    {
        *("bool", "int8", "int16", "int32", "int64"),
        *("uint8", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    }
)


def tensorstore_for(name: str) -> ModuleType:
    """The package that reads and writes the arrays."""
    try:
        import tensorstore
    except ImportError as error:
        raise ImportError(
            f"{name} needs tensorstore, which is not installed: "
            "`pip install treetap[store]`."
        ) from error
    return tensorstore


class Column(NamedTuple):
    """One leaf of all batches: what it is called, and what a row of it is.

    Attributes:
        text: The leaf's name.
        axis: The axis along which batches are joined, or None for a new one; it comes
            first in the store.
        shape: Of one row.
        dtype: The name of the type of numbers.
        chunk: The shape of a chunk.
    """

    text: str
    axis: int | None
    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]

    @property
    def stored(self) -> np.dtype[Any]:
        """The type in the file: of the same bits, where zarr has not the same."""
        return DTYPES[self.dtype if self.dtype in _NATIVE else "uint8"]

    def rows_of(self, value: Any) -> int:
        """How many rows the value of a batch has."""
        return 1 if self.axis is None else np.shape(value)[self.axis]

    def row_shape(self, value: Any) -> tuple[int, ...]:
        """The shape of a row of a value."""
        shape = np.shape(value)
        if self.axis is None:
            return shape
        return (*shape[: self.axis], *shape[self.axis + 1 :])

    def folder(self, store: pathlib.Path, number: int) -> pathlib.Path:
        """Where the array lies; whatever the name is, inside the store's folder."""
        plain = re.sub(r"[^A-Za-z0-9]+", "_", self.text).strip("_")[:60]
        return store / "data" / f"{number:04d}-{plain}"


def column_for(text: str, value: Any, axis: int | None, compared: str) -> Column:
    """The column that a first value needs."""
    shape = np.shape(value)
    part = shape
    if isinstance(value, jax.Array):
        part = value.sharding.shard_shape(shape)
    rows = 1 if axis is None else part[axis]
    rest = part if axis is None else (*part[:axis], *part[axis + 1 :])
    chunk = [max(1, rows), *(max(1, length) for length in rest)]
    size = int(np.prod(chunk)) * DTYPES[compared].itemsize
    while size > LARGEST and chunk[0] % 2 == 0:
        chunk[0], size = chunk[0] // 2, size // 2
    bare = Column(text, axis, (), compared, tuple(chunk))
    return bare._replace(shape=bare.row_shape(value))


def _spec(folder: pathlib.Path) -> dict[str, Any]:
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{folder}/"},
        "store_data_equal_to_fill_value": True,  # zeros are data
        "fill_missing_data_reads": False,  # and what is lost is not zeros
    }


def created(
    ts: ModuleType, column: Column, folder: pathlib.Path, compression: int
) -> Any:
    """An empty array; what a killed program left there goes. A future of it."""
    squeezed = [{"name": "zstd", "configuration": {"level": compression}}]
    metadata = {
        "shape": [0, *column.shape],
        "data_type": column.stored.name,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": list(column.chunk)},
        },
        "codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}},
            *(squeezed if compression else []),
            {"name": "crc32c"},
        ],
    }
    spec = {**_spec(folder), "metadata": metadata}
    return ts.open(spec, create=True, delete_existing=True)


def opened(ts: ModuleType, column: Column, folder: pathlib.Path, name: str) -> Any:
    """An array that is there, and is what the column says."""
    if any(place.is_symlink() for place in (folder.parent, folder, folder / "c")):
        raise WeightsError(f"{name}: {folder} is a link that leads elsewhere.")
    try:
        array = ts.open(_spec(folder), open=True).result()
    except (ValueError, OSError) as error:
        raise WeightsError(
            f"{name}: the array of {shown(column.text)} is broken or missing: "
            f"{words_of(error)}"
        ) from error
    found = array.dtype.numpy_dtype, tuple(array.shape[1:]), *_packing(array)
    wanted = column.stored, column.shape, column.chunk
    if found[:3] != wanted or found[3] - PACKINGS:
        raise WeightsError(
            f"{name}: the array of {shown(column.text)} is {found!r:.200}, and the "
            f"journal says {wanted!r:.200}. It belongs to another store."
        )
    what = f"{name}: a chunk of {shown(column.text)}"
    _refuse_size(column.chunk, column, lambda: what)
    return array


def _packing(array: Any) -> tuple[tuple[int, ...], frozenset[str]]:
    """The shape of a chunk, and how chunks are written."""
    about = array.spec().to_json()["metadata"]
    grid = about["chunk_grid"]["configuration"]["chunk_shape"]
    return tuple(grid), frozenset(codec["name"] for codec in about["codecs"])


def _refuse_size(shape: Sequence[int], column: Column, what: Callable[[], str]) -> None:
    """Refuses what memory cannot hold; for tensorstore that is the program's end."""
    size = math.prod(shape) * column.stored.itemsize
    try:
        np.empty(size, np.uint8)  # takes no memory as long as nothing is written
    except (MemoryError, ValueError, OverflowError) as error:
        raise MemoryError(
            f"{what()} has {size:,} bytes, more than there is memory for. Read fewer "
            "rows."
        ) from error


def written(array: Any, column: Column, value: Any, start: int) -> Iterator[Any]:
    """Writes the rows of a value, each shard by itself; gives futures."""
    if isinstance(value, jax.Array):
        for shard in value.addressable_shards:
            if shard.replica_id == 0:
                yield _write(array, column, shard.data, shard.index, start)
    elif jax.process_index() == 0:
        yield _write(array, column, value, (slice(None),) * np.ndim(value), start)


def _write(
    array: Any, column: Column, data: Any, index: Sequence[slice], start: int
) -> Any:
    data = np.asarray(data)
    if data.dtype != column.stored:
        data = data.view(column.stored)
    place = list(index)
    if column.axis is None:
        data, rows = data[None], slice(0, 1)
    else:
        data, rows = np.moveaxis(data, column.axis, 0), place.pop(column.axis)
    first = start + (rows.start or 0)
    target: list[Any] = [slice(first, first + data.shape[0])]
    for cut, length in zip(place, data.shape[1:]):
        target.append(slice(cut.start or 0, (cut.start or 0) + length))
    return array[tuple(target)].write(np.require(data, requirements="C"))


class StoredArray:
    """The rows of one leaf of a store, read when they are asked for.

    An index is as numpy's: a number, a slice, or an array of numbers for the first
    axis, numbers and slices for the others.

    Attributes:
        text: What the leaf is called.
        shape: Rows of all batches first.
        dtype: The type of numbers.
    """

    __slots__ = ("_array", "_rows", "column", "dtype", "shape", "text")

    def __init__(self, array: Any, column: Column, rows: int):
        self._array, self._rows = array, rows
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
        return int(np.prod(self.shape, dtype=object)) * self.dtype.itemsize

    def __len__(self) -> int:
        return self._rows

    def __repr__(self) -> str:
        return f"StoredArray({quoted(self.text)}, {self.dtype}{list(self.shape)})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("StoredArray: its values are in files, and are copied.")
        return np.asarray(self[:], dtype)

    def __getitem__(self, index: Any) -> np.ndarray:
        """Reads rows."""
        return self.finished(self.begun(index))

    def begun(self, index: Any) -> Any:
        """Begins to read; `finished` waits for it."""
        items = index if isinstance(index, tuple) else (index,)
        if sum(item is Ellipsis for item in items) > 1 or len(items) > self.ndim + 1:
            raise IndexError(f"StoredArray: {index!r} has too many axes for {self}.")
        if any(item is Ellipsis for item in items):
            at = next(n for n, item in enumerate(items) if item is Ellipsis)
            rest = (slice(None),) * (self.ndim - len(items) + 1)
            items = (*items[:at], *rest, *items[at + 1 :])
        if len(items) > self.ndim:
            raise IndexError(f"StoredArray: {index!r} has too many axes for {self}.")
        places = [
            _place(item, length, axis, self)
            for axis, (item, length) in enumerate(zip(items, self.shape))
        ]
        lengths = [_length(place) for place in places] + [*self.shape[len(places) :]]
        what = lambda: f"StoredArray: {index!r:.60} of {self}"  # noqa: E731 - for later
        _refuse_size(lengths, self.column, what)
        return self._array[tuple(places)].read()

    def finished(self, future: Any) -> np.ndarray:
        """What was begun."""
        try:
            data = future.result()
        except (ValueError, OSError) as error:
            raise WeightsError(
                f"Store: rows of {shown(self.text)} are broken or missing: "
                f"{words_of(error)}"
            ) from error
        return np.require(data, requirements="C").view(self.dtype)


def _length(place: Any) -> int:
    """How many a place is of."""
    return place.stop - place.start if isinstance(place, slice) else np.size(place)


def _place(item: Any, length: int, axis: int, whole: StoredArray) -> Any:
    """One item of an index, counted from the start, as tensorstore wants it."""
    if isinstance(item, slice):
        start, stop, step = item.indices(length)
        if step == 1:
            return slice(start, max(start, stop))
        item = np.arange(start, stop, step)
        if axis:
            raise IndexError(
                f"StoredArray: {whole} is read in steps along its rows only."
            )
    found = np.asarray(item)
    if found.dtype == np.bool_ and found.shape == (length,) and axis == 0:
        found = np.flatnonzero(found)
    is_number = found.dtype.kind in "iu" or found.size == 0
    if not is_number or found.ndim > (axis == 0):
        raise IndexError(
            f"StoredArray: {item!r:.60} is no index of axis {axis} of {whole}."
        )
    found = found.astype(np.int64)
    if found.size and not (-length <= found.min() and found.max() < length):
        raise IndexError(
            f"StoredArray: {item!r:.60} is outside of axis {axis} of {whole}."
        )
    found = np.where(found < 0, found + length, found)
    return int(found) if found.ndim == 0 else found
