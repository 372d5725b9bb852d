# SPDX-License-Identifier: Apache-2.0
"""Whether somebody listens: all that a model knows of captures while it runs.

`listening` is a JAX user context, part of the key of every trace cache, whose value
says only which kinds of taps to emit. What follows from it is imported when needed.
`around_methods` is another: who runs the methods of Modules, while somebody listens.

Whoever sets one of them opens two blocks: an outer one with the value that it has
already, and in it one with the new value. If a KeyboardInterrupt arrives just as the
inner block ends, before the value is put back, then the end of the outer block puts it
back.
"""

from typing import Any, NamedTuple

import jax

from treetap._core.variables.variable import Variable


class Listening(NamedTuple):
    """Which taps are emitted: a value of the user context, so small and canonical.

    Attributes:
        kinds: Kinds of Variable that `sow` and `perturb` are heard for; None for all.
            Taps of another sort have a class of their own, heard only if it is named.
        outputs: The kind that method outputs are taken as, or None.
        taps: Whether the free function `tap` is heard.
        edits: Whether values that flow on may be edited: 0 for none, 1 for all but the
            outputs of methods, 2 for those too.
        witness: Whether values are told in a second way, see `witness`: 0 for not, 1
            for values, 2 for gradients too.
        marks: Whether they are told in the first way.
    """

    kinds: frozenset[type] | None
    outputs: type | None
    taps: bool
    edits: int = 0
    witness: int = 0
    marks: bool = True

    def hears(self, kind: type) -> bool:
        """Whether a kind of Variable, or another sort of tap, is asked for."""
        if self.kinds is None:
            return issubclass(kind, Variable)
        return kind in self.kinds


listening: Any = jax.make_user_context(None)

# None, or a function of (name, function, Module, args, kwargs) that runs a method of a
# Module in its scope: one that a file defines, so that it is the same for equal traces.
around_methods: Any = jax.make_user_context(None)


def append(values: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    """How `sow` collects values unless told otherwise."""
    return (*values, value)
