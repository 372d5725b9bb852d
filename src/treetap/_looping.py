# SPDX-License-Identifier: Apache-2.0
"""scan, while_loop and fori_loop: the same function again and again.

What is carried keeps its Variables: the function must return the very Variables it was
given, in the same places, and the caller's Variables hold the final values afterwards.
Variables that a scan does not map over are carried as well, so they may be changed.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from treetap._changes import Policy, Structure, policy_of
from treetap._errors import StructureError
from treetap._graphs import GraphDef, take_leaves
from treetap._lift import (
    Inputs,
    Inside,
    Lanes,
    Updates,
    Written,
    inputs_of,
    pack_output,
    raw_values,
    resolve_mode,
    transform,
    unpack_output,
)
from treetap._metadata import MISSING
from treetap._prefixes import check_prefix, spread
from treetap._regrowing import regrow
from treetap._trees import show_path
from treetap._values import is_ref
from treetap._variables import Variable

T = TypeVar("T")


class Carry:
    """Marks, in `in_axes` and `out_axes` of `scan`, what is passed on."""


def same_carry(before: Any, after: Any, name: str) -> tuple[GraphDef, list[Any]]:
    """The leaves of a carried value after a step; its Variables must be the same."""
    definition, old = take_leaves({"carry": before}, True, name)
    found, new = take_leaves({"carry": after}, True, name)
    for one, two in zip(old, new):
        has_variable = isinstance(one, Variable) or isinstance(two, Variable)
        if has_variable and one is not two:
            kind = type(one if isinstance(one, Variable) else two).__name__
            raise StructureError(
                f"{name} Variable identity must be preserved across iterations: a "
                f"{kind} of the carry came back as another one, or in another place. "
                "Change Variables in place, and return the value you were given."
            )
    if found != definition:
        raise StructureError(
            f"{name}: the carry changed its structure from\n{definition}\nto\n{found}\n"
            "Return a value like the one you were given."
        )
    return found, new


def _move(values: Any, source: int, target: int) -> Any:
    if source == target:
        return values
    return jax.tree.map(lambda x: jnp.moveaxis(x, source, target), values)


class _Axes:
    """The checked `in_axes` and `out_axes` of a scan."""

    def __init__(self, in_axes: Any, out_axes: Any):
        self.inputs = tuple(in_axes) if isinstance(in_axes, list) else in_axes
        self.outputs = tuple(out_axes) if isinstance(out_axes, list) else out_axes
        for given, argument in ((self.inputs, "in_axes"), (self.outputs, "out_axes")):
            check_prefix(given, "scan", argument)
            _check_carry(given, argument)
        if self.has_carry(self.inputs) != self.has_carry(self.outputs):
            raise StructureError(
                "scan: If one of in_axes or out_axes has Carry, the other must also "
                f"have Carry; got in_axes={in_axes} and out_axes={out_axes}."
            )
        outputs = self.outputs if isinstance(self.outputs, tuple) else (self.outputs,)
        for place, axis in enumerate(outputs):
            parts = jax.tree.leaves(axis, is_leaf=lambda part: part is None)
            if any(part is None for part in parts):
                raise StructureError(
                    f"scan: Cannot broadcast output state: out_axes has None at "
                    f"position {place}. Return it as Carry, or give an axis."
                )

    @staticmethod
    def has_carry(given: Any) -> bool:
        """Whether Carry stands in a prefix."""
        return given is Carry or (isinstance(given, tuple) and Carry in given)

    def carry_of(self, args: tuple[Any, ...]) -> Any:
        """The carried argument."""
        if self.inputs is Carry:
            return args[0]
        return args[self.inputs.index(Carry)]

    def parted(self, out: Any) -> tuple[Any, Any]:
        """A result as (carry, what is stacked)."""
        if not self.has_carry(self.outputs):
            return None, out
        if self.outputs is Carry:
            return out, ()
        if not isinstance(out, tuple) or len(out) != len(self.outputs):
            found = (
                f"{len(out)} items" if isinstance(out, tuple) else type(out).__name__
            )
            raise StructureError(
                f"scan: out_axes has {len(self.outputs)} entries, so the function must "
                f"return a tuple of that many; it returned {found}."
            )
        place = self.outputs.index(Carry)
        return out[place], (*out[:place], *out[place + 1 :])

    def joined(self, carry: Any, stacked: Any) -> Any:
        """The inverse of `parted`, with stacked axes moved to their places."""
        if self.outputs is Carry:
            return carry
        if not self.has_carry(self.outputs):
            return _stack(self.outputs, stacked)
        place = self.outputs.index(Carry)
        axes = [*self.outputs[:place], *self.outputs[place + 1 :]]
        moved = [_stack(axis, part) for axis, part in zip(axes, stacked)]
        return (*moved[:place], carry, *moved[place:])


def _stack(axes: Any, parts: Any) -> Any:
    return jax.tree.map(lambda axis, part: _move(part, 0, axis), axes, parts)


def _check_carry(given: Any, argument: str) -> None:
    entries = given if isinstance(given, tuple) else (given,)
    if sum(entry is Carry for entry in entries) > 1:
        raise StructureError(
            f"scan: Found multiple Carry definitions in {argument}: {given}. "
            "Put what is carried into one argument."
        )
    for place, entry in enumerate(entries):
        if entry is Carry:
            continue
        nested = jax.tree.leaves(entry, is_leaf=lambda x: x is Carry)
        if any(leaf is Carry for leaf in nested):
            raise StructureError(
                f"scan: Carry must stand at the top level of {argument}, not inside "
                f"entry {show_path((place,))}."
            )


class _Step:
    """One step of a scan, as JAX traces it: made once for arguments of one structure.

    Args:
        f: The function.
        axes: Where things are carried and mapped.
        definition: The arguments' description.
        of_leaf: For each leaf Carry, an axis, or None. What has None is carried too.
    """

    def __init__(
        self,
        f: Any,
        axes: _Axes,
        definition: GraphDef,
        of_leaf: Any,
        fixed: dict[int, Any],
    ):
        self.f = f
        self.fixed = fixed  # Refs by number: JAX wants them from outside
        self.axes = axes
        self.definition = definition
        self.of_leaf = of_leaf
        self.mapped = [isinstance(axis, int) for axis in of_leaf]
        self.lanes = Lanes([axis if isinstance(axis, int) else 0 for axis in of_leaf])

    def __call__(self, carry: list[Any], mapped: list[Any]) -> Any:
        """The next carry, and what this step adds to the stacks."""
        sources = {True: iter(mapped), False: iter(carry)}
        values = [
            self.fixed[number] if number in self.fixed else next(sources[flag])
            for number, flag in enumerate(self.mapped)
        ]
        inside = Inside(self.definition, values, "scan")
        args = inside.tree["args"]
        has_carry = self.axes.has_carry(self.axes.inputs)
        before = self.axes.carry_of(args) if has_carry else None
        with Structure(inside.tree, "scan", policy_of(self.f)):
            out = self.f(*args)
        after, stacked = self.axes.parted(out)
        inside.check_output(stacked, self.definition.graph)
        _, new = same_carry(before, after, "scan")
        updates = inside.updates(
            self.lanes.of_leaf,
            len(self.lanes.prefixes),
            only=lambda number: self.mapped[number],
        )
        carried = inside.updates(
            [0] * len(values), 1, only=lambda number: not self.mapped[number]
        )
        packed = pack_output(stacked, self.definition.graph, "scan")
        return self._carry(inside, new), (packed, updates, carried.written)

    def _carry(self, inside: Inside, new: list[Any]) -> list[Any]:
        """New plain leaves, and the Variables' present values."""
        plain = iter([leaf for leaf in new if not isinstance(leaf, Variable)])
        values = []
        for number, (leaf, axis) in enumerate(zip(inside.leaves, self.of_leaf)):
            if self.mapped[number] or number in self.fixed:
                continue
            if isinstance(leaf, Variable):
                values.append(leaf._box[0])
            else:
                values.append(next(plain) if axis is Carry else leaf)
        return values


