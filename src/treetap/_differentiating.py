# SPDX-License-Identifier: Apache-2.0
"""grad, value_and_grad, vjp, jvp and remat.

A gradient has the structure of what it is the gradient of: a Module gives a Module
whose Variables hold gradients. Integer and key Variables inside Modules have no
derivative and are left out (`float0` in their place); a bare integer argument is an
error, as in JAX.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from treetap._changes import Policy
from treetap._compiling import Positions, put_statics, take_statics
from treetap._errors import StructureError
from treetap._lift import (
    Inputs,
    inputs_of,
    run,
    transform,
    unpack_output,
)
from treetap._metadata import MISSING
from treetap._prefixes import spread
from treetap._regrowing import regrow
from treetap._values import is_ref
from treetap._variables import Variable

P = ParamSpec("P")
R = TypeVar("R")


def _has_derivative(leaf: Any) -> bool:
    """Whether a leaf takes part in differentiation: not an integer or key Variable."""
    if not isinstance(leaf, Variable):
        return True
    if is_ref(leaf._box[0]):
        return False
    leaves = jax.tree.leaves(leaf._box[0])
    return all(jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in leaves)


class _Split:
    """The leaves of a call, parted into those to differentiate and the rest."""

    def __init__(self, inputs: Inputs, chosen: Sequence[bool]):
        self.inputs = inputs
        self.flags = [
            flag and _has_derivative(leaf) for flag, leaf in zip(chosen, inputs.leaves)
        ]
        values = inputs.values()
        self.active = [value for value, flag in zip(values, self.flags) if flag]
        self.passive = [value for value, flag in zip(values, self.flags) if not flag]

    def joined(self, active: Sequence[Any], passive: Sequence[Any]) -> list[Any]:
        """All values in order."""
        sources = {True: iter(active), False: iter(passive)}
        return [next(sources[flag]) for flag in self.flags]

    def tree_of(self, active: Sequence[Any]) -> Any:
        """Trees like the arguments that hold derivatives; `float0` where none is."""
        values = self.joined(active, [_no_derivative(x) for x in self.passive])
        return regrow(self.inputs.definition, values)[0]["args"]


def _no_derivative(value: Any) -> Any:
    value = value[...] if is_ref(value) else value
    return jax.tree.map(lambda x: np.zeros(np.shape(x), jax.dtypes.float0), value)


def _chosen(inputs: Inputs, numbers: Sequence[int], name: str) -> list[bool]:
    """Which leaves belong to the arguments with these numbers."""
    count = len(inputs.tree["args"])
    wanted = {
        number % count if -count <= number < count else number for number in numbers
    }
    if any(number >= count or number < 0 for number in wanted):
        raise StructureError(
            f"{name}: `argnums` is {list(numbers)}, but {count} positional arguments "
            "were given."
        )
    if len(wanted) != len(numbers):
        raise StructureError(f"{name}: `argnums` {list(numbers)} repeats an argument.")
    prefix = {
        "args": tuple(number in wanted for number in range(count)),
        "kwargs": False,
    }
    return spread(prefix, inputs.tree, name, "argnums")


def _derived(
    name: str, f: Any, argnums: Any, *, has_aux: bool, graph: bool, options: Any
) -> Callable[..., Any]:
    """The function behind `grad` and `value_and_grad`: ((value, aux), gradients)."""
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    def call(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        inputs = inputs_of(args, kwargs, graph, name)
        parts = _Split(inputs, _chosen(inputs, numbers, name))

        def pure(active: Any, passive: Any) -> Any:
            values = parts.joined(active, passive)
            out, updates = run(f, inputs.definition, values, name=name)
            value, aux = pair_of(out, has_aux, name)
            return value, (aux, updates)

        derive = jax.value_and_grad(pure, has_aux=True, **options)
        (value, (aux, updates)), found = derive(parts.active, parts.passive)
        inputs.write_back(updates)
        trees = parts.tree_of(found)
        grads = tuple(trees[number] for number in numbers)
        grads = grads[0] if isinstance(argnums, int) else grads
        return value, unpack_output(aux), grads

    return call


@transform
def value_and_grad(
    f: Callable[..., Any] = MISSING,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    on_structure_change: Policy | None = None,
) -> Callable[..., Any]:
    """A function that gives the value of `f` and its gradient.

    Args:
        f: A function with a scalar result; without it, a decorator.
        argnums: Which arguments to differentiate; several give a tuple of gradients.
        has_aux: Whether `f` returns a pair whose second part is passed through.
        holomorphic: As for `jax.grad`.
        allow_int: As for `jax.grad`.
        graph: Allow shared references; a shared Variable gets its whole derivative.
        graph_updates: Only False is supported.
        on_structure_change: As for `treetap.jit`.

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
    mode = bool(graph)
    options = {"holomorphic": holomorphic, "allow_int": allow_int}
    derived = _derived(
        "value_and_grad", f, argnums, has_aux=has_aux, graph=mode, options=options
    )

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        value, aux, grads = derived(*args, **kwargs)
        return ((value, aux), grads) if has_aux else (value, grads)

    return call


@transform
def grad(
    f: Callable[..., Any] = MISSING,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    on_structure_change: Policy | None = None,
) -> Callable[..., Any]:
    """A function that gives the gradient of `f`; see `value_and_grad`.

    Args:
        f: A function with a scalar result; without it, a decorator.
        argnums: Which arguments to differentiate.
        has_aux: Whether `f` returns a pair; the result is then (gradient, aux).
        holomorphic: As for `jax.grad`.
        allow_int: As for `jax.grad`.
        graph: Allow shared references.
        graph_updates: Only False is supported.
        on_structure_change: As for `treetap.jit`.
    """
    mode = bool(graph)
    options = {"holomorphic": holomorphic, "allow_int": allow_int}
    derived = _derived("grad", f, argnums, has_aux=has_aux, graph=mode, options=options)

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        _, aux, grads = derived(*args, **kwargs)
        return (grads, aux) if has_aux else grads

    return call


