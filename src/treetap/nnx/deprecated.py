# SPDX-License-Identifier: Apache-2.0
"""Names that NNX programs still use and NNX has deprecated or given up.

Each warns where NNX warns: `first_from`, `var_defaults` and the registry of kinds do
not. Importing this module gives `Variable`, `Module`, `GraphDef` and `State` their
deprecated attributes and methods. `treetap.nnx` imports it and exports the functions; a
program that only says `import treetap` meets neither.
"""

import functools
import warnings
from collections.abc import Callable
from contextlib import ContextDecorator
from typing import Any, NamedTuple, TypeVar

from treetap._core.trees import state as _states
from treetap._core.trees.build import as_pure
from treetap._core.trees.graphdef import GraphDef
from treetap._core.trees.split import Call
from treetap._core.trees.state import State
from treetap._core.trees.update import with_vars
from treetap._core.variables import kinds
from treetap._core.variables.variable import Variable, _Defaults
from treetap._modules.module import Module, iter_children, iter_modules
from treetap.nnx.states import merge_state

F = TypeVar("F", bound=Callable[..., Any])


def _warn(old: str, new: str, depth: int = 3) -> None:
    warnings.warn(f"{old} is deprecated; use {new}.", DeprecationWarning, depth)


def _deprecated(old: str, new: str, fn: F, **options: Any) -> F:
    """A function under a deprecated name, with some of its options given."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        _warn(old, new)
        return fn(*args, **options, **kwargs)

    call.__doc__ = f"Deprecated: use {new}."
    return call  # pyright: ignore[reportReturnType] - the signature is that of `fn`


def _value_property(name: str, instead: str) -> property:
    """A property that calls the methods `get_...` and `set_...`."""

    def read(self: Variable[Any]) -> Any:
        _warn(f"`Variable.{name}`", instead)
        return getattr(self, f"get_{name}")()

    def write(self: Variable[Any], value: Any) -> None:
        _warn(f"`Variable.{name} = x`", f"`v[...] = x` or `v.set_{name}(x)`", 4)
        getattr(self, f"set_{name}")(value)

    return property(read, write, doc=f"Deprecated: use {instead}.")


def _map_state(state: State, fn: Callable[..., Any]) -> State:
    return _states.map_state(fn, state)


def _apply(self: GraphDef, state: Any, *states: Any, graph: bool | None = None) -> Any:
    """A proxy that calls methods on the merged object; see `call`."""
    return Call((self, state, *states), (), graph)


_STATE_METHODS = {
    "map": ("map_state", _map_state),
    "flat_state": ("to_flat_state", _states.to_flat_state),
    "to_pure_dict": ("to_pure_dict", _states.to_pure_dict),
    "replace_by_pure_dict": ("replace_by_pure_dict", _states.replace_by_pure_dict),
    "split": ("split_state", _states.split_state),
    "filter": ("filter_state", _states.filter_state),
    "__sub__": ("diff_state", _states.diff_state),
    "merge": ("merge_state", merge_state),
    "from_flat_path": ("from_flat_state", _states.from_flat_state),
}


def _give_methods() -> None:
    """Gives the classes their deprecated methods and properties."""
    given: dict[tuple[type, str], Any] = {(GraphDef, "apply"): _apply}
    given[Variable, "raw_value"] = _value_property("raw_value", "`v.get_raw_value()`")
    given[Variable, "value"] = _value_property("value", "`v[...]` or `v.get_value()`")
    for fn in (iter_modules, iter_children):
        name = fn.__name__
        old, new = f"The method `m.{name}()`", f"the function `{name}(m)`"
        given[Module, name] = _deprecated(old, new, fn, graph=True)
    for name, (instead, fn) in _STATE_METHODS.items():
        old, new = f"The method `State.{name}`", f"the function `{instead}`"
        given[State, name] = _deprecated(old, new, fn)
    for name in ("merge", "from_flat_path"):  # these were called on the class
        given[State, name] = staticmethod(given[State, name])
    for (cls, name), held in given.items():
        setattr(cls, name, held)


_give_methods()


def first_from(*args: Any, error_msg: str) -> Any:
    """The first argument that is not None.

    Args:
        *args: Candidates.
        error_msg: The message when all are None.
    """
    for arg in args:
        if arg is not None:
            return arg
    raise ValueError(error_msg)


pure = _deprecated("`pure`", "`as_pure`", as_pure)
vars_as = _deprecated("`vars_as`", "`with_vars`", with_vars)
variable_type_from_name = kinds.kind_of_name
variable_name_from_type = kinds.name_of_kind
register_variable_name = kinds.register_kind


class VarDefaults(NamedTuple):
    """The flags of new Variables that name none."""

    hijax: bool
    ref: bool


class var_defaults(ContextDecorator):
    """Reads, or sets, what new Variables are (`ref`).

    Without arguments the present flags are returned. With `ref` they are set, from now
    on, or for a `with` block, or while a decorated function runs.
    """

    _ref: bool
    _before: bool

    def __new__(cls, *, hijax: bool | None = None, ref: bool | None = None) -> Any:
        """Reads the flags, or makes the setting."""
        if hijax:
            raise ValueError("var_defaults: hijax Variables are not supported.")
        if ref is None:
            return VarDefaults(hijax=False, ref=_Defaults.ref)
        self = super().__new__(cls)
        self._ref = ref
        self._before = _Defaults.ref
        _Defaults.ref = ref
        return self

    def __enter__(self) -> None:
        _Defaults.ref = self._ref

    def __exit__(self, *exception: object) -> None:
        _Defaults.ref = self._before

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Decorates a function; the flags hold while it runs."""
        _Defaults.ref = self._before
        return super().__call__(fn)
