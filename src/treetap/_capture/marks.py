# SPDX-License-Identifier: Apache-2.0
"""Marks: identities that mark a value, emitted only while somebody listens.

Four primitives, each of them an identity on the values it is given:

- `tap_p` marks a value. It carries JAX's debug effect, so that no partial evaluation
  drops it, and none does it twice.
- `linear_p` is the derivative of a tap: a linear identity on the tangents. It is pure.
- `gradient_p` is the transpose of that: an identity on the cotangents.
- `again_p` stands for a tap whose value is computed again, under `jax.checkpoint`.

*Tickets.* A program that was differentiated has the tap of a value in one place and the
marks of its cotangents in another: in another equation, in another jaxpr (JAX splits a
function in two), and in the reverse order. What joins them is a value that flows from
one to the other. A tap gives, beside its values, a *ticket*: an integer whose number
means nothing. The marks that are made from the tap take it as their last operand. Since
it is an ordinary value, JAX carries it itself wherever the values go: as a residual
from the forward to the backward pass, through scans, mappings and checkpoints. So who
reads the program follows the ticket back to its tap (`survey` within a jaxpr, `Session`
from one operation to the next), and need not know what JAX did to it. A tap that is
dropped takes nothing along, and a call under `stop_gradient` has no mark with its
ticket: no order is relied upon.

Parameters say what the value is called (`label`), how often it was differentiated
(`order`) and how many axes of mappings it has in front (`rows`). Nobody listens unless
a capture is open: see `listening`.
"""

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

PLAIN_TAPS = ("tap", "scope", "checkpoint_name")  # heard where `tap` is
TICKET = np.zeros((), np.int32)


# The conditions of the branches that are being traced: see `guarded`.
_guards: ContextVar[tuple[Any, ...]] = ContextVar("guards", default=())


def guarded(branch: Callable[..., Any], taken: Any) -> Callable[..., Any]:
    """A branch whose taps say whether it was taken, also where both branches run.

    Under `vmap` a branch with a mapped condition runs for all rows; the condition, that
    the taps carry along, is then the mask of the rows that took it.
    """

    @functools.wraps(branch)
    def call(*args: Any, **kwargs: Any) -> Any:
        token = _guards.set((*_guards.get(), taken))
        try:
            return branch(*args, **kwargs)
        finally:
            _guards.reset(token)

    return call


def current_guards() -> list[Any]:
    """The conditions of the branches around."""
    return [jnp.asarray(guard) for guard in _guards.get()]


def bind_tap(label: "Label", values: Sequence[Any]) -> list[Any]:
    """Marks values, and the conditions they are under; gives the marked values."""
    guards = current_guards()
    out = tap_p.bind(*values, *guards, label=label, order=0, rows=0)
    return out[: len(values)]


class Label(NamedTuple):
    """What a tap says of its value.

    Attributes:
        name: Its name.
        kind: The kind of Variable it is stored as; None for a tap, and for what a
            method returns, which is stored as each capture asks.
        how: `"sow"`, `"perturb"`, `"tap"` or `"output"`; or one of `PLAIN_TAPS`.
        tree: The structure of the value.
        reduce: For `sow`, how to add a value to those before, and what to begin with.
        is_edit: Whether it marks a value that may be edited, see `edit_points`, and not
            one that is heard.
    """

    name: str
    kind: type | None
    how: str
    tree: Any
    reduce: Any = None
    is_edit: bool = False


