# SPDX-License-Identifier: Apache-2.0
"""Reductions: how the states of reducers are made, merged and carried.

A `Reduced` is what some reducers know of one array. It also says whether anything was
`seen` at all: a branch that was not taken and a loop that did not run have seen nothing
and count for nothing, so reducers need no neutral element. The shape of `seen` is that
of the axes that are kept apart (iterations of a scan, shards); all states have them in
front.

`Reduction` says what is to be measured of the leaves of a tap.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass

from treetap._capture.statistics.arithmetic import xp_of
from treetap._capture.statistics.reducers import Reducers, same
from treetap._core.errors import CaptureError
from treetap._core.wording import typed


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
    @jax.jit
    def stats(self) -> dict[str, Any]:
        """The results by name; axes that are kept apart come first."""

        def finished(states: Any) -> dict[str, Any]:
            pairs = zip(self.reducers, states)
            return {
                name: getattr(one, "finish", same)(state)
                for (name, one), state in pairs
            }

        return mapped(finished, self.seen.ndim)(self.states)

    @jax.jit
    def merge(self, other: "Reduced") -> "Reduced":
        """What is known of both, with the same axes kept apart."""
        if self.reducers != other.reducers or _types(self) != _types(other):
            raise CaptureError(
                "Statistics of different sorts or shapes cannot be merged: "
                f"{_types(self)} and {_types(other)}."
            )
        return mapped(merged, self.seen.ndim)(self, other)

    def at_turn(self, turn: jax.Array) -> "Reduced":
        """The same, for a reducer that notes in which turn of a `while` this was.

        Args:
            turn: The number of the turn; with rows that end one by one, that of each.
        """
        after = (1,) * (self.seen.ndim - turn.ndim)
        turns = jnp.broadcast_to(turn.reshape(turn.shape + after), self.seen.shape)
        states = tuple(
            mapped(one.at_turn, turns.ndim)(state, turns)
            if hasattr(one, "at_turn")
            else state
            for (_, one), state in zip(self.reducers, self.states)
        )
        return replace(self, states=states)

    def total(self, start: int = 0, stop: int | None = None) -> "Reduced":
        """All together, or with only some of the axes kept apart put together."""
        stop = jnp.ndim(self.seen) if stop is None else stop
        if start >= stop:
            return self
        return mapped(functools.partial(_total, axes=stop - start), start)(self)


def is_reduced(value: Any) -> bool:
    """Whether a value is what reducers know of one."""
    return isinstance(value, Reduced)


def on_each(fn: Callable[..., Any], *states: Any) -> Any:
    """What a function gives for each `Reduced` of a tree, or of several alike."""
    return jax.tree.map(fn, *states, is_leaf=is_reduced)


def _types(reduced: Reduced) -> list[str]:
    return list(map(typed, jax.tree.leaves(reduced)))


def mapped(fn: Callable[..., Any], times: int) -> Callable[..., Any]:
    for _ in range(times):
        fn = jax.vmap(fn)
    return fn


@functools.partial(jax.jit, static_argnames="axes")
def _total(reduced: Reduced, axes: int) -> Reduced:
    """The first axes together: pairs of neighbours, then pairs of pairs, in order.

    Zeros that are not seen fill up the pairs: they count for nothing.
    """
    count = math.prod(reduced.seen.shape[:axes])
    rounds = max(count - 1, 0).bit_length()

    def flat(leaf: jax.Array) -> jax.Array:
        leaf = leaf.reshape(count, *leaf.shape[axes:])
        return jnp.pad(leaf, [(0, 2**rounds - count)] + [(0, 0)] * (leaf.ndim - 1))

    held = jax.tree.map(flat, reduced)
    for _ in range(rounds):
        first, second = (jax.tree.map(lambda x, n=n: x[n::2], held) for n in (0, 1))
        held = mapped(merged, held.seen.ndim)(first, second)
    return jax.tree.map(lambda leaf: jnp.squeeze(leaf, 0), held)


def merged(first: Reduced, second: Reduced) -> Reduced:
    """What is known of both, with no axes kept apart."""
    is_both = first.seen & second.seen

    def chosen(new: Any, old: Any, more: Any) -> Any:
        return jnp.where(is_both, new, jnp.where(first.seen, old, more))

    states = []
    pairs = zip(first.states, second.states)
    for (name, reducer), (mine, other) in zip(first.reducers, pairs):
        both = reducer.merge(mine, other)
        _check_state(name, mine, both)
        states.append(jax.tree.map(chosen, both, mine, other))
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
    """What is known of one array, with no axes kept apart; zeros if it is not seen."""
    value = jax.lax.stop_gradient(value)

    def heeded(leaf: Any) -> jax.Array:
        return jnp.where(seen, leaf, jnp.zeros_like(leaf))

    states = [jax.tree.map(heeded, one.measure(value)) for _, one in reducers]
    return jax.tree.map(_whole, Reduced(seen, tuple(states), reducers))


def _whole(leaf: jax.Array) -> jax.Array:
    """A part of a state on every device of an explicit mesh."""
    if all(axis is None for axis in jax.typeof(leaf).sharding.spec):
        return leaf
    return jax.sharding.reshard(leaf, jax.P(*[None] * leaf.ndim))


class Placed(NamedTuple):
    """An array with what its first axes are: numbers of levels, outermost first."""

    array: Any
    levels: tuple[int, ...] = ()


def measured(
    reducers: Reducers,
    value: Placed,
    guards: Sequence[Placed] = (),
    apart: dict[int, int] | None = None,
) -> Reduced:
    """What is known of an array.

    Args:
        reducers: The reducers.
        value: The array.
        guards: Whether it counts, along some levels.
        apart: The levels that are kept apart, with their sizes.
    """
    kept = [*(apart or {})]
    masked = {n for guard in guards for n in guard.levels if n in value.levels}
    lead = [*kept, *(n for n in value.levels if n in masked and n not in kept)]
    rest = [n for n in value.levels if n not in lead]
    sizes = dict(zip(value.levels, value.array.shape)) | (apart or {})
    shape = tuple(sizes[n] for n in lead)
    wanted = [*lead, *rest]
    array = arranged(value.array, value.levels, wanted, [sizes[n] for n in wanted])
    own = array.shape[len(lead) :]
    if 0 in own:  # something else is there in its place, and not seen
        array = jnp.zeros((*shape, *(size or 1 for size in own)), array.dtype)
    seen = jnp.full(shape, 0 not in own)
    for guard in guards:
        seen = seen & as_mask(*guard, lead)
    measure = functools.partial(_measured, reducers)
    return mapped(measure, len(lead))(array, seen).total(len(kept), len(lead))


class Reduction(NamedTuple):
    """What is to be measured at a tap.

    Attributes:
        reducers: The reducers.
        apart: Which levels are kept apart, with their sizes. Numbers below 0 stand for
            rows of loops that end row by row, of a value of whose levels nothing is
            known; those of the innermost loop come first. Where the value's first axes
            have these sizes, they are taken for the rows, since JAX puts those first. A
            value that does not is measured whole.
    """

    reducers: Reducers
    apart: tuple[tuple[int, int], ...] = ()

    @property
    def num_apart(self) -> int:
        """How many axes are kept apart."""
        return len(self.apart)

    def by_row(self, levels: Sequence[int], rows: Sequence[int]) -> "Reduction":
        """The same with the rows of a loop apart; without levels if none are known."""
        first = min([0, *(level for level, _ in self.apart)])
        levels = levels or range(first - len(rows), first)
        return self._replace(apart=tuple(sorted({*self.apart, *zip(levels, rows)})))

    def no_longer_apart(self, other: "Reduction") -> list[int]:
        """Which axes another keeps apart beside those that this one does."""
        return [n for n, one in enumerate(other.apart) if one not in self.apart]

    def measure(
        self, leaves: Sequence[Any], guards: Sequence[jax.Array], spot: Any
    ) -> list[Reduced | None]:
        """What is known of each leaf; None of one that is no array of numbers."""
        masks = list(map(Placed, guards, spot.flags_have))

        def one(value: Any, has: tuple[int, ...]) -> Reduced | None:
            if not is_measured(value):
                return None
            if any(level < 0 for level, _ in self.apart):
                pairs = zip(self.apart, np.shape(value))
                fit = itertools.takewhile(lambda pair: pair[0][1] == pair[1], pairs)
                has = tuple(level for (level, _), _ in fit)
            value = Placed(jnp.asarray(value), has)
            return measured(self.reducers, value, masks, dict(self.apart))

        return list(map(one, leaves, spot.has))


def as_mask(flag: Any, held: Sequence[Any], wanted: Sequence[Any]) -> Any:
    """A flag as a mask of what has other first axes: of size 1 where it has none."""
    array = flag if hasattr(flag, "dtype") else np.asarray(flag)
    # Along a level where the masked is the same, it counts if it does anywhere.
    over = tuple(n for n, level in enumerate(held) if level not in wanted)
    kept = [level for level in held if level in wanted]
    return arranged(array.any(axis=over), kept, wanted, [1] * len(wanted))


def arranged(
    value: Any, held: Sequence[Any], wanted: Sequence[Any], sizes: Sequence[int] = ()
) -> Any:
    """An array with other axes in front.

    Args:
        value: The array.
        held: What its first axes are.
        wanted: What the first axes are to be; all that are held, and perhaps others.
        sizes: Of those wanted; needed if some are not held.
    """
    if list(held) == list(wanted):
        return value
    xp, missing = xp_of(value), [n for n in wanted if n not in held]
    more = tuple(sizes[wanted.index(n)] for n in missing)
    value = xp.broadcast_to(value, (*more, *xp.shape(value)))
    names = [*missing, *held]
    order = [names.index(n) for n in wanted]
    return xp.transpose(value, (*order, *range(len(order), value.ndim)))
