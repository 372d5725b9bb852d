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
        self._waiting: list[Any] = []
        self._writing: list[Any] = []
        self._waiting_bytes = self._writing_bytes = 0

    def __len__(self) -> int:
        """How many are written or are going to be."""
        with self._changed:
            return self._done + len(self._writing) + len(self._waiting)

    @property
    def _is_idle(self) -> bool:
        return not self._waiting and not self._writing

    def put(self, batch: Any, size: int) -> int:
        """Hands a batch of so many bytes over; gives its number."""
        with self._changed:
            self._changed.wait_for(lambda: self._problem or self._has_room(size))
            self._raise()
            if self._is_idle:
                self._thread.submit(self._work)
            self._waiting_bytes += size
            self._waiting.append(batch)
            return self._done + len(self._writing) + len(self._waiting) - 1

    def _has_room(self, size: int) -> bool:
        held = self._waiting_bytes + self._writing_bytes
        return self._is_idle or held + size <= self._limit

    def flush(self) -> None:
        """Waits until all is written."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_idle)
            self._raise()

    def _work(self) -> None:
        """Writes until nothing waits."""
        while True:
            with self._changed:
                self._writing, self._waiting = self._waiting, []
                self._writing_bytes, self._waiting_bytes = self._waiting_bytes, 0
            if not self._writing:
                return
            problem = None
            try:
                self._write(self._writing)
            except BaseException as error:
                problem = error
            with self._changed:
                if problem is None:
                    self._done += len(self._writing)
                else:
                    problem.add_note(
                        f"StoreWriter: batches from {self._done} on were not kept."
                    )
                    self._problem, self._waiting, self._waiting_bytes = problem, [], 0
                self._writing, self._writing_bytes = [], 0
                self._changed.notify_all()

    def _raise(self) -> None:
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    __del__ = _raise  # of a writer that was forgotten, Python still prints the error
