# SPDX-License-Identifier: Apache-2.0
"""Update contexts: split outside, merge inside, split inside, merge outside.

NNX's way to write one's own transform with graph updates. Within one context the second
merge gives back the caller's own objects, filled with what became of them:

    with update_context("mine"):
        with split_context("mine") as ctx:      # outside
            graphdef, state = ctx.split(model)
        with merge_context("mine") as ctx:      # inside
            model_inside = ctx.merge(graphdef, state)
        ...
        with split_context("mine") as ctx:      # inside
            graphdef, state = ctx.split(model_inside)
        with merge_context("mine") as ctx:      # outside: `model` itself
            ctx.merge(graphdef, state)

What the last merge needs is in the GraphDef, so the inside may be a compiled program
that was traced before.
"""

import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
from jax.tree_util import register_dataclass, register_static

from treetap._core.errors import StructureError
from treetap._core.paths import Path, plain_key
from treetap._core.trees.attributes import is_object
from treetap._core.trees.build import put_together
from treetap._core.trees.filters import Filter
from treetap._core.trees.flatten import Flattening
from treetap._core.trees.graphdef import GraphDef
from treetap._core.trees.state import merge_state, state_groups
from treetap._core.variables.metadata import MISSING
from treetap._transforms.lift.prefixes import is_entry, spread


@register_static
@dataclass(slots=True, repr=False)
class LinkedDef(GraphDef):
    """A GraphDef that knows which of its objects came from outside, by number."""

    origins: tuple[tuple[int, int], ...] = ()

    __hash__ = GraphDef.__hash__

    def __reduce__(self) -> Any:
        return LinkedDef, (self.spec, self.num_leaves, self.graph, self.origins)


class UpdateContext:
    """The objects of one update context: the caller's, and those inside."""

    def __init__(self, tag: Hashable):
        self.tag = tag
        self.outside: list[Any] = []  # by number
        # Made inside: the number outside, by `id`; the weak reference shows whether the
        # object is still the same.
        self.inside: dict[int, tuple[Any, int]] = {}

    def number_inside(self, member: Any) -> int | None:
        """The number outside of an object inside; None for a new one."""
        found, number = self.inside.get(id(member), (lambda: None, None))
        return number if found() is member else None


class SplitContext:
    """Splits objects in one numbering; see `split_context`."""

    def __init__(self, context: UpdateContext):
        self._context = context
        self._walk = Flattening(None, True, "split_context")

    def split(self, node: Any, *filters: Filter) -> Any:
        """As `treetap.split`; an object split before in this block is a reference."""
        walk, context = self._walk, self._context
        met = len(walk.members)
        graphdef, found = walk.apart(node)
        if context.inside:
            known = enumerate(map(context.number_inside, walk.members[met:]), met)
            origins = tuple((here, n) for here, n in known if n is not None)
            facts = graphdef.spec, graphdef.num_leaves, graphdef.graph
            graphdef = LinkedDef(*facts, origins)
        elif context.outside and context.outside is not walk.members:
            raise StructureError(
                f"split_context: objects were split under {context.tag!r} in another "
                "block, with numbers of its own. Split all of them in one block."
            )
        else:
            context.outside = walk.members
        return graphdef, *state_groups(found, filters, "split_context")


class MergeContext:
    """Merges what was split in one block; see `merge_context`."""

    def __init__(self, context: UpdateContext):
        self._context = context
        self._made: dict[int, Any] = {}

    def merge(self, graphdef: GraphDef, state: Any, /, *states: Any) -> Any:
        """As `treetap.merge`; outside, the caller's own objects are filled."""
        context, made = self._context, self._made
        whole = merge_state(state, *states) if states else state
        if not isinstance(graphdef, LinkedDef):  # it comes from outside
            node = put_together(graphdef, whole, "merge_context", made=made)
            context.inside |= {id(x): (weakref.ref(x), n) for n, x in made.items()}
            return node
        outside = dict(enumerate(context.outside))
        owners = {n: outside[o] for n, o in graphdef.origins if o in outside}
        return put_together(graphdef, whole, "merge_context", made=made, owners=owners)


_contexts: ContextVar[tuple[UpdateContext, ...]] = ContextVar("contexts", default=())


@contextmanager
def update_context(tag: Hashable) -> Iterator[UpdateContext]:
    """Opens a context in which splits and merges belong together; also a decorator."""
    context = UpdateContext(tag)
    token = _contexts.set((*_contexts.get(), context))
    try:
        yield context
    finally:
        _contexts.reset(token)


def current_update_context(tag: Hashable) -> UpdateContext:
    """The innermost context with a tag."""
    for context in reversed(_contexts.get()):
        if context.tag == tag:
            return context
    open_tags = [context.tag for context in _contexts.get()]
    raise StructureError(
        f"No update context is open for the tag {tag!r}; open are {open_tags}. Open it "
        f"with `with update_context({tag!r}):`."
    )


def _context_of(tag: Hashable | None) -> UpdateContext:
    """The context that is open for a tag; without a tag, one of its own."""
    return UpdateContext(None) if tag is None else current_update_context(tag)


@contextmanager
def split_context(ctxtag: Hashable | None = None) -> Iterator[SplitContext]:
    """A block in which objects are split in one numbering."""
    yield SplitContext(_context_of(ctxtag))


