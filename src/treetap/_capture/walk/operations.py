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
to what comes out, `turns` are the places along it, in the order in which they run (for
shards: at the same time, `is_at_once`). A `while` has turns too, but no axis for them,
since nobody knows how many there will be: what comes out is of the last one.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from treetap._capture.statistics.reduced import is_reduced, on_each
from treetap._capture.walk import jax_compat
from treetap._capture.walk.custom_rules import (
    remade_custom_jvp,
    run_custom_jvp,
    run_custom_vjp,
)
from treetap._capture.walk.jax_compat import Body, body_of
from treetap._capture.walk.plans import (
    Found,
    Kept,
    Part,
    flagged,
    of_each,
)
from treetap._capture.walk.spots import Wrap
from treetap._capture.walk.steps import Params, Ran, Runs, Step


class Repeats(NamedTuple):
    """How often a body runs.

    Attributes:
        times: The number; None if nobody knows it.
        copies: How many copies of it a compiled program has.
    """

    times: int | None
    copies: int = 1


@dataclass(frozen=True)
class Operation:
    """What a primitive is: one entry of the table.

    Attributes:
        name: JAX's name of it.
        run: Runs it by a plan for each body: its results, and what came out of these.
        holder: The parameter with its only jaxpr; empty if that is not all.
        several: If it is not: the bodies.
        hides: What an error calls the jaxprs that cannot be entered, if it has such.
        is_call: Whether it only does what its body does, on the same operands.
        is_repeated: Whether a backward pass may compute it again.
        is_handed: Whether its operands are the arrays that somebody handed over.
        turns: For one that adds an axis: the places along it, as they run.
        is_at_once: Whether turns run at the same time.
        flag: What says more of a value that comes out of it: `"taken"`, `"count"`.
        carried: Which inputs of the body are results of the turn before.
        rows: For a loop whose rows end one by one: how many there are.
        repeats: For a loop: how often its body runs.
        mesh: For shards: the mesh axes they are along, with sizes.
        remade: The operation run with other bodies, if `with_bodies` is not the way.
    """

    name: str
    run: Callable[..., Ran]
    holder: str = ""
    several: Callable[[Params], list[Body]] | None = None
    hides: str = ""
    is_call: bool = False
    is_repeated: bool = False
    is_handed: bool = False
    turns: Callable[[Params], range] | None = None
    is_at_once: bool = False
    flag: str = ""
    carried: Callable[[Params], range] = lambda params: range(0)
    rows: Callable[[Params], tuple[int, ...]] = lambda params: ()
    repeats: Callable[[Params], Repeats] | None = None
    mesh: Callable[[Params], dict[Any, int]] = lambda params: {}
    remade: "Callable[[Primitive, Params, list[Any], Runs], list[Any]] | None" = None

    def bodies(self, params: Params) -> list[Body]:
        """Its jaxprs that may be entered."""
        if self.several is not None:
            return self.several(params)
        return [body_of(params[self.holder])]

    def wrap(self, params: Params) -> Wrap | None:
        """What it does to the values that come out of it; None if nothing."""
        if self.turns is None and not self.flag:
            return None
        size = None if self.turns is None else len(self.turns(params))
        return Wrap(self.name, size, self.flag, self.rows(params))


def _run_jit(step: Step, part: Part) -> Ran:
    made, fed = step.walk.rewritten(part), part.fed
    more = made.tree.num_leaves
    params = jax_compat.rejit(step.params, made.jaxpr, len(fed), more)
    return made.split(jax_compat.bind(step.primitive, [*step.values, *fed], params))


def _run_inlined(step: Step, part: Part) -> Ran:
    return step.walk.run(part, step.values)


def _evaluated(params: Params) -> list[Body]:
    return [body_of(params.get("jaxpr") or params["call_jaxpr"])]


def _run_remat(step: Step, part: Part) -> Ran:
    made = step.walk.rewritten(part)
    jaxpr, consts = jax_compat.as_inputs(made.jaxpr)
    values = [*consts, *step.values, *part.fed]
    params = {**step.params, "jaxpr": jaxpr}
    return made.split(jax_compat.bind(step.primitive, values, params))


def _new_bodies(params: Params) -> list[Body]:
    return [body_of(jaxpr) for jaxpr in jax_compat.jaxprs_of(params)]


def _new_checkpoint(params: Params) -> Callable[[Any], Any]:
    given, names = params["_prim"].params, ("policy", "prevent_cse")
    options = {name: given[name] for name in names if name in given}
    return functools.partial(jax.checkpoint, **options)


