# SPDX-License-Identifier: Apache-2.0
"""Whether somebody listens: all that a model knows of captures while it runs.

`listening` is a JAX user context, part of the key of every trace cache, whose value
says only which kinds of taps to emit. What follows from it is imported when needed.
"""

from typing import Any, NamedTuple

import jax


class Asked(NamedTuple):
    """Which taps are emitted: a value of the user context, so small and canonical.

    Attributes:
        kinds: Kinds of Variable that `sow` and `perturb` are heard for; None for all.
        outputs: The kind that method outputs are taken as, or None.
        taps: Whether the free function `tap` is heard.
    """

    kinds: frozenset[type] | None
    outputs: type | None
    taps: bool

    def hears(self, kind: type) -> bool:
        """Whether a kind of Variable is asked for."""
        return self.kinds is None or kind in self.kinds


listening: Any = jax.make_user_context(None)


def append(values: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    """How `sow` collects values unless told otherwise."""
    return (*values, value)
