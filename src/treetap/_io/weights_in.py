# SPDX-License-Identifier: Apache-2.0
"""Incoming: which tensors of a file become which values of a model.

An `Incoming` is planned from headers alone: every target is given its `Source`, and
what does not fit is noted. Only then are values read, converted and placed, each where
the old value is. The model itself is not touched here.
"""

import fnmatch
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treetap._core.errors import WeightsError
from treetap._core.paths import Path
from treetap._core.wording import near_to, quoted, shown
from treetap._io.safetensors_file import Stored
from treetap._io.weight_layouts import (
    Bound,
    Gathered,
    Misfit,
    Part,
    Rearranged,
    Shape,
    assembled,
    needs,
)
from treetap._io.weight_rules import Rules, Source, Tensor
from treetap._io.weight_targets import (
    NUMBERS,
    SHOWN,
    Target,
    is_held,
    section,
    sharding_of,
)


class Incoming:
    """Which tensors go where; made from headers alone."""

    def __init__(self, stored: dict[str, Stored], cast: bool, problems: list[str]):
        self.stored = stored
        self.cast = cast
        self.problems = problems  # what is wrong in any case
        self.ready: list[tuple[Target, Source]] = []
        self.missing: list[tuple[Target, list[str]]] = []
        # By name of tensor, how it is cut and which parts are used.
        self.uses: dict[str, dict[Any, set[int]]] = {}

    def lookup(self, source: Source, bound: Bound) -> Stored | None:
        """The tensor that a source means; None when the file has none."""
        names = source.names(bound)
        return next((self.stored[n] for n in names if n in self.stored), None)

    def add(self, target: Target, source: Source) -> None:
        """Plans for one value of the model."""
        tensor = source.tensor
        try:
            wanted = list(needs(tensor.steps, target.shape, source.bound))
        except Misfit as misfit:
            self.problems.append(f"{target.text} is {target.shape}: {misfit}")
            return
        absent: list[str] = []
        before = len(self.problems)
        for bound, shape in wanted:
            stored = self.lookup(source, bound)
            if stored is None:
                absent.append(source.names(bound)[0])
            else:
                self.use(stored.name, tensor, len(target.shape))
                self.check(target, stored, shape, tensor)
        if absent:
            may_be = tensor.is_optional and len(absent) == len(wanted)
            if not may_be or isinstance(target.raw, jax.ShapeDtypeStruct):
                self.missing.append((target, absent))
        elif len(self.problems) == before:
            self.ready.append((target, source))

    def use(self, name: str, tensor: Tensor, rank: int) -> None:
        """Notes that a tensor, or a part of it, is wanted."""
        cut, index = _cut(tensor, rank)
        indices = self.uses.setdefault(name, {}).setdefault(cut, set())
        if index is not None:
            indices.add(index)

    def check(
        self, target: Target, stored: Stored, shape: Shape, tensor: Tensor
    ) -> None:
        """Notes how a tensor does not fit."""
        place = f"{target.text}: the tensor {quoted(stored.name)} is {stored.text}"
        if stored.shape != shape:
            turned = stored.shape == shape[::-1] and not tensor.steps
            hint = "; is it `.transpose()` of it?" if turned else ""
            via = f" by {tensor!r}" if tensor.steps else ""
            self.problems.append(f"{place}, the model needs {shape}{via}{hint}")
        elif stored.dtype is None:
            self.problems.append(f"{place}, a dtype that JAX cannot read")
        elif not is_held(target.raw):
            self.problems.append(
                f"{target.text} is {target.dtype}, which needs `jax_enable_x64`"
            )
        elif stored.dtype != target.dtype and not (
            self.cast and _can_cast(stored.dtype, target.dtype)
        ):
            hint = ""
            if _can_cast(stored.dtype, target.dtype):
                hint = "; `cast=True` converts"
            self.problems.append(f"{place}, the model needs {target.dtype}{hint}")

    def unused(self, ignore: Sequence[str]) -> list[str]:
        """Tensors, and parts of tensors, that no Variable wants."""
        patterns = [ignore] if isinstance(ignore, str) else list(ignore)
        found: list[str] = []
        for name in self.stored:
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
                continue
            uses = self.uses.get(name)
            if uses is None:
                found.append(name)
            elif None not in uses:
                found += _left_over(name, uses)
        return found

    def values(self, path: Any) -> list[tuple[Path, Any]]:
        """Reads all values, each at its place; nothing is written yet."""
        problems: list[str] = []
        values: list[tuple[Path, Any]] = []
        for target, source in self.ready:
            try:
                array = self.read(target, source)
            except _LostValues as lost:
                problems.append(f"{target.text}: {lost}")
            else:
                if not problems:
                    values.append((target.path, _placed(array, target)))
        if problems:
            raise WeightsError(
                f"load_weights: {path} does not fit the model; nothing was changed."
                + section("values that cannot be converted", problems)
            )
        return values

    def read(self, target: Target, source: Source) -> np.ndarray:
        """The value for one target, in its dtype; a view of the file if that can be."""

        def tensor(bound: Bound) -> np.ndarray:
            stored = self.lookup(source, bound)
            assert stored is not None  # or the target were not ready
            return _converted(stored.view("load_weights"), target.dtype)

        return assembled(source.tensor.steps, target.shape, source.bound, tensor)


