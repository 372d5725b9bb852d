# SPDX-License-Identifier: Apache-2.0
"""Alignment: which array of one side is which of the other, and in what layout.

Names are compared as they are written, then with `/` as `.` and without `:__call__`, so
that `blocks/0/attn:__call__` is PyTorch's `blocks.0.attn`. Rules rename, as those of
`load_weights` do, and may have steps; layouts turn axes. What has no partner is
listed.
"""

import itertools
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from treetap._capture.selectors import refuse_nothing
from treetap._compare.sources import Entry, Side, by_selector, without_call
from treetap._compare.unroll import Pair
from treetap._core.errors import CaptureError
from treetap._core.wording import near_to, shown
from treetap._io.targets import section
from treetap._io.weight_rules import (
    Bound,
    Gathered,
    Misfit,
    Rules,
    Shape,
    Source,
    Step,
    needs,
    tensor,
)

NUMBERS = ("value", "grad")
Turn = tuple[Step, ...] | Callable[[np.ndarray], Any]
_CALL = re.compile(r"#\d+")


def dotted(text: str) -> str:
    """A name as another program might write it."""
    return re.sub(r"[/:]", ".", without_call(text))


class Names:
    """The entries of a side by name."""

    def __init__(self, side: Side):
        self._alike: dict[tuple[str, str], list[Entry]] = {}
        for entry in side:
            self._alike.setdefault((dotted(entry.text), entry.part), []).append(entry)

    def find(self, text: str, part: str) -> Entry | None:
        """The entry of a name; None if there is none, or several that read alike."""
        alike = self._alike.get((dotted(text), part), [])
        exact = [entry for entry in alike if entry.text == text]
        found = exact[-1:] or alike
        return found[0] if len(found) == 1 else None

    def near(self, text: str) -> list[str]:
        """Names that look like one."""
        forms = {form: alike[-1].text for (form, _), alike in self._alike.items()}
        return [shown(forms[form]) for form in near_to(dotted(text), forms, 3, 0.5)]


class Aligner:
    """Rules and layouts made ready.

    Args:
        rename: As for `compare`.
        layout: As for `compare`.
    """

    def __init__(self, rename: Any = None, layout: Any = None):
        given = rename
        if isinstance(rename, Mapping):
            given = {_pattern(key): value for key, value in rename.items()}
        self._rules = Rules(given, "compare")
        self._order = {key: n for n, key in enumerate(given or {})}
        self._layout = [(select, _turn(turn)) for select, turn in by_selector(layout)]

    def align(self, a: Side, b: Side) -> tuple[list[Pair], Side, Side]:
        """Finds the partner of each entry of `a`.

        Returns:
            What both have, in the order of the first; what only the first has; what
            only the second has.
        """
        names = Names(b)
        parts_a, parts_b = ({entry.part for entry in side} for side in (a, b))
        pairs: list[Pair] = []
        alone: list[Entry] = []
        used: set[int] = set()
        lost: list[str] = []
        for entry in a:
            if entry.part not in parts_b:
                continue
            match = _Match(entry, self._source(entry), self._turn(entry), names)
            used.update(id(found) for found, _ in match.pieces)
            if not match.lost:
                pairs.append(match.pair())
            elif entry.part not in NUMBERS:
                continue  # a flag, of a branch that the other does not have
            elif match.is_required:
                near = ", ".join(names.near(match.lost[0]))
                where = f" (near it: {near})" if near else ""
                lost.append(f"{shown(entry.label)}: {shown(match.lost[0])}{where}")
            else:
                alone.append(entry)
        if lost:
            raise CaptureError(
                "compare: rules give names that `b` does not have."
                + section("what was looked for", lost)
                + "\nCorrect them, or say `tensor(...).optional()`."
            )
        rest = [e for e in b if e.part in NUMBERS and e.part in parts_a]
        return pairs, alone, [e for e in rest if id(e) not in used]

    def refuse_unused(self, a: Side) -> None:
        """Refuses rules and layouts that no entry of a side needs."""
        for entry in a:
            self._source(entry)
        texts = [entry.text for entry in a]
        for pattern in self._rules.unmatched:
            near = near_to(re.sub(r"\{\w+\}", "0", pattern), texts, 3, 0.3)
            raise CaptureError(
                f"compare: the rule for {pattern!r} in `rename` takes no site of "
                "`a`, or only what an earlier rule takes. Near it are: "
                f"{', '.join(map(shown, near or texts[:5]))}."
            )
        for select, _ in self._layout:
            if not any(select(entry.site) for entry in a):
                raise refuse_nothing(select, texts, "compare: `layout`")

    def _source(self, entry: Entry) -> Source:
        """The first rule that matches; without the index of a call it is for all."""
        forms = entry.text, without_call(entry.text)
        texts = [text for form in forms for text in (form, _CALL.sub("", form))]
        found = [self._rules.find((text,)) for text in texts]
        matched = [source for source in found if source.rule is not None]
        return min(matched, key=lambda x: self._order[x.rule], default=found[0])

    def _turn(self, entry: Entry) -> Turn:
        return next((turn for select, turn in self._layout if select(entry.site)), ())


def _pattern(key: Any) -> Any:
    """A pattern as rules have it: the root's own value is `__call__`."""
    if not isinstance(key, str):
        raise TypeError(f"compare: a pattern of `rename` is a text, not {key!r}.")
    return key.removeprefix(":") or "__call__"


