# SPDX-License-Identifier: Apache-2.0
"""jit_partial: a compiled function whose first arguments are fixed once.

The objects are taken apart when the function is made, so that a call need not look at
their structure again; their Variables stay the caller's.
"""

from collections.abc import Callable
from typing import Any, Unpack

from treetap._changes import with_policy
from treetap._compiling import Jit, JitOptions
from treetap._errors import StructureError
from treetap._lift import Inputs, mode_of, refuse_bound_method
from treetap._regrowing import regrow
from treetap._settings import Mode
from treetap._sharing import places
from treetap._trees import show_path
from treetap._variables import Variable


class JitPartial(Jit[..., Any]):
    """A compiled function whose first arguments are fixed; made by `jit_partial`."""

    _name = "jit_partial"

    def __init__(self, fn: Any, mode: Mode, options: JitOptions, fixed: Any):
        super().__init__(fn, mode, options)
        # The structure is frozen here: new objects around the caller's Variables.
        inputs = Inputs({"args": fixed, "kwargs": {}}, mode, self._name)
        tree, _ = regrow(inputs.definition, inputs.leaves)
        self._fixed: tuple[Any, ...] = tree["args"]

    def _prepared(self, args: Any, kwargs: Any) -> Any:
        """All arguments; those given now may hold no Variables."""
        for path, value, _ in places({"args": args, "kwargs": kwargs}):
            if isinstance(value, Variable):
                raise StructureError(
                    f"jit_partial: Found Variable in non-partial arguments: the "
                    f"{type(value).__name__} at {show_path(path)}. Fix it when the "
                    "function is made, or use `jit`."
                )
        return super()._prepared((*self._fixed, *args), kwargs)


def jit_partial(
    fun: Callable[..., Any], *partial_args: Any, **options: Unpack[JitOptions]
) -> JitPartial:
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
    mode = mode_of(options)
    if mode is Mode.UPDATES:
        raise StructureError(
            "jit_partial: the structure of the fixed arguments is frozen, so there is "
            "no graph_updates=True. Pass `graph_updates=False`."
        )
    called = with_policy(fun, options.get("on_structure_change"))
    return JitPartial(called, mode, options, partial_args)
