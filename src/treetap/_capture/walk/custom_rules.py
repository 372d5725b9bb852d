# SPDX-License-Identifier: Apache-2.0
"""Functions with rules of their own for derivatives, run by a plan.

`jax.custom_jvp` and `jax.custom_vjp` are operations that hold the function as a jaxpr
and the rule as a function. They are made anew with both: the function run by the plan,
and a rule that gives what came out of the rule, if it has the taps of the function, or
else of the function.
"""

from collections.abc import Sequence
from typing import Any

import jax

from treetap._capture.walk import jax_compat
from treetap._capture.walk.jax_compat import Body, body_of
from treetap._capture.walk.plans import Guarding, Part
from treetap._capture.walk.steps import Ran, Step
from treetap._core.errors import CaptureError


def run_custom_jvp(step: Step, part: Part) -> Ran:
    """The rule is kept; under differentiation the values are those of the rule."""
    rule = jax_compat.rule_of_jvp(step.primitive, step.params)
    count = len(step.values)
    operands, step, part = _apart(step, part)

    @jax.custom_jvp
    def with_rule(*values: Any) -> Any:
        return step.walk.run(part.feeding(values[count:]), values[:count])

    @with_rule.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        given = [*primals[:count], *tangents[:count]]
        avals = [jax.typeof(value) for value in given]
        inside = body_of(jax_compat.traced(rule, avals))
        both, found = _by_rule(step, part.feeding(primals[count:]), inside, given)
        half = len(both) // 2
        still = jax.tree.map(jax_compat.zero_tangent, found)
        return (list(both[:half]), found), (list(both[half:]), still)

    return with_rule(*operands)


def _by_rule(step: Step, part: Part, rule: Body, values: Sequence[Any]) -> Ran:
    """Results of a rule, and what came out of it, or else of its function.

    The operands of the rule begin with those of the function.
    """
    if _says_the_same(step, part, rule):
        return step.walk.run(part._replace(body=rule), values)
    _refuse_feeds(step, part)
    outs = jax_compat.evaluate(rule, values)
    if not part.spots:  # nothing is to come out, so the function need not run
        return outs, []
    return outs, step.walk.run(part, values[: len(part.body.jaxpr.invars)])[1]


def _says_the_same(step: Step, part: Part, rule: Body) -> bool:
    """Whether a rule has the taps of its function; False if it has none of its own."""
    spots, found = part.spots, step.walk.spots(rule.jaxpr)
    if not found:
        return False
    labels = [[spot.label for spot in both] for both in (found, spots)]
    if labels[0] == labels[1]:
        return True
    names = [[label.name for label in both] for both in labels]
    raise CaptureError(
        f"The rule of a {step.primitive.name} has the taps {names[0]}, its function "
        f"has {names[1]}. A capture inside the differentiation needs the same ones, in "
        "the same order; or put the capture outside."
    )


def _refuse_feeds(step: Step, part: Part) -> None:
    """Refuses to add to a value that the rule which runs does not have."""
    for choice, spot in zip(part.plan, part.spots):
        if choice.feed and not isinstance(choice.feed, Guarding):
            raise CaptureError(
                f"{choice.feed.what} of {spot.name!r} is in a {step.primitive.name} "
                "whose rule does not have it, and the rule is what runs. "
                f"{choice.feed.what} needs it there, too."
            )


def _apart(step: Step, part: Part) -> tuple[list[Any], Step, Part]:
    """All operands of a function with a rule, and the rest without a traced value.

    What is fed into it comes last: the rule knows no derivative for it. JAX keeps the
    rule with the program it is part of.
    """
    found = list(step.values)
    for choice, feed in zip(part.plan, part.feeds):
        if choice.feed is not None and feed is not None:
            found += choice.feed.fixed(feed, step.primitive.name)
    return found, step._replace(values=[]), part.feeding_types()


def run_custom_vjp(step: Step, part: Part) -> Ran:
    """The rule is kept; under differentiation the values are those of `fwd`."""
    count = len(step.values)
    rule = jax_compat.rule_of_vjp(step.params, count)
    operands, step, part = _apart(step, part)

    @jax.custom_vjp
    def with_rule(*values: Any) -> Any:
        return step.walk.run(part.feeding(values[count:]), values[:count])

    def fwd(*values: Any) -> Any:
        given = values[:count]
        outs, found = _by_rule(step, part.feeding(values[count:]), rule.forward, given)
        kept = iter(outs[: len(outs) - rule.num_out])
        residual = [next(kept) if n is None else given[n] for n in rule.forwarded]
        return (list(outs[len(outs) - rule.num_out :]), found), (residual, values)

    def bwd(kept: Any, cotangents: Any) -> Any:
        residual, values = kept
        given = rule.backward(*residual, *cotangents[0])
        return (
            *map(jax_compat.cotangent_for, given, values[:count]),
            *map(jax_compat.zero_tangent, values[count:]),
        )

    with_rule.defvjp(fwd, bwd)
    return with_rule(*operands)
