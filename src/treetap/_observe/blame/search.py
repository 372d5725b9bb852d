# SPDX-License-Identifier: Apache-2.0
"""Search: a program run so that something comes out for every value on the way.

For this the walk looks at every value (`EveryValue`) instead of at taps: the inputs of
each jaxpr and the results of each equation are spots, those of jaxprs inside included.
Of each value comes out, by iteration and shard, whether it has infinities or NaNs, and
what is to be told of these (`Finiteness`). `origins` finds out from this where what is
bad began.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from treetap._capture.marks import Label
from treetap._capture.statistics.arithmetic import as_real, zeroed
from treetap._capture.statistics.reduced import Reduction, on_each
from treetap._capture.statistics.reducers import flat_places
from treetap._capture.walk.jax_compat import Body
from treetap._capture.walk.operations import operation_of
from treetap._capture.walk.plans import Choice, Part, is_inexact
from treetap._capture.walk.run import Walk
from treetap._capture.walk.spots import Wrap, plain_spot
from treetap._capture.walk.survey import INPUTS, Survey, survey

FINITE, INFINITE, NAN = 0, 1, 2
DEPTH = 4  # of loops inside one another whose turns are told


class Place(NamedTuple):
    """Where in a jaxpr a value is.

    Attributes:
        spot: Its spot.
        which: Which of the spot's values it is.
        number: The equation it comes from; None of an input.
    """

    spot: int
    which: int
    number: int | None


LABEL = Label("", None, "equation", jax.tree.structure(0))


class EveryValue(Survey):
    """All values of a jaxpr as spots.

    Attributes:
        places: Where each variable is.
    """

    def __init__(self, jaxpr: Any):
        super().__init__()
        self.places: dict[Any, Place] = {}
        self.results[INPUTS] = self._add(jaxpr.invars, None)
        for n, eqn in enumerate(jaxpr.eqns):
            operation = operation_of(eqn.primitive, eqn.params)
            if bodies := list(operation.bodies(eqn.params)):
                wrap = operation.wrap(eqn.params)
                self.inner[n] = [self._enter(body, wrap) for body in bodies]
            self.results[n] = self._add(eqn.outvars, n)

    def _add(self, variables: Sequence[Any], number: int | None) -> int:
        found = [var for var in variables if is_inexact(var.aval)]
        spot = len(self.spots)
        self.places |= {var: Place(spot, k, number) for k, var in enumerate(found)}
        self.spots.append(plain_spot(LABEL, (), tuple(var.aval for var in found)))
        return spot

    def _enter(self, body: Body, wrap: Wrap | None) -> Part:
        start, own = len(self.spots), survey(body.jaxpr, EveryValue).spots
        self.spots += [spot.wrapped(wrap) for spot in own]
        return Part(body, own, start=start)


class Finiteness(NamedTuple):
    """Whether a value is finite, over the iterations of loops that are not told apart.

    Attributes:
        code: The worst of it: `FINITE`, `INFINITE` or `NAN`.
        since: If it is not finite, the first iteration in which it was not: of the
            outermost loop, of the next one inside, and so on, `DEPTH` numbers.
        bad: How many numbers were not finite, in that iteration.
        index: Where the first of these was, counted flat.
        largest: The largest magnitude of finite numbers.
    """

    code: Any
    since: Any = ()
    bad: Any = 0
    index: Any = 0
    largest: Any = 0.0


def _joined(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """Codes, counts, places and sizes of two numbers as of one."""
    joins = jnp.maximum, jnp.add, jnp.minimum, jnp.maximum
    return [join(a, b) for join, a, b in zip(joins, first, second)]


class _Finiteness:
    """A reducer that also notes the turns of `while` loops."""

    def measure(self, value: jax.Array) -> Finiteness:
        """That of one value."""
        is_bad = ~jnp.isfinite(value)
        code = is_bad.astype(jnp.int32) + jnp.isnan(value).astype(jnp.int32)
        last = jnp.iinfo(jnp.int32).max
        places = jnp.where(is_bad, flat_places(value.shape), last)
        sizes = jnp.abs(zeroed(as_real(value), ~is_bad))
        # One reduction for all four: of every value on the way, one compiles faster.
        columns = [code, is_bad.astype(jnp.int32), places, sizes]
        starts = [np.array(x, y.dtype) for x, y in zip((0, 0, last, 0), columns)]
        found = jax.lax.reduce(columns, starts, _joined, range(value.ndim))
        code, bad, index, largest = found
        since = jnp.stack([jnp.zeros_like(code)] * DEPTH)
        return Finiteness(code, since, bad, index, largest)

    def merge(self, first: Finiteness, second: Finiteness) -> Finiteness:
        """That of two values: of the one that was bad before the other."""
        apart = first.since - second.since
        is_before = apart[jnp.argmax(apart != 0)] <= 0
        is_first = (first.code > 0) & ((second.code == 0) | is_before)
        found = jax.tree.map(lambda a, b: jnp.where(is_first, a, b), first, second)
        return found._replace(
            code=jnp.maximum(first.code, second.code),
            largest=jnp.maximum(first.largest, second.largest),
        )

    def at_turn(self, found: Finiteness, turn: jax.Array) -> Finiteness:
        """The same with the number of a turn of one more loop around."""
        since = jnp.concatenate([jnp.reshape(turn, 1), found.since[:-1]])
        return found._replace(since=since)


MEASURED = Choice(False, reduce=Reduction((("finiteness", _Finiteness()),)))

Found = list[list[Finiteness | None]]


def search(body: Body, *values: Any) -> Found:
    """Runs a program; gives for each spot a list, with that of each value there."""
    spots = survey(body.jaxpr, EveryValue).spots
    part = Part(body, spots, (MEASURED,) * len(spots), [None] * len(spots))
    _, found = Walk(look=EveryValue).run(part, list(values))
    return on_each(lambda one: one.states[0], [one and one.states for one in found])
