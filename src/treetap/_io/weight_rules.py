# SPDX-License-Identifier: Apache-2.0
"""Rules: where the value of a Variable lies in a weights file, and how it is laid out.

A rule maps a pattern of paths in the model to a `Tensor`, which names a tensor of the
file and the steps from it to the Variable. `Rules.find` gives the `Source` of each
path; the first pattern that matches decides.

The same rules read a file and write one: every step can be undone knowing only the
shape in the model. So for reading the steps are first followed backwards from that
shape, to what the file must have (`needs`), then forwards with the arrays
(`assembled`). A step that cannot give the wanted shape raises `Misfit`.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from treetap._core.errors import WeightsError
from treetap._core.paths import Path, show_path

MOST = 100_000  # tensors in one stack
Shape = tuple[int, ...]
Bound = Mapping[str, str]  # values of the names in braces
Groups = tuple[tuple[str, ...], ...]  # axes by name; those of a group are merged
Lengths = dict[str, int]  # of axes by name


# Steps.
#
# Each says what it needs and undoes itself:
#
# - `pieces(after)`: the tensors that a value of some shape is made of: what each binds
#   of the names in braces, and its shape;
# - `join(arrays, after)`: the value, from the file to the model;
# - `split(array)`: the tensors, from the model to the file.
#
# `pieces` refuses shapes that the step cannot give, so it is asked first.

Pieces = Sequence[tuple[Bound, Shape]]


class Misfit(Exception):
    """A file cannot give the shape or the numbers that are wanted; says why."""


def _axis_in(axis: int, shape: Shape, step: Any) -> int:
    if not -len(shape) <= axis < len(shape):
        raise Misfit(f"{step} needs an axis {axis}, but the shape there is {shape}")
    return axis % len(shape)


@dataclass(frozen=True, slots=True)
class Transposed:
    """Axes in another order; without axes, in reverse."""

    axes: tuple[int, ...]

    def __str__(self) -> str:
        return f".transpose({', '.join(map(str, self.axes))})"

    def order(self, count: int) -> tuple[int, ...]:
        """For each axis afterwards, its place before."""
        if self.axes and len(self.axes) != count:
            raise Misfit(f"{self} is for {len(self.axes)} axes, and there are {count}")
        return self.axes or tuple(reversed(range(count)))

    def pieces(self, after: Shape) -> Pieces:
        """The tensor, its axes turned back."""
        back = np.argsort(self.order(len(after)))
        return [({}, tuple(after[place] for place in back))]

    def join(self, arrays: Sequence[np.ndarray], after: Shape) -> np.ndarray:
        """From the file to the model."""
        return arrays[0].transpose(self.order(len(after)))

    def split(self, array: np.ndarray) -> list[np.ndarray]:
        """From the model to the file."""
        return [array.transpose(np.argsort(self.order(array.ndim)))]


@dataclass(frozen=True, slots=True)
class Rearranged:
    """Axes split, merged and reordered by name."""

    pattern: str
    left: Groups
    right: Groups
    sizes: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        sizes = "".join(f", {name}={size}" for name, size in self.sizes)
        return f".rearrange({self.pattern!r}{sizes})"

    def lengths(self, after: Shape) -> Lengths:
        """The length of each named axis, from the shape on the right."""
        if len(after) != len(self.right):
            raise Misfit(f"{self} gives {len(self.right)} axes, and {after} is wanted")
        found = dict(self.sizes)
        for length, group in zip(after, self.right):
            known = math.prod(found.get(name, 1) for name in group)
            for name in group:  # at most one is unknown
                if name not in found:
                    found[name] = length // known
                    known *= found[name]
            if known != length:
                raise Misfit(f"{self} cannot give an axis of {length} in {after}")
        return found

    def pieces(self, after: Shape) -> Pieces:
        """The tensor, with the axes of the left side."""
        sizes = self.lengths(after)
        return [({}, tuple(math.prod(sizes[n] for n in group) for group in self.left))]

    def join(self, arrays: Sequence[np.ndarray], after: Shape) -> np.ndarray:
        """From the file to the model."""
        return _moved(arrays[0], self.left, self.right, self.lengths(after))

    def split(self, array: np.ndarray) -> list[np.ndarray]:
        """From the model to the file."""
        return [_moved(array, self.right, self.left, self.lengths(array.shape))]


def _moved(array: np.ndarray, old: Groups, new: Groups, lengths: Lengths) -> np.ndarray:
    """An array with its axes taken apart, reordered and merged."""
    start, end = sum(old, ()), sum(new, ())
    apart = array.reshape([lengths[name] for name in start])
    merged = [math.prod(lengths[name] for name in group) for group in new]
    return apart.transpose([start.index(name) for name in end]).reshape(merged)


@dataclass(frozen=True, slots=True)
class Part:
    """One of several pieces that lie one after the other along an axis.

    From the model to the file there is no `split`: a part waits for the others.
    """

    index: int
    of: int | tuple[int, ...]
    axis: int

    def __str__(self) -> str:
        return f".part({self.index}, of={self.of}, axis={self.axis})"

    @property
    def count(self) -> int:
        """How many pieces there are."""
        return self.of if isinstance(self.of, int) else len(self.of)

    def extent(self, length: int) -> tuple[int, int, int]:
        """Where this piece starts, how long it is, and how long all are together.

        Nothing is made that grows with the number of pieces, which a file may give.
        """
        if isinstance(self.of, int):
            return length * self.index, length, length * self.of
        return sum(self.of[: self.index]), self.of[self.index], sum(self.of)

    def pieces(self, after: Shape) -> Pieces:
        """The tensor of all pieces together."""
        axis = _axis_in(self.axis, after, self)
        _, length, total = self.extent(after[axis])
        if length != after[axis]:
            raise Misfit(f"{self} gives {length} at axis {axis} of {after}")
        return [({}, (*after[:axis], total, *after[axis + 1 :]))]

    def join(self, arrays: Sequence[np.ndarray], after: Shape) -> np.ndarray:
        """From the file to the model."""
        axis = _axis_in(self.axis, after, self)
        start, length, _ = self.extent(after[axis])
        return arrays[0][(slice(None),) * axis + (slice(start, start + length),)]


@dataclass(frozen=True, slots=True)
class Gathered:
    """Several tensors in one: on a new axis, or along one they have."""

    field: str | None  # the name in braces that tells them apart
    over: tuple[str, ...] | None
    axis: int
    sizes: tuple[int, ...] | None
    is_new: bool

    def __str__(self) -> str:
        given = {"over": self.over, "axis": self.axis, "sizes": self.sizes}
        shown = [repr(self.field)] if self.field else []
        shown += [f"{key}={value}" for key, value in given.items() if value is not None]
        return f".{'stack' if self.is_new else 'concat'}({', '.join(shown)})"

    def pieces(self, after: Shape) -> Pieces:
        """Each of the tensors."""
        axis = _axis_in(self.axis, after, self)
        start, length, end = after[:axis], after[axis], after[axis + 1 :]
        labels = self.over or ()
        if not self.is_new:
            sizes = self.sizes or (length // len(labels),) * len(labels)
            if sum(sizes) != length:
                raise Misfit(f"{self} cannot give an axis of {length} in {after}")
            shapes = [(*start, size, *end) for size in sizes]
        elif length > MOST:
            raise Misfit(f"{self} would be {length} tensors at axis {axis} of {after}")
        else:
            labels = labels or tuple(map(str, range(length)))
            if len(labels) != length or not labels:
                raise Misfit(f"{self} gives {len(labels)} at axis {axis} of {after}")
            shapes = [start + end] * length
        return [({str(self.field): n}, shape) for n, shape in zip(labels, shapes)]

    def join(self, arrays: Sequence[np.ndarray], after: Shape) -> np.ndarray:
        """From the file to the model."""
        join = np.stack if self.is_new else np.concatenate
        return join(arrays, self.axis)

    def split(self, array: np.ndarray) -> list[np.ndarray]:
        """From the model to the file."""
        if self.is_new:
            return list(np.moveaxis(array, self.axis, 0))
        sizes = [shape[self.axis] for _, shape in self.pieces(array.shape)]
        return np.split(array, np.cumsum(sizes)[:-1], self.axis)


Step = Transposed | Rearranged | Part | Gathered
Steps = Sequence[Step]


def needs(steps: Steps, shape: Shape, bound: Bound) -> Iterator[tuple[Bound, Shape]]:
    """The tensors that a value of some shape is made of, and their shapes."""
    if not steps:
        yield bound, shape
        return
    *first, last = steps
    for more, piece in last.pieces(shape):
        yield from needs(first, piece, {**bound, **more})


def assembled(steps: Steps, shape: Shape, tensors: Iterator[np.ndarray]) -> np.ndarray:
    """A value made from the tensors it `needs`; a view of them where possible."""
    if not steps:
        return next(tensors)
    *first, last = steps
    arrays = [assembled(first, piece, tensors) for _, piece in last.pieces(shape)]
    return last.join(arrays, shape)


# Tensors.


@dataclass(frozen=True, slots=True, repr=False)
class Tensor:
    """A tensor of a weights file, and the way to a Variable; made by `tensor`."""

    names: tuple[str, ...]
    steps: tuple[Step, ...] = ()
    is_optional: bool = False

    def __post_init__(self) -> None:
        if not all(isinstance(each, str) for each in self.names):
            raise TypeError(f"tensor: names are texts, and these are {self.names}.")
        fields = [set(fields_in(each, "tensor")) for each in self.names]
        if any(other != fields[0] for other in fields):
            raise WeightsError(
                f"tensor: the names {self.names} do not have the same names in braces."
            )

    def __repr__(self) -> str:
        names = ", ".join(map(repr, self.names))
        end = ".optional()" if self.is_optional else ""
        return f"tensor({names}){''.join(map(str, self.steps))}{end}"

    def _then(self, step: Step) -> "Tensor":
        return replace(self, steps=(*self.steps, step))

    def transpose(self, *axes: int) -> "Tensor":
        """Its axes in another order, as `numpy.transpose`; in reverse by default."""
        if sorted(axes) != list(range(len(axes))):
            raise WeightsError(
                f"tensor.transpose: {axes} is no order of {len(axes)} axes."
            )
        return self._then(Transposed(axes))

    def rearrange(self, pattern: str, **sizes: int) -> "Tensor":
        """Its axes split, merged and reordered by name.

        Args:
            pattern: Axes in the file, `->`, axes in the model, in einops' notation:
                names, `(a b)` for a merged axis, `1` for one of length 1.
            **sizes: Lengths of axes merged in the model; all other lengths follow from
                the model's shape.
        """
        sides = pattern.split("->")
        left, right = map(_groups, (sides[0], sides[-1]))
        names = sum(left, ())
        is_good = len(sides) == 2 and sorted(names) == sorted(sum(right, ()))
        is_good &= len(set(names)) == len(names) and all(map(str.isidentifier, names))
        if not is_good:
            raise WeightsError(
                f"tensor.rearrange: {pattern!r} is no pattern like 'd (h k) -> d h k', "
                "with the same names on both sides, each once."
            )
        if strange := [n for n, size in sizes.items() if n not in names or size < 1]:
            raise WeightsError(
                f"tensor.rearrange: {strange} has no size in {pattern!r}."
            )
        for group in right:
            if sum(name not in sizes for name in group) > 1:
                raise WeightsError(
                    f"tensor.rearrange: in {pattern!r} the model's shape does not tell "
                    f"the lengths of {group}; give all but one: `{group[0]}=...`."
                )
        return self._then(Rearranged(pattern, left, right, tuple(sizes.items())))

    def part(self, index: int, *, of: int | Sequence[int], axis: int = 0) -> "Tensor":
        """One of several pieces that are fused in the file along an axis.

        Args:
            index: Which one.
            of: How many equal pieces there are, or the lengths of all of them.
            axis: Where they are cut.
        """
        step = Part(index, of if isinstance(of, int) else tuple(of), axis)
        lengths = (1,) if isinstance(step.of, int) else step.of
        if not 0 <= index < step.count or min(lengths) < 1:
            raise WeightsError(f"tensor.part: there is no part {index} of {step.of}.")
        if any(isinstance(known, Part) for known in self.steps):
            raise WeightsError(f"tensor.part: {self!r} is a part already.")
        return self._then(step)

    def stack(
        self,
        name: str | None = None,
        *,
        over: Sequence[str] | None = None,
        axis: int = 0,
    ) -> "Tensor":
        """Many tensors on a new axis, as for layers that are scanned over.

        Args:
            name: The name in braces that tells them apart; by default the one that the
                rule's pattern does not have.
            over: What it stands for; by default 0, 1, … along the axis.
            axis: The new axis.
        """
        labels = None if over is None else tuple(map(str, over))
        if labels == ():
            raise WeightsError(
                "tensor.stack: `over` is empty; there is nothing to stack."
            )
        return self._then(Gathered(name, labels, axis, None, True))

    def concat(
        self,
        name: str,
        *,
        over: Sequence[str],
        axis: int = 0,
        sizes: Sequence[int] | None = None,
    ) -> "Tensor":
        """Several tensors one after the other, for what is fused in the model only.

        Args:
            name: The name in braces that tells them apart.
            over: What it stands for, in order.
            axis: The axis along which they lie.
            sizes: Their lengths; equal by default.
        """
        lengths = None if sizes is None else tuple(sizes)
        if not over or (lengths is not None and len(lengths) != len(over)):
            raise WeightsError(f"tensor.concat: {over} and {sizes} differ in number.")
        return self._then(Gathered(name, tuple(map(str, over)), axis, lengths, False))

    def optional(self) -> "Tensor":
        """May be absent: then a Variable keeps its value."""
        return replace(self, is_optional=True)


def tensor(name: str, *alternatives: str) -> Tensor:
    """A tensor of a weights file, for the right side of a rule of `load_weights`.

    What it returns says how to get from there to the Variable: `.transpose(*axes)`,
    `.rearrange("d (h k) -> d h k")`, `.part(0, of=3, axis=1)` of something fused,
    `.stack()` of what is many tensors in the file, `.concat(...)`, `.optional()`.
    The steps are taken in order, and in the opposite order by `save_weights`.

    Args:
        name: Its name. What a rule's pattern has in braces is filled in.
        *alternatives: Names to try in turn when the file has none of that name, as for
            weights that are tied. Files are written with the first.

    Examples:
        >>> import treetap as tt
        >>> tt.tensor("h.{i}.attn.weight").part(0, of=3).transpose()
        tensor('h.{i}.attn.weight').part(0, of=3, axis=0).transpose()
    """
    return Tensor((name, *alternatives))


def _groups(side: str) -> Groups:
    """The axes of one side of a pattern; `1` is an axis without names.

    A parenthesis without its other is an axis, too, which has no good name.
    """
    found = re.findall(r"\(([^()]*)\)|([^\s()]+|[()])", side)
    groups = [[single] if single else inner.split() for inner, single in found]
    return tuple(tuple(n for n in group if n != "1") for group in groups)


# Rules.

_FIELD = re.compile(r"\{\{|\}\}|\{([A-Za-z_][A-Za-z0-9_]*)(\.\.\.)?\}")
_TOKEN = re.compile(rf"{_FIELD.pattern}|(\*\*?)|(.)", re.DOTALL)  # of a pattern


def fields_in(text: str, name: str) -> list[str]:
    """The names in braces; braces that stand for themselves are doubled."""
    if set(_FIELD.sub("", text)) & set("{}"):
        raise WeightsError(
            f"{name}: {text!r} has braces that are neither `{{name}}`, `{{name...}}` "
            "nor doubled."
        )
    return [match[1] for match in _FIELD.finditer(text) if match[1]]


def filled(template: str, bound: Bound) -> str:
    """A name with the values of the names in braces filled in."""

    def value(match: re.Match[str]) -> str:
        return bound[match[1]].replace("/", ".") if match[1] else match[0][0]

    return _FIELD.sub(value, template)


def _compiled(pattern: str, name: str) -> re.Pattern[str]:
    """A regular expression for paths, written with `/`."""
    seen = dict.fromkeys(fields_in(pattern, name), False)

    def part(match: re.Match[str]) -> str:
        field, many, wild, _ = match.groups()
        if wild:
            return "[^/]+" if wild == "*" else ".+"
        if not field:
            return re.escape(match[0][0])  # of braces that are doubled, one
        if seen[field]:
            return f"(?P={field})"
        seen[field] = True
        return f"(?P<{field}>{'.+' if many else '[^/]+'})"

    return re.compile(_TOKEN.sub(part, pattern))


class Source(NamedTuple):
    """Where one Variable's value is: a Tensor, and values of its names in braces."""

    tensor: Tensor
    bound: Bound
    rule: str | None  # the pattern that matched; None for the name by default

    def names(self, bound: Bound) -> list[str]:
        """The names that one of its tensors may have."""
        return [filled(name, bound) for name in self.tensor.names]


