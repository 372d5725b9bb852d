# SPDX-License-Identifier: Apache-2.0
"""Weights: the values of a model in a safetensors file, under any names and layouts.

`save_weights` and `load_weights` follow the same rules in opposite directions. Loading
compares all of the model with all of the file's headers first; what does not fit is
told in one error, and the model changes in one step at the end, or not at all.
"""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from treetap._core.errors import WeightsError
from treetap._core.paths import show_path
from treetap._core.trees.filters import Filter, Not
from treetap._core.trees.state import nested
from treetap._core.trees.update import update
from treetap._core.variables.kinds import Cache, Intermediate, RngState
from treetap._core.variables.values import is_ref
from treetap._core.wording import shown
from treetap._io.file_paths import refuse_no_path
from treetap._io.safetensors_file import (
    refuse_other_formats,
    stored_tensors,
    write_tensors,
)
from treetap._io.weight_rules import Rules, Tensor
from treetap._io.weight_targets import Target, no_value, section, targets_of
from treetap._io.weights_in import Incoming, misfits
from treetap._io.weights_out import Outgoing

LASTING = Not((RngState, Cache, Intermediate))  # what is not made anew by each run


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
    refuse_no_path(path, name)
    file = pathlib.Path(path)
    refuse_other_formats(file, name)
    texts = {"format": "pt", **(metadata or {})}
    if not all(isinstance(text, str) for item in texts.items() for text in item):
        raise TypeError(f"{name}: `metadata` maps texts to texts, and is {metadata!r}.")
    found = Rules(rules, name)
    outgoing = Outgoing()
    targets, problems = targets_of(model, only, name)
    for target in targets:
        if reason := _no_value(target.raw):
            problems.append(f"{target.text} {reason}")
        else:
            array = _on_host(target)
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
    tensors = {
        key: np.require(array, requirements="C")
        for key, array in outgoing.tensors.items()
    }
    write_tensors(file, tensors, texts, name)


def _no_value(raw: Any) -> str:
    """Why a value cannot be had here; empty when it can."""
    reason = no_value(raw)
    if not reason and isinstance(raw, jax.Array) and not raw.is_fully_addressable:
        return "lies on devices of other processes: use `save_checkpoint`"
    return reason


def _on_host(target: Target) -> np.ndarray:
    raw = target.raw[...] if is_ref(target.raw) else target.raw
    return np.asarray(raw, target.dtype)


# Loading.


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
    refuse_no_path(path, name)
    found = Rules(rules, name)
    stored = stored_tensors(path, name)
    targets, problems = targets_of(model, only, name)
    plan = Incoming(stored, cast, problems)
    for target in targets:
        plan.add(target, found.find(target.path))
    missing = [target for target, _ in plan.missing]
    unused = plan.unused(ignore)
    if plan.problems or (strict and (missing or unused)):
        raise misfits(path, plan, unused, found, strict)
    values = plan.values(path)
    if values:
        update(model, nested(values))
    return LoadedWeights(
        tuple(show_path(target) for target, _ in values),
        tuple(show_path(target.path) for target in missing),
        tuple(unused),
    )
