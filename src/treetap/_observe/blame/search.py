# SPDX-License-Identifier: Apache-2.0
"""Search: a program run so that something comes out for every value on the way.

For this the walk looks at every value (`EveryValue`) instead of at taps: the inputs of
each jaxpr and the results of each equation are spots, those of jaxprs inside included.
Of each value comes out what a reducer measures of it: first whether it has infinities
or NaNs (`FINITENESS`), by iteration and shard, and of the few values that are then in
question more (`DETAIL`). `origins` finds out from this where what is bad began.
"""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, Var

from treetap._capture.marks import Label
from treetap._capture.name_stacks import mappings_in, scopes_in
from treetap._capture.statistics.reduced import Reduction, on_each
from treetap._capture.statistics.reducers import Reducer, flat_places
from treetap._capture.walk.jax_compat import Body
from treetap._capture.walk.operations import operation_of
from treetap._capture.walk.plans import Choice, Part, is_inexact
from treetap._capture.walk.run import Walk
from treetap._capture.walk.spots import Flow, Wrap, plain_spot
from treetap._capture.walk.survey import Inner, Survey, survey

FINITE, INFINITE, NAN = 0, 1, 2
DEPTH = 4  # of loops inside one another whose turns are told
NOTHING = Choice(False)


class EveryValue(Survey):
    """All values of a jaxpr as spots.

    Attributes:
        places: By variable, its spot and which of the spot's values it is.
        makers: By variable, the equation it comes from.
    """

    def __init__(self, jaxpr: Any):
        super().__init__(jaxpr)
        self.places: dict[Any, tuple[int, int]] = {}
        self.makers: dict[Any, int] = {}
        self.entry = self._add("", jaxpr.invars, ())
        for n, eqn in enumerate(jaxpr.eqns):
            operation = operation_of(eqn.primitive)
            if operation is not None:
                wrap = operation.wrap(eqn.params)
                bodies = operation.bodies(eqn.params)
                self.inner[n] = [self._enter(eqn, body, wrap) for body in bodies]
            scopes = scopes_in(eqn.source_info.name_stack)
            place = self._add(eqn.primitive.name, eqn.outvars, scopes)
            if place is not None:
                self.results[n] = place
            self.makers.update((var, n) for var in eqn.outvars)

    def place_of(self, atom: Var | Literal) -> tuple[int, int] | None:
        """The spot of a variable, and which of the spot's values it is, if any."""
        return None if isinstance(atom, Literal) else self.places.get(atom)

    def _add(self, name: str, variables: Any, scopes: tuple[str, ...]) -> int | None:
        found = [var for var in variables if is_inexact(var.aval)]
        if not found:
            return None
        place = len(self.spots)
        self.places.update((var, (place, k)) for k, var in enumerate(found))
        label = Label(name, None, "equation", jax.tree.structure(0))
        own = tuple(var.aval for var in found)
        self.spots.append(plain_spot(label, scopes, own))
        return place

    def _enter(self, eqn: Any, body: Body, wrap: Wrap | None) -> Inner:
        base, stack = len(self.spots), eqn.source_info.name_stack
        scopes, mappings = scopes_in(stack), mappings_in(stack)
        own = survey(body.jaxpr, EveryValue).spots
        for spot in own:
            seen = spot if wrap is None else spot.wrapped(wrap)
            self.spots.append(seen.seen_from(scopes, mappings, Flow()))
        return Inner(body, own, base)


class Finiteness(NamedTuple):
    """Whether a value is finite, over the iterations of loops that are not told apart.

    Attributes:
        code: The worst of it: `FINITE`, `INFINITE` or `NAN`.
        since: If it is not finite, the first iteration in which it was not: of the
            outermost loop, of the next one inside, and so on, `DEPTH` numbers.
    """

    code: Any
    since: Any


def _finiteness(value: jax.Array) -> Finiteness:
    """That of one value."""
    is_bad, is_nan = ~jnp.isfinite(value), jnp.isnan(value)
    code = jnp.max(is_bad.astype(jnp.int8) + is_nan.astype(jnp.int8))
    code = code.astype(jnp.int32)
    return Finiteness(code, jnp.stack([jnp.zeros_like(code)] * DEPTH))


def _finiteness_of_both(first: Finiteness, second: Finiteness) -> Finiteness:
    """That of two values: which of them was bad before the other?"""
    apart = first.since - second.since
    is_before = apart[jnp.argmax(apart != 0)] <= 0
    is_first = (first.code > 0) & ((second.code == 0) | is_before)
    since = jnp.where(is_first, first.since, second.since)
    return Finiteness(jnp.maximum(first.code, second.code), since)


def _finiteness_at(found: Finiteness, turn: jax.Array) -> Finiteness:
    """The same with the number of a turn of one more loop around."""
    since = jnp.concatenate([jnp.reshape(turn, 1), found.since[:-1]])
    return found._replace(since=since)


class Detail(NamedTuple):
    """More of a value.

    Attributes:
        bad: How many of its numbers are not finite.
        index: Where the first of these is, counted flat.
        largest: The largest magnitude of the others.
    """

    bad: Any
    index: Any
    largest: Any


def _detail(value: jax.Array) -> Detail:
    """That of one value."""
    is_bad = ~jnp.isfinite(value)
    sizes = jnp.where(is_bad, 0, jnp.abs(value)).astype(jnp.float32)
    places = flat_places(value.shape)
    index = jnp.min(jnp.where(is_bad, places, jnp.iinfo(jnp.int32).max))
    return Detail(jnp.sum(is_bad, dtype=jnp.int32), index, jnp.max(sizes))


def _first_bad_detail(first: Detail, second: Detail) -> Detail:
    """That of the first of two values which is bad."""
    chosen = jax.tree.map(lambda a, b: jnp.where(first.bad > 0, a, b), first, second)
    return chosen._replace(largest=jnp.maximum(first.largest, second.largest))


class _OfLoops(NamedTuple):
    """A reducer that tells the turns of `while` loops."""

    measure: Callable[..., Any]
    merge: Callable[..., Any]
    at_turn: Callable[..., Any]


_REDUCER = _OfLoops(_finiteness, _finiteness_of_both, _finiteness_at)
FINITENESS = Reduction((("finiteness", _REDUCER),))
DETAIL = Reduction((("detail", Reducer(_detail, _first_bad_detail)),))

Found = list[list[Any] | None]


def search(
    body: Body, reduction: Reduction, places: Collection[int] | None = None
) -> Callable[..., Found]:
    """A compiled function from a program's inputs to what is measured on the way.

    Args:
        body: The program.
        reduction: What is measured.
        places: At which spots; at all by default.

    Returns:
        A function that gives for each spot the state of each of its values, or None.
    """
    spots = survey(body.jaxpr, EveryValue).spots
    chosen = range(len(spots)) if places is None else places
    choice = Choice(False, reduce=reduction)
    plan = tuple(choice if n in chosen else NOTHING for n in range(len(spots)))
    part = Part(body, spots, plan, [None] * len(spots))

    def run(*values: Any) -> Found:
        _, found = Walk(look=EveryValue).run(part, list(values))
        states = [one and one.states for one in found]
        return on_each(lambda each: each.states[0], states)

    return jax.jit(run)
