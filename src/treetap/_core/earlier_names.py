# SPDX-License-Identifier: Apache-2.0
"""Where classes were in earlier versions, for pickles that were written then.

A pickle names each class by its module. When one asks for a module that has moved, the
finder here gives the module as it is called now: the same object, not a copy. Records
in files name the kinds of Variables in the same way; for these there is `present_name`.
What moved where stands beside this file, in `earlier_names.txt`.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

PACKAGE = "treetap."
_TABLE = Path(__file__).with_suffix(".txt").read_text("utf-8")
MOVED = dict(line.split() for line in _TABLE.splitlines() if line[0] != "#")


def _present_module(name: str) -> str | None:
    """What a module that moved is called now; None for one that is where it was."""
    if not name.startswith(PACKAGE):
        return None
    name = name.removeprefix(PACKAGE)
    folder, _, file = name.rpartition(".")
    if name in MOVED:
        return PACKAGE + MOVED[name]
    return f"{PACKAGE}{MOVED[folder]}.{file}" if folder in MOVED else None


class _Finder(MetaPathFinder, Loader):
    """Finds modules by the names they had, and gives them under their present ones."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: object = None
    ) -> ModuleSpec | None:
        present = _present_module(fullname)
        if present is None:
            return None
        return ModuleSpec(fullname, self, loader_state=import_module(present))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module: ModuleType = spec.loader_state
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has put the spec of the old name there.
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state


def present_name(name: str) -> str:
    """The full name of a class, which a file may give by the module it was in.

    Examples:
        >>> from treetap._core.earlier_names import present_name
        >>> present_name("treetap._kinds.Param")
        'treetap._core.variables.kinds.Param'
    """
    module, _, own = name.rpartition(".")
    present = _present_module(module)
    return name if present is None else f"{present}.{own}"


def install() -> None:
    """Lets Python find modules by the names they had."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
