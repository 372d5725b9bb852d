# SPDX-License-Identifier: Apache-2.0
"""A backlog: batches handed over to one thread, which writes them in their order.

The thread takes all that wait at once, so the more there are, the fewer and larger its
writes. How many bytes may wait is bounded: who hands over more waits until there is
room. When writing fails, nothing that waits is written, as its number would be wrong,
and the error is raised by the next call. What a program that ends has handed over is
still written: Python waits for the thread.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

NOTE = (
    "StoreWriter: batches from {} on were not kept. Append them again. What is "
    "appended must not be donated or deleted before `flush` or `close`."
)


class Backlog:
    """Batches on their way to the disk.

    Args:
        write: Writes several batches; called in the thread.
        done: How many are written already.
        limit: How many bytes may wait and be written at a time.
    """

    _problem: BaseException | None = None

    def __init__(self, write: Callable[[list[Any]], None], done: int, limit: int):
        self._write, self._done, self._limit = write, done, limit
        self._changed = threading.Condition()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="StoreWriter")
        self._held: list[tuple[Any, int]] = []  # each with its bytes
        self._bytes = 0

    def __len__(self) -> int:
        """How many are written or are going to be."""
        with self._changed:
            return self._done + len(self._held)

    def put(self, batch: Any, size: int) -> int:
        """Hands a batch of so many bytes over; gives its number."""
        room = self._limit - size
        with self._changed:
            self._changed.wait_for(lambda: not self._held or self._bytes <= room)
            self._raise()
            if not self._held:
                self._thread.submit(self._work)
            self._bytes += size
            self._held.append((batch, size))
            return self._done + len(self._held) - 1

    def flush(self) -> None:
        """Waits until all is written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held)
            self._raise()

    def _work(self) -> None:
        """Writes until nothing waits."""
        while True:
            with self._changed:
                batches = [batch for batch, _ in self._held]
            if not batches:
                return
            problem = None
            try:
                self._write(batches)
            except BaseException as error:
                problem = error
                problem.add_note(NOTE.format(self._done))
            with self._changed:
                self._problem = problem
                self._done += 0 if problem else len(batches)
                del self._held[: None if problem else len(batches)]
                self._bytes = sum(size for _, size in self._held)
                self._changed.notify_all()

    def _raise(self) -> None:
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    __del__ = _raise  # of a writer that was forgotten, Python still prints the error
