# SPDX-License-Identifier: Apache-2.0
"""Standing in for flax: programs that import `flax.nnx` run on treetap, unedited.

While `as_flax` is in force, `sys.modules` has a stand-in for `flax` and for each module
below it. `flax.nnx` and its submodules have the names of `treetap.nnx`; the few other
parts that NNX programs use come from `flax_parts`. Imports of anything else reach a
finder, and it raises an ImportError that says what is not there, and why. Stand-ins are
made anew each time: nothing that a program sets on them reaches treetap.
"""

import difflib
import sys
import types
from collections.abc import Hashable
from contextlib import AbstractContextManager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

import jax

from treetap import initializers, metrics, nnx
from treetap._core import errors, settings
from treetap._core.trees import filters
from treetap._modules import random_rules
from treetap._nn.dtypes import promote_dtype
from treetap._nn.embedding import default_embed_init
from treetap._nn.parameters import default_kernel_init
from treetap._nn.recurrence import flip_sequences
from treetap.nnx import compat, flax_parts, traversals

FOLLOWED_VERSION = "0.12.8"  # the release of flax whose names and behaviour these are


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

# Of `flax.typing`: names for annotations. Nobody checks these, so most are `Any`.
ANNOTATIONS = """
    Array ArrayPytree Axes Collection ConvGeneralDilatedT DotGeneralT Dtype EinsumT
    LaxPadding LogicalNames LogicalRules PaddingLike PathParts PrecisionLike
    PromoteDtypeFn Shape Sharding VariableDict
"""
TYPES = {
    **dict.fromkeys(ANNOTATIONS.split(), Any),
    "Axis": int | None,
    "Initializer": initializers.Initializer,
    "Key": Hashable,
    "PRNGKey": jax.Array,
    "Path": str,
}


def _named(module: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(module, name) for name in names}


def _public(module: types.ModuleType) -> dict[str, Any]:
    return {name: held for name, held in vars(module).items() if name[0] != "_"}


