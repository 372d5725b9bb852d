# SPDX-License-Identifier: Apache-2.0
"""Journals: append-only files of lines, of which every one that was written counts.

A line is a checksum and JSON. It is on the disk when `Journal.write` returns; a program
killed before that leaves at most a torn last line, which readers pass over and the next
writer cuts off. A bad line before the end is no accident of writing, and is refused.
One process at a time holds a journal for writing.
"""

import contextlib
import itertools
import json
import os
import pathlib
import re
import sys
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from treetap._core.errors import WeightsError

if sys.platform != "win32":
    import fcntl
else:  # no locks: a second writer is not noticed
    fcntl = None

FORMAT = "treetap store"
VERSION = 1
AGAIN = (
    "All batches before are there: if the disk is full, make room, and append again "
    "from batch `len(writer)` on."
)
_START = f'{{"format":"{FORMAT}"'.encode()  # how the JSON of the first line starts
_TORN = re.compile(rb"[0-9a-f]{0,8}|[0-9a-f]{8} [^\n]*")


class Line(NamedTuple):
    """A good line of a journal: its JSON, and the byte after it."""

    entry: Any
    end: int


def _line(entry: Any) -> bytes:
    text = json.dumps(entry, separators=(",", ":"), allow_nan=False).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _parsed(line: bytes) -> Any:
    """What a line says; None if it is torn or broken."""
    start, _, text = line.partition(b" ")
    try:
        return json.loads(text) if int(start, 16) == zlib.crc32(text) else None
    except (ValueError, RecursionError):
        return None


def read_journal(file: pathlib.Path, name: str) -> list[Line]:
    """The good lines of a journal.

    Args:
        file: The journal.
        name: The public function at work, for messages.
    """
    data = file.read_bytes()
    lines: list[Line] = []
    end = 0
    while (stop := data.find(b"\n", end) + 1) > 0:
        entry = _parsed(data[end : stop - 1])
        if entry is None:
            break
        lines.append(Line(entry, stop))
        end = stop
    rest = data[end:]
    if lines:
        _refuse_other(lines[0].entry, file, name)
    elif not (_TORN.fullmatch(rest) and _START.startswith(rest[9 : 9 + len(_START)])):
        raise WeightsError(f"{name}: {file} is not the journal of a store.")
    if b"\n" in rest[:-1]:
        raise WeightsError(
            f"{name}: {file} is broken at line {len(lines) + 1}: its checksum is "
            "wrong, and more lines follow. It was changed by something else."
        )
    return lines


def _refuse_other(first: Any, file: pathlib.Path, name: str) -> None:
    """Refuses a journal whose header is not one of this format and version."""
    if not isinstance(first, dict) or first.get("format") != FORMAT:
        raise WeightsError(f"{name}: {file} is not the journal of a store.")
    processes = first.get("processes")
    if first.get("version") != VERSION or type(processes) is not int or processes < 1:
        raise WeightsError(
            f"{name}: {file} is of another version, {first.get('version')!r:.20}; this "
            f"library reads version {VERSION}."
        )


class Journal:
    """A journal held for writing.

    Args:
        file: The journal; made if there is none.
        processes: How many processes write to the store, each a journal of its own.
        name: The public function at work, for messages.
    """

    def __init__(self, file: pathlib.Path, processes: int, name: str):
        self._file, self._handle = file, -1
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        try:
            self._handle = os.open(file, flags, 0o644)
        except OSError as error:
            raise type(error)(
                error.errno, f"{name}: {file} cannot be opened for writing"
            ) from error
        try:
            self._hold(name)
            self._lines = read_journal(file, name)
            self.cut(len(self._lines))
            if not self._lines:
                header = {"format": FORMAT, "version": VERSION, "processes": processes}
                self.write([header])
            found = self._lines[0].entry["processes"]
            if found != processes:
                raise WeightsError(
                    f"{name}: {file.parent} was written by {found} processes, and "
                    f"these are {processes}. Append with as many."
                )
        except BaseException:
            self.close()
            raise

    def _hold(self, name: str) -> None:
        """Keeps other writers out, until this one lets go or its process ends."""
        if fcntl is None:
            return
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BlockingIOError(
                f"{name}: another writer has {self._file.parent} open. Close it first."
            ) from None

    def entries_after(self, count: int) -> list[Any]:
        """What its lines say, but for the first so many."""
        return [line.entry for line in self._lines[count:]]

    @property
    def _end(self) -> int:
        return self._lines[-1].end if self._lines else 0

    def cut(self, count: int) -> None:
        """Leaves the first so many lines, and nothing torn after them."""
        self._lines = self._lines[:count]
        if os.fstat(self._handle).st_size != self._end:
            os.ftruncate(self._handle, self._end)
            os.fsync(self._handle)

    def write(self, entries: Sequence[Any]) -> None:
        """Appends lines; they are on the disk when this returns, or do not count."""
        data = [*map(_line, entries)]
        try:
            self.cut(len(self._lines))  # a write that failed may have left a part
            os.lseek(self._handle, self._end, os.SEEK_SET)
            rest = memoryview(b"".join(data))
            while rest:
                rest = rest[os.write(self._handle, rest) :]
            os.fsync(self._handle)
        except OSError as error:
            with contextlib.suppress(OSError):  # readers see whole lines of it
                self.cut(len(self._lines))
            raise type(error)(
                error.errno,
                f"StoreWriter: {self._file} could not be written: {error.strerror}. "
                f"{AGAIN}",
            ) from error
        ends = itertools.accumulate(map(len, data), initial=self._end)
        lines = [*map(Line, entries, itertools.islice(ends, 1, None))]
        # At once: an interrupt before it leaves lines that the next write cuts off, and
        # one after it batches that `entries_after` tells of.
        self._lines.extend(lines)

    @property
    def is_open(self) -> bool:
        """Whether it can be written to."""
        return self._handle >= 0

    def close(self, *, let_go: Callable[[int], None] = os.close) -> None:
        """Lets go of the journal, even when the program ends and `os` is gone."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            let_go(handle)

    __del__ = close  # a writer that was forgotten must not keep others out
