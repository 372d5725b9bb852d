# SPDX-License-Identifier: Apache-2.0
"""Calling again: what a compiled function keeps of a call, to make the next one cheap.

The first call with arguments of some structure goes the long way: they are walked,
described and checked in Python. It leaves a `Recipe`, by which later calls go:

* With other objects of the same structure, JAX walks them along a treedef whose leaves
  are the Variables, in C. That proves types, names, static values and containers to be
  the same; kinds, metadata and identities of the Variables are compared after that.
* With the same objects as before, it is enough that each still has the very children
  it had: an object drops the tuple of them when anything about it is changed. What is
  in lists and dicts is looked at again, in C.

What does not fit goes the long way. Nothing is trusted that was not looked at. A recipe
holds on to Variables and objects only as long as the outermost ones live.
"""

import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_, is_not
from typing import Any, NamedTuple

import jax
from jax.tree_util import all_leaves

from treetap._core.trace_level import EAGER, current_trace, refuse_foreign_variable
from treetap._core.trees.attributes import Node, is_object
from treetap._core.trees.graphdef import has_shared
from treetap._core.trees.layout import getter
from treetap._core.trees.traverse import nodes_below
from treetap._core.variables.change_marks import last_change, last_values
from treetap._core.variables.variable import (
    Variable,
    get_metadata,
    get_trace,
    set_box,
    write_boxes,
)
from treetap._transforms.lift.lift import Inputs, Updates, Written

MAX_KNOWN = 16  # sets of objects that a recipe remembers
MAX_MISFITS = 8  # calls that could not be packed, before it is tried no more
MISFIT = object()  # arguments are not of a recipe's structure

_read_flat = attrgetter("_pytree__flat")


def _is_variable(value: Any) -> bool:
    return isinstance(value, Variable)


def _are_different(items: Sequence[Any]) -> bool:
    return len(set(map(id, items))) == len(items)


class Held(NamedTuple):
    """What is inside outermost objects, and must still be.

    Attributes:
        nodes: The objects below them.
        flats: The children and structure each of those had.
        containers: Ways to read the lists and dicts in it, and what was in them.
    """

    nodes: list[Any]
    flats: list[Any]
    containers: list[tuple[Callable[[Any], list[Any]], Any, list[Any]]]


def held_by(roots: Sequence[Any]) -> Held | None:
    """What is inside objects; None if it cannot be told whether it changes."""
    held = Held([], [], [])
    for root in roots:
        for _, node in nodes_below(root, Node, True, "jit"):
            if not type(node)._pytree__cached:
                return None
            flat = _read_flat(node)
            if node is not root:
                held.nodes.append(node)
                held.flats.append(flat)
            held.containers.extend(chain.from_iterable(map(_containers, flat[0])))
    return held


def _containers(child: Any) -> list[Any]:
    """Ways to look at lists and dicts in a child that is no object of ours."""
    if is_object(child) or all_leaves((child,)):
        return []
    leaves, treedef = jax.tree.flatten(child, is_leaf=is_object)
    return [(treedef.flatten_up_to, child, leaves)]