class _Scan:
    """One call of a scan: from arguments to results."""

    def __init__(self, inputs: Inputs, step: _Step):
        self.inputs = inputs
        self.step = step

    def start(self) -> tuple[list[Any], list[Any]]:
        """The first carry, and what is mapped over, its axis in front."""
        everything = zip(self.inputs.values(), self.step.of_leaf)
        pairs = [p for n, p in enumerate(everything) if n not in self.step.fixed]
        carry = [value for value, axis in pairs if not isinstance(axis, int)]
        mapped = [
            _move(value, axis, 0) for value, axis in pairs if isinstance(axis, int)
        ]
        return carry, mapped

    def finish(self, carry: list[Any], out: Any) -> Any:
        """Writes Variables back and puts the result together."""
        packed, updates, carried = out
        axes, inputs = self.step.axes, self.inputs
        moved = tuple(
            _move(values, 0, axis)
            for values, axis in zip(updates.values, self.step.lanes.prefixes)
        )
        numbers = [
            number
            for number, is_mapped in enumerate(self.step.mapped)
            if not is_mapped and number not in self.step.fixed
        ]
        final = dict(zip(numbers, carry))
        values = (*moved, [final[number] for number, _ in carried.lanes[0]])
        lanes = (*updates.written.lanes, *carried.lanes)
        inputs.write_back(Updates(values, Written(lanes)))
        returned = None
        if axes.has_carry(axes.inputs):
            kept = [
                leaf if isinstance(leaf, Variable) else final.get(number, leaf)
                for number, leaf in enumerate(inputs.leaves)
            ]
            tree, _ = regrow(inputs.definition, kept)
            returned = axes.carry_of(tree["args"])
        return axes.joined(returned, unpack_output(packed))


