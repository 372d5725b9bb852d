# SPDX-License-Identifier: Apache-2.0
"""jit_partial: a compiled function whose first arguments are fixed once.

The objects are taken apart when the function is made, so that a call need not look at
their structure again; their Variables stay the caller's.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from treetap._compiling import Jit, Stage
from treetap._errors import StructureError
from treetap._lift import Inputs, refuse_bound_method, resolve_mode
from treetap._regrowing import regrow
from treetap._sharing import places
from treetap._trees import show_path
from treetap._variables import Variable


class JitPartial:
    """A compiled function whose first arguments are fixed; made by `jit_partial`."""

    def __init__(self, jitted: Jit[..., Any], fixed: tuple[Any, ...]):
        functools.update_wrapper(self, jitted.fun)
        self.fun = jitted.fun
        self._jit = jitted
        # The structure is frozen here: new objects around the caller's Variables.
        inputs = Inputs({"args": fixed, "kwargs": {}}, jitted.graph, "jit_partial")
        tree, _ = regrow(inputs.definition, inputs.leaves)
        self._fixed: tuple[Any, ...] = tree["args"]

    def _arguments(self, args: Any, kwargs: Any) -> Any:
        """All arguments; those given now may hold no Variables."""
        for path, value, _ in places({"args": args, "kwargs": kwargs}):
            if isinstance(value, Variable):
                raise StructureError(
                    f"jit_partial: Found Variable in non-partial arguments: the "
                    f"{type(value).__name__} at {show_path(path)}. Fix it when the "
                    "function is made, or use `jit`."
                )
        return (*self._fixed, *args), kwargs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the compiled function and writes changed Variables back."""
        args, kwargs = self._arguments(args, kwargs)
        return self._jit(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> "PartialStage":
        """JAX's lowered stage."""
        args, kwargs = self._arguments(args, kwargs)
        return PartialStage(self, self._jit.lower(*args, **kwargs))

    def trace(self, *args: Any, **kwargs: Any) -> "PartialStage":
        """JAX's traced stage."""
        args, kwargs = self._arguments(args, kwargs)
        return PartialStage(self, self._jit.trace(*args, **kwargs))

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The result with abstract leaves; nothing is changed."""
        args, kwargs = self._arguments(args, kwargs)
        return self._jit.eval_shape(*args, **kwargs)


class PartialStage:
    """A stage of a `JitPartial`; see `Stage`."""

    def __init__(self, owner: JitPartial, stage: Stage):
        self._owner = owner
        self._stage = stage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def lower(self, **options: Any) -> "PartialStage":
        """The lowered stage of a traced one."""
        return PartialStage(self._owner, self._stage.lower(**options))

    def compile(self, compiler_options: Any = None) -> "PartialStage":
        """The compiled stage of a lowered one."""
        return PartialStage(self._owner, self._stage.compile(compiler_options))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a compiled stage and writes changed Variables back."""
        args, kwargs = self._owner._arguments(args, kwargs)
        return self._stage(*args, **kwargs)


def jit_partial(
    fun: Callable[..., Any],
    *partial_args: Any,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    keep_unused: bool = False,
    inline: bool = False,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> JitPartial:
    """Compiles a function with its first arguments fixed.

    The structure of those arguments, and which Variables they hold, are frozen; values
    may change. Arguments are numbered by the signature of `fun`. The other arguments
    are given at each call and may hold no Variables.

    Args:
        fun: The function.
        *partial_args: Its first arguments.
        in_shardings: As for `treetap.jit`; one entry for each argument.
        out_shardings: As for `treetap.jit`.
        static_argnums: As for `treetap.jit`.
        static_argnames: As for `treetap.jit`.
        donate_argnums: As for `treetap.jit`.
        donate_argnames: As for `treetap.jit`.
        keep_unused: As for `jax.jit`.
        inline: As for `jax.jit`.
        graph: Allow shared references in the fixed arguments.
        graph_updates: Only False is supported.
    """
    refuse_bound_method(fun, "jit_partial")
    options = {
        "name": "jit_partial",
        "in_shardings": in_shardings,
        "out_shardings": out_shardings,
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "donate_argnums": donate_argnums,
        "donate_argnames": donate_argnames,
        "keep_unused": keep_unused,
        "inline": inline,
    }
    mode = resolve_mode(graph, graph_updates, "jit_partial")
    return JitPartial(Jit(fun, mode, options), partial_args)
