# SPDX-License-Identifier: Apache-2.0
"""treetap: neural-network modules for JAX.

Modules are plain trees, the Variables inside them are mutable, and every value that
flows through a model can be seen and changed without editing the model. This namespace
works in tree mode; `treetap.nnx` offers the same library under NNX's names and
defaults.

The public names stand in `__init__.pyi`, each with the file that defines it. A name is
imported when it is first asked for, so a program waits only for what it uses.
"""

from importlib import import_module as _import_module

from treetap._core import earlier_names
from treetap._core import settings as _settings  # noqa: F401 - it reads the environment, and says at once what is wrong there
from treetap._core.public_names import by_kind as _by_kind
from treetap._core.public_names import places_in as _places_in

earlier_names.install()

_PLACES = _places_in(__file__)

__all__ = sorted(_PLACES, key=_by_kind)  # noqa: PLE0605 - a list, of what stands in the stub  # pyright: ignore[reportUnsupportedDunderAll] - the stub lists them


def __getattr__(name: str) -> object:
    if name == "__version__":  # looked up when asked for: it reads files
        from importlib.metadata import version

        return version("treetap")
    module = _PLACES.get(name)
    if module is None:
        raise AttributeError(f"module 'treetap' has no attribute {name!r}")
    if module == __name__:  # a public module
        return _import_module(f"{module}.{name}")
    value = getattr(_import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
