# SPDX-License-Identifier: Apache-2.0
"""custom_vjp: a function with a reverse rule of its own.

JAX sees a function of flat values; the user's three functions see arguments, results
and residuals as they are. Arguments that are not differentiated get no cotangent, but
may hold Variables, and their updates are written as everywhere.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treetap._changes import Policy, Structure, policy_of
from treetap._errors import StructureError
from treetap._graphs import take_leaves
from treetap._lift import (
    Inputs,
    Inside,
    Updates,
    inputs_of,
    pack_output,
    raw_values,
    run,
    transform,
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
        self._wants_updates = False

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
        self._wants_updates = _wants_updates(bwd)

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
        if self in _running.get():  # called by its own rule: the function itself
            return self.fun(*args)
        inputs = inputs_of(args, {}, self.graph, "custom_vjp")
        return _Rule(self, inputs).call()


# The functions whose rules are being run: a rule may call its own function.
_running: ContextVar[tuple[Any, ...]] = ContextVar("custom_vjp", default=())


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
        leaves = inputs.values()
        self.fixed = {
            number: value
            for number, value in enumerate(leaves)
            if not self.active[number] and not _is_numeric(value)
        }
        self.values = [x for n, x in enumerate(leaves) if n not in self.fixed]
        self.written = self._written()
        self._check_written()

    def _forward(self, values: Any) -> tuple[Any, Any, Updates]:
        """The user's `fwd`: result, residual and updates."""
        inside = Inside(self.inputs.definition, self._all(values), "custom_vjp")
        token = _running.set((*_running.get(), self.owner))
        try:
            policy = policy_of(self.owner.fun)
            with Structure(inside.tree, "custom_vjp", policy):
                pair = self.owner._fwd(*inside.tree["args"])  # pyright: ignore[reportOptionalCall] - checked by the caller
        finally:
            _running.reset(token)
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise StructureError(
                "custom_vjp: `fwd` must return a pair, the result and a residual; it "
                f"returned a {type(pair).__name__}."
            )
        out, residual = pair
        graph = self.inputs.definition.graph
        inside.check_output(out, graph)
        packed = pack_output(out, graph, "custom_vjp")
        kept = pack_output(residual, True, "custom_vjp")
        return packed, kept, self._updates(inside)

    def _updates(self, inside: Inside) -> Updates:
        written = getattr(self, "written", frozenset())
        lanes = [0] * len(inside.leaves)
        return inside.updates(lanes, 1, keep=lambda number: number in written)

    def _all(self, values: Any) -> list[Any]:
        """All values in order: those JAX handles, and those it cannot."""
        supply = iter(values)
        return [
            self.fixed[number] if number in self.fixed else next(supply)
            for number in range(len(self.active))
        ]

    def _written(self) -> set[int]:
        """The Variables that the function or its rule changes."""
        found: list[Updates] = []

        def probe(values: Any) -> None:
            found.append(self._run(values)[1])
            found.append(self._forward(values)[2])

        jax.eval_shape(probe, self.values)
        lanes = [lane for updates in found for lane in updates.written.lanes]
        return {number for lane in lanes for number, _ in lane}

    def _check_written(self) -> None:
        """Refuses changes whose gradient would be lost for want of `updates_g`."""
        if self.owner._wants_updates:
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

    def _run(self, values: Any) -> Any:
        return run(
            self.owner.fun,
            self.inputs.definition,
            self._all(values),
            name="custom_vjp",
            keep=lambda number: number in getattr(self, "written", ()),
        )

    def call(self) -> Any:
        """Runs through `jax.custom_vjp` and writes changed Variables back."""
        pure = jax.custom_vjp(self._run)
        pure.defvjp(self._fwd, self._bwd)
        out, updates = pure(self.values)
        self.inputs.write_back(updates)
        return unpack_output(out)

    def _fwd(self, values: Any) -> Any:
        out, residual, updates = self._forward(values)
        return (out, updates), (residual, values)

    def _bwd(self, kept: Any, cotangents: Any) -> Any:
        residual, values = kept
        out_g, updates = cotangents
        tree, _ = regrow(self.inputs.definition, self._all(values))
        passive = [arg for n, arg in enumerate(tree["args"]) if n in self.nondiff]
        options = {}
        bwd: Any = self.owner._bwd
        if self.owner._wants_updates:
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
        supply = iter(self._tangents(found))
        result = []
        for number, value in enumerate(self._all(values)):
            if number in self.fixed:
                continue
            given = next(supply) if self.active[number] else None
            is_active = self.active[number] and _is_inexact(value)
            result.append(given if is_active else _zero(value))
        return result

    def _tangents(self, found: Sequence[Any]) -> list[Any]:
        """Flat values of the tangents, each like the argument it belongs to."""
        args = self.inputs.tree["args"]
        wanted = [arg for n, arg in enumerate(args) if n not in self.nondiff]
        values: list[Any] = []
        for place, (arg, tangent) in enumerate(zip(wanted, found)):
            _, expected = take_leaves(arg, True, "custom_vjp")
            _, given = take_leaves(tangent, True, "custom_vjp")
            if len(expected) != len(given):
                raise StructureError(
                    f"custom_vjp: tangent {place} of `bwd` has {len(given)} leaves, "
                    f"the argument it belongs to has {len(expected)}. Return a tree "
                    "like the argument."
                )
            values += raw_values(given)
        return values


def _is_numeric(value: Any) -> bool:
    kinds = jax.Array | np.ndarray | np.generic | bool | int | float | complex
    return all(isinstance(x, kinds) for x in jax.tree.leaves(value))


def _is_inexact(value: Any) -> bool:
    leaves = jax.tree.leaves(value)
    return all(jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in leaves)


def _without_empty(tree: Any) -> Any:
    """The tree with Variables that hold nothing replaced by None."""

    def emptied(leaf: Any) -> Any:
        is_empty = isinstance(leaf, Variable) and leaf._box[0] is None
        return None if is_empty else leaf

    return jax.tree.map(emptied, tree, is_leaf=lambda x: isinstance(x, Variable))


@transform
def custom_vjp(
    fun: Callable[..., Any] = MISSING,
    *,
    nondiff_argnums: int | Sequence[int] = (),
    graph: bool | None = None,
    graph_updates: bool | None = None,
    on_structure_change: Policy | None = None,
) -> Any:
    """Gives a function a reverse rule of its own; see `CustomVjp.defvjp`.

    Args:
        fun: The function; without it, a decorator.
        nondiff_argnums: Arguments that are not differentiated; they may hold Variables.
        graph: Allow shared references.
        graph_updates: Only False is supported.
        on_structure_change: As for `treetap.jit`.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> @tt.custom_vjp
        ... def twice(p):
        ...     return p * 2
        >>> twice.defvjp(lambda p: (p * 2, None), lambda _, g: (tt.Param(g * 10),))
        >>> float(tt.grad(twice)(tt.Param(1.0))[...])
        10.0
    """
    mode = bool(graph)
    numbers = (
        (nondiff_argnums,) if isinstance(nondiff_argnums, int) else nondiff_argnums
    )
    return CustomVjp(fun, numbers, mode)