def _run_new_remat(step: Step, part: Part) -> Ran:
    @_new_checkpoint(step.params)
    def again(values: list[Any], fed: list[Any]) -> Ran:
        return step.walk.run(part.feeding(fed), values)

    return again(step.values, part.fed)


def _remade_remat(
    _: Primitive, params: Params, values: list[Any], run: Runs
) -> list[Any]:
    (body,) = _new_bodies(params)
    return _new_checkpoint(params)(functools.partial(run, body))(values)


def _scan_turns(params: Params) -> range:
    forward = range(params["length"])
    return forward[::-1] if params["reverse"] else forward


def _scan_carried(params: Params) -> range:
    num_consts, num_carry = jax_compat.scan_counts(params)
    return range(num_consts, num_consts + num_carry)


def _scan_repeats(params: Params) -> Repeats:
    # XLA sees the copies that the loop is unrolled to, and those left over.
    length, unroll = params["length"], int(params["unroll"])
    copies = unroll + length % unroll if unroll < length else length
    return Repeats(length, copies)


def _run_scan(step: Step, part: Part) -> Ran:
    carried = _scan_carried(step.params)
    consts, mapped = step.values[: carried.start], step.values[carried.stop :]
    given, outers = part.fed, part.fed_outers()
    places: list[Any] = []

    def one(carry: Any, slices: Any) -> Any:
        values, fed = slices
        supply = iter(fed)
        own = [same if n is None else next(supply) for same, n in zip(given, outers)]
        operands = [*consts, *carry, *values]
        outs, found = step.walk.run(part.feeding(own), operands)
        stacked, places[:] = _distinct((outs[len(carry) :], found))
        return outs[: len(carry)], stacked

    def put(value: Any, outer: int) -> Any:
        return jnp.moveaxis(value, 0, outer)

    pairs = zip(given, outers)
    fed = [jnp.moveaxis(value, n, 0) for value, n in pairs if n is not None]
    carry = step.values[carried.start : carried.stop]
    options = jax_compat.scan_options(step.params)
    carry, stacked = jax.lax.scan(one, carry, (mapped, fed), **options)
    outs, found = jax.tree.map(lambda place: stacked[place], tuple(places))
    return [*carry, *outs], part.with_axis(found, put)


