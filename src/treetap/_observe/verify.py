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
from treetap._capture.walk.witness import Branching, Row, Told, witness_p
from treetap._core.errors import CaptureError
from treetap._observe.handlers import Handler, PureCall

Key = tuple[Any, ...]  # the operations around a witness, who told, and which time


class Frame(NamedTuple):
    """Where in the program an operation is.

    Attributes:
        around: The operations around it.
        turns: The turn of each loop around it, outermost first.
        active: For each loop whose rows end one by one, which of them still run.
    """

    around: tuple[int, ...] = ()
    turns: tuple[int, ...] = ()
    active: tuple[np.ndarray, ...] = ()

    def inside(self, eqn: Any, turn: int | None = None) -> "Frame":
        """The frame of what an operation holds."""
        turns = self.turns if turn is None else (*self.turns, turn)
        return self._replace(around=(*self.around, id(eqn)), turns=turns)


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


@dataclass
class Reference:
    """A program run in the slow way.

    Attributes:
        told: All values that could be told, in order.
        notes: What was seen of each, and of each leaf of its gradient.
        branch: The branch each row takes, where a mapping has one for each.
    """

    told: list[Key] = field(default_factory=list)
    notes: dict[Key, list[Note]] = field(default_factory=dict)
    branch: dict[tuple[Branching, tuple[Row, ...]], int] = field(default_factory=dict)
    keys: dict[tuple[tuple[int, ...], int], Key] = field(default_factory=dict)

    def run(self, closed: Any, values: Sequence[Any]) -> list[Any]:
        """Runs a program; gives its results."""
        body = body_of(closed)
        self._list(body.jaxpr, ())
        return self._evaluate(body, values, Frame())

    def _list(self, jaxpr: Any, around: tuple[int, ...]) -> None:
        """Lists what could be told, in order, whether or not it will be."""
        seen: Counter[Any] = Counter()
        for eqn in jaxpr.eqns:
            if eqn.primitive is witness_p:
                told, rows = eqn.params["told"], eqn.params["rows"]
                key = (*around, told, seen[told, rows])
                seen[told, rows] += 1
                self.keys[around, id(eqn)] = key
                is_value = isinstance(told, Told) and told.gradient_of is None
                if is_value and key not in self.notes:
                    self.told.append(key)
                self.notes.setdefault(key, [])
            elif _tells(eqn):
                for body in _bodies(eqn):
                    self._list(body.jaxpr, (*around, id(eqn)))

    def is_told_by_a_rule(self, key: Key) -> bool:
        """Whether a value in a branch was told by a rule for derivatives."""
        told, branchings = key[-2], [one for one, _ in self.branch]
        is_inside = any(told in each for one in branchings for each in one.inside)
        return not is_inside and any(told.label.name in x.ruled for x in branchings)

    def gradient_of(self, key: Key, leaf: int) -> list[Note]:
        """What was seen of the gradient of a leaf of a value.

        Where JAX takes a function again that it has traced, one `tap` tells several
        values. Then a gradient is of that with which it was told; of equal ones the
        last has the first, as the way back goes.
        """
        told = key[-2]
        found = [
            notes
            for (*_, one, _), notes in self.notes.items()
            if isinstance(one, Told) and (one.gradient_of, one.leaf) == (told, leaf)
        ]
        same = [one for one in self.told if one[-2] is told]
        if len(same) > 1:
            values = {one: _numbers(self.notes[one], leaf) for one in same}
            equal = [one for one in same if values[one] == values[key]]
            found = [one for one in found if one and _numbers(one, 1) <= values[key]]
            if len(found) > 1:
                found = found[::-1][equal.index(key) :][:1]
        return list(itertools.chain(*found))

    def _evaluate(self, body: Body, values: Sequence[Any], frame: Frame) -> list[Any]:
        def run(eqn: Any, ins: list[Any]) -> list[Any]:
            if eqn.primitive is witness_p:
                self._note(eqn, ins, frame)
                return []
            if not _tells(eqn):
                return _rebound(eqn, ins)
            steps = {scan_p: self._scan, while_p: self._while, cond_p: self._cond}
            step = steps.get(eqn.primitive, self._once)
            return step(eqn, ins, frame)

        return jax_compat.evaluate(body, values, run)

    def _note(self, eqn: Any, values: list[Any], frame: Frame) -> None:
        told, rows = eqn.params["told"], eqn.params["rows"]
        if isinstance(told, Branching):
            self.branch[told, rows] = int(values[0])
        elif self._is_taken(told, rows) and _runs(frame.active, rows):
            outermost_first = tuple(row.number for row in reversed(rows))
            key = self.keys[frame.around, id(eqn)]
            avals = (atom.aval for atom in eqn.invars)
            leaves = [_plain(value, aval.dtype) for value, aval in zip(values, avals)]
            self.notes[key].append(Note(outermost_first, frame.turns, leaves))

    def _is_taken(self, told: Any, rows: tuple[Row, ...]) -> bool:
        return all(
            told in branching.inside[number]
            for (branching, at), number in self.branch.items()
            if rows[len(rows) - len(at) :] == at
            and any(told in inside for inside in branching.inside)
        )

    def _once(self, eqn: Any, ins: list[Any], frame: Frame) -> list[Any]:
        (body,) = _bodies(eqn)
        return self._evaluate(body, ins, frame.inside(eqn))

    def _cond(self, eqn: Any, ins: list[Any], frame: Frame) -> list[Any]:
        body = _bodies(eqn)[int(ins[0])]
        return self._evaluate(body, ins[1:], frame.inside(eqn))

    def _scan(self, eqn: Any, ins: list[Any], frame: Frame) -> list[Any]:
        (body,) = _bodies(eqn)
        num_consts, num_carry = jax_compat.scan_counts(eqn.params)
        first = num_consts + num_carry
        consts, carry, mapped = ins[:num_consts], ins[num_consts:first], ins[first:]
        given: dict[int, list[Any]] = {}
        turns = range(eqn.params["length"])
        for turn in reversed(turns) if eqn.params["reverse"] else turns:
            slices = [value[turn] for value in mapped]
            inside = frame.inside(eqn, turn)
            outs = self._evaluate(body, [*consts, *carry, *slices], inside)
            carry, given[turn] = outs[:num_carry], outs[num_carry:]
        columns = zip(*(given[turn] for turn in turns))
        stacked = [jnp.stack(column) for column in columns]
        if not given:
            avals = [var.aval for var in eqn.outvars[num_carry:]]
            stacked = list(map(jax_compat.zeros_of, avals))
        return [*carry, *stacked]

    def _while(self, eqn: Any, ins: list[Any], frame: Frame) -> list[Any]:
        (body,) = _bodies(eqn)
        num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        first = num_cond + num_body
        consts, carry = ins[num_cond:first], ins[first:]
        cond = body_of(eqn.params["cond_jaxpr"])
        turn = 0
        while True:
            (again,) = jax_compat.evaluate(cond, [*ins[:num_cond], *carry])
            if not np.any(again):
                return carry
            inside = frame.inside(eqn, turn)
            if again.ndim:
                inside = inside._replace(active=(*frame.active, np.asarray(again)))
            outs = self._evaluate(body, [*consts, *carry], inside)
            carry = [_where(again, *pair) for pair in zip(outs, carry)]
            turn += 1


