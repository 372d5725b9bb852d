# SPDX-License-Identifier: Apache-2.0
"""The walk over objects: everything inside a value, children before parents.

Siblings come in sorted order, numbers numerically; the root comes last, with the empty
path. In graph mode an object is visited once, at its first path; in tree mode a second
meeting is an AliasError, and a cycle a CycleError. (An object without any leaf may
stand at several places of a tree: copies of it cannot be told apart.)

All that visits objects with their paths is made of this walk: `iter_graph`,
`iter_modules`, `recursive_map`. Three others do less, or more. `variables_below` keeps
no paths and is quick; `places` goes from the root down and comes to a shared object
each time, for errors that name places; `Flattening` describes what it meets.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from treetap._core.paths import Key, Path, is_container, open_container
from treetap._core.settings import resolve_graph
from treetap._core.trace_level import current_trace
from treetap._core.trees.attributes import Node
from treetap._core.trees.flatten import DONE, INSIDE
from treetap._core.trees.layout import structure_of
from treetap._core.trees.pytree import closed, flat_of, opened
from treetap._core.trees.sharing import places, refuse_pytree_false, refuse_shared
from treetap._core.variables.values import is_ref
from treetap._core.variables.variable import Variable

Pair = tuple[Path, Any]


@dataclass(slots=True, eq=False)
class _Walk:
    """One walk; `found` gets what was met, with its path, children first.

    It appends to a list, which is quicker than a generator in a generator; and it is no
    closure, which would refer to itself and keep the root alive.

    Args:
        root: Where to begin.
        graph: Whether to visit shared objects once instead of refusing them.
        name: The function at work, for messages.
        everything: Whether containers, Variables and leaves are wanted beside objects.
        statics: Whether static attributes are wanted as well.
    """

    root: Any
    graph: bool
    name: str
    everything: bool = False
    statics: bool = False
    found: list[Pair] = field(default_factory=list)
    met: dict[int, int] = field(default_factory=dict)  # by identity: INSIDE or DONE

    def __post_init__(self) -> None:
        self.visit((), self.root)

    def visit(self, path: Path, value: Any) -> None:
        """Visits a value, after what is inside it."""
        is_node = isinstance(value, Node)
        has_identity = is_node or isinstance(value, Variable) or is_ref(value)
        before = self.met.get(id(value)) if has_identity else None
        if before is not None and self.graph:
            return
        if before is INSIDE:
            raise refuse_shared(self.name, self.root, value)
        if has_identity:
            self.met[id(value)] = INSIDE
        if is_node and not (self.graph or value._pytree__is_pytree):
            raise refuse_pytree_false(self.name, self.root, value)
        if is_node and self.statics:
            _, (layout, statics, _) = flat_of(value)
            named = zip(layout.static_names, statics)
            self.found += [((*path, name), held) for name, held in named]
        met, everything = self.met, self.everything
        for key, child in zip(*(opened(value) or ())):
            # As `visit` would, quickly: most of what is met are Variables.
            if not everything and isinstance(child, Variable) and id(child) not in met:
                met[id(child)] = DONE
            else:
                self.visit((*path, key), child)
        if has_identity:
            self.met[id(value)] = DONE
        # After its children: if one of these is shared as well, the error is about it.
        if before is DONE and any(opened(inner) is None for _, inner in places(value)):
            raise refuse_shared(self.name, self.root, value)
        if is_node or self.everything:
            self.found.append((path, value))


def nodes_below(root: Any, wanted: type, graph: bool, name: str) -> list[Pair]:
    """The objects of type `wanted` in a tree or graph, with their paths."""
    found = _Walk(root, graph, name).found
    met = {type(node) for _, node in found}
    kinds = {kind for kind in met if issubclass(kind, wanted)}  # quicker than each node
    return [pair for pair in found if type(pair[1]) in kinds]


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
    return iter(_Walk(node, graph, "iter_graph", everything=True, statics=graph).found)


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
    trace = current_trace()
    # In graph mode what may be shared has its result by identity, and one only.
    results: dict[Any, Any] = {}

    def place_of(path: Path, value: Any) -> Any:
        may_be_shared = isinstance(value, Node | Variable) or is_ref(value)
        return id(value) if graph and may_be_shared else path

    def results_of(path: Path, keys: Iterable[Key], children: Iterable[Any]) -> Any:
        for key, child in zip(keys, children):
            place = place_of((*path, key), child)
            if place not in results:  # it is still being rebuilt
                raise refuse_shared("recursive_map", node, child)
            yield results[place]

    for path, value in _Walk(node, graph, "recursive_map", everything=True).found:
        new = value
        if isinstance(value, Node):
            children, (layout, statics, _) = flat_of(value)
            children = tuple(results_of(path, layout.keys, children))
            if graph:
                named = zip(layout.static_names, statics)
                statics = tuple(fn((*path, name), held) for name, held in named)
            new = closed(type(value), structure_of(layout, statics), children, trace)
        elif not isinstance(value, Variable | None) and is_container(value):
            opened = open_container(value)
            new = opened.close(results_of(path, opened.keys, opened.children))
        results[place_of(path, value)] = fn(path, new)
    return results[place_of((), node)]
