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

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from itertools import chain, product
from operator import is_
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from treetap._capture.name_stacks import is_transposed
from treetap._capture.walk import jax_compat
from treetap._capture.walk.jax_compat import Body
from treetap._capture.walk.operations import operation_of
from treetap._capture.walk.survey import survey
from treetap._observe.blame.search import (
    FINITE,
    INFINITE,
    NAN,
    EveryValue,
    Finiteness,
    Found,
    Place,
)

Turns = tuple[int | None, ...]
H = TypeVar("H", bound=Hashable)


def _reached(starts: list[H], onward: Callable[[H], Iterable[H]]) -> dict[H, list[H]]:
    """All that one comes to from some, with these; of each, what is next to it."""
    found: dict[H, list[H]] = {}
    waiting = list(starts)
    while waiting:
        one = waiting.pop()
        if one not in found:
            found[one] = list(onward(one))
            waiting += found[one]
    return found


class Frame:
    """A jaxpr where it stands: in an equation of another, or as the whole program.

    There is one object for each place (see `inner`), so that identity tells them apart.

    Args:
        body: The jaxpr.
        base: Its first spot among all of the program.
        above: The frame around, if it is in an equation.
        equation: That equation.

    Attributes:
        values: Its values as spots.
        inner: The bodies of its equations, by number.
        around: The frames that are in an equation, this one the last, outermost first.
        operation: What the operation around is.
        turns: The turns of it that are told apart, as they run; or None.
        carried: The inputs that are results of the turn before.
        rows: Of a loop whose rows end one by one: how many there are.
        mesh: For shards, whose turns are at the same time: the mesh axes, with sizes.
        loops: The frames around that are loops whose turns are not told apart.
    """

    around: "tuple[Frame, ...]" = ()
    turns: range | None = None
    carried = range(0)
    rows: tuple[int, ...] = ()
    mesh: Mapping[Any, int] = MappingProxyType({})

    def __init__(
        self, body: Body, base: int = 0, above: Any = None, equation: Any = None
    ):
        self.body, self.base, self.above = body, base, above
        self.values = survey(body.jaxpr, EveryValue)
        if above is not None:
            self.equation, params = equation, equation.params
            self.around = (*above.around, self)
            self.operation = operation_of(equation.primitive, params)
            find = self.operation.turns
            self.turns = None if find is None else find(params)
            self.carried = self.operation.carried(params)
            self.rows = self.operation.rows(params)
            self.mesh = self.operation.mesh(params)
        self.loops = [x for x in self.around if x.carried and x.turns is None]
        self.inner = {
            n: [Frame(x.body, base + x.start, self, body.jaxpr.eqns[n]) for x in bodies]
            for n, bodies in self.values.inner.items()
        }

    def outside(self, turns: Turns, which: int) -> "ValueAt":
        """What an input is outside the operation around, which is in some turns."""
        return ValueAt(self.above, turns, self.equation.invars[self.body.first + which])

    def after(self, turns: Turns, which: int, count: int) -> "ValueAt":
        """What is carried, after so many turns."""
        if not count:
            return self.outside(turns, self.carried[which])
        turn = None if self.turns is None else self.turns[count - 1]
        return ValueAt(self, (*turns, turn), self.body.jaxpr.outvars[which])

    def number_of(self, turn: int | None) -> int:
        """How many turns were before one; of turns at the same time, none."""
        if turn is None or self.mesh:
            return 0
        return turn if self.turns is None else self.turns.index(turn)


