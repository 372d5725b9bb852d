# SPDX-License-Identifier: Apache-2.0
"""Carries: what a loop hands from one step to the next.

JAX wants the same arrays' types after a step as before it. With Variables more is
needed: the caller's Variables get the final values, so a step must return the very
Variables it was given, in the same places. What plain arrays an object of the carry
holds is carried too, so a step may replace those.

With graph updates, `scan` and `fori_loop` let a step put Variables and objects
elsewhere, or new ones in their place, as long as the structure stays. A step then hands
on values by place; and after the loop the caller's objects are arranged as one step
arranged those that it was given (`Moved`).
"""

from typing import Any, NamedTuple

from jax.tree_util import register_static

from treetap._core.errors import StructureError
from treetap._core.settings import Mode
from treetap._core.trees.attributes import Node
from treetap._core.trees.flatten import Flattening
from treetap._core.trees.graphdef import ContainerSpec, ObjectSpec, VariableSpec
from treetap._core.variables.variable import Variable
from treetap._transforms.lift.lift import Inside
from treetap._transforms.lift.structure_updates import refuse_captured


@register_static
class Moved(NamedTuple):
    """What stands where after a step: pairs of a place and what was there before.

    Places are numbered as what stood there. What a step made has None.

    Attributes:
        leaves: Variables, by the numbers of leaves.
        nodes: Objects, by their numbers.
    """

    leaves: tuple[tuple[int, int | None], ...] = ()
    nodes: tuple[tuple[int, int | None], ...] = ()


class Carried:
    """A carried value as a step is given it.

    Args:
        inside: The traced side of the call.
        value: The carried value.
        may_move: Whether Variables may be in other places after the step.
    """

    def __init__(self, inside: Inside, value: Any, may_move: bool):
        self.inside, self.name = inside, inside.name
        self.may_move = may_move and inside.lift.mode is Mode.UPDATES
        self.definition, self.leaves, self.members = self._described(value)

    def _described(self, value: Any) -> tuple[Any, list[Any], list[Any]]:
        walk = Flattening(value, True, self.name, states=False)
        return walk.definition({"carry": value}), walk.leaves, walk.members

    def after(self, out: Any, is_strict: bool = False) -> tuple[list[Any], Moved]:
        """The leaves of what a step returned, in order, and what stands where.

        Args:
            out: What the step returned.
            is_strict: Whether static attributes and metadata must be the same.
        """
        found, new, members = self._described(out)
        moved = [(x, y) for x, y in zip(self.members, members) if x is not y]
        if not self.may_move:
            if len(new) == len(self.leaves):
                self._check_identity(new)
            moved = []
        exact = is_strict or moved
        before, after = (
            definition.spec if exact else _data(definition.spec)
            for definition in (self.definition, found)
        )
        if before != after:
            raise StructureError(
                f"{self.name}: the carry changed its structure from\n{self.definition}"
                f"\nto\n{found}\nReturn a value like the one you were given."
            )
        return new, self._moved(moved) if moved else Moved()

    def _check_identity(self, new: list[Any]) -> None:
        """Refuses Variables that are not those the step was given, in their places."""
        for one, two in zip(self.leaves, new):
            has_variable = isinstance(one, Variable) or isinstance(two, Variable)
            if has_variable and one is not two:
                kind = type(one if isinstance(one, Variable) else two).__name__
                raise StructureError(
                    f"{self.name} Variable identity must be preserved across "
                    f"iterations (Carry references must be the same between "
                    f"iterations): a {kind} of the carry came back as another one, or "
                    "in another place. Change Variables in place, and return the value "
                    "you were given."
                )

    def _moved(self, pairs: list[tuple[Any, Any]]) -> Moved:
        """Objects and Variables with what stands in their place now, by number."""
        structure = self.inside.structure
        assert structure is not None
        leaves = {id(x): n for n, x in enumerate(self.inside.leaves)}
        nodes = {id(x): n for n, x in structure.nodes.items()}
        news = [y for _, y in pairs if id(y) not in leaves and id(y) not in nodes]
        refuse_captured(news, self.name)

        def numbered(kind: type, numbers: dict[int, int]) -> Any:
            return tuple(
                (numbers[id(x)], numbers.get(id(y)))
                for x, y in pairs
                if isinstance(x, kind)
            )

        return Moved(numbered(Variable, leaves), numbered(Node, nodes))


def written_at(
    changed: dict[int, Any], moved: Moved
) -> tuple[list[int], tuple[tuple[int, Any], ...]]:
    """The caller's Variables to write after a loop.

    Args:
        changed: Those that a step changed, by number, and their metadata.
        moved: What stands where after a step.

    Returns:
        The place that each one's value is at, and for `Written` each one's number and
        metadata. A Variable that stands nowhere any more is left as it is.
    """
    gone = {place for place, _ in moved.leaves}
    place_of = {number: number for number in changed if number not in gone}
    place_of |= {n: place for place, n in moved.leaves if n is not None}
    return [*place_of.values()], tuple((n, changed.get(n)) for n in place_of)


def _data(spec: Any) -> Any:
    """A description without static attributes and metadata."""
    if isinstance(spec, ObjectSpec):
        return spec.number, spec.type, spec.keys, tuple(map(_data, spec.children))
    if isinstance(spec, VariableSpec):
        return spec.number, spec.type
    if isinstance(spec, ContainerSpec):
        return spec._replace(children=tuple(map(_data, spec.children)))
    return spec
