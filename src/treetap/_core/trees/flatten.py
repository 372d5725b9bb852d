# SPDX-License-Identifier: Apache-2.0
"""Objects to descriptions and leaves, and back.

`take_apart` walks an object once and gives a description of it (types, static values,
kinds and metadata of Variables, and which objects are shared) together with the leaves
as nested dicts. `put_together` checks such dicts against a description, by name, and
builds new objects around them.

The two modes differ in one thing only: a second meeting with the same Variable or
object is a `Shared` entry in graph mode, and an AliasError in tree mode. (An object
without any leaf may stand at several places of a tree: copies of it cannot be told
apart.)
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax

from treetap._core.errors import AliasError, StructureError
from treetap._core.paths import (
    Key,
    Trail,
    close_container,
    is_container,
    open_container,
    show_trail,
    sorted_keys,
)
from treetap._core.settings import Mode
from treetap._core.trace_level import current_trace
from treetap._core.trees.attributes import Node
from treetap._core.trees.graphdef import (
    NOTHING,
    PLAIN_LEAF,
    ContainerSpec,
    GraphDef,
    LeafSpec,
    ObjectSpec,
    SharedSpec,
    VariableSpec,
)
from treetap._core.trees.pytree import adopt_all, bare, cached_flat, fill, set_spec
from treetap._core.trees.sharing import (
    TREE_MODE,
    refuse_pytree_false,
    refuse_shared,
)
from treetap._core.trees.state import is_branch
from treetap._core.variables.metadata import MISSING
from treetap._core.variables.values import is_ref
from treetap._core.variables.variable import Variable, get_metadata, make


class Apart:
    """One walk over an object: what was met, and the leaves counted."""

    def __init__(
        self,
        root: Any,
        graph: bool | Mode,
        name: str,
        *,
        states: bool = True,
        reason: str = TREE_MODE,
    ):
        self.root = root
        self.graph = graph
        self.name = name
        self.reason = reason  # why nothing may be shared
        self.states = states  # whether they are wanted, beside descriptions
        self.leaves: list[Any] = []  # in the order of the walk
        # What was met, by identity: its number in graph mode; in tree mode INSIDE or
        # DONE for an object, DONE for a Variable.
        self.numbers: dict[int, int] = {}
        self.members: list[Any] = []  # in graph mode, by number

    def definition(self, value: Any) -> GraphDef:
        """Describes a value; its leaves are added to `leaves`."""
        before = len(self.leaves)
        spec, _ = self.any(value)
        return GraphDef(spec, len(self.leaves) - before, self.graph)

    def again(self, value: Any) -> SharedSpec:
        """The description of something met before; refused in tree mode."""
        if not self.graph:
            raise self.refused(value)
        return SharedSpec(self.numbers[id(value)])

    def refused(self, value: Any) -> AliasError:
        """The error for a value that stands at two places."""
        return refuse_shared(self.name, self.root, value, self.reason)

    def any(self, value: Any) -> tuple[Any, Any]:
        """The description and the state of any value."""
        if isinstance(value, Node):
            return self.object(value)
        if isinstance(value, Variable):
            (spec,), state = self.children((None,), (value,))
            return spec, state.get(None, NOTHING)
        if is_container(value):
            opened = open_container(value)
            specs, state = self.children(opened.keys, opened.children)
            # The order of a plain dict's keys does not count, as everywhere in JAX.
            definition = None if opened.kind is dict else opened.definition
            spec = ContainerSpec(opened.kind, opened.keys, definition, specs)
            return spec, state or NOTHING
        if not is_ref(value):
            self.leaves.append(value)
            return PLAIN_LEAF, value
        if id(value) in self.numbers:
            return self.again(value), NOTHING
        self.leaves.append(value)
        number = self.numbers[id(value)] = len(self.numbers)
        self.members.append(value)
        return LeafSpec(number if self.graph else None), value

    def object(self, node: Any) -> tuple[Any, Any]:
        """The description and the state of an object of ours."""
        numbers, graph = self.numbers, self.graph
        identity = id(node)
        met = numbers.get(identity)
        if met is None and not graph and (known := self.known(node)) is not None:
            numbers[identity] = DONE
            return known
        if met is not None and (graph or met is INSIDE):
            return self.again(node), NOTHING
        number = None
        if graph:
            number = len(numbers)
            self.members.append(node)
        numbers[identity] = INSIDE if number is None else number
        try:
            children, structure = cached_flat(node)
        except AttributeError:
            if not (graph or node._pytree__is_pytree):
                raise refuse_pytree_false(self.name, self.root, node) from None
            children, structure = node._refresh()
        before = len(self.leaves)
        specs, state = self.children(structure[0].keys, children)
        if not graph and all(map(_is_variable_spec, specs)):
            own = tuple(map(type, children)), tuple(map(get_metadata, children))
            spec = ObjectSpec(None, type(node), structure, specs, *own)
            set_spec(node, (children, spec))
        else:
            spec = ObjectSpec(number, type(node), structure, specs)
        if number is None:
            numbers[identity] = DONE
            if met is DONE and len(self.leaves) != before:
                raise self.refused(node)
        return spec, state or NOTHING

    def known(self, node: Any) -> tuple[Any, Any] | None:
        """What an object of Variables keeps of its last walk, if it is still right.

        It is while the children are the same tuple and their metadata the same.
        """
        kept = node._pytree__spec
        if kept is None:
            return None
        children, spec = kept
        try:
            is_same = cached_flat(node)[0] is children
        except AttributeError:  # an object that keeps no children
            return None
        if not is_same or spec.metadata != tuple(map(get_metadata, children)):
            return None
        numbers = self.numbers
        for child in children:
            if (identity := id(child)) in numbers:
                raise self.refused(child)
            numbers[identity] = DONE
        self.leaves.extend(children)
        if not (self.states and children):
            return spec, NOTHING
        return spec, dict(zip(spec.structure[0].keys, children))

    def children(self, keys: Any, children: Any) -> tuple[tuple[Any, ...], Any]:
        """Descriptions of children, and the nested dict of those with leaves."""
        specs: list[Any] = []
        state: dict[Key, Any] = {}
        numbers, graph = self.numbers, self.graph
        for key, child in zip(keys, children):
            if not isinstance(child, Variable):
                is_node = isinstance(child, Node)
                spec, inner = self.object(child) if is_node else self.any(child)
                if inner is not NOTHING:
                    state[key] = inner
            elif (identity := id(child)) in numbers:
                spec = self.again(child)
            else:
                number = None
                if graph:
                    number = len(numbers)
                    self.members.append(child)
                spec = VariableSpec(number, type(child), child._metadata)
                numbers[identity] = DONE if number is None else number
                self.leaves.append(child)
                state[key] = child
            specs.append(spec)
        return tuple(specs), state


def _is_variable_spec(spec: Any) -> bool:
    return type(spec) is VariableSpec


INSIDE, DONE = -1, -2


def has_shared(spec: Any) -> bool:
    """Whether a description says that something is shared."""
    match spec:
        case SharedSpec():
            return True
        case ObjectSpec() | ContainerSpec():
            return any(map(has_shared, spec.children))
    return False


def take_apart(value: Any, graph: bool, name: str) -> tuple[GraphDef, Any]:
    """Describes an object and gives its leaves as nested dicts.

    Returns:
        The GraphDef, and the state: a dict, the leaf itself for a bare Variable or
        array, or an empty dict.
    """
    walk = Apart(value, graph, name)
    spec, state = walk.any(value)
    definition = GraphDef(spec, len(walk.leaves), graph)
    return definition, {} if state is NOTHING else state


def take_leaves(
    value: Any, graph: bool | Mode, name: str, reason: str = TREE_MODE
) -> tuple[GraphDef, list[Any]]:
    """Describes an object and gives its leaves as a list, in the order of the walk."""
    walk = Apart(value, graph, name, states=False, reason=reason)
    return walk.definition(value), walk.leaves


class _Together:
    """One rebuilding of an object: what was made by number, what did not fit."""

    __slots__ = ("copy", "made", "owners", "problems", "recreate", "trace")

    def __init__(self, copy: bool, recreate: bool, made: dict[int, Any], owners: Any):
        self.copy = copy
        self.recreate = recreate
        self.trace = current_trace()
        self.made = made
        self.owners = owners  # by number, objects to fill instead of making new ones
        self.problems: list[str] = []

    def any(self, spec: Any, state: Any, trail: Trail) -> Any:
        """The value that a description and its state stand for."""
        kind = type(spec)
        if kind is VariableSpec:
            return self.variable(spec, state, trail)
        if kind is ObjectSpec:
            return self.object(spec, state, trail)
        if kind is ContainerSpec:
            children = self.children(spec.keys, spec.children, state, trail)
            return close_container(spec.type, spec.keys, spec.definition, children)
        if kind is SharedSpec:
            if state is not MISSING and not (is_branch(state) and not state):
                self.extra(trail)
            return self.made[spec.shared_with]
        if state is MISSING:
            self.missing(trail)
        elif isinstance(state, Variable):
            self.problem(trail, f"a {type(state).__name__} where a plain value belongs")
        elif is_branch(state):
            self.problem(trail, "a mapping where a plain value belongs")
        if spec.number is not None:
            self.made[spec.number] = state
        return state

    def variable(self, spec: VariableSpec, state: Any, trail: Trail) -> Any:
        """A Variable from a Variable, or from its bare value."""
        if isinstance(state, Variable):
            if type(state) is not spec.type:
                wanted = spec.type.__name__
                self.problem(trail, f"a {type(state).__name__}, expected a {wanted}")
            variable = state.copy() if self.copy else state
        elif state is MISSING:
            self.missing(trail)
            variable = None
        elif self.recreate:
            value = state
            if spec.metadata["ref"] and not is_ref(state):
                value = jax.new_ref(state)
            variable = make(spec.type, value, spec.metadata, self.trace)
        else:
            variable = state
        owned = self.owners.get(spec.number)
        if owned is not None and isinstance(variable, Variable):
            owned.copy_from(variable)
            variable = owned
        if spec.number is not None:
            self.made[spec.number] = variable
        return variable

    def object(self, spec: ObjectSpec, state: Any, trail: Trail) -> Any:
        """An object of ours; numbered first, as its children may lead back to it."""
        number, kind, structure, specs, kinds, _ = spec
        layout = structure[0]
        if kinds and type(state) is dict and len(state) == len(kinds):
            children = None if self.copy else _matching(layout, state, kinds)
            if children is not None:
                node = bare(kind, self.trace)
                fill(node, structure, children)
                return node
        node = self.owners.get(number)
        if node is None:
            node = bare(kind, self.trace)
        else:
            node._check_trace()
            set_spec(node, None)
        if number is not None:
            self.made[number] = node
        made = self.children(layout.keys, specs, state, trail)
        fill(node, structure, made)
        adopt_all(node, structure, made)
        return node

    def children(self, keys: Any, specs: Any, state: Any, trail: Trail) -> list[Any]:
        """Children from the entries of a mapping, which must be exactly theirs."""
        if state is MISSING:
            state = {}
        elif type(state) is not dict and not isinstance(state, Mapping):
            self.problem(trail, f"a {type(state).__name__} where a mapping belongs")
            state = {}
        made = []
        absent = 0
        for key, spec in zip(keys, specs):
            inner = state.get(key, MISSING)
            kind = type(spec)
            if kind is ObjectSpec:
                value = self.object(spec, inner, (trail, key))
            elif kind is VariableSpec and type(inner) is spec[1] and self.is_plain:
                value = inner
                if spec[0] is not None:
                    self.made[spec[0]] = inner
            else:
                value = self.any(spec, inner, (trail, key))
            if inner is MISSING:
                absent += 1
            made.append(value)
        if len(state) + absent != len(keys):
            for key in state:
                if key not in keys:
                    self.extra((trail, key))
        return made

    @property
    def is_plain(self) -> bool:
        """Whether Variables are taken as they are."""
        return not (self.copy or self.owners)

    def missing(self, trail: Trail) -> None:
        """Notes a leaf the state does not have."""
        self.problems.append(f"missing {show_trail(trail)}")

    def extra(self, trail: Trail) -> None:
        """Notes an entry the object has no place for."""
        self.problems.append(f"unexpected {show_trail(trail)}")

    def problem(self, trail: Trail, what: str) -> None:
        """Notes an entry of the wrong kind."""
        self.problems.append(f"{show_trail(trail)} is {what}")


def _matching(layout: Any, state: dict[Key, Any], kinds: Any) -> Any:
    """Variables by name, when all are there and of the right kinds; else None."""
    try:
        children = layout.children_of(state)
    except KeyError:
        return None
    return children if tuple(map(type, children)) == kinds else None


def put_together(
    graphdef: GraphDef,
    state: Any,
    name: str,
    *,
    copy: bool = False,
    recreate_variables: bool = True,
    made: dict[int, Any] | None = None,
    owners: Mapping[int, Any] = MappingProxyType({}),
) -> Any:
    """Builds new objects from a description and nested dicts of leaves.

    Every name, and the kind of every Variable, must be right; all that is wrong is
    listed in one StructureError. `made` has objects by number from descriptions of the
    same walk; `owners` are filled instead of made.
    """
    work = _Together(copy, recreate_variables, {} if made is None else made, owners)
    root = work.any(graphdef.spec, state, ())
    if work.problems:
        raise StructureError(_complaint(name, graphdef, state, work.problems))
    return root


def count_leaves(state: Any) -> int:
    """How many leaves nested mappings hold."""
    if is_branch(state):
        return sum(map(count_leaves, state.values()))
    return 1


def _complaint(name: str, graphdef: GraphDef, state: Any, problems: list[str]) -> str:
    shown = "\n".join(f"  - {problem}" for problem in problems[:12])
    more = f"\n  - and {len(problems) - 12} more" if len(problems) > 12 else ""
    found = count_leaves(state)
    counts = ""
    if found != graphdef.num_leaves:
        counts = (
            f" Incorrect number of leaves: {found}, expected {graphdef.num_leaves}."
        )
    return (
        f"{name}: the state does not fit the GraphDef.{counts}\n{shown}{more}\n"
        "Pass the State(s) that `split` gave with this GraphDef, all of them."
    )


def from_leaves(graphdef: GraphDef, leaves: Any, name: str) -> Any:
    """Nested dicts from leaves in sorted order of their paths."""
    leaves = list(leaves)
    if len(leaves) != graphdef.num_leaves:
        raise StructureError(
            f"{name}: Incorrect number of leaves: {len(leaves)}, "
            f"expected {graphdef.num_leaves}."
        )
    supply = iter(leaves)

    def fill(spec: Any) -> Any:
        match spec:
            case VariableSpec() | LeafSpec():
                return next(supply)
            case SharedSpec():
                return NOTHING
            case ObjectSpec(_, _, (layout, *_), children):
                keys = layout.keys
            case _:
                keys, children = spec.keys, spec.children
        inner = dict(zip(keys, children))
        filled = {key: fill(inner[key]) for key in sorted_keys(keys)}
        return {key: value for key, value in filled.items() if value is not NOTHING}

    return fill(graphdef.spec)
