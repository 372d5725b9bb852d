# SPDX-License-Identifier: Apache-2.0
"""Names that NNX programs still use and NNX has deprecated, each with its warning.

Importing this module gives the classes their deprecated methods; the functions are
exported by `treetap.nnx` only.
"""

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from treetap._core.trees import state as _states
from treetap._core.trees.apply import call
from treetap._core.trees.copies import as_pure
from treetap._core.trees.graphdef import GraphDef
from treetap._core.trees.state import State
from treetap._core.trees.update import with_vars
from treetap._core.variables import kinds
from treetap._core.variables.metadata import MISSING
from treetap._core.variables.variable import Variable, _Defaults
from treetap._modules.module import Module, iter_children, iter_modules


def _warn(old: str, new: str, depth: int = 3) -> None:
    warnings.warn(f"{old} is deprecated; use {new}.", DeprecationWarning, depth)


# Variable.


def _value_property(name: str, get: str, put: str, instead: str) -> property:
    def read(self: Variable[Any]) -> Any:
        _warn(f"`Variable.{name}`", instead)
        return getattr(self, get)()

    def write(self: Variable[Any], value: Any) -> None:
        _warn(f"`Variable.{name} = x`", f"`v[...] = x` or `v.{put}(x)`", 4)
        getattr(self, put)(value)

    return property(read, write, doc=f"Deprecated: use {instead}.")


Variable.value = _value_property(  # pyright: ignore[reportAttributeAccessIssue] - deprecated names are not typed
    "value", "get_value", "set_value", "`v[...]` or `v.get_value()`"
)
Variable.raw_value = _value_property(  # pyright: ignore[reportAttributeAccessIssue] - deprecated names are not typed
    "raw_value", "get_raw_value", "set_raw_value", "`v.get_raw_value()`"
)


# Module.


def _module_method(name: str, fn: Callable[..., Iterator[Any]]) -> Callable[..., Any]:
    def method(self: Module) -> Iterator[Any]:
        """Deprecated: use the function of the same name."""
        _warn(f"The method `m.{name}()`", f"the function `{name}(m)`")
        yield from fn(self, graph=True)

    method.__name__ = name
    return method


Module.iter_modules = _module_method("iter_modules", iter_modules)  # pyright: ignore[reportAttributeAccessIssue] - deprecated names are not typed
Module.iter_children = _module_method("iter_children", iter_children)  # pyright: ignore[reportAttributeAccessIssue] - deprecated names are not typed


# GraphDef.


def _apply(self: GraphDef, state: Any, *states: Any) -> Any:
    """A proxy that calls methods on the merged object; see `call`."""
    return call((self, state, *states))


GraphDef.apply = _apply  # pyright: ignore[reportAttributeAccessIssue] - the older spelling of `call`


# State.


def _state_method(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def method(self: State, *args: Any, **kwargs: Any) -> Any:
        _warn(f"The method `State.{name}`", f"the function `{fn.__name__}`")
        return fn(self, *args, **kwargs)

    return method


def _map_state(state: State, fn: Callable[..., Any]) -> State:
    """A State of `fn(path, value)` for every value."""
    return _states.map_state(fn, state)


_map_state.__name__ = "map_state"

for _name, _fn in {
    "map": _map_state,
    "flat_state": _states.to_flat_state,
    "to_pure_dict": _states.to_pure_dict,
    "replace_by_pure_dict": _states.replace_by_pure_dict,
    "split": _states.split_state,
    "filter": _states.filter_state,
    "__sub__": _states.diff_state,
    "merge": _states.merge_state,
    "from_flat_path": _states.from_flat_state,
}.items():
    _method = _state_method(_name, _fn)
    # These two were called on the class.
    _static = _name in ("merge", "from_flat_path")
    setattr(State, _name, staticmethod(_method) if _static else _method)


# Functions.


def first_from(*args: Any, error_msg: str) -> Any:
    """Deprecated: the first argument that is not None.

    Args:
        *args: Candidates.
        error_msg: The message when all are None.
    """
    _warn("`first_from`", "an explicit `if x is None`")
    for arg in args:
        if arg is not None:
            return arg
    raise ValueError(error_msg)


def pure(tree: Any) -> Any:
    """Deprecated: use `as_pure`."""
    _warn("`pure`", "`as_pure`")
    return as_pure(tree)


def vars_as(node: Any, /, **options: Any) -> Any:
    """Deprecated: use `with_vars`."""
    _warn("`vars_as`", "`with_vars`")
    return with_vars(node, **options)


def variable_type_from_name(
    name: str, /, *, base: type[Variable[Any]] = Variable, allow_register: bool = False
) -> type[Variable[Any]]:
    """Deprecated: the kind registered under a collection name.

    Args:
        name: The collection's name.
        base: What a newly made kind derives from.
        allow_register: Make and register a kind when the name is new.
    """
    _warn("`variable_type_from_name`", "the class itself")
    return kinds.kind_of_name(name, base=base, allow_register=allow_register)


def variable_name_from_type(
    typ: type[Variable[Any]], /, *, allow_register: bool = False
) -> str:
    """Deprecated: the collection name of a kind.

    Args:
        typ: The kind.
        allow_register: Register it under its own name when it has none.
    """
    _warn("`variable_name_from_type`", "the class itself")
    return kinds.name_of_kind(typ, allow_register=allow_register)


def register_variable_name(
    name: str, typ: Any = MISSING, *, overwrite: bool = False
) -> Any:
    """Deprecated: registers a kind under a collection name; also a decorator.

    Args:
        name: The collection's name.
        typ: The kind; without it, a decorator.
        overwrite: Take the name from the kind that has it.
    """
    _warn("`register_variable_name`", "the class itself")
    return kinds.register_kind(name, typ, overwrite=overwrite)


class VarDefaults(NamedTuple):
    """The flags of new Variables that name none."""

    hijax: bool
    ref: bool


class var_defaults:
    """Deprecated: reads, or sets, what new Variables are (`ref`).

    Without arguments the present flags are returned. With `ref` they are set, from now
    on, or for a `with` block, or while a decorated function runs.
    """

    _ref: bool
    _before: bool

    def __new__(cls, *, hijax: bool | None = None, ref: bool | None = None) -> Any:
        """Reads the flags, or makes the setting."""
        _warn("`var_defaults`", "the argument `ref=` of a Variable")
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

        @functools.wraps(fn)
        def call_with(*args: Any, **kwargs: Any) -> Any:
            with self:
                return fn(*args, **kwargs)

        return call_with
