# SPDX-License-Identifier: Apache-2.0
"""Functions in pickles: JAX's own compiled ones, which pickle cannot find by itself.

`jax.nn.relu` is the attribute of many a model, and no plain function. Where an object
is pickled, it is replaced by its public name, and looked up again where it is read.
"""

import types
from importlib import import_module
from typing import Any, NamedTuple

_HOMES = ("jax.nn", "jax.numpy", "jax.lax")
# What pickle finds by itself, and what is no function at all.
_OTHERS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)


class Named(NamedTuple):
    """A public function of JAX."""

    module: str
    name: str


def by_name(value: Any) -> Any:
    """A function of JAX that is an object, by its public name; others as they are."""
    if not callable(value) or isinstance(value, _OTHERS):
        return value
    name = str(getattr(value, "__name__", ""))
    for home in _HOMES:
        if getattr(import_module(home), name, None) is value:
            return Named(home, name)
    return value


def found_by_name(value: Any) -> Any:
    """The function that a name stands for; other values as they are."""
    if type(value) is Named:
        return getattr(import_module(value.module), value.name)
    return value
