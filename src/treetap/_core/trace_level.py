# SPDX-License-Identifier: Apache-2.0
"""Trace levels: which JAX trace an object belongs to.

Every Variable and every Pytree remembers the trace it was made in, and may be changed
only there: a write from another level would either leak a tracer or be lost. The token
of a level is a weak reference to JAX's current trace: the same object for the same
trace, and it keeps nothing alive.
"""

from contextvars import ContextVar
from typing import Any
from weakref import ref

from jax.core import Trace, eval_context  # pyright: ignore[reportAttributeAccessIssue] - public, not in the stubs
from jax.extend.core import find_top_trace

from treetap._core.errors import TraceContextError

TraceState = Any  # compared with `is`


class Through(Trace):
    """A trace that looks at operations and hands them on: it makes no level of its own.

    A model that marks a value at the level of such a trace tells it so directly, by
    `hear`, instead of going through JAX.

    Attributes:
        parent_trace: The trace that does the work.
        is_outermost: Whether nobody further out listens.
    """

    parent_trace: Any
    is_outermost: bool

    def __init__(self, parent: Any):
        super().__init__()
        self.parent_trace = parent
        # JAX asks it whether an operation that is an object, with rules of its own for
        # derivatives and mappings, has to be taken apart before it is handed over.
        self.requires_low = getattr(parent, "requires_low", True)

    def hear(self, label: Any, leaves: list[Any]) -> list[Any]:
        """Does at once what a mark of these leads to; gives the values that flow on."""
        raise NotImplementedError


with eval_context():  # the library may be imported under a trace
    _EAGERLY = find_top_trace(None)  # JAX has one, and keeps it
    EAGER: TraceState = ref(_EAGERLY)


def current_trace() -> TraceState:
    """Returns the token of the current trace level: of the trace that does the work."""
    trace = find_top_trace(None)
    if trace is _EAGERLY:
        return EAGER
    while isinstance(trace, Through):
        trace = trace.parent_trace
    return ref(trace)


def is_eager() -> bool:
    """Whether operations run at once instead of being traced."""
    return current_trace() is EAGER


def is_foreign(state: TraceState) -> bool:
    """Whether an object that belongs to `state` must not be changed now."""
    return current_trace() is not state


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


# Attributes set in the function that is being traced in a way that no transform is to
# complain of (by `train`, `eval`, `set_attributes`, or `sow` outside a capture): by
# object and name.
set_on_purpose: ContextVar[set[tuple[int, Any]] | None] = ContextVar(
    "set_on_purpose", default=None
)