class Rules:
    """Rules made ready: the first pattern that matches a path decides.

    A path that no pattern matches is stored under its own name, with dots.
    """

    def __init__(self, rules: Mapping[str, str | Tensor] | None, name: str):
        self._rules: list[tuple[str, re.Pattern[str], Tensor]] = []
        if rules is not None and not isinstance(rules, Mapping):
            raise TypeError(
                f"{name}: `rules` maps patterns of paths to tensors, and is a "
                f"{type(rules).__name__}."
            )
        for pattern, given in (rules or {}).items():
            held = tensor(given) if isinstance(given, str) else given
            if not isinstance(held, Tensor):
                raise TypeError(
                    f"{name}: the rule for {pattern!r} is a {type(held).__name__}; "
                    "give the name of a tensor, or a `tensor(...)`."
                )
            matcher = _compiled(pattern, name)
            resolved = _resolved(pattern, set(matcher.groupindex), held, name)
            self._rules.append((pattern, matcher, resolved))
        self.unmatched: dict[str, None] = dict.fromkeys(rules or ())

    def find(self, path: Path) -> Source:
        """Where the value at a path of the model is stored."""
        text = show_path(path)
        for pattern, matcher, held in self._rules:
            if match := matcher.fullmatch(text):
                self.unmatched.pop(pattern, None)
                return Source(held, match.groupdict(), pattern)
        name = ".".join(map(str, path)).replace("{", "{{").replace("}", "}}")
        return Source(tensor(name), {}, None)


