# SPDX-License-Identifier: Apache-2.0
"""Faults: where in a program a number stopped being finite.

For this the walk looks at every value (`EveryValue`): the inputs of each jaxpr and the
results of each equation are spots, and of each only a code comes out, whether it has
infinities or NaNs. `origins` then goes back from bad results, from equation to
equation, into loops and out of them, to where what came in was good.

An infinity that the program itself wrote down is on purpose, and so is what is only
made from such: a mask of -inf is no fault, a NaN made from it is one. Of a NaN that it
wrote down, the operation that takes it is the origin.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from treetap._capture.marks import Label
from treetap._capture.name_stacks import is_transposed, mappings_in, scopes_in
from treetap._capture.statistics.reduced import Reduction
from treetap._capture.statistics.reducers import flat_places
from treetap._capture.walk.jax_compat import Body
from treetap._capture.walk.operations import OPERATIONS, Operation, operation_of
from treetap._capture.walk.plans import Choice, Part, is_inexact
from treetap._capture.walk.run import Walk
from treetap._capture.walk.spots import Flow, Geometry, Identity, Spot, Wrap
from treetap._capture.walk.survey import Inner, Survey, survey

FINITE, INFINITE, NAN = 0, 1, 2


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

    def _add(self, name: str, variables: Any, scopes: tuple[str, ...]) -> int | None:
        found = [var for var in variables if is_inexact(var.aval)]
        if not found:
            return None
        place = len(self.spots)
        self.places.update((var, (place, k)) for k, var in enumerate(found))
        label = Label(name, None, "equation", jax.tree.structure(0))
        own = tuple(var.aval for var in found)
        self.spots.append(Spot(Identity(label, 0, scopes), Geometry(own, own)))
        return place

    def _enter(self, eqn: Any, body: Body, wrap: Wrap | None) -> Inner:
        base, stack = len(self.spots), eqn.source_info.name_stack
        scopes, mappings = scopes_in(stack), mappings_in(stack)
        own = survey(body.jaxpr, EveryValue).spots
        for spot in own:
            seen = spot if wrap is None else spot.wrapped(wrap)
            self.spots.append(seen.seen_from(scopes, mappings, Flow()))
        return Inner(body, own, slice(base, len(self.spots)))


class Sort(NamedTuple):
    """What sort of numbers a value has: the worst, since when, of how many times."""

    code: Any
    since: Any
    times: Any


class Sorting:
    """The reducer of `Sort`s."""

    name = "sort"

    def measure(self, value: Any) -> Sort:
        """That of one value."""
        is_bad, is_nan = ~jnp.isfinite(value), jnp.isnan(value)
        code = jnp.max(is_bad.astype(jnp.int8) + is_nan.astype(jnp.int8))
        code = code.astype(jnp.int32)
        return Sort(code, jnp.zeros_like(code), jnp.ones_like(code))

    def merge(self, first: Sort, second: Sort) -> Sort:
        """That of two values, one after the other."""
        later = first.times + second.since
        return Sort(
            jnp.maximum(first.code, second.code),
            jnp.where(first.code > 0, first.since, later),
            first.times + second.times,
        )


class Detail(NamedTuple):
    """How many numbers are not finite, where the first is, the largest other one."""

    bad: Any
    index: Any
    largest: Any


class Detailing:
    """The reducer of `Detail`s."""

    name = "detail"

    def measure(self, value: Any) -> Detail:
        """That of one value."""
        is_bad = ~jnp.isfinite(value)
        sizes = jnp.where(is_bad, 0, jnp.abs(value)).astype(jnp.float32)
        places = flat_places(value.shape)
        index = jnp.min(jnp.where(is_bad, places, jnp.iinfo(jnp.int32).max))
        return Detail(jnp.sum(is_bad, dtype=jnp.int32), index, jnp.max(sizes))

    def merge(self, first: Detail, second: Detail) -> Detail:
        """That of the first which is bad."""
        chosen = jax.tree.map(
            lambda a, b: jnp.where(first.bad > 0, a, b), first, second
        )
        return chosen._replace(largest=jnp.maximum(first.largest, second.largest))


SORTING = Reduction((("sort", Sorting()),))
DETAILING = Reduction((("detail", Detailing()),))
NOT = Choice(False)


def program(body: Body, plan: tuple[Choice, ...]) -> Any:
    """A compiled function from inputs to what a plan asks for."""

    spots = survey(body.jaxpr, EveryValue).spots
    part = Part(body, spots, plan, [None] * len(spots))

    def fn(*values: Any) -> Any:
        _, found = Walk(look=EveryValue).run(part, list(values))
        return [
            None
            if choice.reduce is None or came_out is None
            else choice.reduce.shaped(
                spot.geometry.own, came_out[: choice.states_at(spot)]
            )
            for choice, spot, came_out in zip(plan, spots, found)
        ]

    return jax.jit(fn)


class Frame(NamedTuple):
    """A jaxpr among others.

    Attributes:
        body: The jaxpr.
        base: Its first spot among all.
        above: The frame around, or None.
        number: The equation there that it belongs to.
        branch: Which of the equation's bodies it is.
    """

    body: Body
    base: int
    above: "Frame | None" = None
    number: int = 0
    branch: int = 0

    @property
    def work(self) -> EveryValue:
        """Its spots."""
        return survey(self.body.jaxpr, EveryValue)

    @property
    def equation(self) -> Any:
        """The equation around."""
        assert self.above is not None
        return self.above.body.jaxpr.eqns[self.number]

    @property
    def operation(self) -> Operation:
        """What the operation around is."""
        return OPERATIONS[self.equation.primitive.name]

    @property
    def turns(self) -> range | None:
        """The turns of the operation around that are told apart, as they run."""
        find = self.operation.turns
        return None if find is None else find(self.equation.params)

    @property
    def carried(self) -> range:
        """The inputs that are results of the turn before."""
        return self.operation.carried(self.equation.params)

    @property
    def is_merged(self) -> bool:
        """Whether the turns of a loop around are not told apart."""
        return self.turns is None and bool(self.carried)

    @property
    def mesh(self) -> dict[Any, int]:
        """The mesh axes that shards are along, with sizes."""
        return self.operation.mesh(self.equation.params)

    def outside(self, turn: tuple[int, ...], which: int) -> "Node":
        """What an input is outside the operation around."""
        assert self.above is not None
        outer = turn if self.turns is None else turn[:-1]
        return Node(self.above, outer, self.equation.invars[self.body.first + which])

    @property
    def chain(self) -> list["Frame"]:
        """The frames around and this one, outermost first."""
        return [*(self.above.chain if self.above else ()), self]

    def below(self, number: int) -> list["Frame"]:
        """The bodies of an equation."""
        inner = self.work.inner.get(number, ())
        return [
            Frame(one.body, self.base + one.place.start, self, number, branch)
            for branch, one in enumerate(inner)
        ]


class Node(NamedTuple):
    """A value at one moment: a variable of a frame, by iterations and shards."""

    frame: Frame
    turn: tuple[int, ...]
    atom: Any

    @property
    def key(self) -> Any:
        """What tells nodes apart."""
        return self.frame.base, id(self.frame.body.jaxpr), self.turn, id(self.atom)

    @property
    def number(self) -> int | None:
        """The equation it comes from, if it does from one."""
        is_written = isinstance(self.atom, Literal)
        return None if is_written else self.frame.work.makers.get(self.atom)

    @property
    def loop(self) -> int | None:
        """The outermost while loop it is in, whose iterations are not apart."""
        inner = self.frame.chain[1:]
        return next((frame.base for frame in inner if frame.is_merged), None)


class Findings:
    """What a run gave: the sorts of all values.

    Args:
        body: The program.
        found: For each of its spots, a `Reduced` for each value.
    """

    def __init__(self, body: Body, found: list[Any]):
        self.top = Frame(body, 0)
        self.sorts = [[one.states[0] for one in values] for values in found]

    def sort(self, node: Node) -> Sort:
        """The sort of a value."""
        frame, turn, atom = node
        if isinstance(atom, Literal):
            return _sort_of(atom.val)
        place = frame.work.places.get(atom)
        if place is None:
            variables = frame.body.jaxpr.constvars
            known = [n for n, var in enumerate(variables) if var is atom]
            return _sort_of(frame.body.consts[known[0]] if known else 0)
        spot, which = place
        held = self.sorts[frame.base + spot][which]
        return Sort(*(np.asarray(part)[turn] for part in held))

    def code(self, node: Node) -> int:
        """Whether a value has infinities or NaNs, at this moment."""
        return int(self.sort(node).code)

    def before(self, node: Node) -> list[Node]:
        """The bad values that a bad value was made from."""
        since = self.sort(node).since

        def was_bad(one: Node) -> bool:
            sort = self.sort(one)
            is_later = one.loop == node.loop is not None and sort.since > since
            return bool(sort.code) and not is_later

        return [one for one in self._sources(node) if was_bad(one)]

    def _sources(self, node: Node) -> Iterator[Node]:
        frame, turn, atom = node
        if isinstance(atom, Literal) or atom in frame.body.jaxpr.constvars:
            return
        number = node.number
        if number is None:
            yield from self._sources_of_input(node)
            return
        eqn = frame.body.jaxpr.eqns[number]
        inside = frame.below(number)
        if not inside:
            for when in self._moments(node, eqn):
                yield from (Node(frame, when, one) for one in eqn.invars)
            return
        which = _place_of(atom, eqn.outvars)
        for body in inside:
            yield from self._results_of(body, turn, which)

    def _results_of(self, frame: Frame, turn: Any, which: int) -> Iterator[Node]:
        """What gave a result of an operation, inside it; or before it began."""
        atom, turns, carried = (
            frame.body.jaxpr.outvars[which],
            frame.turns,
            frame.carried,
        )
        if turns is None:
            yield Node(frame, turn, atom)
            if carried:
                yield frame.outside(turn, carried[which])
            return
        if which < len(carried):
            turns = turns[-1:]
        nodes = [Node(frame, (*turn, n), atom) for n in turns]
        yield from [node for node in nodes if self.code(node)][:1]

    def _moments(self, node: Node, eqn: Any) -> Iterator[tuple[int, ...]]:
        """When and where what an equation reads was: on its own shard, or on several.

        A sum over shards, and all that brings shards together, names their axes.
        """
        named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        names = set(named if isinstance(named, tuple | list) else (named,))
        looped = [one for one in node.frame.chain[1:] if one.turns is not None]
        around = [(n, one) for n, one in enumerate(looped) if names & {*one.mesh}]
        if not around:
            yield node.turn
            return
        place, frame = around[-1]
        axes, sizes = list(frame.mesh), list(frame.mesh.values())
        shards = np.arange(np.prod(sizes, dtype=int)).reshape(sizes)
        own = np.unravel_index(node.turn[place], sizes)
        group = tuple(slice(None) if a in names else n for a, n in zip(axes, own))
        for shard in np.ravel(shards[group]):
            yield (*node.turn[:place], int(shard), *node.turn[place + 1 :])

    def _sources_of_input(self, node: Node) -> Iterator[Node]:
        """Where an input of a jaxpr comes from."""
        frame, turn, atom = node
        if frame.above is None:
            return
        which = _place_of(atom, frame.body.jaxpr.invars)
        turns, carried = frame.turns, frame.carried
        if which in carried:
            last = frame.body.jaxpr.outvars[carried.index(which)]
            number = turns.index(turn[-1]) if turns is not None else 0
            if turns is not None and number:
                yield Node(frame, (*turn[:-1], turns[number - 1]), last)
                return
            if turns is None and self.sort(node).since > 0:
                yield Node(frame, turn, last)
                return
        yield frame.outside(turn, which)

    def order(self, node: Node) -> tuple[float, ...]:
        """When a value is made, relative to others; shards work at the same time."""
        since = float(self.sort(node).since)
        turns, when, shards = list(node.turn), [], []
        for frame in node.frame.chain[1:]:
            turn = since if frame.is_merged else 0.0
            if frame.operation.is_at_once:
                shards.append(float(turns.pop(0)))
            elif frame.turns is not None:
                turn = float(frame.turns.index(turns.pop(0)))
            when += [float(frame.number), float(frame.branch), turn]
        number = node.number
        last = (-1.0,) if number is None else (float(number), np.inf)
        return (*when, *last, *shards)

    def is_derivative(self, node: Node) -> bool:
        """Whether a value is of use only to a backward pass."""
        waiting, seen = [node], set[Any]()
        while waiting:
            frame, turn, atom = waiting.pop()
            if any(is_transposed(one.equation) for one in frame.chain[1:]):
                continue
            jaxpr = frame.body.jaxpr
            if any(var is atom for var in jaxpr.outvars):
                which = _place_of(atom, jaxpr.outvars)
                if frame.above is None or which < len(frame.carried):
                    return False
                waiting.append(Node(frame.above, (), frame.equation.outvars[which]))
            for eqn in jaxpr.eqns:
                if id(eqn) in seen or not any(var is atom for var in eqn.invars):
                    continue
                seen.add(id(eqn))
                if not is_transposed(eqn):
                    waiting += [Node(frame, turn, var) for var in eqn.outvars]
        return True

    def all_bad(self) -> Iterator[Node]:
        """Every bad value there is."""
        waiting = [self.top]
        while waiting:
            frame = waiting.pop()
            for var, (spot, which) in frame.work.places.items():
                code = np.asarray(self.sorts[frame.base + spot][which].code)
                for turn in np.argwhere(code > 0):
                    yield Node(frame, tuple(map(int, turn)), var)
            for number in frame.work.inner:
                waiting += frame.below(number)

    def origins(self, ends: list[Node]) -> list[Node]:
        """The bad values that come from no other, the first one first."""
        found: dict[Any, tuple[Node, list[Node]]] = {}
        waiting = list(ends)
        while waiting:
            node = waiting.pop()
            if node.key not in found:
                sources = self.before(node)
                found[node.key] = node, sources
                waiting += sources
        on_purpose: set[Any] = set()
        origins: list[Node] = []
        is_end = {node.key for node in ends}
        for node, sources in sorted(found.values(), key=lambda one: self.order(one[0])):
            meant = all(one.key in on_purpose for one in sources)
            is_given = self._is_input(node) and not (sources and meant)
            is_written = node.number is None and not is_given
            passes = self.code(node) == INFINITE and (sources or is_written)
            if (passes and meant) or (is_written and node.key not in is_end):
                on_purpose.add(node.key)
            elif meant:
                origins.append(node)
        return origins

    def _is_input(self, node: Node) -> bool:
        is_written = isinstance(node.atom, Literal)
        return not is_written and node.atom in node.frame.body.jaxpr.invars


def _place_of(atom: Any, atoms: Any) -> int:
    return next(n for n, one in enumerate(atoms) if one is atom)


def _sort_of(value: Any) -> Sort:
    """The sort of a constant."""
    if not is_inexact(np.asarray(value)) and not is_inexact(value):
        return Sort(FINITE, 0, 1)
    numbers = np.asarray(value).astype(np.complex128)
    worst = NAN if np.isnan(numbers).any() else int(np.isinf(numbers).any())
    return Sort(worst, 0, 1)
