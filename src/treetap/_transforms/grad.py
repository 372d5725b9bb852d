# SPDX-License-Identifier: Apache-2.0
"""grad, value_and_grad, vjp, jvp and remat.

A gradient has the structure of what it is the gradient of: a Module gives a Module
whose Variables hold gradients. Integer and key Variables inside Modules have no
derivative and are left out (`float0` in their place); a bare integer argument is an
error, as in JAX.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar, Unpack, cast

import jax
import numpy as np

from treetap._core.errors import StructureError
from treetap._core.settings import Mode
from treetap._core.trees.build import regrow
from treetap._core.variables.kinds import Param
from treetap._core.variables.metadata import MISSING
from treetap._core.variables.values import is_inexact, is_ref
from treetap._core.variables.variable import Variable
from treetap._transforms.lift.arguments import (
    Positions,
    by_position,
    put_statics,
    take_statics,
)
from treetap._transforms.lift.differentiation import (
    DiffState,
    active_leaves,
    check_numbers,
    chosen_by,
    holds_objects,
    positions_of,
    states_of,
)
from treetap._transforms.lift.kept_traces import kept
from treetap._transforms.lift.lift import (
    Inputs,
    Lift,
    Options,
    filled,
    transform,
)
from treetap._transforms.lift.program import Key
from treetap._transforms.lift.results import as_tuple, flatten_like, rebuild

P = ParamSpec("P")
R = TypeVar("R")


def _has_derivative(leaf: Any) -> bool:
    """Whether a leaf takes part in differentiation: not an integer or key Variable."""
    if not isinstance(leaf, Variable):
        return True
    value = leaf._box[0]
    return not is_ref(value) and is_inexact(value)


class _Split:
    """The leaves of a call, parted into those to differentiate and the rest."""

    def __init__(self, inputs: Inputs, chosen: Sequence[bool]):
        self.inputs = inputs
        self.flags = [
            flag and _has_derivative(leaf) for flag, leaf in zip(chosen, inputs.leaves)
        ]
        values = inputs.values()
        self.active = [value for value, flag in zip(values, self.flags) if flag]
        self.passive = {n: x for n, x in enumerate(values) if not self.flags[n]}

    def pure(self, f: Any, has_aux: bool) -> Callable[[Any], Any]:
        """The function of what is differentiated: its value, then all the rest."""
        inputs = self.inputs

        def call(active: Any) -> Any:
            values = filled(self.passive, active, len(self.flags))
            out, updates = inputs.lift.run(f, inputs, values)
            value, aux = pair_of(out, has_aux, inputs.name)
            return value, (aux, updates)

        return call

    def tree_of(self, active: Sequence[Any]) -> Any:
        """Trees like the arguments that hold derivatives; `float0` where none is."""
        inputs = self.inputs
        passive = {n: _no_derivative(x) for n, x in self.passive.items()}
        values = filled(passive, active, len(self.flags))
        tree, leaves = regrow(inputs.definition, values)
        if inputs.definition.graph is not Mode.UPDATES:
            return tree[inputs.lift.label]
        kept = {id(leaf) for leaf, flag in zip(leaves, self.flags) if flag}
        return states_of(tree[inputs.lift.label], kept)


def _no_derivative(value: Any) -> Any:
    value = value[...] if is_ref(value) else value
    return jax.tree.map(lambda x: np.zeros(np.shape(x), jax.dtypes.float0), value)


def _chosen(
    inputs: Inputs, argnums: Sequence[Any], argument: str
) -> tuple[list[int], list[bool]]:
    """Which arguments, and which of all leaves, are differentiated.

    Args:
        inputs: The arguments.
        argnums: Numbers, or `DiffState`s with graph updates.
        argument: The name of `argnums`, for messages.
    """
    args, name = inputs.args, inputs.name
    numbers = positions_of(argnums, len(args), name, argument)
    prefix: list[Any] = [False] * len(args)
    has_updates = inputs.definition.graph is Mode.UPDATES
    for number, wanted in zip(numbers, argnums):
        prefix[number] = True
        if has_updates and holds_objects(args[number]):
            filter = wanted.filter if isinstance(wanted, DiffState) else Param
            prefix[number] = chosen_by(filter)
    return numbers, active_leaves(inputs, prefix, argument)


def _with_numbered(f: Any, argnums: Sequence[Any], args: Any, kwargs: Any) -> Any:
    """Arguments with those that are numbered by position, be they defaults."""
    given = [x.argnum if isinstance(x, DiffState) else x for x in argnums]
    if not kwargs and all(0 <= number < len(args) for number in given):
        return args, kwargs
    count = None if min(given, default=0) < 0 else max(given, default=-1) + 1
    return by_position(f, args, kwargs, count)


def refuse_reduce_axes(given: Sequence[Any], name: str) -> None:
    """Refuses what JAX no longer has."""
    if given:
        raise NotImplementedError(
            f"{name}: `reduce_axes` is not supported; JAX no longer has it. Reduce "
            "inside the function, for instance with `jax.lax.psum`."
        )


def _derived(lift: Lift, f: Any, argnums: Any, has_aux: bool, given: Any) -> Any:
    """`value_and_grad`, or without the value `grad`, as the lift is named."""
    numbers = check_numbers(argnums, lift, "argnums")

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        if lift.mode is Mode.UPDATES:
            args, kwargs = _with_numbered(f, numbers, args, kwargs)
        inputs = lift.inputs(args, kwargs)
        places, flags = _chosen(inputs, numbers, "argnums")
        parts = _Split(inputs, flags)
        derive = jax.value_and_grad(parts.pure(f, has_aux), has_aux=True, **given)
        (value, (aux, updates)), flat = derive(parts.active)
        trees = parts.tree_of(flat)
        aux = inputs.finish(aux, updates)
        grads = tuple(trees[number] for number in places)
        found = grads if isinstance(argnums, tuple | list) else grads[0]
        if lift.name == "value_and_grad":
            return (value, aux) if has_aux else value, found
        return (found, aux) if has_aux else found

    return call


@transform
def value_and_grad(
    f: Callable[..., Any] = MISSING,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: Sequence[Any] = (),
    **options: Unpack[Options],
) -> Callable[..., Any]:
    """A function that gives the value of `f` and its gradient.

    Args:
        f: A function with a scalar result; without it, a decorator.
        argnums: Which arguments to differentiate; several give a tuple of gradients.
        has_aux: Whether `f` returns a pair whose second part is passed through.
        holomorphic: As for `jax.grad`.
        allow_int: As for `jax.grad`.
        reduce_axes: Only the empty default.
        **options: As for `treetap.jit`. In graph mode a shared Variable gets its whole
            derivative. With graph updates only Params of objects are differentiated (or
            what a `DiffState` in `argnums` says), and their gradient is a State.

    Examples:
        >>> import treetap as tt
        >>> model = tt.Dict(w=tt.Param(3.0), calls=tt.Variable(0))
        >>> def loss(model):
        ...     model.calls[...] += 1
        ...     return model.w * model.w
        >>> value, grads = tt.value_and_grad(loss)(model)
        >>> float(grads.w), int(model.calls)
        (6.0, 1)
    """
    refuse_reduce_axes(reduce_axes, "value_and_grad")
    given = {"holomorphic": holomorphic, "allow_int": allow_int}
    return _derived(Lift.of("value_and_grad", options), f, argnums, has_aux, given)


@transform
def grad(
    f: Callable[..., Any] = MISSING,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: Sequence[Any] = (),
    **options: Unpack[Options],
) -> Callable[..., Any]:
    """A function that gives the gradient of `f`; see `value_and_grad`.

    Args:
        f: A function with a scalar result; without it, a decorator.
        argnums: Which arguments to differentiate.
        has_aux: Whether `f` returns a pair; the result is then (gradient, aux).
        holomorphic: As for `jax.grad`.
        allow_int: As for `jax.grad`.
        reduce_axes: Only the empty default.
        **options: As for `treetap.jit`.
    """
    refuse_reduce_axes(reduce_axes, "grad")
    given = {"holomorphic": holomorphic, "allow_int": allow_int}
    return _derived(Lift.of("grad", options), f, argnums, has_aux, given)


def pair_of(out: Any, has_aux: bool, name: str) -> tuple[Any, Any]:
    """A result as (value, aux)."""
    if not has_aux:
        return out, None
    parts = "the value and what is passed through"
    demand = f"{name}: with `has_aux=True` the function must return a pair, {parts}"
    return as_tuple(out, 2, demand)


@transform
def vjp(
    f: Callable[..., Any] = MISSING,
    *primals: Any,
    has_aux: bool = False,
    reduce_axes: Sequence[Any] = (),
    **options: Unpack[Options],
) -> Any:
    """The result of `f`, and a function from its cotangent to those of the arguments.

    Args:
        f: The function; without it, a decorator.
        *primals: Its arguments; without them, a function that takes them.
        has_aux: Whether `f` returns a pair whose second part is passed through.
        reduce_axes: Only the empty default.
        **options: As for `treetap.jit`.

    Returns:
        `(out, vjp_fn)`, or `(out, vjp_fn, aux)`.
    """
    refuse_reduce_axes(reduce_axes, "vjp")
    if not primals:
        return functools.wraps(f)(functools.partial(vjp, f, has_aux=has_aux, **options))
    lift = Lift.of("vjp", options, label="primals")
    inputs = lift.inputs(primals, {})
    _, flags = _chosen(inputs, range(len(primals)), "primals")
    parts = _Split(inputs, flags)
    pure = parts.pure(f, has_aux)
    packed, pull, (aux, updates) = jax.vjp(pure, parts.active, has_aux=True)

    def vjp_fn(cotangent: Any) -> Any:
        (found,) = pull(flatten_like(packed, cotangent, "vjp"))
        return parts.tree_of(found)

    out, aux = inputs.finish((packed, aux), updates)
    return (out, vjp_fn, aux) if has_aux else (out, vjp_fn)


@transform
def jvp(
    f: Callable[..., Any] = MISSING,
    primals: Sequence[Any] = MISSING,
    tangents: Sequence[Any] = MISSING,
    *,
    has_aux: bool = False,
    **options: Unpack[Options],
) -> Any:
    """The result of `f` and its derivative in a direction.

    Args:
        f: The function; without it, a decorator.
        primals: Its arguments; without them, a function of (primals, tangents).
        tangents: The direction; trees like the arguments.
        has_aux: Whether `f` returns a pair whose second part is passed through.
        **options: As for `treetap.jit`.

    Returns:
        `(out, tangent_out)`, or `(out, tangent_out, aux)`.
    """
    if primals is MISSING:
        return functools.wraps(f)(functools.partial(jvp, f, has_aux=has_aux, **options))
    lift = Lift.of("jvp", options, label="primals")
    inputs = lift.inputs(tuple(primals), {})
    moved = replace(lift, label="tangents").inputs(tuple(tangents), {})
    wanted, found = cast(Any, inputs.definition.spec), cast(Any, moved.definition.spec)
    if found.children != wanted.children:
        raise StructureError(
            "jvp: the tangents are not like the primals.\nprimals: "
            f"{inputs.definition}\ntangents: {moved.definition}"
        )
    parts = _Split(inputs, [True] * len(inputs.leaves))
    direction = [x for x, flag in zip(moved.values(), parts.flags) if flag]
    out, tangent, (aux, updates) = jax.jvp(
        parts.pure(f, has_aux), (parts.active,), (direction,), has_aux=True
    )
    out, aux = inputs.finish((out, aux), updates)
    tangent = rebuild(tangent, dict(inputs.owners))
    return (out, tangent, aux) if has_aux else (out, tangent)


@transform
def remat(
    f: Callable[P, R] = MISSING,
    *,
    prevent_cse: bool = True,
    static_argnums: int | Sequence[int] = (),
    policy: Callable[..., bool] | None = None,
    **options: Unpack[Options],
) -> Callable[P, R]:
    """Recomputes `f` when differentiated instead of keeping its intermediates.

    Variables change once, however often `f` is recomputed.

    Args:
        f: The function; without it, a decorator.
        prevent_cse: As for `jax.checkpoint`.
        static_argnums: Arguments that are part of the program.
        policy: As for `jax.checkpoint`.
        **options: As for `treetap.jit`.
    """
    lift = Lift.of("remat", options)
    statics = Positions(f, static_argnums, None, "remat: static arguments")

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs, taken = take_statics(statics, args, kwargs)
        inputs = lift.inputs(args, kwargs)
        source = inputs.outline()

        def make(fn: Any) -> Callable[..., Any]:
            pure = functools.partial(lift.run, put_statics(fn, taken), source)
            return jax.checkpoint(pure, prevent_cse=prevent_cse, policy=policy)

        key = Key(inputs.definition, taken, (), None)
        checkpointed = kept((f,), key, lift, make, prevent_cse, policy)
        return inputs.finish(*checkpointed(inputs.values()))

    return call
