# SPDX-License-Identifier: Apache-2.0
"""Hoisting: taps that are the same in all iterations of a loop stay in it.

When JAX differentiates a `scan`, it computes what is the same in all iterations once,
before the loop. A tap among it would lose the loop's axis and the scopes around.

JAX finds out what that is by partial evaluation of the loop's body: what an operation
needs is *known*, or depends on the iteration. So an operation stays if it treats what
it is given as not known, while JAX hoists. That is what taps do here, and what holds
some: `cond`, loops, `checkpoint` and operations that are objects by their rule for
partial evaluation; functions with a derivative rule of their own as they are bound,
since JAX has no such rule for them.

Before JAX 0.12 a `custom_jvp` that is not known is taken for its function, and the rule
is lost, with which somebody further out may differentiate. And a function without
arguments has nothing to depend on. Both are refused. So is whatever should leave its
loop in spite of all this: its taps are bound again while JAX hoists, inside an
operation that was known.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.extend.core.primitives import (
    cond_p,
    custom_jvp_call_p,
    custom_vjp_call_p,
    remat_p,
    scan_p,
    while_p,
)
from jax.interpreters import partial_eval as pe

from treetap._capture.listening import listening
from treetap._capture.marks import Label, tap_p
from treetap._capture.walk import jax_compat
from treetap._capture.walk.jax_compat import body_of
from treetap._capture.walk.survey import taps_in
from treetap._capture.walk.witness import witness_p
from treetap._core.errors import CaptureError


def _unknown(trace: Any, values: Any) -> tuple[Any, ...]:
    """Values as ones that partial evaluation does not know."""
    return tuple(trace.instantiate_const(trace.to_jaxpr_tracer(x)) for x in values)


def _stay(primitive: Primitive, trace: Any, *values: Any, **params: Any) -> Any:
    """Partial evaluation of a tap: known if its operands are, but in its loop."""
    if jax_compat.is_hoisting():
        values = _unknown(trace, values)
    return trace.default_process_primitive(primitive, values, params)


def _stay_whole(rule: Any, trace: Any, *values: Any, **params: Any) -> Any:
    """The same of an operation that holds jaxprs, if there are taps in them."""
    held = jax_compat.bodies_in(params)
    if jax_compat.is_hoisting() and any(_tap_in(body.jaxpr) for body in held):
        values = _unknown(trace, values)
    return rule(trace, *values, **params)


def _tap_in(jaxpr: Any) -> str:
    """The name of a tap in a jaxpr; empty if there is none."""
    names = [spot.name for spot in taps_in(jaxpr).spots]
    return names[0] if names else "a witness" * jax_compat.holds(jaxpr, witness_p)


def _bind_with_rule(bind: Callable[..., Any], *values: Any, **params: Any) -> Any:
    """The same of a function with a derivative rule of its own, as it is bound."""
    trace: Any = listening.value and jax_compat.sorting_trace()
    if trace is None or not jax_compat.is_hoisting():
        return bind(*values, **params)
    if all(trace.to_jaxpr_tracer(x).is_known() for x in values):
        name = _tap_in(_body_of_call(params["subfuns"][0], values))
        if name and not (values and jax_compat.keeps_rules(bind)):
            refuse_hoisted(name)
        values = _unknown(trace, values) if name else values
    return bind(*values, **params)


def _body_of_call(fun: Any, values: Any) -> Any:
    avals = [jax.typeof(value) for value in values]
    return body_of(jax_compat.traced(fun.call_wrapped, avals)).jaxpr


def _bind_again(tap: Any, *values: Any, label: Label, **params: Any) -> list[Any]:
    """What JAX calls to bind a tap that is in a jaxpr.

    A new tap is bound by `marks.bind_new`: it is in no loop that was traced before.
    """
    if jax_compat.is_hoisted():
        refuse_hoisted(label.name)
    return Primitive.bind(tap, *values, label=label, **params)


def refuse_hoisted(name: str) -> None:
    """Refuses a tap that leaves its loop."""
    raise CaptureError(
        f"The tap {name!r} is the same in all iterations of a loop that is "
        "differentiated, in a function with its own rule for derivatives. JAX computes "
        "it once, before the loop, so it cannot be told where it belongs. Tap the "
        "function's result instead, or call it before the loop."
    )


def register() -> None:
    """Hands these rules to JAX."""
    rules = pe.custom_partial_eval_rules
    for primitive in (tap_p, witness_p):
        rules[primitive] = functools.partial(_stay, primitive)
    wholes = {
        primitive: rules[primitive] for primitive in (cond_p, scan_p, while_p, remat_p)
    }
    for primitive in jax_compat.primitives_of_objects():
        wholes[primitive] = _default(primitive)
    for primitive, rule in wholes.items():
        rules[primitive] = functools.partial(_stay_whole, rule)
    for primitive in (custom_jvp_call_p, custom_vjp_call_p):
        primitive.bind = functools.partial(_bind_with_rule, primitive.bind)
    tap_p.bind = functools.partial(_bind_again, tap_p)


def _default(primitive: Primitive) -> Callable[..., Any]:
    def rule(trace: Any, *values: Any, **params: Any) -> Any:
        return trace.default_process_primitive(primitive, values, params)

    return rule