@contextmanager
def merge_context(
    ctxtag: Hashable | None = None, inner: bool | None = None
) -> Iterator[MergeContext]:
    """A block in which split objects are merged.

    Args:
        ctxtag: The tag of the update context.
        inner: Accepted for NNX; the GraphDef tells.
    """
    del inner
    yield MergeContext(_context_of(ctxtag))


@register_dataclass
@dataclass(frozen=True)
class NodeStates:
    """An object in a tree made by `to_tree`: its GraphDef, States and metadata.

    As a prefix, `states` are the prefixes of the States.
    """

    graphdef: Any
    states: tuple[Any, ...]
    metadata: Any = field(default=None, metadata={"static": True})

    @property
    def state(self) -> Any:
        """The only State."""
        if len(self.states) != 1:
            raise StructureError(
                f"NodeStates has {len(self.states)} states, not one. Use `states`."
            )
        return self.states[0]

    @classmethod
    def from_split(
        cls, graphdef: GraphDef, state: Any, /, *states: Any, metadata: Any = None
    ) -> "NodeStates":
        """From what `split` gives."""
        return cls(graphdef, (state, *states), metadata)

    @classmethod
    def from_states(cls, state: Any, /, *states: Any) -> "NodeStates":
        """From States alone."""
        return cls(None, (state, *states))

    @classmethod
    def from_prefixes(cls, prefixes: Any, /, *, metadata: Any = None) -> "NodeStates":
        """A prefix for an object that is split into as many States."""
        return cls(None, tuple(prefixes), metadata)


def _split_whole(ctx: SplitContext, path: Path, prefix: Any, leaf: Any) -> Any:
    return NodeStates.from_split(*ctx.split(leaf))


def _merge_whole(ctx: MergeContext, path: Path, prefix: Any, leaf: Any) -> Any:
    return ctx.merge(leaf.graphdef, *leaf.states)


def _visited(
    tree: Any,
    prefix: Any,
    is_leaf: Callable[[Any], bool],
    wanted: Callable[[Any], bool] | None,
    visit: Callable[..., Any],
) -> Any:
    """A tree with the leaves that are wanted replaced by `visit(path, prefix, leaf)`.

    Args:
        tree: The tree.
        prefix: A prefix of it, or MISSING.
        is_leaf: Where to stop.
        wanted: Which leaves to replace; None for all.
        visit: Makes what takes their place.
    """

    def below(path: Any, entry: Any, part: Any) -> Any:
        def one(inner: Any, leaf: Any) -> Any:
            if wanted is not None and not wanted(leaf):
                return leaf
            return visit(tuple(map(plain_key, (*path, *inner))), entry, leaf)

        return jax.tree_util.tree_map_with_path(one, part, is_leaf=is_leaf)

    entries = None if prefix is MISSING else prefix  # None is one for the whole tree
    return jax.tree_util.tree_map_with_path(
        below, entries, tree, is_leaf=lambda x: is_entry(x) or is_tree_node(x)
    )


def to_tree(
    tree: Any,
    /,
    *,
    prefix: Any = MISSING,
    split_fn: Callable[[SplitContext, Path, Any, Any], Any] = _split_whole,
    map_non_graph_nodes: bool = False,
    ctxtag: Hashable | None = None,
    check_aliasing: bool = True,
) -> Any:
    """Replaces the objects in a tree by pure trees, in one numbering.

    Args:
        tree: Any tree of objects and arrays.
        prefix: A prefix of the tree, handed to `split_fn`.
        split_fn: From the context, path, prefix and object to what takes its place.
        map_non_graph_nodes: Call `split_fn` for other leaves, too.
        ctxtag: The tag of an update context.
        check_aliasing: Refuse a Variable that is reached with different prefixes.
    """
    if prefix is not MISSING and check_aliasing:
        spread(prefix, tree, "to_tree", "prefix")
    wanted = None if map_non_graph_nodes else is_object
    with split_context(ctxtag) as ctx:
        return _visited(tree, prefix, is_object, wanted, partial(split_fn, ctx))


def is_tree_node(value: Any) -> bool:
    """Whether a value stands for an object."""
    return isinstance(value, NodeStates)


def from_tree(
    tree: Any,
    /,
    *,
    prefix: Any = MISSING,
    merge_fn: Callable[[MergeContext, Path, Any, Any], Any] = _merge_whole,
    is_node_leaf: Callable[[Any], bool] = is_tree_node,
    is_leaf: Callable[[Any], bool] = is_tree_node,
    map_non_graph_nodes: bool = False,
    is_inner: bool | None = None,
    ctxtag: Hashable | None = None,
) -> Any:
    """The inverse of `to_tree`.

    Args:
        tree: What `to_tree` gave.
        prefix: A prefix of the tree, handed to `merge_fn`.
        merge_fn: The inverse of `split_fn`.
        is_node_leaf: Which leaves stand for objects.
        is_leaf: Where to stop.
        map_non_graph_nodes: Call `merge_fn` for other leaves, too.
        is_inner: Accepted for NNX; the GraphDef tells.
        ctxtag: The tag of an update context.
    """
    wanted = None if map_non_graph_nodes else is_node_leaf
    with merge_context(ctxtag, is_inner) as ctx:
        return _visited(tree, prefix, is_leaf, wanted, partial(merge_fn, ctx))