def _numbers(notes: Sequence[Note], leaf: int) -> set[bytes]:
    """What a leaf was, each time."""
    return {note.leaves[leaf].tobytes() for note in notes}


def _rebound(eqn: Any, ins: list[Any]) -> list[Any]:
    """Runs an operation as it is, but gives no operand away."""
    params = eqn.params
    if "donated_invars" in params:
        params = {**params, "donated_invars": (False,) * len(ins)}
    with jax_compat.in_context_of(eqn):
        return jax_compat.bind(eqn.primitive, ins, params)


def _where(again: Any, new: Any, old: Any) -> Any:
    """The new value in rows that still run."""
    flags = again.reshape(again.shape + (1,) * (new.ndim - again.ndim))
    return jnp.where(flags, new, old) if again.ndim else new


def _plain(value: Any, dtype: Any = None) -> np.ndarray:
    """A value as an array of numpy, of the type that the program says."""
    dtype = dtype or value.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(value))
    return np.asarray(value, dtype)


def _tells(eqn: Any) -> bool:
    """Whether a witness is inside an operation.

    A `while` that JAX computes again, under `jax.checkpoint`, has told before.
    """
    if eqn.primitive is while_p and is_computed_again(eqn.source_info.name_stack):
        return False
    return any(
        jax_compat.holds(body.jaxpr, witness_p)
        for body in jax_compat.bodies_in(eqn.params)
    )


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


