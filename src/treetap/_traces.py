# SPDX-License-Identifier: Apache-2.0
"""Trace levels: which JAX trace an object belongs to.

Every Variable and every Pytree remembers the trace it was made in, and may be changed
only there: a write from another level would either leak a tracer or be lost. JAX hands
out an opaque token for the current level; equal levels share one token here, so that a
thousand Variables do not carry a thousand of them.
"""

from typing import Any

import jax
from jax.extend.core import get_opaque_trace_state

from treetap._errors import TraceContextError

TraceState = Any  # JAX keeps the token's type to itself; it only promises `==`

with jax.ensure_compile_time_eval():  # the library may be imported under a trace
    EAGER: TraceState = get_opaque_trace_state()

_latest: TraceState = EAGER


def current_trace() -> TraceState:
    """Returns the token of the current trace level."""
    global _latest  # noqa: PLW0603 - any equal token will do, so a race is harmless
    state = get_opaque_trace_state()
    if state == EAGER:
        return EAGER
    if state != _latest:
        _latest = state
    return _latest


def is_eager() -> bool:
    """Whether operations run at once instead of being traced."""
    return get_opaque_trace_state() == EAGER


def is_foreign(state: TraceState) -> bool:
    """Whether an object that belongs to `state` must not be changed now."""
    return get_opaque_trace_state() != state


def refuse_foreign_variable(name: str) -> TraceContextError:
    """The error for a write into a Variable from another trace level."""
    return TraceContextError(
        f"Cannot mutate {name} from a different trace level: it was made outside the "
        "function that is being traced (or leaked out of one). Pass the object that "
        "holds it to the function as an argument and return what changed."
    )


def refuse_foreign_object(name: str) -> TraceContextError:
    """The error for a write to an object's attribute from another trace level."""
    return TraceContextError(
        f"Cannot mutate '{name}' from different trace level: it was made outside the "
        "function that is being traced (or leaked out of one). Pass it to the function "
        "as an argument."
    )
