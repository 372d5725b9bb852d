# SPDX-License-Identifier: Apache-2.0
"""Faults put into a run: an exception before the k-th line of some files."""

import pathlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

import treetap

SOURCE = pathlib.Path(treetap.__file__).parent


class Injected(BaseException):
    """The fault. Nobody but the test may catch it."""


class Lines:
    """Counts the lines a thread runs in some rooms, and raises before one of them.

    Args:
        rooms: The rooms to look at.
        at: The number of the line to raise before; 0 for none.
    """

    def __init__(self, rooms: Iterable[str], at: int = 0):
        files = [SOURCE / f"{room}.py" for room in rooms]
        if missing := [str(file) for file in files if not file.is_file()]:
            raise FileNotFoundError(f"No such files: {', '.join(missing)}.")
        self.files = {str(file) for file in files}
        self.at = at
        self.places: list[str] = []  # of the lines that were run, in order
        self._before: Any = None

    def _on_call(self, frame: Any, event: str, _: Any) -> Callable[..., Any] | None:
        return self._on_line if frame.f_code.co_filename in self.files else None

    def _on_line(self, frame: Any, event: str, _: Any) -> Callable[..., Any] | None:
        if event == "line":
            name = pathlib.Path(frame.f_code.co_filename).stem
            self.places.append(f"{name}:{frame.f_lineno}")
            if len(self.places) == self.at:
                raise Injected(self.places[-1])
        return self._on_line

    def __enter__(self) -> "Lines":
        self._before = sys.gettrace()
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.settrace(self._before)
