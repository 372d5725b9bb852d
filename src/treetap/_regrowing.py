# SPDX-License-Identifier: Apache-2.0
"""Regrowing: objects from a GraphDef and bare values, in the order of the walk.

The counterpart of `take_leaves`, without names or checks: it is used where the values
come back from JAX in the order they were handed over.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from treetap._graphs import (
    ContainerSpec,
    GraphDef,
    LeafSpec,
    ObjectSpec,
    SharedSpec,
    VariableSpec,
)
from treetap._pytrees import adopt_all, bare, fill
from treetap._traces import current_trace
from treetap._trees import close_container
from treetap._variables import Variable, make


class _Regrowth:
    """One rebuilding: what was made by number, and the Variables in order."""

    def __init__(self, values: Iterable[Any], made: dict[int, Any]):
        self.values: Iterator[Any] = iter(values)
        self.trace = current_trace()
        self.made = made
        self.leaves: list[Any] = []

    def any(self, spec: Any) -> Any:
        kind = type(spec)
        if kind is VariableSpec:
            value = next(self.values)
            if not isinstance(value, Variable):
                value = make(spec.type, value, spec.metadata, self.trace)
        elif kind is LeafSpec:
            value = next(self.values)
        elif kind is SharedSpec:
            return self.made[spec.shared_with]
        elif kind is ContainerSpec:
            children = [self.any(child) for child in spec.children]
            return close_container(spec.type, spec.keys, spec.definition, children)
        else:
            return self.object(spec)
        self.leaves.append(value)
        if spec.number is not None:
            self.made[spec.number] = value
        return value

    def object(self, spec: ObjectSpec) -> Any:
        node = bare(spec.type, self.trace)
        if spec.number is not None:
            self.made[spec.number] = node
        children = [self.any(child) for child in spec.children]
        fill(node, spec.structure, children)
        adopt_all(spec.structure, children)
        return node


def regrow(
    graphdef: GraphDef, values: Iterable[Any], made: dict[int, Any] | None = None
) -> tuple[Any, list[Any]]:
    """Builds new objects around values.

    Args:
        graphdef: What to build.
        values: Bare values, or Variables, in order.
        made: Objects by number; shared by descriptions that were made in one walk.

    Returns:
        The object, and its leaves in order: new Variables (or those given), and the
        plain values.
    """
    work = _Regrowth(values, {} if made is None else made)
    return work.any(graphdef.spec), work.leaves
