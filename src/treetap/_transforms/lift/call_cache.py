# SPDX-License-Identifier: Apache-2.0
"""The call cache: what a compiled function keeps of a call, to make the next one cheap.

**The idea.** The first call with arguments of some structure goes the long way: the
arguments are walked, described and checked in Python. It leaves a `CachedCall`, and
there are two shorter ways from then on:

* `CachedCall.__call__`, with other objects of the same structure. JAX takes them apart
  along a treedef whose leaves are the Variables, in C. That proves types, names, static
  values and containers to be the same. Kinds, metadata and identities of the Variables
  are compared after that.
* `CachedCall.again`, with the objects that were verified before. It is enough that each
  still has the very children it had.

**The invariant.** A short way runs the program only if the long way would have found
the same description and the same leaves, in the same order, with nothing shared. What
was not looked at in this call is not trusted. Whatever does not fit is
`NOT_APPLICABLE`, and the next longer way is tried; nothing has been written by then.

**Why it is sound.** An object caches the tuple of its children, and drops it when one
of its attributes is set or removed; so an object that has the very tuple it had has the
children it had. `last_change` is a token that is replaced whenever metadata of any
Variable are, or an object that JAX has seen gets other children. While it stands,
nothing of the kind has happened anywhere, and not even the tuples need to be compared.
Lists and dicts tell nobody when they change. So those that stand in attributes are
looked at in each call, in C, item by item; and so is what static values hold that could
change in place (`static_values.Watch`).

The values may be kept from call to call, too: see `VerifiedArguments.write`.

Variables and objects are held only as long as the outermost objects live, to which
there are weak references.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any

import jax
from jax.tree_util import all_leaves

from treetap._core.bounded_cache import BoundedCache
from treetap._core.static_values import Watch
from treetap._core.trace_level import EAGER, current_trace
from treetap._core.trees.attributes import Node, is_object
from treetap._core.trees.graphdef import has_shared
from treetap._core.trees.layout import Getter, getter
from treetap._core.trees.pytree import attributes_of, look_behind, watched_of
from treetap._core.trees.split import is_variable
from treetap._core.trees.traverse import nodes_below
from treetap._core.variables.change_marks import last_change, last_values
from treetap._core.variables.metadata import ExactMetadata
from treetap._core.variables.variable import (
    get_metadata,
    get_trace,
    set_box,
)
from treetap._transforms.lift.lift import Inputs, Written, check_traces

MAX_VERIFIED = 16  # sets of objects that a cached call remembers
MAX_PACKED_PROGRAMS = 16  # of a cached call, one for each layout of packs
MAX_MISFITS = 8  # calls that could not be packed, before it is tried no more
NOT_APPLICABLE = object()  # in place of a result: these arguments need a longer way
END = object()  # after the attributes of all objects, where they are compared
# What JAX raises for a tree of another structure.
OTHER_TREE = (ValueError, TypeError, KeyError)

_read_flat = attrgetter("_pytree__flat")


def _are_different(items: Sequence[Any]) -> bool:
    return len(set(map(id, items))) == len(items)


def _containers(child: Any) -> list[Any]:
    """Ways to look at lists and dicts in a child that is no object of ours."""
    if is_object(child) or all_leaves((child,)):
        return []
    leaves, treedef = jax.tree.flatten(child, is_leaf=is_object)
    return [(treedef.flatten_up_to, child, leaves)]


@dataclass(slots=True, eq=False)
class VerifiedArguments:
    """Arguments that were found to be right, and how to see that they still are.

    Attributes:
        variables: Their Variables.
        metadata: The metadata of those.
        plain: Their other leaves.
        trace: The trace level of the Variables; None if they differ.
        change: The last change anywhere, when all this was looked at.
        roots: The outermost objects: their number, a weak reference, their children.
            Empty if they are not kept for the next call.
        nodes: The objects below them.
        flats: The children and structure each of those had.
        containers: Ways to read the lists and dicts in it all, and what was in them.
        watches: What else could change unseen.
        attributes: Views of what the attributes of the objects are, and an end.
        held: What those were, one after the other, and the same end: so that one more
            or one less shows, too.
        written: By the number of a note: the Variables to write, and their places.
        packed: A way to call with packed values; False if there is none.
        misfits: How often that way was not applicable.
    """

    variables: Sequence[Any]
    metadata: Sequence[Any]
    plain: list[Any]
    trace: Any
    change: object
    roots: list[tuple[int, Any, Any]] = field(default_factory=list)
    nodes: list[Any] = field(default_factory=list)
    flats: list[Any] = field(default_factory=list)
    containers: list[Any] = field(default_factory=list)
    watches: list[Watch] = field(default_factory=list)
    attributes: list[Iterable[Any]] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)
    written: dict[int, Any] = field(default_factory=dict)
    packed: Any = None
    misfits: int = 0

    def look_into(self, root: Any, nodes: Sequence[Any]) -> bool:
        """Notes what is inside an outermost object, if it tells when it changes.

        Args:
            root: The object.
            nodes: All objects below it, and it.
        """
        for node in nodes:
            if not type(node)._pytree__cached:
                return False
            attributes = attributes_of(node).values()
            self.attributes.append(attributes)
            self.held += attributes
            flat = _read_flat(node)
            if watched := watched_of(node):
                self.watches.append(watched[1])
            if node is not root:
                self.nodes.append(node)
                self.flats.append(flat)
            self.containers += chain.from_iterable(map(_containers, flat[0]))
        return True

    def hold(self, outermost: Sequence[Any]) -> bool:
        """Whether the outermost objects are the same, and what is in them too."""
        for number, ref, _ in self.roots:
            if ref() is not outermost[number]:
                return False
        change = last_change[0]
        if self.change is not change:
            if not self._are_unchanged(outermost):
                return False
            self.change = change
        for read, container, before in self.containers:
            try:
                if not all(map(is_, read(container), before)):
                    return False
            except OTHER_TREE:
                return False
        attributes = chain.from_iterable(self.attributes)
        if not all(map(is_, attributes, self.held)):  # behind somebody's `__setattr__`
            for node in [outermost[number] for number, *_ in self.roots] + self.nodes:
                look_behind(node)
            return False
        return not self.watches or all(map(Watch.holds, self.watches))

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

        A training loop calls with the same Variables again, and nobody else writes in
        between. So the list of all their values is left in `last_values`, from where
        `values` takes it away before the next program runs. Every other write into a
        Variable puts None there, before and after it writes. If there is something by
        the time the values are to be kept, somebody wrote while the program ran, and
        nothing is kept; so a list that is found there is right.

        Args:
            written: The Variables it has changed.
            places: Where these are among all; None if all are, in order.
            news: Their values.
            values: The values of all Variables before.
        """
        trace = current_trace()
        if self.trace is not trace:
            check_traces(written, trace)
        new = news[0] if len(news) == 1 else list(chain.from_iterable(news))
        deque(map(set_box, written, zip(new)), 0)  # one call: all or nothing
        if places is None:
            values = new
        else:
            for place, value in zip(places, new):
                values[place] = value
        kept = self, values
        may_keep = self.roots and trace is EAGER
        if not may_keep or last_values.setdefault(None, kept) is not kept:
            last_values[None] = None  # somebody else wrote, or it is not to be kept

    def _are_unchanged(self, outermost: Sequence[Any]) -> bool:
        """Whether objects have the children they had, and Variables their metadata."""
        return (
            all(_read_flat(outermost[number]) is flat for number, _, flat in self.roots)
            and all(map(is_, map(_read_flat, self.nodes), self.flats))
            and all(map(is_, map(get_metadata, self.variables), self.metadata))
        )


