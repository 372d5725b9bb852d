# SPDX-License-Identifier: Apache-2.0
"""Contents: what the journals of a store say of its sites, columns and batches.

The first line of a journal is its header, the second tells the sites, and each further
one a batch. With several processes each has a journal, and what all have counts. A
journal may come from anybody, so what it says of numbers is checked here.
"""

import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from treetap._core.errors import WeightsError
from treetap._io.record_descriptions import DTYPES, Malformed, checked_site, wanted
from treetap._io.safetensors_file import MOST_AXES
from treetap._io.store.journals import read_journal


class Column(NamedTuple):
    """One leaf of all batches: its name, and the shape and type of its rows.

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
        dtype = DTYPES[self.dtype]
        is_numpys = dtype.isbuiltin == 1
        return dtype if is_numpys or self.dtype == "bfloat16" else DTYPES["uint8"]

    def rows_of(self, value: Any) -> int:
        """How many rows the value of a batch has."""
        return 1 if self.axis is None else np.shape(value)[self.axis]

    def folder(self, store: pathlib.Path, number: int) -> pathlib.Path:
        """Where the array lies; whatever the name is, inside the store's folder."""
        plain = re.sub(r"[^A-Za-z0-9]+", "_", self.text).strip("_")[:60]
        return store / "data" / f"{number:04d}-{plain}"


def row_shape(shape: tuple[int, ...], axis: int | None) -> tuple[int, ...]:
    """The shape of a row: without the axis that counts rows, if there is one."""
    return shape if axis is None else (*shape[:axis], *shape[axis + 1 :])


class Batch(NamedTuple):
    """What a line of a journal says of a batch.

    Attributes:
        ends: How many there are with it and all before it, by column.
        metadata: What else was told.
    """

    ends: list[int]
    metadata: dict[str, Any]


class JournalContents:
    """What the journals of a store say.

    Args:
        where: Public name and file, for messages.

    Attributes:
        sites: The description of a Record.
        columns: One for each leaf of a Record; none before the sites are told.
        batches: In the order in which they were appended.
    """

    def __init__(self, where: str):
        self._where = where
        self.sites: list[dict[str, Any]] = []
        self.columns: list[Column] = []
        self.batches: list[Batch] = []

    @property
    def lines(self) -> int:
        """How many lines of a journal it has taken, with the header."""
        return 1 + bool(self.columns) + len(self.batches)

    @property
    def ends(self) -> list[int]:
        """How many rows there are, by column."""
        return self.batches[-1].ends if self.batches else [0] * len(self.columns)

    def take(self, entries: Sequence[Any]) -> None:
        """Takes lines of a journal: those after the ones it has."""
        try:
            for entry in entries:
                if self.columns:
                    self.batches.append(self._batch(entry))
                    continue
                sites = wanted(entry["sites"], list, "the list of sites")
                self.sites = [checked_site(about) for about in sites]
                # Last, should an interrupt come in between.
                self.columns = [_column(about) for about in entry["columns"]]
        except (AttributeError, KeyError, Malformed, TypeError, ValueError) as error:
            raise WeightsError(f"{self._where} is broken: {error!r:.200}.") from error

    def _batch(self, entry: Any) -> Batch:
        rows = entry["rows"]
        if len(rows) != len(self.columns) or not all(map(_is_size, rows)):
            raise Malformed(f"line {self.lines + 1} does not tell all numbers of rows")
        if any(column.axis is None and n != 1 for column, n in zip(self.columns, rows)):
            raise Malformed(f"line {self.lines + 1} has other rows than one of a value")
        ends = [end + count for end, count in zip(self.ends, rows)]
        return Batch(ends, dict(entry["metadata"]))


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**60


def _column(about: Any) -> Column:
    shape, chunk, dtype = about["shape"], about["chunk"], about["dtype"]
    text, axis = about["text"], about["axis"]
    good = isinstance(text, str) and dtype in DTYPES
    good &= all(map(_is_size, (*shape, *chunk)))
    good &= len(chunk) == len(shape) + 1 <= MOST_AXES and min(chunk) > 0
    good &= axis is None or (_is_size(axis) and axis <= len(shape))
    if not good:
        raise Malformed(f"a column is {about!r:.80}")
    return Column(text, axis, tuple(shape), dtype, tuple(chunk))


def journal_file(folder: pathlib.Path, process: int) -> pathlib.Path:
    """The journal of one of the processes that write."""
    return folder / f"journal-{process}.jsonl"


def read_contents(folder: pathlib.Path, name: str) -> JournalContents:
    """What all journals of a store agree on."""
    first = journal_file(folder, 0)
    if not folder.exists():
        raise FileNotFoundError(f"{name}: there is no store {folder}.")
    if not folder.is_dir() or not first.is_file():
        held = sorted(os.listdir(folder))[:5] if folder.is_dir() else "a file"
        raise WeightsError(
            f"{name}: {folder} is no store: it has no {first.name}; it is {held}."
        )
    entries = [line.entry for line in read_journal(first, name)]
    processes = entries[0]["processes"] if entries else 1
    count = len(entries)
    for process in range(1, processes):
        file = journal_file(folder, process)
        count = min(count, len(read_journal(file, name)) if file.is_file() else 0)
        if count == 0:  # there may be said to be any number of others
            break
    contents = JournalContents(f"{name}: {first}")
    contents.take(entries[1:count])
    return contents
