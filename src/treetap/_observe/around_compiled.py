# SPDX-License-Identifier: Apache-2.0
"""Around compiled functions: one program, where a capture would enter another one.

`observe(jax.jit(f))` runs at its own level: it takes the compiled function apart at
each call, and makes a Record of what comes out, site by site in Python. If nothing is
traced around it, `jit(observe(f))` gives the same, and a call of that costs no more
than a call of JAX. So here the whole of it is compiled, and the program is kept.

Python runs in both at most once for each structure of the arguments, as for any
compiled function. What must stay as it is goes the long way: arguments that `jax.jit`
was told are static or to be donated, what is called while something is traced, and what
a capture can only come to where the function is run and not traced.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax

from treetap._capture.listening import listening
from treetap._core.bounded_cache import BoundedCache
from treetap._core.settings import Mode
from treetap._core.trace_level import is_eager
from treetap._observe.closures import Opened
from treetap._transforms.lift.compiled import Jit
from treetap._transforms.lift.lift import Lift


class _LongWay(Exception):
    """A program cannot stand for the call."""


MAX_KEPT = 64
_programs: BoundedCache[Any, Any] = BoundedCache(MAX_KEPT)
_PLAIN_JIT = type(jax.jit(len))
# Options of `jit` that are about arguments. Others are those of the function inside.
_OF_ARGUMENTS = "static_argnums", "static_argnames", "donate_argnums", "donate_argnames"
_TO_KEEP = "device", "backend", "pack"


def around_compiled(
    what: str, fn: Any, run: Callable[..., Any], select: Any, *more: Any
) -> Callable[..., Any]:
    """A function with a Record beside the result of another, compiled if that one is.

    Args:
        what: The public function at work.
        fn: The function that it is around.
        run: What gives the result and the Record, from the same arguments.
        select: The sites it is about, as they were given.
        *more: What else it depends on; hashable.
    """
    if not isinstance(fn, Jit | _PLAIN_JIT):
        return run
    is_fixed = _is_fixed(select)
    kept: Any = None

    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal kept
        if listening.value is not None or not is_eager() or _is_off():
            return run(*args, **kwargs)
        program, key = kept, None
        if program is None:
            key = what, fn, Opened((select,)).key, more
            program = _programs.get(key)
            if program is None:
                made = _program(what, fn, run, args, kwargs)
                program = _programs.add(key, made)
        try:
            out = program(*args, **kwargs)
        except _LongWay:
            if key is not None:
                _programs.discard(key)
                program = _programs.add(key, run)
            out = run(*args, **kwargs)
        kept = program if is_fixed else None
        return out

    return called


def _is_off() -> bool:
    """Whether compiling is turned off."""
    return getattr(jax.config, "jax_disable_jit", False)


def _is_fixed(select: Any) -> bool:
    """Whether what is selected cannot be something else in the next call."""
    items = select if isinstance(select, list | tuple) else [select]
    return all(x is None or isinstance(x, str | type | re.Pattern) for x in items)


def _program(what: str, fn: Any, run: Any, args: Any, kwargs: Any) -> Any:
    """The program of such calls; the function itself if it has options of its own."""

    @functools.wraps(fn)
    def named(*args: Any, **kwargs: Any) -> Any:  # new: JAX keeps what it traced of one
        out, record = run(*args, **kwargs)
        if record.unreachable:
            raise _LongWay
        return out, record

    if isinstance(fn, Jit):
        if any(fn.options.get(name) for name in _TO_KEEP) or fn._fixed:
            return run
        given = fn.options.items()
        options: Any = {name: x for name, x in given if name in _OF_ARGUMENTS}
        mode = fn.lift.mode if fn.lift.mode is Mode.UPDATES else Mode.GRAPH
        return Jit(named, Lift(what, mode), options)
    compiled = jax.jit(named)
    try:
        eqns = compiled.trace(*args, **kwargs).jaxpr.eqns
    except (TypeError, ValueError, _LongWay):  # arguments that are static, for one
        return run
    if any(any(eqn.params.get("donated_invars", ())) for eqn in eqns):
        return run

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except (TypeError, ValueError):  # an argument may be static in this call
            return run(*args, **kwargs)

    return call
