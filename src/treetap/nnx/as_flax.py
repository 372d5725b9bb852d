# SPDX-License-Identifier: Apache-2.0
"""Standing in for flax: programs that import `flax.nnx` run on treetap, unedited.

While `as_flax` is in force, `sys.modules` has a stand-in for `flax` and for each module
below it. `flax.nnx` and its submodules have the names of `treetap.nnx`; the few other
parts that NNX programs use come from `flax_parts`. Imports of anything else reach a
finder, and it raises an ImportError that says what is not there, and why. Stand-ins are
made anew each time: nothing that a program sets on them reaches treetap.
"""

import difflib
import functools
import importlib
import sys
import types
from contextlib import AbstractContextManager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from treetap import nnx
from treetap._core import errors, settings
from treetap.nnx import annotations, flax_parts, linen_names
from treetap.nnx.nn import activations, initializers

FOLLOWED_VERSION = "0.12.12"  # the release of flax whose names and behaviour these are


SETTINGS = {
    "nnx_graph_mode": nnx.set_graph_mode,
    "nnx_graph_updates": nnx.set_graph_updates,
    "nnx_sow_capture_noop": settings.sow_capture_noop,
    "flax_always_shard_variable": settings.use_eager_sharding,
}
OPTIONS = {  # they concern Linen, checkpoints or displays
    "flax_array_ref": False,
    "flax_filter_frames": True,
    "flax_fix_rng_separator": False,
    "flax_hijax_variable": False,
    "flax_max_repr_depth": None,
    "flax_preserve_adopted_names": False,
    "flax_profile": True,
    "flax_pytree_module": True,
    "flax_return_frozendict": False,
    "flax_use_flaxlib": False,
    "flax_use_orbax_checkpointing": True,
}
FIXED = ("flax_array_ref", "flax_hijax_variable", "flax_pytree_module")


class Config(types.SimpleNamespace):
    """`flax.config`: the options that mean something here are settings of treetap."""

    def __getattr__(self, name: str) -> Any:
        if name in SETTINGS:
            return SETTINGS[name].current_value()
        raise AttributeError(f"flax.config has no option {name!r}.")

    def update(self, name: str, value: Any, /) -> None:
        """Sets an option from now on.

        Args:
            name: The option.
            value: What to set it to.
        """
        if name in SETTINGS:
            SETTINGS[name](value)
        elif value != getattr(self, name) and name in FIXED:
            raise ValueError(
                f"flax.config.update: {name} is {getattr(self, name)!r} in treetap, "
                f"which has no other way to work; {value!r} was asked for. "
                "Leave the option alone."
            )
        else:
            setattr(self, name, value)


CONFIG = Config(**OPTIONS)


def _public(module: types.ModuleType) -> list[str]:
    return [name for name in dir(module) if name[0] != "_"]


def _named(module: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(module, name) for name in names}


