# SPDX-License-Identifier: Apache-2.0
"""Weights: the values of a model in a safetensors file, under any names and layouts.

`save_weights` and `load_weights` follow the same rules in opposite directions.

Saving takes each value apart into tensors. A part of a fused tensor waits until the
others have come; what never becomes whole, or comes twice and differs, is a problem.

Loading plans from headers alone: every value of the model is given its `Source`, and
what does not fit is noted. All of that is told in one error; only when there is nothing
to tell are values read, converted and placed, each where the old one is, and the model
changes in one step at the end.
"""

import fnmatch
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from treetap._core.errors import WeightsError
from treetap._core.paths import Path, show_path
from treetap._core.trees.filters import Filter, Not
from treetap._core.trees.state import nested
from treetap._core.trees.update import update
from treetap._core.variables.kinds import Cache, Intermediate, RngState
from treetap._core.variables.values import without_ref
from treetap._core.wording import near_to, quoted, shown
from treetap._io.safetensors_file import (
    Stored,
    new_file,
    stored_tensors,
    write_tensors,
)
from treetap._io.targets import (
    NUMBERS,
    SHOWN,
    Target,
    is_held,
    no_value,
    section,
    sharding_of,
    targets_of,
)
from treetap._io.weight_rules import (
    Misfit,
    Part,
    Rules,
    Shape,
    Source,
    Steps,
    Tensor,
    assembled,
    needs,
)

LASTING = Not((RngState, Cache, Intermediate))  # each run makes those anew


# Saving.


