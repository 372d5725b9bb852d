# SPDX-License-Identifier: Apache-2.0
"""Reductions: how the states of reducers are made, merged and carried.

A `Reduced` is what some reducers know of one array. It also says whether anything was
`seen` at all: a branch that was not taken and a loop that did not run have seen nothing
and count for nothing, so reducers need no neutral element. The shape of `seen` is that
of the axes that are kept apart (iterations of a scan, shards); all states have them in
front.

`Reduction` is the same for the leaves of a tap, in the flat form that the walk carries.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass

from treetap._capture.statistics.arithmetic import has_spread_axes
from treetap._capture.statistics.reducers import Reducers
from treetap._core.errors import CaptureError


@register_dataclass
@dataclass(frozen=True, eq=False)
class Reduced:
    """What reducers know of one array.

    Attributes:
        seen: Whether there was anything; its axes are those kept apart.
        states: The state of each reducer.
        reducers: The reducers by name.
    """

    seen: jax.Array
    states: tuple[Any, ...]
    reducers: Reducers = field(default=(), metadata={"static": True})

    @property
    def stats(self) -> dict[str, Any]:
        """The results by name; axes that are kept apart come first."""
        return _finished(self)

    def merge(self, other: "Reduced") -> "Reduced":
        """What is known of both, with the same axes kept apart."""
        if self.reducers != other.reducers or _types(self) != _types(other):
            raise CaptureError(
                "Statistics of different sorts or shapes cannot be merged: "
                f"{_types(self)} and {_types(other)}."
            )
        return _merge(self, other)

    def total(self, start: int = 0, stop: int | None = None) -> "Reduced":
        """All together, or with only some of the axes kept apart put together."""
        stop = jnp.ndim(self.seen) if stop is None else stop
        return self if start >= stop else _total(self, start, stop)


def _types(reduced: Reduced) -> list[str]:
    return [jax.typeof(leaf).str_short() for leaf in jax.tree.leaves(reduced)]


def _mapped(fn: Callable[..., Any], times: int) -> Callable[..., Any]:
    for _ in range(times):
        fn = jax.vmap(fn)
    return fn


@jax.jit
def _finished(reduced: Reduced) -> dict[str, Any]:
    def finish(states: Any) -> dict[str, Any]:
        pairs = zip(reduced.reducers, states)
        return {
            name: reducer.finish(state) if hasattr(reducer, "finish") else state
            for (name, reducer), state in pairs
        }

    return _mapped(finish, reduced.seen.ndim)(reduced.states)


@jax.jit
def _merge(first: Reduced, second: Reduced) -> Reduced:
    return _mapped(merged, first.seen.ndim)(first, second)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _total(reduced: Reduced, start: int, stop: int) -> Reduced:
    """Pairs of neighbours, then pairs of pairs: the order stays."""

    def flat(leaf: jax.Array) -> jax.Array:
        shape = leaf.shape
        count = math.prod(shape[start:stop])
        return leaf.reshape(*shape[:start], count, *shape[stop:])

    held = jax.tree.map(flat, reduced)
    merge = _mapped(merged, held.seen.ndim)
    count = held.seen.shape[start]

    def part(first: int, last: int, step: int) -> Reduced:
        place = (*[slice(None)] * start, slice(first, last, step))
        return jax.tree.map(lambda leaf: leaf[place], held)

    while count > 1:
        even = count - count % 2
        pairs = merge(part(0, even, 2), part(1, even, 2))
        rest = part(even, count, 1)
        held = jax.tree.map(lambda *x: jnp.concatenate(x, start), pairs, rest)
        count = held.seen.shape[start]
    if count == 0:  # a sum of nothing is 0, or False
        return jax.tree.map(lambda x: jnp.sum(x, start, dtype=x.dtype), held)
    return jax.tree.map(lambda x: jnp.squeeze(x, start), held)


def merged(first: Reduced, second: Reduced) -> Reduced:
    """What is known of both, with no axes kept apart."""
    states = []
    for (name, reducer), mine, other in zip(
        first.reducers, first.states, second.states
    ):
        both = reducer.merge(mine, other)
        _check_state(name, mine, both)
        states.append(
            jax.tree.map(
                lambda new, old, more: jnp.where(
                    first.seen & second.seen, new, jnp.where(first.seen, old, more)
                ),
                both,
                mine,
                other,
            )
        )
    return Reduced(first.seen | second.seen, tuple(states), first.reducers)


def _check_state(name: str, state: Any, both: Any) -> None:
    """Refuses a merge that gives something else than a state."""

    def types(tree: Any) -> tuple[Any, list[Any]]:
        kinds = [(jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(tree)]
        return jax.tree.structure(tree), kinds

    if types(state) != types(both):
        raise CaptureError(
            f"The reducer {name!r} measures {types(state)}, and merges two of them to "
            f"{types(both)}. Both must have the same structure, shapes and types."
        )


def is_measurable(aval: object) -> bool:
    """Whether a value is an array of numbers."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None or not hasattr(aval, "shape"):
        return False
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.number, jnp.bool_))


def is_measured(leaf: object) -> bool:
    """The same of a value itself; Python's numbers are arrays to JAX."""
    return isinstance(leaf, bool | int | float | complex) or is_measurable(leaf)


