# SPDX-License-Identifier: Apache-2.0
"""map and call: a function over every leaf, a method of an object that is split."""

from collections.abc import Callable
from typing import Any, TypeVar

from treetap._core.paths import Path
from treetap._core.settings import resolve_graph
from treetap._core.trees.build import put_together
from treetap._core.trees.flatten import take_apart
from treetap._core.trees.graphdef import GraphDef
from treetap._core.trees.split import merge, split
from treetap._core.trees.state import flat_items, nested

M = TypeVar("M")


def map(
    fn: Callable[[Path, Any], Any],
    node: M,
    /,
    *,
    graph: bool | None = None,
    recreate_variables: bool = True,
) -> M:
    """A copy of `node` with every leaf replaced by `fn(path, leaf)`.

    A Variable is one leaf; a bare value returned for it is put into a Variable of the
    same kind.

    Examples:
        >>> import treetap as tt
        >>> tt.map(lambda path, leaf: leaf[...] + 1, {"a": tt.Param(1.0)})["a"][...]
        2.0
    """
    definition, found = take_apart(node, resolve_graph(graph), "map")
    if isinstance(found, dict):
        found = nested((path, fn(path, leaf)) for path, leaf in flat_items(found))
    else:
        found = fn((), found)
    return put_together(definition, found, "map", recreate_variables=recreate_variables)


class Call:
    """Chooses what to call on a merged object; see `call`."""

    __slots__ = ("_parts", "_path")

    def __init__(self, parts: tuple[Any, ...], path: tuple[tuple[str, Any], ...] = ()):
        self._parts = parts
        self._path = path

    def __getattr__(self, name: str) -> "Call":
        if name[:2] == "__":
            raise AttributeError(name)
        return Call(self._parts, (*self._path, ("attribute", name)))

    def __getitem__(self, key: Any) -> "Call":
        return Call(self._parts, (*self._path, ("item", key)))

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, tuple[GraphDef, Any]]:
        """Merges, calls, splits: returns the result and the new (graphdef, state)."""
        definition, *states = self._parts
        node = merge(definition, *states)
        target = node
        for how, key in self._path:
            target = getattr(target, key) if how == "attribute" else target[key]
        result = target(*args, **kwargs)
        return result, split(node, graph=definition.graph)


def call(graphdef_and_state: tuple[Any, ...], /) -> Any:
    """Calls a method of a split object functionally.

    Args:
        graphdef_and_state: What `split` gave.

    Returns:
        A proxy: choose a method by attribute or item, call it, and get
        `(result, (graphdef, state))`.

    Examples:
        >>> import treetap as tt
        >>> class Counter(tt.Module):
        ...     def __init__(self):
        ...         self.n = tt.Variable(0)
        ...     def add(self, k):
        ...         self.n[...] += k
        ...         return self.n[...]
        >>> result, (graphdef, state) = tt.call(tt.split(Counter())).add(3)
        >>> result
        3
    """
    return Call(tuple(graphdef_and_state))