class Known:
    """Objects that were found to be right.

    Args:
        variables: Their Variables.
        plain: Their other leaves.
        trace: The trace level of the Variables; None if they differ.
        roots: The outermost objects: number among the tops, weak reference, children.
        held: What is below them.
        change: The last change anywhere, when all this was looked at.
    """

    __slots__ = (
        *("_change", "_held", "_metadata", "_roots", "misfits"),
        *("packed", "plain", "trace", "variables", "written"),
    )

    def __init__(  # noqa: PLR0917 - made in one place
        self,
        variables: Sequence[Any],
        plain: Sequence[Any],
        trace: Any,
        roots: list[tuple[int, Any, Any]],
        held: Held,
        change: object,
    ):
        self.variables = variables
        self.plain = plain
        self.trace = trace
        self.written: dict[int, Any] = {}  # Variables, by the number of a note
        self.packed: Any = None  # a way to call with packs; False if there is none
        self.misfits = 0
        self._metadata = list(map(get_metadata, variables))
        self._roots = roots
        self._held = held
        self._change = change

    def holds(self, tops: Sequence[Any]) -> bool:
        """Whether the outermost objects are the same, and what is in them too."""
        for number, ref, _ in self._roots:
            if ref() is not tops[number]:
                return False
        change = last_change[0]
        if self._change is not change:
            if not self._is_same(tops):
                return False
            self._change = change
        for read, container, before in self._held.containers:
            try:
                if not all(map(is_, read(container), before)):
                    return False
            except (ValueError, TypeError, KeyError):
                return False
        return True

    def values(self) -> list[Any]:
        """The values of the Variables: those the last call left, if all else rested."""
        kept = last_values.pop(None, None)
        if kept is not None and kept[0] is self:
            return kept[1]
        return [variable._box[0] for variable in self.variables]

    def write(
        self, written: Any, places: Sequence[int] | None, news: Any, values: list[Any]
    ) -> None:
        """Writes what a program returned, and keeps values for the next call.

        Args:
            written: The Variables it has changed.
            places: Where these are among all; None if all are, in order.
            news: Their values.
            values: The values of all Variables before.
        """
        trace = current_trace()
        if self.trace is not trace:
            _check_traces(written, trace)
        new = news[0] if len(news) == 1 else list(chain.from_iterable(news))
        deque(map(set_box, written, zip(new)), 0)  # one call: all or nothing
        if places is None:
            values = new
        else:
            for place, value in zip(places, new):
                values[place] = value
        kept = self, values
        if trace is not EAGER or last_values.setdefault(None, kept) is not kept:
            last_values[None] = None  # somebody else wrote, or it is not to be kept

    def _is_same(self, tops: Sequence[Any]) -> bool:
        """Whether objects have the children they had, and Variables their metadata."""
        nodes, flats, _ = self._held
        return (
            all(_read_flat(tops[number]) is flat for number, _, flat in self._roots)
            and all(map(is_, map(_read_flat, nodes), flats))
            and all(map(is_, map(get_metadata, self.variables), self._metadata))
        )


class Plan:
    """How to write back what a program says it has written.

    Attributes:
        is_simple: Whether values are all there is to write.
        places: Which Variables are written; None if all are, in order.
        pick: Takes them out of all.
    """

    __slots__ = ("is_simple", "pick", "places")

    def __init__(self, written: Written, own: dict[int, int], metadata: Sequence[Any]):
        pairs = list(chain.from_iterable(written.lanes))
        self.is_simple = not written.grafts and not written.is_packed
        self.is_simple &= all(facts is metadata[own[number]] for number, facts in pairs)
        places = [own[number] for number, _ in pairs]
        self.places = None if places == list(range(len(own))) else places
        self.pick = getter(places)


class Left(NamedTuple):
    """What a program returned, where writing it back takes the long way."""

    out: Any
    updates: Updates