class CachedCall:
    """How to take apart arguments of one structure, and what program to call.

    The outermost things in the arguments are objects, and leaves that stand in no
    object. The former are found again by identity. The latter are other ones in each
    call, such as a batch, and are put where they belong among the plain leaves.

    Args:
        tree: Arguments of that structure.
        inputs: The same, taken apart.
        program: The program.
        make_packed: Makes calls with packed values; None if none are wanted.
    """

    def __init__(self, tree: Any, inputs: Inputs, program: Any, make_packed: Any):
        leaves = inputs.leaves
        self._lift = inputs.lift
        self.program = program
        self.make_packed: Callable[..., Any] | None = make_packed
        own = [n for n, leaf in enumerate(leaves) if is_variable(leaf)]
        self._flatten = jax.tree.structure(tree, is_leaf=is_variable).flatten_up_to
        # The numbers of the leaves that are Variables, and their places among those.
        self.own = {number: place for place, number in enumerate(own)}
        self._pick: Getter = getter(own)
        self._pick_plain = getter([n for n in range(len(leaves)) if n not in self.own])
        variables = self._pick(leaves)
        self._kinds = tuple(map(type, variables))
        self._metadata = tuple(map(get_metadata, variables))
        # By the identity of the first outermost object; read without a lock.
        self._verified = BoundedCache[int, VerifiedArguments](MAX_VERIFIED)
        # By the number of a note: what takes the Variables that are written out of all,
        # and their places; None if there is more to write than values.
        self._write_backs: dict[int, tuple[Getter, Any] | None] = {}
        self.packed_programs: BoundedCache[Any, Any] = BoundedCache(MAX_PACKED_PROGRAMS)
        self._see_outermost(tree)

    def _see_outermost(self, tree: Any) -> None:
        """Notes where the outermost objects and the leaves beside them are."""
        outermost, treedef = jax.tree.flatten(tree, is_leaf=is_object)
        self._outermost = treedef.flatten_up_to
        args, kwargs = tree
        # Whether the positional arguments are just those, so that none must be opened.
        is_flat = len(args) == len(outermost) and all(map(is_, args, outermost))
        self._count = len(args) if is_flat and not kwargs else -1
        self._roots = [n for n, x in enumerate(outermost) if isinstance(x, Node)]
        # Nothing would tell when a Variable by itself is no longer used.
        can_hold = self._roots and not any(map(is_variable, outermost))
        self._first = self._roots[0] if can_hold else -1
        self._inner: list[int] = []  # plain leaves inside objects
        # Plain leaves by themselves: (place among plain leaves, among the outermost).
        self._given: list[tuple[int, int]] = []
        place = 0
        for number, part in enumerate(outermost):
            below = jax.tree.leaves(part, is_leaf=is_variable)
            places = range(place, place + sum(not is_variable(x) for x in below))
            if isinstance(part, Node):
                self._inner += places
            else:
                self._given += [(each, number) for each in places]
            place = places.stop

    def again(self, args: Any, kwargs: Any, run: Callable[..., Any]) -> Any:
        """Calls a program with objects it was called with before, and writes back.

        Args:
            args: The arguments.
            kwargs: The keyword arguments.
            run: The program, or a compiled stage of it.

        Returns:
            The result; `NOT_APPLICABLE` if they are others or have changed.
        """
        if self._first < 0:
            return NOT_APPLICABLE
        outermost = args
        if kwargs or len(args) != self._count:
            try:
                outermost = self._outermost((args, kwargs))
            except OTHER_TREE:
                return NOT_APPLICABLE
        verified = self._verified.peek(id(outermost[self._first]))
        if verified is None or not verified.hold(outermost):
            return NOT_APPLICABLE
        plain = verified.plain
        if self._given:
            plain = [*plain]
            for place, number in self._given:
                plain[place] = outermost[number]
            if not all_leaves(plain):
                return NOT_APPLICABLE
        if self.make_packed is not None and run is self.program.run:
            out = self._call_packed(verified, outermost, plain)
            if out is not NOT_APPLICABLE:
                return out
        return self._call((args, kwargs), verified, plain, run)

    def _call(
        self, tree: Any, verified: VerifiedArguments, plain: Any, run: Any
    ) -> Any:
        """Calls a program with verified arguments, and writes back."""
        values = verified.values()
        news, out, note = run(*self.program.parted(values, plain))
        written = verified.written.get(len(note))
        if written is None:
            back = self._write_back(len(note))
            if back is None:
                updates = self.program.updates(news, note)
                return self._lift.inputs(*tree).finish(out, updates)
            pick, places = back
            written = verified.written[len(note)] = pick(verified.variables), places
        verified.write(written[0], written[1], news, values)
        return out

    def __call__(self, tree: Any, run: Callable[..., Any]) -> Any:
        """Calls a program with any arguments of this structure; as `again`."""
        out = self.again(tree[0], tree[1], run)
        if out is not NOT_APPLICABLE:
            return out
        change = last_change[0]
        outermost = jax.tree.leaves(tree, is_leaf=is_object)
        roots = [outermost[number] for number in self._roots]
        below = [[x for _, x in nodes_below(root, Node, True, "jit")] for root in roots]
        if any(list(map(look_behind, chain.from_iterable(below)))):
            return NOT_APPLICABLE
        try:
            leaves = self._flatten(tree)
        except OTHER_TREE:
            return NOT_APPLICABLE
        variables, plain = self._pick(leaves), [*self._pick_plain(leaves)]
        if not self._fit(variables, plain) or not all_leaves(plain):
            return NOT_APPLICABLE
        found = [*zip(self._roots, roots, below)]
        verified = self._verify(found, variables, plain, change)
        return self._call(tree, verified, plain, run)

    def _call_packed(
        self, verified: VerifiedArguments, outermost: Sequence[Any], plain: Any
    ) -> Any:
        """A call in which small Variables travel packed, if they can."""
        if verified.packed is None and self.make_packed is not None:
            roots = [outermost[number] for number in self._roots]
            verified.packed = self.make_packed(self, verified, roots) or False
        if not verified.packed:
            return NOT_APPLICABLE
        out = verified.packed(plain)
        if out is NOT_APPLICABLE:  # packed anew next time, if that is any good
            verified.misfits += 1
            verified.packed = None if verified.misfits < MAX_MISFITS else False
        return out

    def _write_back(self, number: int) -> tuple[Getter, Any] | None:
        """How to write back what a program says, in a note, that it has written."""
        if number not in self._write_backs:
            written: Written = self.program.written[number]
            pairs = chain.from_iterable(written.groups)
            places = [self.own[each] for each, _ in pairs]
            is_all = places == list(range(len(self.own)))
            back = getter(places), None if is_all else places
            self._write_backs[number] = back if written.has_values_only else None
        return self._write_backs[number]

    def _fit(self, variables: Sequence[Any], plain: Sequence[Any]) -> bool:
        """Whether kinds and metadata are the same, and nothing stands twice.

        An object without Variables that stands twice is told by its other leaves.
        """
        return (
            tuple(map(type, variables)) == self._kinds
            and _are_different(variables)
            and tuple(map(get_metadata, variables)) == self._metadata
            and self._are_unshared(plain)
        )

    def _are_unshared(self, plain: Sequence[Any]) -> bool:
        return _are_different([plain[place] for place in self._inner])

    def _verify(
        self, found: Sequence[Any], variables: Any, plain: Any, change: object
    ) -> VerifiedArguments:
        """Arguments that fit, kept for the next call while the outermost ones live.

        Args:
            found: The outermost objects: number, object, and all objects below it.
            variables: The Variables.
            plain: The other leaves.
            change: The last change anywhere, before all this was looked at.
        """
        trace = current_trace()
        is_one_level = all(map(is_, map(get_trace, variables), repeat(trace)))
        metadata = list(map(get_metadata, variables))
        level = trace if is_one_level else None
        verified = VerifiedArguments(variables, metadata, [*plain], level, change)
        if self._first < 0:
            return verified
        looked = [verified.look_into(root, nodes) for _, root, nodes in found]
        if not all(looked) or last_change[0] is not change:
            return verified
        verified.attributes.append((END,))
        verified.held.append(END)
        key, cache = id(found[0][1]), self._verified
        values = last_values  # the room itself may be gone when Python ends

        def forget(_: Any) -> None:
            cache.discard(key)
            values[None] = None

        for number, root, _ in found:
            kept = number, weakref.ref(root, forget), _read_flat(root)
            verified.roots.append(kept)
        changeable = (x for x in metadata if type(x) is ExactMetadata and x.can_change)
        verified.watches += [each.snapshot.watch for each in changeable]
        for place, _ in self._given:
            verified.plain[place] = None  # given anew by each call
        cache.discard(key)
        cache.add(key, verified)
        return verified

    @classmethod
    def of(
        cls, tree: Any, inputs: Inputs, program: Any, make_packed: Any
    ) -> "CachedCall | None":
        """For arguments that went the long way; None if there can be none.

        Shared parts are only found on the long way. So where they are allowed, calls
        are cached only if there are none, and none could appear without a Variable that
        stands twice.
        """
        if inputs.definition.graph and not _is_open_tree(tree, inputs):
            return None
        leaves = jax.tree.leaves(tree, is_leaf=is_variable)
        is_same = len(leaves) == len(inputs.leaves)
        if not (is_same and all(map(is_, leaves, inputs.leaves))):
            return None
        cached = cls(tree, inputs, program, make_packed)
        return cached if cached._are_unshared(cached._pick_plain(leaves)) else None


def _is_open_tree(tree: Any, inputs: Inputs) -> bool:
    """Whether nothing is shared, and every object has a Variable of its own below."""
    if has_shared(inputs.definition.spec):
        return False
    nodes = nodes_below(tree, Node, True, inputs.name)
    return all(
        any(map(is_variable, jax.tree.leaves(node, is_leaf=is_variable)))
        for _, node in nodes
    )
