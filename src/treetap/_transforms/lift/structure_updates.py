# SPDX-License-Identifier: Apache-2.0
"""Structure updates: what became of the arguments' objects, carried out to the caller.

**The idea.** With graph updates a function may change the objects it is given in any
way: set, remove and swap attributes, share parts, refer to itself. JAX carries values
out of a traced function, and nothing else. So every object of the arguments is
described before the function runs and once more when it has run. An object whose
description is another one gives an `ObjectUpdate`: its new description, which is
static, and the leaves that it holds itself, which are values. Outside, `apply` builds
its new children and puts them into the caller's object.

**The invariant.** A number means the same object on both sides. `Inputs` numbers the
caller's objects in the order of its walk, and what `Inside` rebuilds from that
description has the same numbers. In a description, an object of the arguments is its
number alone; one that the function made is described in full where it is met first and
gets the next number. Outside, `made` is filled in that very order.

**Why it is sound.** An object is described one level deep, as far as the next object of
the arguments. That is enough: a change further down is a change of that other object,
which is described itself. Leaves are compared by identity, and inside a traced function
every leaf is an object of its own, so two different values are never taken for one.
Outside, everything that can fail is done before the first object is changed: `apply`
returns steps, and only assigns attributes when they are called.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import is_not
from typing import Any, NamedTuple

from treetap._core.errors import StructureError
from treetap._core.settings import Mode
from treetap._core.trace_level import is_foreign, refuse_foreign_object
from treetap._core.trees.attributes import Node
from treetap._core.trees.build import Builder, refill
from treetap._core.trees.flatten import Flattening
from treetap._core.trees.graphdef import ObjectSpec
from treetap._core.trees.pytree import flat_of
from treetap._core.variables.variable import Variable, raw_values
from treetap._transforms.lift.prefixes import PrefixGroups, Spread


class ObjectUpdate(NamedTuple):
    """The new content of an object.

    Attributes:
        spec: Its description.
        places: Where each of its leaves comes from: the number of a group of values
            that come out; or `~n`, below zero, for the caller's own n-th leaf.
    """

    spec: ObjectSpec
    places: tuple[int, ...]


class StructureUpdates:
    """Watches the objects of a call while a function runs.

    Args:
        members: The objects inside, by number.
        name: The transform, for messages.
    """

    def __init__(self, members: dict[int, Any], name: str):
        self.name = name
        self.members = members
        self.nodes = {n: x for n, x in members.items() if isinstance(x, Node)}
        walk = self.walk()
        self.before = {n: self._described(walk, n, x) for n, x in self.nodes.items()}

    def walk(self) -> Flattening:
        """A walk for which the objects of the arguments are known already."""
        walk = Flattening(None, Mode.UPDATES, self.name)
        walk.members = [self.members[number] for number in range(len(self.members))]
        walk.numbers = {id(x): number for number, x in self.members.items()}
        return walk

    @staticmethod
    def _described(
        walk: Flattening, number: int, node: Any
    ) -> tuple[ObjectSpec, list[Any]]:
        """An object's description and the leaves it holds itself."""
        children, structure = flat_of(node)
        before = len(walk.leaves)
        specs, _ = walk.children(structure[0].keys, children)
        spec = ObjectSpec(number, type(node), structure, specs)
        return spec, walk.leaves[before:]

    def collect(
        self,
        walk: Flattening,
        groups: PrefixGroups | None,
        own: dict[int, int],
        values: list[list[Any]],
        idle: set[int] | None = None,
    ) -> Iterator[ObjectUpdate]:
        """The objects that changed; their leaves that must come out join the values.

        Args:
            walk: A walk that knows the arguments' objects.
            groups: The leaves of the call by prefix.
            own: Plain leaves of the arguments that stay with the caller: their numbers
                by identity.
            values: For each group, the values that come out.
            idle: As for `Inside.finish`.
        """
        work = self.spread(groups, "the prefix") if groups else None
        if work is not None:
            work.active |= {id(node) for node in self.nodes.values()}
        for number, node in self.nodes.items():
            spec, leaves = self._described(walk, number, node)
            old_spec, old_leaves = self.before[number]
            same = spec == old_spec and not any(map(is_not, leaves, old_leaves))
            if same and idle is not None:
                idle.add(number)
            elif same and all(id(x) in own for x in leaves):
                continue
            places = [0] * len(leaves)
            if groups is not None and work is not None:
                places = self._places(number, groups, work)
                new = {p for x, y, p in zip(leaves, old_leaves, places) if x is not y}
                if spec == old_spec and new and new <= groups.carried:
                    continue  # another value for the next step, and nothing else
            kept = [~own[id(x)] if id(x) in own else n for x, n in zip(leaves, places)]
            for place, value in zip(kept, raw_values(leaves)):
                if place >= 0:
                    values[place].append(value)
            yield ObjectUpdate(spec, tuple(kept))

    def forget(self, members: Iterable[Any]) -> None:
        """Leaves objects out that somebody else cares for."""
        gone = set(map(id, members))
        self.nodes = {n: x for n, x in self.nodes.items() if id(x) not in gone}

    def _places(self, number: int, groups: PrefixGroups, work: Spread) -> list[int]:
        """The group of each leaf of a changed object, by the object's own prefix."""
        before = len(work.values)
        rule, path = groups.owners[number]
        children, (layout, *_) = flat_of(self.nodes[number])
        for key, child in zip(layout.keys, children):
            work.cover(rule, child, (*path, key))
        return list(map(groups.prefixes.index, work.values[before:]))

    def spread(self, groups: PrefixGroups, argument: str) -> Spread:
        """A spreading for which the objects of the arguments are known already."""
        work = Spread(self.name, argument)
        work.entered |= {id(node) for node in self.nodes.values()}
        work.known |= {id(self.members[n]): met for n, met in groups.known.items()}
        return work


def refuse_captured(members: Iterable[Any], name: str) -> None:
    """Refuses Variables and objects that were made outside the function."""
    for member in members:
        if is_captured(member):
            raise StructureError(
                f"{name}: Cannot extract graph node from different trace level: a "
                f"{type(member).__name__} made outside the function was returned, or "
                "put into an argument. Pass it as an argument, or use its value."
            )


def is_captured(member: Any) -> bool:
    """Whether a Variable or an object was made outside; a Ref may be used anywhere."""
    if isinstance(member, Variable):
        return is_foreign(member._trace) and not member._metadata["ref"]
    return isinstance(member, Node) and is_foreign(member._pytree__trace)


def apply(
    updates: Sequence[ObjectUpdate],
    supplies: Sequence[Iterator[Any]],
    leaves: Sequence[Any],
    made: dict[int, Any],
) -> Iterable[Callable[[], None]]:
    """Builds the new content of objects; gives, for each, the step that puts it there.

    Args:
        updates: What changed.
        supplies: What is left in each group.
        leaves: The caller's leaves.
        made: The caller's objects by number; new ones are added.
    """
    steps: list[Callable[[], None]] = []
    for spec, places in updates:
        node = made[spec.number]  # pyright: ignore[reportArgumentType] - numbered, as all are here
        if is_foreign(node._pytree__trace):
            raise refuse_foreign_object(type(node).__name__)
        values = [next(supplies[n]) if n >= 0 else leaves[~n] for n in places]
        children = Builder(iter(values), made).children(spec.children)
        steps.append(functools.partial(refill, node, spec.structure, children))
    return steps
