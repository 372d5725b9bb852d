# SPDX-License-Identifier: Apache-2.0
"""What is differentiated: arguments by number, with graph updates by filter.

`grad` and `custom_vjp` both let a caller choose arguments, and both give what belongs
to an object as a State of it when structure may change. How the choice is written and
checked, and how such a State is made, stands here.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from treetap._core.errors import StructureError
from treetap._core.paths import Path
from treetap._core.settings import Mode
from treetap._core.trees.attributes import Node, is_object
from treetap._core.trees.filters import Filter
from treetap._core.trees.flatten import take_apart
from treetap._core.trees.state import State, flat_items, nested
from treetap._core.variables.variable import Variable
from treetap._transforms.lift.lift import Inputs, Lift
from treetap._transforms.lift.prefixes import PrefixFilter, spread


@dataclass(frozen=True)
class DiffState:
    """Differentiates, with graph updates, the Variables of an argument a filter takes.

    Attributes:
        argnum: The argument.
        filter: Which Variables.
    """

    argnum: int
    filter: Filter


def chosen_by(filter: Filter) -> PrefixFilter:
    """A prefix that chooses the Variables a filter takes, and what is in no object."""
    return PrefixFilter([(_is_outside, True), (filter, True), (..., False)])


def _is_outside(path: Path, leaf: Any) -> bool:
    return not path


def holds_objects(value: Any) -> bool:
    """Whether there is an object with attributes in a value."""
    leaves = jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, Node))
    return any(isinstance(x, Node) for x in leaves)


def check_numbers(argnums: Any, lift: Lift, argument: str) -> Any:
    """`argnums` as a tuple."""
    is_one = isinstance(argnums, int | DiffState)
    numbers: tuple[Any, ...] = (argnums,) if is_one else tuple(argnums)
    if lift.mode is not Mode.UPDATES and any(isinstance(x, DiffState) for x in numbers):
        raise StructureError(
            f"{lift.name}: `{argument}` cannot contain `DiffState` objects without "
            "graph updates. Split the argument by filter and differentiate one part, "
            "or use `graph=True, graph_updates=True`."
        )
    return numbers


def positions_of(
    argnums: Sequence[Any], count: int, name: str, argument: str
) -> list[int]:
    """The positions of the arguments that `argnums` names, each of them once.

    Args:
        argnums: Numbers, of which those below zero count from the end, or `DiffState`s.
        count: How many positional arguments were given.
        name: The transform.
        argument: The name of `argnums`, for messages.
    """
    given = [x.argnum if isinstance(x, DiffState) else x for x in argnums]
    if not all(-count <= number < count for number in given):
        raise StructureError(
            f"{name}: `{argument}` is {given}, but {count} positional arguments "
            "were given."
        )
    positions = [number % count for number in given]
    if len(set(positions)) != len(given):
        raise StructureError(
            f"{name}: `{argument}` {given} repeats an argument: it is repeated."
        )
    return positions


def active_leaves(inputs: Inputs, chosen: Sequence[Any], argument: str) -> list[bool]:
    """Whether each leaf of a call is differentiated.

    All ways to a shared Variable must lead through arguments that are, or through
    arguments that are not. If a filter decides, it sees the first way.

    Args:
        inputs: The arguments.
        chosen: For each positional argument a flag, or a filter from `chosen_by`.
        argument: The name of what chooses them, for messages.
    """

    def spread_over(flags: Iterable[Any], is_first: bool) -> list[bool]:
        tree = {inputs.lift.label: tuple(flags), "kwargs": False}
        return spread(tree, inputs.tree, inputs.name, argument, is_first)

    found = spread_over(map(bool, chosen), False)
    has_filters = any(isinstance(x, PrefixFilter) for x in chosen)
    return spread_over(chosen, True) if has_filters else found


def states_of(tree: Any, kept: Container[int] | None = None) -> Any:
    """A tree in which each object is replaced by the State of its Variables.

    A Variable that is shared stands in the first place only; in others there is an
    empty State.

    Args:
        tree: The tree.
        kept: Which leaves to keep, by identity; all Variables by default.
    """
    met = set[int]()

    def is_wanted(leaf: Any) -> bool:
        is_variable = isinstance(leaf, Variable)
        is_again = is_variable and id(leaf) in met
        met.add(id(leaf))
        return not is_again and (is_variable if kept is None else id(leaf) in kept)

    def state_of(value: Any) -> Any:
        if isinstance(value, Node):
            _, state = take_apart(value, True, "grad")
            pairs = flat_items(state)
            return State(nested(pair for pair in pairs if is_wanted(pair[1])))
        is_again = isinstance(value, Variable) and id(value) in met
        met.add(id(value))
        return State({}) if is_again else value

    return jax.tree.map(state_of, tree, is_leaf=is_object)
