# SPDX-License-Identifier: Apache-2.0
"""Contents: what the journals of a store say of its sites, columns and batches.

The first line of a journal is its header, the second tells the sites, and each further
one a batch. With several processes each has a journal, and what all have counts.
"""

import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from treetap._core.errors import WeightsError
from treetap._io.record_descriptions import DTYPES, Strange
from treetap._io.safetensors_file import MOST_AXES
from treetap._io.store.arrays import Column
from treetap._io.store.journals import read_journal


def journal_file(folder: pathlib.Path, process: int) -> pathlib.Path:
    return folder / f"journal-{process}.jsonl"


class Batch(NamedTuple):
    """What a line of a journal says of a batch.

    Attributes:
        rows: How many it has, by column.
        ends: How many there are with it and all before it, by column.
        metadata: What else was told.
    """

    rows: list[int]
    ends: list[int]
    metadata: dict[str, Any]


class Contents:
    """What the journals of a store say: sites, columns, batches.

    Args:
        where: Public name and file, for messages.
    """

    def __init__(self, where: str):
        self._where = where
        self.begun: tuple[Any, list[Column]] | None = None
        self.batches: list[Batch] = []

    @property
    def sites(self) -> Any:
        """The description of a Record."""
        return [] if self.begun is None else self.begun[0]

    @property
    def columns(self) -> list[Column]:
        """One for each leaf of a Record."""
        return [] if self.begun is None else self.begun[1]

    @property
    def lines(self) -> int:
        """How many lines of a journal it has taken, with the header."""
        return 1 + (self.begun is not None) + len(self.batches)

    @property
    def ends(self) -> list[int]:
        """How many rows there are, by column."""
        return self.batches[-1].ends if self.batches else [0] * len(self.columns)

    def take(self, entries: Sequence[Any]) -> None:
        """Takes lines of a journal: those after the ones it has."""
        try:
            for entry in entries:
                self._take(entry)
        except (KeyError, TypeError, AttributeError, ValueError, Strange) as error:
            raise WeightsError(f"{self._where} is broken: {error!r:.200}.") from error

    def _take(self, entry: Any) -> None:
        if self.begun is None:
            columns = [_column(about) for about in entry["columns"]]
            self.begun = (entry["sites"], columns)
            return
        rows = entry["rows"]
        if len(rows) != len(self.columns) or any(
            type(n) is not int or not 0 <= n < 2**60 for n in rows
        ):
            raise Strange(f"line {self.lines + 1} does not tell the rows of each site")
        if any(column.axis is None and n != 1 for column, n in zip(self.columns, rows)):
            raise Strange(f"line {self.lines + 1} has other rows than one of a value")
        ends = [end + count for end, count in zip(self.ends, rows)]
        self.batches.append(Batch(rows, ends, dict(entry["metadata"])))


def _column(about: Any) -> Column:
    shape, chunk, dtype = about["shape"], about["chunk"], about["dtype"]
    text, axis = about["text"], about["axis"]
    good = isinstance(text, str) and dtype in DTYPES
    good &= all(type(n) is int and 0 <= n < 2**60 for n in (*shape, *chunk))
    good &= len(chunk) == len(shape) + 1 <= MOST_AXES and min(chunk) > 0
    good &= axis is None or (type(axis) is int and 0 <= axis <= len(shape))
    if not good:
        raise Strange(f"a column is {about!r:.80}")
    return Column(text, axis, tuple(shape), dtype, tuple(chunk))


def read_contents(folder: pathlib.Path, name: str) -> Contents:
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
    contents = Contents(f"{name}: {first}")
    contents.take(entries[1:count])
    return contents