def _runs(active: Sequence[np.ndarray], rows: tuple[Row, ...]) -> bool:
    """Whether rows still run in all loops around whose rows end one by one."""
    for flags in active:
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
    reference = Reference()
    try:
        program = jax_compat.traced(pure, list(map(jax.typeof, values)))
        reference.run(program, values)
    except TypeError as error:
        if grads and "custom_vjp" in str(error):
            raise CaptureError(
                "observe: `verify=True` sees gradients by a rule for reverse "
                "differentiation, and the function differentiates forward, too. "
                "Observe it without `grads`, or without `verify`."
            ) from error
        raise
    return reference


# The comparison.

_REPORT = (
    "One of the two is wrong. Do not trust these numbers, and please report the "
    "program that led here."
)


def compare(reference: Reference, calls: Sequence[Call], grads: bool) -> None:
    """Compares what was recorded with what was seen in the slow way.

    Args:
        reference: What was seen.
        calls: All calls that were heard, with what was recorded of them.
        grads: Whether gradients were asked for.
    """
    told = [key[-2].label.name for key in reference.told]
    heard = [call.label.name for call in calls]
    if told != heard:
        raise CaptureError(
            f"observe: verification failed. The capture heard {heard}; run in a slow "
            f"way the call tells {told}. {_REPORT}"
        )
    for key, call in zip(reference.told, calls):
        if not call.values:
            continue  # nobody asked for it
        seen = _Seen(call)
        if "taken" in call.flags and reference.is_told_by_a_rule(key):
            raise CaptureError(
                f"observe: `verify=True` cannot tell in which rows {seen.text!r} was "
                "taken: it is in a branch, in a function with a rule of its own for "
                "derivatives. Observe it without."
            )
        seen.compare_values(reference.notes[key])
        if call.states is not None:
            seen.compare_states()
        if grads and call.spot.order and call.label.how != "sow":
            for leaf in call.spot.moved[0]:
                seen.compare_gradient(leaf, reference.gradient_of(key, leaf))


