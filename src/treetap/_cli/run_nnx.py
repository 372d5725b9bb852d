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

from treetap._cli.failures import INTERRUPTED, Failure
from treetap.nnx.as_flax import as_flax


def run(script: str, args: list[str], module: bool = False) -> None:
    """Runs a program with treetap in flax's place.

    Args:
        script: A file (or a folder or zip file with a `__main__.py`), or the name of a
            module.
        args: What the program finds in `sys.argv` after its own name.
        module: `script` is the name of a module.

    Raises:
        SystemExit: As the program raised it; or it failed, which was shown.
    """
    if not module and not os.path.exists(script):
        raise Failure(f"run-nnx: there is no file {script!r}. Give the path of one.")
    folder = os.getcwd() if module else os.path.dirname(os.path.abspath(script))
    with as_flax(), _program(script, args, folder):
        try:
            if module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script, run_name="__main__")
        except SystemExit:
            raise
        except BaseException as error:
            sys.exit(_show(error))


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


def _show(error: BaseException) -> int:
    """Shows an error as Python would have, and returns the exit code."""
    sys.stdout.flush()
    frames = _without_ours(error.__traceback__)
    if frames is None and isinstance(error, ImportError):  # from runpy: no such module
        raise Failure(f"run-nnx: {error}")
    sys.excepthook(type(error), error.with_traceback(frames), frames)
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def _without_ours(frames: TracebackType | None) -> TracebackType | None:
    """The frames from the program's first on; none, where it did not begin."""
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while frames is not None and frames.tb_frame.f_code.co_filename in ours:
        frames = frames.tb_next
    return frames
