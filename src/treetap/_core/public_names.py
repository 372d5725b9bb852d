# SPDX-License-Identifier: Apache-2.0
"""Public names: a package lists them in its stub, and loads each when it is used.

The stub `__init__.pyi` has one line for each name, `from place import name as name`. So
type checkers and the program read the same list, and a program waits only for what it
asks for.
"""

import re
from pathlib import Path

_LINE = re.compile(r"^from (\S+) import \(?\s*(\w+) as \2\b", re.M)


def places_in(init: str) -> dict[str, str]:
    """The public names of a package, each with the module that defines it.

    Args:
        init: The file of the package, beside which the stub is.
    """
    stub = Path(init).with_suffix(".pyi").read_text("utf-8")
    return {name: module for module, name in _LINE.findall(stub)}


def by_kind(name: str) -> tuple[bool, bool, str]:
    """Constants, then classes, then functions and modules, each in order."""
    return not name.isupper(), not name[0].isupper(), name
