# SPDX-License-Identifier: Apache-2.0
"""Origins: which of the values that are not finite come from no other.

From the bad values among a program's results the way goes back: to the bad operands of
the equation that made each, into the jaxprs of operations and out of them, through the
turns of loops and to other shards. What is met so has an order, that of execution. An
*origin* is a bad value with nothing bad behind it.

An infinity that the program itself wrote down is on purpose, and so is what is only
made from such: a mask of -inf is no fault, a NaN made from it is one. Of a NaN that it
wrote down, the operation that takes it is the origin. The same holds for a mask that
came in with an argument. An argument that is bad is the origin only if no operation
made anything bad by itself.

A value is told apart by the iterations of scans and by shards. The iterations of a
`while` are not, for nobody knows how many there are: there a value has the number of
the first iteration in which it was bad, and can only come from what was bad by then.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from treetap._capture.name_stacks import is_transposed
from treetap._capture.walk.jax_compat import Body
from treetap._capture.walk.operations import Operation, operation_of
from treetap._capture.walk.survey import survey
from treetap._observe.blame.search import (
    FINITE,
    INFINITE,
    NAN,
    EveryValue,
    Finiteness,
    Found,
)

Turns = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Frame:
    """A jaxpr where it stands: in an equation of another, or as the whole program.

    There is one object for each place (see `inner`), so that identity tells them apart.

    Attributes:
        body: The jaxpr.
        base: Its first spot among all of the program.
        above: The frame around, or None.
        number: The equation there that it belongs to.
        branch: Which of the equation's bodies it is.
    """

    body: Body
    base: int = 0
    above: "Frame | None" = None
    number: int = 0
    branch: int = 0

    @property
    def values(self) -> EveryValue:
        """Its values as spots."""
        return survey(self.body.jaxpr, EveryValue)

    @cached_property
    def inner(self) -> dict[int, list["Frame"]]:
        """The bodies of its equations, by number."""
        return {
            number: [
                Frame(one.body, self.base + one.start, self, number, branch)
                for branch, one in enumerate(bodies)
            ]
            for number, bodies in self.values.inner.items()
        }

    @property
    def equation(self) -> JaxprEqn:
        """The equation around."""
        assert self.above is not None
        return self.above.body.jaxpr.eqns[self.number]

    @property
    def operation(self) -> Operation:
        """What the operation around is."""
        eqn = self.equation
        return operation_of(eqn.primitive, eqn.params)

    @cached_property
    def turns(self) -> range | None:
        """The turns of the operation around that are told apart, as they run."""
        find = self.operation.turns
        return None if find is None else find(self.equation.params)

    @cached_property
    def mesh(self) -> dict[Any, int]:
        """The mesh axes of the operation around, whose turns are at the same time."""
        return self.operation.mesh(self.equation.params)

    @cached_property
    def carried(self) -> range:
        """The inputs that are results of the turn before."""
        return self.operation.carried(self.equation.params)

    @property
    def is_merged(self) -> bool:
        """Whether the turns of a loop around are not told apart."""
        return self.turns is None and bool(self.carried)

    @cached_property
    def around(self) -> list["Frame"]:
        """The frames that are in an equation, this one the last, outermost first."""
        return [] if self.above is None else [*self.above.around, self]

    def outside(self, turns: Turns, which: int) -> "ValueAt":
        """What an input is outside the operation around."""
        assert self.above is not None
        outer = turns if self.turns is None else turns[:-1]
        return ValueAt(self.above, outer, self.equation.invars[self.body.first + which])


class ValueAt(NamedTuple):
    """A value at one moment.

    Attributes:
        frame: The jaxpr it is in.
        turns: In which iteration of each scan around, and on which shard, outermost
            first.
        atom: The variable, or a literal.
    """

    frame: Frame
    turns: Turns
    atom: Any

    @property
    def key(self) -> Any:
        """What tells values apart."""
        return self.frame, self.turns, id(self.atom)

    @property
    def number(self) -> int | None:
        """The equation it comes from, if it does from one."""
        is_literal = isinstance(self.atom, Literal)
        return None if is_literal else self.frame.values.makers.get(self.atom)

    @property
    def loops(self) -> list[Frame]:
        """The while loops it is in, whose turns are not apart."""
        return [frame for frame in self.frame.around if frame.is_merged]

    @property
    def steps(self) -> list[tuple[Frame, int | None]]:
        """The frames around it, outermost first, with its turn in each; or None."""
        turns = iter(self.turns)
        return [
            (frame, None if frame.turns is None else next(turns))
            for frame in self.frame.around
        ]


class Findings:
    """What a run said of all values, and what follows from it.

    Args:
        body: The program.
        found: For each of its spots the `Finiteness` of each value.
    """

    def __init__(self, body: Body, found: Found):
        self.top = Frame(body)
        self.found: list[Any] = found

    def finiteness(self, value: ValueAt) -> Finiteness:
        """Whether a value is finite."""
        frame, turns, atom = value
        if isinstance(atom, Literal):
            return _finiteness_of(atom.val)
        if atom in frame.values.places:
            spot, which = frame.values.places[atom]
            held = self.found[frame.base + spot][which]
            return Finiteness(*(np.asarray(part)[turns] for part in held))
        consts = dict(zip(frame.body.jaxpr.constvars, frame.body.consts))
        return _finiteness_of(consts.get(atom, 0))

    def code(self, value: ValueAt) -> int:
        """Whether a value has infinities or NaNs, at this moment."""
        return int(self.finiteness(value).code)

    def before(self, value: ValueAt) -> list[ValueAt]:
        """The bad values that a bad value was made from."""
        since = self.finiteness(value).since

        def was_bad(one: ValueAt) -> bool:
            own = self.finiteness(one)
            pairs = zip(one.loops, value.loops)
            same = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
            shared = len(list(same))
            is_later = [*own.since[:shared]] > [*since[:shared]]
            return bool(own.code) and not is_later

        return [one for one in self._sources(value) if was_bad(one)]

    def _sources(self, value: ValueAt) -> Iterator[ValueAt]:
        """What a value was made from, bad or not."""
        frame, turns, atom = value
        number = value.number
        if number is None:
            yield from self._sources_of_input(value)
            return
        eqn = frame.body.jaxpr.eqns[number]
        inside = frame.inner.get(number)
        if not inside:
            for when in self._moments(value, eqn):
                yield from (ValueAt(frame, when, one) for one in eqn.invars)
            return
        which = eqn.outvars.index(atom)
        for body in inside:
            yield from self._results_of(body, turns, which)

    def _results_of(self, frame: Frame, turns: Turns, which: int) -> Iterator[ValueAt]:
        """What gave a result of an operation, inside it; or before it began."""
        atom, carried = frame.body.jaxpr.outvars[which], frame.carried
        if frame.turns is None:
            yield ValueAt(frame, turns, atom)
            if carried:
                yield frame.outside(turns, carried[which])
            return
        last = frame.turns[-1:] if which < len(carried) else frame.turns
        values = [ValueAt(frame, (*turns, n), atom) for n in last]
        yield from [value for value in values if self.code(value)][:1]

    def _moments(self, value: ValueAt, eqn: Any) -> Iterator[Turns]:
        """When and where what an equation reads was: on its own shard, or on several.

        A sum over shards, and all that brings shards together, names their axes.
        """
        named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        names = set(named if isinstance(named, tuple | list) else (named,))
        looped = [one for one in value.frame.around if one.turns is not None]
        meshes = [one.mesh for one in looped]
        around = [(n, mesh) for n, mesh in enumerate(meshes) if names & mesh.keys()]
        if not around:
            yield value.turns
            return
        place, mesh = around[-1]
        sizes = list(mesh.values())
        shards = np.arange(np.prod(sizes, dtype=int)).reshape(sizes)
        own = np.unravel_index(value.turns[place], sizes)
        group = tuple(slice(None) if a in names else n for a, n in zip(mesh, own))
        for shard in np.ravel(shards[group]):
            yield (*value.turns[:place], int(shard), *value.turns[place + 1 :])

    def _sources_of_input(self, value: ValueAt) -> Iterator[ValueAt]:
        """Where an input of a jaxpr comes from; a constant comes from nowhere."""
        frame, turns, atom = value
        if frame.above is None or not self._is_input(value):
            return
        which = frame.body.jaxpr.invars.index(atom)
        before = self._turns_before(value) if which in frame.carried else None
        if before is None:
            yield frame.outside(turns, which)
        else:
            result = frame.body.jaxpr.outvars[frame.carried.index(which)]
            yield ValueAt(frame, before, result)

    def _turns_before(self, value: ValueAt) -> Turns | None:
        """The turns with the last one before its own; None where there was none."""
        frame, turns, _ = value
        if frame.turns is None:
            return turns if self.turn_in(frame, value) > 0 else None
        number = frame.turns.index(turns[-1])
        return (*turns[:-1], frame.turns[number - 1]) if number else None

    def turn_in(self, loop: Frame, value: ValueAt) -> int:
        """The first turn of a while loop around in which a value was bad."""
        since = self.finiteness(value).since
        place = value.loops.index(loop)
        return int(since[place]) if place < len(since) else 0

    def order(self, value: ValueAt) -> tuple[float, ...]:
        """When a value is made, relative to others; shards work at the same time."""
        when: list[int] = []
        shards: list[int] = []
        for frame, turn in value.steps:
            at = self.turn_in(frame, value) if frame.is_merged else 0
            if turn is not None and frame.mesh:
                shards.append(turn)
            elif turn is not None and frame.turns is not None:
                at = frame.turns.index(turn)
            when += [frame.number, frame.branch, at]
        number = value.number
        last = (-1,) if number is None else (number, np.inf)
        return (*when, *last, *shards)

    def is_derivative(self, value: ValueAt) -> bool:
        """Whether a value is of use only to a backward pass."""
        waiting, seen = [value], set[Any]()
        while waiting:
            frame, _, atom = waiting.pop()
            if any(is_transposed(one.equation) for one in frame.around):
                continue
            jaxpr = frame.body.jaxpr
            if atom in jaxpr.outvars:
                which = jaxpr.outvars.index(atom)
                if frame.above is None or which < len(frame.carried):
                    return False
                waiting.append(ValueAt(frame.above, (), frame.equation.outvars[which]))
            for eqn in jaxpr.eqns:
                if id(eqn) in seen or atom not in eqn.invars:
                    continue
                seen.add(id(eqn))
                if not is_transposed(eqn):
                    waiting += [ValueAt(frame, (), var) for var in eqn.outvars]
        return True

    def all_bad(self) -> Iterator[ValueAt]:
        """Every bad value there is."""
        waiting = [self.top]
        while waiting:
            frame = waiting.pop()
            for var, (spot, which) in frame.values.places.items():
                code = np.asarray(self.found[frame.base + spot][which].code)
                for turns in np.argwhere(code > 0):
                    yield ValueAt(frame, tuple(map(int, turns)), var)
            waiting += itertools.chain(*frame.inner.values())

    def origin(self, ends: list[ValueAt]) -> ValueAt | None:
        """The first bad value behind some, or among them, that comes from no other.

        All that is behind the ends is sorted by when it was made, so that when a value
        has its turn, it is known which of its sources are there on purpose. On purpose
        are constants, unless they are results themselves, and infinities that were
        only made from what is on purpose. A bad argument is taken to be on purpose as
        well, and so is what is bad because of it: an operation that makes something
        bad by itself comes first. If there is none, the argument is the origin.
        """
        found: dict[Any, tuple[ValueAt, list[ValueAt]]] = {}
        waiting = list(ends)
        while waiting:
            value = waiting.pop()
            if value.key not in found:
                sources = self.before(value)
                found[value.key] = value, sources
                waiting += sources
        on_purpose: set[Any] = set()
        given: set[Any] = set()  # bad arguments, and what is bad because of them
        is_end = {value.key for value in ends}
        in_order = sorted(found.values(), key=lambda pair: self.order(pair[0]))
        for value, sources in in_order:
            key, behind = value.key, [one for one in sources if one.key in given]
            meant = all(one.key in on_purpose for one in sources)
            is_argument = self.is_argument(value)
            is_input = self._is_input(value) and not (sources and meant)
            is_written = value.number is None and not is_input
            is_infinite = self.code(value) == INFINITE and (sources or is_written)
            passes = is_infinite or any(self.code(one) == NAN for one in behind)
            if is_argument or behind:
                given.add(key)
            if (passes and meant) or is_argument or (is_written and key not in is_end):
                on_purpose.add(key)
            elif meant:
                return value
        worst = max(map(self.code, ends), default=FINITE)
        arguments = [value for value, _ in in_order if self.is_argument(value)]
        alike = [value for value in arguments if self.code(value) == worst]
        return next(iter(alike or arguments), None)

    def arguments_behind(self, value: ValueAt) -> list[ValueAt]:
        """The bad arguments that a bad value was made from."""
        found: dict[Any, ValueAt] = {}
        waiting = [value]
        while waiting:
            sources = [x for x in self.before(waiting.pop()) if x.key not in found]
            found.update((one.key, one) for one in sources)
            waiting += sources
        return [one for one in found.values() if self.is_argument(one)]

    def is_argument(self, value: ValueAt) -> bool:
        """Whether a value is an argument of the program."""
        return value.frame.above is None and self._is_input(value)

    def _is_input(self, value: ValueAt) -> bool:
        return value.atom in value.frame.body.jaxpr.invars


def _finiteness_of(value: Any) -> Finiteness:
    """The same of a constant."""
    if not jnp.issubdtype(jnp.result_type(value), jnp.inexact):
        return Finiteness(FINITE)
    numbers = np.asarray(value).astype(np.complex128)
    worst = NAN if np.isnan(numbers).any() else int(np.isinf(numbers).any())
    return Finiteness(worst)