class _LostValues(Exception):
    """A conversion would lose a number, not just round it."""


def _cut(tensor: Tensor, rank: int) -> tuple[Any, int | None]:
    """How a Tensor is cut, and which part it is; None for one that is taken whole."""
    for place in reversed(range(len(tensor.steps))):
        step = tensor.steps[place]
        if isinstance(step, Part):
            return (tensor.steps[:place], step.of, step.axis % rank), step.index
        if isinstance(step, Rearranged):
            rank = len(step.left)
        elif isinstance(step, Gathered) and step.is_new:
            rank -= 1
    return None, None


def _left_over(name: str, uses: dict[Any, set[int]]) -> list[str]:
    """The parts of a tensor that nobody wants; none if some cut uses all of them."""
    rests: list[str] = []
    for (_, of, _), indices in uses.items():
        count = of if isinstance(of, int) else len(of)
        rest = sorted(set(range(count)) - indices)
        if not rest:
            return []
        rests.append(f"{name} (part {', '.join(map(str, rest))} of {of})")
    return rests


def misfits(
    path: Any, plan: Incoming, unused: list[str], rules: Rules, strict: bool
) -> WeightsError:
    """The error that lists all that does not fit."""
    lines: list[str] = []
    spare = [name for name in unused if name in plan.stored]
    for place, (target, absent) in enumerate(plan.missing):
        hint = ""
        if place < SHOWN:
            near = near_to(absent[0], spare, 1)
            hint = f"; did you mean {quoted(near[0])}?" if near else ""
        more = f" (and {len(absent) - 1} more)" if len(absent) > 1 else ""
        lines.append(f"{target.text}: no tensor {quoted(absent[0])}{more}{hint}")
    left = [
        f"{quoted(name)} {plan.stored[name].text}" if name in plan.stored else name
        for name in unused
    ]
    sections = section("what does not fit", plan.problems)
    if strict:
        sections += section("Variables without a tensor", lines)
        sections += section("tensors that no Variable uses", left)
    return WeightsError(
        f"load_weights: {path} does not fit the model; nothing was changed."
        + sections
        + section("rules that no Variable matched", [*map(shown, rules.unmatched)])
        + "\nSay where values are with `rules=`, which Variables are meant with "
        "`only=`, which tensors may be left over with `ignore=`."
    )


def _can_cast(have: np.dtype[Any], want: np.dtype[Any]) -> bool:
    """Whether `cast` may convert: among floats, and among integers."""
    kinds = (jnp.floating, jnp.integer)
    return any(jnp.issubdtype(have, k) and jnp.issubdtype(want, k) for k in kinds)


def _converted(array: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """An array in another dtype; numbers may be rounded, but not lost."""
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        new = array.astype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        is_lost = (new.astype(array.dtype) != array) | ((new < 0) != (array < 0))
    elif float(jnp.finfo(dtype).max) < float(jnp.finfo(array.dtype).max):
        is_lost = np.isfinite(array) & ~np.isfinite(new)
    else:
        return new
    if is_lost.any():
        raise _LostValues(f"{array.dtype} with values that {dtype} does not have")
    return new


def _placed(array: np.ndarray, target: Target) -> Any:
    """An array of its own memory, of the kind and at the place of the old value."""
    raw = target.raw
    if type(raw) in NUMBERS:
        return array.item()
    if isinstance(raw, np.ndarray | np.generic):
        return np.array(array)
    sharding = sharding_of(raw, target.holder, f"load_weights: {target.text}")
    if sharding is None:
        return jnp.asarray(_own(array))
    # Each device reads no more than it needs.
    return jax.make_array_from_callback(
        array.shape, sharding, lambda index: _own(array[index])
    )


def _own(array: np.ndarray) -> np.ndarray:
    """An array that does not lie in the file: JAX may keep what it is given."""
    if array.flags.writeable:  # made here; what is mapped is not
        return np.require(array, requirements="C")
    return np.array(array, order="C")