FROZEN_DICTS = _named(flax_parts, "FrozenDict", "copy", "freeze", "pop", "unfreeze")
LINEN_DTYPES = _named(linen_names, "canonicalize_dtype", "promote_dtype")
LINEN_ACTIVATIONS = _named(
    activations, *(name for name in _public(activations) if name[0].islower())
)
LINEN_INITIALIZERS = _named(initializers, *_public(initializers))
# What each module has, besides the modules below it. Those of NNX are not listed: they
# have what the modules of treetap have that are called like them.
MODULES: dict[str, dict[str, Any]] = {
    "flax": {"__version__": FOLLOWED_VERSION, "config": CONFIG},
    "flax.configurations": {"config": CONFIG},
    "flax.core": FROZEN_DICTS,
    "flax.core.frozen_dict": FROZEN_DICTS,
    "flax.errors": {
        "FlaxError": errors.TreetapError,
        "TraceContextError": errors.TraceContextError,
    },
    "flax.linen": LINEN_ACTIVATIONS
    | _named(nnx, "avg_pool", "dot_product_attention", "max_pool", "min_pool")
    | _named(linen_names, "compact", "unbox")
    | {"nowrap": linen_names.compact},
    "flax.linen.activation": LINEN_ACTIVATIONS,
    "flax.linen.dtypes": LINEN_DTYPES,
    "flax.linen.initializers": LINEN_INITIALIZERS,
    "flax.linen.meta": _named(linen_names, "unbox"),
    "flax.linen.module": _named(linen_names, "_context", "compact")
    | {"nowrap": linen_names.compact},
    "flax.struct": _named(flax_parts, "PyTreeNode", "dataclass", "field"),
    "flax.training": {},
    "flax.training.train_state": _named(flax_parts, "TrainState"),
    "flax.traverse_util": _named(
        flax_parts, "empty_node", "flatten_dict", "path_aware_map", "unflatten_dict"
    ),
    "flax.typing": _named(annotations, *_public(annotations))
    | _named(flax_parts, "FrozenDict"),
    "flax.version": {"__version__": FOLLOWED_VERSION},
}
ALIASES = {  # second names of modules
    "flax.nnx.initializers": "flax.nnx.nn.initializers",
    "flax.nnx.metrics": "flax.nnx.training.metrics",
    "flax.nnx.object": "flax.nnx.pytreelib",
    "flax.nnx.optimizer": "flax.nnx.training.optimizer",
}
REASONS = {
    **{f"flax.nnx.{name}": reason for name, reason in nnx._LEFT_OUT.items()},
    "flax.core": "of flax.core, only the functions on FrozenDicts are here",
    "flax.experimental": "it is no part of NNX",
    "flax.io": "open files with Python's own functions, or etils.epath",
    "flax.jax_utils": "place arrays with jax.device_put and a sharding",
    "flax.linen": "treetap has NNX's Modules only, and of Linen the names of classes; "
    "port the Modules to nnx, or run them under flax",
    "flax.metrics": "write events with treetap.EventWriter",
    "flax.serialization": "it writes msgpack; save with treetap.save_weights "
    "(safetensors) or treetap.save_checkpoint (orbax)",
    "flax.training.checkpoints": "save with treetap.save_checkpoint (orbax)",
    "flax.training": "of flax.training, only train_state is here",
}


def _explain(path: str, module: Any) -> str:
    """The text of the error for a path that is not here.

    Args:
        path: What was asked for.
        module: The module it would be in; None if there is none.
    """
    text = f"treetap, standing in for flax, has no {path}"
    around = path
    while around and around not in REASONS:
        around = around.rpartition(".")[0]
    if around:  # the nearest thing around it for which there is a reason
        return f"{text}: {REASONS[around]}."
    parent, _, name = path.rpartition(".")
    near = difflib.get_close_matches(name, dir(module), n=1)
    if near:
        return f"{text}. The nearest name is {parent}.{near[0]}."
    return f"{text}. `dir({parent})` lists what there is."


@functools.cache
def _nnx_modules() -> dict[str, str]:
    """The modules that NNX has as well: treetap's by flax's paths."""
    folder = Path(nnx.__file__).parent
    found = {"flax.nnx": "treetap.nnx"}
    for file in sorted(folder.rglob("*.py")):
        steps = file.relative_to(folder).with_suffix("").parts
        if steps[0] in nnx._SUBMODULES:
            path = ".".join(step for step in steps if step != "__init__")
            found[f"flax.nnx.{path}"] = f"treetap.nnx.{path}"
    return found


def _is_module(path: str) -> bool:
    return path in MODULES or path in _nnx_modules()


