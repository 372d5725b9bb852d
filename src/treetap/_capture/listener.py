# SPDX-License-Identifier: Apache-2.0
"""Listening: the trace under which a function runs with ears open.

`listen` runs a function of a `Session` under a `Listener`: a trace that sees every
operation at the level of the capture, hands it on and stops at taps; eager code stays
eager. Where an operation holds a jaxpr with taps, the walk runs it by a plan that the
`Session` makes, which keeps what comes out.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import find_top_trace, set_current_trace
from jax.extend.source_info_util import current_name_stack

from treetap._capture.calls import plan_of
from treetap._capture.listening import Listening, listening
from treetap._capture.marks import Label, linear_p
from treetap._capture.module_paths import rooted
from treetap._capture.name_stacks import scopes_in
from treetap._capture.session import Session
from treetap._capture.walk import batched_branches, hoisting, jax_compat
from treetap._capture.walk.hoisting import refuse_hoisted
from treetap._capture.walk.operations import Step, operation_of
from treetap._capture.walk.plans import Part
from treetap._capture.walk.run import Walk
from treetap._capture.walk.self_check import check_newer_jax
from treetap._capture.walk.spots import MARKS, spot_of
from treetap._capture.walk.survey import (
    handed_on,
    is_spotless,
    refuse_copies,
    spots_below,
    taps_in,
)
from treetap._core.trace_level import Through

ALL_MARKS = (*MARKS, linear_p)

batched_branches.register()
hoisting.register()  # both before the first mark goes through a transform


def listen(session: Session, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a function and listens.

    The trace and who listens are entered twice, first as they are: an interrupt may
    come where the inner ones end, before they have put back what was, and then the
    outer ones do. So the trace is not taken away with `take_current_trace` meanwhile:
    an interrupt at its end would leave no trace at all.
    """
    check_newer_jax(jax.__version_info__)
    outer, parent = listening.value, find_top_trace(None)
    session.keep = outer is not None
    session.depth = len(scopes_in(current_name_stack()))
    asked = session.asked if outer is None else _united(session.asked, outer)
    with set_current_trace(parent), set_current_trace(Listener(parent, session)):
        out = _marked(session, asked, fn, args, kwargs)
        session.left(out)
        return out


