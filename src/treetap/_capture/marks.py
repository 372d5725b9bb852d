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

Parameters say what the value is called (`label`), which of its leaves were
differentiated, each time (`moved`), and which mappings it went through (`maps`). Nobody
listens unless a capture is open: see `listening`.
"""

import functools
import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

PLAIN_TAPS = ("tap", "scope", "checkpoint_name")  # heard where `tap` is
TICKET = np.zeros((), np.uint16)  # of a type that few other values have


def bind_tap(label: "Label", values: Sequence[Any]) -> list[Any]:
    """Marks values; gives the marked ones."""
    return bind_new(label, values)[:-1]


def bind_new(label: "Label", values: Sequence[Any]) -> list[Any]:
    """Marks values; gives the marked ones, and the ticket.

    `tap_p.bind` is for JAX, which binds again what is in a jaxpr: see `walk.hoisting`.
    """
    params = {"label": label, "moved": (), "maps": (), "branches": ()}
    return Primitive.bind(tap_p, *values, **params)


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


def is_like_ticket(aval: Any) -> bool:
    """Whether a value could be a ticket, or several."""
    return getattr(aval, "dtype", None) == TICKET.dtype


def mark(name: str, impl: Any, type_of: Any, jvp: Any, transpose: Any) -> Primitive:
    """A primitive that marks values, with all its rules.

    Args:
        name: What it is called.
        impl: What it computes, as plain JAX.
        type_of: The types of its results, and its effects.
        jvp: The rule of forward differentiation, which is also given the primitive.
        transpose: The rule of transposition.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(impl)
    primitive.def_effectful_abstract_eval(type_of)
    mlir.register_lowering(primitive, mlir.lower_fun(impl, multiple_results=True))
    ad.primitive_jvps[primitive] = along = functools.partial(jvp, primitive)
    # JAX asks for it whenever it differentiates the mark, and to find it takes time.
    along.__signature__ = inspect.signature(along)  # pyright: ignore[reportAttributeAccessIssue] - partials take attributes
    ad.primitive_transposes[primitive] = transpose
    rule = functools.partial(batch_mark, primitive)
    batching.fancy_primitive_batchers[primitive] = rule
    return primitive


@functools.cache
def debug_effect() -> Any:
    """JAX's own effect of debugging, by the public way to it."""
    traced = jax.make_jaxpr(lambda: jax.debug.callback(lambda: None))()
    return next(iter(traced.effects))


def _tap_type(*avals: Any, **params: Any) -> Any:
    return [*avals, jax.typeof(TICKET)], {debug_effect()}


def _with_ticket(*values: Any, **params: Any) -> list[Any]:
    return [*values, jnp.asarray(TICKET)]


def _without_ticket(*values: Any, **params: Any) -> list[Any]:
    return list(values[:-1])


def _type_without_ticket(*avals: Any, **params: Any) -> Any:
    return [*avals[:-1]], set()


# Mappings. Every `vmap` around a mark is noted in it, the innermost first, also one
# that maps none of its operands: so the number of mappings that a mark is in is known
# wherever it goes. An operand that is mapped has the axis in front. So the first axes
# of an operand are those of the mappings that mapped it, outermost first, and nothing
# has to be guessed from shapes.


class Mapping(NamedTuple):
    """A `vmap` that a mark went through.

    Attributes:
        size: How many rows it has.
        name: What its axis is called, or None.
        mapped: For each operand but the ticket, whether it has the axis.
    """

    size: int
    name: str | None
    mapped: tuple[bool, ...]


Maps = tuple[Mapping, ...]


def batch_mark(
    primitive: Primitive,
    axis: Any,
    values: Any,
    dims: Any,
    *,
    maps: Maps,
    **params: Any,
) -> Any:
    """The rule of `vmap` for all marks, asked also where nothing is mapped.

    The axis goes in front of operands that have it. Where a value may be edited, all
    operands get it if one of them has it. A ticket, which follows them, never has it.
    """
    is_edit, count = params["label"].is_edit, len(values) - (primitive is not tap_p)
    is_mapped = [dim is not None for dim in dims[:count]]
    if is_edit:
        is_mapped = [any(is_mapped)] * count

    def to_front(value: Any, dim: int | None) -> Any:
        if dim is None:
            return jnp.broadcast_to(value, (axis.size, *jnp.shape(value)))
        return jnp.moveaxis(value, dim, 0)

    moved = [
        to_front(value, dim) if flag else value
        for value, dim, flag in zip(values, dims, is_mapped)
    ]
    name = axis.name if isinstance(axis.name, str) else None
    maps = (*maps, Mapping(axis.size, name, tuple(is_mapped)))
    out = primitive.bind(*moved, *values[count:], maps=maps, **params)
    places = [0 if flag else None for flag in is_mapped]
    if primitive is tap_p:
        return out, [*places, None]
    return out, places[:1] * len(out) if is_edit else places


# Derivatives: a tap's is `linear_p`, whose transpose is `gradient_p`. What is not
# differentiated has no mark: only tangents that are not zero go through it.


def moving(tangents: Any) -> tuple[int, ...]:
    """Which leaves have a tangent, or a cotangent, that is not zero."""
    return tuple(n for n, one in enumerate(tangents) if type(one) is not ad.Zero)


def _marked(
    primitive: Any, places: Any, tangents: Any, ticket: Any, **params: Any
) -> Any:
    """Tangents or cotangents, marked where they are not zero."""
    out = list(tangents)
    if places:
        given = [tangents[n] for n in places]
        params["maps"] = tuple(
            one._replace(mapped=tuple(one.mapped[n] for n in places))
            for one in params["maps"]
        )
        for n, value in zip(places, primitive.bind(*given, ticket, **params)):
            out[n] = value
    return out


def _jvp(primitive: Primitive, primals: Any, tangents: Any, **params: Any) -> Any:
    """The rule of a tap, and of one that is computed again."""
    is_again = primitive is again_p
    tangents = list(tangents[:-1] if is_again else tangents)
    places = moving(tangents)
    if places:
        params["moved"] = (*params["moved"], places)
    out = primitive.bind(*primals, **params)
    if not params["label"].is_edit:
        ticket = primals[-1] if is_again else out[-1]
        params |= {"leaves": places, "is_again": is_again}
        tangents = _marked(linear_p, places, tangents, ticket, **params)
    return out, tangents if is_again else [*tangents, np.zeros((), jax.dtypes.float0)]


def _identity_jvp(primitive: Any, primals: Any, tangents: Any, **params: Any) -> Any:
    return primitive.bind(*primals, **params), list(tangents[:-1])


def _linear_transpose(cotangents: Any, *values: Any, **params: Any) -> Any:
    places = moving(cotangents)
    params["leaves"] = tuple(params["leaves"][n] for n in places)
    return [*_marked(gradient_p, places, cotangents, values[-1], **params), None]


def _identity_transpose(cotangents: Any, *values: Any, **params: Any) -> Any:
    return [*cotangents, None]


def _tap_transpose(cotangents: Any, *values: Any, **params: Any) -> Any:
    """Of a function that is linear: the cotangent, as it is."""
    return list(cotangents[:-1])


tap_p = mark("tap", _with_ticket, _tap_type, _jvp, _tap_transpose)
_pure = functools.partial(mark, impl=_without_ticket, type_of=_type_without_ticket)
linear_p = _pure("tap_linear", jvp=_identity_jvp, transpose=_linear_transpose)
gradient_p = _pure("tap_gradient", jvp=_identity_jvp, transpose=_identity_transpose)
again_p = _pure("tap_again", jvp=_jvp, transpose=_identity_transpose)


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