@transform
def scan(
    f: Callable[..., Any] = MISSING,
    *,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    _split_transpose: bool = False,
    in_axes: Any = (Carry, 0),
    out_axes: Any = (Carry, 0),
    graph: bool | None = None,
    graph_updates: bool | None = None,
    on_structure_change: Policy | None = None,
) -> Callable[..., Any]:
    """Calls a function once for each slice of its arguments, passing a carry on.

    Args:
        f: The function; without it, a decorator.
        length: The number of steps, if no argument tells.
        reverse: Go from the last slice to the first.
        unroll: As for `jax.lax.scan`.
        in_axes: For each argument `Carry`, an axis, None (the same for all steps), or a
            prefix of axes. Variables with None may be changed; they are carried.
        out_axes: For each part of the result `Carry` or an axis.
        graph: Allow shared references.
        graph_updates: Only False is supported.
        on_structure_change: As for `treetap.jit`.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> total = tt.Variable(jnp.array(0.0))
        >>> def add(total, x):
        ...     total[...] += x
        ...     return total[...] * 1
        >>> tt.scan(add, in_axes=(None, 0), out_axes=0)(total, jnp.arange(3.0))
        Array([0., 1., 3.], dtype=float32)
        >>> float(total)
        3.0
    """
    mode = bool(graph)
    axes = _Axes(in_axes, out_axes)
    options = {
        "length": length,
        "reverse": reverse,
        "unroll": unroll,
        "_split_transpose": _split_transpose,
    }
    if f is MISSING:
        given = {"in_axes": in_axes, "out_axes": out_axes, "graph_updates": False}
        return functools.partial(scan, **options, **given, graph=mode)
    steps: dict[Any, _Step] = {}  # JAX traces a function it knows only once

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        args = _positional(f, args, kwargs) if kwargs else args
        if axes.inputs is Carry and len(args) != 1:
            raise StructureError(
                "scan: When in_axes=Carry, the function must take exactly one "
                f"argument; {len(args)} were given."
            )
        work = _prepared(f, axes, inputs_of(args, {}, mode, "scan"), steps)
        return work.finish(*jax.lax.scan(work.step, *work.start(), **options))

    return call


