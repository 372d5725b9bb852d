# SPDX-License-Identifier: Apache-2.0
"""Reducers: small statistics of values that are too many to keep.

A reducer is three functions: `measure(value) -> state`, `merge(state, state) -> state`
and `finish(state) -> result`. A state is a tree of small arrays whose shapes do not
depend on how much was measured; merging is associative. So a statistic can be taken
inside a loop, and put together over iterations, shards, microbatches and steps.

The reducers here look at finite numbers and count the others, in float32 or wider;
booleans are 0 and 1, complex numbers stand for their magnitudes. `observe` takes them
as `reduce=`; see `reduced` for how they go through a program.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from treetap._capture.statistics.arithmetic import (
    Numbers,
    as_integers,
    as_number,
    bars_by_edge,
    count_of,
    counted,
    counts_added,
    numbers_of,
    reduced_together,
    zeroed,
)
from treetap._capture.statistics.figures import Bars
from treetap._core.errors import CaptureError


def same(state: Any) -> Any:
    """The state itself."""
    return state


@dataclass(frozen=True)
class Reducer:
    """A statistic of your own: three functions and a name.

    Args:
        measure: From a value, an array, to a state: a tree of small arrays.
        merge: From two states to one, of the same shapes and types.
        finish: From a state to the result; the state itself by default.
        name: What it is called in `site.stats`.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> smallest = tt.Reducer(jnp.min, jnp.minimum, name="smallest")
        >>> def f(x):
        ...     return tt.tap(2 * x, "h").sum()
        >>> _, record = tt.observe(f, reduce=[smallest])(jnp.array([3.0, 1.0]))
        >>> float(record["h"].stats["smallest"])
        2.0
    """

    measure: Callable[[Any], Any]
    merge: Callable[[Any, Any], Any]
    finish: Callable[[Any], Any] = same
    name: str = "custom"

    def __post_init__(self) -> None:
        for role in ("measure", "merge", "finish"):
            if not callable(getattr(self, role)):
                raise CaptureError(
                    f"Reducer: {role!r} is {getattr(self, role)!r}. Give a function."
                )


class StandardReducer:
    """A reducer that also measures for figures, and says what its states tell of them.

    Its state is its result, and two are merged part by part with `_join`, if it does
    not say otherwise.
    """

    _join: Callable[[Any, Any], Any]
    _of: Callable[[Any], Any]  # the state of numbers of NumPy or of JAX

    def measure(self, value: Any) -> Any:
        """The state of one value."""
        return self._of(numbers_of(jnp.asarray(value)))

    def merge(self, first: Any, second: Any) -> Any:
        """The state of both."""
        return jax.tree.map(self._join, first, second)

    def finish(self, state: Any) -> Any:
        """The result."""
        return state

    def _figures(self, state: Any) -> dict[str, Any]:
        """What is known, by name, from states along first axes; see `Figures`.

        The counts of bars are in two words.
        """
        return {}


class MomentsFound(NamedTuple):
    """What `Moments` gives.

    Attributes:
        count: How many finite numbers there were.
        mean: Their mean; 0 if there were none.
        variance: Their variance, not corrected for the sample's size.
        nonfinite: How many numbers were not finite.
    """

    count: Any
    mean: jax.Array
    variance: jax.Array
    nonfinite: jax.Array

    @property
    def std(self) -> jax.Array:
        """The standard deviation."""
        return jnp.sqrt(self.variance)


class MomentsState(NamedTuple):
    """The same on the way: counts in two words, the deviation instead of its square."""

    count: Any
    mean: Any
    std: Any
    nonfinite: Any


@dataclass(frozen=True)
class Moments(StandardReducer):
    """Mean and variance, put together by Chan's formula: as good as in one pass.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> x = jnp.array([1.0, 3.0, jnp.nan])
        >>> f = tt.observe(lambda x: tt.tap(x, "x"), reduce=[tt.Moments()])
        >>> found = f(x)[1]["x"].stats["moments"]
        >>> float(found.mean), float(found.variance), int(found.nonfinite)
        (2.0, 1.0, 1)
    """

    name: str = "moments"

    def _of(self, numbers: Numbers) -> MomentsState:
        """The moments of numbers; of the mean and the deviation no square is taken."""
        xp, is_finite = numbers.xp, numbers.is_finite
        count, bad = counted([is_finite, ~xp.isfinite(numbers.real)])
        scaled = numbers.finite * numbers.scale
        many = xp.maximum(as_number(count, scaled.dtype), 1)
        mean = xp.sum(scaled) / many
        # So far it is rounded as the sum is; of equal numbers it has to be these.
        mean = mean + xp.sum(zeroed(scaled - mean, is_finite)) / many
        away = zeroed(scaled - mean, is_finite)
        std = xp.sqrt(xp.sum(away * away) / many)
        return MomentsState(count, mean / numbers.scale, std / numbers.scale, bad)

    def merge(self, first: Any, second: Any) -> Any:
        """The moments of both."""
        count = counts_added(first.count, second.count)
        many = jnp.maximum(as_number(count), 1)
        shares = [as_number(each.count) / many for each in (first, second)]
        lengths = [jnp.sqrt(share) for share in shares]
        apart = second.mean / 2 - first.mean / 2  # half of it, which cannot overflow
        spread = jnp.hypot(first.std * lengths[0], second.std * lengths[1])
        return MomentsState(
            count,
            2 * (first.mean / 2 + apart * shares[1]),
            jnp.hypot(spread, apart * (2 * lengths[0] * lengths[1])),
            counts_added(first.nonfinite, second.nonfinite),
        )

    def finish(self, state: Any) -> MomentsFound:
        """The result."""
        count, bad = as_number(state.count), as_number(state.nonfinite)
        return MomentsFound(count, state.mean, state.std * state.std, bad)

    def _figures(self, state: Any) -> dict[str, Any]:
        """Mean, deviation and counts."""
        finite, bad = as_integers(state.count), as_integers(state.nonfinite)
        moments = {"mean": state.mean, "std": state.std}
        return {"count": finite + bad, "finite": finite, **moments}


@dataclass(frozen=True)
class AbsMax(StandardReducer):
    """The largest finite magnitude; 0 if there is none."""

    name: str = "abs_max"
    _join = staticmethod(jnp.maximum)

    def _of(self, numbers: Numbers) -> Any:
        """That of numbers."""
        return numbers.largest

    def _figures(self, state: Any) -> dict[str, Any]:
        """The same."""
        return {"abs_max": state}


@dataclass(frozen=True)
class Norm(StandardReducer):
    """The Euclidean norm of all finite numbers, without overflow on the way.

    What is merged counts as one long vector: the norm over ten steps is not the mean of
    ten norms.
    """

    name: str = "norm"

    def _of(self, numbers: Numbers) -> tuple[Any, Any]:
        """A unit, and the sum of squares of the numbers in that unit."""
        scaled = numbers.finite * numbers.scale
        return 1 / numbers.scale, numbers.xp.sum(scaled * scaled)

    def merge(self, first: Any, second: Any) -> Any:
        """The same for both, in the larger unit."""
        unit = jnp.maximum(first[0], second[0])
        safe = jnp.where(unit > 0, unit, 1)  # nothing but zeros may be measured in 0
        ratios = first[0] / safe, second[0] / safe  # whose squares may vanish
        parts = [n * (n * squares) for n, (_, squares) in zip(ratios, (first, second))]
        return unit, parts[0] + parts[1]

    def finish(self, state: Any) -> Any:
        """The norm."""
        return state[0] * jnp.sqrt(state[1])

    def _figures(self, state: Any) -> dict[str, Any]:
        """The norm, which may be beyond float32."""
        unit, squares = (part.astype(np.float64) for part in state)
        return {"norm": unit * np.sqrt(squares)}


class NonFiniteFound(NamedTuple):
    """What `NonFinite` gives: how many numbers were NaN, inf and -inf, of how many."""

    nan: jax.Array
    positive: jax.Array
    negative: jax.Array
    total: jax.Array


@dataclass(frozen=True)
class NonFinite(StandardReducer):
    """How many numbers are NaN, inf and -inf."""

    name: str = "nonfinite"
    _join = staticmethod(counts_added)

    def _of(self, numbers: Numbers) -> NonFiniteFound:
        """Those among numbers; in all are also those that do not count."""
        xp, real = numbers.xp, numbers.real
        masks = xp.isnan(real), xp.isposinf(real), xp.isneginf(real)
        return NonFiniteFound(*counted(masks), total=count_of(real.size))

    def finish(self, state: Any) -> NonFiniteFound:
        """The result."""
        return NonFiniteFound(*map(as_number, state))

    def _figures(self, state: Any) -> dict[str, Any]:
        """The counts."""
        nan, positive, negative, total = map(as_integers, state)
        infinite = positive + negative
        finite = total - nan - infinite
        return {"count": total, "finite": finite, "nan": nan, "infinite": infinite}


@dataclass(frozen=True)
class AllFinite(StandardReducer):
    """Whether all numbers are finite: a single bit, the cheapest statistic of all."""

    name: str = "all_finite"
    _join = staticmethod(jnp.logical_and)

    def measure(self, value: Any) -> Any:
        """That of one value."""
        return jnp.all(jnp.isfinite(value))

    def _figures(self, state: Any) -> dict[str, Any]:
        """At least one number is not finite where not all are."""
        return {"unsorted": (~state).astype(int)}


class HistogramFound(NamedTuple):
    """What `Histogram` gives: counts, and the edges of the bins, one more."""

    counts: jax.Array
    edges: jax.Array


@dataclass(frozen=True)
class Histogram(StandardReducer):
    """How many finite numbers are in each bin.

    Args:
        bins: How many bins there are.
        limits: The lowest and the highest edge of bins of equal width. By default the
            bins are of magnitudes, each twice as wide as the one before and the last
            one up to `2 ** (bins // 4)`; zeros are in the first.
        name: What it is called.

    The outermost bins also have what lies outside.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> few = tt.Histogram(bins=4, limits=(0.0, 4.0))
        >>> f = tt.observe(lambda x: tt.tap(x, "x"), reduce=[few])
        >>> found = f(jnp.array([0.5, 1.5, 1.6, 9.0]))[1]["x"].stats["histogram"]
        >>> found.counts.astype(int).tolist(), found.edges.tolist()
        ([1, 2, 0, 1], [0.0, 1.0, 2.0, 3.0, 4.0])
    """

    bins: int = 64
    limits: tuple[float, float] | None = None
    name: str = "histogram"
    _join = staticmethod(counts_added)

    def __post_init__(self) -> None:
        if self.bins < 1:
            raise CaptureError(f"Histogram: {self.bins} bins. Give 1 or more.")
        if self.limits is not None:
            object.__setattr__(self, "limits", tuple(map(float, self.limits)))
            low, high = self.limits
            if not low < high:
                raise CaptureError(
                    f"Histogram: the limits {self.limits} are not in order. Give the "
                    "lower one first."
                )

    @property
    def _edges(self) -> np.ndarray:
        if self.limits is not None:
            return np.linspace(*self.limits, self.bins + 1)
        return 2.0 ** (np.arange(self.bins + 1) - self.bins + self.bins // 4)

    def _of(self, numbers: Numbers) -> Any:
        """The counts of numbers."""
        real = numbers.finite if self.limits else jnp.abs(numbers.finite)
        return bars_by_edge(self._edges, real, numbers.is_finite)

    def finish(self, state: Any) -> HistogramFound:
        """Counts and edges."""
        return HistogramFound(as_number(state), jnp.asarray(self._edges))

    def _figures(self, state: Any) -> dict[str, Any]:
        """The bars."""
        return {"bars": Bars(state, np.asarray(self._edges, jnp.result_type(float)))}


class TopKFound(NamedTuple):
    """What `TopK` gives.

    Attributes:
        values: The numbers of largest magnitude, the largest first.
        indices: Where each of them is, one column for each axis of the value; -1 where
            there were fewer numbers than asked for.
    """

    values: jax.Array
    indices: jax.Array


@dataclass(frozen=True)
class TopK(StandardReducer):
    """The finite numbers of largest magnitude, and where they are.

    Args:
        k: How many.
        name: What it is called.
    """

    k: int = 8
    name: str = "top_k"

    def __post_init__(self) -> None:
        if self.k < 1:
            raise CaptureError(f"TopK: k is {self.k}. Give 1 or more.")

    def _of(self, numbers: Numbers) -> TopKFound:
        """One after the other, by reductions alone: nothing is sorted or gathered."""
        real = numbers.finite
        sizes = jnp.where(numbers.is_finite, jnp.abs(real), -jnp.ones_like(real))
        place = flat_places(real.shape)
        nowhere = np.iinfo(np.int32).max
        left = sizes >= 0
        values, indices = [], []
        for _ in range(self.k):
            ends = [jnp.where(left, x, -jnp.ones_like(x)) for x in (real, -real)]
            size = jnp.maximum(*reduced_together(ends, -1, jnp.maximum))
            here = [
                jnp.where(left & (real == x), place, nowhere) for x in (size, -size)
            ]
            plus, minus = reduced_together(here, nowhere, jnp.minimum)
            index = jnp.minimum(plus, minus)
            is_there = index < nowhere
            values.append(jnp.where(is_there, jnp.where(plus <= minus, size, -size), 0))
            indices.append(jnp.where(is_there, index, -1))
            comes_later = (sizes < size) | ((sizes == size) & (place > index))
            left = (sizes >= 0) & comes_later
        return TopKFound(jnp.stack(values), _unravelled(jnp.stack(indices), real))

    def merge(self, first: Any, second: Any) -> Any:
        """The largest of both; on a tie those of the first."""
        values = jnp.concatenate([first.values, second.values])
        indices = jnp.concatenate([first.indices, second.indices])
        is_there = jnp.all(indices >= 0, axis=1)
        order = jnp.where(is_there, -jnp.abs(values), jnp.ones_like(values))
        best = jnp.argsort(order, stable=True)[: self.k]
        return TopKFound(values[best], indices[best])


def flat_places(shape: tuple[int, ...]) -> jax.Array:
    """The index of each element in the flat array, without making it flat."""
    steps = [math.prod(shape[axis:]) for axis in range(1, len(shape) + 1)]
    places = [
        step * jax.lax.broadcasted_iota(jnp.int32, shape, axis)
        for axis, step in enumerate(steps)
    ]
    return sum(places, jnp.zeros(shape, jnp.int32))


def _unravelled(indices: jax.Array, value: jax.Array) -> jax.Array:
    shape = value.shape or (1,)  # of a scalar: whether it is there
    columns = jnp.stack(jnp.unravel_index(indices, shape), axis=1)
    return jnp.where(indices[:, None] >= 0, columns, -1)


class DeadUnitsFound(NamedTuple):
    """What `DeadUnits` gives: a mask of the dead units, and their share."""

    dead: jax.Array
    fraction: jax.Array


@dataclass(frozen=True)
class DeadUnits(StandardReducer):
    """Units, along the last axis, whose magnitude never was above a threshold, nor NaN.

    Args:
        threshold: What a unit has to exceed, once, to be alive.
        axis: The axis of units.
        name: What it is called.

    Examples:
        >>> import jax, jax.numpy as jnp, treetap as tt
        >>> def f(x):
        ...     return tt.tap(jax.nn.relu(x), "h")
        >>> x = jnp.array([[1.0, -1.0], [2.0, -2.0]])
        >>> _, record = tt.observe(f, reduce=[tt.DeadUnits()])(x)
        >>> record["h"].stats["dead_units"].dead.tolist()
        [False, True]
    """

    threshold: float = 0.0
    axis: int = -1
    name: str = "dead_units"
    _join = staticmethod(jnp.logical_or)

    def _of(self, numbers: Numbers) -> Any:
        """Which units are alive anywhere; a scalar is one unit."""
        is_active = ~(numbers.xp.abs(numbers.real) <= self.threshold)
        unit = self.axis % max(is_active.ndim, 1)
        axes = tuple(axis for axis in range(is_active.ndim) if axis != unit)
        return numbers.xp.any(is_active, axis=axes)

    def finish(self, state: Any) -> DeadUnitsFound:
        """The dead, and their share."""
        return DeadUnitsFound(~state, jnp.mean(~state, dtype=jnp.float32))


Reducers = tuple[tuple[str, Any], ...]


def as_reducers(given: Any) -> Reducers:
    """Reducers by name, from one, a list of them, or a mapping from names to them."""
    if isinstance(given, dict):
        named = [(str(name), reducer) for name, reducer in given.items()]
    else:
        items = list(given) if isinstance(given, list | tuple) else [given]
        named = [(getattr(one, "name", type(one).__name__), one) for one in items]
    for _, reducer in named:
        roles = [getattr(reducer, role, None) for role in ("measure", "merge")]
        if isinstance(reducer, type) or not all(map(callable, roles)):
            raise CaptureError(
                f"observe: {reducer!r} is no reducer. Give `Moments()`, another one, "
                "or a `Reducer` of three functions."
            )
    names = [name for name, _ in named]
    for name in names:
        if names.count(name) > 1:
            raise CaptureError(
                f"observe: two reducers are called {name!r}. Give a mapping from names "
                "to reducers."
            )
    return tuple(named)