def _distinct(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of a tree without repetition, and the tree of where each of them went.

    What differentiation keeps of a marked value is kept once, not before and after.
    """
    kept: dict[int, int] = {}
    distinct: list[Any] = []

    def place(value: Any) -> int:
        if kept.setdefault(id(value), len(distinct)) == len(distinct):
            distinct.append(value)
        return kept[id(value)]

    return distinct, jax.tree.map(place, tree)


def _while_body(params: Params) -> list[Body]:
    return [body_of(params["body_jaxpr"], params["cond_nconsts"])]


def _while_carried(params: Params) -> range:
    count = len(jax_compat.opened(params["body_jaxpr"])[0].outvars)
    return range(params["body_nconsts"], params["body_nconsts"] + count)


def while_rows(params: Params) -> tuple[int, ...]:
    """The rows of a `while` under mappings, which end one by one."""
    cond, _ = jax_compat.opened(params["cond_jaxpr"])
    return tuple(cond.outvars[0].aval.shape)


def _run_while(step: Step, asked: Part) -> Ran:
    """Of each spot the last value, or the first so many, or states; and the count."""
    num_cond, num_body = step.params["cond_nconsts"], step.params["body_nconsts"]
    consts = step.values[num_cond : num_cond + num_body]
    carry = step.values[num_cond + num_body :]
    fed, count, rows = asked.fed, len(carry), while_rows(step.params)
    cond = jax_compat.opened(step.params["cond_jaxpr"])
    keeps = [Kept(*pair, rows) for pair in zip(asked.plan, asked.spots)]
    rows_first = functools.partial(of_each, Kept.rows_first, keeps)
    plan = tuple(keep.choice for keep in keeps)
    made = step.walk.rewritten(asked._replace(plan=plan))
    types = jax.eval_shape(rows_first, made.split(made.jaxpr.out_avals)[1])
    kept = jax.tree.leaves(of_each(Kept.begun, keeps, types))
    counter = jnp.zeros(rows, jnp.int32)
    avals = [jax.typeof(x) for x in (*carry, *kept, counter)]

    def again(*values: Any) -> Any:
        return jax_compat.evaluate(*cond, values[: num_cond + count])

    def next_values(*values: Any) -> Any:
        held, rest = values[: num_body + len(fed)], values[num_body + len(fed) :]
        operands = [*held[:num_body], *rest[:count], *held[num_body:]]
        outs = jax_compat.evaluate(*jax_compat.opened(made.jaxpr), operands)
        (_, old), (outs, new) = made.split(rest[:-1]), made.split(outs)
        renewed = functools.partial(Kept.renewed, counter=rest[-1])
        kept = of_each(renewed, keeps, old, rows_first(new))
        return [*outs, *jax.tree.leaves(kept), rest[-1] + 1]

    cond_avals = [var.aval for var in cond[0].invars[:num_cond]]
    body_avals = [jax.typeof(x) for x in (*consts, *fed)]
    params = {
        **step.params,
        "cond_jaxpr": jax_compat.traced(again, [*cond_avals, *avals]),
        "body_jaxpr": jax_compat.traced(next_values, [*body_avals, *avals]),
        "body_nconsts": num_body + len(fed),
    }
    values = [*step.values[:num_cond], *consts, *fed, *carry, *kept, counter]
    *outs, counter = jax_compat.bind(step.primitive, values, params)
    outs, found = made.split(outs)
    ended = functools.partial(Kept.ended, counter=counter)
    return outs, of_each(ended, keeps, found)


def _branches(params: Params) -> list[Body]:
    return [body_of(branch, 1) for branch in params["branches"]]


def _run_cond(step: Step, *parts: Part) -> Ran:
    """Every branch gives the values of all, zeros for those it does not have."""
    index, operands = step.values[0], step.values[1:]
    made = [step.walk.rewritten(part) for part in parts]
    types = [one.split(one.jaxpr.out_avals)[1] for one in made]

    def branch(n: int) -> Any:
        def call(operands: Any, fed: Any) -> Any:
            body = jax_compat.opened(made[n].jaxpr)
            given = jax_compat.evaluate(*body, [*operands, *fed[n]])
            outs, own = made[n].split(given)
            found = jax.tree.map(jax_compat.zeros_like_aval, types)
            return outs, [*found[:n], own, *found[n + 1 :]]

        return call

    branches = [branch(n) for n in range(len(made))]
    fed = [part.fed for part in parts]
    outs, found = jax.lax.switch(index, branches, list(operands), fed)
    every: Found = []
    for n, (part, own) in enumerate(zip(parts, found)):
        every += of_each(functools.partial(flagged, index == n), part.spots, own)
    return outs, every


def _shard_mesh(params: Params) -> dict[Any, int]:
    sizes = params["mesh"].shape
    return {axis: sizes[axis] for axis in jax_compat.shard_axes(params)}


def _shard_turns(params: Params) -> range:
    return range(math.prod(_shard_mesh(params).values()))


def _on_shards(params: Params, fn: Any, ins: Any, outs: Any) -> Any:
    """A function in the place of the body, whose jaxpr can be traced only there.

    It takes, and gives, a second tree, for which there are specs.
    """
    return jax.shard_map(
        fn,
        in_specs=(tuple(params["in_specs"]), ins),
        out_specs=(tuple(params["out_specs"]), outs),
        **jax_compat.shard_map_options(params),
    )


def _remade_on_shards(
    _: Primitive, params: Params, values: list[Any], run: Runs
) -> list[Any]:
    body = body_of(params["jaxpr"])
    mapped = _on_shards(params, lambda held, _: (tuple(run(body, held)), ()), (), ())
    return list(mapped(tuple(values), ())[0])


def _run_shard_map(step: Step, part: Part) -> Ran:
    axes, is_checked = tuple(_shard_mesh(step.params)), step.params["check_vma"]
    fed_outers = part.fed_outers()

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
    mapped = _on_shards(step.params, local, ins, outs)
    outs, found = mapped(tuple(step.values), part.fed)
    return list(outs), found


def _seen_once(axes: tuple[Any, ...], reduced: Any) -> Any:
    """A state that counts once for shards with the same value; or what is no state."""
    if not is_reduced(reduced):
        return reduced
    varying = set().union(*map(jax_compat.varying, jax.tree.leaves(reduced)))
    seen = reduced.seen
    for axis in axes:
        if axis not in varying:
            seen = seen & (jax.lax.axis_index(axis) == 0)
    return replace(reduced, seen=seen)


SCAN = Operation(
    "scan",
    _run_scan,
    "jaxpr",
    turns=_scan_turns,
    carried=_scan_carried,
    repeats=_scan_repeats,
)
WHILE = Operation(
    "while",
    _run_while,
    several=_while_body,
    hides="the condition of a while loop",
    flag="count",
    carried=_while_carried,
    rows=while_rows,
    repeats=lambda params: Repeats(None),
)
SHARD_MAP = Operation(
    "shard_map",
    _run_shard_map,
    "jaxpr",
    turns=_shard_turns,
    is_at_once=True,
    mesh=_shard_mesh,
    remade=_remade_on_shards,
)
OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        SCAN,
        WHILE,
        SHARD_MAP,
        Operation("cond", _run_cond, several=_branches, flag="taken"),
        Operation("jit", _run_jit, "jaxpr", is_call=True, is_handed=True),
        Operation("closed_call", _run_inlined, "call_jaxpr", is_call=True),
        Operation("call", _run_inlined, "call_jaxpr", is_call=True),
        Operation("eval_jaxpr", _run_inlined, several=_evaluated, is_call=True),
        Operation("remat2", _run_remat, "jaxpr", is_repeated=True),
        Operation("checkpoint", _run_remat, "jaxpr", is_repeated=True),
        Operation("custom_jvp_call", run_custom_jvp, "call_jaxpr", is_call=True),
        Operation("custom_vjp_call", run_custom_vjp, "call_jaxpr"),
        # What JAX is about to have in the place of `checkpoint` and `custom_jvp_call`.
        Operation(
            "RematTraced",
            _run_new_remat,
            several=_new_bodies,
            is_repeated=True,
            remade=_remade_remat,
        ),
        Operation(
            "CustomJVPTraced",
            run_custom_jvp,
            several=_new_bodies,
            is_call=True,
            remade=remade_custom_jvp,
        ),
    )
}


def operation_of(primitive: Primitive, params: Params) -> Operation | None:
    """The entry of an operation; None if it is not in the table."""
    return OPERATIONS.get(jax_compat.name_of(primitive, params))


def operation_at(primitive: Primitive, params: Params) -> Operation:
    """The entry of an operation that is in the table."""
    return OPERATIONS[jax_compat.name_of(primitive, params)]


def bodies_of(primitive: Primitive, params: Params) -> list[Body]:
    """The jaxprs of an operation that may be entered."""
    operation = operation_of(primitive, params)
    return operation.bodies(params) if operation else []


_plain: dict[Any, bool] = {}


def is_plain(primitive: Primitive, params: Params) -> bool:
    """Whether an operation holds no jaxprs; one that does, always does."""
    known = _plain.get(primitive)  # one look-up for nearly all
    if known is not None:
        return known
    kind = jax_compat.kind_of(primitive, params)
    known = _plain.get(kind)
    if known is None:
        is_known = operation_of(primitive, params) is not None
        found = is_known or any(True for _ in jax_compat.jaxprs_of(params))
        known = _plain[kind] = not found
    return known


def hidden_jaxprs(primitive: Primitive, params: Params) -> Iterator[Any]:
    """The jaxprs of an operation that may not be entered."""
    operation = operation_of(primitive, params)
    if operation is not None and operation.holder:
        return
    known = [body.jaxpr for body in bodies_of(primitive, params)]
    for jaxpr in jax_compat.jaxprs_of(params):
        found = jax_compat.opened(jaxpr)[0]
        if not any(found is one for one in known):
            yield found


def with_bodies(
    primitive: Primitive,
    params: Params,
    values: list[Any],
    run: Runs,
    traced: Callable[[Body], Any],
) -> list[Any]:
    """Runs an operation with other bodies, of the same inputs and results.

    Args:
        primitive: The operation.
        params: Its parameters.
        values: Its operands.
        run: Runs what is in the place of a body.
        traced: That, as a closed jaxpr.
    """
    operation = operation_at(primitive, params)
    if operation.remade is not None:
        return operation.remade(primitive, params, values, run)
    made = [(body.jaxpr, traced(body)) for body in operation.bodies(params)]
    return jax_compat.bind(primitive, values, jax_compat.with_jaxprs(params, made))


def stacked_by(wraps: Iterable[str]) -> list[str]:
    """Those of the operations around a value that put an axis in front of it."""
    return [x for x in wraps if x in OPERATIONS and OPERATIONS[x].turns is not None]
