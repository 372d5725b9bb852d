# SPDX-License-Identifier: Apache-2.0
"""Walks: visiting everything inside an object, children before parents.

Siblings come in sorted order, numbers numerically; the root comes last, with the empty
path. In graph mode an object is visited once, at its first path; in tree mode a second
meeting is an AliasError, and a cycle a CycleError.
"""

from collections.abc import Callable, Iterator
from typing import Any

from treetap._core.errors import StructureError
from treetap._core.paths import Key, Path, is_container, open_container
from treetap._core.settings import resolve_graph
from treetap._core.trace_level import current_trace
from treetap._core.trees.attributes import Node
from treetap._core.trees.layout import structure_of
from treetap._core.trees.pytree import adopt_all, bare, cached_flat, fill, flat_of
from treetap._core.trees.sharing import has_leaves, refuse_pytree_false, refuse_shared
from treetap._core.variables.values import is_ref
from treetap._core.variables.variable import Variable

Pair = tuple[Path, Any]


class _Visit:
    """One walk; `found` collects what it was sent for."""

    __slots__ = ("active", "found", "graph", "leaves", "name", "root", "seen")

    def __init__(self, root: Any, graph: bool, name: str):
        self.root = root
        self.graph = graph
        self.name = name
        self.found: list[Pair] = []
        self.seen: set[int] = set()
        self.active: set[int] = set()
        self.leaves = 0

    def is_new(self, value: Any) -> bool:
        """Notes a Variable; False when it was met before (graph mode)."""
        self.leaves += 1
        if id(value) not in self.seen:
            self.seen.add(id(value))
            return True
        if not self.graph:
            raise refuse_shared(self.name, self.root, value)
        return False

    def enter(self, node: Any) -> int | None:
        """Begins an object; None when its inside was visited before (graph mode).

        Returns:
            The number of leaves so far, to be handed to `leave`.
        """
        identity = id(node)
        if self.graph and identity in self.seen:
            return None
        if not self.graph and identity in self.active:
            raise refuse_shared(self.name, self.root, node)
        if not (self.graph or type(node)._pytree__is_pytree):
            raise refuse_pytree_false(self.name, self.root, node)
        self.active.add(identity)
        if self.graph:
            self.seen.add(identity)
        return self.leaves

    def leave(self, node: Any, leaves_before: int | None) -> None:
        """Ends the visit of an object; a shared one with leaves is refused."""
        identity = id(node)
        self.active.discard(identity)
        if self.graph:
            return
        if identity in self.seen and self.leaves != leaves_before:
            raise refuse_shared(self.name, self.root, node)
        self.seen.add(identity)


INSIDE, DONE = 1, 2


class _NodesBelow:
    """A walk to objects. No closures that know each other: they would keep the root."""

    __slots__ = ("found", "graph", "is_wanted", "met", "name", "root", "wanted")

    def __init__(self, root: Any, wanted: type, graph: bool, name: str):
        self.root = root
        self.wanted = wanted
        self.graph = graph
        self.name = name
        self.found: list[Pair] = []
        self.met: dict[int, int] = {}  # by identity: INSIDE or DONE
        self.is_wanted: dict[
            type, bool
        ] = {}  # `isinstance` of an abstract class is slow

    def node(self, path: Path, node: Any) -> None:
        met, graph = self.met, self.graph
        before = met.get(id(node))
        if before is not None:
            if graph:
                return
            if before is INSIDE:
                raise refuse_shared(self.name, self.root, node)
        met[id(node)] = INSIDE
        try:
            children, (layout, *_) = cached_flat(node)
        except AttributeError:
            if not (graph or node._pytree__is_pytree):
                raise refuse_pytree_false(self.name, self.root, node) from None
            children, (layout, *_) = node._refresh()
        self.children(path, layout.keys, children)  # a shared Variable is found in here
        met[id(node)] = DONE
        if before is not None and has_leaves(node):
            raise refuse_shared(self.name, self.root, node)
        kind = type(node)
        if kind not in self.is_wanted:
            self.is_wanted[kind] = issubclass(kind, self.wanted)
        if self.is_wanted[kind]:
            self.found.append((path, node))

    def children(self, path: Path, keys: Any, children: Any) -> None:
        met = self.met
        for key, child in zip(keys, children):
            if isinstance(child, Variable):
                if id(child) not in met:
                    met[id(child)] = DONE
                elif not self.graph:
                    raise refuse_shared(self.name, self.root, child)
            elif isinstance(child, Node):
                self.node((*path, key), child)
            elif is_container(child):
                opened = open_container(child)
                self.children((*path, key), opened.keys, opened.children)


