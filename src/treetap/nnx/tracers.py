# SPDX-License-Identifier: Apache-2.0
"""tracers: at which level of JAX's transforms the program is."""

from typing import Any

from treetap._core.trace_level import current_trace


def current_jax_trace() -> Any:
    """The present level; equal at the same one."""
    return current_trace()


class TraceState:
    """Remembers a level: the one that it was made at, unless another is given."""

    def __init__(self, jax_trace: Any = None):
        self.jax_trace = current_trace() if jax_trace is None else jax_trace

    def is_valid(self) -> bool:
        """Whether that level is the present one."""
        return self.jax_trace == current_trace()

    def __repr__(self) -> str:
        return f"TraceState({self.jax_trace!r})"
