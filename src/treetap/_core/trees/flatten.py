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

from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from treetap._core.errors import AliasError
from treetap._core.paths import Key, is_container, open_container
from treetap._core.settings import Mode
from treetap._core.trees.attributes import Node
from treetap._core.trees.graphdef import (
    NOTHING,
    PLAIN_LEAF,
    GraphDef,
    LeafSpec,
    ObjectSpec,
    SharedSpec,
    VariableSpec,
)
from treetap._core.trees.pytree import cached_flat, flat_of, look_behind, set_spec
from treetap._core.trees.sharing import TREE_MODE, refuse_pytree_false, refuse_shared
from treetap._core.variables.values import is_ref
from treetap._core.variables.variable import Variable, get_metadata


@dataclass(slots=True, eq=False)
class Flattening:
    """One walk over objects, which describes them and gathers their leaves.

    Attributes:
        root: Where it begins, for messages.
        graph: Whether what is met again is shared, or refused.
        name: The function at work, for messages.
        states: Whether nested dicts of leaves are wanted beside descriptions.
        reason: Why nothing may be shared in a tree.
        looks: Whether to look at objects that were written behind `__setattr__`.
        leaves: All leaves, in the order of the walk.
        has_twins: Whether a tree has an object without leaves at two places.
        numbers: What was met, by identity. In graph mode its number; in tree mode
            INSIDE or DONE for an object, DONE for a Variable.
        members: In graph mode, what was met, by number.
    """

    root: Any
    graph: bool | Mode
    name: str
    _: KW_ONLY
    states: bool = True
    reason: str = TREE_MODE
    looks: bool = False
    leaves: list[Any] = field(default_factory=list)
    has_twins: bool = False
    numbers: dict[int, int] = field(default_factory=dict)
    members: list[Any] = field(default_factory=list)

    def apart(self, value: Any) -> tuple[GraphDef, Any]:
        """Describes a value, and gives its state; its leaves are added to `leaves`."""
        before = len(self.leaves)
        spec, state = self.any(value)
        definition = GraphDef(spec, len(self.leaves) - before, self.graph)
        return definition, {} if state is NOTHING else state

    def definition(self, value: Any) -> GraphDef:
        """Describes a value; its leaves are added to `leaves`."""
        return self.apart(value)[0]

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
            definition = None if opened.type is dict else opened.definition
            spec = opened._replace(definition=definition, children=specs)
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
        if self.looks and met is None:
            look_behind(node)
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
        if not (graph or node._pytree__is_pytree):
            raise refuse_pytree_false(self.name, self.root, node)
        children, structure = flat_of(node)
        before = len(self.leaves)
        specs, state = self.children(structure[0].keys, children)
        if not graph and {*map(type, specs)} <= {VariableSpec}:
            own = tuple(map(type, children)), tuple(map(get_metadata, children))
            spec = ObjectSpec(None, type(node), structure, specs, *own)
            set_spec(node, (children, spec))
        else:
            spec = ObjectSpec(number, type(node), structure, specs)
        if number is None:
            numbers[identity] = DONE
            if met is DONE and len(self.leaves) != before:
                raise self.refused(node)
            self.has_twins |= met is DONE
        return spec, state or NOTHING

    def known(self, node: Any) -> tuple[Any, Any] | None:
        """What an object of Variables keeps of its last walk, if it is still right.

        An object whose children are all Variables keeps its description, together with
        the tuple of children it was made from. Whatever changes the object drops that
        tuple, so while it has the very same one its class, its static values and its
        children are the same; the Variables' kinds are their classes, which stay. What
        could have changed is their metadata, and that is compared.
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


INSIDE, DONE = -1, -2  # what is known of something that was met in a tree


def take_apart(value: Any, graph: bool, name: str) -> tuple[GraphDef, Any]:
    """Describes an object and gives its leaves as nested dicts.

    Returns:
        The GraphDef, and the state: a dict, the leaf itself for a bare Variable or
        array, or an empty dict.
    """
    return Flattening(value, graph, name).apart(value)


def take_leaves(
    value: Any, graph: bool | Mode, name: str, reason: str = TREE_MODE
) -> tuple[GraphDef, list[Any]]:
    """Describes an object and gives its leaves as a list, in the order of the walk."""
    walk = Flattening(value, graph, name, states=False, reason=reason)
    return walk.definition(value), walk.leaves
