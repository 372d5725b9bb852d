# SPDX-License-Identifier: Apache-2.0
"""custom_vjp: a function with a reverse rule of its own.

JAX sees a function of flat values; the user's three functions see arguments, results
and residuals as they are. Arguments that are not differentiated get no cotangent, but
may hold Variables, and their updates are written as everywhere.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treetap._errors import StructureError
from treetap._graphs import take_leaves
from treetap._lift import (
    Inputs,
    Updates,
    inputs_of,
    raw_values,
    refuse_bound_method,
    resolve_mode,
    run,
    unpack_output,
)
from treetap._metadata import MISSING
from treetap._prefixes import spread
from treetap._regrowing import regrow
from treetap._variables import Variable


def _zero(value: Any) -> Any:
    """The cotangent of a value that has none."""

    def of_leaf(x: Any) -> Any:
        if jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            return jnp.zeros_like(x)
        return np.zeros(np.shape(x), jax.dtypes.float0)

    return jax.tree.map(of_leaf, value)


def _wants_updates(bwd: Callable[..., Any]) -> bool:
    """Whether a rule takes the cotangents of changed Variables."""
    parameters = inspect.signature(bwd).parameters.values()
    return any(p.name == "updates_g" or p.kind is p.VAR_KEYWORD for p in parameters)


class CustomVjp:
    """A function with a reverse rule; made by `custom_vjp`."""

    def __init__(self, fun: Callable[..., Any], nondiff: Sequence[int], graph: bool):
        functools.update_wrapper(self, fun)
        self.fun = fun
        self.nondiff_argnums = tuple(nondiff)
        self.graph = graph
        self._fwd: Callable[..., Any] | None = None
        self._bwd: Callable[..., Any] | None = None

    def defvjp(
        self,
        fwd: Callable[..., Any],
        bwd: Callable[..., Any],
        symbolic_zeros: bool = False,
    ) -> None:
        """Gives the rule.

        Args:
            fwd: Takes the arguments; returns the result and a residual.
            bwd: Takes the arguments that are not differentiated, the residual and the
                cotangent of the result; returns one tangent for each other argument. A
                keyword `updates_g` receives the cotangents of changed Variables: a
                tuple like the arguments, with None where nothing changed.
            symbolic_zeros: Only False is supported.
        """
        if symbolic_zeros:
            raise NotImplementedError("custom_vjp: symbolic_zeros is not supported.")
        self._fwd, self._bwd = fwd, bwd

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function; under differentiation, by its rule."""
        if self._fwd is None or self._bwd is None:
            name = getattr(self.fun, "__name__", "the function")
            raise StructureError(
                f"custom_vjp: no rule was given for {name}. Call "
                f"`{name}.defvjp(fwd, bwd)` before using it."
            )
        if kwargs:
            args = inspect.signature(self.fun).bind(*args, **kwargs).args
        inputs = inputs_of(args, {}, self.graph, "custom_vjp")
        return _Rule(self, inputs).call()