def _primitive(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    return primitive


tap_p = _primitive("tap")
linear_p = _primitive("tap_linear")
gradient_p = _primitive("tap_gradient")
again_p = _primitive("tap_again")


@functools.cache
def _debug_effect() -> Any:
    """JAX's own effect of debugging, by the public way to it."""
    traced = jax.make_jaxpr(lambda: jax.debug.callback(lambda: None))()
    return next(iter(traced.effects))


def _tap_type(*avals: Any, **params: Any) -> Any:
    return [*avals, jax.typeof(TICKET)], {_debug_effect()}


def _with_ticket(*values: Any, **params: Any) -> list[Any]:
    return [*values, jnp.asarray(TICKET)]


def _without_ticket(*values: Any, **params: Any) -> list[Any]:
    return list(values[:-1])


tap_p.def_impl(_with_ticket)
tap_p.def_effectful_abstract_eval(_tap_type)
mlir.register_lowering(tap_p, mlir.lower_fun(_with_ticket, multiple_results=True))
for pure_p in (linear_p, gradient_p, again_p):
    pure_p.def_impl(_without_ticket)
    pure_p.def_abstract_eval(_without_ticket)
    lowering = mlir.lower_fun(_without_ticket, multiple_results=True)
    mlir.register_lowering(pure_p, lowering)


# Mappings: a mapped value has the axis in front, and `rows` counts such axes.


def _to_front(values: Any, dims: Any) -> tuple[list[Any], list[Any]]:
    """Values with the axis of a mapping in front, where they have it."""
    pairs = list(zip(values, dims))
    moved = [x if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in pairs]
    return moved, [None if dim is None else 0 for dim in dims]


def all_mapped(values: Any, dims: Any) -> tuple[list[Any], list[int]]:
    """Values that all have the axis of a mapping, in front."""
    sizes = [x.shape[dim] for x, dim in zip(values, dims) if dim is not None]
    moved = [
        jnp.broadcast_to(value, (sizes[0], *value.shape))
        if dim is None
        else jnp.moveaxis(value, dim, 0)
        for value, dim in zip(values, dims)
    ]
    return moved, [0] * len(moved)


def _batch_tap(values: Any, dims: Any, **params: Any) -> Any:
    in_front = all_mapped if params["label"].is_edit else _to_front
    moved, dims = in_front(values, dims)
    params["rows"] += 1
    return tap_p.bind(*moved, **params), [*dims, None]


def _batch_pure(primitive: Any, values: Any, dims: Any, **params: Any) -> Any:
    moved, dims = _to_front(values[:-1], dims[:-1])
    params["rows"] += 1
    return primitive.bind(*moved, values[-1], **params), dims


batching.primitive_batchers[tap_p] = _batch_tap
for pure_p in (linear_p, gradient_p, again_p):
    batching.primitive_batchers[pure_p] = functools.partial(_batch_pure, pure_p)


# Derivatives: a tap's is `linear_p`, whose transpose is `gradient_p`. What is not
# differentiated has no mark: only tangents that are not zero go through it.


def moving(tangents: Any) -> tuple[int, ...]:
    """Which leaves have a tangent, or a cotangent, that is not zero."""
    return tuple(n for n, one in enumerate(tangents) if type(one) is not ad.Zero)


def _marked(
    primitive: Any, moved: Any, tangents: Any, ticket: Any, **params: Any
) -> Any:
    """Tangents or cotangents, marked where they are not zero."""
    out = list(tangents)
    if moved:
        given = [tangents[n] for n in moved]
        for n, value in zip(moved, primitive.bind(*given, ticket, **params)):
            out[n] = value
    return out


def _tap_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    moved = moving(tangents)
    params["order"] += bool(moved)
    *out, ticket = tap_p.bind(*primals, **params)
    if not params["label"].is_edit:
        tangents = _marked(linear_p, moved, tangents, ticket, **params, leaves=moved)
    return [*out, ticket], [*tangents, np.zeros((), jax.dtypes.float0)]


def _again_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    *tangents, _ = tangents
    moved = moving(tangents)
    params["order"] += bool(moved)
    out = again_p.bind(*primals, **params)
    if not params["label"].is_edit:
        params |= {"leaves": moved, "is_again": True}
        tangents = _marked(linear_p, moved, tangents, primals[-1], **params)
    return out, tangents


def _identity_jvp(primitive: Any, primals: Any, tangents: Any, **params: Any) -> Any:
    return primitive.bind(*primals, **params), list(tangents[:-1])


def _linear_transpose(cotangents: Any, *values: Any, **params: Any) -> Any:
    moved = moving(cotangents)
    params["leaves"] = tuple(params["leaves"][n] for n in moved)
    return [*_marked(gradient_p, moved, cotangents, values[-1], **params), None]


def _tap_transpose(cotangents: Any, *values: Any, **params: Any) -> Any:
    """Of a function that is linear: the cotangent, as it is."""
    return list(cotangents[:-1])


def _identity_transpose(cotangents: Any, *values: Any, **params: Any) -> Any:
    return [*cotangents, None]


ad.primitive_jvps[tap_p] = _tap_jvp
ad.primitive_jvps[linear_p] = functools.partial(_identity_jvp, linear_p)
ad.primitive_jvps[gradient_p] = functools.partial(_identity_jvp, gradient_p)
ad.primitive_jvps[again_p] = _again_jvp
ad.primitive_transposes[tap_p] = _tap_transpose
ad.primitive_transposes[linear_p] = _linear_transpose
ad.primitive_transposes[gradient_p] = _identity_transpose
ad.primitive_transposes[again_p] = _identity_transpose


# Values that are computed again, under `jax.checkpoint`. A tap has an effect, so that
# it happens once, and JAX keeps the results of operations with effects for the backward
# pass instead of computing them again: a tap would undo the checkpoint. The rule here
# says otherwise. The tap happens in the forward pass; the backward pass has `again_p`
# in its place, on the value that was computed again. It holds the tap's ticket: so the
# walk can add to it what it added to the tap, and gradients that come back through it
# (of second derivatives) are added to those of the tap.


def _in_both_passes(saveable: Any, unknown: Any, is_there: Any, eqn: Any) -> Any:
    """A tap that happens in the forward pass, and a value for the backward pass.

    Gives what partial evaluation asks for: the equation for the forward pass, that for
    the backward pass, which results the forward pass does not know, which results the
    backward pass computes, and the values it must be handed for that.
    """
    pairs = zip(eqn.invars, is_there)
    needed = [x for x, flag in pairs if not flag and not isinstance(x, Literal)]
    count = len(eqn.outvars)
    if any(unknown):
        return None, eqn, [True] * count, [True] * count, needed
    ticket = eqn.outvars[-1]
    again = eqn.replace(
        primitive=again_p,
        invars=[*eqn.invars, ticket],
        outvars=eqn.outvars[:-1],
        effects=frozenset(),
    )
    is_staged = [*[True] * (count - 1), False]
    return eqn, again, [False] * count, is_staged, [*needed, ticket]


pe.partial_eval_jaxpr_custom_rules[tap_p] = _in_both_passes
