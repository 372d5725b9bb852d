# SPDX-License-Identifier: Apache-2.0
"""Verification: the same call in a slow way that shares nothing with captures.

`observe(..., verify=True)` first traces the call with *witnesses* in the place of taps,
and runs the program here, operation by operation and in Python: iterations of loops one
by one, of branches the one that is taken, and the rows of a mapping as JAX itself takes
a mapping apart. What each witness sees is noted with the rows and iterations it was
seen in. Then the call runs as always, and every number in what was recorded is looked
up among the notes.

What is noted in the slow way comes by other means than what it is compared with: no
ticket, no plan, no table of operations, and gradients by `jax.custom_vjp`. What both
share is JAX, the function, and the names.

*Where a number belongs.* A note has the rows of all mappings around it, and the turns
of all loops, outermost first. The spot of a recorded value has levels: mappings and
loops in one order, outermost first. Together they say the place of the note along each
level; and the array of a leaf has some of the levels as its first axes.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core.primitives import cond_p, scan_p, while_p

from treetap._capture.calls import Call
from treetap._capture.listener import leave_marked
from treetap._capture.listening import Listening
from treetap._capture.name_stacks import is_computed_again
from treetap._capture.selectors import site_text
from treetap._capture.statistics.reduced import Placed, measured
from treetap._capture.walk import jax_compat
from treetap._capture.walk.jax_compat import Body, body_of
from treetap._capture.walk.operations import SHARD_MAP, WHILE
from treetap._capture.walk.spots import UNKEPT, VMAP, Has
from treetap._capture.walk.witness import (
    Branching,
    Row,
    Told,
    equations_in,
    witness_p,
)
from treetap._core.errors import CaptureError
from treetap._observe.handlers import Handler, PureCall


class Inside(NamedTuple):
    """An operation around what runs.

    Attributes:
        body: What runs of the operation, see `_body`.
        turn: Of a loop, the turn.
        active: Of a loop whose rows end one by one, which of them still run.
    """

    body: tuple[int, int]
    turn: int | None = None
    active: Any = np.True_


Frame = tuple[Inside, ...]  # the operations around, outermost first


class Note(NamedTuple):
    """What a witness saw once.

    Attributes:
        rows: The rows it was in, of the outermost mapping first.
        turns: The turns of loops it was in, outermost first.
        leaves: The values.
    """

    rows: tuple[int, ...]
    turns: tuple[int, ...]
    leaves: list[np.ndarray]


@dataclass(eq=False)
class Telling:
    """A value, or a gradient, that could be told somewhere in the program.

    Attributes:
        told: What it tells.
        notes: What was seen of it.
    """

    told: Any
    notes: list[Note] = field(default_factory=list)

    def numbers(self, leaf: int) -> set[bytes]:
        """What a leaf was, each time."""
        return {note.leaves[leaf].tobytes() for note in self.notes}


class Reference:
    """A program run in the slow way.

    Args:
        closed: The program.
        values: Its inputs.

    Attributes:
        values: All values that could be told, in order.
        gradients: The same of gradients of their leaves.
        skipped: Where a mapping has a branch for each row: by these branches and a row,
            all that is told in others than the one it takes.
    """

    def __init__(self, closed: Any, values: Sequence[Any]):
        self.skipped: dict[tuple[Branching, tuple[Row, ...]], frozenset[Told]] = {}
        self._at: dict[Any, Telling] = {}
        self._holders: set[int] = set()  # the operations with witnesses inside
        known: dict[Any, Telling] = {}
        seen: Counter[Any] = Counter()
        # Of one call of `tap` there is a witness for each row, and all are one telling.
        for eqn, around in equations_in(closed):
            if eqn.primitive is witness_p and not any(_has_told(x) for x, _ in around):
                holders = tuple(itertools.starmap(_body, around))
                told, rows = eqn.params["told"], eqn.params["rows"]
                key = holders, told, rows
                seen[key] += 1
                telling = known.setdefault((*key[:2], seen[key]), Telling(told))
                self._at[*holders, id(eqn)] = telling
                self._holders.update(id(x) for x, _ in around)
        tellings = [one for one in known.values() if isinstance(one.told, Told)]
        self.values = [one for one in tellings if one.told.gradient_of is None]
        self.gradients = [one for one in tellings if one.told.gradient_of is not None]
        self._evaluate(body_of(closed), values, ())

    def is_told_by_a_rule(self, value: Telling) -> bool:
        """Whether a value in a branch was told by a rule for derivatives."""
        told, branchings = value.told, [one for one, _ in self.skipped]
        is_inside = any(told in inside for one in branchings for inside in one.inside)
        return not is_inside and any(told.label.name in x.ruled for x in branchings)

    def gradient_of(self, value: Telling, leaf: int) -> list[Note]:
        """What was seen of the gradient of a leaf of a value.

        Where JAX takes a function again that it has traced, one `tap` tells several
        values. Then a gradient is of that with which it was told; of equal ones the
        last has the first, as the way back goes.
        """
        of = value.told, leaf
        found = [x for x in self.gradients if (x.told.gradient_of, x.told.leaf) == of]
        same = [one for one in self.values if one.told is value.told]
        if len(same) > 1:
            own = value.numbers(leaf)
            equal = [one for one in same if one.numbers(leaf) == own]
            found = [one for one in found if one.notes and one.numbers(1) <= own]
            if len(found) > 1:
                found = found[::-1][equal.index(value) :][:1]
        return [note for one in found for note in one.notes]

    def _evaluate(self, body: Body, values: Sequence[Any], frame: Frame) -> list[Any]:
        run = partial(self._run, frame)
        return jax_compat.evaluate(body, values, run)

    def _run(self, frame: Frame, eqn: Any, ins: list[Any]) -> list[Any]:
        if eqn.primitive is witness_p:
            self._note(frame, eqn, ins)
            return []
        if id(eqn) not in self._holders:
            return _rebound(eqn, ins)
        bodies, loops = _bodies(eqn), {scan_p: self._scan, while_p: self._while}
        if loop := loops.get(eqn.primitive):
            return loop(frame, eqn, bodies[0], ins)
        number = 0
        if eqn.primitive is cond_p:
            number, *ins = int(ins[0]), *ins[1:]
        inside = Inside(_body(eqn, number))
        return self._evaluate(bodies[number], ins, (*frame, inside))

    def _note(self, frame: Frame, eqn: Any, ins: list[Any]) -> None:
        told, rows = eqn.params["told"], eqn.params["rows"]
        if isinstance(told, Branching):
            taken, of_all = told.inside[int(ins[0])], frozenset().union(*told.inside)
            if sum(map(len, told.inside)) > len(of_all):
                raise CaptureError(
                    "observe: `verify=True` cannot tell branches apart that are one "
                    f"function, which `vmap` runs for all rows. One tells "
                    f"{min(one.label.name for one in of_all)!r}. Give each a function "
                    "of its own, or observe without."
                )
            self.skipped[told, rows] = of_all - taken
            return
        is_skipped = any(
            told in skipped and rows[len(rows) - len(at) :] == at
            for (_, at), skipped in self.skipped.items()
        )
        if _runs(frame, rows) and not is_skipped:
            outermost_first = tuple(row.number for row in reversed(rows))
            turns = tuple(one.turn for one in frame if one.turn is not None)
            pairs = zip(ins, eqn.invars)
            # Literals are of the type that the program says.
            leaves = [_plain(jnp.asarray(x, atom.aval.dtype)) for x, atom in pairs]
            telling = self._at[*(one.body for one in frame), id(eqn)]
            telling.notes.append(Note(outermost_first, turns, leaves))

    def _scan(self, frame: Frame, eqn: Any, body: Body, ins: list[Any]) -> list[Any]:
        num_consts, num_carry = jax_compat.scan_counts(eqn.params)
        first, turns = num_consts + num_carry, range(eqn.params["length"])
        carry = ins[num_consts:first]
        stacked = [jax_compat.zeros_of(var.aval) for var in eqn.outvars[num_carry:]]
        for turn in reversed(turns) if eqn.params["reverse"] else turns:
            values = [*ins[:num_consts], *carry, *(each[turn] for each in ins[first:])]
            outs = self._evaluate(body, values, (*frame, Inside(_body(eqn), turn)))
            carry, new = outs[:num_carry], outs[num_carry:]
            stacked = [old.at[turn].set(value) for old, value in zip(stacked, new)]
        return [*carry, *stacked]

    def _while(self, frame: Frame, eqn: Any, body: Body, ins: list[Any]) -> list[Any]:
        num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        consts, carry = ins[num_cond:][:num_body], ins[num_cond + num_body :]
        cond = body_of(eqn.params["cond_jaxpr"])
        for turn in itertools.count():
            (again,) = jax_compat.evaluate(cond, [*ins[:num_cond], *carry])
            if not np.any(again):
                break
            around = (*frame, Inside(_body(eqn), turn, np.asarray(again)))
            outs = self._evaluate(body, [*consts, *carry], around)
            carry = [_where(again, new, old) for new, old in zip(outs, carry)]
        return carry


def _body(eqn: Any, number: int = 0) -> tuple[int, int]:
    """A body of an operation: which operation, and which branch, as two may be one."""
    return id(eqn), number * (eqn.primitive is cond_p)


def _has_told(eqn: Any) -> bool:
    """Whether it is a `while` that is computed again, under `jax.checkpoint`."""
    stack = eqn.source_info.name_stack
    return eqn.primitive is while_p and is_computed_again(stack)


def _rebound(eqn: Any, ins: list[Any]) -> list[Any]:
    """Runs an operation as it is, but gives no operand away."""
    if "donated_invars" in eqn.params:
        params = {**eqn.params, "donated_invars": (False,) * len(ins)}
        eqn = eqn.replace(params=params)
    return jax_compat.rebind(eqn, ins)


def _where(again: Any, new: Any, old: Any) -> Any:
    """The new value in rows that still run."""
    flags = again.reshape(again.shape + (1,) * (new.ndim - again.ndim))
    return jnp.where(flags, new, old) if again.ndim else new


def _plain(value: Any) -> np.ndarray:
    """A value as an array of numpy."""
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(value) if is_key else value)


def _bodies(eqn: Any) -> list[Body]:
    """What an operation with witnesses inside runs: one body, or branches."""
    params = eqn.params
    if eqn.primitive is cond_p:
        return list(map(body_of, params["branches"]))
    if eqn.primitive is while_p:
        return [body_of(params["body_jaxpr"])]
    found = list(jax_compat.bodies_in(params))
    fits = len(found) == 1 and len(found[0].jaxpr.invars) == len(eqn.invars)
    if not fits or eqn.primitive.name == SHARD_MAP.name:
        raise CaptureError(
            f"observe: `verify=True` cannot run {eqn.primitive.name!r} in its slow "
            "way, and there are values to be recorded in it. Observe it without."
        )
    return found


def _runs(frame: Frame, rows: tuple[Row, ...]) -> bool:
    """Whether rows still run in all loops around whose rows end one by one."""
    for _, _, flags in frame:
        some = itertools.combinations(reversed(rows), flags.ndim)
        fits = [at for at in some if tuple(row.size for row in at) == flags.shape]
        if len(fits) != 1:
            raise CaptureError(
                "observe: `verify=True` cannot tell which mappings the rows of a "
                f"`while` loop are of, that ends for {flags.shape} rows one by one. "
                "Give the mappings different sizes, or observe without."
            )
        if not flags[tuple(row.number for row in fits[0])]:
            return False
    return True


def run_slowly(
    fn: Any, args: Any, kwargs: Any, asked: Listening, grads: bool
) -> Reference:
    """A call run in the slow way, of copies of its Modules.

    Args:
        fn: The function.
        args: Its arguments.
        kwargs: Its keyword arguments.
        asked: What is to be told.
        grads: Whether gradients are.
    """
    call = PureCall(fn, args, kwargs, "observe", lambda x: hasattr(x, "dtype"))
    if any(isinstance(value, Tracer) for value in call.values):
        raise CaptureError(
            "observe: `verify=True` runs the function in Python, and its arguments are "
            "being traced. Observe outside `jit` and other transforms."
        )
    handler = Handler(asked._replace(witness=2 if grads else 1, marks=False))

    def pure(*inputs: Any) -> None:
        fn, args, kwargs, _ = call.with_inputs(inputs)
        with handler.around(fn, args, kwargs, run=leave_marked):
            pass

    values = list(map(jnp.asarray, call.inputs))
    try:
        program = jax_compat.traced(pure, list(map(jax.typeof, values)))
        return Reference(program, values)
    except TypeError as error:
        if grads and "custom_vjp" in str(error):
            raise CaptureError(
                "observe: `verify=True` sees gradients by a rule for reverse "
                "differentiation, and the function differentiates forward, too. "
                "Observe it without `grads`, or without `verify`."
            ) from error
        raise


# The comparison.


def _failed(what: str) -> CaptureError:
    return CaptureError(
        f"observe: verification failed. {what}. One of the two is wrong. Do not trust "
        "these numbers, and please report the program that led here."
    )


def compare(reference: Reference, calls: Sequence[Call], grads: bool) -> None:
    """Compares what was recorded with what was seen in the slow way.

    Args:
        reference: What was seen.
        calls: All calls that were heard, with what was recorded of them.
        grads: Whether gradients were asked for.
    """
    told = [value.told.label.name for value in reference.values]
    heard = [call.label.name for call in calls]
    if told != heard:
        told_slowly = f"run in a slow way the call tells {told}"
        raise _failed(f"The capture heard {heard}; {told_slowly}")
    for value, call in zip(reference.values, calls):
        if not call.values:
            continue  # nobody asked for it
        seen = _Seen(call)
        if "taken" in call.flags and reference.is_told_by_a_rule(value):
            raise CaptureError(
                f"observe: `verify=True` cannot tell in which rows {seen.text!r} was "
                "taken: it is in a branch, in a function with a rule of its own for "
                "derivatives. Observe it without."
            )
        seen.compare_values(value.notes)
        if call.states is not None:
            seen.compare_states()
        if grads and call.spot.order and call.label.how != "sow":
            for leaf in call.spot.moved[0]:
                seen.compare_gradient(leaf, reference.gradient_of(value, leaf))


Place = dict[int, int]  # by level, where along it
Found = Sequence[tuple[Place, np.ndarray]]


class _Seen:
    """What was recorded of a call, to be compared with what was seen of it."""

    def __init__(self, call: Call):
        self.call, self.levels = call, call.spot.levels
        self.text = site_text(call.where.path, call.label.name, call.index)
        axes = list(enumerate(self.levels))
        self.loops = [n for n, axis in axes if axis.kind == WHILE.name]
        self.kept = [n for n, axis in axes if axis.size != UNKEPT]

    def fail(self, how: str) -> NoReturn:
        """Says what differs."""
        raise _failed(f"{self.text!r} {how}")

    def place(self, note: Note, held: Has = ()) -> Place:
        """Where along each level a note was made.

        Args:
            note: The note.
            held: The levels of what it is compared with.
        """
        mappings = [n for n, axis in enumerate(self.levels) if axis.kind == VMAP]
        loops = [n for n, axis in enumerate(self.levels) if axis.kind != VMAP]
        if len(note.rows) != len(mappings):
            mappings = [n for n in mappings if n in held]
        if len(note.rows) != len(mappings) or len(note.turns) != len(loops):
            self.fail(
                f"was recorded in {len(mappings)} mappings and {len(loops)} loops, "
                f"and is in {len(note.rows)} and {len(note.turns)}"
            )
        return dict(zip((*mappings, *loops), note.rows + note.turns))

    def compare_values(self, notes: Sequence[Note]) -> None:
        """Compares values, and whether and how often each was there."""
        call, places = self.call, list(map(self.place, notes))
        self.compare_flags(places)
        for n, (value, has) in enumerate(zip(call.values, call.spot.has)):
            found = [(at, note.leaves[n]) for at, note in zip(places, notes)]
            self.compare(_plain(value), has, found, "value")

    def compare_flags(self, places: Sequence[Place]) -> None:
        """Compares whether a value was there, in the last of how many turns.

        It is only known of branches, of one loop, and of branches in a loop of which
        the last turn is kept.
        """
        flags = self.call.flags
        levels = {flag.levels for flag in flags.values()}
        is_clear = len(flags) == 1 or len(self.kept) < len(self.levels)
        if len(levels) != 1 or len(self.loops) != ("count" in flags) or not is_clear:
            return
        found = {name: np.asarray(flag.array) for name, flag in flags.items()}
        taken, ran = found.get("taken", np.True_), found.get("count", np.int_(1))
        times = np.zeros(np.broadcast_shapes(taken.shape, ran.shape), int)
        for place in places:
            at = tuple(place[n] for n in next(iter(levels)))
            times[at] = max(times[at], 1 + sum(place[n] for n in self.loops))
        # Where a branch was not taken in the last turn there is no note of that.
        if not np.all(np.where(taken | (ran == 0), times == ran, times < ran)):
            self.fail(f"has taken={taken} and count={ran}, and was there {times} times")

    def compare_states(self) -> None:
        """Compares statistics with those of the values, which were compared before."""
        call, flags = self.call, self.call.flags
        if self.loops or (flags and call.gradient_states):
            raise CaptureError(
                "observe: `verify=True` cannot compare the statistics of "
                f"{self.text!r}, which is in a branch or a `while` loop. Observe its "
                "values, without `reduce`."
            )
        cases = [*zip(call.states or (), call.values, call.spot.has)]
        for leaf, state in call.gradient_states.get(1, {}).items():
            cases.append((state, call.gradients[1][leaf], call.spot.has[leaf]))
        for state, value, has in cases:
            if state is not None:
                again = measured(state.reducers, Placed(value, has), [*flags.values()])
                both = map(jax.tree.leaves, (state.total().stats, again.stats))
                for mine, right in zip(*both):
                    self.compare(_plain(mine), (), [({}, _plain(right))], "statistic")

    def compare_gradient(self, leaf: int, notes: Sequence[Note]) -> None:
        """Compares the gradient of a leaf; where none was seen it must be zero."""
        call = self.call
        if call.spot.order > 1:
            raise CaptureError(
                f"observe: `verify=True` compares first derivatives, and {self.text!r} "
                "has higher ones. Observe it without `grads`, or without `verify`."
            )
        zeros = jax_compat.zeros_of(call.spot.avals[leaf])
        found = call.gradients.get(1, {}).get(leaf, zeros)
        axes = call.gradient_axes.get(1, {}).get(leaf, call.spot.axes()[leaf])
        has = call.spot.has[leaf]
        if tuple(self.levels[n] for n in has) != axes:
            levels = iter(enumerate(self.levels))
            has = tuple(next(n for n, one in levels if one == axis) for axis in axes)
        placed = [(self.place(note, has), note.leaves[0]) for note in notes]
        self.compare(_plain(found), has, placed, "gradient")

    def compare(self, array: np.ndarray, has: Has, found: Found, what: str) -> None:
        """Compares an array with what was seen at its places."""
        is_seen = np.zeros([self.levels[n].size for n in has], bool)
        tolerance = max((_tolerance(one) for _, one in found), default=0.0)
        if len(self.kept) < len(self.levels):
            # Of a `while` the last iteration counts, which was noted last.
            last = {tuple(map(x.get, self.kept)): (x, one) for x, one in found}
            found = list(last.values())
        for place, one in found:
            at = tuple(place[n] for n in has)
            if any(n >= size for n, size in zip(at, is_seen.shape)):
                continue  # an iteration of a `while` that is not kept
            is_seen[at], off = True, _difference(array[at], one)
            if not off <= tolerance:
                where = f" at {list(at)} of its first axes" if at else ""
                self.fail(
                    f"has a {what} that differs{where} by {off:.3g}: {array[at]} was "
                    f"recorded, {one} was seen"
                )
        if what == "gradient" and np.any(array[~is_seen]):
            self.fail("has a gradient where none was seen")
        if what == "value" and not (self.call.flags or np.all(is_seen)):
            self.fail("has values where none was seen")


def _tolerance(value: np.ndarray) -> float:
    """How far off a number may be that is computed in another way."""
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return 0.0
    sizes = np.abs(value.astype(np.complex128))
    largest = np.max(sizes, where=np.isfinite(sizes), initial=0.0)
    return 2 * math.sqrt(float(jnp.finfo(value.dtype).eps)) * float(largest)


def _difference(first: np.ndarray, second: np.ndarray) -> float:
    """The largest difference of two arrays; NaN if they differ by more than numbers."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return math.nan
    if not jnp.issubdtype(first.dtype, jnp.inexact):
        return 0.0 if np.array_equal(first, second) else math.nan
    one, two = (x.astype(np.complex128) for x in (first, second))
    is_same = (one == two) | (np.isnan(one) & np.isnan(two))
    with np.errstate(invalid="ignore"):
        return float(np.max(np.abs(one - two), where=~is_same, initial=0.0))
