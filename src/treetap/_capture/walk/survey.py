# SPDX-License-Identifier: Apache-2.0
"""Surveys: the spots of a jaxpr, found once and kept for as long as the jaxpr.

`Taps` lists the taps of a jaxpr in order of execution, those of the jaxprs inside it
included, each as seen from here; and it follows tickets: from each tap to the marks
that hold its ticket, through operations that hand it on or give it another shape, and
from inputs and to outputs of the jaxpr. JAX caches jaxprs, so that most are surveyed
once in the life of a program.

What counts as a spot is the class of the survey: `Taps` looks at taps, others look at
other values. Who walks says which (see `run.Walk`).
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from jax.extend.core import Literal, Primitive

from treetap._capture.marks import is_like_ticket, linear_p
from treetap._capture.name_stacks import is_computed_again, mappings_in, scopes_in
from treetap._capture.walk import jax_compat
from treetap._capture.walk.jax_compat import body_of
from treetap._capture.walk.jaxpr_cache import JaxprCache
from treetap._capture.walk.operations import is_plain, operation_of
from treetap._capture.walk.plans import Part
from treetap._capture.walk.spots import MARKS, Flow, Spot, spot_of
from treetap._core.errors import CaptureError

INPUTS = -1


class Survey:
    """The spots of a jaxpr, and which equations they are in: a base class.

    Attributes:
        spots: All of them, in order of execution.
        inner: By equation, its bodies that have spots; none for a tap.
        taps: By equation that is a tap, its spot.
        results: By equation, the spot of its results, where these are spots; `INPUTS`
            stands for what gives the inputs.
    """

    def __init__(self):
        self.spots: list[Spot] = []
        self.inner: dict[int, list[Part]] = {}
        self.taps: dict[int, int] = {}
        self.results: dict[int, int] = {}


class Taps(Survey):
    """The taps of a jaxpr.

    Attributes:
        is_forward: Whether something marked is differentiated forward in here.
        handed_on: Outputs that may be inputs: the number of each, and of the input.
    """

    def __init__(self, jaxpr: Any):
        super().__init__()
        self.is_forward = False
        self.handed_on: list[tuple[int, int]] = []
        # By variable, of which spots it may hold the ticket, and which input it may be:
        # input n is the number ~n, which is negative.
        self._held = {var: {~n} for n, var in enumerate(jaxpr.invars)}
        for n, eqn in enumerate(jaxpr.eqns):
            if eqn.primitive in MARKS:
                self.taps[n] = len(self.spots)
                self._add(eqn, [spot_of(eqn.primitive, eqn.params, eqn.invars)])
                continue
            if eqn.primitive is linear_p or _is_forward_in(eqn):
                self.is_forward = True
            inner, seen = spots_below(eqn.primitive, eqn.params)
            start = len(self.spots)
            if inner:
                self.inner[n] = [x._replace(start=start + x.start) for x in inner]
            self._add(eqn, seen)
            self._follow(eqn)
        for n, var in enumerate(jaxpr.outvars):
            for one in self._held_by(var):
                if one < 0:
                    self.handed_on.append((n, ~one))
                else:
                    spot = self.spots[one]
                    flow = spot.flow._replace(tickets=(*spot.flow.tickets, n))
                    self.spots[one] = spot._replace(flow=flow)

    def _held_by(self, atom: Any) -> set[int]:
        return set() if isinstance(atom, Literal) else self._held.get(atom, set())

    def _add(self, eqn: Any, seen: Sequence[Spot]) -> None:
        """Adds the spots of an operation, seen from outside it.

        The ticket of each comes from a spot here, or else from inputs.
        """
        base, stack = len(self.spots), eqn.source_info.name_stack
        refuse_copies(stack, seen)
        scopes, mappings = scopes_in(stack), mappings_in(stack)
        for spot in seen:
            held = {x for n in spot.flow.sources for x in self._held_by(eqn.invars[n])}
            of = [base + n for n in spot.flow.of]
            of += [n for n in sorted(held) if n >= 0 and spot.is_of(self.spots[n])]
            inputs = [] if of else sorted(~n for n in held if n < 0)
            for n in spot.flow.tickets:
                self._held.setdefault(eqn.outvars[n], set()).add(len(self.spots))
            flow = Flow(tuple(of), tuple(inputs))
            self.spots.append(spot.seen_from(scopes, mappings, flow))

    def _follow(self, eqn: Any) -> None:
        """Notes tickets that go on in another shape, or through an operation."""
        avals = [var.aval for var in eqn.outvars]
        pairs = handed_on(eqn.primitive, eqn.params, len(eqn.invars), avals)
        for n, source in pairs:
            held = self._held_by(eqn.invars[source])
            self._held.setdefault(eqn.outvars[n], set()).update(held)


def _is_forward_in(eqn: Any) -> bool:
    """Whether something marked is differentiated forward inside an operation."""
    return not is_plain(eqn.primitive, eqn.params) and any(
        taps_in(body.jaxpr).is_forward for body in jax_compat.bodies_in(eqn.params)
    )


S = TypeVar("S", bound=Survey)
_surveys: JaxprCache[Any] = JaxprCache()


def survey(jaxpr: Any, look: Callable[[Any], S]) -> S:
    """The spots of an open jaxpr, as a class of surveys finds them."""
    return _surveys.get(jaxpr, look, functools.partial(look, jaxpr))


def taps_in(jaxpr: Any) -> Taps:
    """The taps of an open jaxpr."""
    return survey(jaxpr, Taps)


_spotless: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def is_spotless(primitive: Primitive, params: dict[str, Any]) -> bool:
    """Whether an operation is known to hold no taps: a quick look.

    A capture asks this of every operation that it comes to. Of those that hold jaxprs
    nearly all are jits, for which it is one look-up.
    """
    if "donated_invars" not in params:
        return is_plain(primitive, params) or not any(
            taps_in(body.jaxpr).spots for body in jax_compat.bodies_in(params)
        )
    jaxpr = params["jaxpr"]
    known = _spotless.get(jaxpr)
    if known is None:
        known = _spotless[jaxpr] = not taps_in(body_of(jaxpr).jaxpr).spots
    return known


def handed_on(
    primitive: Primitive, params: dict[str, Any], count: int, results: Sequence[Any]
) -> Iterator[tuple[int, int]]:
    """Results of an operation that may be operands, as tickets: the numbers of both.

    Args:
        primitive: The operation.
        params: Its parameters.
        count: How many operands it has.
        results: Its results, or their types.
    """
    if is_plain(primitive, params):
        # What JAX does with tickets on the way: it selects, slices, broadcasts.
        tickets = [n for n, result in enumerate(results) if is_like_ticket(result)]
        yield from itertools.product(tickets, range(count))
        return
    for body in operation_of(primitive, params).bodies(params):
        for n, source in taps_in(body.jaxpr).handed_on:
            if n < len(results):
                yield n, body.first + source


def refuse_copies(name_stack: Any, spots: Sequence[Spot]) -> None:
    """Refuses taps on the way back that nothing tells from those of the way forward."""
    is_again = jax_compat.has_new_remat() and is_computed_again(name_stack)
    if is_again and any(spot.is_tap for spot in spots):
        raise CaptureError(
            f"{spots[0].name!r} is in a `jax.checkpoint` that is differentiated inside "
            "the capture, and with JAX's setting `jax_remat3` a value that is computed "
            "again cannot be told from the first. Put the capture inside the function "
            "that is differentiated, or turn the setting off: "
            "`jax.config.update('jax_remat3', False)`."
        )


def spots_below(
    primitive: Primitive, params: dict[str, Any]
) -> tuple[list[Part], list[Spot]]:
    """The bodies of an operation, if it holds taps, and all their spots from outside.

    The tickets of these come by its operands, and go by its results. Those that the
    walk cannot come to are the last, so that nothing is found at them.
    """
    inner: list[Part] = []
    seen: list[Spot] = []
    if is_plain(primitive, params):
        return inner, seen
    held = list(jax_compat.bodies_in(params))
    if not any(taps_in(body.jaxpr).spots for body in held):
        return inner, seen
    operation = operation_of(primitive, params)
    wrap = operation.wrap(params)
    for number, body in enumerate(operation.bodies(params)):
        own, base = taps_in(body.jaxpr).spots, len(seen)
        inner.append(Part(body, own, start=base))
        for spot in own:
            flow = spot.flow.shifted(base, body.first)
            again = operation.is_repeated or spot.is_repeated
            outside = spot.wrapped(wrap, number)
            seen.append(outside._replace(flow=flow, is_repeated=again))
    known = [part.body.jaxpr for part in inner]
    inner = inner if seen else []
    where = operation.hides or f"the operation {primitive.name!r}"
    for body in held:
        for spot in [] if body.jaxpr in known else taps_in(body.jaxpr).spots:
            hidden_in = spot.hidden_in or where
            seen.append(spot._replace(hidden_in=hidden_in, flow=Flow()))
    return inner, seen
