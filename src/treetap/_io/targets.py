# SPDX-License-Identifier: Apache-2.0
"""Targets: the values of a model that a file is about, and where they lie.

`targets_of` lists them with path, shape and dtype, and says what cannot be in a
weights file. A target may be abstract, or an array on many devices; `sharding_of` says
where a value read for it belongs.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, NamedSharding

from treetap._core.errors import MetadataError, WeightsError
from treetap._core.paths import Path, show_path
from treetap._core.trees.filters import Filter, predicate_of
from treetap._core.trees.graphdef import GraphDef
from treetap._core.trees.split import split
from treetap._core.trees.state import State, flat_items
from treetap._core.variables.placement import resolve_sharding
from treetap._core.variables.values import is_key, is_ref, why_missing
from treetap._core.variables.variable import Variable
from treetap._core.wording import first_few
from treetap._io.safetensors_file import WRITABLE
from treetap._io.weight_rules import Shape

SHOWN = 20  # lines of each kind in a message
NUMBERS = {kind: np.dtype(kind) for kind in (bool, int, float)}  # of 64 bits, but one


class Target(NamedTuple):
    """One value of a model: a Variable, or an array that stands in it."""

    path: Path
    holder: Any
    raw: Any

    @property
    def text(self) -> str:
        """Its path and kind, for messages."""
        return f"{show_path(self.path)} ({type(self.holder).__name__})"

    @property
    def shape(self) -> Shape:
        """Its shape; that of a number is ()."""
        return np.shape(self.raw)

    @property
    def dtype(self) -> Any:
        """Its dtype, which may be one of JAX's own, or None if it has none."""
        return getattr(self.raw, "dtype", NUMBERS.get(type(self.raw)))


def parts_of(model: Any, name: str) -> tuple[GraphDef, State]:
    """A model split in graph mode, so that what is shared comes once."""
    graphdef, state = split(model, graph=True)
    if not isinstance(state, State):
        raise WeightsError(
            f"{name}: a bare {type(model).__name__} has no name. Put it into a dict."
        )
    return graphdef, state


def targets_of(model: Any, only: Filter, name: str) -> tuple[list[Target], list[str]]:
    """The chosen values of a model, and what cannot be in a weights file."""
    chosen = predicate_of(only)
    targets: list[Target] = []
    problems: list[str] = []
    for path, holder in flat_items(parts_of(model, name)[1].raw_mapping):
        raw = holder.get_raw_value() if isinstance(holder, Variable) else holder
        if raw is None or not chosen(path, holder):
            continue
        target = Target(path, holder, raw)
        place, dtype = target.text, target.dtype
        if dtype is None:
            problems.append(f"{place} holds a {type(raw).__name__}, not an array")
        elif is_key(raw):
            problems.append(f"{place} holds {dtype}, which has no place in the format")
        elif dtype not in WRITABLE:
            problems.append(f"{place} is {dtype}, which the format does not have")
        else:
            targets.append(target)
    return targets, problems


def section(title: str, lines: Sequence[str]) -> str:
    """Some lines under a title, and how many were left out."""
    if not lines:
        return ""
    return f"\n  {title} ({len(lines)}):\n" + first_few(lines, SHOWN, "    - ", "\n")


def no_value(raw: Any) -> str:
    """Why a value cannot be written; empty when it can."""
    if reason := why_missing(raw, "save it"):
        return reason
    is_array = isinstance(raw, jax.Array | np.ndarray | np.generic)
    if type(raw) in NUMBERS or is_ref(raw) or (is_array and raw.dtype != object):
        return ""
    return f"is a {type(raw).__name__}, not an array or a number"


def is_held(raw: Any) -> bool:
    """Whether JAX, as it is set up, can hold another value of that dtype."""
    if not isinstance(raw, jax.Array | jax.ShapeDtypeStruct):
        return True
    return is_key(raw) or jax.dtypes.canonicalize_dtype(raw.dtype) == raw.dtype


def sharding_of(raw: Any, holder: Any, where: str) -> Any:
    """Where another value in place of `raw` belongs; None for JAX's choice.

    Args:
        raw: An array, or an abstract one.
        holder: The Variable whose metadata may say it.
        where: Public name and path, for messages.
    """
    if isinstance(raw, Tracer):
        return None
    if isinstance(raw, jax.Array):
        return raw.sharding if raw.committed else None
    sharding = getattr(raw, "sharding", None)
    if sharding is None and isinstance(holder, Variable):
        with contextlib.suppress(MetadataError):  # there is no mesh
            sharding = resolve_sharding(holder.get_metadata())
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        mesh = jax.sharding.get_mesh()
        if mesh.abstract_mesh != sharding.mesh:
            raise WeightsError(
                f"{where} belongs on {sharding.mesh}, which has no devices here. "
                "Read it under `jax.set_mesh(mesh)`."
            )
        return NamedSharding(mesh, sharding.spec)
    return sharding