class Recipe:
    """How to take apart arguments of one structure, and what program to call.

    Args:
        tree: Arguments of that structure.
        leaves: Their leaves, Variables among them.
        program: The program.
        packer: Makes calls with packs, if they are wanted.
    """

    __slots__ = (
        *("_count", "_first", "_flatten", "_inner", "_kinds", "_known", "_metadata"),
        *("_own", "_pick", "_plain", "_plans", "_roots", "_tops", "_waits"),
        *("packed", "packer", "program"),
    )

    def __init__(
        self, tree: Any, leaves: Sequence[Any], program: Any, packer: Any = None
    ):
        self.program = program
        self.packer: Callable[..., Any] | None = packer
        self.packed: dict[Any, Any] = {}  # programs for packs, by their layouts
        own = [n for n, leaf in enumerate(leaves) if _is_variable(leaf)]
        self._flatten = jax.tree.structure(tree, is_leaf=_is_variable).flatten_up_to
        self._own = {number: place for place, number in enumerate(own)}
        self._pick = getter(own)
        self._plain = getter([n for n in range(len(leaves)) if n not in self._own])
        variables = self._pick(leaves)
        self._kinds = tuple(map(type, variables))
        self._metadata = tuple(map(get_metadata, variables))
        self._known: dict[int, Known] = {}
        self._plans: dict[int, Plan] = {}
        self._see_tops(tree)

    def _see_tops(self, tree: Any) -> None:
        """Notes where the outermost objects and the leaves beside them are."""
        tops, treedef = jax.tree.flatten(tree, is_leaf=is_object)
        self._tops = treedef.flatten_up_to
        args, kwargs = tree
        is_flat = not kwargs and len(args) == len(tops) and all(map(is_, args, tops))
        self._count = len(args) if is_flat else -1
        self._roots = [n for n, top in enumerate(tops) if isinstance(top, Node)]
        # Nothing would tell when a Variable by itself is no longer used.
        is_open = self._roots and not any(map(_is_variable, tops))
        self._first = self._roots[0] if is_open else -1
        inside: list[int] = []  # leaves of objects that are no Variables
        waits: list[tuple[int, int]] = []  # (place among the plain leaves, top)
        place = 0
        for number, top in enumerate(tops):
            below = jax.tree.leaves(top, is_leaf=_is_variable)
            plain = [leaf for leaf in below if not _is_variable(leaf)]
            places = range(place, place + len(plain))
            if isinstance(top, Node):
                inside += places
            else:
                waits += [(each, number) for each in places]
            place += len(plain)
        self._inner = inside
        self._waits = waits

    def again(self, args: Any, kwargs: Any, run: Callable[..., Any]) -> Any:
        """Calls a program with objects it was called with before, and writes back.

        Args:
            args: The arguments.
            kwargs: The keyword arguments.
            run: The program, or a compiled stage of it.

        Returns:
            The result; `MISFIT` if they are others or have changed; a `Left` if there
            is more to write than values.
        """
        if self._first < 0:
            return MISFIT
        tops = args
        if kwargs or len(args) != self._count:
            try:
                tops = self._tops((args, kwargs))
            except (ValueError, TypeError, KeyError):  # JAX's words for other trees
                return MISFIT
        known = self._known.get(id(tops[self._first]))
        if known is None or not known.holds(tops):
            return MISFIT
        plain = known.plain
        if self._waits:
            plain = [*plain]
            for place, number in self._waits:
                plain[place] = tops[number]
            if not all_leaves(plain):
                return MISFIT
        if self.packer is not None and run is self.program.run:
            out = self._with_packs(known, tops, plain)
            if out is not MISFIT:
                return out
        values = known.values()
        news, out, note = run(*self.program.parted(values, plain))
        written = known.written.get(len(note))
        if written is None:
            plan = self._planned(len(note))
            if not plan.is_simple:
                return Left(out, self.program.updates(news, note))
            written = known.written[len(note)] = plan.pick(known.variables), plan.places
        known.write(written[0], written[1], news, values)
        return out

    def __call__(self, tree: Any, run: Callable[..., Any]) -> Any:
        """Calls a program with any arguments of this structure; as `again`."""
        out = self.again(tree[0], tree[1], run)
        if out is not MISFIT:
            return out
        change = last_change[0]
        try:
            leaves = self._flatten(tree)
        except (ValueError, TypeError, KeyError):
            return MISFIT
        variables, plain = self._pick(leaves), [*self._plain(leaves)]
        if not self._fits(variables, plain) or not all_leaves(plain):
            return MISFIT
        values = [variable._box[0] for variable in variables]
        news, out, note = run(*self.program.parted(values, plain))
        plan = self._planned(len(note))
        if not plan.is_simple:
            return Left(out, self.program.updates(news, note))
        written = plan.pick(variables)
        _check_traces(written, current_trace())
        write_boxes(written, zip(chain.from_iterable(news)))
        self._remember(tree, variables, plain, change)
        return out

    def _with_packs(self, known: Known, tops: Sequence[Any], plain: Any) -> Any:
        """A call in which small Variables travel in packs; `MISFIT` if they cannot."""
        if known.packed is None and self.packer is not None:
            roots = [tops[number] for number in self._roots]
            known.packed = self.packer(self, known, roots) or False
        if not known.packed:
            return MISFIT
        out = known.packed(plain)
        if out is MISFIT:  # packed anew next time, if that is any good
            known.misfits += 1
            known.packed = None if known.misfits < MAX_MISFITS else False
        return out

    @property
    def numbers(self) -> Collection[int]:
        """The leaves that are Variables."""
        return self._own

    def by_number(self, variables: Sequence[Any]) -> dict[int, Any]:
        """The Variables of arguments by the number of the leaf."""
        return {number: variables[place] for number, place in self._own.items()}

    def has_metadata(self, number: int, metadata: Any) -> bool:
        """Whether the Variable that is this leaf comes out with the metadata it had."""
        return metadata is self._metadata[self._own[number]]

    def _planned(self, number: int) -> Plan:
        plan = self._plans.get(number)
        if plan is None:
            written = self.program.written[number]
            plan = self._plans[number] = Plan(written, self._own, self._metadata)
        return plan

    def _fits(self, variables: Sequence[Any], plain: Sequence[Any]) -> bool:
        """Whether kinds and metadata are the same, and nothing stands twice.

        An object without Variables that stands twice is told by its other leaves.
        """
        return (
            tuple(map(type, variables)) == self._kinds
            and _are_different(variables)
            and tuple(map(get_metadata, variables)) == self._metadata
            and _are_different([plain[place] for place in self._inner])
        )

    def _remember(self, tree: Any, variables: Any, plain: Any, change: object) -> None:
        """Keeps objects for the next call, while the outermost ones live."""
        if self._first < 0:
            return
        tops = self._tops(tree)
        held = held_by([tops[number] for number in self._roots])
        if held is None or last_change[0] is not change:
            return
        key, known = id(tops[self._first]), self._known
        values = last_values  # the room itself may be gone when Python ends

        def forget(_: Any) -> None:
            known.pop(key, None)
            values[None] = None

        roots = [
            (number, weakref.ref(tops[number], forget), _read_flat(tops[number]))
            for number in self._roots
        ]
        trace = current_trace()
        same = all(map(is_, map(get_trace, variables), repeat(trace)))
        kept = [*plain]
        for place, _ in self._waits:
            kept[place] = None  # given anew by each call
        if len(known) >= MAX_KNOWN:
            known.pop(list(known)[0], None)  # noqa: RUF015 - threads may change it
        level = trace if same else None
        known[key] = Known(variables, kept, level, roots, held, change)


