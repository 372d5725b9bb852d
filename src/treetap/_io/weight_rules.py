# SPDX-License-Identifier: Apache-2.0
"""Rules: where the value of a Variable lies in a weights file, and how it is laid out.

A rule maps a pattern of paths in the model to a `Tensor`, which names a tensor of the
file and the steps from it to the Variable. The same rules read a file and write one.
`Rules.find` gives the `Source` of each path; the first pattern that matches decides.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from treetap._core.errors import WeightsError
from treetap._core.paths import Path, show_path
from treetap._io.weight_layouts import (
    Bound,
    Gathered,
    Groups,
    Part,
    Rearranged,
    Step,
    Transposed,
)


class Tensor:
    """A tensor of a weights file, and the way to a Variable; made by `tensor`."""

    __slots__ = ("is_optional", "names", "steps")

    names: tuple[str, ...]
    steps: tuple[Step, ...]
    is_optional: bool

    def __init__(self, name: str, *alternatives: str):
        self.names = (name, *alternatives)
        if not all(isinstance(each, str) for each in self.names):
            raise TypeError(f"tensor: names are texts, and these are {self.names}.")
        self.steps = ()
        self.is_optional = False
        fields = [fields_in(each, "tensor") for each in self.names]
        if any(set(other) != set(fields[0]) for other in fields):
            raise WeightsError(
                f"tensor: the names {self.names} do not have the same names in braces."
            )

    def __repr__(self) -> str:
        names = ", ".join(map(repr, self.names))
        end = ".optional()" if self.is_optional else ""
        return f"tensor({names}){''.join(map(str, self.steps))}{end}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tensor) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> Any:
        return self.names, self.steps, self.is_optional

    def _then(self, *steps: Step) -> "Tensor":
        new = object.__new__(Tensor)
        new.names, new.is_optional = self.names, self.is_optional
        new.steps = (*self.steps, *steps)
        return new

    def _gathering(self, field: str) -> "Tensor":
        """The same, with a name for what it stacks over without saying so."""
        new = self._then()
        new.steps = tuple(
            replace(step, field=field)
            if isinstance(step, Gathered) and step.field is None
            else step
            for step in self.steps
        )
        return new

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
        names = [[name for group in side for name in group] for side in (left, right)]
        is_good = len(sides) == 2 and len(set(names[0])) == len(names[0])
        is_good &= sorted(names[0]) == sorted(names[1])
        is_good &= all(map(str.isidentifier, names[0]))
        if not is_good:
            raise WeightsError(
                f"tensor.rearrange: {pattern!r} is no pattern like 'd (h k) -> d h k', "
                "with the same names on both sides, each once."
            )
        if strange := [n for n, size in sizes.items() if n not in names[0] or size < 1]:
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
        new = self._then()
        new.is_optional = True
        return new


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
    return Tensor(name, *alternatives)


def _groups(side: str) -> Groups:
    """The axes of one side of a pattern; `1` is an axis without names."""
    found = re.findall(r"\(([^()]*)\)|([^\s()]+)|([()])", side)
    if any(stray for _, _, stray in found):
        return (("(", "("),)  # refused as a name that stands twice
    groups = [inner.split() if not single else [single] for inner, single, _ in found]
    return tuple(tuple(n for n in group if n != "1") for group in groups)


_FIELD = re.compile(r"\{\{|\}\}|\{([A-Za-z_][A-Za-z0-9_]*)(\.\.\.)?\}")
_WILD = re.compile(r"(\*\*?)")


def fields_in(text: str, name: str) -> list[str]:
    """The names in braces; braces that stand for themselves are doubled."""
    if set(_FIELD.sub("", text)) & set("{}"):
        raise WeightsError(
            f"{name}: {text!r} has braces that are neither `{{name}}`, `{{name...}}` "
            "nor doubled."
        )
    return [match[1] for match in _FIELD.finditer(text) if match[1]]


def filled(template: str, bound: Bound) -> str:
    """A name with what the names in braces stand for."""

    def value(match: re.Match[str]) -> str:
        return bound[match[1]].replace("/", ".") if match[1] else match[0][0]

    return _FIELD.sub(value, template)


def _compiled(pattern: str, name: str) -> re.Pattern[str]:
    """A regular expression for paths, written with `/`."""
    fields_in(pattern, name)
    seen: set[str] = set()
    parts: list[str] = []
    end = 0
    for match in (*_FIELD.finditer(pattern), None):
        for text in _WILD.split(pattern[end : match.start() if match else None]):
            parts.append({"*": "[^/]+", "**": ".+"}.get(text, re.escape(text)))
        if match is None:
            break
        end = match.end()
        field, many = match[1], match[2]
        if not field:
            parts.append(re.escape(match[0][0]))
        elif field in seen:
            parts.append(f"(?P={field})")
        else:
            seen.add(field)
            parts.append(f"(?P<{field}>{'.+' if many else '[^/]+'})")
    return re.compile("".join(parts))


class Source(NamedTuple):
    """Where one Variable's value is: a Tensor, and what its names in braces are."""

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
        self.unmatched: dict[str, None] = {}
        if rules is not None and not isinstance(rules, Mapping):
            raise TypeError(
                f"{name}: `rules` maps patterns of paths to tensors, and is a "
                f"{type(rules).__name__}."
            )
        for pattern, given in (rules or {}).items():
            tensor = Tensor(given) if isinstance(given, str) else given
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"{name}: the rule for {pattern!r} is a {type(tensor).__name__}; "
                    "give the name of a tensor, or a `tensor(...)`."
                )
            matcher = _compiled(pattern, name)
            fields = set(matcher.groupindex)
            resolved = _resolved(pattern, fields, tensor, name)
            self._rules.append((pattern, matcher, resolved))
            self.unmatched[pattern] = None

    def find(self, path: Path) -> Source:
        """Where the value at a path of the model is stored."""
        text = show_path(path)
        for pattern, matcher, tensor in self._rules:
            if match := matcher.fullmatch(text):
                self.unmatched.pop(pattern, None)
                return Source(tensor, match.groupdict(), pattern)
        name = ".".join(map(str, path)).replace("{", "{{").replace("}", "}}")
        return Source(Tensor(name), {}, None)


def _resolved(pattern: str, given: set[str], tensor: Tensor, name: str) -> Tensor:
    """A rule's Tensor in which every name in braces has a meaning, and only one."""
    wanted = set(fields_in(tensor.names[0], name))
    fields = [step.field for step in tensor.steps if isinstance(step, Gathered)]
    named = [field for field in fields if field is not None]
    free = wanted - given - set(named)
    place = f"{name}: the rule {pattern!r}: {tensor!r}"
    if strange := sorted({n for n in named if n not in wanted or n in given}):
        raise WeightsError(f"{place} cannot gather over {strange}.")
    if lost := sorted(given - wanted):
        raise WeightsError(
            f"{place} does not use {lost}, so several Variables would have one tensor. "
            "Use it in the name; if they are to share a tensor, write `*` instead."
        )
    if len(free) == fields.count(None) == 1:
        return tensor._gathering(*free)
    if free:
        raise WeightsError(
            f"{place} does not say what {sorted(free)} in braces stands for. Put it "
            "into the pattern, or gather over it: `.stack('name')`."
        )
    if None in fields:
        raise WeightsError(
            f"{place} has nothing to stack over: the pattern has every name."
        )
    return tensor
