# SPDX-License-Identifier: Apache-2.0
"""jit_partial and cached_partial: functions whose first arguments are fixed once.

The objects are taken apart when the function is made, so that a call need not look at
their structure again; their Variables stay the caller's.
"""

import functools
from collections.abc import Callable
from typing import Any, Unpack

from treetap._core.errors import StructureError
from treetap._core.settings import Mode
from treetap._core.trees.build import regrow
from treetap._core.trees.pytree import variables_below
from treetap._core.variables.variable import Snapshot
from treetap._transforms.lift.compiled import Jit, JitOptions
from treetap._transforms.lift.lift import Lift, Options, refuse_bound_method


def jit_partial(
    fun: Callable[..., Any], *partial_args: Any, **options: Unpack[JitOptions]
) -> Jit[..., Any]:
    """Compiles a function with its first arguments fixed.

    The structure of those arguments, and which Variables they hold, are frozen; values
    may change. Arguments are numbered by the signature of `fun`. The other arguments
    are given at each call and may hold no Variables.

    Args:
        fun: The function.
        *partial_args: Its first arguments.
        **options: As for `treetap.jit`, without graph updates; `in_shardings` has one
            entry for each argument.
    """
    refuse_bound_method(fun, "jit_partial")
    lift = Lift.of("jit_partial", options, JitOptions)
    if lift.mode is Mode.UPDATES:
        raise StructureError(
            "jit_partial: the structure of the fixed arguments is frozen, so there is "
            "no graph_updates=True. Pass `graph_updates=False`."
        )
    return Jit(fun, lift, options, partial_args)


def cached_partial(
    f: Callable[..., Any], *cached_args: Any, **options: Unpack[Options]
) -> Callable[..., Any]:
    """A transform with graph updates whose first arguments are fixed.

    It sees copies of the objects, around the caller's Variables; the same copies at
    each call. Their structure must be the same again when the function ends.

    Args:
        f: A function wrapped by a transform with graph updates.
        *cached_args: Its first arguments.
        **options: Only `graph=True` and `graph_updates=True`.
    """
    lift = Lift.of("cached_partial", options)
    if lift.mode is not Mode.UPDATES:
        raise StructureError(
            "cached_partial: it is for graph updates only. Use `jit_partial`, or say "
            "`graph=True, graph_updates=True`."
        )
    if getattr(f, "__treetap_mode__", None) is not Mode.UPDATES:
        name = getattr(f, "__name__", type(f).__name__)
        raise StructureError(
            f"cached_partial: {name} is not a function wrapped by a transform with "
            "graph updates. Wrap it first: `cached_partial(nnx.jit(f), ...)`."
        )
    given = lift.inputs(cached_args, {})
    fixed = regrow(given.definition, given.leaves)[0]["args"]
    inputs = lift.inputs(fixed, {})

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = Snapshot(variables_below(fixed))
        out = f(*fixed, *args, **kwargs)
        after = lift.inputs(fixed, {})
        if after.definition != inputs.definition:
            inputs.with_plain({})  # the objects are as they were
            before.restore()
            raise StructureError(
                "cached_partial: the structure of the fixed arguments changed from\n"
                f"{inputs.definition}\nto\n{after.definition}\nPass what changes its "
                "structure at each call."
            )
        return out

    vars(call)["func"] = f  # as a partial has it
    return call