NNX = _named(nnx, *(name for name in nnx.__all__ if name != "compat"))
FROZEN_DICTS = _named(flax_parts, "FrozenDict", "copy", "freeze", "pop", "unfreeze")
LAYERS = {  # the modules of layers have flax's names for types and defaults as well
    **NNX,
    **TYPES,
    "default_bias_init": initializers.zeros_init(),
    "default_embed_init": default_embed_init,
    "default_kernel_init": default_kernel_init,
}
# Modules below `flax.nnx` in which programs look for a name of NNX's: all are in each.
WITH_NNX = """
    deprecations extract filterlib graph graphlib helpers module pytreelib rnglib spmd
    statelib summary training.ema training.optimizer transforms transforms.autodiff
    transforms.compilation transforms.general transforms.iteration transforms.transforms
    variablelib visualization
"""
WITH_LAYERS = "activations attention linear lora normalization recurrent stochastic"
# What each module has, besides the modules below it.
MODULES: dict[str, dict[str, Any]] = {
    "flax": {"__version__": FOLLOWED_VERSION, "config": CONFIG},
    "flax.configurations": {"config": CONFIG},
    "flax.core": FROZEN_DICTS,
    "flax.core.frozen_dict": FROZEN_DICTS,
    "flax.errors": {
        "FlaxError": errors.TreetapError,
        "TraceContextError": errors.TraceContextError,
    },
    "flax.struct": _named(flax_parts, "PyTreeNode", "dataclass", "field"),
    "flax.training": {},
    "flax.training.train_state": _named(flax_parts, "TrainState"),
    "flax.traverse_util": _named(
        flax_parts, "empty_node", "flatten_dict", "path_aware_map", "unflatten_dict"
    ),
    "flax.typing": TYPES | _named(flax_parts, "FrozenDict"),
    "flax.version": {"__version__": FOLLOWED_VERSION},
    "flax.nnx": NNX,
    "flax.nnx.compat": _public(compat),
    "flax.nnx.nn": {},
    "flax.nnx.nn.dtypes": {"promote_dtype": promote_dtype},
    "flax.nnx.nn.initializers": _named(initializers, *initializers.__all__),
    "flax.nnx.training": {},
    "flax.nnx.training.metrics": _named(metrics, *metrics.__all__),
    "flax.nnx.traversals": _public(traversals),
    **{f"flax.nnx.{name}": {**NNX} for name in WITH_NNX.split()},
    **{f"flax.nnx.nn.{name}": {**LAYERS} for name in WITH_LAYERS.split()},
}
MODULES["flax.nnx.nn.recurrent"]["flip_sequences"] = flip_sequences
MODULES["flax.nnx.rnglib"]["backup_keys"] = random_rules.backup_keys
MODULES["flax.nnx.filterlib"] |= {
    **_named(filters, "Filter", "PathIn", "Predicate"),
    "filters_to_predicates": lambda given: tuple(filters.predicates_of(given)),
    "to_predicate": filters.predicate_of,
}
ALIASES = {  # second names of modules, attributes of `flax.nnx`
    "initializers": "flax.nnx.nn.initializers",
    "metrics": "flax.nnx.training.metrics",
    "object": "flax.nnx.pytreelib",
    "optimizer": "flax.nnx.training.optimizer",
}
NO_LINEN = "treetap has NNX's Modules only, and no Linen"
REASONS = {
    "flax.core": "of flax.core, only the functions on FrozenDicts are here",
    "flax.experimental": "it is no part of NNX",
    "flax.io": "open files with Python's own functions, or etils.epath",
    "flax.jax_utils": "place arrays with jax.device_put and a sharding",
    "flax.linen": f"{NO_LINEN}; port the Modules to nnx, or run them under flax",
    "flax.metrics": "write events with treetap.EventWriter",
    "flax.nnx.Data": "mark the value with nnx.data(...) where it is set",
    "flax.nnx.PureState": "it is tuple[nnx.GraphDef, nnx.State]",
    "flax.nnx.Static": "mark the value with nnx.static(...) where it is set",
    "flax.nnx.TrainState": "use nnx.Optimizer, or flax.training.train_state",
    "flax.nnx.VariableState": "it is nnx.Variable",
    "flax.nnx.bridge": f"{NO_LINEN}, so there is nothing to bridge to",
    "flax.nnx.wrappers": f"{NO_LINEN}, so there is nothing to wrap",
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


class StandIn(types.ModuleType):
    """A module under flax's name. A missing name is an error that says why."""

    def __getattr__(self, name: str) -> Any:
        path = f"{self.__name__}.{name}"
        if name.startswith("__"):  # asked for by Python, which takes no for an answer
            raise AttributeError(f"{self.__name__} has no {name}", name=name, obj=self)
        raise AttributeError(_explain(path, self), name=name)


def _stand_ins() -> dict[str, StandIn]:
    """New modules by their paths; each is an attribute of the one around it."""
    made: dict[str, StandIn] = {}
    for path, names in MODULES.items():  # in which the one around it comes first
        made[path] = StandIn(path, "treetap, under the name of a module of flax.")
        vars(made[path]).update(names, __path__=[])
        made[path].__spec__ = ModuleSpec(path, None, origin="treetap", is_package=True)
        parent, _, name = path.rpartition(".")
        if parent:
            setattr(made[parent], name, made[path])
    for name, path in ALIASES.items():
        setattr(made["flax.nnx"], name, made[path])
    return made


class _Finder(MetaPathFinder):
    """Says why a module of flax is not here; those that are need no finder."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        module = sys.modules.get(fullname.rpartition(".")[0])
        if fullname.partition(".")[0] == "flax":  # or `from flax.nnx import Missing`
            raise ImportError(_explain(fullname, module), name=fullname)


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
            sys.modules.update(_stand_ins())
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
