# SPDX-License-Identifier: Apache-2.0
"""Grafts: what became of the structure of the arguments, carried out to the caller.

With graph updates a function may change the objects it is given in any way: set, remove
and swap attributes, share parts, refer to itself. Inside, every object is described
before and after, with the other arguments' objects standing as numbers; those whose
description changed are *grafts*. Outside, a graft's children are regrown (numbers of
arguments mean the caller's own objects) and put into the caller's object.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from operator import is_not
from typing import Any, NamedTuple

from treetap._core.errors import StructureError
from treetap._core.settings import Mode
from treetap._core.trace_level import current_trace, is_foreign, refuse_foreign_object
from treetap._core.trees.attributes import Node
from treetap._core.trees.build import refill, regrow_children
from treetap._core.trees.flatten import Flattening
from treetap._core.trees.graphdef import ObjectSpec
from treetap._core.trees.pytree import flat_of
from treetap._core.variables.variable import Variable
from treetap._transforms.lift.prefixes import Spread


class Lanes:
    """Distinct prefixes among the leaves of a call, in order of appearance.

    Args:
        work: The prefix spread over the arguments.
        numbers: The arguments' objects by identity.
        others: Prefixes that leaves made inside may have.
    """

    __slots__ = ("carried", "known", "of_leaf", "owners", "prefixes")

    def __init__(self, work: Spread, numbers: dict[int, int], others: Sequence[Any]):
        self.prefixes: list[Any] = []
        for prefix in (*work.values, *others):
            if prefix not in self.prefixes:
                self.prefixes.append(prefix)
        self.of_leaf = [self.prefixes.index(value) for value in work.values]
        self.carried: set[int] = set()  # lanes whose plain values are passed on
        # By number, the rule for an object and the prefix of a Variable, with paths.
        self.owners = {numbers[key]: value for key, value in work.owners.items()}
        self.known = {numbers[key]: value for key, value in work.known.items()}

    def by_leaf(self) -> list[Any]:
        """The prefix of each leaf."""
        return [self.prefixes[lane] for lane in self.of_leaf]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Lanes)
            and self.of_leaf == other.of_leaf
            and self.prefixes == other.prefixes
        )

    __hash__ = None  # pyright: ignore[reportAssignmentType] - compared only


class Graft(NamedTuple):
    """The new content of an object: its description, and where its leaves come from.

    A leaf comes out in a lane; or, with a negative number, it is the caller's own leaf:
    `~n` is the n-th of the arguments.
    """

    spec: ObjectSpec
    lanes: tuple[int, ...]


class Grafts:
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
        self.before = {
            number: self._described(walk, number, node)
            for number, node in self.nodes.items()
        }

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
        lanes: Lanes | None,
        own: dict[int, int],
        force: Container[int] = (),
    ) -> Iterator[tuple[Graft, list[Any]]]:
        """The objects that changed, and their leaves that must come out.

        Args:
            walk: A walk that knows the arguments' objects.
            lanes: The lanes of the call.
            own: Plain leaves of the arguments that stay with the caller: their numbers
                by identity.
            force: Objects, by number, that count as changed.
        """
        work = self.spread(lanes, "the prefix") if lanes else None
        if work is not None:
            work.stops |= {id(node) for node in self.nodes.values()}
        for number, node in self.nodes.items():
            spec, leaves = self._described(walk, number, node)
            old_spec, old_leaves = self.before[number]
            same = spec == old_spec and not any(map(is_not, leaves, old_leaves))
            if same and number not in force and all(id(x) in own for x in leaves):
                continue
            places = [0] * len(leaves)
            if lanes is not None and work is not None:
                places = self._places(number, lanes, work)
                new = {p for x, y, p in zip(leaves, old_leaves, places) if x is not y}
                if spec == old_spec and new and new <= lanes.carried:
                    continue  # another value for the next step, and nothing else
            kept = [~own[id(x)] if id(x) in own else n for x, n in zip(leaves, places)]
            yield (
                Graft(spec, tuple(kept)),
                [x for x, place in zip(leaves, kept) if place >= 0],
            )

    def _places(self, number: int, lanes: Lanes, work: Spread) -> list[int]:
        """The lane of each leaf of a changed object: that of the object's prefix."""
        before = len(work.values)
        rule, path = lanes.owners[number]
        children, (layout, *_) = flat_of(self.nodes[number])
        for key, child in zip(layout.keys, children):
            work.cover(rule, child, (*path, key))
        return list(map(lanes.prefixes.index, work.values[before:]))

    def spread(self, lanes: Lanes, argument: str) -> Spread:
        """A spreading for which the objects of the arguments are known already."""
        work = Spread(self.name, argument)
        work.entered |= {id(node) for node in self.nodes.values()}
        work.known |= {
            id(self.members[number]): known for number, known in lanes.known.items()
        }
        return work


def refuse_captured(walk: Flattening, name: str, known: int = 0) -> None:
    """Refuses Variables and objects that were made outside the function.

    Args:
        walk: What was met.
        name: The transform.
        known: How many of its members are the arguments' own.
    """
    trace = current_trace()
    for member in walk.members[known:]:
        if isinstance(member, Variable):
            is_captured = member._trace is not trace and not member._metadata["ref"]
        else:
            is_captured = isinstance(member, Node) and is_foreign(member._pytree__trace)
        if is_captured:
            raise StructureError(
                f"{name}: Cannot extract graph node from different trace level: a "
                f"{type(member).__name__} made outside the function was returned, or "
                "put into an argument. Pass it as an argument, or use its value."
            )


def plant(
    grafts: Sequence[Graft],
    supplies: Sequence[Iterator[Any]],
    leaves: Sequence[Any],
    made: dict[int, Any],
) -> Iterable[Callable[[], None]]:
    """Regrows what changed and gives, for each object, the step that puts it there.

    Args:
        grafts: What changed.
        supplies: What is left in each lane.
        leaves: The caller's leaves.
        made: The caller's objects by number; new ones are added.
    """
    steps: list[Callable[[], None]] = []
    for spec, lanes in grafts:
        node = made[spec.number]  # pyright: ignore[reportArgumentType] - numbered, as all are here
        if is_foreign(node._pytree__trace):
            raise refuse_foreign_object(type(node).__name__)
        values = [
            next(supplies[lane]) if lane >= 0 else leaves[~lane] for lane in lanes
        ]
        children = regrow_children(spec, values, made)
        steps.append(lambda n=node, s=spec, c=children: refill(n, s.structure, c))
    return steps