def _resolved(pattern: str, given: set[str], held: Tensor, name: str) -> Tensor:
    """A rule's Tensor in which every name in braces has a meaning, and only one."""
    wanted = set(fields_in(held.names[0], name))
    gathers = [step for step in held.steps if isinstance(step, Gathered)]
    unnamed = [step for step in gathers if step.field is None]
    named = {step.field for step in gathers if step.field is not None}
    free = wanted - given - named
    place = f"{name}: the rule {pattern!r}: {held!r}"
    if strange := sorted(named - (wanted - given)):
        raise WeightsError(f"{place} cannot gather over {strange}.")
    if lost := sorted(given - wanted):
        raise WeightsError(
            f"{place} does not use {lost}, so several Variables would have one tensor. "
            "Use it in the name; if they are to share a tensor, write `*` instead."
        )
    if len(free) == len(unnamed) == 1:
        changed: dict[Step, Step] = {unnamed[0]: replace(unnamed[0], field=free.pop())}
        return replace(held, steps=tuple(changed.get(s, s) for s in held.steps))
    if free:
        raise WeightsError(
            f"{place} does not say what {sorted(free)} in braces stands for. Put it "
            "into the pattern, or gather over it: `.stack('name')`."
        )
    if unnamed:
        raise WeightsError(
            f"{place} has nothing to stack over: the pattern has every name."
        )
    return held
