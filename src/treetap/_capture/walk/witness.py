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
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal, Primitive
from jax.extend.core.primitives import custom_jvp_call_p, custom_vjp_call_p
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from treetap._capture.marks import Label, debug_effect
from treetap._capture.walk import jax_compat
from treetap._capture.walk.plans import is_inexact


@dataclass(frozen=True, eq=False)
class Told:
    """What one call of `tap` told; each is one of its own.

    Attributes:
        label: What it said of the value.
        gradient_of: For a gradient, that of its value.
        leaf: For a gradient, which leaf of the value it is of.
    """

    label: Label
    gradient_of: "Told | None" = None
    leaf: int | None = None


class Branching(NamedTuple):
    """Which branches there are, and who is in each.

    Attributes:
        inside: By branch, all that is told in it.
        ruled: What of it is told in functions with a rule for derivatives. Their rules
            tell it anew, and nobody knows in which branch.
    """

    inside: tuple[frozenset[Told], ...]
    ruled: frozenset[str]


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


def _each_row(axis: Any, values: Any, dims: Any, *, told: Any, rows: Any) -> Any:
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


ad.primitive_jvps[witness_p] = _jvp
ad.primitive_transposes[witness_p] = lambda _, *values, **how: [None] * len(values)
batching.fancy_primitive_batchers[witness_p] = _each_row
pe.partial_eval_jaxpr_custom_rules[witness_p] = _in_forward_pass


def witnessed(label: Label, leaves: Sequence[Any], gradients: bool) -> list[Any]:
    """Tells of a value, and of its gradients if asked; gives the leaves to use."""
    told = Told(label)
    witness_p.bind(*leaves, told=told, rows=())
    if not gradients:
        return list(leaves)
    return [
        _with_gradient(Told(label, told, n), leaf) if is_inexact(leaf) else leaf
        for n, leaf in enumerate(leaves)
    ]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_gradient(told: Told, value: Any) -> Any:
    """A value, of whose cotangent a witness tells, and of what value it is."""
    return value


def _backward(told: Told, value: Any, cotangent: Any) -> Any:
    witness_p.bind(cotangent, value, told=told, rows=())
    return (cotangent,)


_with_gradient.defvjp(lambda told, value: (value, value), _backward)


def tell_branches(axis: Any, index: Any, branches: Sequence[Any]) -> None:
    """Tells which branch each row takes, if somebody in a branch tells something.

    Args:
        axis: The mapping.
        index: The number of the branch, the rows first.
        branches: Their jaxprs.
    """
    found = [list(_told_in(branch)) for branch in branches]
    if any(found):
        inside = tuple(frozenset(told for told, _ in each) for each in found)
        ruled = frozenset(told.label.name for each in found for told, x in each if x)
        _each_row(axis, [index], [0], told=Branching(inside, ruled), rows=())


def _told_in(jaxpr: Any) -> Iterator[tuple[Told, bool]]:
    """All that is told in a jaxpr, and whether that is in a function with a rule."""
    ruled = custom_jvp_call_p, custom_vjp_call_p
    for eqn, around in equations_in(jaxpr):
        if eqn.primitive is witness_p and isinstance(eqn.params["told"], Told):
            holders = [x for x, _ in around]
            is_ruled = any(x.primitive in ruled or "_prim" in x.params for x in holders)
            yield eqn.params["told"], is_ruled


Around = tuple[tuple[Any, int], ...]  # equations, and which of their bodies


def equations_in(jaxpr: Any, around: Around = ()) -> Iterator[tuple[Any, Around]]:
    """All equations in a jaxpr, open or closed, and in which others each is."""
    for eqn in jax_compat.body_of(jaxpr).jaxpr.eqns:
        yield eqn, around
        for n, inner in enumerate(jax_compat.bodies_in(eqn.params)):
            yield from equations_in(inner.jaxpr, (*around, (eqn, n)))
