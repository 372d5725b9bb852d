# SPDX-License-Identifier: Apache-2.0
"""Taps that are computed again: how a marked value goes through `jax.checkpoint`.

A tap has an effect, so that it happens once, and JAX keeps the results of operations
with effects for the backward pass instead of computing them again. For a tap the rule
here says otherwise: it happens once, in the forward pass, and the backward pass has
`again_p` in its place, a pure identity on the value that was computed again. It holds
the tap's ticket; so the walk can add to it what it added to the tap, and gradients that
come back through it (of second derivatives) are added to those of the tap.
"""

from typing import Any

import jax.numpy as jnp
from jax.extend.core import Literal, Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from treetap._capture.marks import linear_p, tap_p

again_p = Primitive("tap_again")
again_p.multiple_results = True


def _values(*values: Any, **params: Any) -> list[Any]:
    return list(values[:-1])


again_p.def_impl(_values)
again_p.def_abstract_eval(_values)
mlir.register_lowering(again_p, mlir.lower_fun(_values, multiple_results=True))


def _batch(values: Any, dims: Any, **params: Any) -> Any:
    """A mapped value has the axis in front, as at the tap."""
    pairs = zip(values[:-1], dims[:-1])
    moved = [x if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in pairs]
    params["rows"] += 1
    out = again_p.bind(*moved, values[-1], **params)
    return out, [None if dim is None else 0 for dim in dims[:-1]]


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    moved = list(tangents[:-1])
    found = tuple(n for n, one in enumerate(moved) if type(one) is not ad.Zero)
    params["order"] += bool(found)
    out = again_p.bind(*primals, **params)
    if found and not params["label"].is_edit:
        values = [moved[n] for n in found]
        params = {**params, "leaves": found, "is_again": True}
        for n, value in zip(found, linear_p.bind(*values, primals[-1], **params)):
            moved[n] = value
    return out, moved


def _transpose(cotangents: Any, *values: Any, **params: Any) -> Any:
    return [*cotangents, None]


batching.primitive_batchers[again_p] = _batch
ad.primitive_jvps[again_p] = _jvp
ad.primitive_transposes[again_p] = _transpose


def _parted(saveable: Any, unknown: Any, is_there: Any, eqn: Any) -> Any:
    """A tap that happens in the forward pass, and a value for the backward pass."""
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


pe.partial_eval_jaxpr_custom_rules[tap_p] = _parted
