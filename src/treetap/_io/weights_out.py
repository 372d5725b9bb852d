# SPDX-License-Identifier: Apache-2.0
"""Outgoing: the values of Variables taken apart into the tensors of a file.

Rules are followed backwards. A part waits until the other parts of its tensor have
come; what never becomes whole, or comes twice and differs, is noted as a problem.
"""

from typing import Any, NamedTuple

import numpy as np

from treetap._io.weight_layouts import Bound, Gathered, Misfit, Part, Step, needs
from treetap._io.weight_rules import Source, Tensor


class _Cut(NamedTuple):
    """Which parts belong together: of one tensor, cut in one way."""

    names: tuple[str, ...]
    steps: tuple[Step, ...]
    bound: tuple[tuple[str, str], ...]
    of: int | tuple[int, ...]
    axis: int


class Outgoing:
    """The tensors of a file, gathered from the values of Variables."""

    def __init__(self) -> None:
        self.tensors: dict[str, np.ndarray] = {}
        self.problems: list[str] = []
        self._givers: dict[str, tuple[str, bool]] = {}
        self._parts: dict[_Cut, dict[int, tuple[str, np.ndarray]]] = {}

    def add(self, source: Source, array: np.ndarray, path: str) -> None:
        """Takes a value apart into its tensors; parts wait for the others."""
        steps, bound = source.tensor.steps, source.bound
        try:
            list(needs(steps, array.shape, bound))
        except Misfit as misfit:
            self.problems.append(f"{path} {array.shape}: {misfit}")
        else:
            self._put(source, steps, bound, array, path)

    def _put(
        self,
        source: Source,
        steps: tuple[Step, ...],
        bound: Bound,
        array: np.ndarray,
        path: str,
    ) -> None:
        if not steps:
            self._write(source, bound, array, path)
            return
        *first, last = steps
        earlier = tuple(first)
        if isinstance(last, Gathered):
            pieces = last.pieces(array.shape)
            for (label, _), piece in zip(pieces, last.split(array)):
                inner = {**bound, str(last.field): label}
                self._put(source, earlier, inner, piece, path)
        elif isinstance(last, Part):
            axis = last.axis % array.ndim
            told = tuple(sorted(bound.items()))
            cut = _Cut(source.tensor.names, earlier, told, last.of, axis)
            known = self._parts.setdefault(cut, {})
            if last.index in known and not _equal(known[last.index][1], array):
                other = known[last.index][0]
                self.problems.append(f"{path} and {other} are one part, and differ")
            known[last.index] = (path, array)
        else:
            self._put(source, earlier, bound, last.backward(array), path)

    def _write(
        self, source: Source, bound: Bound, array: np.ndarray, path: str
    ) -> None:
        name = source.names(bound)[0]
        is_default = source.rule is None
        if name == "__metadata__":
            self.problems.append(f"{path} cannot be {name!r}: the format has that name")
        if name in self.tensors:
            giver, was_default = self._givers[name]
            if is_default and was_default:
                self.problems.append(f"{path} and {giver} would both be {name!r}")
            elif not _equal(self.tensors[name], array):
                found = f"{path} and {giver} would both be {name!r}, and differ"
                self.problems.append(found)
        self._givers[name] = (path, is_default)
        self.tensors[name] = array

    def finish(self) -> None:
        """Puts the parts together."""
        for cut, known in self._parts.items():
            givers = ", ".join(path for path, _ in known.values())
            source = Source(Tensor(*cut.names), dict(cut.bound), givers)
            name = source.names(source.bound)[0] if not cut.steps else cut.names[0]
            count = cut.of if isinstance(cut.of, int) else len(cut.of)
            absent = [index for index in range(count) if index not in known]
            arrays = [known[index][1] for index in sorted(known)]
            if absent:
                self.problems.append(
                    f"{name!r}: no Variable gives part {absent} of {cut.of}; "
                    f"the others come from {givers}"
                )
            elif len({_kind(array, cut) for array in arrays}) > 1:
                self.problems.append(
                    f"{name!r}: its parts {givers} differ in shape or dtype"
                )
            else:
                whole = np.concatenate(arrays, cut.axis)
                self._put(source, cut.steps, source.bound, whole, givers)
        self._parts.clear()


def _kind(array: np.ndarray, cut: _Cut) -> Any:
    """What parts of one tensor must have in common."""
    shape = list(array.shape)
    if not isinstance(cut.of, int):
        shape[cut.axis] = -1
    return array.dtype, tuple(shape)


def _equal(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether two arrays have the same bytes; so NaNs are equal to themselves."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return first.tobytes() == second.tobytes()
