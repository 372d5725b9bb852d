# SPDX-License-Identifier: Apache-2.0
"""What all that read and write files share: paths as arguments, and the way to disk.

Paths are checked first, before anything is read or written. What was written is in the
memory of the operating system until `to_disk`; a folder has to be told, too, so that
new names in it outlive a loss of power. `written_whole` replaces a file in one step, or
leaves it alone. What other libraries raise becomes an error of this one in `refusing`,
for what is read, and in `needing`, for a package that is not there.
"""

import contextlib
import os
import pathlib
import shutil
import uuid
from collections.abc import Iterator
from typing import Any

from treetap._core.errors import WeightsError
from treetap._core.wording import words_of


@contextlib.contextmanager
def refusing(what: str, *errors: type[Exception]) -> Iterator[None]:
    """A block that reads a file: errors in it mean that the file is refused.

    Args:
        what: Public name, file, and what is wrong with it; the error's words follow.
        errors: What the block may raise.
    """
    try:
        yield
    except errors as error:
        raise WeightsError(f"{what}: {words_of(error).rstrip('.')}.") from error


@contextlib.contextmanager
def needing(package: str, extra: str, name: str) -> Iterator[None]:
    """A block that imports a package which an extra brings.

    Args:
        package: As people call it.
        extra: What to install.
        name: The public function that needs it.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"{name} needs {package}, which is not installed: "
            f"`pip install treetap[{extra}]`."
        ) from error


def require_path(path: Any, name: str) -> Any:
    """A path, as it was given; anything else is refused, such as the model.

    Args:
        path: What was given for a path.
        name: The function it was given to.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"{name}: expected the path of a file or folder first, got a "
            f"{type(path).__name__}. Write `{name}(path, ...)`."
        )
    return path


def require_place(path: pathlib.Path, name: str) -> None:
    """Refuses a path at which no file can be.

    Args:
        path: Where it is to be.
        name: The function, or option, that it was given to.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{name}: {path} is a folder; name a file in it.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{name}: there is no folder {path.parent}.")


def not_written(place: Any, error: Exception, name: str) -> OSError:
    """The error that a file or folder could not be replaced.

    Args:
        place: What it would have been.
        error: What another library says of it.
        name: The public function at work.
    """
    return OSError(
        f"{name}: {place} could not be written: {error!s:.300}. What was there "
        "before is as it was; if the disk is full, make room, and save again."
    )


def to_disk(place: pathlib.Path, mode: int = os.O_RDONLY) -> None:
    """Waits until a file, or the names in a folder, are on the disk.

    Args:
        place: The file or folder.
        mode: How it is opened; some systems want files to be opened for writing.
    """
    handle = os.open(place, mode)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def written_whole(path: pathlib.Path, name: str) -> Iterator[pathlib.Path]:
    """A block that writes a file beside its final place; it goes there when complete.

    Whatever fails, what was there before is as it was.

    Args:
        path: The final place.
        name: The public function at work, for messages.
    """
    require_place(path, name)
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield beside
        to_disk(beside, os.O_RDWR)
        if path.exists():
            shutil.copymode(path, beside)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # not every system can do it for folders
        to_disk(path.parent)
