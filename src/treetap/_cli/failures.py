# SPDX-License-Identifier: Apache-2.0
"""Failures: what goes wrong at the command line, in one message.

A `Failure` is for people: its text is all there is to say. Other exceptions come from
the library, whose texts say what to do, or from the user's own code: then the message
has the line of that code it came from.
"""

import linecache
import os
import traceback

import click
import jax

from treetap._core.errors import TreetapError
from treetap._observe.blame.blame import NOT_USERS

FOUND = 1  # the exit code of a command that found what it looks for
BAD = 2  # of one that could not be done
INTERRUPTED = 130  # as shells say it of a program that Ctrl-C ended


_LOOKED = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


class Failure(click.ClickException):
    """What went wrong, in one message; the command ends with the code 2."""

    exit_code = BAD


_OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_PACKAGES = {"site-packages", "dist-packages"}  # of this environment, or one below it


def is_users(file: str) -> bool:
    """Whether a file is neither of a library nor of Python itself."""
    if file.startswith("<"):
        return False
    path = os.path.abspath(file)
    return not path.startswith(NOT_USERS) and _PACKAGES.isdisjoint(path.split(os.sep))


def _place(file: str, line: int, function: str = "<module>") -> str:
    """A line of a program; its path is from the current folder, if it lies in there."""
    source = linecache.getline(file, line).strip()
    inside = os.path.relpath(file)
    text = f"at {file if inside.startswith(os.pardir) else inside}:{line}"
    text += "" if function == "<module>" else f", in {function}"
    return text + (f": {source}" if source else "")


def place_of(error: BaseException) -> str:
    """The line of the user's code that an error came through last; empty if none."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return _place(error.filename, error.lineno)
    steps = list(traceback.walk_tb(error.__traceback__))
    found = [step for step in steps if is_users(step[0].f_code.co_filename)]
    if not found:
        return ""
    frame, line = found[-1]
    return _place(frame.f_code.co_filename, line, frame.f_code.co_qualname)


def _is_ours(error: BaseException) -> bool:
    """Whether the library itself raised an error: then its text is enough."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_code.co_filename.startswith(_OURS)


def _text_of(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return error.msg
    if isinstance(error, KeyError):  # whose text is the key's `repr`
        return str(error.args[0]) if error.args else ""
    return str(error).strip()


def message_of(error: BaseException) -> str:
    """The message for an error: its text, unless its line says more."""
    text = _text_of(error)
    if isinstance(error, Failure):
        return text
    place = place_of(error)
    is_said = isinstance(error, TreetapError | OSError) or _is_ours(error)
    if place or not (is_said and text):
        kind = type(error).__name__
        text = f"{kind}: {text}" if text else kind
    if isinstance(error, _LOOKED):
        text += "\nThe model looks at values while it is compiled: try --eager."
    return f"{text}\n  {place}" if place else text
