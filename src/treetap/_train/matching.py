# SPDX-License-Identifier: Apache-2.0
"""Matching: what belongs to a model, compared with the model by path.

An optimizer and an average keep something for each of a model's parameters, and are
given gradients, or the model anew. What is given is matched by path before anything is
computed or written: `refuse_misfits` names all that is missing, all that is unexpected,
and what is of another kind, structure, shape or dtype.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treetap._core.errors import StructureError
from treetap._core.paths import Path, is_container, show_path
from treetap._core.settings import resolve_graph
from treetap._core.trees.flatten import take_apart
from treetap._core.trees.state import State, flat_items, nested
from treetap._core.variables.values import without_ref
from treetap._core.variables.variable import Variable
from treetap._core.wording import first_few

Leaves = dict[Path, Any]
Compare = Callable[[Any, Any], str]  # what is wanted and found: a problem, or nothing


def raw_value(leaf: Any) -> Any:
    """Return what a Variable holds, read from its Ref if any; other leaves as is."""
    raw = leaf.get_raw_value() if isinstance(leaf, Variable) else leaf
    return without_ref(raw)


def leaves_of(tree: Any, graph: bool | None, name: str) -> Leaves:
    """Return Variables and other leaves of a tree by path; a bare leaf is at the root.

    Args:
        tree: A Module, State, dict or other tree of Variables or arrays.
        graph: Whether shared references are kept, or refused; None for the setting.
        name: The public function at work, for messages.
    """
    found = take_apart(tree, resolve_graph(graph), name)[1]
    return dict(flat_items(found))


def gathered(leaves: Mapping[Path, Any]) -> Any:
    """Return leaves by path as one State, or the bare leaf at the root."""
    return leaves[()] if () in leaves else State(nested(leaves.items()))


def misfit_of_values(wanted: Any, found: Any, compare: Compare) -> str:
    """Return why a value, or what it contains, cannot stand for another.

    Args:
        wanted: A Variable or value, such as an array or a list of arrays.
        found: What should be like it.
        compare: Compares two arrays.
    """
    arrays, structure = jax.tree.flatten(raw_value(wanted))
    others, other_structure = jax.tree.flatten(raw_value(found))
    if structure != other_structure:
        return f"{_kind(raw_value(found))}, expected {_kind(raw_value(wanted))}"
    return next(filter(None, map(compare, arrays, others)), "")


def _kind(value: Any) -> str:
    """Return what something is: an array, or a container of a type."""
    return f"a {type(value).__name__}" if is_container(value) else "an array"


def misfit_of_arrays(wanted: Any, found: Any) -> str:
    """Return why an array cannot stand for another; it may have its own precision."""
    if np.shape(found) != np.shape(wanted):
        return f"shape {np.shape(found)}, expected {np.shape(wanted)}"
    if jnp.iscomplexobj(found) > jnp.iscomplexobj(wanted):
        return f"dtype {jnp.result_type(found)}, expected {jnp.result_type(wanted)}"
    return ""


def refuse_misfits(
    what: str,
    wanted: Mapping[Path, Any],
    found: Mapping[Path, Any],
    *,
    remedy: str,
    compare: Compare = lambda wanted, found: "",
    unexpected: Iterable[Path] = (),
) -> None:
    """Raise an error that lists what does not fit, if anything does not.

    Args:
        what: What does not fit, in the words of the error.
        wanted: What there must be, by path.
        found: What there is.
        remedy: What to do, in the words of the error.
        compare: Compares what is wanted at a path with what is found there.
        unexpected: Paths that should not be there.
    """
    problems = []
    for path, value in wanted.items():
        if path not in found:
            problems.append(f"missing {show_path(path)}")
        elif problem := compare(value, found[path]):
            problems.append(f"{show_path(path)}: {problem}")
    problems += [f"unexpected {show_path(path)}" for path in unexpected]
    if problems:
        listed = first_few(problems, 12, before="  - ", end="\n")
        raise StructureError(f"{what}; nothing was changed.\n{listed}\n{remedy}")
