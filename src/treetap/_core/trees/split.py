# SPDX-License-Identifier: Apache-2.0
"""split and merge: an object as a static description plus its State, and back.

    graphdef, params, rest = split(model, Param, ...)
    model = merge(graphdef, params, rest)

The Variables in the States are those of the object; `merge` builds new objects around
the Variables it is given. `map` and `call` split, do something, and merge again.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import attrgetter, itemgetter
from typing import Any, TypeVar

from treetap._core.errors import StructureError
from treetap._core.paths import Key, Path
from treetap._core.settings import resolve_graph
from treetap._core.trees.build import put_together
from treetap._core.trees.filters import Filter
from treetap._core.trees.flatten import take_apart
from treetap._core.trees.graphdef import (
    ContainerSpec,
    GraphDef,
    ObjectSpec,
    leaf_paths,
)
from treetap._core.trees.state import (
    FlatState,
    State,
    flat_items,
    from_items,
    merge_state,
    one_or_all,
    register_state,
    state_groups,
    to_flat_state,
)
from treetap._core.variables.variable import Variable

M = TypeVar("M")


def _named(graphdef: GraphDef, leaves: Iterable[Any], name: str) -> Any:
    """Nested dicts from leaves in the sorted order of their paths."""
    leaves = list(leaves)
    if len(leaves) != graphdef.num_leaves:
        raise StructureError(
            f"{name}: Incorrect number of leaves: {len(leaves)}, "
            f"expected {graphdef.num_leaves}."
        )
    by_path = from_items((path, path) for path in leaf_paths(graphdef.spec))
    return from_items(zip((path for path, _ in flat_items(by_path)), leaves))


PureState = tuple[GraphDef[M], State]


class GraphState(State):
    """A State that carries the GraphDef it belongs to; made by `unpack`."""

    __slots__ = ("_graphdef",)

    _graphdef: GraphDef

    def __init__(self, graphdef: GraphDef, mapping: Mapping[Key, Any]):
        super().__init__(mapping)
        object.__setattr__(self, "_graphdef", graphdef)

    def __reduce__(self) -> Any:
        return GraphState, (self._graphdef, self._mapping)


register_state(GraphState, attrgetter("_graphdef"), GraphState)


def split(node: Any, *filters: Filter, graph: bool | None = None) -> Any:
    """Splits an object into its GraphDef and one State per filter.

    Args:
        node: A Module, or any tree of Modules, Variables and arrays.
        *filters: Which values go into which State; each value goes to the first that
            takes it, and every value must be taken. Without filters, one State.
        graph: Keep shared references instead of refusing them.

    Returns:
        The GraphDef, then the States, as one tuple.

    Examples:
        >>> import treetap as tt
        >>> class Affine(tt.Module):
        ...     def __init__(self):
        ...         self.w = tt.Param(2.0)
        ...         self.calls = tt.Variable(0)
        >>> graphdef, params, rest = tt.split(Affine(), tt.Param, ...)
        >>> list(params), list(rest)
        (['w'], ['calls'])
    """
    graphdef, state = take_apart(node, resolve_graph(graph), "split")
    return graphdef, *state_groups(state, filters, "split")


def unpack(node: Any, *filters: Filter, graph: bool | None = None) -> Any:
    """As `split`, but each State carries the GraphDef: `merge(*unpack(node))`."""
    graphdef, state = take_apart(node, resolve_graph(graph), "unpack")
    if not isinstance(state, dict):
        raise TypeError(
            f"unpack: a bare {type(node).__name__} has no names to unpack by. "
            "Use `split`, or put it in a container."
        )
    states = [GraphState(graphdef, s) for s in state_groups(state, filters, "unpack")]
    return one_or_all(states)


def state(node: Any, *filters: Filter, graph: bool | None = None) -> Any:
    """The State of an object, sharing its Variables.

    Args:
        node: A Module, or any tree of Modules, Variables and arrays.
        *filters: One State for each; what none of them takes is left out.
        graph: Keep shared references instead of refusing them.

    Examples:
        >>> import treetap as tt
        >>> tt.state({"w": tt.Param(1.0), "n": tt.Variable(2)}, tt.Param).w[...]
        1.0
    """
    _, found = take_apart(node, resolve_graph(graph), "state")
    return one_or_all(state_groups(found, filters))


variables = state


def graphdef(node: Any, /, *, graph: bool | None = None) -> GraphDef:
    """The GraphDef of an object."""
    return take_apart(node, resolve_graph(graph), "graphdef")[0]


def _united(definition: GraphDef, states: tuple[Any, ...], name: str) -> Any:
    """One nested mapping from the States given to `merge`."""
    given = [from_items(s) if isinstance(s, FlatState) else s for s in states]
    if len(given) > 1:
        given = [s for s in given if not isinstance(s, Mapping) or s] or [{}]
    if len(given) > 1:
        if not all(isinstance(s, Mapping) for s in given):
            raise StructureError(f"{name}: only mappings can be given together.")
        return merge_state(*given, cls=dict)
    (only,) = given
    has_names = isinstance(definition.spec, ObjectSpec | ContainerSpec)
    if isinstance(only, list | tuple) and has_names:
        return _named(definition, only, name)
    return only.raw_mapping if isinstance(only, State) else only


def merge(
    graphdef: Any, /, *states: Any, copy: bool = False, recreate_variables: bool = True
) -> Any:
    """Builds the object that `split` or `unpack` took apart.

    Every name must be right, and every Variable of the right kind; what is missing,
    unexpected or of another kind is listed in the error.

    Args:
        graphdef: A GraphDef, or a GraphState from `unpack`.
        *states: The States that belong to it; nested dicts do as well, and so does one
            list of leaves in order of their paths. A bare value where a Variable stood
            becomes a Variable again.
        copy: Give the object Variables of its own.
        recreate_variables: Make Variables from bare values; otherwise leave them bare.
    """
    if isinstance(graphdef, GraphState):
        for other in states:
            if not isinstance(other, GraphState):
                raise StructureError(
                    f"merge: Expected GraphState object, got {type(other).__name__}."
                )
            if other._graphdef != graphdef._graphdef:
                raise StructureError(
                    "merge: GraphDef must be the same in all GraphStates; these were "
                    "unpacked from objects of different structure."
                )
        states = (graphdef, *states)
        graphdef = graphdef._graphdef
    if not isinstance(graphdef, GraphDef):
        raise TypeError(
            f"merge: expected a GraphDef or a GraphState first, got "
            f"{type(graphdef).__name__}."
        )
    if not states:
        raise TypeError("merge() missing 1 required positional argument: 'state'")
    held = _united(graphdef, states, "merge")
    return put_together(graphdef, held, "merge", copy=copy, recreate=recreate_variables)


def flatten(
    node: Any, /, *, with_paths: bool = True, graph: bool | None = None
) -> tuple[GraphDef, Any]:
    """The GraphDef and the leaves (Variables are leaves), sorted by path.

    Args:
        node: A Module, or any tree of Modules, Variables and arrays.
        with_paths: Give a FlatState; otherwise a list of leaves.
        graph: Keep shared references instead of refusing them.
    """
    definition, found = take_apart(node, resolve_graph(graph), "flatten")
    flat = to_flat_state(found)
    return definition, flat if with_paths else flat.leaves


def unflatten(
    graphdef: GraphDef, leaves: Iterable[Any], /, *, recreate_variables: bool = True
) -> Any:
    """The object from what `flatten` gave: FlatState, mapping or list of leaves."""
    if not isinstance(leaves, FlatState | Mapping):
        leaves = _named(graphdef, leaves, "unflatten")
    united = _united(graphdef, (leaves,), "unflatten")
    return put_together(graphdef, united, "unflatten", recreate=recreate_variables)


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
    found = from_items((path, fn(path, leaf)) for path, leaf in flat_items(found))
    return put_together(definition, found, "map", recreate=recreate_variables)


@dataclass(slots=True, eq=False, repr=False)
class Call:
    """Chooses what to call on a merged object; see `call`."""

    _parts: tuple[Any, ...]
    _steps: tuple[Any, ...] = ()
    _graph: bool | None = None

    def __getattr__(self, name: str) -> "Call":
        if name[:2] == "__":
            raise AttributeError(name)
        return Call(self._parts, (*self._steps, attrgetter(name)), self._graph)

    def __getitem__(self, key: Any) -> "Call":
        return Call(self._parts, (*self._steps, itemgetter(key)), self._graph)

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, tuple[GraphDef, Any]]:
        """Merges, calls, splits: returns the result and the new (graphdef, state)."""
        definition, *states = self._parts
        node = merge(definition, *states)
        target = reduce(lambda at, step: step(at), self._steps, node)
        result = target(*args, **kwargs)
        graph = definition.graph if self._graph is None else self._graph
        return result, split(node, graph=graph)


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


def is_variable(value: Any) -> bool:
    """Whether a value is a Variable; useful as `is_leaf` in `jax.tree` functions."""
    return isinstance(value, Variable)
