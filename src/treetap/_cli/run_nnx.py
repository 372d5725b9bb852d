# SPDX-License-Identifier: Apache-2.0
"""Running a program written for flax.nnx, unedited, with treetap in flax's place.

`run` does what `python script.py` and `python -m module` do: the program is
`__main__`, has its own arguments and its folder first on the path; an error is shown
with the program's frames alone, and the exit code is the program's. The interpreter is
left as it was found.
"""

import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from treetap._cli.failures import BAD, INTERRUPTED
from treetap.nnx.as_flax import as_flax


def run(script: str, args: list[str], module: bool = False) -> int:
    """Runs a program with treetap in flax's place, and returns its exit code.

    Args:
        script: A file (or a folder or zip file with a `__main__.py`), or the name of a
            module.
        args: What the program finds in `sys.argv` after its own name.
        module: `script` is the name of a module.
    """
    if not module and not os.path.exists(script):
        return _refuse(f"run-nnx: there is no file {script!r}. Give the path of one.")
    folder = os.getcwd() if module else os.path.dirname(os.path.abspath(script))
    with as_flax(), _program(script, args, folder):
        try:
            if module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script, run_name="__main__")
        except SystemExit as leaving:
            return _code_of(leaving)
        except BaseException as error:
            return _show(error)
    return 0


@contextmanager
def _program(script: str, args: list[str], folder: str) -> Iterator[None]:
    """Sets the arguments and the path of a program, and puts back what was there."""
    arguments, path = sys.argv, sys.path[:]
    sys.argv = [script, *args]
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.argv, sys.path[:] = arguments, path


def _refuse(text: str) -> int:
    print(text, file=sys.stderr)
    return BAD


def _code_of(leaving: SystemExit) -> int:
    """The exit code of `sys.exit(...)`; a text is printed, as Python does."""
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code
    print(leaving.code, file=sys.stderr)
    return 1


def _show(error: BaseException) -> int:
    """Shows an error as Python would have, and returns the exit code."""
    sys.stdout.flush()
    frames = _without_ours(error.__traceback__)
    if frames is None and isinstance(error, ImportError):  # from runpy: no such module
        return _refuse(f"run-nnx: {error}")
    sys.excepthook(type(error), error.with_traceback(frames), frames)
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def _without_ours(frames: TracebackType | None) -> TracebackType | None:
    """The frames from the program's first on; none, where it did not begin."""
    while frames is not None:
        name = frames.tb_frame.f_code.co_filename
        if name not in (__file__, runpy.__file__, "<frozen runpy>"):
            return frames
        frames = frames.tb_next
    return None