class StandIn(types.ModuleType):
    """A module under flax's name. A missing name is an error that says why.

    Args:
        path: Its name.
        family: All that were made together, by path.
    """

    def __init__(self, path: str, family: "dict[str, StandIn]"):
        super().__init__(path, "treetap, under the name of a module of flax.")
        spec = ModuleSpec(path, None, origin="treetap", is_package=True)
        names = MODULES.get(path, {})
        vars(self).update(names, __path__=[], __spec__=spec, _family=family)

    def __getattr__(self, name: str) -> Any:
        path = f"{self.__name__}.{name}"
        if name == "__all__":
            return self._names()
        if name.startswith("__"):  # asked for by Python, which takes no for an answer
            raise AttributeError(f"{self.__name__} has no {name}", name=name, obj=self)
        path = ALIASES.get(path, path)
        if _is_module(path):
            value = _stand_in(path, self._family)
        elif self.__name__ in _nnx_modules() and name in self._names():
            value = getattr(self._twin(), name)
        elif self.__name__.startswith("flax.linen") and name[0].isupper():
            value = linen_names.named(name)
        else:
            raise AttributeError(_explain(path, self), name=name)
        if name != "VariableState":  # it warns each time
            setattr(self, name, value)
        return value

    def _twin(self) -> Any:
        """The module of treetap that has the names."""
        return importlib.import_module(_nnx_modules()[self.__name__])

    def _names(self) -> list[str]:
        """The public names, without those of modules below."""
        if self.__name__ == "flax.nnx":
            return [*nnx.__all__, "VariableState"]
        if self.__name__ in _nnx_modules():
            return _public(self._twin())
        return [*MODULES[self.__name__]]

    def __dir__(self) -> list[str]:
        paths = (path.rpartition(".") for path in (*MODULES, *_nnx_modules()))
        below = [name for parent, _, name in paths if parent == self.__name__]
        return [*vars(self), *self._names(), *below]


def _stand_in(path: str, family: dict[str, StandIn]) -> StandIn:
    """The module for a path; Python knows it while it stands in for flax."""
    if path not in family:
        family[path] = StandIn(path, family)
    if _in_force and family is FINDER.family:
        sys.modules[path] = family[path]
    return family[path]


class _Finder(MetaPathFinder, Loader):
    """Finds what is here of flax, and says why the rest is not."""

    def __init__(self) -> None:
        self.family: dict[str, StandIn] = {}

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "flax":
            return None
        if _is_module(fullname):
            return ModuleSpec(fullname, self, origin="treetap", is_package=True)
        module = sys.modules.get(fullname.rpartition(".")[0])
        raise ImportError(_explain(fullname, module), name=fullname)

    def create_module(self, spec: ModuleSpec) -> StandIn:
        return _stand_in(spec.name, self.family)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run: names are looked up when they are asked for."""


FINDER = _Finder()
_in_force: list["as_flax"] = []


def _flax_modules() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "flax"]


class as_flax(AbstractContextManager["as_flax"]):
    """Lets `from flax import nnx` give treetap, until undone or the block ends.

    Works from the call on, for everything imported afterwards. What treetap has not
    (Linen, say) is an ImportError that names it. In a `with` statement, or after
    `undo()`, `flax` is again what it was; modules that were imported meanwhile keep
    what they have.

    Examples:
        >>> import treetap as tt
        >>> with tt.as_flax():
        ...     from flax import nnx
        ...
        ...     nnx.Linear is tt.Linear
        True
    """

    def __init__(self) -> None:
        for name in _flax_modules():
            module = sys.modules[name]
            if not isinstance(module, StandIn):
                place = getattr(module, "__file__", None) or "no file"
                raise ImportError(
                    f"as_flax: {name} is imported already (from {place}), and code "
                    "that has it goes on using it. Call as_flax before anything "
                    "imports flax.",
                    name=name,
                )
        if not _in_force:
            FINDER.family = {}
            sys.meta_path.insert(0, FINDER)
        _in_force.append(self)

    def __exit__(self, *exception: object) -> None:
        self.undo()

    def undo(self) -> None:
        """Stands in no longer, unless another call still does."""
        if self not in _in_force:
            return
        _in_force.remove(self)
        if not _in_force:
            sys.meta_path.remove(FINDER)
            for name in _flax_modules():
                del sys.modules[name]
