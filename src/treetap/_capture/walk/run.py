# SPDX-License-Identifier: Apache-2.0
"""The walk: a jaxpr run again so that marked values come out, or go in.

`survey` lists the taps of a jaxpr, those of the jaxprs inside it included, as `Spot`s,
in order of execution. A plan says for each spot whether its value is to come out and
whether a value is to be added to it. `run` then runs the jaxpr by the plan; operations
that hold jaxprs are made anew, with more inputs and more outputs, by one rule each (see
`operations`).

What comes out of a loop or a mapping has its axis in front; what comes out of a branch
is followed by whether the branch was taken, out of a `while` by how often it ran.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
from jax.extend.core import Literal

from treetap._capture.edit_points import edit_p, unedited
from treetap._capture.marks import (
    TICKET,
    Label,
    again_p,
    gradient_p,
    linear_p,
    tap_p,
)
from treetap._capture.name_stacks import mappings_in, scopes_in
from treetap._capture.walk import jax_compat
from treetap._capture.walk.jax_compat import Body
from treetap._capture.walk.plans import Feeds, flat_feeds, is_inexact, shaped_feeds
from treetap._core.errors import CaptureError


class Spot(NamedTuple):
    """A tap in a jaxpr.

    Attributes:
        label: What it says of the value.
        order: How often it was differentiated.
        scopes: The names of the scopes around it, outermost first.
        avals: Types of its values: the leaves, then one for each flag.
        own: Types of the leaves at the tap itself.
        outer: How many of its first axes are of mappings further out than the jaxpr.
        wraps: The operations around it that shape its value, outermost first.
        flags: What follows the leaves: `"taken"` or `"count"`.
        leaves: For a gradient, which leaves of the value it belongs to.
        of: For a gradient, the spot of its value, if that is in the same jaxpr.
        source: For a gradient, the input that brings the ticket of its value.
        tickets: The outputs that take its ticket out.
        is_again: Whether it is a tap's value computed again, or the gradient of one.
        rows: How many of its own first axes are of mappings.
        sizes: Of the axes that operations around it add, outermost first.
        is_edit: Whether it is where a value may be edited; its tap comes before.
    """

    label: Label
    order: int
    scopes: tuple[str, ...]
    avals: tuple[Any, ...]
    own: tuple[Any, ...]
    outer: int = 0
    wraps: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    leaves: tuple[int, ...] | None = None
    of: int | None = None
    source: int | None = None
    tickets: tuple[int, ...] = ()
    is_again: bool = False
    rows: int = 0
    sizes: tuple[int, ...] = ()
    is_edit: bool = False

    @property
    def is_gradient(self) -> bool:
        """Whether this is a cotangent."""
        return self.leaves is not None

    @property
    def is_tap(self) -> bool:
        """Whether this is a value, told for the first time."""
        return not (self.is_gradient or self.is_again or self.is_edit)

    def seen_from(self, name_stack: Any) -> "Spot":
        """The spot as seen from outside an operation with this name stack."""
        return self._replace(
            scopes=(*scopes_in(name_stack), *self.scopes),
            outer=max(0, self.outer - mappings_in(name_stack)),
            tickets=(),
        )

    def wrapped(self, name: str, size: int | None = None, flag: str = "") -> "Spot":
        """The spot as seen from outside an operation that adds an axis or a flag."""
        avals, sizes = self.avals, self.sizes
        if size is not None:
            sizes = size, *sizes
            avals = tuple(_with_axis(aval, size, self.outer) for aval in avals)
        if flag:
            kind = bool if flag == "taken" else "int32"
            avals = (*avals, jax.ShapeDtypeStruct((), kind))
        flags = (*self.flags, flag) if flag else self.flags
        wraps = name, *self.wraps
        return self._replace(avals=avals, wraps=wraps, flags=flags, sizes=sizes)


def _with_axis(aval: Any, size: int, outer: int) -> Any:
    place = min(outer, len(aval.shape))
    shape = (*aval.shape[:place], size, *aval.shape[place:])
    return jax.ShapeDtypeStruct(shape, aval.dtype)


class Choice(NamedTuple):
    """What is to be done at a spot.

    Attributes:
        record: Whether its value comes out.
        feed: How something is fed into it: see `plans`; or None.
        iterations: In a `while` loop, how many iterations are kept; 0 for the last one.
        reduce: What is measured of it, a `Reduction`; its states come out first.
    """

    record: bool
    feed: Any = None
    iterations: int = 0
    reduce: Any = None

    @property
    def is_heard(self) -> bool:
        """Whether anything comes out."""
        return self.record or self.reduce is not None

    def states_at(self, spot: Spot) -> int:
        """How many arrays the states are, at a spot."""
        return 0 if self.reduce is None else self.reduce.width(spot.own)

    def width_at(self, spot: Spot) -> int:
        """How many arrays come out at a spot: states, leaves and flags."""
        if not self.is_heard:
            return 0
        rest = spot.avals if self.record else spot.flags
        return self.states_at(spot) + len(rest)


Plan = tuple[Choice, ...]


class Survey:
    """The spots of a jaxpr, and which equations they are in.

    Attributes:
        spots: All of them, in order of execution.
        parts: By equation, its bodies with the range of their spots; none for a tap.
        taps: By equation that is a tap, its spot.
        results: By equation, the spot of its results, where these are spots.
        entry: The spot of the inputs, where they are one.
    """

    entry: int | None = None

    def __init__(self, jaxpr: Any):
        self.spots: list[Spot] = []
        self.parts: dict[int, list[tuple[Body, slice]]] = {}
        self.taps: dict[int, int] = {}
        self.results: dict[int, int] = {}
        # Variables that hold a ticket, by spot, and those an input is handed on in.
        self._tickets: dict[Any, int] = {}
        self._inputs = {var: n for n, var in enumerate(jaxpr.invars)}
        for n, eqn in enumerate(jaxpr.eqns):
            if eqn.primitive in MARKS:
                self.taps[n] = len(self.spots)
                self._add_tap(eqn)
                continue
            if found := spots_below(eqn.primitive, eqn.params):
                self.parts[n] = [self._add_body(eqn, *part) for part in found]
            self._follow(eqn)
        for n, var in enumerate(jaxpr.outvars):
            if _is_var(var) and var in self._tickets:
                spot = self.spots[self._tickets[var]]
                spot = spot._replace(tickets=(*spot.tickets, n))
                self.spots[self._tickets[var]] = spot

        self._jaxpr = weakref.ref(jaxpr)  # a survey is kept for as long as that

    @functools.cached_property
    def is_forward(self) -> bool:
        """Whether something marked is differentiated forward in here."""
        return jax_compat.holds(self._jaxpr(), linear_p)

    def handed_on(self) -> list[tuple[int, int]]:
        """Outputs that are inputs: the number of each, and that of the input."""
        jaxpr: Any = self._jaxpr()
        pairs = [(n, var) for n, var in enumerate(jaxpr.outvars) if _is_var(var)]
        return [(n, self._inputs[var]) for n, var in pairs if var in self._inputs]

    def _add_tap(self, eqn: Any) -> None:
        stack = eqn.source_info.name_stack
        spot = spot_of(eqn.primitive, eqn.params, eqn.invars, stack)
        if spot.is_tap:
            self._tickets[eqn.outvars[-1]] = len(self.spots)
        else:
            spot = self._traced_back(spot, eqn.invars[-1])
        self.spots.append(spot)

    def _add_body(self, eqn: Any, body: Body, found: list[Spot]) -> tuple[Body, slice]:
        """Adds the spots of a body, seen from outside its operation."""
        base = len(self.spots)
        for inner in found:
            spot = inner.seen_from(eqn.source_info.name_stack)
            if inner.of is not None:
                spot = spot._replace(of=base + inner.of)
            elif inner.source is not None:
                spot = self._traced_back(spot, eqn.invars[body.first + inner.source])
            for n in inner.tickets:
                self._tickets[eqn.outvars[n]] = len(self.spots)
            self.spots.append(spot)
        return body, slice(base, len(self.spots))

    def _traced_back(self, spot: Spot, var: Any) -> Spot:
        """A gradient with where its ticket comes from: a spot here, or an input."""
        if not _is_var(var):
            return spot._replace(of=None, source=None)
        return spot._replace(of=self._tickets.get(var), source=self._inputs.get(var))

    def _follow(self, eqn: Any) -> None:
        """Notes tickets that go on in another shape, or through an operation."""
        pairs: list[tuple[Any, Any]] = []
        if len(eqn.invars) == len(eqn.outvars) == 1:
            pairs.append((eqn.invars[0], eqn.outvars[0]))
        for body in jax_compat.bodies_of(eqn.primitive, eqn.params):
            handed = survey(body.jaxpr)._inputs
            for var, new in zip(body.jaxpr.outvars, eqn.outvars):
                if _is_var(var) and var in handed:
                    pairs.append((eqn.invars[body.first + handed[var]], new))
        for old, new in pairs:
            for known in (self._tickets, self._inputs):
                if _is_var(old) and old in known:
                    known[new] = known[old]


def _is_var(atom: Any) -> bool:
    return not isinstance(atom, Literal)


def spot_of(primitive: Any, params: Any, values: Any, name_stack: Any) -> Spot:
    """The spot of a single tap."""
    scopes = scopes_in(name_stack)
    outer = max(0, params["rows"] - mappings_in(name_stack))
    avals = tuple(getattr(value, "aval", None) or jax.typeof(value) for value in values)
    label, order, rows = params["label"], params.get("order", 0), params["rows"]
    if primitive is tap_p:
        guards = len(avals) - label.tree.num_leaves
        own = avals[: label.tree.num_leaves]
        flags = ("taken",) * guards
        return Spot(label, order, scopes, avals, own, outer, flags=flags, rows=rows)
    own, leaves = avals[:-1], params.get("leaves")
    is_again = primitive is again_p or params.get("is_again", False)
    found = Spot(label, order, scopes, own, own, outer, is_again=is_again, rows=rows)
    if primitive is edit_p:
        return found._replace(is_edit=True)
    return found if leaves is None else found._replace(leaves=leaves)


# What the walk takes for a spot; another class looks at other things than taps.
lens: ContextVar[type[Survey]] = ContextVar("lens", default=Survey)
_surveys: "dict[type, WeakKeyDictionary[Any, Survey]]" = {}


def survey(jaxpr: Any) -> Survey:
    """The spots of an open jaxpr."""
    kind = lens.get()
    known = _surveys.get(kind)
    if known is None:
        known = _surveys[kind] = WeakKeyDictionary()
    found = known.get(jaxpr)
    if found is None:
        found = known[jaxpr] = kind(jaxpr)
    return found


_spotless: "WeakKeyDictionary[Any, bool]" = WeakKeyDictionary()


def is_spotless(primitive: Any, params: Any) -> bool:
    """Whether an operation is known to hold no taps: a quick look."""
    jaxpr = params.get("jaxpr")
    if jaxpr is None or primitive.name != "jit":
        return jax_compat.is_plain(primitive, params)
    known = _spotless.get(jaxpr)
    if known is None:
        known = _spotless[jaxpr] = not spots_below(primitive, params)
    return known


def spots_below(primitive: Any, params: Any) -> list[tuple[Body, list[Spot]]]:
    """The bodies of an operation, and their spots as seen from outside it; if any."""
    if jax_compat.is_plain(primitive, params):
        return []
    bodies = jax_compat.bodies_of(primitive, params)
    for jaxpr in jax_compat.hidden_jaxprs(primitive, params):
        if survey(jaxpr).spots:
            raise refuse_hidden(primitive, survey(jaxpr).spots[0])
    if not bodies:
        return []
    found = [survey(body.jaxpr).spots for body in bodies]
    if not any(found):
        return []
    wrap = RULES[primitive.name].wrap
    return [
        (body, [wrap(spot, params) for spot in spots])
        for body, spots in zip(bodies, found)
    ]


def refuse_hidden(primitive: Any, spot: Spot) -> CaptureError:
    """The error for a tap where the walk cannot go."""
    where = (
        "the condition of a while loop"
        if primitive.name == "while"
        else (f"the operation {primitive.name!r}")
    )
    return CaptureError(
        f"The tap {spot.label.name!r} is inside {where}, which a capture cannot enter. "
        "Move the tap outside it, or return the value and tap it there."
    )


class Rule(NamedTuple):
    """How the walk goes through an operation.

    Attributes:
        wrap: A spot inside, as seen from outside; with the operation's parameters.
        run: Runs the operation by a plan: see `Step`.
    """

    wrap: Callable[[Spot, dict[str, Any]], Spot]
    run: Callable[["Step"], tuple[list[Any], list[Any]]]


RULES: dict[str, Rule] = {}
MARKS = (tap_p, gradient_p, again_p, edit_p)


class Step(NamedTuple):
    """One operation to be run by a plan.

    Attributes:
        primitive: The operation.
        params: Its parameters.
        values: Its operands.
        bodies: Its jaxprs.
        plans: A plan for each of them.
        feeds: For each, what is to be added at its spots.
        keep: Whether the taps stay in, for a capture further out.
    """

    primitive: Any
    params: dict[str, Any]
    values: list[Any]
    bodies: list[Body]
    plans: list[Plan]
    feeds: list[Feeds]
    keep: bool


def flat_found(found: Sequence[Any]) -> list[Any]:
    """What was recorded, in one list."""
    return [value for values in found if values is not None for value in values]


def shaped_found(plan: Plan, spots: Sequence[Spot], flat: Sequence[Any]) -> list[Any]:
    """The inverse of `flat_found`."""
    supply = iter(flat)
    return [
        [next(supply) for _ in range(choice.width_at(spot))]
        if choice.is_heard
        else None
        for choice, spot in zip(plan, spots)
    ]


def run(
    body: Body, values: Sequence[Any], plan: Plan, feeds: Feeds, keep: bool
) -> tuple[list[Any], list[Any]]:
    """Runs a body by a plan: its results, and what each spot gave (or None)."""
    jaxpr = body.jaxpr
    work = survey(jaxpr)
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, body.consts))
    env.update(zip(jaxpr.invars, values))
    found: list[Any] = [None] * len(work.spots)

    def note(place: int, values: Any) -> None:
        numbers = [value for value in values if is_inexact(value)]
        found[place] = recorded(None, numbers, plan[place], work.spots[place])

    if work.entry is not None:
        note(work.entry, values)
    for n, eqn in enumerate(jaxpr.eqns):
        ins = [jax_compat.read(env, atom) for atom in eqn.invars]
        parts = work.parts.get(n)
        with jax_compat.in_context_of(eqn):
            if eqn.primitive is linear_p and not keep:
                outs = ins[:-1]
            elif n in work.taps:
                place = work.taps[n]
                tapped, outs = at_spot(
                    eqn.primitive, eqn.params, ins, plan[place], feeds[place], keep
                )
                spot = work.spots[place]
                found[place] = recorded(eqn.primitive, tapped, plan[place], spot)
            elif parts is None:
                outs = jax_compat.bind(eqn.primitive, ins, eqn.params)
            else:
                step = Step(
                    eqn.primitive,
                    eqn.params,
                    ins,
                    [body for body, _ in parts],
                    [plan[part] for _, part in parts],
                    [feeds[part] for _, part in parts],
                    keep,
                )
                outs, inner = RULES[eqn.primitive.name].run(step)
                for (_, part), values_found in zip(parts, inner):
                    found[part] = values_found
            if n in work.results:
                note(work.results[n], outs)
        env.update(zip(eqn.outvars, outs))
    return [jax_compat.read(env, atom) for atom in jaxpr.outvars], found


def at_spot(  # noqa: PLR0917 - all that there is to a tap
    primitive: Any, params: Any, values: Any, choice: Choice, feed: Any, keep: bool
) -> tuple[Any, Any]:
    """The operands of a tap with what is fed, and its results."""
    if feed is not None and primitive is edit_p:
        return values, choice.feed.edited(params, values, feed, keep)
    if feed is not None:
        values = choice.feed.added(values, feed)
    return values, _after_spot(primitive, params, values, keep)


def _after_spot(
    primitive: Any, params: Any, values: list[Any], keep: bool
) -> list[Any]:
    """The results of a tap; it stays in for a capture further out."""
    if keep:
        return list(primitive.bind(*values, **params))
    if primitive is edit_p:
        return unedited(values, params)
    return [*values, TICKET] if primitive is tap_p else values[:-1]


def recorded(primitive: Any, values: list[Any], choice: Choice, spot: Spot) -> Any:
    """What comes out of the operands of a tap: states, leaves, flags; or None."""
    if not choice.is_heard:
        return None
    count = len(spot.own)
    leaves, guards = list(values[:count]), list(values[count:])
    if primitive is gradient_p:
        guards = []  # what follows the leaves is the ticket
    kept = leaves if choice.record else []
    if choice.reduce is None:
        return kept + guards
    return [*choice.reduce.measure(leaves, guards), *kept, *guards]


_rewritten: "WeakKeyDictionary[Any, dict[Any, Any]]" = WeakKeyDictionary()


def rewritten(body: Body, plan: Plan, feeds: Feeds, keep: bool) -> Any:
    """A body as a closed jaxpr that takes what is fed and gives what is recorded."""
    made = _rewritten.setdefault(body.jaxpr, {})
    fed = tuple(jax.typeof(value) for value in flat_feeds(feeds))
    key = (plan, keep, fed, jax.sharding.get_abstract_mesh())
    if key not in made:
        count = len(body.jaxpr.invars)

        def fn(*values: Any) -> list[Any]:
            given = shaped_feeds(plan, values[count:])
            outs, found = run(body, values[:count], plan, given, keep)
            return [*outs, *flat_found(found)]

        avals = [var.aval for var in body.jaxpr.invars]
        made[key] = jax_compat.traced(fn, [*avals, *fed])
    return made[key]