class _Seen:
    """What was recorded of a call, to be compared with what was seen of it."""

    def __init__(self, call: Call):
        self.call, self.levels = call, call.spot.levels
        self.text = site_text(call.where.path, call.label.name, call.index)
        loops = [n for n, axis in enumerate(self.levels) if axis.kind == WHILE.name]
        self.last_of = {n for n in loops if self.levels[n].size == UNKEPT}
        self.loops = loops

    def fail(self, how: str) -> NoReturn:
        """Says what differs."""
        raise CaptureError(
            f"observe: verification failed. {self.text!r} {how}. {_REPORT}"
        )

    def place(self, note: Note, held: Sequence[int]) -> dict[int, int]:
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
        call = self.call
        placed = [(self.place(note, ()), note.leaves) for note in notes]
        taken, count = call.flags.get("taken"), call.flags.get("count")
        if taken is not None and not self.loops:
            was = np.zeros(np.shape(taken.array), bool)
            for place, _ in placed:
                was[tuple(place[n] for n in taken.levels)] = True
            if not np.array_equal(was, np.asarray(taken.array)):
                self.fail(f"has taken={np.asarray(taken.array)}, and was taken {was}")
        of_both = {one.levels for one in (taken, count) if one is not None}
        is_clear = len(of_both) == 1 and (taken is None or self.last_of)
        if count is not None and len(self.loops) == 1 and is_clear:
            times = np.zeros(np.shape(count.array), int)
            for place, _ in placed:
                at = tuple(place[n] for n in count.levels)
                times[at] = max(times[at], place[self.loops[0]] + 1)
            ran = np.asarray(count.array)
            # Where a branch was not taken in the last turn there is no note of that.
            is_last = (ran == 0) | (True if taken is None else np.asarray(taken.array))
            if not np.all(np.where(is_last, times == ran, times < ran)):
                self.fail(f"has count={ran}, and ran {times} times")
        is_partial = taken is not None or count is not None
        # Of a `while` the last iteration counts, which was noted last.
        last = {_without(place, self.last_of): leaves for place, leaves in placed}
        for n, (value, has) in enumerate(zip(call.values, call.spot.has)):
            found = [(dict(place), leaves[n]) for place, leaves in last.items()]
            self.compare(_plain(value), has, found, is_partial, "value")

    def compare_states(self) -> None:
        """Compares statistics with those of the values, which were compared before."""
        call, flags = self.call, self.call.flags
        if self.loops or (flags and call.gradient_states):
            raise CaptureError(
                "observe: `verify=True` cannot compare the statistics of "
                f"{self.text!r}, which is in a branch or a `while` loop. Observe its "
                "values, without `reduce`."
            )
        pairs = [*zip(call.states or (), call.values, call.spot.has)]
        for leaf, state in call.gradient_states.get(1, {}).items():
            pairs.append((state, call.gradients[1][leaf], call.spot.has[leaf]))
        for state, value, has in pairs:
            if state is None:
                continue
            again = measured(state.reducers, Placed(value, has), list(flags.values()))
            stats, wanted = state.total().stats, again.stats
            for mine, right in zip(jax.tree.leaves(stats), jax.tree.leaves(wanted)):
                one, two = _plain(mine), _plain(right)
                if not _is_near(one, two, max(_largest(one), _largest(two))):
                    self.fail(f"has statistics {stats}, those of its values {wanted}")

    def compare_gradient(self, leaf: int, notes: Sequence[Note]) -> None:
        """Compares the gradient of a leaf; where none was seen it must be zero."""
        call = self.call
        if call.spot.order > 1:
            raise CaptureError(
                f"observe: `verify=True` compares first derivatives, and {self.text!r} "
                "has higher ones. Observe it without `grads`, or without `verify`."
            )
        found = call.gradients.get(1, {}).get(leaf)
        if found is None:
            found = jax_compat.zeros_of(call.spot.avals[leaf])
        axes = call.gradient_axes.get(1, {}).get(leaf, call.spot.axes()[leaf])
        has = call.spot.has[leaf]
        if tuple(self.levels[n] for n in has) != axes:
            levels = iter(enumerate(self.levels))
            has = tuple(next(n for n, one in levels if one == axis) for axis in axes)
        placed = [(self.place(note, has), note.leaves[0]) for note in notes]
        self.compare(_plain(found), has, placed, True, "gradient")

    def compare(
        self,
        array: np.ndarray,
        has: Has,
        found: Sequence[tuple[dict[int, int], np.ndarray]],
        is_partial: bool,
        what: str,
    ) -> None:
        """Compares an array with what was seen at its places."""
        is_seen = np.zeros([self.levels[n].size for n in has], bool)
        largest = max((_largest(one) for _, one in found), default=0.0)
        for place, one in found:
            at = tuple(place[n] for n in has)
            if any(n >= size for n, size in zip(at, is_seen.shape)):
                continue  # an iteration of a `while` that is not kept
            is_seen[at] = True
            if not _is_near(array[at], one, largest):
                where = f" at {list(at)} of its first axes" if at else ""
                off = _difference(array[at], one)
                self.fail(
                    f"has a {what} that differs{where} by {off:.3g}: {array[at]} was "
                    f"recorded, {one} was seen"
                )
        if what == "gradient" and np.any(array[~is_seen]):
            self.fail("has a gradient where none was seen")
        if not (is_partial or np.all(is_seen)):
            self.fail("has values where none was seen")


def _without(place: dict[int, int], levels: set[int]) -> tuple[tuple[int, int], ...]:
    return tuple((n, at) for n, at in place.items() if n not in levels)


def _largest(value: np.ndarray) -> float:
    """The largest magnitude that is finite."""
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return 0.0
    sizes = np.abs(value.astype(np.complex128))
    return float(np.max(sizes, where=np.isfinite(sizes), initial=0.0))


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


def _is_near(first: np.ndarray, second: np.ndarray, largest: float) -> bool:
    """Whether two arrays may be the same, computed in two ways; and how large it is."""
    off = _difference(first, second)
    if not jnp.issubdtype(second.dtype, jnp.inexact):
        return off == 0.0
    return off <= 2 * math.sqrt(float(jnp.finfo(second.dtype).eps)) * largest
