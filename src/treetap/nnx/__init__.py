# SPDX-License-Identifier: Apache-2.0
"""NNX's names with NNX's defaults: `from treetap import nnx` runs an NNX program.

Everything here is the library itself. Two things differ from `import treetap`:
functions with a `graph` argument keep shared references, and transforms carry changes
of structure out, unless told otherwise; and NNX's deprecated names are here, with their
warnings. The public names stand in `__init__.pyi`, each with the file that defines it.
A name is imported when it is first asked for.

What only NNX needs is in this folder:

* `defaults`: the two settings, and how functions get them, here and in `compat`;
* `compat`: the same functions in graph mode, whatever the settings say;
* `contexts`: split and merge contexts, for transforms of one's own;
* `traversals`: nested mappings as flat ones, and back;
* `states`: `update` and `merge_state`, which ask less than those of `treetap`;
* `objects`: `Object` and `display`;
* `train_state`: `TrainState`, a model in parts with its optimizer;
* `deprecated`: names that NNX has deprecated. Importing it gives `Variable`, `Module`,
  `GraphDef` and `State` their deprecated methods, so it is loaded with this namespace,
  and not by `import treetap`;
* `private_names`: attributes that are private in NNX and that programs use all the
  same; loaded with this namespace, too;
* `annotations`: names of types, for annotations only;
* `flax_parts`, `linen_names`, `as_flax`: standing in for `flax` itself, so that a
  program runs unedited.

NNX has its names in modules as well, and programs import them from there. Each of these
modules is here under its name: most are lists of names, a few define what only they
need. They are `deprecations`, `extract`, `filterlib`, `graphlib` and `graph`,
`helpers`, `ids`, `module`, `proxy_caller`, `pytreelib` (also called `object`),
`reprlib`, `rnglib`, `spmd`, `statelib`, `summary`, `tracers`, `variablelib`,
`visualization`, and in folders `nn`, `training` and `transforms`. `bridge` only says
that it is left out.

Only the command line imports this folder; it may import all others.
"""

import warnings as _warnings
from importlib import import_module as _import_module

from treetap._core.public_names import by_kind as _by_kind
from treetap._core.public_names import places_in as _places_in
from treetap.nnx import defaults as _defaults
from treetap.nnx import deprecated as _deprecated  # noqa: F401 - it gives classes their methods
from treetap.nnx import private_names as _private_names  # noqa: F401 - the same

_PLACES = _places_in(__file__)
_MODULES = ("compat", "initializers", "metrics", "traversals")
_SUBMODULES = {name for name, place in _PLACES.items() if place == __name__}
_SECOND_NAMES = {"object": "pytreelib", "optimizer": "training.optimizer"}
_NO_LINEN = "treetap has NNX's Modules only, and no Linen: there is nothing to"
_LEFT_OUT = {
    "bridge": f"{_NO_LINEN} bridge to",
    "wrappers": f"{_NO_LINEN} wrap",
    "HijaxVariable": "hijax Variables are not supported; see `ref=True`",
}

__all__ = sorted({*_PLACES} - _SUBMODULES | {*_MODULES}, key=_by_kind)  # noqa: PLE0605 - a list, of what stands in the stub  # pyright: ignore[reportUnsupportedDunderAll] - the stub lists them


def __getattr__(name: str) -> object:
    if name == "VariableState":
        text = "`VariableState` is another name of `Variable`; use that."
        _warnings.warn(text, DeprecationWarning, 2)
        name = "Variable"
    if name in _SUBMODULES or name in _SECOND_NAMES:
        return _import_module(f"{__name__}.{_SECOND_NAMES.get(name, name)}")
    if name not in _PLACES:
        text = f"module {__name__!r} has no attribute {name!r}"
        reason = f": {_LEFT_OUT[name]}." if name in _LEFT_OUT else ""
        raise AttributeError(text + reason)
    value = getattr(_import_module(_PLACES[name]), name)
    globals()[name] = value = _defaults.with_default_modes(value)
    return value


def __dir__() -> list[str]:
    return [*globals(), *_PLACES, *_SECOND_NAMES]
