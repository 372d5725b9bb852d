# SPDX-License-Identifier: Apache-2.0
"""Axes: along which axis of each value the batches of a store are joined.

By default that of the examples: the first of a value itself, behind those that loops
and shards put in front. A value that has no such axis gets a new one.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from treetap._capture.selectors import Select, as_select, refuse_nothing
from treetap._capture.walk.spots import VMAP
from treetap._capture.walk.spots import Axis as FirstAxis
from treetap._core.errors import StructureError
from treetap._io.record_descriptions import Leaf
from treetap._observe.records import Record
from treetap._observe.records import axes_of as axes_in

Axis = int | None | Mapping[Any, int | None]
EXAMPLES: Any = object()  # the default
Rules = list[tuple[Select, Any]]


def axis_rules(given: Any, name: str) -> Rules:
    """Which axis is said to count examples, by selector."""
    items = given.items() if isinstance(given, Mapping) else [("**", given)]
    rules = [(as_select(key), axis) for key, axis in items if axis is not EXAMPLES]
    for _, axis in rules:
        if axis is not None and (type(axis) is not int or axis < 0):
            raise TypeError(
                f"{name}: `axis` is a number from 0, None, or a mapping from "
                f"selectors to these, and has {axis!r}."
            )
    return rules


def _examples(axes: Sequence[FirstAxis]) -> int:
    """The first axis that is not of iterations or shards."""
    return next((n for n, axis in enumerate(axes) if axis.kind == VMAP), len(axes))


def axes_of(
    rules: Rules, record: Record, leaves: list[Leaf], name: str
) -> list[int | None]:
    """Which axis of each leaf of a Record counts examples."""
    for select, _ in rules:
        if not any(map(select, record)):
            raise refuse_nothing(select, [site.text for site in record], name)
    found: list[int | None] = []
    before = Counter[Any]()
    for leaf in leaves:
        given = next((axis for select, axis in rules if select(leaf.site)), EXAMPLES)
        own = axes_in(leaf.site, leaf.part, before[id(leaf.site), leaf.part])
        before[id(leaf.site), leaf.part] += 1
        axis = _examples(own) if given is EXAMPLES else given
        is_short = axis is not None and np.ndim(leaf.value) <= axis
        if is_short and given is not EXAMPLES and leaf.part in ("value", "grad"):
            raise StructureError(
                f"{name}: {leaf.text} has the shape {np.shape(leaf.value)}, so no "
                f"axis {axis}. Say `axis=None` for it: a new one."
            )
        found.append(None if is_short else axis)
    return found
