# SPDX-License-Identifier: Apache-2.0
"""Callees: what a capture is given to run, and the Modules that come along.

`capture`, `observe`, `edit` and `blame` all wrap a callable: a Module, a method of one,
a partial, or any function of Modules. `callee_of` finds the Module it belongs to,
`roots_of` gives the paths of all Modules of a call as people see them, `restored` puts
their Variables back if a capture fails, `keep_name` makes the wrapper look like what it
wraps.
"""

import functools
import inspect
import itertools
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jax

from treetap._capture.module_paths import Root, find_roots
from treetap._core.errors import CaptureError
from treetap._core.paths import Path
from treetap._core.trees.attributes import Node
from treetap._core.trees.pytree import variables_below
from treetap._core.variables.values import is_gone
from treetap._core.variables.variable import Snapshot


def callee_of(fn: Any) -> tuple[Any, list[Any]]:
    """The Module a callable belongs to, if any, and the arguments it brings along."""
    given: list[Any] = []
    while not isinstance(fn, Node | types.MethodType):
        if isinstance(fn, functools.partial):
            given = [*fn.args, *fn.keywords.values(), *given]
            fn = fn.func
        elif hasattr(fn, "__wrapped__"):
            fn = fn.__wrapped__  # as of `jax.vmap(model)`
        else:
            return None, given
    owner = fn.__self__ if isinstance(fn, types.MethodType) else fn
    return (owner if isinstance(owner, Node) else None), given


def roots_of(fn: Any, args: Any, kwargs: Any) -> tuple[Root, ...]:
    """The Modules of a call, by the paths that people see.

    One Module is the root itself; several are called by their arguments.
    """
    callee, given = callee_of(fn)
    roots = [] if callee is None else [Root((), callee)]
    found = [[*find_roots(value)] for value in (*given, *args, *kwargs.values())]
    if sum(map(bool, found)) + len(roots) <= 1:  # names, which take time, are not used
        return (*roots, *itertools.chain(*found))
    names: list[Path] = [(f"fixed{n}",) for n in range(len(given))]
    names += (name for name, _ in named_arguments(fn, args, kwargs))
    for name, held in zip(names, found):
        roots += [Root((*name, *x.path), x.node) for x in held if x.node is not callee]
    return tuple(roots)


def named_arguments(fn: Any, args: Any, kwargs: Any) -> Iterator[tuple[Path, Any]]:
    """The arguments of a call by name, or by position where they have none."""
    names: list[Path] = []
    with suppress(TypeError, ValueError):  # a function need not have a signature
        for one in inspect.signature(fn).parameters.values():
            if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD):
                names.append((one.name,))
            elif one.kind is one.VAR_POSITIONAL:
                names += ((one.name, n) for n in range(len(args)))
    names += ((n,) for n in range(len(names), len(args)))
    yield from zip(names, args)
    for key, value in kwargs.items():
        yield (key,), value


@contextmanager
def restored(fn: Any, args: Any, kwargs: Any) -> Iterator[None]:
    """A block after which, if a capture failed, the Variables are as they were.

    It fails when it refuses something, or when a device does, for want of memory.

    Where a program was given the buffers of the old values, the new ones stay.
    """
    callee, given = callee_of(fn)
    before = Snapshot(variables_below((callee, given, args, kwargs)))
    try:
        yield
    except (CaptureError, jax.errors.JaxRuntimeError):
        if not any(map(is_gone, jax.tree.leaves(before.boxes))):
            before.restore()
        raise


def refuse_uncallable(fn: Any, name: str) -> None:
    """Refuses what cannot be called, when it is wrapped."""
    if not callable(fn):
        raise TypeError(
            f"{name}: expected a Module, a method or a function, got {fn!r}, which "
            "cannot be called."
        )


def keep_name(wrapper: Any, fn: Any) -> Any:
    """A wrapper with the name and text of what it wraps."""
    if isinstance(fn, Node):
        functools.update_wrapper(wrapper, type(fn), ("__name__", "__doc__"), ())
        wrapper.__wrapped__ = fn  # another capture around it finds the Module
        return wrapper
    return functools.update_wrapper(wrapper, fn)