class _Rule:
    """One call of a function with its own rule."""

    def __init__(self, owner: CustomVjp, inputs: Inputs):
        self.owner = owner
        self.inputs = inputs
        count = len(inputs.tree["args"])
        self.nondiff = {number % count for number in owner.nondiff_argnums}
        flags = tuple(number not in self.nondiff for number in range(count))
        prefix = {"args": flags, "kwargs": False}
        self.active = spread(prefix, inputs.tree, "custom_vjp", "nondiff_argnums")
        self.written = self._written(owner.fun) | self._written(self._forward)
        self._check_written()

    def _forward(self, *args: Any) -> Any:
        out = self.owner._fwd(*args)  # pyright: ignore[reportOptionalCall] - checked by the caller
        if not isinstance(out, tuple) or len(out) != 2:
            raise StructureError(
                "custom_vjp: `fwd` must return a pair, the result and a residual; it "
                f"returned a {type(out).__name__}."
            )
        return out

    def _written(self, fn: Callable[..., Any]) -> set[int]:
        found: list[Updates] = []

        def probe(values: Any) -> None:
            found.append(self._run(fn, values)[1])

        jax.eval_shape(probe, self.inputs.values())
        return {number for lane in found[0].written.lanes for number, _ in lane}

    def _check_written(self) -> None:
        """Refuses changes whose gradient would be lost for want of `updates_g`."""
        if _wants_updates(self.owner._bwd):  # pyright: ignore[reportArgumentType] - checked by the caller
            return
        for number in self.written:
            leaf = self.inputs.leaves[number]
            inexact = jnp.issubdtype(jnp.result_type(leaf._box[0]), jnp.inexact)
            if self.active[number] and inexact:
                raise StructureError(
                    f"custom_vjp: a differentiable {type(leaf).__name__} is changed "
                    "inside, and `bwd` does not take its cotangent. Give `bwd` a "
                    "keyword `updates_g`, or put the argument into `nondiff_argnums`."
                )

    def _run(self, fn: Callable[..., Any], values: Any) -> Any:
        return run(
            fn,
            self.inputs.definition,
            values,
            name="custom_vjp",
            keep=lambda number: number in getattr(self, "written", ()),
        )

    def call(self) -> Any:
        """Runs through `jax.custom_vjp` and writes changed Variables back."""
        pure = jax.custom_vjp(lambda values: self._run(self.owner.fun, values))
        pure.defvjp(self._fwd, self._bwd)
        out, updates = pure(self.inputs.values())
        self.inputs.write_back(updates)
        return unpack_output(out)

    def _fwd(self, values: Any) -> Any:
        packed, updates = self._run(self._forward, values)
        out, residual = packed
        return (out, updates), (residual, values)

    def _bwd(self, kept: Any, cotangents: Any) -> Any:
        residual, values = kept
        out_g, updates = cotangents
        tree, _ = regrow(self.inputs.definition, values)
        passive = [arg for n, arg in enumerate(tree["args"]) if n in self.nondiff]
        options = {}
        bwd: Any = self.owner._bwd
        if _wants_updates(bwd):
            options["updates_g"] = self._updates_tree(updates)
        found = bwd(*passive, unpack_output(residual), unpack_output(out_g), **options)
        return (self._cotangents(found, values),)

    def _updates_tree(self, updates: Updates) -> Any:
        """Cotangents of changed Variables, in a tuple like the arguments."""
        given = dict(zip(sorted(self.written), updates.values[0]))
        values = [given.get(n) for n in range(len(self.inputs.leaves))]
        shaped, _ = regrow(self.inputs.definition, values)
        return _without_empty(shaped["args"])

    def _cotangents(self, found: Any, values: Any) -> list[Any]:
        """The rule's tangents as flat values; zeros for what is not differentiated."""
        count = len(self.inputs.tree["args"]) - len(self.nondiff)
        found = found if isinstance(found, tuple | list) else (found,)
        if len(found) != count:
            raise StructureError(
                f"custom_vjp: `bwd` returned {len(found)} tangents for {count} "
                "differentiable arguments."
            )
        _, leaves = take_leaves(list(found), True, "custom_vjp")
        supply = iter(raw_values(leaves))
        result = []
        for value, is_active in zip(values, self.active):
            given = next(supply) if is_active else None
            inexact = all(
                jnp.issubdtype(jnp.result_type(x), jnp.inexact)
                for x in jax.tree.leaves(value)
            )
            result.append(given if is_active and inexact else _zero(value))
        return result


def _without_empty(tree: Any) -> Any:
    """The tree with Variables that hold nothing replaced by None."""

    def emptied(leaf: Any) -> Any:
        is_empty = isinstance(leaf, Variable) and leaf._box[0] is None
        return None if is_empty else leaf

    return jax.tree.map(emptied, tree, is_leaf=lambda x: isinstance(x, Variable))


def custom_vjp(
    fun: Callable[..., Any] = MISSING,
    *,
    nondiff_argnums: int | Sequence[int] = (),
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Gives a function a reverse rule of its own; see `CustomVjp.defvjp`.

    Args:
        fun: The function; without it, a decorator.
        nondiff_argnums: Arguments that are not differentiated; they may hold Variables.
        graph: Allow shared references.
        graph_updates: Only False is supported.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> @tt.custom_vjp
        ... def twice(p):
        ...     return p * 2
        >>> twice.defvjp(lambda p: (p * 2, None), lambda _, g: (tt.Param(g * 10),))
        >>> float(tt.grad(twice)(tt.Param(1.0))[...])
        10.0
    """
    mode = resolve_mode(graph, graph_updates, "custom_vjp")
    numbers = (
        (nondiff_argnums,) if isinstance(nondiff_argnums, int) else nondiff_argnums
    )
    if fun is MISSING:
        return functools.partial(
            custom_vjp, nondiff_argnums=numbers, graph=mode, graph_updates=False
        )
    refuse_bound_method(fun, "custom_vjp")
    return CustomVjp(fun, numbers, mode)
