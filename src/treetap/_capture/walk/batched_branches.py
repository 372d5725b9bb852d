# SPDX-License-Identifier: Apache-2.0
"""What JAX is asked to do differently with programs that have marks.

Some rules of JAX would lose what a mark is to tell, and each has an addition here. They
do nothing where there are no marks. They are in force once `listener` is imported.
(Loops whose taps are the same in all iterations have a file of their own, `hoisting`.)

*Branches under `vmap`.* With a condition for each row JAX runs all branches for all
rows and selects: there is no branch any more, and nothing says which rows took it. So
before JAX does that, each mark in a branch is given the number of its branch, and a tap
the condition as one more operand: the mask of the rows that took it. Cotangents of
other rows are zeros: what JAX computes for them is of no meaning, as branches share
what they keep for the way back.

*Loops that are computed again.* Under `jax.checkpoint` JAX stages a whole `while` for
the backward pass, where its taps would be heard once more. So what is staged has none.

*Taylor series.* `jet` has no rule for marks, and would say so with a `KeyError`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.jet import jet_rules
from jax.extend.core import Literal
from jax.extend.core.primitives import cond_p, while_p
from jax.interpreters import batching
from jax.interpreters import partial_eval as pe

from treetap._capture.marks import Label
from treetap._capture.walk import jax_compat
from treetap._capture.walk.jax_compat import body_of
from treetap._capture.walk.jaxpr_cache import JaxprCache
from treetap._capture.walk.plans import Choice, Guarding, Part
from treetap._capture.walk.run import Walk
from treetap._capture.walk.spots import MARKS
from treetap._capture.walk.survey import taps_in
from treetap._capture.walk.witness import tell_branches
from treetap._core.errors import CaptureError

_guarded: JaxprCache[Any] = JaxprCache()
_unmarked: JaxprCache[Any] = JaxprCache()
_batch_cond = batching.fancy_primitive_batchers[cond_p]
_stage_while = pe.partial_eval_jaxpr_custom_rules[while_p]


def _with_guards(branch: Any, number: int, count: int) -> Any:
    """A branch that takes the conditions of all branches, and heeds its own."""
    body = body_of(branch)
    spots = taps_in(body.jaxpr).spots

    def made() -> Any:
        feed = Guarding(number)
        plan = tuple(Choice(False, feed) for _ in spots)
        inputs = len(body.jaxpr.invars)

        def fn(*values: Any) -> list[Any]:
            mask = values[inputs + number]
            part = Part(body, spots, plan, [[mask]] * len(spots))
            return Walk(keep=True).run(part, list(values[:inputs]))[0]

        masks = [jax.ShapeDtypeStruct((), bool)] * count
        avals = [var.aval for var in body.jaxpr.invars]
        return jax_compat.traced(fn, [*avals, *masks])

    return _guarded.get(body.jaxpr, (number, count), made)


def _batch_branches(
    axis: Any, values: Any, dims: Any, *, branches: Any, **params: Any
) -> Any:
    """The rule of JAX, with masks for marks where all branches will run."""
    is_mapped = dims[0] is not None and "branches_platforms" not in params
    if is_mapped:
        tell_branches(axis, jnp.moveaxis(values[0], dims[0], 0), branches)
    if is_mapped and any(taps_in(body_of(one).jaxpr).spots for one in branches):
        count = len(branches)
        masks = [jnp.equal(values[0], n) for n in range(count)]
        values, dims = [*values, *masks], [*dims, *[dims[0]] * count]
        branches = tuple(_with_guards(x, n, count) for n, x in enumerate(branches))
    return _batch_cond(axis, values, dims, branches=branches, **params)


def _without_marks(jaxpr: Any) -> Any:
    """A jaxpr without marks."""
    body = body_of(jaxpr)
    spots = taps_in(body.jaxpr).spots

    def made() -> Any:
        nothing = [Choice(False)] * len(spots), [None] * len(spots)
        part = Part(body, spots, tuple(nothing[0]), nothing[1])

        def fn(*values: Any) -> list[Any]:
            return Walk().run(part, values)[0]

        avals = [var.aval for var in body.jaxpr.invars]
        return jax_compat.traced(fn, avals)

    return _unmarked.get(body.jaxpr, None, made)


def _tell_while_once(saveable: Any, unknown: Any, is_there: Any, eqn: Any) -> Any:
    """Under `checkpoint` a loop with taps happens as it is, and again without them."""
    names = ("cond_jaxpr", "body_jaxpr")
    found = [taps_in(body_of(eqn.params[name]).jaxpr).spots for name in names]
    if not any(found):
        return _stage_while(saveable, unknown, is_there, eqn)
    if any(unknown):
        raise CaptureError(
            f"The tap {(*found[0], *found[1])[0].name!r} is in a `while` loop that is "
            "differentiated inside a `jax.checkpoint`, where it would be told twice. "
            "Put the capture inside the checkpoint, or take the checkpoint away."
        )
    params = {**eqn.params, **{x: _without_marks(eqn.params[x]) for x in names}}
    again = eqn.replace(params=params, effects=frozenset())
    count, pairs = len(eqn.outvars), zip(eqn.invars, is_there)
    needed = [x for x, flag in pairs if not (flag or isinstance(x, Literal))]
    return eqn, again, [False] * count, [True] * count, needed


def _refuse_jet(primals: Any, series: Any, *, label: Label, **params: Any) -> Any:
    """The rule of marks under `jet`."""
    raise CaptureError(
        f"The tap {label.name!r} is inside `jax.experimental.jet`, which has no rule "
        "for it. Capture a function that `jet` is not around, or take derivatives "
        "with nested `jax.jvp`s."
    )


def register() -> None:
    """Hands these rules to JAX."""
    jet_rules.update(dict.fromkeys(MARKS, _refuse_jet))
    batching.fancy_primitive_batchers[cond_p] = _batch_branches
    pe.partial_eval_jaxpr_custom_rules[while_p] = _tell_while_once
