# SPDX-License-Identifier: Apache-2.0
"""Sessions: what one capture asks for, and what it has heard.

A `Session` says what is to be done at the taps of an operation (`planned`), and takes
what the operation gave (`settle`). What is heard is kept as `Call`s, in order of
execution. `listener` runs a function for it.

Tickets at the level of the capture are arrays or tracers like all others. A session
knows each by its identity: `tickets` has, by the `id` of the array, the taps it may be
of, with their calls and what is fed there; `arrays` holds the arrays, so that no `id`
is given to another. JAX may give one array for several equal results, and would make
two tickets one: so each is made an array of its own when it comes out. Gradients come
in a later operation, or the same one, with the ticket as an operand: that tells their
call.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.source_info_util import current_name_stack

from treetap._capture.calls import Call, Ticket
from treetap._capture.listening import Listening
from treetap._capture.marks import PLAIN_TAPS, Label
from treetap._capture.module_paths import (
    Root,
    Roots,
    is_of_argument,
    open_scopes,
    resolve,
)
from treetap._capture.name_stacks import scopes_in
from treetap._capture.walk.plans import Adding, Choice, Fed, Found, Recorded
from treetap._capture.walk.run import recorded
from treetap._capture.walk.spots import Spot, plain_spot
from treetap._core.errors import CaptureError
from treetap._core.paths import Path
from treetap._core.trees.pytree import variables_below
from treetap._core.variables.variable import raw_values

WHOLE, NOTHING = Choice(True), Choice(False)


@dataclass(slots=True, eq=False)
class Session:
    """What one capture asks for and has heard.

    Attributes:
        asked: Which taps are to be emitted.
        roots: The Modules among the arguments.
        wants: Whether the value of a call is to be recorded.
        feeds: What is to be fed into the value of a call, see `plans`; or None.
        on_call: Told of each call that was recorded.
        on_hidden: Told of each call where the walk cannot go.
        taking: What comes out of each call that is wanted.
        gradients: Whether gradients are to be recorded.
        edits: Whether it edits, and hears the marks of what may be edited.
        calls: What was heard.
        counts: How many calls there were, by path and name.
        tickets: What is known of tickets, by `id`.
        arrays: The tickets themselves.
        edited: Names of values that are edited.
        unmatched: Names of gradients whose values were not found.
        is_forward: Whether something is differentiated forward.
        keep: Whether a capture further out listens, too.
        known: What it knows of the model, from when it opens.
        depth: How many scopes were open then.
    """

    asked: Listening
    roots: tuple[Root, ...] = ()
    wants: Callable[[Call], bool] = lambda call: True
    feeds: Callable[[Call], Fed | None] = lambda call: None
    on_call: Callable[[Call], None] = lambda call: None
    on_hidden: Callable[[Call], None] = lambda call: None
    taking: Choice = WHOLE
    gradients: bool = False
    edits: bool = False
    calls: list[Call] = field(default_factory=list)
    counts: Counter[tuple[Path, str]] = field(default_factory=Counter)
    tickets: dict[int, list[Ticket]] = field(default_factory=dict)
    arrays: list[Any] = field(default_factory=list)
    edited: set[str] = field(default_factory=set)
    unmatched: set[str] = field(default_factory=set)
    is_forward: bool = False
    keep: bool = False
    known: Roots = field(default_factory=lambda: Roots(()))
    depth: int = 0

    def roots_among(self, values: Sequence[Any]) -> tuple[Path, ...]:
        """Paths of the roots that may have come into a function with these operands.

        A Module that was handed over brought its arrays along.
        """
        given = set(map(id, values))
        held = [
            (path, {*map(id, raw_values(variables_below(node)))})
            for path, node in self.roots
        ]
        return tuple(path for path, ids in held if not ids or ids & given)

    def sparing(self, params: dict[str, Any], operands: Sequence[Any]) -> Any:
        """The parameters of a jit that gives no recorded value away."""
        if not any(params["donated_invars"]):
            return params
        recorded = {id(x) for call in self.calls for x in call.values or ()}
        pairs = zip(params["donated_invars"], operands)
        donated = tuple(flag and id(value) not in recorded for flag, value in pairs)
        return {**params, "donated_invars": donated}

    def close(self) -> None:
        """Lets go of what was heard, and of who listened.

        They refer to one another, and would keep arrays until Python looks for such.
        """
        self.calls, self.tickets, self.arrays = [], {}, []
        self.roots, self.known = (), Roots(())
        self.wants, self.feeds = (lambda call: False), (lambda call: None)
        self.on_call = self.on_hidden = lambda call: None

    def heard(self, spot: Spot, roots: tuple[Path, ...] | None = None) -> Call:
        """A call without its value yet."""
        label, where = spot.label, resolve(spot.scopes, self.known, roots)
        if label.how == "output":
            label = label._replace(kind=self.asked.outputs)
        key = where.path, label.name
        self.counts[key] += 1
        return Call(spot, label, where, self.counts[key] - 1)

    def add(self, call: Call | None, found: Recorded | None) -> None:
        """Keeps a call, complete but for its gradients, if it is wanted."""
        if call is not None and found is not None:
            call.fill(found)
            self.calls.append(call)
            self.on_call(call)

    def heard_here(self, label: Label, leaves: list[Any]) -> list[Any]:
        """Does at once, and quickly, what a tap at the capture's own level leads to."""
        if not self.is_heard(label):
            return leaves
        call = self.heard(plain_spot(label, open_scopes(self.known), tuple(leaves)))
        fed = self.feeds(call)
        if fed is not None and isinstance(fed.how, Adding):
            leaves = fed.how.added(leaves, fed.arrays)
        if self.wants(call):
            self.add(call, recorded(leaves, self.taking, call.spot))
        return leaves

    def is_heard(self, label: Label) -> bool:
        """Whether taps of this sort are asked for; they may be for another capture."""
        if label.is_edit or self.edits:
            return label.is_edit and self.edits
        if label.how in PLAIN_TAPS:
            return self.asked.taps
        if label.how == "output":
            return self.asked.outputs is not None
        return self.asked.hears(label.kind)  # pyright: ignore[reportArgumentType] - only plain taps have no kind

    def planned(
        self, spots: Sequence[Spot], ins: Sequence[Any], is_handed: bool = False
    ) -> list[Ticket]:
        """What is to be done at some spots.

        Args:
            spots: Where taps are, as seen from outside of the operation they are in.
            ins: The operands of the operation.
            is_handed: Whether it is a jit. (Other operations do not get arrays as they
                were handed over.)
        """
        here = scopes_in(current_name_stack())[self.depth :]
        spots = [spot.seen_from(here, 0, spot.flow) for spot in spots]
        roots = None
        if is_handed and any(is_of_argument(x) for spot in spots for x in spot.scopes):
            roots = self.roots_among(ins)
        tickets: list[Ticket] = []  # what is fed, there or where the ticket goes
        for spot in spots:
            call, choice, fed = None, NOTHING, None
            if spot.hidden_in:
                if self.is_heard(spot.label):
                    self.on_hidden(self.heard(spot, roots))
            elif spot.is_gradient:
                if self.gradients:
                    choice = self.taking._replace(iterations=0)
            elif not spot.is_tap:
                fed = self.fed_again(spot, ins, tickets)
            elif self.is_heard(spot.label):
                heard = self.heard(spot, roots)
                fed = self.feeds(heard)
                if self.edits and fed is not None:
                    self.edited.add(spot.name)
                if self.wants(heard):
                    call, choice = heard, self.taking
                    heard.spot = spot.keeping(choice.iterations)
            if fed is not None and spot.is_edit == self.edits:
                choice = choice._replace(feed=fed.how)
            tickets.append(Ticket(spot, call, choice, fed))
        return tickets

    def tap_of(
        self, spot: Spot, ins: Sequence[Any], here: Sequence[Ticket]
    ) -> Ticket | None:
        """The tap that a spot belongs to, if it is known which.

        Args:
            spot: The spot, which holds the ticket of the tap.
            ins: The operands of its operation, which may bring the ticket.
            here: What is known of the spots in the same operation.
        """
        if len(spot.flow.of) == 1:
            return here[spot.flow.of[0]]
        held = {id(ins[n]): ins[n] for n in spot.flow.sources}
        found = [one for key in held for one in self.tickets.get(key, ())]
        fitting = [one for one in found if spot.is_of(one.spot)]
        return fitting[0] if len(fitting) == 1 else None

    def fed_again(
        self, spot: Spot, ins: Sequence[Any], here: Sequence[Ticket]
    ) -> Fed | None:
        """What is fed where a ticket goes: what the tap stands for."""
        ticket = self.tap_of(spot, ins, here)
        if ticket is not None:
            return ticket.fed
        if spot.is_edit and spot.name in self.edited:
            raise CaptureError(
                f"edit: {spot.name!r} is edited, and cannot be followed to where "
                "it is differentiated. Differentiate outside: `jax.grad(edit(f, ...))`."
            )
        return None

    def settle(
        self,
        planned: Sequence[Ticket],
        found: Found,
        outs: list[Any],
        ins: Sequence[Any],
        handed_on: Iterable[tuple[int, int]] = (),
    ) -> None:
        """Keeps what an operation gave: values, then gradients by their tickets.

        Args:
            planned: What was to be done in it.
            found: What came out of it.
            outs: Its results.
            ins: Its operands.
            handed_on: Results that may be operands, as tickets: the numbers of both.
        """
        given: dict[int, list[Ticket]] = {}
        for ticket, one in zip(planned, found):
            self.add(ticket.call, one)
            if ticket.spot.order or ticket.spot.label.is_edit:
                for n in ticket.spot.flow.tickets:
                    given.setdefault(n, []).append(ticket)
        for n, tickets in given.items():
            if not self.keep:  # who listens further out has done so, and knows it
                outs[n] = _of_its_own(outs[n])
            self.remember(outs[n], tickets)
        for (spot, *_), one in zip(planned, found):
            if spot.is_gradient and one is not None:
                tap = self.tap_of(spot, ins, planned)
                if tap is None:
                    self.unmatched.add(spot.name)
                elif tap.call is not None:
                    tap.call.fill_gradient(spot, one)
        if self.are_tickets(ins):
            self.follow(handed_on, ins, outs)

    def remember(self, ticket: Any, known: Sequence[Ticket]) -> None:
        """Knows from now on what a value stands for, which is a ticket."""
        self.arrays.append(ticket)
        held = self.tickets.get(id(ticket), ())
        # One may come on several ways: both operands of a `select` may bring it.
        own = {(id(x.spot), id(x.call), id(x.fed)): x for x in (*held, *known)}
        self.tickets[id(ticket)] = list(own.values())

    def follow(
        self, handed_on: Iterable[tuple[int, int]], ins: Any, outs: list[Any]
    ) -> None:
        """Knows tickets again that an operation hands on, in whatever shape."""
        known: dict[int, list[Ticket]] = {}
        for n, source in handed_on:
            known.setdefault(n, []).extend(self.tickets.get(id(ins[source]), ()))
        for n, tickets in known.items():
            if tickets and id(outs[n]) not in self.tickets:
                outs[n] = _of_its_own(outs[n])
                self.remember(outs[n], tickets)

    def left(self, out: Any) -> None:
        """Takes note of derivatives that leave a function undone, in its result.

        A pullback or a linearization that is returned takes the tickets along, of the
        values that it is the derivative of. Nobody will hear it.
        """
        held = [id(leaf) for leaf in jax.tree.leaves(out)] if self.tickets else []
        for ticket in (one for key in held for one in self.tickets.get(key, ())):
            if ticket.fed is not None:
                raise CaptureError(
                    f"edit: {ticket.spot.name!r} is edited, and a derivative through "
                    "it is returned (a pullback or a linearization), which would be "
                    "of the value without the edit. Call it inside of the edited "
                    "function, and return what it gives."
                )
            self.unmatched.add(ticket.spot.name)

    def are_tickets(self, values: Sequence[Any]) -> bool:
        """Whether there is a ticket among values."""
        known = self.tickets.keys()
        return bool(known) and not known.isdisjoint(map(id, values))


def _of_its_own(ticket: Any) -> Any:
    """An equal array that is another object: JAX may give one for several results.

    Its numbers stay, as JAX may keep other values of a branch in the place of a ticket.
    """
    return jax.lax.bitwise_and(ticket, ticket)
