# SPDX-License-Identifier: Apache-2.0
"""custom_vjp: a function with a reverse rule of its own.

JAX sees a function of flat values; the user's three functions see arguments, results
and residuals as they are. Arguments that are not differentiated get no cotangent, but
may hold Variables, and their updates are written as everywhere.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from operator import not_
from typing import Any, Unpack

import jax

from treetap._capture.listening import listening
from treetap._capture.walk.jax_compat import zero_tangent
from treetap._core.bounded_cache import BoundedCache
from treetap._core.errors import StructureError
from treetap._core.paths import Path, show_path
from treetap._core.scopes import scoped
from treetap._core.settings import Mode
from treetap._core.trees.attributes import Node
from treetap._core.trees.build import Builder, regrow
from treetap._core.trees.flatten import Flattening
from treetap._core.trees.pytree import opened, variables_below
from treetap._core.trees.state import State
from treetap._core.variables.metadata import MISSING
from treetap._core.variables.values import NUMERIC, is_inexact
from treetap._core.variables.variable import Variable
from treetap._transforms.lift.arguments import count_positional, positional
from treetap._transforms.lift.differentiation import (
    DiffState,
    active_leaves,
    check_numbers,
    chosen_by,
    holds_objects,
    positions_of,
    states_of,
)
from treetap._transforms.lift.lift import (
    Inputs,
    Inside,
    Lift,
    Options,
    Parted,
    Updates,
    filled,
    transform,
)
from treetap._transforms.lift.program import MAX_PROGRAMS
from treetap._transforms.lift.results import WHOLE, as_tuple, rebuild


def _zero(value: Any) -> Any:
    """The cotangent of a value that has none."""
    return jax.tree.map(zero_tangent, value)


class CustomVjp:
    """A function with a reverse rule; made by `custom_vjp`."""

    def __init__(self, fun: Callable[..., Any], nondiff: Sequence[Any], lift: Lift):
        functools.update_wrapper(self, fun)
        self.fun = fun
        self.nondiff_argnums = tuple(nondiff)
        self.lift = lift
        self._bwd: Any = None  # until `defvjp` gives the rule
        self._written: BoundedCache[Any, frozenset[int]] = BoundedCache(MAX_PROGRAMS)

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
                tuple like the arguments, with None where nothing changed. With graph
                updates the cotangent is a pair, that of the changed Variables (a State
                for each object, None for other arguments) and that of the result; and
                the tangent of an object is a State.
            symbolic_zeros: Only False is supported.
        """
        if symbolic_zeros:
            raise NotImplementedError(
                "custom_vjp: `symbolic_zeros` is not supported. Leave it out: the rule "
                "then gets zeros where nothing depends on a result."
            )
        self._fwd, self._bwd = fwd, bwd
        self._counted = count_positional(self.fun)  # the rule has a tangent for each
        self._wants_updates = any(
            parameter.name == "updates_g" or parameter.kind is parameter.VAR_KEYWORD
            for parameter in inspect.signature(bwd).parameters.values()
        )
        self._written.clear()

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function; under differentiation, by its rule."""
        if self._bwd is None:
            name = getattr(self.fun, "__name__", "the function")
            raise StructureError(
                f"custom_vjp: no rule was given for {name}. Call "
                f"`{name}.defvjp(fwd, bwd)` before using it."
            )
        of, count = ("custom_vjp", "nondiff_argnums"), self._counted
        args = positional(self.fun, args, kwargs, *of, count=count)
        if self in _running.get():  # called by its own rule: the function itself
            return self.fun(*args)
        inputs = self.lift.inputs(args, {})
        return inputs.finish(*_Rule(self, inputs).call(inputs.values()))


# The functions whose rules are being run: a rule may call its own function.
_running: ContextVar[tuple[Any, ...]] = ContextVar("custom_vjp", default=())


# Whether a rule is traced only to see what it changes. Functions with rules inside do
# not ask that of their own: nested ones would ask twice as often at each level.
# It is part of the key of JAX's trace caches, so that what is traced then is not used
# where it matters.
_finding: Any = jax.make_user_context(False)


class _Rule:
    """A function with its own rule, for arguments of one structure.

    JAX keeps it as part of a program and calls it later. So it holds descriptions and
    constants, and no value that is traced.
    """

    def __init__(self, owner: CustomVjp, inputs: Inputs):
        self.owner = owner
        self.outline = inputs.outline()
        self.definition = inputs.definition
        self.has_states = inputs.definition.graph is Mode.UPDATES
        args = inputs.tree["args"]
        prefix: list[Any] = [True] * len(args)
        self.nondiff: set[int] = set()
        argnums, name = owner.nondiff_argnums, "nondiff_argnums"
        positions = positions_of(argnums, len(args), "custom_vjp", name)
        for number, given in zip(positions, argnums):
            if isinstance(given, DiffState):
                prefix[number] = chosen_by(given.filter)
                continue
            self.nondiff.add(number)
            prefix[number] = False
            if self.has_states and holds_objects(args[number]):
                raise TypeError(
                    f"custom_vjp: argument {number} is in `nondiff_argnums` and holds "
                    "an object. With graph updates, say what of it to differentiate: "
                    f"`DiffState({number}, filter)`."
                )
        self.active = active_leaves(inputs, prefix, name)
        leaves = inputs.values()

        # What is not differentiated and no array stays as it is: a string, a number.
        def is_handled(on: bool, leaf: Any, value: Any) -> bool:
            is_numeric = isinstance(leaf, Variable) and _is_numeric(value)
            return on or is_numeric or isinstance(value, jax.Array)

        flags = map(is_handled, self.active, inputs.leaves, leaves)
        self.parts = Parted(leaves, map(not_, flags))
        self.kinds = [type(leaf).__name__ for leaf in inputs.leaves]
        self.written: set[int] = set()  # while that is found out
        has_variables = any(isinstance(x, Variable) for x in inputs.leaves)
        if (has_variables or holds_objects(args)) and not _finding.value:
            self._add_written(self._written_by_rule(self.parts.handled(leaves)), leaves)

    def _forward(self, values: Any) -> tuple[Any, Any, Updates]:
        """The user's `fwd`: result, residual and updates."""
        inside = Inside(self.outline, self.parts.all(values), self.owner.lift)
        running = (*_running.get(), self.owner)
        with scoped(_running, running), inside.watched():
            pair = self.owner._fwd(*inside.tree["args"])
        demand = "custom_vjp: `fwd` must return a pair, the result and a residual"
        out, residual = as_tuple(pair, 2, demand)
        packed, updates = inside.finish(out, keep=self.written)
        walk = Flattening(residual, True, "custom_vjp")
        return packed, WHOLE.flatten(residual, walk), updates

    def _written_by_rule(self, values: list[Any]) -> frozenset[int]:
        """The Variables that the rule changes, found once for arguments of one kind.

        The function and its rule must return the same ones. JAX traces the function
        first, if it traces both, so those of the rule must be known before.
        """
        flat, tree = jax.tree.flatten(values)
        key = self.definition, tree, tuple(map(jax.typeof, flat)), listening.value

        def find() -> frozenset[int]:
            with _finding(True):
                updates = jax.eval_shape(self._forward, values)[2]
            return frozenset(updates.written.numbers())

        return find() if self.parts.fixed else self.owner._written.made(key, find)

    def _add_written(self, numbers: Collection[int], leaves: Sequence[Any]) -> None:
        """Adds Variables that are changed; refuses them if a gradient would be lost.

        Args:
            numbers: The Variables.
            leaves: The values of all arguments.
        """
        self.written |= {*numbers}
        if self.owner._wants_updates or self.has_states:
            return
        for number in self.written:
            if self.active[number] and is_inexact(leaves[number]):
                raise StructureError(
                    f"custom_vjp: a differentiable {self.kinds[number]} is changed "
                    "inside, and `bwd` does not take its cotangent. Give `bwd` a "
                    "keyword `updates_g`, or put the argument into `nondiff_argnums`."
                )

    def _run(self, values: Any) -> Any:
        lift, fun, every = self.owner.lift, self.owner.fun, self.parts.all(values)
        out, updates = lift.run(fun, self.outline, every, keep=self.written)
        self._add_written(updates.written.numbers(), every)
        return out, updates

    def call(self, leaves: list[Any]) -> Any:
        """Runs through `jax.custom_vjp`: the result and what changed."""
        pure = jax.custom_vjp(self._run)
        pure.defvjp(self._fwd, self._bwd)
        return pure(self.parts.handled(leaves))

    def _fwd(self, values: Any) -> Any:
        out, residual, updates = self._forward(values)
        return (out, updates), (residual, values)

    def _bwd(self, kept: Any, cotangents: Any) -> Any:
        residual, values = kept
        out_g, updates = cotangents
        made: dict[int, Any] = {}
        tree, leaves = regrow(self.definition, self.parts.all(values), made=made)
        passive = [arg for n, arg in enumerate(tree["args"]) if n in self.nondiff]
        given = rebuild(out_g, made)
        options = {}
        changed = dict(zip(sorted(self.written), updates.values[0]))
        if self.has_states:
            given = self._updates_states(changed, leaves), given
        elif self.owner._wants_updates:  # in a tuple like the arguments
            found = [
                leaf.copy(changed[n]) if n in changed else None
                for n, leaf in enumerate(leaves)
            ]
            around = Builder(iter(found), recreate=False).any(self.definition.spec)
            options["updates_g"] = around["args"]
        residual = rebuild(residual, {})
        found = self.owner._bwd(*passive, residual, given, **options)
        return (self._cotangents(found, tree["args"], values),)

    def _updates_states(self, changed: Any, leaves: list[Any]) -> Any:
        """Cotangents of Variables: a State for each object, zeros where none came.

        All of its Variables are there, for a rule may leave out what has no derivative.
        """
        values = [
            changed.get(n, _zero(x._box[0])) if isinstance(x, Variable) else x
            for n, x in enumerate(leaves)
        ]
        args = regrow(self.definition, values)[0]["args"]
        given = [arg for n, arg in enumerate(args) if n not in self.nondiff]
        return tuple(
            part if list(variables_below(arg)) else None
            for arg, part in zip(given, states_of(given))
        )

    def _cotangents(self, found: Any, args: Any, values: list[Any]) -> list[Any]:
        """The rule's tangents as flat values; zeros for what is not differentiated."""
        count = len(args) - len(self.nondiff)
        found = found if isinstance(found, tuple | list) else (found,)
        if len(found) != count:
            raise StructureError(
                f"custom_vjp: `bwd` returned {len(found)} tangents for {count} "
                "differentiable arguments."
            )
        tangents = filled(dict.fromkeys(self.nondiff), found, len(args))
        given = _paired(args, tuple(tangents), (), set())
        pairs = zip(self.parts.handled(given), self.parts.handled(self.active))
        return [
            x if on and x is not None and is_inexact(value) else _zero(value)
            for value, (x, on) in zip(values, pairs)
        ]


