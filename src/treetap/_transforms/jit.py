# SPDX-License-Identifier: Apache-2.0
"""jit: a function compiled once for each structure of its arguments.

What a compiled function does when it is called stands in `lift/compiled`; its options
stand there as well, for `jit_partial` takes the same.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar, Unpack

from treetap._core.variables.metadata import MISSING
from treetap._transforms.lift.compiled import Jit, JitOptions
from treetap._transforms.lift.lift import Lift, transform

P = ParamSpec("P")
R = TypeVar("R")


@transform
def jit(fun: Callable[P, R] = MISSING, **options: Unpack[JitOptions]) -> Jit[P, R]:
    """Compiles a function; Variables it changes in its arguments change outside.

    Args:
        fun: The function; without it, a decorator.
        in_shardings: A sharding for all, or one for each argument that is not static;
            a prefix of the arguments.
        out_shardings: As `in_shardings`, for the result.
        static_argnums: Arguments, by number, that are part of the program.
        static_argnames: The same, by name.
        donate_argnums: Arguments, by number, whose buffers may be reused: arrays, and
            Variables that are written, which end with new buffers. What is not written
            is kept.
        donate_argnames: The same, by name.
        keep_unused: As for `jax.jit`.
        device: As for `jax.jit`.
        backend: As for `jax.jit`.
        inline: As for `jax.jit`.
        pack: Let small Variables travel together between calls, in one buffer for each
            dtype: a call with hundreds of them takes a fraction of the time. A number
            says how many bytes are small; True stands for 4096.
        **options: `graph`: keep shared references in the arguments instead of refusing
            them. `graph_updates`: with `graph`, carry changes of structure out to the
            caller. `on_structure_change`: what to do when attributes change inside and
            that would be lost: `"error"`, `"warn"` or `"ignore"`; see
            `treetap.set_structure_policy`. Every transform takes these three.

    Examples:
        >>> import treetap as tt
        >>> @tt.jit
        ... def count(counter):
        ...     counter[...] += 1
        >>> counter = tt.Variable(0)
        >>> count(counter)
        >>> int(counter)
        1
    """
    return Jit(fun, Lift.of("jit", options, JitOptions), options)
