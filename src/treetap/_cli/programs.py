# SPDX-License-Identifier: Apache-2.0
"""Programs: what is run for a target, its call or the gradient of its loss.

A Program is a function with its arguments, ready for `observe`, `sites` and `blame`.
Modules are arguments, so that their paths are known, and may share Variables.
"""

import functools
import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from treetap._cli.failures import Failure
from treetap._cli.targets import Case
from treetap._core.trees.attributes import Node
from treetap._transforms.grad import value_and_grad
from treetap._transforms.jit import jit

How = Literal["eager", "jit", "traced"]
MEAN_SQUARE = "the mean of squares of all floating outputs"


class Program(NamedTuple):
    """A function and its arguments.

    Attributes:
        fn: The function.
        args: Its arguments.
        kwargs: Those by name.
        loss: What the loss is, in words; empty if nothing is differentiated.
        note: What a person should know of it; may be empty.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: str = ""
    note: str = ""


def program_of(case: Case, *, grads: bool = False, how: How = "eager") -> Program:
    """What to run for a case.

    Args:
        case: The case.
        grads: Whether to differentiate its loss.
        how: `"jit"` to compile it as a whole, `"traced"` if JAX will trace it anyway:
            then flags and other constants are no arguments; or `"eager"`.
    """
    if how == "eager" and not grads:
        return Program(case.call, *case.inputs)
    made = _differentiated(case) if grads else _applied(case)
    if how == "eager":
        return made
    made = _with_constants(made)
    return made._replace(fn=jit(made.fn, graph=True)) if how == "jit" else made


def _differentiated(case: Case) -> Program:
    """The value and gradient of a case's loss."""
    owner = case.owner
    if case.loss is None:
        call, args, *_ = _applied(case)
        loss, name = mean_square(call), MEAN_SQUARE
        note = f"No loss was given: gradients are those of {MEAN_SQUARE}."
    else:
        loss, name, note = _single(case.loss, case.name), "the target's loss", ""
        args = (case.call, *case.inputs.args)
        if owner is not None and owner is not case.call:
            raise Failure(
                f"{case.name}: a loss is of the Module, and the model returned is a "
                "method of one. Return the Module."
            )
    where = [n for n, arg in enumerate(args) if _is_differentiable(arg)]
    where = where if owner is None else [0]
    if not where:
        raise Failure(
            f"{case.name}: --grads has nothing to differentiate by: it is a function, "
            "and none of its inputs by position is of floating type."
        )
    argnums = where[0] if len(where) == 1 else tuple(where)
    fn = value_and_grad(loss, argnums=argnums, graph=True)
    return Program(fn, args, case.inputs.kwargs, name, note)


def _with_constants(program: Program) -> Program:
    """The same without the arguments that are no arrays, which JAX does not trace."""
    count = len(program.args)
    fixed = {n: x for n, x in enumerate(program.args) if _is_constant(x)}
    named = {key: x for key, x in program.kwargs.items() if _is_constant(x)}
    if not fixed and not named:
        return program

    def bound(*args: Any, **kwargs: Any) -> Any:
        rest = iter(args)
        every = [fixed[n] if n in fixed else next(rest) for n in range(count)]
        return program.fn(*every, **named, **kwargs)

    args = tuple(x for n, x in enumerate(program.args) if n not in fixed)
    kwargs = {k: x for k, x in program.kwargs.items() if k not in named}
    return program._replace(fn=bound, args=args, kwargs=kwargs)


def _is_constant(value: Any) -> bool:
    """Whether a value is a flag, a count, a text, a function: a part of the program."""
    is_number = hasattr(value, "dtype") or isinstance(value, float | complex)
    return jax.tree_util.all_leaves([value]) and not is_number


def _applied(case: Case) -> Program:
    """The call, with its Module, if it has one, as the first argument."""
    args, kwargs = case.inputs
    if case.owner is None:
        return Program(case.call, args, kwargs)
    fn = case.call.__func__ if inspect.ismethod(case.call) else operator.call
    return Program(fn, (case.owner, *args), kwargs)


def _is_differentiable(arg: Any) -> bool:
    """Whether an argument is a Module, or all its numbers are floating."""
    if isinstance(arg, Node) or callable(arg):
        return isinstance(arg, Node)
    kinds = [getattr(leaf, "dtype", type(leaf)) for leaf in jax.tree.leaves(arg)]
    return bool(kinds) and all(jnp.issubdtype(kind, jnp.inexact) for kind in kinds)


def mean_square(fn: Callable[..., Any]) -> Callable[..., jax.Array]:
    """The loss where none is given: that of all floating outputs together."""

    @functools.wraps(fn)
    def loss(*args: Any, **kwargs: Any) -> jax.Array:
        leaves = [jnp.asarray(x) for x in jax.tree.leaves(fn(*args, **kwargs))]
        leaves = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)]
        count = sum(x.size for x in leaves)
        if not count:
            raise Failure(
                "--grads: the call has no floating output to take a loss of. Return "
                "`(model, inputs, loss)` from the factory."
            )
        wide = [x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in leaves]
        return sum((jnp.sum(jnp.abs(x) ** 2) for x in wide), jnp.zeros(())) / count

    return loss


def _single(loss: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A loss that is refused unless it gives a single number."""

    @functools.wraps(loss)
    def checked(*args: Any, **kwargs: Any) -> Any:
        found = loss(*args, **kwargs)
        leaves = jax.tree.leaves(found)
        if len(leaves) == 1 and leaves[0] is found and jnp.shape(found) == ():
            return found
        kinds = jax.tree.map(lambda x: str(jax.typeof(x)), found)
        raise Failure(
            f"{name}: the loss returned {kinds}. It has to be a single number: take "
            "the mean, and leave out what else it returns."
        )

    return checked