def pair_of(out: Any, has_aux: bool, name: str) -> tuple[Any, Any]:
    """A result as (value, aux)."""
    if not has_aux:
        return out, None
    if not isinstance(out, tuple) or len(out) != 2:
        found = f"{len(out)} items" if isinstance(out, tuple) else type(out).__name__
        raise StructureError(
            f"{name}: with `has_aux=True` the function must return a pair, the value "
            f"and what is passed through; it returned {found}."
        )
    return out


@transform
def vjp(
    f: Callable[..., Any] = MISSING,
    *primals: Any,
    has_aux: bool = False,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    on_structure_change: Policy | None = None,
) -> Any:
    """The result of `f`, and a function from its cotangent to those of the arguments.

    Args:
        f: The function; without it, a decorator.
        *primals: Its arguments; without them, a function that takes them.
        has_aux: Whether `f` returns a pair whose second part is passed through.
        graph: Allow shared references.
        graph_updates: Only False is supported.
        on_structure_change: As for `treetap.jit`.

    Returns:
        `(out, vjp_fn)`, or `(out, vjp_fn, aux)`.
    """
    mode = bool(graph)
    if not primals:
        options: Any = {"has_aux": has_aux, "graph": mode, "graph_updates": False}
        return functools.wraps(f)(functools.partial(vjp, f, **options))
    inputs = inputs_of(primals, {}, mode, "vjp")
    parts = _Split(inputs, [True] * len(inputs.leaves))

    def pure(active: Any) -> Any:
        values = parts.joined(active, parts.passive)
        out, updates = run(f, inputs.definition, values, name="vjp")
        value, aux = pair_of(out, has_aux, "vjp")
        return value, (aux, updates)

    out, pull, (aux, updates) = jax.vjp(pure, parts.active, has_aux=True)
    inputs.write_back(updates)

    def vjp_fn(cotangent: Any) -> Any:
        (found,) = pull(cotangent)
        return parts.tree_of(found)

    out = unpack_output(out)
    return (out, vjp_fn, unpack_output(aux)) if has_aux else (out, vjp_fn)


@transform
def jvp(
    f: Callable[..., Any] = MISSING,
    primals: Sequence[Any] = MISSING,
    tangents: Sequence[Any] = MISSING,
    *,
    has_aux: bool = False,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    on_structure_change: Policy | None = None,
) -> Any:
    """The result of `f` and its derivative in a direction.

    Args:
        f: The function; without it, a decorator.
        primals: Its arguments; without them, a function of (primals, tangents).
        tangents: The direction; trees like the arguments.
        has_aux: Whether `f` returns a pair whose second part is passed through.
        graph: Allow shared references.
        graph_updates: Only False is supported.
        on_structure_change: As for `treetap.jit`.

    Returns:
        `(out, tangent_out)`, or `(out, tangent_out, aux)`.
    """
    mode = bool(graph)
    if primals is MISSING:
        options: Any = {"has_aux": has_aux, "graph": mode, "graph_updates": False}
        return functools.wraps(f)(functools.partial(jvp, f, **options))
    inputs = inputs_of(tuple(primals), {}, mode, "jvp")
    moved = Inputs({"args": tuple(tangents), "kwargs": {}}, mode, "jvp: tangents")
    if moved.definition != inputs.definition:
        raise StructureError(
            "jvp: the tangents are not like the primals.\nprimals: "
            f"{inputs.definition}\ntangents: {moved.definition}"
        )
    parts = _Split(inputs, [True] * len(inputs.leaves))
    direction = [x for x, flag in zip(moved.values(), parts.flags) if flag]

    def pure(active: Any) -> Any:
        values = parts.joined(active, parts.passive)
        out, updates = run(f, inputs.definition, values, name="jvp")
        value, aux = pair_of(out, has_aux, "jvp")
        return value, (aux, updates)

    out, tangent, (aux, updates) = jax.jvp(
        pure, (parts.active,), (direction,), has_aux=True
    )
    inputs.write_back(updates)
    out, tangent = unpack_output(out), unpack_output(tangent)
    return (out, tangent, unpack_output(aux)) if has_aux else (out, tangent)


@transform
def remat(
    f: Callable[P, R] = MISSING,
    *,
    prevent_cse: bool = True,
    static_argnums: int | Sequence[int] = (),
    policy: Callable[..., bool] | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    on_structure_change: Policy | None = None,
) -> Callable[P, R]:
    """Recomputes `f` when differentiated instead of keeping its intermediates.

    Variables change once, however often `f` is recomputed.

    Args:
        f: The function; without it, a decorator.
        prevent_cse: As for `jax.checkpoint`.
        static_argnums: Arguments that are part of the program.
        policy: As for `jax.checkpoint`.
        graph: Allow shared references.
        graph_updates: Only False is supported.
        on_structure_change: As for `treetap.jit`.
    """
    mode = bool(graph)
    statics = Positions(f, static_argnums, None)

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs, taken = take_statics(statics, args, kwargs)
        inputs = inputs_of(args, kwargs, mode, "remat")

        def pure(values: list[Any]) -> Any:
            called = put_statics(f, taken)
            return run(called, inputs.definition, values, name="remat")

        checkpointed = jax.checkpoint(pure, prevent_cse=prevent_cse, policy=policy)
        out, updates = checkpointed(inputs.values())
        inputs.write_back(updates)
        return unpack_output(out)

    return call
