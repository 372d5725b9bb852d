# SPDX-License-Identifier: Apache-2.0
"""What is known of jaxprs and their parameters, JAX 0.10 to the newest, in one place.

Whatever differs between versions of JAX, or has no public function, has one here. The
table of `operations` says what each operation is, in these terms.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive, find_top_trace
from jax.extend.core.primitives import custom_jvp_call_p


class Body(NamedTuple):
    """A jaxpr inside an operation.

    Attributes:
        jaxpr: The open jaxpr.
        consts: The values of its constants.
        first: The operand that is its first input; the others follow.
    """

    jaxpr: Any
    consts: Sequence[Any]
    first: int = 0


def body_of(jaxpr: Any, first: int = 0) -> Body:
    """A body from a jaxpr, open or closed."""
    return Body(getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ()), first)


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many are carried."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(list(consts.vals)), len(list(carry.vals))


def bind(primitive: Primitive, values: Any, params: dict[str, Any]) -> list[Any]:
    """Runs an operation of a jaxpr, and gives its results as a list."""
    out = primitive.bind(*values, **primitive.get_bind_params(params))
    return list(out) if primitive.multiple_results else [out]


def rebind(eqn: Any, values: Any) -> list[Any]:
    """Runs an operation of a jaxpr as it was traced."""
    with in_context_of(eqn):
        return bind(eqn.primitive, values, eqn.params)


def evaluate(body: Body, values: Any, run: Any = rebind) -> list[Any]:
    """Runs a body, each operation as it was traced or by another function."""
    jaxpr, consts, _ = body
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *values]))
    for eqn in jaxpr.eqns:
        ins = [read(env, atom) for atom in eqn.invars]
        env.update(zip(eqn.outvars, run(eqn, ins)))
    return [read(env, atom) for atom in jaxpr.outvars]


@contextmanager
def in_context_of(eqn: Any) -> Iterator[None]:
    """The scopes, source line and settings an operation of a jaxpr was traced with."""
    info = eqn.source_info
    stack = source_info_util.current_name_stack() + info.name_stack
    here = source_info_util.user_context(info.traceback, name_stack=stack)
    with here, eqn.ctx.manager:
        yield


def setting_of(eqn: Any, name: str) -> Any:
    """A setting that an operation of a jaxpr was traced with; None if JAX has none."""
    return getattr(eqn.ctx, name, None)


def key_of(eqn: Any) -> Any:
    """What equal operations have in common, apart from the types of the operands."""
    names = ("compute_type", "cur_abstract_mesh", "threefry_partitionable")
    settings = [setting_of(eqn, name) for name in (*names, "xla_metadata")]
    return (eqn.primitive, *map(_key, settings), _key(eqn.params))


def _key(value: Any) -> Any:
    """A key for a parameter of an operation. JAX itself keeps and reuses jaxprs."""
    if isinstance(value, dict):
        return tuple((name, _key(x)) for name, x in value.items())
    if isinstance(value, tuple | list):
        return (type(value), *map(_key, value))
    try:
        hash(value)
    except TypeError:
        return id(value)  # which the program keeps alive
    return type(value), value


def read(env: dict[Any, Any], atom: Any) -> Any:
    """The value of an input of an equation."""
    return atom.val if isinstance(atom, Literal) else env[atom]


def traced(fn: Callable[..., Any], avals: Any) -> Any:
    """The closed jaxpr of a function of flat values with flat results."""
    return jax.make_jaxpr(fn)(*avals)


@functools.cache
def _unspecified() -> Any:
    """What JAX has for the sharding of an operand of which nothing was said."""
    probe = jax.make_jaxpr(jax.jit(lambda x: x))(1.0)
    return probe.jaxpr.eqns[0].params["in_shardings"][0]


def rejit(params: dict[str, Any], jaxpr: Any, more_in: int, more_out: int) -> Any:
    """The parameters of a jit with another jaxpr, more inputs and more outputs."""
    recorded = {atom for atom in jaxpr.jaxpr.outvars if not isinstance(atom, Literal)}
    pairs = zip(params["donated_invars"], jaxpr.jaxpr.invars)
    donated = [flag and var not in recorded for flag, var in pairs]
    made = {**params, "jaxpr": jaxpr, "donated_invars": (*donated, *[False] * more_in)}
    for name, one in (("shardings", _unspecified()), ("layouts", None)):
        for end, more in (("in", more_in), ("out", more_out)):
            made[f"{end}_{name}"] += (one,) * more
    return made


def has_new_remat() -> bool:
    """Whether `jax.checkpoint` is JAX's new one, which runs a function twice."""
    return getattr(jax.config, "jax_remat3", False)