def _check_traces(variables: Sequence[Variable[Any]], trace: Any) -> None:
    for variable in variables:
        if variable._trace is not trace:
            raise refuse_foreign_variable(type(variable).__name__)


def recipe_for(
    tree: Any, inputs: Inputs, program: Any, packer: Any = None
) -> Recipe | None:
    """A recipe for arguments that went the long way; None if there can be none.

    Shared parts are only found on the long way. So where they are allowed, there is a
    recipe only if there are none, and none could appear without a Variable that stands
    twice.
    """
    if inputs.definition.graph and not _is_open_tree(tree, inputs):
        return None
    leaves = jax.tree.leaves(tree, is_leaf=_is_variable)
    if len(leaves) != len(inputs.leaves) or any(map(is_not, leaves, inputs.leaves)):
        return None
    recipe = Recipe(tree, leaves, program, packer)
    plain = [leaf for leaf in leaves if not _is_variable(leaf)]
    return recipe if _are_different([plain[place] for place in recipe._inner]) else None


def _is_open_tree(tree: Any, inputs: Inputs) -> bool:
    """Whether nothing is shared, and every object has a Variable of its own below."""
    if has_shared(inputs.definition.spec):
        return False
    nodes = nodes_below(tree, Node, True, inputs.name)
    return all(
        any(map(_is_variable, jax.tree.leaves(node, is_leaf=_is_variable)))
        for _, node in nodes
    )
