# SPDX-License-Identifier: Apache-2.0
"""Methods of Modules run under the name their parent gave the Module.

When a Module class is made, each public method and `__call__` is wrapped once. Under a
trace the wrapper opens `jax.named_scope` with the key under which the parent holds the
Module, so profiles and compiler dumps show `blocks/3/attn` instead of a flat list of
operations. Eagerly there is nothing to name, and the wrapper only calls the method.
While a capture is open, the scope says where the Module is, and the result is marked.
"""

import functools
import types
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import jax
from jax.extend import source_info_util

from treetap._capture.listening import around_methods, listening
from treetap._core.trace_level import is_eager

# The frame of the wrapper is not where the user's operations come from.
source_info_util.register_exclusion(__file__)

_wrapped: "WeakSet[Callable[..., Any]]" = WeakSet()
method_names: set[str] = set()  # of all Modules there are


def is_method(name: str, value: Any) -> bool:
    """Whether an entry of a class body is a public method, decorated or not."""
    if name != "__call__" and name.startswith("_"):
        return False
    if isinstance(value, staticmethod | classmethod | property | type):
        return False
    # Functions and jitted functions bind to the instance; other callables do not.
    return callable(value) and hasattr(type(value), "__get__")


def is_wrapped(fn: Any) -> bool:
    """Whether a function is a method that runs in the scope of its Module."""
    return isinstance(fn, types.FunctionType) and fn in _wrapped


def wrap_method(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method so that it runs in the scope of its Module."""

    @functools.wraps(fn)
    def method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return run_method(method, name, fn, self, args, kwargs)

    if not isinstance(fn, types.FunctionType):  # a jitted function offers `lower`, ...
        for public in dir(fn):
            if public[0] != "_":
                setattr(method, public, getattr(fn, public))
    _wrapped.add(method)
    return method


def run_method(  # noqa: PLR0917 - on the way of every call
    method: Any, name: str, fn: Any, self: Any, args: Any, kwargs: Any
) -> Any:
    """Runs a method in the scope of its Module, and marks its result.

    Apart from the wrapper, so that a class pickled by value does not take along what is
    used here.
    """
    asked = listening.value
    # If a subclass overrides the method, this call came through `super()`, and the
    # scope is open already.
    if (asked is None and is_eager()) or getattr(type(self), name) is not method:
        return fn(self, *args, **kwargs)
    if asked is None:
        with jax.named_scope(scope_name(self)):
            return fn(self, *args, **kwargs)
    inside, output = _for_listeners()
    with inside(self):
        around = around_methods.value
        if around is None:
            out = fn(self, *args, **kwargs)
        else:
            out = around(name, fn, self, args, kwargs)
        if asked.outputs is None and asked.edits < 2:
            return out
        return output(self, name, out)


@functools.cache
def _for_listeners() -> tuple[Any, Any]:
    """What is imported only if somebody listens."""
    from treetap._capture import emit, module_paths

    return module_paths.inside, emit.output


def scope_name(module: Any) -> str:
    """What the parent calls a Module, else the name of its class."""
    key = module._pytree__place[1]
    if key is None:
        return type(module).__name__
    return "/".join(map(str, key)) if isinstance(key, tuple) else str(key)


def wrap_methods(cls: type, own: set[str]) -> None:
    """Wraps the methods a class body defines, leaving the names in `own` alone."""
    for name, value in list(vars(cls).items()):
        if name not in own and is_method(name, value) and value not in _wrapped:
            type.__setattr__(cls, name, wrap_method(name, value))
            method_names.add(name)
