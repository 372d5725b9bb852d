# SPDX-License-Identifier: Apache-2.0
"""EMA: exponential moving averages of a model's Variables.

An EMA has Variables of its own, of the kinds and metadata of the model's, found by
path. What cannot be averaged (random streams, integers) is not tracked: `apply_to`
takes it from the model. Averages keep the model's dtype and are computed in at least
float32.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from treetap._core.paths import Path, show_path
from treetap._core.settings import resolve_graph
from treetap._core.trees.attributes import data
from treetap._core.trees.build import rebuilt
from treetap._core.trees.filters import Filter, predicate_of
from treetap._core.trees.pytree import Pytree
from treetap._core.trees.state import State, flat_items, nested
from treetap._core.trees.update import update
from treetap._core.variables.kinds import RngState
from treetap._core.variables.variable import Variable
from treetap._train.comparable_functions import EqualFunctions
from treetap._train.matching import (
    Leaves,
    leaves_of,
    misfit_of_arrays,
    misfit_of_values,
    raw_value,
    refuse_misfits,
)

M = TypeVar("M")


class EMA(Pytree):
    """Moving averages of Variables: `decay * average + (1 - decay) * value`.

    Args:
        model: A Module, or a State of its Variables, to start from.
        decay: How much of the average stays, from 0 to 1.
        only: Which Variables to average. Random streams, and whatever is not floating
            or complex, are left out in any case.
        graph: Keep shared references in the model instead of refusing them.

    Attributes:
        params: The averages, a State of Variables.

    Examples:
        >>> import treetap as tt
        >>> model = tt.Dict(w=tt.Param(1.0), rngs=tt.Rngs(0))
        >>> ema = tt.EMA(model, decay=0.75)
        >>> model.w[...] = 5.0
        >>> ema.update(model)
        >>> float(ema.apply_to(model).w), model.w[...]
        (2.0, 5.0)
    """

    def __init__(
        self,
        model: Any,
        decay: float,
        *,
        only: Filter = ...,
        graph: bool | None = None,
    ) -> None:
        if isinstance(decay, Tracer) or not 0.0 <= float(decay) <= 1.0:
            raise ValueError(f"EMA: `decay` must be a number from 0 to 1, got {decay}.")
        self.decay = float(decay)
        self.graph = graph
        self._only = EqualFunctions(only)
        found = self._tracked(leaves_of(model, graph, "EMA"))
        for path, leaf in found.items():
            _check_variable("EMA", path, leaf)
            found[path] = leaf.copy(jax.tree.map(_copied, raw_value(leaf)))
        self.params = data(State(nested(found.items())))

    @property
    def only(self) -> Filter:
        """The filter that chooses what is averaged."""
        return self._only.value

    def update(self, updates: Any) -> None:
        """Move the averages towards the model's values, in place.

        Args:
            updates: The model, or a State of its Variables or values.
        """
        moved = [
            (path, jax.tree.map(self._moved, raw_value(average), raw_value(new)))
            for path, average, new in self._matched(updates, "EMA.update")
        ]
        update(self.params, nested(moved))

    def apply_to(self, model: M) -> M:
        """Return a model like this one that holds the averages.

        Args:
            model: The model; it is not changed.

        Returns:
            An object of the model's type. Its averaged Variables are those of the EMA,
            all others those of the model.
        """
        twins: dict[int, Any] = {}
        for path, average, leaf in self._matched(model, "EMA.apply_to"):
            _check_variable("EMA.apply_to", path, leaf)
            twins[id(leaf)] = average
        return rebuilt(
            model,
            resolve_graph(self.graph),
            "EMA.apply_to",
            variable=lambda variable: twins.get(id(variable), variable),
        )

    def _moved(self, average: Any, value: Any) -> jax.Array:
        """Return an average after a value, computed in at least float32."""
        dtype = jnp.result_type(average)
        is_narrow = jnp.finfo(dtype).bits < 32
        wide = jnp.float32 if is_narrow else dtype
        average, value = jnp.asarray(average, wide), jnp.asarray(value, wide)
        return (self.decay * average + (1 - self.decay) * value).astype(dtype)

    def _tracked(self, leaves: Leaves) -> Leaves:
        """Return what of a model's leaves is averaged."""
        wanted = predicate_of(self.only)
        return {
            path: leaf
            for path, leaf in leaves.items()
            if wanted(path, leaf) and _has_average(leaf)
        }

    def _matched(self, model: Any, name: str) -> list[tuple[Path, Any, Any]]:
        """Return paths, averages and the model's Variables; all must be there."""
        averages = dict(flat_items(self.params))
        leaves = leaves_of(model, self.graph, name)
        refuse_misfits(
            f"{name}: the model is not the one that is averaged",
            averages,
            leaves,
            compare=_misfit_of_leaf,
            unexpected=[path for path in self._tracked(leaves) if path not in averages],
            remedy="Pass a model of the same structure, or make a new EMA; `only` says "
            "which Variables are averaged.",
        )
        return [(path, each, leaves[path]) for path, each in averages.items()]


def _has_average(leaf: Any) -> bool:
    """Whether a leaf can be averaged: floating or complex, and no random stream."""
    if isinstance(leaf, RngState):
        return False
    values = jax.tree.leaves(raw_value(leaf))
    return bool(values) and all(map(_is_inexact, values))


def _is_inexact(value: Any) -> bool:
    is_number = isinstance(value, float | complex) or hasattr(value, "dtype")
    return is_number and jnp.issubdtype(jnp.result_type(value), jnp.inexact)


def _check_variable(name: str, path: Path, leaf: Any) -> None:
    """Refuse to average what is no Variable."""
    if not isinstance(leaf, Variable):
        raise TypeError(
            f"{name}: {show_path(path)} is a {type(leaf).__name__}; only Variables can "
            "be averaged. Make it a Variable, or leave it out with `only`."
        )


def _copied(value: Any) -> Any:
    """Copy an array, to one whose type is not weak; abstract ones stay as they are."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return value
    return jnp.array(value, jnp.result_type(value), copy=True)


def _misfit_of_leaf(average: Variable[Any], leaf: Any) -> str:
    """Return why a leaf of a model does not go with an average."""
    if isinstance(leaf, Variable) and type(leaf) is not type(average):
        return f"a {type(leaf).__name__}, expected a {type(average).__name__}"
    return misfit_of_values(average, leaf, _misfit_of_array)


def _misfit_of_array(average: Any, value: Any) -> str:
    """Return why an array cannot be averaged with another."""
    if np.shape(value) == np.shape(average) and not _is_inexact(value):
        return f"dtype {jnp.result_type(value)}, expected {jnp.result_type(average)}"
    return misfit_of_arrays(average, value)
