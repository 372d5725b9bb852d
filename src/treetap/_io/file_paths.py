# SPDX-License-Identifier: Apache-2.0
"""Paths of files as arguments: checked first, before anything is read or written."""

import os
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
