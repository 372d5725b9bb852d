# SPDX-License-Identifier: Apache-2.0
"""Layouts: steps from tensors as a file has them to arrays as a model wants them.

Every step can be undone knowing only the shape in the model, so a chain of steps works
both ways. `needs` says which tensors of which shapes an array is made of, `assembled`
makes it. A step that cannot give the wanted shape raises `Misfit`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MOST = 100_000  # tensors in one stack
Shape = tuple[int, ...]
Bound = Mapping[str, str]  # what the names in braces stand for


class Misfit(Exception):
    """A layout cannot give the shape that is wanted; says how."""


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

    def before(self, after: Shape) -> Shape:
        """The shape that the step starts from."""
        lengths = dict(zip(self.order(len(after)), after))
        return tuple(lengths[axis] for axis in range(len(after)))

    def forward(self, array: np.ndarray, after: Shape) -> np.ndarray:
        """From the file to the model."""
        return array.transpose(self.order(len(after)))

    def backward(self, array: np.ndarray) -> np.ndarray:
        """From the model to the file."""
        return array.transpose(np.argsort(self.order(array.ndim)))


Groups = tuple[tuple[str, ...], ...]


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

    def lengths(self, after: Shape) -> dict[str, int]:
        """The length of each named axis, from the shape on the right."""
        if len(after) != len(self.right):
            raise Misfit(f"{self} gives {len(self.right)} axes, and {after} is wanted")
        found = dict(self.sizes)
        for length, group in zip(after, self.right):
            known = math.prod(found[name] for name in group if name in found)
            unknown = [name for name in group if name not in found]
            if unknown:
                found[unknown[0]], rest = divmod(length, known)
            else:
                rest = length - known
            if rest:
                raise Misfit(f"{self} cannot give an axis of {length} in {after}")
        return found

    def before(self, after: Shape) -> Shape:
        """The shape that the step starts from."""
        lengths = self.lengths(after)
        return tuple(math.prod(lengths[n] for n in group) for group in self.left)

    def forward(self, array: np.ndarray, after: Shape) -> np.ndarray:
        """From the file to the model."""
        return _moved(array, self.left, self.right, self.lengths(after), after)

    def backward(self, array: np.ndarray) -> np.ndarray:
        """From the model to the file."""
        lengths, before = self.lengths(array.shape), self.before(array.shape)
        return _moved(array, self.right, self.left, lengths, before)


def _moved(
    array: np.ndarray, old: Groups, new: Groups, lengths: dict[str, int], shape: Shape
) -> np.ndarray:
    """An array with its axes taken apart, reordered and merged."""
    start = [name for group in old for name in group]
    end = [name for group in new for name in group]
    apart = array.reshape([lengths[name] for name in start])
    return apart.transpose([start.index(name) for name in end]).reshape(shape)


@dataclass(frozen=True, slots=True)
class Part:
    """One of several pieces that lie one after the other along an axis."""

    index: int
    of: int | tuple[int, ...]
    axis: int

    def __str__(self) -> str:
        return f".part({self.index}, of={self.of}, axis={self.axis})"

    @property
    def count(self) -> int:
        """How many pieces there are."""
        return self.of if isinstance(self.of, int) else len(self.of)

    def before(self, after: Shape) -> Shape:
        """The shape of all pieces together."""
        axis = _axis_in(self.axis, after, self)
        if isinstance(self.of, int):
            total = after[axis] * self.of
        elif after[axis] == self.of[self.index]:
            total = sum(self.of)
        else:
            raise Misfit(
                f"{self} gives {self.of[self.index]} at axis {axis} of {after}"
            )
        return (*after[:axis], total, *after[axis + 1 :])

    def forward(self, array: np.ndarray, after: Shape) -> np.ndarray:
        """From the file to the model."""
        axis = _axis_in(self.axis, after, self)
        if isinstance(self.of, int):
            start = self.index * after[axis]
        else:
            start = sum(self.of[: self.index])
        return array[(slice(None),) * axis + (slice(start, start + after[axis]),)]


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
        given = {key: value for key, value in given.items() if value is not None}
        shown = [repr(self.field)] if self.field else []
        shown += [f"{key}={value}" for key, value in given.items()]
        return f".{'stack' if self.is_new else 'concat'}({', '.join(shown)})"

    def pieces(self, after: Shape) -> list[tuple[str, Shape]]:
        """What each tensor is told by, and its shape."""
        axis = _axis_in(self.axis, after, self)
        start, length, end = after[:axis], after[axis], after[axis + 1 :]
        if self.is_new and length > MOST:
            raise Misfit(f"{self} would be {length} tensors at axis {axis} of {after}")
        if self.is_new:
            labels = self.over or tuple(map(str, range(length)))
            if len(labels) != length or not labels:
                raise Misfit(f"{self} gives {len(labels)} at axis {axis} of {after}")
            return [(label, start + end) for label in labels]
        labels = self.over or ()
        sizes = self.sizes or (length // len(labels),) * len(labels)
        if sum(sizes) != length:
            raise Misfit(f"{self} cannot give an axis of {length} in {after}")
        return [(label, (*start, size, *end)) for label, size in zip(labels, sizes)]

    def join(self, arrays: list[np.ndarray], after: Shape) -> np.ndarray:
        """From the file to the model."""
        axis = _axis_in(self.axis, after, self)
        return np.stack(arrays, axis) if self.is_new else np.concatenate(arrays, axis)

    def split(self, array: np.ndarray) -> list[np.ndarray]:
        """From the model to the file."""
        axis = _axis_in(self.axis, array.shape, self)
        if self.is_new:
            return list(np.moveaxis(array, axis, 0))
        sizes = [shape[axis] for _, shape in self.pieces(array.shape)]
        return np.split(array, np.cumsum(sizes)[:-1], axis)


Step = Transposed | Rearranged | Part | Gathered


def needs(
    steps: Sequence[Step], shape: Shape, bound: Bound
) -> Iterator[tuple[Bound, Shape]]:
    """The tensors that a value of some shape is made of, and their shapes."""
    if not steps:
        yield bound, shape
        return
    *first, last = steps
    if not isinstance(last, Gathered):
        yield from needs(first, last.before(shape), bound)
        return
    for label, piece in last.pieces(shape):
        yield from needs(first, piece, {**bound, str(last.field): label})


def assembled(
    steps: Sequence[Step],
    shape: Shape,
    bound: Bound,
    read: Callable[[Bound], np.ndarray],
) -> np.ndarray:
    """A value made from tensors; a view of them where that can be."""
    if not steps:
        return read(bound)
    *first, last = steps
    if not isinstance(last, Gathered):
        inner = assembled(first, last.before(shape), bound, read)
        return last.forward(inner, shape)
    arrays = [
        assembled(first, piece, {**bound, str(last.field): label}, read)
        for label, piece in last.pieces(shape)
    ]
    return last.join(arrays, shape)
