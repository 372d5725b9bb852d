# SPDX-License-Identifier: Apache-2.0
"""One rule for each operation that holds jaxprs: how a plan goes through it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from treetap._capture.walk import jax_compat
from treetap._capture.walk.jax_compat import Body
from treetap._capture.walk.plans import flat_feeds, shaped_feeds
from treetap._capture.walk.run import (
    RULES,
    Choice,
    Rule,
    Spot,
    Step,
    flat_found,
    rewritten,
    run,
    shaped_found,
    survey,
)
from treetap._core.errors import CaptureError


def _same(spot: Spot, params: dict[str, Any]) -> Spot:
    return spot


def _only(step: Step) -> Any:
    """The single body of an operation: itself, its plan, its feeds and its spots."""
    body = step.bodies[0]
    return body, step.plans[0], step.feeds[0], survey(body.jaxpr).spots


def _parted(step: Step, count: int, outs: Sequence[Any]) -> Any:
    """Results of an operation, and what was recorded in its only body."""
    _, plan, _, spots = _only(step)
    return list(outs[:count]), [shaped_found(plan, spots, outs[count:])]


def _jit(step: Step) -> Any:
    body, plan, feeds, _ = _only(step)
    made = rewritten(body, plan, feeds, step.keep)
    fed, count = flat_feeds(feeds), len(body.jaxpr.outvars)
    more = len(made.jaxpr.outvars) - count
    params = jax_compat.rejit(step.params, made, len(fed), more)
    outs = jax_compat.bind(step.primitive, [*step.values, *fed], params)
    return _parted(step, count, outs)


def _inlined(step: Step) -> Any:
    body, plan, feeds, _ = _only(step)
    outs, found = run(body, step.values, plan, feeds, step.keep)
    return outs, [found]


def _remat(step: Step) -> Any:
    body, plan, feeds, _ = _only(step)
    made = rewritten(body, plan, feeds, step.keep)
    jaxpr, consts = jax_compat.as_inputs(made)
    values = [*consts, *step.values, *flat_feeds(feeds)]
    params = {**step.params, "jaxpr": jaxpr}
    outs = jax_compat.bind(step.primitive, values, params)
    return _parted(step, len(body.jaxpr.outvars), outs)


def _outers(plan: Any, spots: Sequence[Spot]) -> list[int]:
    """For each value that comes out, where the axis of an operation belongs."""
    places: list[int] = []
    for choice, spot in zip(plan, spots):
        states = choice.states_at(spot)
        places += [choice.reduce.rows] * states if states else []
        places += [spot.outer] * (choice.width_at(spot) - states)
    return places


def _fed_outers(plan: Any, spots: Sequence[Spot]) -> list[int | None]:
    """The same for each value that is fed; None for one that has no axis for it."""
    pairs = zip(plan, spots)
    return [n for c, spot in pairs if c.feed for n in c.feed.places(spot.outer)]


def _scan_wrap(spot: Spot, params: dict[str, Any]) -> Spot:
    return spot.wrapped("scan", params["length"])


def _scan(step: Step) -> Any:
    body, plan, feeds, spots = _only(step)
    num_consts, num_carry = jax_compat.scan_counts(step.params)
    consts = step.values[:num_consts]
    carry = step.values[num_consts : num_consts + num_carry]
    mapped = step.values[num_consts + num_carry :]

    def one(carry: Any, slices: Any) -> Any:
        values, fed = slices
        supply = iter(fed)
        own = [same if n is None else next(supply) for same, n in zip(given, outers)]
        shaped = shaped_feeds(plan, own)
        operands = [*consts, *carry, *values]
        outs, found = run(body, operands, plan, shaped, step.keep)
        stacked, places[:] = _distinct([*outs[num_carry:], *flat_found(found)])
        return outs[:num_carry], stacked

    places: list[int] = []
    options = jax_compat.scan_options(step.params)
    given, outers = flat_feeds(feeds), _fed_outers(plan, spots)
    fed = [
        jnp.moveaxis(value, n, 0) for value, n in zip(given, outers) if n is not None
    ]
    carry, stacked = jax.lax.scan(one, list(carry), (mapped, fed), **options)
    stacked = [stacked[place] for place in places]
    count = len(body.jaxpr.outvars) - num_carry
    found = [
        jnp.moveaxis(value, 0, min(outer, value.ndim - 1))
        for value, outer in zip(stacked[count:], _outers(plan, spots))
    ]
    return [*carry, *stacked[:count]], [shaped_found(plan, spots, found)]


def _distinct(values: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """Values without repetition, and where each of them went.

    What differentiation keeps of a marked value is kept once, not before and after.
    """
    kept: dict[int, int] = {}
    distinct: list[Any] = []
    for value in values:
        if kept.setdefault(id(value), len(distinct)) == len(distinct):
            distinct.append(value)
    return distinct, [kept[id(value)] for value in values]


def _while_wrap(spot: Spot, params: dict[str, Any]) -> Spot:
    return spot.wrapped("while", flag="count")


def _while(step: Step) -> Any:
    """Of each spot the last value, or the first so many, or states; and the count."""
    body, asked, feeds, spots = _only(step)
    num_cond, num_body = step.params["cond_nconsts"], step.params["body_nconsts"]
    consts = step.values[num_cond : num_cond + num_body]
    carry = step.values[num_cond + num_body :]
    fed, count = flat_feeds(feeds), len(carry)
    cond, cond_consts = jax_compat.opened(step.params["cond_jaxpr"])
    rows = tuple(cond.outvars[0].aval.shape)  # of a loop under vmap
    plan = tuple(_by_row(choice, len(rows)) for choice in asked)
    made = rewritten(body, plan, feeds, step.keep)
    kept = _buffers(plan, spots, made.out_avals[count:], len(rows))
    counter = jnp.zeros(rows, jnp.int32)
    avals = [jax.typeof(x) for x in (*carry, *kept, counter)]

    def again(*values: Any) -> Any:
        given = values[num_cond : num_cond + count]
        return jax_compat.evaluate(cond, cond_consts, [*values[:num_cond], *given])

    def next_values(*values: Any) -> Any:
        held, rest = values[: num_body + len(fed)], values[num_body + len(fed) :]
        operands = [*held[:num_body], *rest[:count], *held[num_body:]]
        outs = jax_compat.evaluate(*jax_compat.opened(made), operands)
        new = _renewed(plan, spots, rest[count:-1], outs[count:], rest[-1])
        return [*outs[:count], *new, rest[-1] + 1]

    cond_avals = [var.aval for var in cond.invars[:num_cond]]
    body_avals = [jax.typeof(x) for x in (*consts, *fed)]
    params = {
        **step.params,
        "cond_jaxpr": jax_compat.traced(again, [*cond_avals, *avals]),
        "body_jaxpr": jax_compat.traced(next_values, [*body_avals, *avals]),
        "body_nconsts": num_body + len(fed),
    }
    values = [*step.values[:num_cond], *consts, *fed, *carry, *kept, counter]
    outs = jax_compat.bind(step.primitive, values, params)
    found = shaped_found(plan, spots, outs[count:-1])
    pairs = zip(asked, plan, spots, found)
    return list(outs[:count]), [[_ended(*pair, outs[-1]) for pair in pairs]]


def _by_row(choice: Choice, rows: int) -> Choice:
    """What is to be done where rows of a mapped loop end one by one."""
    if choice.reduce is None or choice.reduce.rows >= rows:
        return choice
    return choice._replace(reduce=choice.reduce.by_row(rows))


def _ended(asked: Choice, choice: Choice, spot: Spot, found: Any, counter: Any) -> Any:
    """What a loop gives for a spot: states with its rows together; then the count."""
    if found is None:
        return None
    count = choice.states_at(spot)
    states = found[:count]
    if count and asked is not choice:
        states = asked.reduce.joined(spot.own, states, choice.reduce.rows)
    return [*states, *found[count:], counter]


def _buffers(plan: Any, spots: Any, avals: Sequence[Any], rows: int) -> list[Any]:
    """What a loop begins with: states that have seen nothing, and zeros."""
    sizes: list[int] = []
    for choice, spot in zip(plan, spots):
        states = choice.states_at(spot)
        sizes += [0] * states
        sizes += [choice.iterations] * (choice.width_at(spot) - states)
    return [_buffer(aval, size, rows) for aval, size in zip(avals, sizes)]


def _buffer(aval: Any, size: int, rows: int) -> Any:
    """Zeros for the last value of a loop, or for its first so many."""
    zeros = jax_compat.zeros_like_aval(aval)
    if not size:
        return zeros
    return jnp.stack([zeros] * size, axis=rows)  # after the rows of a mapped loop


def _renewed(plan: Any, spots: Any, old: Any, new: Any, counter: Any) -> list[Any]:
    """What is held of a loop after one more iteration."""
    made: list[Any] = []
    pairs = zip(shaped_found(plan, spots, old), shaped_found(plan, spots, new))
    for choice, spot, (before, after) in zip(plan, spots, pairs):
        count = choice.states_at(spot)
        if count:
            made += choice.reduce.merge(spot.own, before[:count], after[:count])
        if choice.is_heard:
            made += [
                _stored(held, value, counter, choice.iterations)
                for held, value in zip(before[count:], after[count:])
            ]
    return made


def _stored(old: Any, value: Any, counter: Any, size: int) -> Any:
    """What is kept of a loop after one more iteration."""
    if not size:
        return value
    place = jnp.max(counter)  # rows that have not ended have come equally far
    axis = counter.ndim
    new = jax.lax.dynamic_update_index_in_dim(old, value, place, axis)
    return jnp.where(place < size, new, old)


def _cond_wrap(spot: Spot, params: dict[str, Any]) -> Spot:
    return spot.wrapped("cond", flag="" if spot.is_gradient else "taken")


def _cond(step: Step) -> Any:
    """Every branch gives the values of all, zeros for those it does not have."""
    index, operands = step.values[0], step.values[1:]
    fed = [flat_feeds(feeds) for feeds in step.feeds]
    parts = list(zip(step.bodies, step.plans, step.feeds))
    made = [rewritten(*part, step.keep) for part in parts]
    count = len(step.bodies[0].jaxpr.outvars)
    avals = [one.out_avals[count:] for one in made]

    def branch(n: int) -> Any:
        def call(operands: Any, fed: Any) -> Any:
            outs = jax_compat.evaluate(
                *jax_compat.opened(made[n]), [*operands, *fed[n]]
            )
            values = [
                list(outs[count:])
                if n == other
                else [jax_compat.zeros_like_aval(aval) for aval in avals[other]]
                for other in range(len(made))
            ]
            return list(outs[:count]), values

        return call

    branches = [branch(n) for n in range(len(made))]
    outs, values = jax.lax.switch(index, branches, list(operands), fed)
    found = []
    for n, (body, plan, _) in enumerate(parts):
        spots = survey(body.jaxpr).spots
        shaped = shaped_found(plan, spots, values[n])
        taken = index == n
        found.append(
            [
                held if held is None or spot.is_gradient else [*held, taken]
                for held, spot in zip(shaped, spots)
            ]
        )
    return outs, found


def _custom_jvp(step: Step) -> Any:
    """The rule is kept; under differentiation the values are those of the rule."""
    body, plan, _, spots = _only(step)
    rule = jax_compat.rule_of_jvp(step.primitive, step.params)
    count = len(step.values)
    operands, step = _apart(step)

    def call(body: Body, given: Any, fed: Any) -> Any:
        shaped = shaped_feeds(plan, fed)
        outs, found = run(body, given, plan, shaped, step.keep)
        return outs, flat_found(found)

    @jax.custom_jvp
    def with_rule(*values: Any) -> Any:
        return call(body, values[:count], values[count:])

    @with_rule.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        given = [*primals[:count], *tangents[:count]]
        avals = [jax.typeof(value) for value in given]
        inside = jax_compat.body_of(jax_compat.traced(rule, avals))
        if _says_the_same(step, spots, inside):
            both, found = call(inside, given, primals[count:])
        else:
            _refuse_feeds(step)
            both = jax_compat.evaluate(inside.jaxpr, inside.consts, given)
            _, found = call(body, primals[:count], primals[count:])
        half = len(both) // 2
        still = jax.tree.map(jax_compat.zero_tangent, found)
        return (list(both[:half]), found), (list(both[half:]), still)

    outs, found = with_rule(*operands)
    return outs, [shaped_found(plan, spots, found)]


def _says_the_same(step: Step, spots: Sequence[Spot], rule: Body) -> bool:
    """Whether a rule has the taps of its function; False if it has none of its own."""
    found = survey(rule.jaxpr).spots
    if not found:
        return False
    pairs = zip(found, spots)
    if len(found) == len(spots) and all(x.label == y.label for x, y in pairs):
        return True
    names = [spot.label.name for spot in found], [spot.label.name for spot in spots]
    raise CaptureError(
        f"The rule of a {step.primitive.name} has the taps {names[0]}, its function "
        f"has {names[1]}. A capture inside the differentiation needs the same ones, in "
        "the same order; or put the capture outside."
    )


def _refuse_feeds(step: Step) -> None:
    """Refuses to add to a value that the rule which runs does not have."""
    pairs = zip(step.plans[0], survey(step.bodies[0].jaxpr).spots)
    for choice, spot in pairs:
        if choice.feed:
            raise CaptureError(
                f"{choice.feed.what} of {spot.label.name!r} is in a "
                f"{step.primitive.name} whose rule does not have it, and the rule is "
                f"what runs. {choice.feed.what} needs it there, too."
            )


def _apart(step: Step) -> tuple[list[Any], Step]:
    """All operands of a function with a rule, and the step without a traced value.

    What is fed into it comes last: the rule knows no derivative for it. JAX keeps the
    rule with the program it is part of.
    """
    found = list(step.values)
    for choice, feed in zip(step.plans[0], step.feeds[0]):
        if feed is not None:
            found += choice.feed.fixed(feed, step.primitive.name)
    return found, step._replace(values=[], feeds=[])


def _custom_vjp(step: Step) -> Any:
    """The rule is kept; under differentiation the values are those of `fwd`."""
    body, plan, _, spots = _only(step)
    count = len(step.values)
    rule = jax_compat.rule_of_vjp(step.params, count)
    operands, step = _apart(step)

    def call(body: Body, values: Any) -> Any:
        shaped = shaped_feeds(plan, values[count:])
        outs, found = run(body, values[:count], plan, shaped, step.keep)
        return outs, flat_found(found)

    with_rule = jax.custom_vjp(lambda *values: call(body, values))

    def fwd(*values: Any) -> Any:
        given = values[:count]
        if _says_the_same(step, spots, rule.forward):
            outs, found = call(rule.forward, values)
        else:
            _refuse_feeds(step)
            outs = jax_compat.evaluate(*rule.forward[:2], given)
            _, found = call(body, values)
        kept = iter(outs[: len(outs) - rule.num_out])
        residual = [next(kept) if n is None else given[n] for n in rule.forwarded]
        return (list(outs[len(outs) - rule.num_out :]), found), (residual, values)

    def bwd(kept: Any, cotangents: Any) -> Any:
        residual, values = kept
        given = rule.backward(*residual, *cotangents[0])
        return (
            *map(jax_compat.cotangent_for, given, values[:count]),
            *map(jax_compat.zero_cotangent, values[count:]),
        )

    with_rule.defvjp(fwd, bwd)
    outs, found = with_rule(*operands)
    return outs, [shaped_found(plan, spots, found)]


def _shard_wrap(spot: Spot, params: dict[str, Any]) -> Spot:
    axes = jax_compat.shard_axes(params)
    size = 1
    for axis in axes:
        size *= params["mesh"].shape[axis]
    return spot.wrapped("shard_map", size)


def _shard_map(step: Step) -> Any:
    body, plan, feeds, spots = _only(step)
    axes = jax_compat.shard_axes(step.params)
    outers, fed_outers = _outers(plan, spots), _fed_outers(plan, spots)

    def stacked(outers: Sequence[int | None]) -> list[Any]:
        return [jax.P() if n is None else jax.P(*[None] * n, axes) for n in outers]

    def local(values: Any, fed: Any) -> Any:
        pairs = zip(fed, fed_outers)
        own = [value if n is None else jnp.squeeze(value, n) for value, n in pairs]
        shaped = shaped_feeds(plan, own)
        outs, found = run(body, list(values), plan, shaped, step.keep)
        if step.params["check_vma"]:
            found = [_once(*one, axes) for one in zip(plan, spots, found)]
        flat = [
            jnp.expand_dims(value, min(outer, value.ndim))
            for value, outer in zip(flat_found(found), outers)
        ]
        if step.params["check_vma"]:
            flat = [jax_compat.as_varying(value, axes) for value in flat]
        return tuple(outs), flat

    mapped = jax.shard_map(
        local,
        in_specs=(tuple(step.params["in_specs"]), stacked(fed_outers)),
        out_specs=(tuple(step.params["out_specs"]), stacked(outers)),
        **jax_compat.shard_map_options(step.params),
    )
    outs, found = mapped(tuple(step.values), flat_feeds(feeds))
    return list(outs), [shaped_found(plan, spots, found)]


def _once(choice: Choice, spot: Spot, found: Any, axes: tuple[Any, ...]) -> Any:
    """States that count once for shards that have the same value."""
    count = choice.states_at(spot)
    if not count:
        return found
    held = choice.reduce.shaped(spot.own, found[:count])
    held = [one if one is None else _seen_once(one, axes) for one in held]
    return [*jax.tree.leaves(held), *found[count:]]


def _seen_once(reduced: Any, axes: tuple[Any, ...]) -> Any:
    varying = {
        axis for leaf in jax.tree.leaves(reduced) for axis in jax_compat.varying(leaf)
    }
    seen = reduced.seen
    for axis in axes:
        if axis not in varying:
            seen = seen & (jax.lax.axis_index(axis) == 0)
    return replace(reduced, seen=seen)


RULES.update(
    {
        "jit": Rule(_same, _jit),
        "closed_call": Rule(_same, _inlined),
        "call": Rule(_same, _inlined),
        "eval_jaxpr": Rule(_same, _inlined),
        "remat2": Rule(_same, _remat),
        "checkpoint": Rule(_same, _remat),
        "scan": Rule(_scan_wrap, _scan),
        "while": Rule(_while_wrap, _while),
        "cond": Rule(_cond_wrap, _cond),
        "custom_jvp_call": Rule(_same, _custom_jvp),
        "custom_vjp_call": Rule(_same, _custom_vjp),
        "shard_map": Rule(_shard_wrap, _shard_map),
    }
)
