# SPDX-License-Identifier: Apache-2.0
"""What all that read and write files share: paths as arguments, and the way to disk.

Paths are checked first, before anything is read or written. What was written is in the
memory of the operating system until `to_disk`; a folder has to be told, too, so that
new names in it outlive a loss of power.
"""

import os
import pathlib
from typing import Any


def refuse_no_path(path: Any, name: str) -> None:
    """Refuses what is no path, such as the model where the path belongs.

    Args:
        path: What was given for a path.
        name: The function it was given to.
    """
    if isinstance(path, str | os.PathLike):
        return
    raise TypeError(
        f"{name}: expected the path of a file or folder first, got a "
        f"{type(path).__name__}. Write `{name}(path, ...)`."
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