def leave_marked(
    session: Session, fn: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Runs a function that is being traced, and leaves its marks in the program.

    For one who reads the jaxpr: marks are in it also where no walk can go, as in the
    condition of a `while`. Who listens further out hears nothing of them.
    """
    return _marked(session, session.asked, fn, args, kwargs)


def _marked(session: Session, asked: Listening, fn: Any, args: Any, kwargs: Any) -> Any:
    """Runs a function that emits its marks, in an open capture."""
    again = listening(listening.value)  # twice: see `listening`
    with again, rooted(session.roots) as session.known, listening(asked):
        return fn(*args, **kwargs)


def _united(first: Listening, second: Listening) -> Listening:
    """What is emitted when two captures listen, one inside the other."""
    kinds = None
    if first.kinds is not None and second.kinds is not None:
        kinds = first.kinds | second.kinds
    return Listening(
        kinds,
        first.outputs or second.outputs,
        first.taps or second.taps,
        max(first.edits, second.edits),
        max(first.witness, second.witness),
    )


class Listener(Through):
    """The trace of a session; see the module's text."""

    def __init__(self, parent: Any, session: Session):
        super().__init__(parent)
        self.session = session
        self.walk = Walk(session.keep)
        self.is_outermost = not session.keep

    def hear(self, label: Label, leaves: list[Any]) -> list[Any]:
        """Does at once what a mark of these leads to."""
        return self.session.heard_here(label, leaves)

    def invalidate(self) -> None:
        """Nothing is held that could go stale."""

    def stage_value(self, val: Any) -> Any:
        """Makes a value one of the trace that does the work."""
        with set_current_trace(self.parent_trace):
            return self.parent_trace.stage_value(val)

    def process_primitive(self, primitive: Any, tracers: Any, params: Any, /) -> Any:
        """Hands an operation on, or stops at it."""
        session, parent = self.session, self.parent_trace
        if "donated_invars" in params:
            params = session.sparing(params, tracers)
        is_ours = primitive in ALL_MARKS or session.are_tickets(tracers)
        if not is_ours and is_spotless(primitive, params):
            # Nearly all are such. As JAX calls a trace: with no trace set meanwhile.
            return parent.process_primitive(primitive, tracers, params)
        values = list(tracers)
        with set_current_trace(parent):
            if primitive in MARKS:
                return self._tap(primitive, params, values)
            if primitive is linear_p:
                session.is_forward = True
                if not session.keep:
                    return values[:-1]
            inner, seen = spots_below(primitive, params)
            refuse_copies(current_name_stack(), seen)
            if inner:
                outs = self._enter(primitive, params, values, inner, seen)
                return outs if primitive.multiple_results else outs[0]
            # Those that cannot be come to: the `Session` says what becomes of it.
            session.planned(seen, values)
            out = parent.process_primitive(primitive, values, params)
            if not session.are_tickets(values):
                return out
            outs = list(out) if primitive.multiple_results else [out]
            pairs = handed_on(primitive, params, len(values), outs)
            session.follow(pairs, values, outs)
            return outs if primitive.multiple_results else outs[0]

    def _tap(self, primitive: Any, params: Any, values: list[Any]) -> list[Any]:
        """Runs a mark that came by way of JAX."""
        spot = spot_of(primitive, params, values)._replace(outer=0)
        refuse_copies(current_name_stack(), [spot])
        if jax_compat.is_hoisting():
            refuse_hoisted(spot.name)
        planned = self.session.planned([spot], values)
        (choice,), (fed,) = plan_of(planned)
        step = Step(primitive, params, values, self.walk)
        outs, found = self.walk.at_spot(step, choice, spot, fed)
        self.session.settle(planned, [found], outs, values)
        return outs

    def _enter(
        self, primitive: Any, params: Any, values: Any, inner: list[Part], seen: Any
    ) -> list[Any]:
        """Runs an operation with taps inside, and keeps what comes out."""
        session = self.session
        if jax_compat.is_hoisting():
            refuse_hoisted(seen[0].name)
        if any(taps_in(one.body.jaxpr).is_forward for one in inner):
            session.is_forward = True
        planned = session.planned(seen, values, "donated_invars" in params)
        parts = [one.by(*plan_of(planned)) for one in inner]
        step = Step(primitive, params, values, self.walk)
        outs, found = operation_of(primitive, params).run(step, *parts)
        pairs = handed_on(primitive, params, len(values), outs)
        session.settle(planned, found, outs, values, pairs)
        return outs

    def process_custom_jvp_call(
        self, primitive: Any, /, *funs_and_values: Any, **options: Any
    ) -> Any:
        """Runs a function with a rule of its own, keeping the rule where it matters."""
        *funs, values = funs_and_values
        if not any(isinstance(value, Tracer) for value in values):
            # Nothing outside can differentiate this: the function is all that counts.
            with set_current_trace(self):
                return funs[0].call_wrapped(*values)

        outs = self._bound(primitive, tuple(funs), values, options)
        jax_compat.settle_results(*funs[:2])
        return outs

    process_custom_vjp_call = process_custom_jvp_call

    def process_call(
        self, primitive: Any, fun: Any, tracers: Any, given: Any = (), /, **named: Any
    ) -> Any:
        """Runs a function that JAX hands over as a call, or on shards."""
        return self._bound(primitive, (fun,), tracers, {**dict(given), **named})

    process_shard_map = process_call

    def _bound(self, primitive: Any, funs: Any, values: Any, params: Any) -> Any:
        """Runs an operation of Python functions, whose jaxpr is made for that."""
        shapes: list[Any] = []  # of the result, without what is traced

        def bound(*values: Any) -> Any:
            out = primitive.bind(*values, subfuns=funs, **params)
            flat = jax_compat.flat_values(out)
            shapes.append(jax_compat.with_values(out, [None] * len(flat)))
            return flat

        with set_current_trace(self.parent_trace):
            made = jax_compat.traced(bound, [jax.typeof(value) for value in values])
            body = jax_compat.body_of(made)
            taps = taps_in(body.jaxpr)
            planned = self.session.planned(taps.spots, values)
            part = Part(body, taps.spots, *plan_of(planned))
            outs, found = self.walk.run(part, list(values))
            self.session.settle(planned, found, outs, values, taps.handed_on)
            return jax_compat.with_values(shapes[0], outs)
