# SPDX-License-Identifier: Apache-2.0
"""Alignment: which array of one side is which of the other, and in what layout.

Names are compared as they are written, then with `/` as `.` and without `:__call__`, so
that `blocks/0/attn:__call__` is PyTorch's `blocks.0.attn`. Rules rename, as those of
`load_weights` do, and may have steps; layouts turn axes. What has no partner is told.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from treetap._capture.selectors import Select, as_select, refuse_nothing
from treetap._compare.sources import Entry, Side
from treetap._compare.unroll import Pair
from treetap._core.errors import CaptureError
from treetap._core.wording import near_to, shown
from treetap._io.weight_layouts import Gathered, Misfit, Shape, Step, assembled, needs
from treetap._io.weight_rules import Rules, Source, Tensor
from treetap._io.weight_targets import section

NUMBERS = ("value", "grad")
Turn = tuple[Step, ...] | Callable[[np.ndarray], Any]


def dotted(text: str) -> str:
    """A name as another program might write it."""
    short = re.sub(r"(^|:)__call__(?=$|[.#])", "", text)
    return re.sub(r"[/:]", ".", short)


class Names:
    """The entries of a side by name."""

    def __init__(self, side: Side):
        self._exact = {(entry.text, entry.part): entry for entry in side}
        self._alike: dict[tuple[str, str], list[Entry]] = {}
        for entry in side:
            self._alike.setdefault((dotted(entry.text), entry.part), []).append(entry)

    def find(self, text: str, part: str) -> Entry | None:
        """The entry of a name; None if there is none, or several that read alike."""
        found = self._exact.get((text, part))
        if found is None:
            alike = self._alike.get((dotted(text), part), [])
            found = alike[0] if len(alike) == 1 else None
        return found

    def near(self, text: str) -> list[str]:
        """Names that look like one."""
        forms = {dotted(entry.text): entry.text for entry in self._exact.values()}
        return [shown(forms[form]) for form in near_to(dotted(text), forms, 3, 0.5)]


@dataclass(frozen=True)
class Aligned:
    """Two sides beside each other.

    Attributes:
        pairs: What both have, in the order of the first.
        only_a: What only the first has.
        only_b: What only the second has.
    """

    pairs: list[Pair]
    only_a: list[Entry]
    only_b: list[Entry]


class Aligner:
    """Rules and layouts made ready.

    Args:
        rename: As for `compare`.
        layout: As for `compare`.
        name: The public function at work, for messages.
    """

    def __init__(self, rename: Any, layout: Any, name: str):
        self._name = name
        given = rename
        if isinstance(rename, Mapping):
            given = {_pattern(key): value for key, value in rename.items()}
        self._rules = Rules(given, name)
        self._order = {key: n for n, key in enumerate(given or {})}
        self._layout = _layouts(layout, name)

    def align(self, a: Side, b: Side) -> Aligned:
        """Finds the partner of each entry of `a`."""
        names = Names(b)
        parts = {entry.part for entry in b}
        pairs: list[Pair] = []
        alone: list[Entry] = []
        used: set[int] = set()
        lost: list[str] = []
        for entry in a:
            if entry.part not in parts:
                continue
            source = self._source(entry)
            found = _Found(entry, names, source, used)
            if found.is_there():
                pairs.append(found.pair(self._turn(entry)))
            elif entry.part not in NUMBERS:
                continue  # a flag, of a branch that the other does not have
            elif source is not None and not source.tensor.is_optional:
                lost.append(f"{shown(entry.label)}: {found.missing(names)}")
            else:
                alone.append(entry)
        if lost:
            raise CaptureError(
                f"{self._name}: rules give names that `b` does not have."
                + section("what was looked for", lost)
                + "\nCorrect them, or say `tensor(...).optional()`."
            )
        ours = {entry.part for entry in a}
        rest = [e for e in b if id(e) not in used and e.part in ours]
        return Aligned(pairs, alone, [e for e in rest if e.part in NUMBERS])

    def refuse_unused(self, a: Side) -> None:
        """Refuses rules and layouts that no entry of a side needs."""
        for entry in a:
            self._source(entry)
        texts = [entry.text for entry in a]
        for pattern in self._rules.unmatched:
            wanted = re.sub(r"\{\w+\}", "0", pattern)
            near = near_to(wanted, texts, 3, 0.3)
            raise CaptureError(
                f"{self._name}: the rule for {pattern!r} in `rename` takes no site of "
                "`a`, or only what an earlier rule takes. Near it are: "
                f"{', '.join(map(shown, near or texts[:5]))}."
            )
        for select, _ in self._layout:
            if not any(select(entry.site) for entry in a):
                raise refuse_nothing(select, texts, f"{self._name}: `layout`")

    def _source(self, entry: Entry) -> Source | None:
        """What the first rule that matches says; without a call index, for each."""
        found: list[tuple[int, Source]] = []
        for form in entry.forms:
            bare = re.sub(r"#\d+", "", form)
            for text in dict.fromkeys((form, bare)):
                source = self._rules.find((text,))
                if source.rule is not None:
                    found.append((self._order[source.rule], source))
        if not found:
            return None
        return min(found, key=lambda item: item[0])[1]

    def _turn(self, entry: Entry) -> Turn:
        for select, turn in self._layout:
            if select(entry.site):
                return turn
        return ()


def _pattern(key: Any) -> Any:
    """A pattern as rules have it: the root's own value is `__call__`."""
    if not isinstance(key, str):
        raise TypeError(f"compare: a pattern of `rename` is a text, not {key!r}.")
    return key.removeprefix(":") or "__call__"


