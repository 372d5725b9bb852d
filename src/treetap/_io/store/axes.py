# SPDX-License-Identifier: Apache-2.0
"""Axes: along which axis of each value the batches of a store are joined.

By default that of the examples: the first of a value itself, behind those that loops
and shards put in front. A value that has no such axis gets a new one.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from treetap._capture.selectors import as_select, refuse_nothing
from treetap._capture.walk.operations import stacked_by
from treetap._core.errors import StructureError
from treetap._io.record_descriptions import Leaf
from treetap._observe.records import Record, Site

Axis = int | None | Mapping[Any, int | None]
EXAMPLES: Any = object()  # the default


class Axes:
    """Which axis of each leaf counts examples."""

    def __init__(self, given: Any, name: str):
        items = given.items() if isinstance(given, Mapping) else [("**", given)]
        self._rules = [
            (as_select(key), axis) for key, axis in items if axis is not EXAMPLES
        ]
        for _, axis in self._rules:
            if axis is not None and (type(axis) is not int or axis < 0):
                raise TypeError(
                    f"{name}: `axis` is a number from 0, None, or a mapping from "
                    f"selectors to these, and has {axis!r}."
                )

    def all_for(self, record: Record, leaves: list[Leaf], name: str) -> list[Any]:
        """The axis of each leaf of a Record."""
        texts = [site.text for site in record]
        for select, _ in self._rules:
            if not any(map(select, record)):
                raise refuse_nothing(select, texts, name)
        given = [self._for(site) for site in record]
        found: list[Any] = []
        for leaf in leaves:
            axis, is_given = given[leaf.site]
            short = axis is not None and np.ndim(leaf.value) <= axis
            if short and is_given and leaf.part in ("value", "grad"):
                raise StructureError(
                    f"{name}: {leaf.text} has the shape {np.shape(leaf.value)}, so no "
                    f"axis {axis}. Say `axis=None` for it: a new one."
                )
            found.append(None if short else axis)
        return found

    def _for(self, site: Site) -> tuple[int | None, bool]:
        for select, axis in self._rules:
            if select(site):
                return axis, True
        return len(stacked_by(site.wraps)), False
