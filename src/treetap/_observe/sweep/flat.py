# SPDX-License-Identifier: Apache-2.0
"""Flat programs: every call opened, every loop with points in it unrolled.

A flat program is a closed jaxpr whose points all stand in its own list of equations.
What cannot be brought into that form is `Unsuited`: a branch, a `while` or a shard with
a point in it. Calls with a derivative rule of their own are opened, too: a flat program
is run, and never differentiated.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from treetap._capture.walk import jax_compat
from treetap._capture.walk.operations import SCAN, operation_of, same_as_body
from treetap._observe.sweep.points import Unsuited, point_p


class Flat(NamedTuple):
    """A flat program.

    Attributes:
        eqns: Its equations.
        inputs: Its inputs: variables.
        consts: The values of its constants, by variable.
        results: Its results: variables, or literals.
    """

    eqns: list[Any]
    inputs: list[Any]
    consts: dict[Any, Any]
    results: list[Any]

    def env(self, values: Sequence[Any]) -> dict[Any, Any]:
        """What is known before the first equation."""
        return {**self.consts, **dict(zip(self.inputs, values))}


def traced(fn: Callable[..., Any], types: Sequence[Any]) -> Flat:
    """What JAX traces of a function, without equations whose results nobody needs."""
    jaxpr, consts, _ = jax_compat.body_of(jax_compat.traced(fn, types))
    read, kept = {*variables(jaxpr.outvars)}, []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not read.isdisjoint(eqn.outvars):
            kept.append(eqn)
            read.update(variables(eqn.invars))
    known = dict(zip(jaxpr.constvars, consts))
    return Flat(kept[::-1], [*jaxpr.invars], known, [*jaxpr.outvars])


def flattened(fn: Callable[..., Any], types: Sequence[Any]) -> Flat:
    """A function of flat values as a flat program."""
    body = jax_compat.body_of(jax_compat.traced(fn, types))
    return traced(lambda *xs: jax_compat.evaluate(body, xs, _opening(())), types)


def _opening(turns: tuple[int, ...]) -> Callable[..., list[Any]]:
    """What runs an equation in these iterations of the loops around."""

    def run(eqn: Any, values: list[Any]) -> list[Any]:
        with jax_compat.in_context_of(eqn):
            return _opened(eqn, values, turns)

    return run


def _opened(eqn: Any, values: list[Any], turns: tuple[int, ...]) -> list[Any]:
    primitive, params = eqn.primitive, eqn.params
    if primitive is point_p:
        return jax_compat.bind(primitive, values, {**params, "turns": turns})
    body = same_as_body(primitive, params)
    if body is not None:
        return jax_compat.evaluate(body, values[body.first :], _opening(turns))
    if any(
        jax_compat.holds(one.jaxpr, point_p) for one in jax_compat.bodies_in(params)
    ):
        if operation_of(primitive, params) is not SCAN:
            raise Unsuited(f"a site is inside the operation {primitive.name!r}")
        return _unrolled(params, values, turns)
    return jax_compat.bind(primitive, values, params)


def _unrolled(params: Any, values: list[Any], turns: tuple[int, ...]) -> list[Any]:
    """The results of a scan, iteration by iteration."""
    (body,), carried = SCAN.bodies(params), SCAN.carried(params)
    assert SCAN.turns is not None
    consts, mapped = values[: carried.start], values[carried.stop :]
    carry, rows = values[carried.start : carried.stop], {}
    for turn in SCAN.turns(params):
        here = [jax.lax.index_in_dim(x, turn, keepdims=False) for x in mapped]
        given = [*consts, *carry, *here]
        outs = jax_compat.evaluate(body, given, _opening((*turns, turn)))
        carry, rows[turn] = outs[: len(carry)], outs[len(carry) :]
    columns = zip(*(rows[turn] for turn in sorted(rows)))
    types = body.jaxpr.outvars[len(carry) :]
    if not rows:
        return [*carry, *(jnp.zeros((0, *x.aval.shape), x.aval.dtype) for x in types)]
    return [*carry, *(jnp.stack(column) for column in columns)]


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Those inputs of an equation that are no literals."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]