def _positional(f: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """All arguments by position."""
    bound = inspect.signature(f).bind(*args, **kwargs)
    if bound.kwargs:
        raise TypeError(
            f"scan: {sorted(bound.kwargs)} can only be passed by keyword, and "
            "`in_axes` has entries for positional arguments only."
        )
    return bound.args


def _prepared(f: Any, axes: _Axes, inputs: Inputs, steps: dict[Any, _Step]) -> _Scan:
    """A call of a scan, with the step that was made for arguments of this structure."""
    prefix = {"args": axes.inputs, "kwargs": None}
    of_leaf = tuple(spread(prefix, inputs.tree, "scan", "in_axes"))
    key = (inputs.definition, of_leaf)
    fixed = {n: x for n, x in enumerate(inputs.values()) if is_ref(x)}
    step = None if fixed else steps.get(key)
    if step is None:
        step = steps[key] = _Step(f, axes, *key, fixed)
    return _Scan(inputs, step)


class _Loop:
    """The carried value of a while or fori loop."""

    def __init__(self, value: Any, graph: bool, name: str, policy: Policy | None):
        self.name = name
        self.policy: Policy | None = policy
        self.inputs = Inputs({"carry": value}, graph, name)
        values = self.inputs.values()
        self.fixed = {n: x for n, x in enumerate(values) if is_ref(x)}
        self.values = [x for n, x in enumerate(values) if n not in self.fixed]

    def enter(self, values: Any) -> tuple[Inside, Any]:
        """The value at this level."""
        inside = Inside(self.inputs.definition, self.all(values), self.name)
        return inside, inside.tree["carry"]

    def all(self, values: Any) -> list[Any]:
        """All values in order: those that are carried, and Refs, which are not."""
        supply = iter(values)
        count = len(self.inputs.leaves)
        return [
            self.fixed[n] if n in self.fixed else next(supply) for n in range(count)
        ]

    def step(self, values: Any, body: Callable[[Any], Any], found: Any = None) -> Any:
        """The values after a step; `found` collects which Variables it changed."""
        inside, value = self.enter(values)
        with Structure(inside.tree, self.name, self.policy):
            out = body(value)
        _, leaves = same_carry(inside.tree["carry"], out, self.name)
        if found is not None:
            updates = inside.updates([0] * len(inside.leaves), 1)
            found.extend(updates.written.lanes[0])
        values = raw_values(leaves)
        return [x for n, x in enumerate(values) if n not in self.fixed]

    def changed(self, body: Callable[..., Any], *args: Any) -> list[tuple[int, Any]]:
        """Which Variables the body changes, and their metadata: by tracing it once."""
        found: list[tuple[int, Any]] = []

        def probe(values: Any, *args: Any) -> Any:
            self.step(values, functools.partial(body, *args), found)

        jax.eval_shape(probe, self.values, *args)
        return found

    def finish(self, values: list[Any], changed: list[tuple[int, Any]]) -> Any:
        """The caller's value with the final numbers."""
        leaves, values = self.inputs.leaves, self.all(values)
        finals = ([values[number] for number, _ in changed],)
        self.inputs.write_back(Updates(finals, Written((tuple(changed),))))
        kept = [
            leaf if isinstance(leaf, Variable) else value
            for leaf, value in zip(leaves, values)
        ]
        return regrow(self.inputs.definition, kept)[0]["carry"]


def while_loop(
    cond_fun: Callable[[T], Any],
    body_fun: Callable[[T], T],
    init_val: T,
    *,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    on_structure_change: Policy | None = None,
) -> T:
    """Repeats `body_fun` while `cond_fun` holds.

    Args:
        cond_fun: A function of the carried value; it may not change Variables.
        body_fun: From the carried value to the next; it returns the same Variables.
        init_val: The first value.
        graph: Allow shared references.
        graph_updates: Only False is supported.
        on_structure_change: As for `treetap.jit`.
    """
    mode = resolve_mode(graph, graph_updates, "while_loop")
    loop = _Loop(init_val, mode, "while_loop", on_structure_change)

    def cond(values: Any) -> Any:
        inside, value = loop.enter(values)
        holds = cond_fun(value)
        if any(map(inside.changed, range(len(inside.leaves)))):
            raise StructureError(
                "while_loop: the condition changed a Variable, and JAX drops what it "
                "computes. Change Variables in the body."
            )
        return holds

    def body(values: Any) -> Any:
        return loop.step(values, body_fun)

    changed = loop.changed(body_fun)
    final = jax.lax.while_loop(cond, body, loop.values)
    return loop.finish(final, changed)


def fori_loop(
    lower: Any,
    upper: Any,
    body_fun: Callable[[Any, T], T],
    init_val: T,
    *,
    unroll: int | bool | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    on_structure_change: Policy | None = None,
) -> T:
    """Repeats `body_fun(i, value)` for i from `lower` to `upper`.

    Args:
        lower: The first i.
        upper: One past the last.
        body_fun: From i and the carried value to the next; it returns the same
            Variables.
        init_val: The first value.
        unroll: As for `jax.lax.fori_loop`.
        graph: Allow shared references.
        graph_updates: Only False is supported.
        on_structure_change: As for `treetap.jit`.
    """
    mode = resolve_mode(graph, graph_updates, "fori_loop")
    loop = _Loop(init_val, mode, "fori_loop", on_structure_change)

    def body(i: Any, values: Any) -> Any:
        return loop.step(values, functools.partial(body_fun, i))

    changed = loop.changed(body_fun, jnp.asarray(lower))
    final = jax.lax.fori_loop(lower, upper, body, loop.values, unroll=unroll)
    return loop.finish(final, changed)