def kind_of(primitive: Primitive, params: dict[str, Any]) -> tuple[Any, str]:
    """What operations of one kind have in common, and their name.

    JAX is going over to operations that are objects of a class of their own, which one
    primitive holds as a parameter.
    """
    held = params.get("_prim")
    if held is None:
        return primitive, primitive.name
    return type(held), type(held).__name__


def bodies_in(params: dict[str, Any]) -> Iterator[Body]:
    """The jaxprs in the parameters of an operation, also of one that is an object."""
    held = params.get("_prim")
    if held is not None:
        traced = getattr(held, "traced", None)
        params = {**held.params, "traced": traced and traced.jaxpr}
    for value in params.values():
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, (ClosedJaxpr, Jaxpr)):
                yield body_of(one)


def rule_of_jvp(primitive: Primitive, params: dict[str, Any]) -> Callable[..., Any]:
    """From primals and tangents to results and their tangents, all flat."""

    def fn(*primals: Any) -> list[Any]:
        return bind(primitive, primals, params)

    def rule(*values: Any) -> list[Any]:
        primals = values[: len(values) // 2]
        tangents = tuple(
            one if jnp.issubdtype(primal.dtype, jnp.inexact) else zero_tangent(primal)
            for primal, one in zip(primals, values[len(primals) :])
        )
        outs, moved = jax.jvp(fn, primals, tangents)
        return [*outs, *moved]

    return rule


class RuleOfVjp(NamedTuple):
    """The parts of a custom_vjp in a jaxpr."""

    forward: Body
    backward: Callable[..., Any]
    num_out: int
    forwarded: tuple[int | None, ...]


def rule_of_vjp(params: dict[str, Any], count: int) -> RuleOfVjp:
    """Forward and backward functions of a custom_vjp with so many operands.

    The first operands may be constants of the function, unknown to the rule.
    """
    num_consts = params["num_consts"]
    unperturbed = [False] * (count - num_consts)
    rule = Body(*params["fwd_jaxpr_thunk"].call_wrapped(*unperturbed)[:2])
    out_tree, _, forwarded = params["out_trees"]()
    avals = params["call_jaxpr"].in_avals
    forward = traced(lambda *values: evaluate(rule, values[num_consts:]), avals)

    def backward(*values: Any) -> Any:
        found = params["bwd"].call_wrapped(*values)
        of_rest = found[0] if isinstance(found, tuple) else found
        return [*[None] * num_consts, *of_rest]

    return RuleOfVjp(body_of(forward), backward, out_tree.num_leaves, forwarded)


def varying(aval: Any) -> Any:
    """The axes of a shard_map that a value of this type varies over."""
    return getattr(getattr(aval, "mat", None), "varying", ())


def as_varying(value: Any, axes: Iterable[Any]) -> Any:
    """A value in a shard_map, varying over all its axes."""
    held = varying(jax.typeof(value))
    missing = tuple(axis for axis in axes if axis not in held)
    return jax.lax.pcast(value, missing, to="varying") if missing else value


def as_inputs(jaxpr: Any) -> tuple[Any, Any]:
    """A closed jaxpr as an open one whose constants are its first inputs."""
    body = body_of(jaxpr)
    if not body.consts:
        return body.jaxpr, ()
    count = len(body.consts)

    def fn(*values: Any) -> Any:
        return evaluate(body._replace(consts=values[:count]), values[count:])

    variables = (*body.jaxpr.constvars, *body.jaxpr.invars)
    made = traced(fn, [var.aval for var in variables])
    return made.jaxpr, body.consts


def zeros_of(aval: Any) -> Any:
    """Zeros (for a key: some key) of an abstract value, varying where it does."""
    zeros = jax.lax.full(aval.shape, 0, aval.dtype)
    return as_varying(zeros, varying(aval))


_HOISTING = ("_scan_known_hoisting", "_scan_partial_eval_custom")
_LEAVING = ("process_custom_jvp_call", "process_custom_vjp_call", "process_shard_map")


def _callers() -> Iterator[Any]:
    frame: Any = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_hoisting() -> bool:
    """Whether JAX takes out of a loop what is the same in all iterations.

    Nothing public says so. One of the two functions of JAX that do it is among the
    callers. Should they have other names one day, tests of such loops fail.
    """
    return any(frame.f_code.co_name in _HOISTING for frame in _callers())


def is_hoisted() -> bool:
    """Whether what is bound now leaves its loop, inside an operation that is known."""
    if sorting_trace() is not None:
        return False
    is_inside = False
    for frame in _callers():
        name = frame.f_code.co_name
        if name in _HOISTING:
            return is_inside
        is_inside = is_inside or (name in _LEAVING and _sorts(frame.f_locals["self"]))
    return False


def sorting_trace() -> Any:
    """The trace of partial evaluation, if what is bound now goes to it; or None."""
    trace = find_top_trace(None)
    return trace if _sorts(trace) else None


def _sorts(trace: Any) -> bool:
    return type(trace).__name__ == "JaxprTrace"


def keeps_rules(bind: Any) -> bool:
    """Whether a function that is not known keeps its rule, from `bind` of its kind."""
    return bind.__self__ is not custom_jvp_call_p or jax.__version_info__ >= (0, 12)


@functools.cache
def primitives_of_objects() -> list[Primitive]:
    """The primitives that hold operations as objects, if JAX has any: see `kind_of`."""

    def fn(x: Any) -> Any:
        return jax.lax.custom_root(lambda y: y - x, x, lambda _, y: y, lambda _, y: y)

    eqns = jax.make_jaxpr(fn)(0.0).eqns
    return [eqn.primitive for eqn in eqns if "_prim" in eqn.params]


def zero_tangent(value: Any) -> Any:
    """A tangent of zeros."""
    if jnp.issubdtype(jnp.result_type(value), jnp.inexact):
        return jnp.zeros_like(value)
    return np.zeros(np.shape(value), jax.dtypes.float0)


def cotangent_for(given: Any, value: Any) -> Any:
    """A cotangent that a rule gave, zeros for one that it did not give."""
    return given if hasattr(given, "dtype") else zero_tangent(value)


def settle_results(fun: Any, rule: Any) -> None:
    """Lets JAX believe that of a function and its rule only one has run.

    It asks either for the structure of the result, and wants no two answers.
    """
    with suppress(Exception):  # an empty store raises one: the rule has not run
        _ = [store.val for store in rule.stores if store is not None]
        for store in filter(None, fun.stores):
            store.reset()


def flat_values(out: Any) -> list[Any]:
    """The values of what an operation gave, bare or in JAX's own container."""
    return list(out.vals) if hasattr(out, "vals") else list(out)


def with_values(out: Any, values: list[Any]) -> Any:
    """The same, with other values."""
    return out.update(values) if hasattr(out, "vals") else values


def holds(jaxpr: Any, primitive: Primitive) -> bool:
    """Whether an operation is anywhere in a jaxpr."""
    return any(
        eqn.primitive is primitive
        or any(holds(body.jaxpr, primitive) for body in bodies_in(eqn.params))
        for eqn in jaxpr.eqns
    )