class _Match:
    """One entry of `a`, and the entries of `b` that it is to be compared with.

    Without steps in its rule it has one partner; a stack has one for each layer. Steps
    are undone from the shape in `a`, which gives the shape of each. If they cannot
    give that shape there is a misfit, and only the first partner is looked for.

    Attributes:
        entry: Of `a`.
        pieces: Entries of `b`, with the shapes that are wanted.
        lost: Names that `b` does not have; of each piece the one looked for first.
        misfit: Why the shape of `a` cannot be had; empty if it can.
    """

    def __init__(self, entry: Entry, source: Source, turn: Turn, names: Names):
        self.entry = entry
        self._source, self._turn = source, turn
        self._steps = source.tensor.steps + (() if callable(turn) else turn)
        call = _CALL.search(entry.text)
        is_of_all_calls = source.rule is not None and "#" not in source.rule
        suffix = call[0] if call and is_of_all_calls else ""
        self.misfit = ""
        try:
            wanted = list(needs(self._steps, entry.shape, source.bound))
        except Misfit as error:
            self.misfit = str(error)
            wanted = [(self._some_bound(), entry.shape)]
        self.pieces: list[tuple[Entry, Shape]] = []
        self.lost: list[str] = []
        for bound, shape in wanted:
            texts = [f"{text}{suffix}" for text in source.names(bound)]
            found = (names.find(text, entry.part) for text in texts)
            if piece := next(filter(None, found), None):
                self.pieces.append((piece, shape))
            else:
                self.lost.append(texts[0])

    @property
    def is_required(self) -> bool:
        """Whether a rule says that there is a partner."""
        return self._source.rule is not None and not self._source.tensor.is_optional

    def _some_bound(self) -> Bound:
        """Some meaning for names in braces where the shape of `a` gives none."""
        gathered = [step for step in self._steps if isinstance(step, Gathered)]
        labels = {str(step.field): (step.over or "0")[0] for step in gathered}
        return {**self._source.bound, **labels}

    def pair(self) -> Pair:
        """Both, the second in the layout of the first; of a match that lost nothing."""
        first, _ = self.pieces[0]
        if self.misfit:
            return Pair(self.entry, first, self.misfit)
        if callable(self._turn):
            return self._called(first, self._turn)
        for found, shape in self.pieces:
            if not is_fold(found.shape, shape):
                lack = f"{shown(found.text)} has {found.shape}, and {shape} is needed"
                reason = lack if self._steps else "their shapes differ"
                return Pair(self.entry, first, reason)
        entries = (found for found, _ in self.pieces)
        made = _assembled(self._steps, self.entry.shape, entries)
        if len(self.pieces) > 1:
            made = replace(made, text=f"{first.text}, …")
        return Pair(self.entry, made)

    def _called(self, first: Entry, turn: Callable[[np.ndarray], Any]) -> Pair:
        """With a layout that is a function."""
        if self._steps:
            raise CaptureError(
                f"compare: {shown(self.entry.label)} has a rule with steps and a "
                "`layout` that is a function; put the steps into the function."
            )
        data = np.asarray(turn(first.read()))
        turned = replace(first, shape=data.shape, dtype=data.dtype, read=lambda: data)
        if not is_fold(data.shape, self.entry.shape):
            return Pair(self.entry, turned, "their shapes differ")
        made = _assembled((), self.entry.shape, iter([turned]))
        return Pair(self.entry, replace(made, own_shape=first.shape))


def _assembled(steps: Sequence[Step], shape: Shape, entries: Iterator[Entry]) -> Entry:
    """What steps make of entries, in a shape; nothing is read yet.

    Each entry is taken when its turn comes, as `needs` lists them. What is stacked on a
    new first axis is kept layer by layer, too.
    """
    if not steps:
        found = next(entries)
        return replace(
            found,
            shape=shape,
            own_shape=found.shape,
            read=lambda: found.read().reshape(shape),
        )
    *before, last = steps
    pieces = [_assembled(before, each, entries) for _, each in last.pieces(shape)]
    is_stack = isinstance(last, Gathered) and last.is_new and last.axis == 0
    return replace(
        pieces[0],
        shape=shape,
        read=lambda: last.join([piece.read() for piece in pieces], shape),
        pieces=tuple(pieces) if is_stack else (),
    )


def is_fold(one: Shape, other: Shape) -> bool:
    """Whether shapes differ only in neighbouring axes that are merged in one of them.

    `(2, 7, 32)` and `(2, 7, 4, 8)` do: the heads are an axis of their own. `(4, 8)` and
    `(8, 4)` do not.
    """
    if one == other:
        return True
    if 0 in (*one, *other) or math.prod(one) != math.prod(other):
        return False
    # After how many elements an axis ends: where axes are merged, some ends are gone.
    ends, others = (set(itertools.accumulate(s, operator.mul)) for s in (one, other))
    return ends - {1} <= others or others - {1} <= ends


def _turn(given: Any) -> Turn:
    """What a layout does to an array of `b`."""
    if callable(given):
        return given
    if isinstance(given, str) and "->" in given:
        sides = given.split("->")
        if " " not in given.replace(" -> ", "->").replace("->", ""):
            sides = [" ".join(side.strip()) for side in sides]  # NCHW->NHWC
        return tensor("x").rearrange("->".join(sides)).steps
    is_axes = isinstance(given, Sequence) and all(type(n) is int for n in given)
    if is_axes and not isinstance(given, str):
        return tensor("x").transpose(*given).steps
    raise TypeError(
        "compare: a layout is axes such as (0, 2, 3, 1), a text such as 'NCHW->NHWC' "
        f"or 'b t (h k) -> b t h k', or a function of an array, not {given!r:.60}."
    )