class _Found:
    """The entries of `b` that one entry of `a` is to be compared with."""

    def __init__(
        self, entry: Entry, names: Names, source: Source | None, used: set[int]
    ):
        self._a, self._names, self._used = entry, names, used
        self._source = source
        number = re.search(r"#\d+", entry.text)
        rule = source.rule if source is not None else None
        self._call = number[0] if number and rule and "#" not in rule else ""

    def _look(self, bound: Mapping[str, str]) -> Entry | None:
        if self._source is None:
            texts = [self._a.text]
        else:
            texts = [f"{text}{self._call}" for text in self._source.names(bound)]
        for text in texts:
            if (found := self._names.find(text, self._a.part)) is not None:
                self._used.add(id(found))
                return found
        return None

    def _steps(self) -> tuple[Step, ...]:
        return self._source.tensor.steps if self._source is not None else ()

    def _bound(self) -> Mapping[str, str]:
        return self._source.bound if self._source is not None else {}

    def _wanted(self, turn: Turn) -> tuple[tuple[Step, ...], list[Any]]:
        steps = self._steps() + (turn if isinstance(turn, tuple) else ())
        return steps, list(needs(steps, self._a.shape, self._bound()))

    def is_there(self) -> bool:
        """Whether `b` has all that is needed."""
        try:
            _, wanted = self._wanted(())
        except Misfit:
            wanted = [(self._first_bound(), None)]
        return all(self._look(bound) is not None for bound, _ in wanted)

    def _first_bound(self) -> Mapping[str, str]:
        """Some meaning for names in braces when shapes do not tell."""
        gathered = [step for step in self._steps() if isinstance(step, Gathered)]
        labels = {str(g.field): g.over[0] if g.over else "0" for g in gathered}
        return {**self._bound(), **labels}

    def missing(self, names: Names) -> str:
        """The first name that is not there, and what is near it."""
        try:
            _, wanted = self._wanted(())
        except Misfit:
            wanted = [(self._first_bound(), None)]
        assert self._source is not None
        for bound, _ in wanted:
            if self._look(bound) is None:
                text = self._source.names(bound)[0] + self._call
                near = names.near(text)
                return shown(text) + (f" (near it: {', '.join(near)})" if near else "")
        return ""

    def pair(self, turn: Turn) -> Pair:
        """Both, the second in the layout of the first."""
        try:
            steps, wanted = self._wanted(turn)
        except Misfit as error:
            entry = self._look(self._first_bound())
            assert entry is not None
            return Pair(self._a, entry, str(error))
        pieces = {_keyed(bound): (self._look(bound), shape) for bound, shape in wanted}
        first = next(iter(pieces.values()))[0]
        assert first is not None
        if callable(turn):
            return self._called(first, turn)
        for entry, shape in pieces.values():
            assert entry is not None
            if not is_fold(entry.shape, shape):
                told = f"{shown(entry.text)} has {entry.shape}, and {shape} is needed"
                return Pair(self._a, first, told if steps else "their shapes differ")

        def read_piece(bound: Mapping[str, str]) -> np.ndarray:
            entry, shape = pieces[_keyed(bound)]
            assert entry is not None
            return entry.read().reshape(shape)

        bound, shape = self._bound(), self._a.shape
        b = replace(
            first,
            read=lambda: assembled(steps, shape, bound, read_piece),
            shape=shape,
            own_shape=first.shape,
            text=first.text if len(pieces) == 1 else f"{first.text}, …",
            pieces=self._apart(steps, read_piece),
        )
        return Pair(self._a, b)

    def _apart(
        self, steps: tuple[Step, ...], read: Callable[[Mapping[str, str]], np.ndarray]
    ) -> tuple[tuple[str, Callable[[], np.ndarray]], ...]:
        """The layers of a stack, each by itself."""
        last, shape = steps[-1] if steps else None, self._a.shape
        if not isinstance(last, Gathered) or not last.is_new or last.axis != 0:
            return ()
        found: list[tuple[str, Callable[[], np.ndarray]]] = []
        for label, below in last.pieces(shape):
            bound = {**self._bound(), str(last.field): label}
            entry = self._look(next(needs(steps[:-1], below, bound))[0])
            assert entry is not None
            layer = functools.partial(assembled, steps[:-1], below, bound, read)
            found.append((entry.text, layer))
        return tuple(found)

    def _called(self, first: Entry, turn: Callable[[np.ndarray], Any]) -> Pair:
        """With a layout that is a function."""
        if self._steps():
            raise CaptureError(
                f"compare: {shown(self._a.label)} has a rule with steps and a `layout` "
                "that is a function; put the steps into the function."
            )
        array = np.asarray(turn(first.read()))
        shape = self._a.shape
        if not is_fold(array.shape, shape):
            turned = replace(first, shape=array.shape)
            return Pair(self._a, turned, "their shapes differ")
        read = lambda: array.reshape(shape)  # noqa: E731 - a field
        own = first.shape
        found = replace(first, dtype=array.dtype, read=read)
        return Pair(self._a, replace(found, shape=shape, own_shape=own))