def save_weights(
    path: str | os.PathLike[str],
    model: Any,
    *,
    rules: Mapping[str, str | Tensor] | None = None,
    only: Filter = LASTING,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes the values of a model to a safetensors file.

    The value at `blocks/0/kernel` becomes the tensor `blocks.0.kernel`, unless a rule
    says otherwise. The file is complete or not there: one of that name is replaced at
    the end.

    Args:
        path: The file.
        model: A Module, or any tree of Modules, Variables and arrays. A shared Variable
            is written once, under its first path.
        rules: As for `load_weights`; transposed axes are turned back, parts joined and
            stacks taken apart.
        only: Which Variables; all but random state, caches and intermediates.
        metadata: Texts to put into the file's header.

    Examples:
        >>> import tempfile, jax.numpy as jnp, treetap as tt
        >>> model = {"w": tt.Param(jnp.ones((2, 3)))}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tt.save_weights(f"{folder}/model.safetensors", model)
        ...     tt.load_weights(f"{folder}/model.safetensors", model).loaded
        ('w',)
    """
    name = "save_weights"
    file = new_file(path, metadata, name)
    found = Rules(rules, name)
    outgoing = OutgoingTensors()
    targets, problems = targets_of(model, only, name)
    for target in targets:
        if reason := no_value(target.raw) or _elsewhere(target.raw):
            problems.append(f"{target.text} {reason}")
        else:
            array = np.asarray(without_ref(target.raw), target.dtype)
            outgoing.add(found.find(target.path), array, show_path(target.path))
    outgoing.finish()
    problems += outgoing.problems
    if problems:
        raise WeightsError(
            f"{name}: nothing was written to {file}."
            + section("what cannot be saved", problems)
            + section("rules that no Variable matched", [*map(shown, found.unmatched)])
            + "\nChoose what is saved with `only=`, where and how with `rules=`."
        )
    write_tensors(file, outgoing.tensors, {"format": "pt", **(metadata or {})}, name)


def _elsewhere(raw: Any) -> str:
    """Why a value cannot be had here; empty when it can."""
    if isinstance(raw, jax.Array) and not raw.is_fully_addressable:
        return "lies on devices of other processes: use `save_checkpoint`"
    return ""


class _Parts(NamedTuple):
    """Parts of one tensor, cut in one way, that wait for the others.

    Attributes:
        whole: What is left to undo once the parts are one.
        cut: How it is cut, along an axis from 0.
        known: By number of the part: who gives it, the value, and the shape that the
            whole would have.
    """

    whole: Source
    cut: Part
    known: dict[int, tuple[str, np.ndarray, Shape]]


class OutgoingTensors:
    """The tensors of a file, gathered from the values of Variables."""

    def __init__(self) -> None:
        self.tensors: dict[str, np.ndarray] = {}
        self.problems: list[str] = []
        self._givers: dict[str, tuple[str, bool]] = {}
        self._parts: dict[Any, _Parts] = {}

    def add(self, source: Source, array: np.ndarray, path: str) -> None:
        """Takes a value apart into its tensors; parts wait for the others."""
        try:
            list(needs(source.tensor.steps, array.shape, source.bound))
            self._put(source, array, path)
        except Misfit as misfit:
            self.problems.append(f"{path} {array.shape}: {misfit}")

    def _put(self, source: Source, array: np.ndarray, path: str) -> None:
        """Undoes the last step of a source, then those before; then it has a tensor."""
        if not source.tensor.steps:
            self._keep(source, array, path)
            return
        *first, last = source.tensor.steps
        earlier = source._replace(tensor=replace(source.tensor, steps=tuple(first)))
        if isinstance(last, Part):
            self._wait(earlier, last, array, path)
            return
        for (more, _), piece in zip(last.pieces(array.shape), last.split(array)):
            self._put(earlier._replace(bound={**source.bound, **more}), piece, path)

    def _wait(self, whole: Source, part: Part, array: np.ndarray, path: str) -> None:
        """Keeps a part until the others of its tensor, cut the same way, are here."""
        cut = _cut_of(part, array.ndim)
        bound = tuple(sorted(whole.bound.items()))
        key = whole.tensor.names, whole.tensor.steps, bound, cut
        known = self._parts.setdefault(key, _Parts(whole, cut, {})).known
        if part.index in known and not _equal(known[part.index][1], array):
            other = known[part.index][0]
            self.problems.append(f"{path} and {other} are one part, and differ")
        [(_, shape)] = part.pieces(array.shape)
        known[part.index] = (path, array, shape)

    def _keep(self, source: Source, array: np.ndarray, path: str) -> None:
        """Takes a whole tensor; one that is there already must be given by a rule."""
        name = source.names(source.bound)[0]
        is_default = source.rule is None
        if name == "__metadata__":
            self.problems.append(f"{path} cannot be {name!r}: the format has that name")
        if name in self.tensors:
            giver, was_default = self._givers[name]
            told = f"{path} and {giver} would both be {name!r}"
            if is_default and was_default:
                self.problems.append(told)
            elif not _equal(self.tensors[name], array):
                self.problems.append(f"{told}, and differ")
        self._givers[name] = (path, is_default)
        self.tensors[name] = array

    def finish(self) -> None:
        """Puts the parts together."""
        for whole, cut, known in self._parts.values():
            givers = ", ".join(path for path, *_ in known.values())
            tensor = whole.tensor
            name = tensor.names[0] if tensor.steps else whole.names(whole.bound)[0]
            absent = [index for index in range(cut.count) if index not in known]
            kinds = {(array.dtype, shape) for _, array, shape in known.values()}
            if absent:
                self.problems.append(
                    f"{name!r}: no Variable gives part {absent} of {cut.of}; "
                    f"the others come from {givers}"
                )
            elif len(kinds) > 1:
                self.problems.append(
                    f"{name!r}: its parts {givers} differ in shape or dtype"
                )
            else:
                arrays = [known[index][1] for index in sorted(known)]
                self._put(whole, np.concatenate(arrays, cut.axis), givers)


def _equal(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether two arrays have the same bytes; so NaNs are equal to themselves."""
    is_alike = first.dtype == second.dtype and first.shape == second.shape
    return is_alike and first.tobytes() == second.tobytes()


# Loading.


class LoadedWeights(NamedTuple):
    """What `load_weights` did.

    Attributes:
        loaded: Paths of the Variables that were read.
        missing: Paths of the Variables for which the file has no tensor.
        unused: Names of the tensors, or parts of them, that no Variable wanted.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unused: tuple[str, ...]


def load_weights(
    path: str | os.PathLike[str],
    model: Any,
    *,
    rules: Mapping[str, str | Tensor] | None = None,
    only: Filter = LASTING,
    ignore: Sequence[str] = (),
    cast: bool = False,
    strict: bool = True,
) -> LoadedWeights:
    """Reads the values of a model from safetensors, in place.

    Every Variable must have its tensor, every tensor its Variable, and shapes and
    dtypes must agree; all that does not is listed in one WeightsError, and then nothing
    is changed. Values are placed where the old ones are; abstract Variables
    become concrete.

    Args:
        path: A safetensors file, a `.safetensors.index.json`, or a folder with either.
        model: A Module, or any tree of Modules, Variables and arrays; may be abstract.
        rules: Where values are in the file: a mapping from patterns of paths to names
            or to `tensor(...)`s. `{i}` in a pattern stands for one key of a path and is
            filled in on the right, `{rest...}` for several, `*` and `**` for keys that
            do not matter. The first rule that matches counts.
        only: Which Variables; all but random state, caches and intermediates.
        ignore: Globs of the names of tensors that may be left over.
        cast: Convert floats to floats of another size, and integers where no value
            changes.
        strict: Refuse missing and unused tensors; otherwise report them.

    Returns:
        What was loaded, missing and unused.

    Examples:
        >>> import tempfile, jax.numpy as jnp, treetap as tt
        >>> rules = {"{name}/kernel": tt.tensor("{name}.weight").transpose()}
        >>> model = {"up": {"kernel": tt.Param(jnp.ones((2, 3)))}}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tt.save_weights(f"{folder}/a.safetensors", model, rules=rules)
        ...     tt.load_weights(f"{folder}/a.safetensors", model, rules=rules)
        LoadedWeights(loaded=('up/kernel',), missing=(), unused=())
    """
    name = "load_weights"
    stored = stored_tensors(path, name)
    found = Rules(rules, name)
    targets, problems = targets_of(model, only, name)
    plan = LoadPlan(stored, cast, problems)
    for target in targets:
        plan.add(target, found.find(target.path))
    unused = plan.unused(ignore)
    if plan.problems or (strict and (plan.missing or unused)):
        raise _misfit_error(path, plan, unused, found, strict)
    values = plan.values(path)
    if values:
        update(model, nested(values))
    loaded = tuple(show_path(target) for target, _ in values)
    missing = tuple(show_path(target.path) for target, _ in plan.missing)
    return LoadedWeights(loaded, missing, tuple(unused))


class LoadPlan:
    """Which tensors go where; made from headers alone."""

    def __init__(self, stored: dict[str, Stored], cast: bool, problems: list[str]):
        self.stored = stored
        self.cast = cast
        self.problems = problems  # errors, whether loading is strict or not
        # With its tensors, in the order of `needs`; read only if there is no problem.
        self.ready: list[tuple[Target, Source, list[Stored]]] = []
        self.missing: list[tuple[Target, list[str]]] = []
        # By name of tensor, how it is cut and which parts are used.
        self.uses: dict[str, dict[Any, set[int]]] = {}

    def add(self, target: Target, source: Source) -> None:
        """Plans for one value of the model."""
        tensor = source.tensor
        try:
            wanted = list(needs(tensor.steps, target.shape, source.bound))
        except Misfit as misfit:
            self.problems.append(f"{target.text} is {target.shape}: {misfit}")
            return
        absent: list[str] = []
        present: list[Stored] = []
        use, index = _use_of(tensor.steps, target.shape)
        for bound, shape in wanted:
            names = source.names(bound)
            name = next((name for name in names if name in self.stored), None)
            if name is None:
                absent.append(names[0])
                continue
            self.uses.setdefault(name, {}).setdefault(use, set()).add(index)
            present.append(self.stored[name])
            if reason := self.unfit(target, self.stored[name], shape, tensor):
                self.problems.append(reason)
        if absent:
            may_be = tensor.is_optional and len(absent) == len(wanted)
            if not may_be or isinstance(target.raw, jax.ShapeDtypeStruct):
                self.missing.append((target, absent))
        else:
            self.ready.append((target, source, present))

    def unfit(self, target: Target, found: Stored, shape: Shape, tensor: Tensor) -> str:
        """How a tensor does not fit; empty when it does."""
        place = f"{target.text}: the tensor {quoted(found.name)} is {found.text}"
        if found.shape != shape:
            turned = found.shape == shape[::-1] and not tensor.steps
            hint = "; is it `.transpose()` of it?" if turned else ""
            via = f" by {tensor!r}" if tensor.steps else ""
            return f"{place}, the model needs {shape}{via}{hint}"
        if found.dtype is None:
            return f"{place}, a dtype that JAX cannot read"
        if not is_held(target.raw):
            return f"{target.text} is {target.dtype}, which needs `jax_enable_x64`"
        can_cast = _can_cast(found.dtype, target.dtype)
        if found.dtype == target.dtype or (can_cast and self.cast):
            return ""
        hint = "; `cast=True` converts" if can_cast else ""
        return f"{place}, the model needs {target.dtype}{hint}"

    def unused(self, ignore: Sequence[str]) -> list[str]:
        """Tensors, and parts of tensors, that no Variable wants."""
        patterns = [ignore] if isinstance(ignore, str) else list(ignore)
        found: list[str] = []
        for name in self.stored:
            if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
                found += _left_over(name, self.uses.get(name))
        return found

    def values(self, path: Any) -> list[tuple[Path, Any]]:
        """Reads all values, each at its place; nothing is written yet."""
        problems: list[str] = []
        values: list[tuple[Path, Any]] = []
        for target, source, present in self.ready:
            views = (stored.view("load_weights") for stored in present)
            arrays = (_converted(view, target.dtype) for view in views)
            try:
                array = assembled(source.tensor.steps, target.shape, arrays)
                if not problems:
                    values.append((target.path, _placed(array, target)))
            except Misfit as lost:
                problems.append(f"{target.text}: {lost}")
        if problems:
            raise WeightsError(
                f"load_weights: {path} does not fit the model; nothing was changed."
                + section("values that cannot be converted", problems)
            )
        return values


def _cut_of(part: Part, rank: int) -> Part:
    """How a tensor is cut: the same for all its parts."""
    return replace(part, index=0, axis=part.axis % rank)


def _use_of(steps: Steps, shape: Shape) -> tuple[Any, int]:
    """Where and how a tensor is cut, None if it is not; and which part is taken."""
    while steps:
        *steps, last = steps
        if isinstance(last, Part):
            return (tuple(steps), _cut_of(last, len(shape))), last.index
        _, shape = last.pieces(shape)[0]
    return None, 0


def _left_over(name: str, uses: Mapping[Any, set[int]] | None) -> list[str]:
    """The tensor, or the parts of it, that no Variable wants; often nothing."""
    if uses is None:
        return [name]
    rests: list[str] = []
    for use, indices in uses.items():
        rest = sorted({*range(use[1].count)} - indices) if use else []
        if not rest:
            return []
        rests.append(f"{name} (part {', '.join(map(str, rest))} of {use[1].of})")
    return rests


def _misfit_error(
    path: Any, plan: LoadPlan, unused: list[str], rules: Rules, strict: bool
) -> WeightsError:
    """The error that lists all that does not fit."""
    lines: list[str] = []
    stored = plan.stored
    spare = [name for name in unused if name in stored]
    for place, (target, absent) in enumerate(plan.missing):
        near = near_to(absent[0], spare if place < SHOWN else (), 1)
        hint = f"; did you mean {quoted(near[0])}?" if near else ""
        more = f" (and {len(absent) - 1} more)" if len(absent) > 1 else ""
        lines.append(f"{target.text}: no tensor {quoted(absent[0])}{more}{hint}")
    left = [f"{quoted(n)} {stored[n].text}" if n in stored else n for n in unused]
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
    elif dtype.itemsize < 4 or dtype.itemsize < array.dtype.itemsize:
        is_lost = np.isfinite(array) & ~np.isfinite(new)
    else:  # float32 and float64 have all numbers of shorter types
        return new
    if is_lost.any():
        raise Misfit(f"{array.dtype} with values that {dtype} does not have")
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
    return jax.make_array_from_callback(array.shape, sharding, lambda i: _own(array[i]))


def _own(array: np.ndarray) -> np.ndarray:
    """An array in memory of its own: JAX may keep it, and the file may change."""
    if array.flags.writeable:  # it was made here; mapped arrays are read-only
        return np.require(array, requirements="C")
    return np.array(array, order="C")