def _paired(value: Any, tangent: Any, path: Path, seen: set[int]) -> Iterator[Any]:
    """What a tangent holds for each leaf of a value, in order; None for none."""
    if isinstance(value, Node | Variable):
        if id(value) in seen:
            return
        seen.add(id(value))
    inside = opened(value)
    if inside is None:
        yield tangent._box[0] if isinstance(tangent, Variable) else tangent
        return
    keys, children = tuple(inside[0]), tuple(inside[1])
    held = opened(tangent)
    below: Any = dict(zip(*held)) if held else {None: tangent}
    if isinstance(tangent, Mapping):
        below = tangent
    extra = [key for key in below if key not in keys]
    is_state = isinstance(tangent, State) or tangent is None
    if extra or not (is_state or len(below) == len(keys)):
        raise StructureError(
            f"custom_vjp: the tangent that `bwd` returned for {show_path(path)} does "
            f"not fit: it is a {type(tangent).__name__} with {list(below)}, the "
            f"argument is a {type(value).__name__} with {list(keys)}. Return a tree "
            "like the argument."
        )
    for key, child in zip(keys, children):
        yield from _paired(child, below.get(key), (*path, key), seen)


def _is_numeric(value: Any) -> bool:
    return all(isinstance(x, NUMERIC) for x in jax.tree.leaves(value))


@transform
def custom_vjp(
    fun: Callable[..., Any] = MISSING,
    *,
    nondiff_argnums: int | Sequence[int] = (),
    **options: Unpack[Options],
) -> Any:
    """Gives a function a reverse rule of its own; see `CustomVjp.defvjp`.

    Args:
        fun: The function; without it, a decorator.
        nondiff_argnums: Arguments that are not differentiated; they may hold Variables.
        **options: As for `treetap.jit`.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> @tt.custom_vjp
        ... def twice(p):
        ...     return p * 2
        >>> twice.defvjp(lambda p: (p * 2, None), lambda _, g: (tt.Param(g * 10),))
        >>> float(tt.grad(twice)(tt.Param(1.0))[...])
        10.0
    """
    lift = Lift.of("custom_vjp", options)
    numbers = check_numbers(nondiff_argnums, lift, "nondiff_argnums")
    return CustomVjp(fun, numbers, lift)
