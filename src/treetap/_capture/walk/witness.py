# SPDX-License-Identifier: Apache-2.0
"""Witnesses: a second way to see values, which shares only the names with taps.

`observe(..., verify=True)` compares what taps told with what witnesses tell. So a
witness is as plain as can be. It is an operation without results; under `vmap` there is
one for each row, which knows the row; a gradient is seen by a `jax.custom_vjp`. Who
runs the program operation by operation (`verify`) notes what each is given.

*Branches under `vmap`.* JAX runs all of them for all rows and selects. One more witness
before them tells which branch each row takes, and which witnesses are inside it.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, Primitive
from jax.extend.core.primitives import custom_jvp_call_p, custom_vjp_call_p
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from treetap._capture.marks import Label, debug_effect
from treetap._capture.walk.jax_compat import bodies_in, body_of


class Told:
    """What one call of `tap` told; each is one of its own.

    Attributes:
        label: What it said of the value.
        gradient_of: For a gradient, that of its value.
        leaf: For a gradient, which leaf of the value it is of.
    """

    def __init__(
        self, label: Label, gradient_of: "Told | None" = None, leaf: int | None = None
    ):
        self.label, self.gradient_of, self.leaf = label, gradient_of, leaf


class Branching:
    """Which branches there are, and who is in each.

    Attributes:
        inside: By branch, all that is told in it.
        ruled: Names of what is told in functions with a rule for derivatives. Their
            rules tell it anew, and nobody knows in which branch.
    """

    def __init__(self, inside: Sequence[set[Any]], ruled: set[str]):
        self.inside, self.ruled = inside, ruled


class Row(NamedTuple):
    """A row of a mapping: which, and of how many."""

    number: int
    size: int


witness_p = Primitive("tap_witness")
witness_p.multiple_results = True
witness_p.def_impl(lambda *values, **params: [])
witness_p.def_effectful_abstract_eval(lambda *avals, **params: ([], {debug_effect()}))
mlir.register_lowering(
    witness_p, mlir.lower_fun(lambda *values, **params: [], multiple_results=True)
)


def _each_row(
    axis: Any, values: Any, dims: Any, *, told: Any, rows: tuple[Row, ...]
) -> Any:
    """The rule of `vmap`: a witness for each row, the innermost mapping first."""
    for number in range(axis.size):
        given = [
            value if dim is None else jax.lax.index_in_dim(value, number, dim, False)
            for value, dim in zip(values, dims)
        ]
        witness_p.bind(*given, told=told, rows=(*rows, Row(number, axis.size)))
    return [], []


def _in_forward_pass(saveable: Any, unknown: Any, is_there: Any, eqn: Any) -> Any:
    """Under `checkpoint` it happens once, where its operands are known."""
    if not any(unknown):
        return eqn, None, [], [], []
    pairs = zip(eqn.invars, is_there)
    needed = [x for x, flag in pairs if not flag and not isinstance(x, Literal)]
    return None, eqn, [], [], needed


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    return witness_p.bind(*primals, **params), []


def _transpose(cotangents: Any, *values: Any, **params: Any) -> Any:
    return [None] * len(values)


ad.primitive_jvps[witness_p] = _jvp
ad.primitive_transposes[witness_p] = _transpose
batching.fancy_primitive_batchers[witness_p] = _each_row
pe.partial_eval_jaxpr_custom_rules[witness_p] = _in_forward_pass


def witnessed(label: Label, leaves: Sequence[Any], gradients: bool) -> list[Any]:
    """Tells of a value, and of its gradients if asked; gives the leaves to use."""
    told = Told(label)
    witness_p.bind(*leaves, told=told, rows=())
    if not gradients:
        return list(leaves)
    return [
        _with_gradient(Told(label, told, n), leaf)
        if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
        else leaf
        for n, leaf in enumerate(leaves)
    ]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_gradient(told: Told, value: Any) -> Any:
    """A value, of whose cotangent a witness tells, and of what value it is."""
    return value


def _forward(told: Told, value: Any) -> Any:
    return value, value


def _backward(told: Told, value: Any, cotangent: Any) -> Any:
    witness_p.bind(cotangent, value, told=told, rows=())
    return (cotangent,)


_with_gradient.defvjp(_forward, _backward)


def tell_branches(axis: Any, index: Any, branches: Sequence[Any]) -> None:
    """Tells which branch each row takes, if somebody in a branch tells something.

    Args:
        axis: The mapping.
        index: The number of the branch, the rows first.
        branches: Their jaxprs.
    """
    inside = [set(_told_in(body_of(branch).jaxpr)) for branch in branches]
    if any(inside):
        ruled = {name for x in branches for name in _ruled_in(body_of(x).jaxpr)}
        branching = Branching(inside, ruled)
        _each_row(axis, [index], [0], told=branching, rows=())


def _told_in(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if eqn.primitive is witness_p:
            yield eqn.params["told"]
        for inner in bodies_in(eqn.params):
            yield from _told_in(inner.jaxpr)


def _ruled_in(jaxpr: Any) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        has_rule = eqn.primitive in (custom_jvp_call_p, custom_vjp_call_p)
        for inner in bodies_in(eqn.params):
            if has_rule or "_prim" in eqn.params:
                yield from (told.label.name for told in _told_in(inner.jaxpr))
            yield from _ruled_in(inner.jaxpr)
