# SPDX-License-Identifier: Apache-2.0
"""The table of operations: what each primitive that holds jaxprs is.

JAX has a dozen such primitives. Everybody who looks into a program must know of each
which jaxprs it holds, how their inputs and results line up with its own, how often they
run, and how to make it anew with more inputs and more results. All of that stands here
once, one entry for each, and `OPERATIONS` is the table. Who surveys, runs, blames, taps
scopes or counts reads it; a primitive that is not in it is left as it is, and a tap
inside it is refused.

*How inputs line up.* Input n of a body is operand `body.first + n` of the operation,
and result n of the operation is result n of each body. Of a loop some inputs are
carried: `carried` says which, and result n of the body is the first, second, ... of
them in the next turn.

*How turns are told apart.* A body may run several times. If the operation adds an axis
to what comes out, `turns` are the places along it, in the order in which they run (of
shards, which have a `mesh`, all at the same time). A `while` has turns too, but no axis
for them, since nobody knows how many there will be: what comes out is of the last one.
"""

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from treetap._capture.statistics.reduced import is_reduced, on_each
from treetap._capture.walk import jax_compat
from treetap._capture.walk.custom_rules import run_custom_jvp, run_custom_vjp
from treetap._capture.walk.jax_compat import Body, body_of
from treetap._capture.walk.plans import (
    Found,
    Kept,
    Part,
    flagged,
    of_each,
)
from treetap._capture.walk.spots import Wrap
from treetap._capture.walk.steps import Params, Ran, Step


@dataclass(frozen=True)
class Operation:
    """What a primitive is: one entry of the table.

    Attributes:
        name: JAX's name of it.
        run: Runs it by a plan for each body: its results, and what came out of these.
        bodies: Its jaxprs that may be entered.
        hides: What an error calls the others, if it has such.
        is_call: Whether it only does what its body does, on the same operands.
        is_repeated: Whether a backward pass may compute it again.
        turns: For one that adds an axis: the places along it, as they run.
        mesh: For shards, which run at the same time: the mesh axes, with sizes.
        flag: What says more of a value that comes out of it: `"taken"`, `"count"`.
        carried: Which inputs of the body are results of the turn before.
        rows: For a loop whose rows end one by one: how many there are.
        repeats: How often its body runs (None: nobody knows), and how many copies of
            the body a compiled program has.
    """

    name: str
    run: Callable[..., Ran]
    bodies: Callable[[Params], Iterable[Body]] = jax_compat.bodies_in
    hides: str = ""
    is_call: bool = False
    is_repeated: bool = False
    turns: Callable[[Params], range] | None = None
    mesh: Callable[[Params], dict[Any, int]] = lambda params: {}
    flag: str = ""
    carried: Callable[[Params], range] = lambda params: range(0)
    rows: Callable[[Params], tuple[int, ...]] = lambda params: ()
    repeats: Callable[[Params], tuple[int | None, int]] = lambda params: (1, 1)

    def wrap(self, params: Params) -> Wrap | None:
        """What it does to the values that come out of it; None if nothing."""
        if self.turns is None and not self.flag:
            return None
        size = None if self.turns is None else len(self.turns(params))
        return Wrap(self.name, size, self.flag, self.rows(params))


def _run_jit(step: Step, part: Part) -> Ran:
    made, fed = step.walk.rewritten(part), part.fed
    more = made.tree.num_leaves - len(part.body.jaxpr.outvars)
    params = jax_compat.rejit(step.params, made.jaxpr, len(fed), more)
    return made.split(jax_compat.bind(step.primitive, [*step.values, *fed], params))


def _run_inlined(step: Step, part: Part) -> Ran:
    return step.walk.run(part, step.values)


def _run_remat(step: Step, part: Part) -> Ran:
    made = step.walk.rewritten(part)
    jaxpr, consts = jax_compat.as_inputs(made.jaxpr)
    values = [*consts, *step.values, *part.fed]
    params = {**step.params, "jaxpr": jaxpr}
    return made.split(jax_compat.bind(step.primitive, values, params))


def _run_new_remat(step: Step, part: Part) -> Ran:
    given, names = step.params["_prim"].params, ("policy", "prevent_cse")

    def again(values: list[Any], fed: list[Any]) -> Ran:
        return step.walk.run(part.feeding(fed), values)

    options = {name: given[name] for name in names if name in given}
    return jax.checkpoint(again, **options)(step.values, part.fed)


def _scan_turns(params: Params) -> range:
    forward = range(params["length"])
    return forward[::-1] if params["reverse"] else forward


def _scan_carried(params: Params) -> range:
    num_consts, num_carry = jax_compat.scan_counts(params)
    return range(num_consts, num_consts + num_carry)


def _scan_repeats(params: Params) -> tuple[int, int]:
    # XLA sees the copies that the loop is unrolled to, and those left over.
    length, unroll = params["length"], int(params["unroll"])
    return length, unroll + length % unroll if unroll < length else length