def _keyed(bound: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(bound.items()))


def is_fold(one: Shape, other: Shape) -> bool:
    """Whether shapes differ only in neighbouring axes that are merged in one of them.

    `(2, 7, 32)` and `(2, 7, 4, 8)` do: the heads are an axis of their own. `(4, 8)` and
    `(8, 4)` do not.
    """
    if one == other:
        return True
    one, other = (tuple(n for n in shape if n != 1) for shape in (one, other))
    if len(one) > len(other):
        one, other = other, one
    rest = list(other)
    for length in one:
        product = 1
        while rest and product < length:
            product *= rest.pop(0)
        if product != length:
            return False
    return not rest


# Layouts.


def _layouts(given: Any, name: str) -> list[tuple[Select, Turn]]:
    if given is None:
        return []
    if not isinstance(given, Mapping):
        given = {"**": given}
    return [(as_select(key), _turn(turn, name)) for key, turn in given.items()]


def _turn(given: Any, name: str) -> Turn:
    if callable(given):
        return given
    if isinstance(given, str) and "->" in given:
        sides = given.split("->")
        if " " not in given.replace(" -> ", "->").replace("->", ""):
            sides = [" ".join(side.strip()) for side in sides]  # NCHW->NHWC
        return Tensor("x").rearrange("->".join(sides)).steps
    is_axes = isinstance(given, Sequence) and all(type(n) is int for n in given)
    if is_axes and not isinstance(given, str):
        return Tensor("x").transpose(*given).steps
    raise TypeError(
        f"{name}: a layout is axes such as (0, 2, 3, 1), a text such as 'NCHW->NHWC' "
        f"or 'b t (h k) -> b t h k', or a function of an array, not {given!r:.60}."
    )