def nodes_below(root: Any, wanted: type, graph: bool, name: str) -> list[Pair]:
    """The objects of type `wanted` in a tree or graph, with their paths."""
    walk = _NodesBelow(root, wanted, graph, name)
    if isinstance(root, Node):
        walk.node((), root)
    elif not isinstance(root, Variable) and is_container(root):
        opened = open_container(root)
        walk.children((), opened.keys, opened.children)
    return walk.found


def iter_graph(node: Any, /, *, graph: bool | None = None) -> Iterator[Pair]:
    """Visits everything inside `node`: objects, containers, Variables and leaves.

    Args:
        node: Any tree of Modules, Variables and arrays.
        graph: Visit shared objects once, and static attributes as well, instead of
            refusing what is shared.

    Examples:
        >>> import treetap as tt
        >>> [path for path, _ in tt.iter_graph({"a": [tt.Param(1.0)]})]
        [('a', 0), ('a',), ()]
    """
    graph = resolve_graph(graph)
    walk = _Visit(node, graph, "iter_graph")
    found = walk.found

    def visit(path: Path, value: Any) -> None:
        if isinstance(value, Variable):
            if walk.is_new(value):
                found.append((path, value))
            return
        before = None
        if isinstance(value, Node):
            before = walk.enter(value)
            if before is None:
                return
            children, (layout, statics, _) = flat_of(value)
            keys = layout.keys
            if graph:
                static = zip(layout.static_names, statics)
                found.extend(((*path, name), held) for name, held in static)
        elif is_container(value) and value is not None:
            opened = open_container(value)
            keys, children = opened.keys, opened.children
        else:
            walk.leaves += 1
            if is_ref(value) and not walk.is_new(value):
                return
            found.append((path, value))
            return
        for key, child in zip(keys, children):
            visit((*path, key), child)
        if isinstance(value, Node):
            walk.leave(value, before)
        found.append((path, value))

    visit((), node)
    return iter(found)


def children_of(node: Any, name: str) -> Iterator[tuple[Key, Any]]:
    """The direct children of an object of ours."""
    if not isinstance(node, Node):
        raise StructureError(
            f"{name}: expected a Module or another Pytree object, got "
            f"{type(node).__name__}."
        )
    children, (layout, *_) = flat_of(node)
    return zip(layout.keys, children)


def recursive_map(
    fn: Callable[[Path, Any], Any], node: Any, /, *, graph: bool | None = None
) -> Any:
    """Rebuilds `node` from the leaves up, replacing values by what `fn` returns.

    `fn(path, value)` sees every leaf, then each container and object built from the
    results; what it returns stands in its place. The original is not changed; Variables
    are shared with it unless replaced.

    Args:
        fn: The function to apply.
        node: Any tree of Modules, Variables and arrays.
        graph: Visit shared objects once and keep results shared, and visit static
            attributes too, instead of refusing what is shared.
    """
    graph = resolve_graph(graph)
    walk = _Visit(node, graph, "recursive_map")
    results: dict[int, Any] = {}
    trace = current_trace()

    def rebuilt(path: Path, value: Any) -> Any:
        children, structure = flat_of(value)
        layout, statics, _ = structure
        pairs = zip(layout.keys, children)
        children = [mapped((*path, key), child) for key, child in pairs]
        if graph:
            named = zip(layout.static_names, statics)
            statics = tuple(fn((*path, name), held) for name, held in named)
        new = bare(type(value), trace)
        fill(new, structure_of(layout, statics), children)
        adopt_all(new, structure, children)
        return new

    def mapped(path: Path, value: Any) -> Any:
        if isinstance(value, Node):
            if id(value) in walk.active:
                raise refuse_shared("recursive_map", node, value)
            before = walk.enter(value)
            if before is None:
                return results[id(value)]
            new = rebuilt(path, value)
            walk.leave(value, before)
        elif isinstance(value, Variable):
            if not walk.is_new(value):
                return results[id(value)]
            new = value
        elif is_container(value) and value is not None:
            opened = open_container(value)
            pairs = zip(opened.keys, opened.children)
            new = opened.close([mapped((*path, key), child) for key, child in pairs])
        else:
            walk.leaves += 1
            return fn(path, value)
        result = fn(path, new)
        results[id(value)] = result
        return result

    return mapped((), node)