def _run_scan(step: Step, part: Part) -> Ran:
    params, values, carried = step.params, step.values, _scan_carried(step.params)
    fed = [
        n if n is None else jnp.moveaxis(value, n, 0)
        for value, n in zip(part.fed, part.fed_outers())
    ]
    places: list[Any] = []

    def one(carry: Any, slices: Any) -> Any:
        mapped, fed = slices
        own = [same if each is None else each for same, each in zip(part.fed, fed)]
        operands = [*values[: carried.start], *carry, *mapped]
        outs, found = step.walk.run(part.feeding(own), operands)
        stacked, places[:] = _distinct((outs[len(carry) :], found))
        return outs[: len(carry)], stacked

    names = ("length", "reverse", "unroll", "_split_transpose")
    options = {name: params[name] for name in names if name in params}
    begun, mapped = values[carried.start : carried.stop], values[carried.stop :]
    carry, stacked = jax.lax.scan(one, begun, (mapped, fed), **options)
    outs, found = jax.tree.map(stacked.__getitem__, tuple(places))
    return [*carry, *outs], part.with_axis(found, lambda x, n: jnp.moveaxis(x, 0, n))


def _distinct(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of a tree without repetition, and the tree of where each of them went.

    What differentiation keeps of a marked value is kept once, not before and after.
    """
    distinct = {id(value): value for value in jax.tree.leaves(tree)}
    places = {key: n for n, key in enumerate(distinct)}
    return [*distinct.values()], jax.tree.map(lambda x: places[id(x)], tree)


def _while_carried(params: Params) -> range:
    first = params["body_nconsts"]
    return range(first, first + len(params["body_jaxpr"].out_avals))


def while_rows(params: Params) -> tuple[int, ...]:
    """The rows of a `while` under mappings, which end one by one."""
    return params["cond_jaxpr"].out_avals[0].shape


def _run_while(step: Step, asked: Part) -> Ran:
    """Of each spot the last value, or the first so many, or states; and the count.

    The loop carries, beside its own, what is kept and how many turns there were.
    """
    num_cond, num_body = step.params["cond_nconsts"], step.params["body_nconsts"]
    of_cond, carry = step.values[:num_cond], step.values[num_cond + num_body :]
    same = [*step.values[num_cond : num_cond + num_body], *asked.fed]  # in all turns
    cond, rows = body_of(step.params["cond_jaxpr"]), while_rows(step.params)
    keeps = [Kept(*pair, rows) for pair in zip(asked.plan, asked.spots)]
    rows_first = functools.partial(of_each, Kept.rows_first, keeps)
    plan = tuple(keep.choice for keep in keeps)
    made = step.walk.rewritten(asked._replace(plan=plan))
    types = jax.eval_shape(rows_first, made.types)
    kept = of_each(Kept.begun, keeps, types)
    begun, tree = jax.tree.flatten((carry, kept, jnp.zeros(rows, jnp.int32)))

    def again(*values: Any) -> Any:
        return jax_compat.evaluate(cond, values[: num_cond + len(carry)])

    def next_values(*values: Any) -> Any:
        consts, fed = values[:num_body], values[num_body : len(same)]
        carry, kept, counter = tree.unflatten(values[len(same) :])
        outs, new = made.run([*consts, *carry, *fed])
        renewed = functools.partial(Kept.renewed, counter=counter)
        kept = of_each(renewed, keeps, kept, rows_first(new))
        return jax.tree.leaves((outs, kept, counter + 1))

    def traced(fn: Any, consts: list[Any]) -> Any:
        return jax_compat.traced(fn, map(jax.typeof, [*consts, *begun]))

    params = {
        **step.params,
        "cond_jaxpr": traced(again, of_cond),
        "body_jaxpr": traced(next_values, same),
        "body_nconsts": len(same),
    }
    outs = jax_compat.bind(step.primitive, [*of_cond, *same, *begun], params)
    outs, kept, counter = tree.unflatten(outs)
    return outs, of_each(functools.partial(Kept.ended, counter=counter), keeps, kept)


def _branches(params: Params) -> list[Body]:
    return [body_of(branch, 1) for branch in params["branches"]]


def _run_cond(step: Step, *parts: Part) -> Ran:
    """Every branch gives the values of all, zeros for those it does not have."""
    index, *operands = step.values
    made = [step.walk.rewritten(part) for part in parts]

    def branch(n: int, operands: Any, fed: Any) -> Any:
        outs, own = made[n].run([*operands, *fed[n]])
        found = [jax.tree.map(jax_compat.zeros_of, one.types) for one in made]
        return outs, [*found[:n], own, *found[n + 1 :]]

    branches = [functools.partial(branch, n) for n in range(len(made))]
    fed = [part.fed for part in parts]
    outs, found = jax.lax.switch(index, branches, operands, fed)
    every: Found = []
    for n, (part, own) in enumerate(zip(parts, found)):
        every += of_each(functools.partial(flagged, index == n), part.spots, own)
    return outs, every


def _shard_mesh(params: Params) -> dict[Any, int]:
    sizes, manual = params["mesh"].shape, params["newly_manual_axes"]
    return {axis: size for axis, size in sizes.items() if axis in manual}


def _shard_turns(params: Params) -> range:
    return range(math.prod(_shard_mesh(params).values()))


def _run_shard_map(step: Step, part: Part) -> Ran:
    """The body's jaxpr can be traced only where the mesh axes are."""
    params, axes = step.params, tuple(_shard_mesh(step.params))
    fed_outers, is_checked = part.fed_outers(), params["check_vma"]

    def spec(outer: int | None) -> Any:
        return jax.P() if outer is None else jax.P(*[None] * outer, axes)

    def put(value: Any, outer: int) -> Any:
        value = jnp.expand_dims(value, outer)
        return jax_compat.as_varying(value, axes) if is_checked else value

    def local(values: Any, fed: Any) -> Any:
        pairs = zip(fed, fed_outers)
        own = [value if n is None else jnp.squeeze(value, n) for value, n in pairs]
        outs, found = step.walk.run(part.feeding(own), list(values))
        if is_checked:
            found = on_each(functools.partial(_seen_once, axes), found)
        return tuple(outs), part.with_axis(found, put)

    ins, outs = [spec(n) for n in fed_outers], jax.tree.map(spec, part.outers())
    mapped = jax.shard_map(
        local,
        mesh=params["mesh"],
        axis_names=set(axes),
        in_specs=(tuple(params["in_specs"]), ins),
        out_specs=(tuple(params["out_specs"]), outs),
        check_vma=is_checked,
    )
    outs, found = mapped(tuple(step.values), part.fed)
    return list(outs), found


def _seen_once(axes: tuple[Any, ...], reduced: Any) -> Any:
    """A state that counts once for shards with the same value; or what is no state."""
    if not is_reduced(reduced):
        return reduced
    types = map(jax.typeof, jax.tree.leaves(reduced))
    varying = set().union(*map(jax_compat.varying, types))
    seen = reduced.seen
    for axis in axes:
        if axis not in varying:
            seen = seen & (jax.lax.axis_index(axis) == 0)
    return replace(reduced, seen=seen)


SCAN = Operation(
    "scan",
    _run_scan,
    turns=_scan_turns,
    carried=_scan_carried,
    repeats=_scan_repeats,
)
WHILE = Operation(
    "while",
    _run_while,
    lambda params: [body_of(params["body_jaxpr"], params["cond_nconsts"])],
    hides="the condition of a while loop",
    flag="count",
    carried=_while_carried,
    rows=while_rows,
    repeats=lambda params: (None, 1),
)
SHARD_MAP = Operation("shard_map", _run_shard_map, turns=_shard_turns, mesh=_shard_mesh)
OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        SCAN,
        WHILE,
        SHARD_MAP,
        Operation("cond", _run_cond, _branches, flag="taken"),
        Operation("jit", _run_jit, is_call=True),
        Operation("closed_call", _run_inlined, is_call=True),
        Operation("call", _run_inlined, is_call=True),
        Operation("eval_jaxpr", _run_inlined, is_call=True),
        Operation("remat2", _run_remat, is_repeated=True),
        Operation("custom_jvp_call", run_custom_jvp, is_call=True),
        Operation("custom_vjp_call", run_custom_vjp),
        # What JAX is about to have in the place of `checkpoint` and `custom_jvp_call`.
        Operation("RematTraced", _run_new_remat, is_repeated=True),
        Operation("CustomJVPTraced", run_custom_jvp, is_call=True),
    )
}
_OTHER = Operation("", _run_inlined, lambda params: ())  # has nothing to be entered


def operation_of(primitive: Primitive, params: Params) -> Operation:
    """The entry of an operation; of one not in the table, one without bodies."""
    return OPERATIONS.get(jax_compat.kind_of(primitive, params)[1], _OTHER)


_plain: dict[Any, bool] = {}


def is_plain(primitive: Primitive, params: Params) -> bool:
    """Whether an operation holds no jaxprs; one that does, always does."""
    kind = jax_compat.kind_of(primitive, params)
    known = _plain.get(kind)
    if known is None:
        known = _plain[kind] = not any(jax_compat.bodies_in(params))
    return known


def stacked_by(wraps: Iterable[str]) -> list[str]:
    """Those of the operations around a value that put an axis in front of it."""
    return [x for x in wraps if x in OPERATIONS and OPERATIONS[x].turns is not None]


def same_as_body(primitive: Primitive, params: Params) -> Body | None:
    """The body of a call, that gives what the call does to who does not differentiate.

    None for other operations.
    """
    operation = operation_of(primitive, params)
    may_open = operation.is_call or operation.is_repeated
    if not may_open and operation.run is not run_custom_vjp:
        return None
    held = list(operation.bodies(params))
    return held[0] if len(held) == 1 else None
