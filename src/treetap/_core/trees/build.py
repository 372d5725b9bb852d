# SPDX-License-Identifier: Apache-2.0
"""Regrowing: objects from a GraphDef and bare values, in the order of the walk.

The counterpart of `take_leaves`, without names or checks: it is used where the values
come back from JAX in the order they were handed over.
"""

from collections.abc import Iterable, Iterator, Mapping
from operator import is_not
from types import MappingProxyType
from typing import Any

from treetap._core.paths import close_container
from treetap._core.trace_level import current_trace, is_foreign, refuse_foreign_object
from treetap._core.trees.graphdef import (
    ContainerSpec,
    GraphDef,
    LeafSpec,
    ObjectSpec,
    SharedSpec,
    VariableSpec,
)
from treetap._core.trees.pytree import adopt_all, bare, fill, flat_of, set_spec
from treetap._core.variables.variable import Variable, last_change, make


class _Regrowth:
    """One rebuilding: what was made by number, and the Variables in order."""

    def __init__(self, values: Iterable[Any], made: dict[int, Any], owners: Any):
        self.nodes: list[Any] = []
        self.values: Iterator[Any] = iter(values)
        self.trace = current_trace()
        self.made = made
        self.owners = owners
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
        if spec.kinds is not None:
            return self.object_of_variables(spec)
        owned = self.owners.get(spec.number)
        node = bare(spec.type, self.trace) if owned is None else owned
        self.nodes.append(node)
        if spec.number is not None:
            self.made[spec.number] = node
        children = self.children(spec)
        if owned is None:
            fill(node, spec.structure, children)
            adopt_all(node, spec.structure, children)
        elif any(map(is_not, children, flat_of(node)[0])):
            refill(node, spec.structure, children)
        return node

    def children(self, spec: ObjectSpec) -> list[Any]:
        return [self.any(child) for child in spec.children]

    def object_of_variables(self, spec: ObjectSpec) -> Any:
        """The common object, made quickly: nothing in it is shared or has a place."""
        trace = self.trace
        made: list[Any] = []
        are_new = True
        for kind, metadata, value in zip(spec.kinds, spec.metadata, self.values):
            if isinstance(value, Variable):
                are_new = False
                made.append(value)
            else:
                made.append(make(kind, value, metadata, trace))
        node = bare(spec.type, trace)
        children = tuple(made)
        fill(node, spec.structure, children)
        if are_new:  # what a walk would find
            set_spec(node, (children, spec))
        self.nodes.append(node)
        self.leaves += made
        return node


def refill(node: Any, structure: Any, children: Iterable[Any]) -> None:
    """Gives an object its attributes, in place of those it has."""
    if is_foreign(node._pytree__trace):
        raise refuse_foreign_object(type(node).__name__)
    set_spec(node, None)
    fill(node, structure, children)
    last_change[0] = object()
    adopt_all(node, structure, children)


def regrow(
    graphdef: GraphDef,
    values: Iterable[Any],
    made: dict[int, Any] | None = None,
    owners: Mapping[int, Any] = MappingProxyType({}),
    nodes: list[Any] | None = None,
) -> tuple[Any, list[Any]]:
    """Builds new objects around values.

    Args:
        graphdef: What to build.
        values: Bare values, or Variables, in order.
        made: Objects by number; shared by descriptions that were made in one walk.
        owners: Objects by number that are to be filled instead of made.
        nodes: Gets the objects, as `objects_in` orders them.

    Returns:
        The object, and its leaves in order: new Variables (or those given), and the
        plain values.
    """
    work = _Regrowth(values, {} if made is None else made, owners)
    if nodes is not None:
        work.nodes = nodes
    return work.any(graphdef.spec), work.leaves


def regrow_children(
    spec: ObjectSpec, values: Iterable[Any], made: dict[int, Any]
) -> list[Any]:
    """The children of an object that is there already."""
    return _Regrowth(values, made, {}).children(spec)
