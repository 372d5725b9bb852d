# SPDX-License-Identifier: Apache-2.0
"""Taps: an identity that marks a value, emitted only while somebody listens.

`tap_p` marks a value. It carries JAX's debug effect, so that no partial evaluation
drops it, and it gives, beside the value, a *ticket*: an integer without meaning that is
handed from the forward to the backward pass. Its derivative is `linear_p`, a linear
identity that holds the ticket; the transpose of that is `gradient_p`, an identity on
the cotangent. So one pass has both, and the ticket tells which belong together. Their
parameters say what the value is called, how often it was differentiated (`order`) and
how many axes of mappings it has in front (`rows`).

Nobody listens unless a capture is open: see `listening`.
"""

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

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


tap_p = Primitive("tap")
tap_p.multiple_results = True
linear_p = Primitive("tap_linear")
linear_p.multiple_results = True
gradient_p = Primitive("tap_gradient")
gradient_p.multiple_results = True


@functools.cache
def _debug_effect() -> Any:
    """JAX's own effect of debugging, by the public way to it."""
    traced = jax.make_jaxpr(lambda: jax.debug.callback(lambda: None))()
    return next(iter(traced.effects))


def _tap_type(*avals: Any, **params: Any) -> Any:
    return [*avals, jax.typeof(TICKET)], {_debug_effect()}


tap_p.def_impl(lambda *values, **params: [*values, jnp.asarray(TICKET)])
tap_p.def_effectful_abstract_eval(_tap_type)
linear_p.def_impl(lambda *values, **params: list(values[:-1]))
linear_p.def_abstract_eval(lambda *avals, **params: list(avals[:-1]))
gradient_p.def_impl(lambda *values, **params: list(values[:-1]))
gradient_p.def_abstract_eval(lambda *avals, **params: list(avals[:-1]))


def _lower_tap(*values: Any, **params: Any) -> Any:
    return [*values, jnp.asarray(TICKET)]


def _lower_rest(*values: Any, **params: Any) -> Any:
    return list(values[:-1])


mlir.register_lowering(tap_p, mlir.lower_fun(_lower_tap, multiple_results=True))
for primitive in (linear_p, gradient_p):
    mlir.register_lowering(
        primitive, mlir.lower_fun(_lower_rest, multiple_results=True)
    )


def _to_front(value: Any, dim: Any) -> tuple[Any, Any]:
    if dim is None:
        return value, None
    return jnp.moveaxis(value, dim, 0), 0


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
    """A mapped value has the axis in front, and `rows` counts such axes."""
    if params["label"].is_edit:
        values, dims = all_mapped(values, dims)
    moved = [_to_front(value, dim) for value, dim in zip(values, dims)]
    params["rows"] += 1
    out = tap_p.bind(*(value for value, _ in moved), **params)
    return out, [*(dim for _, dim in moved), None]


def _batch_rest(primitive: Any) -> Any:
    def rule(values: Any, dims: Any, **params: Any) -> Any:
        moved = [_to_front(v, d) for v, d in zip(values[:-1], dims[:-1])]
        ticket = values[-1]
        params["rows"] += 1
        out = primitive.bind(*(value for value, _ in moved), ticket, **params)
        return out, [dim for _, dim in moved]

    return rule


batching.primitive_batchers[tap_p] = _batch_tap
batching.primitive_batchers[linear_p] = _batch_rest(linear_p)
batching.primitive_batchers[gradient_p] = _batch_rest(gradient_p)


def _is_zero(tangent: Any) -> bool:
    return type(tangent) is ad.Zero


def _tap_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    found = tuple(n for n, tangent in enumerate(tangents) if not _is_zero(tangent))
    params["order"] += bool(found)
    *out, ticket = tap_p.bind(*primals, **params)
    moved = list(tangents)
    if found and not params["label"].is_edit:
        values = [tangents[n] for n in found]
        new = linear_p.bind(*values, ticket, **params, leaves=found)
        for n, value in zip(found, new):
            moved[n] = value
    return [*out, ticket], [*moved, np.zeros((), jax.dtypes.float0)]


def _linear_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    return linear_p.bind(*primals, **params), list(tangents[:-1])


def _linear_transpose(cotangents: Any, *values: Any, **params: Any) -> Any:
    leaves = params["leaves"]
    found = [n for n, cotangent in enumerate(cotangents) if not _is_zero(cotangent)]
    out = list(cotangents)
    if found:
        given = [cotangents[n] for n in found]
        params = {**params, "leaves": tuple(leaves[n] for n in found)}
        for n, value in zip(found, gradient_p.bind(*given, values[-1], **params)):
            out[n] = value
    return [*out, None]


def _tap_transpose(cotangents: Any, *values: Any, **params: Any) -> Any:
    """Of a function that is linear: the cotangent, as it is."""
    return list(cotangents[:-1])


def _gradient_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    return gradient_p.bind(*primals, **params), list(tangents[:-1])


def _gradient_transpose(cotangents: Any, *values: Any, **params: Any) -> Any:
    return [*cotangents, None]


ad.primitive_jvps[tap_p] = _tap_jvp
ad.primitive_jvps[linear_p] = _linear_jvp
ad.primitive_jvps[gradient_p] = _gradient_jvp
ad.primitive_transposes[tap_p] = _tap_transpose
ad.primitive_transposes[linear_p] = _linear_transpose
ad.primitive_transposes[gradient_p] = _gradient_transpose
