# SPDX-License-Identifier: Apache-2.0
"""scan: the same function for each slice, with a carry passed on.

What is carried keeps its Variables: the function must return the very Variables it was
given, in the same places, and the caller's Variables hold the final values afterwards.
Variables that a scan does not map over are carried as well, so they may be changed.
With graph updates, streams of random keys are not: as in NNX, a stream that is not
mapped over gives every step the same keys.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar, Unpack

import jax
import jax.numpy as jnp

from treetap._core.errors import StructureError
from treetap._core.paths import show_path
from treetap._core.trees.graphdef import GraphDef
from treetap._core.variables.kinds import RngState
from treetap._core.variables.metadata import MISSING
from treetap._core.variables.values import is_ref
from treetap._core.variables.variable import raw_values
from treetap._transforms.lift.arguments import NO_STATICS, positional
from treetap._transforms.lift.axis_names import NO_NAMES, with_names
from treetap._transforms.lift.carry import Carried, written_at
from treetap._transforms.lift.kept_traces import kept
from treetap._transforms.lift.lift import (
    Inputs,
    Inside,
    Lift,
    Options,
    Updates,
    Written,
    filled,
    transform,
)
from treetap._transforms.lift.prefixes import (
    StateAxes,
    check_prefix,
    spread,
    values_in,
)
from treetap._transforms.lift.program import Key
from treetap._transforms.lift.results import Results, as_tuple
from treetap._transforms.lift.structure_updates import PrefixGroups

T = TypeVar("T")


class Carry:
    """Marks, in `in_axes` and `out_axes` of `scan`, what is passed on."""


def _move(values: Any, source: int, target: int) -> Any:
    if source == target:
        return values
    return jax.tree.map(lambda x: jnp.moveaxis(x, source, target), values)


class _Axes:
    """The checked `in_axes` and `out_axes` of a scan.

    Attributes:
        inputs, outputs: Both, with Carry alone as the only entry of a tuple.
        carry_in, carry_out: The place of Carry in them; None if it is in neither.
        results: Where what is stacked lies.
    """

    def __init__(self, in_axes: Any, out_axes: Any, lift: Lift):
        self.lift = lift
        self.is_all_carry = out_axes is Carry
        self.inputs, self.carry_in = _checked(in_axes, "in_axes", lift)
        self.outputs, self.carry_out = _checked(out_axes, "out_axes", lift)
        if (self.carry_in is None) != (self.carry_out is None):
            raise StructureError(
                "scan: If one of in_axes or out_axes has Carry, the other must also "
                f"have Carry; got in_axes={in_axes} and out_axes={out_axes}."
            )
        outputs = self.outputs if isinstance(self.outputs, tuple) else (self.outputs,)
        for place, axis in enumerate(outputs):
            values = [] if axis is Carry else values_in(axis)
            if not all(isinstance(value, int) for value in values):
                got = f" Got {axis}." if isinstance(axis, StateAxes) else ""
                raise StructureError(
                    f"scan: Cannot broadcast output state.{got} out_axes has something "
                    f"else than an axis at position {place}. Return it as Carry, or "
                    "give an axis."
                )
        _, stacked = self.parted(self.outputs)
        self.results = Results(stacked, lift.mode, "scan", "out_axes", 0)

    def carry_of(self, args: tuple[Any, ...]) -> Any:
        """The carried argument; None if there is none."""
        return None if self.carry_in is None else args[self.carry_in]

    def carried_leaves(self, inputs: Inputs) -> list[int]:
        """The leaves of the carried argument, by number."""
        if self.carry_in is None:
            return []
        is_carry = tuple(n == self.carry_in for n in range(len(inputs.args)))
        tree = {"args": is_carry, "kwargs": False}
        flags = spread(tree, inputs.tree, "scan", "in_axes")
        return [number for number, flag in enumerate(flags) if flag]

    def parted(self, out: Any) -> tuple[Any, Any]:
        """A result as (carry, what is stacked)."""
        place = self.carry_out
        if place is None:
            return None, out
        if self.is_all_carry:
            out = (out,)
        count = len(self.outputs)
        demand = f"scan: out_axes has {count} entries, so the function must return a "
        out = as_tuple(out, count, f"{demand}tuple of that many")
        return out[place], (*out[:place], *out[place + 1 :])

    def moved(self, stacked: Any) -> Any:
        """What was stacked, with the new axis moved from the front to its place."""
        axes = self.results.for_jax
        return jax.tree.map(lambda axis, part: _move(part, 0, axis), axes, stacked)

    def joined(self, carry: Any, stacked: Any) -> Any:
        """The inverse of `parted`."""
        place = self.carry_out
        if place is None:
            return stacked
        whole = (*stacked[:place], carry, *stacked[place:])
        return carry if self.is_all_carry else whole


def _checked(given: Any, argument: str, lift: Lift) -> tuple[Any, int | None]:
    """`in_axes` or `out_axes`, and the place of Carry in them, if it is there."""
    given = tuple(given) if isinstance(given, list) else given
    check_prefix(given, "scan", argument, lift.mode)
    entries = given if isinstance(given, tuple) else (given,)
    if sum(entry is Carry for entry in entries) > 1:
        raise StructureError(
            f"scan: Found multiple Carry definitions in {argument}: {given}. "
            "Put what is carried into one argument."
        )
    for place, entry in enumerate(entries):
        if entry is not Carry and Carry in jax.tree.leaves(entry):
            raise StructureError(
                f"scan: Carry must stand at the top level of {argument}, not inside "
                f"entry {show_path((place,))}."
            )
    if Carry not in entries:
        return given, None
    return entries, entries.index(Carry)


@dataclass(eq=False)
class _Step:
    """One step of a scan, as JAX traces it: made once for arguments of one structure.

    Attributes:
        f: The function.
        axes: Where things are carried and mapped.
        source: What to rebuild the arguments from: see `Inputs.outline`.
        groups: For each leaf Carry, an axis, or None. What has None is carried too.
        fixed: Refs by number. A scan cannot carry one: it is used from outside.
        numbers: The leaves of the carried argument, by number.
    """

    f: Any
    axes: _Axes
    source: Inputs | GraphDef
    groups: PrefixGroups
    fixed: dict[int, Any]
    numbers: list[int]

    def __post_init__(self) -> None:
        groups, fixed = self.groups, self.fixed
        self.of_leaf = groups.by_leaf()
        groups.carried = {n for n, x in enumerate(groups.prefixes) if x is Carry}
        rest = [n for n, axis in enumerate(self.of_leaf) if not isinstance(axis, int)]
        self.carried = [number for number in rest if number not in fixed]
        self.others = sorted({*range(len(self.of_leaf))} - {*self.carried})

    def __call__(self, carry: list[Any], mapped: list[Any]) -> Any:
        """The next carry, and what this step adds to the stacks."""
        rest = self.fixed | dict(zip(self.carried, carry))
        values = filled(rest, mapped, len(self.of_leaf))
        inside = Inside(self.source, values, self.axes.lift)
        args = inside.tree["args"]
        carried = Carried(inside, self.axes.carry_of(args), may_move=True)
        with inside.watched(carried.members):
            out = self.f(*args)
        after, stacked = self.axes.parted(out)
        new, moved = carried.after(after)
        structure = inside.structure
        if structure is not None and any(moved):
            structure.forget(carried.members)
        choices = {"numbers": self.others, "results": self.axes.results}
        flat, updates = inside.finish(stacked, self.groups, **choices)
        self._check_new(updates)
        same = dict(zip(self.carried, carry)) if structure is not None else {}
        same = {n: x for n, x in same.items() if self._is_broadcast_key(inside, n)}
        changed = inside.carried(n for n in self.carried if n not in same)
        written = Written((tuple(changed.items()),))
        leaves = dict(enumerate(raw_values(inside.leaves)))
        leaves |= dict(zip(self.numbers, raw_values(new))) | same
        carry = [leaves[number] for number in self.carried]
        return carry, (flat, updates, written, moved)

    def _is_broadcast_key(self, inside: Inside, number: int) -> bool:
        """Whether a leaf is of a random stream that all steps use as it was."""
        is_same = self.of_leaf[number] is None
        return is_same and isinstance(inside.leaves[number], RngState)

    def _check_new(self, updates: Updates) -> None:
        """Refuses new leaves in an object that is not mapped over."""
        for axis, values in zip(self.groups.prefixes, updates.values):
            if values and not isinstance(axis, int):
                kind = "a carried object" if axis is Carry else "an object on axis None"
                raise StructureError(
                    f"scan: {kind} got a new Variable, or another array, inside: there "
                    "is no place for one per step. Map over it, or give what is new an "
                    "axis with `StateAxes`."
                )


def _finish(inputs: Inputs, step: _Step, carry: list[Any], out: Any) -> Any:
    """Writes Variables back and puts the result together."""
    stacked, updates, carried, places = out
    axes = step.axes
    pairs = zip(updates.values, step.groups.prefixes)
    moved = [_move(values, 0, axis) for values, axis in pairs]
    final = dict(zip(step.carried, carry))
    # Objects take what is left in a group; what was carried has one of its own.
    ends, facts = written_at(dict(carried.groups[0]), places)
    values = (*moved, [final[number] for number in ends])
    groups = (*updates.written.groups, facts)
    written = replace(updates.written, groups=groups)
    returned = None
    if axes.carry_in is not None:
        returned = axes.carry_of(inputs.with_plain(final, places)["args"])
    result = inputs.finish(axes.moved(stacked), Updates(values, written))
    return axes.joined(returned, result)


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
    transform_metadata: Mapping[str, Any] = NO_NAMES,
    **options: Unpack[Options],
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
        transform_metadata: As for `treetap.vmap`.
        **options: As for `treetap.jit`.

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
    lift = Lift.of("scan", options)
    axes = _Axes(in_axes, out_axes, lift)
    counted = len(in_axes) if isinstance(in_axes, tuple) else 0
    f = with_names(f, in_axes, out_axes, transform_metadata, lift.mode)
    given = {"length": length, "reverse": reverse, "unroll": unroll}
    how = functools.partial(jax.lax.scan, **given, _split_transpose=_split_transpose)

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        args = positional(f, args, kwargs, "scan", "in_axes", count=counted)
        if in_axes is Carry and len(args) != 1:
            raise StructureError(
                "scan: When in_axes=Carry, the function must take exactly one "
                f"argument; {len(args)} were given."
            )
        inputs = lift.inputs(args, {})
        groups = inputs.spread({"args": axes.inputs, "kwargs": None}, "in_axes")
        key = Key(inputs.definition, NO_STATICS, (), groups)
        values = inputs.values()
        fixed = {n: x for n, x in enumerate(values) if is_ref(x)}

        def make(fn: Any) -> _Step:
            numbers = axes.carried_leaves(inputs)
            return _Step(fn, axes, inputs.outline(), groups, fixed, numbers)

        step = make(f) if fixed else kept((f,), key, lift, make, axes)
        carry = [values[number] for number in step.carried]
        pairs = zip(values, step.of_leaf)  # what is mapped over has its axis in front
        mapped = [_move(x, axis, 0) for x, axis in pairs if isinstance(axis, int)]
        return _finish(inputs, step, *how(step, carry, mapped))

    return call