class ValueAt(NamedTuple):
    """A value at one moment.

    Attributes:
        frame: The jaxpr it is in.
        turns: For each frame around, outermost first, the iteration or shard it is in;
            None if these are not told apart, or there are none.
        atom: The variable, or a literal.
    """

    frame: Frame
    turns: Turns
    atom: Any

    def __hash__(self) -> int:
        return hash((self.frame, self.turns, id(self.atom)))  # literals have none

    @property
    def place(self) -> Place | None:
        """Where in its jaxpr it is; None of constants, and what is always finite."""
        is_literal = isinstance(self.atom, Literal)
        return None if is_literal else self.frame.values.places.get(self.atom)

    @property
    def is_argument(self) -> bool:
        """Whether it is an argument of the program."""
        return self.place is not None and self.place.number is None and not self.turns


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
        (frame, turns, atom), place = value, value.place
        if place is not None:
            held = self.found[frame.base + place.spot][place.which]
            at = tuple(turn for turn in turns if turn is not None)
            return Finiteness(*(np.asarray(part)[at] for part in held))
        consts = defaultdict(int, zip(frame.body.jaxpr.constvars, frame.body.consts))
        return _finiteness_of(jax_compat.read(consts, atom))

    def code(self, value: ValueAt) -> int:
        """Whether a value has infinities or NaNs, at this moment."""
        return int(self.finiteness(value).code)

    def steps(self, value: ValueAt) -> Iterator[tuple[Frame, int | None]]:
        """The frames around a value, outermost first, with its turn in each; or None.

        Of a `while` it is the first turn in which the value was bad.
        """
        since = iter(self.finiteness(value).since)
        for frame, turn in zip(value.frame.around, value.turns):
            yield frame, int(next(since, 0)) if frame in frame.loops else turn

    def before(self, value: ValueAt) -> list[ValueAt]:
        """The bad values that a bad value was made from."""
        since, loops = self.finiteness(value).since, value.frame.loops

        def was_bad(one: ValueAt) -> bool:
            own = self.finiteness(one)
            shared = sum(map(is_, one.frame.loops, loops))
            return bool(own.code) and [*own.since[:shared]] <= [*since[:shared]]

        return list(filter(was_bad, self._sources(value)))

    def _sources(self, value: ValueAt) -> list[ValueAt]:
        """What a value was made from, bad or not; a constant comes from nowhere."""
        (frame, turns, atom), place = value, value.place
        jaxpr = frame.body.jaxpr
        if place is None or value.is_argument:
            return []
        if place.number is None:
            which, outer = jaxpr.invars.index(atom), turns[:-1]
            if which not in frame.carried:
                return [frame.outside(outer, which)]
            *_, (_, turn) = self.steps(value)
            count = frame.number_of(turn)
            return [frame.after(outer, frame.carried.index(which), count)]
        eqn = jaxpr.eqns[place.number]
        if place.number not in frame.inner:
            whens = _moments(value, eqn)
            return [ValueAt(frame, when, x) for when in whens for x in eqn.invars]
        which, inner = eqn.outvars.index(atom), frame.inner[place.number]
        return [one for body in inner for one in self._results_of(body, turns, which)]

    def _results_of(self, frame: Frame, turns: Turns, which: int) -> list[ValueAt]:
        """What gave a result of an operation, inside it; or before it began."""
        if which < len(frame.carried):  # nobody knows how often a `while` ran
            counts = (1, 0) if frame.turns is None else (len(frame.turns),)
            return [frame.after(turns, which, count) for count in counts]
        own, atom = frame.turns, frame.body.jaxpr.outvars[which]
        whens = [(*turns, turn) for turn in ([None] if own is None else own)]
        values = [ValueAt(frame, when, atom) for when in whens]
        return [value for value in values if self.code(value)][:1]

    def order(self, value: ValueAt) -> tuple[int, ...]:
        """When a value is made, relative to others; shards work at the same time."""
        steps, place = list(self.steps(value)), value.place
        when = [(frame.base, frame.number_of(turn)) for frame, turn in steps]
        last = -1 if place is None else value.frame.base + place.spot
        shards = [turn or 0 for frame, turn in steps if frame.mesh]
        return (*chain(*when), last, *shards)

    def is_backward(self, value: ValueAt, equations: Iterable[JaxprEqn]) -> bool:
        """Whether a value is made in a backward pass, or of use only to one.

        Args:
            value: The value.
            equations: The one that makes it, and those around.
        """
        if any(map(is_transposed, equations)):
            return True
        frame, made = value.frame, {id(value.atom)}
        while True:
            jaxpr = frame.body.jaxpr
            for eqn in jaxpr.eqns:
                if not (is_transposed(eqn) or made.isdisjoint(map(id, eqn.invars))):
                    made.update(map(id, eqn.outvars))
            held = [n for n, atom in enumerate(jaxpr.outvars) if id(atom) in made]
            if frame.above is None or any(n < len(frame.carried) for n in held):
                return not held
            made = {id(frame.equation.outvars[n]) for n in held}
            frame = frame.above

    def all_bad(self) -> Iterator[ValueAt]:
        """Every bad value there is."""
        for frame in _reached([self.top], lambda one: chain(*one.inner.values())):
            for var, place in frame.values.places.items():
                code = np.asarray(self.found[frame.base + place.spot][place.which].code)
                for at in map(iter, np.argwhere(code > 0).tolist()):
                    is_apart = [one.turns is not None for one in frame.around]
                    turns = [next(at) if flag else None for flag in is_apart]
                    yield ValueAt(frame, tuple(turns), var)

    def origin(self, ends: list[ValueAt]) -> ValueAt | None:
        """The first bad value behind some, or among them, that comes from no other.

        All that is behind the ends is sorted by when it was made, so that when a value
        has its turn, it is known which of its sources are there on purpose. On purpose
        are constants, unless they are results themselves, and infinities that were
        only made from what is on purpose. A bad argument is taken to be on purpose as
        well, and so is what is bad because of it: an operation that makes something
        bad by itself comes first. If there is none, the argument is the origin.
        """
        sources_of = _reached(ends, self.before)
        in_order = sorted(sources_of, key=self.order)
        on_purpose: set[ValueAt] = set()
        given: set[ValueAt] = set()  # bad arguments, and what is bad because of them
        for value in in_order:
            sources = sources_of[value]
            because = given.intersection(sources)
            if because or value.is_argument:
                given.add(value)
            if not on_purpose.issuperset(sources):
                continue
            is_made = value.place is not None and value.place.number is not None
            is_meant = bool(sources or value.place is None) and (
                self.code(value) == INFINITE
                or any(self.code(one) == NAN for one in because)
                or not (is_made or value in ends)
            )
            if not (is_meant or value.is_argument):
                return value
            on_purpose.add(value)
        arguments = [value for value in in_order if value.is_argument]
        worst = max(map(self.code, ends), default=FINITE)
        return min(arguments, key=lambda one: self.code(one) != worst, default=None)

    def arguments_behind(self, value: ValueAt) -> list[int]:
        """Which bad arguments a bad value was made from, or is."""
        behind, inputs = _reached([value], self.before), self.top.body.jaxpr.invars
        return [n for n, x in enumerate(inputs) if ValueAt(self.top, (), x) in behind]


def _moments(value: ValueAt, eqn: JaxprEqn) -> Iterator[Turns]:
    """When and where what an equation reads was: on its own shard, or on several.

    A sum over shards, and all that brings shards together, names their axes.
    """
    named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    names = set(named if isinstance(named, tuple | list) else (named,))

    def read(frame: Frame, turn: Any) -> list[Any]:
        if not frame.mesh:
            return [turn]
        sizes = tuple(frame.mesh.values())
        own = zip(frame.mesh, np.unravel_index(turn, sizes))
        group = tuple(slice(None) if axis in names else n for axis, n in own)
        return np.arange(math.prod(sizes)).reshape(sizes)[group].flatten().tolist()

    return product(*map(read, value.frame.around, value.turns))


def _finiteness_of(value: Any) -> Finiteness:
    """The same of a constant."""
    if not jnp.issubdtype(jnp.result_type(value), jnp.inexact):
        return Finiteness(FINITE)
    numbers = np.asarray(value).astype(np.complex128)
    bad = np.flatnonzero(~np.isfinite(numbers))
    code = NAN if np.isnan(numbers).any() else INFINITE if bad.size else FINITE
    return Finiteness(code, (), bad.size, bad[0] if bad.size else 0)