@functools.partial(jax.jit, static_argnums=(0,))
def _measured(reducers: Reducers, value: jax.Array, seen: jax.Array) -> Reduced:
    """What is known of one array, with no axes kept apart."""
    value = jax.lax.stop_gradient(value)
    states = [jax.tree.map(jnp.asarray, one.measure(value)) for _, one in reducers]
    return jax.tree.map(_whole, Reduced(seen, tuple(states), reducers))


def _whole(leaf: jax.Array) -> jax.Array:
    """A part of a state on every device of an explicit mesh."""
    if not has_spread_axes(leaf):
        return leaf
    return jax.sharding.reshard(leaf, jax.P(*[None] * leaf.ndim))


def _nothing(reducers: Reducers, aval: Any) -> Reduced:
    """As of an array without elements."""
    shape = tuple(size or 1 for size in aval.shape)
    like = jax.ShapeDtypeStruct(shape, aval.dtype)
    found = jax.eval_shape(functools.partial(_measured, reducers), like, True)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), found)


def measured(
    reducers: Reducers, value: jax.Array, guards: Sequence[jax.Array], rows: int
) -> Reduced:
    """What is known of an array.

    Args:
        reducers: The reducers.
        value: The array.
        guards: Whether it counts: for all of it, or by row of a mapping.
        rows: How many of its first axes are kept apart.
    """
    if value.size == 0:
        nothing = _nothing(reducers, value)
        shape = value.shape[:rows]
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (*shape, *x.shape)), nothing)
    lead, seen = rows, jnp.ones(value.shape[:rows], bool)
    for guard in guards:
        place = _place_of(guard.shape, value.shape)
        # None: the value is the same for all rows.
        mask = jnp.any(guard) if place is None else guard
        more = max(lead, (place or 0) + mask.ndim)
        seen = jnp.broadcast_to(_padded(seen, 0, more), value.shape[:more])
        seen = seen & _padded(mask, place or 0, more)
        lead = more
    measure = functools.partial(_measured, reducers)
    return _mapped(measure, lead)(value, seen).total(rows, lead)


def _padded(mask: jax.Array, place: int, ndim: int) -> jax.Array:
    """A mask whose axes begin at a place, among so many axes."""
    after = ndim - place - mask.ndim
    return mask.reshape((1,) * place + mask.shape + (1,) * after)


def _place_of(part: Sequence[int], shape: Sequence[int]) -> int | None:
    """Where a mask's axes are among those of a value."""
    for place in range(len(shape) - len(part) + 1):
        if tuple(shape[place : place + len(part)]) == tuple(part):
            return place
    return None


@dataclass(frozen=True)
class Reduction:
    """What is to be measured at a tap: its reducers, and how many rows apart."""

    reducers: Reducers
    rows: int = 0

    def by_row(self, rows: int) -> "Reduction":
        """The same with that many rows apart."""
        return Reduction(self.reducers, rows)

    def measure(
        self, leaves: Sequence[Any], guards: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """The flat states of all leaves that are arrays of numbers."""
        found = [
            measured(self.reducers, jnp.asarray(leaf), guards, self.rows)
            for leaf in leaves
            if is_measured(leaf)
        ]
        return jax.tree.leaves(found)

    def width(self, avals: Sequence[Any]) -> int:
        """How many arrays `measure` gives for leaves of such types."""
        structures = [self._structure(aval) for aval in avals if is_measurable(aval)]
        return sum(structure.num_leaves for structure in structures)

    def shaped(self, avals: Sequence[Any], flat: Sequence[jax.Array]) -> list[Any]:
        """A `Reduced` for each leaf, or None."""
        supply = iter(flat)
        found: list[Any] = []
        for aval in avals:
            if not is_measurable(aval):
                found.append(None)
                continue
            structure = self._structure(aval)
            leaves = [next(supply) for _ in range(structure.num_leaves)]
            found.append(jax.tree.unflatten(structure, leaves))
        return found

    def merge(
        self,
        avals: Sequence[Any],
        first: Sequence[jax.Array],
        second: Sequence[jax.Array],
    ) -> list[jax.Array]:
        """Flat states of both."""
        pairs = zip(self.shaped(avals, first), self.shaped(avals, second))
        return jax.tree.leaves([_merge(a, b) for a, b in pairs if a is not None])

    def joined(
        self, avals: Sequence[Any], flat: Sequence[jax.Array], stop: int
    ) -> list[jax.Array]:
        """Flat states that keep this one's rows apart, from some with more rows."""
        found = [one for one in self.shaped(avals, flat) if one is not None]
        return jax.tree.leaves([one.total(self.rows, stop) for one in found])

    def _structure(self, aval: Any) -> Any:
        return _structure(self.reducers, tuple(aval.shape), str(aval.dtype))


@functools.lru_cache(maxsize=4096)
def _structure(reducers: Reducers, shape: tuple[int, ...], dtype: str) -> Any:
    aval = jax.ShapeDtypeStruct(shape, dtype)
    return jax.tree.structure(jax.eval_shape(lambda: _nothing(reducers, aval)))
