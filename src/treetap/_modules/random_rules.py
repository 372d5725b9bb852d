# SPDX-License-Identifier: Apache-2.0
"""Random streams inside other objects: replacing them, and starting them anew."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from treetap._core.errors import StructureError
from treetap._core.paths import Path, show_path
from treetap._core.settings import Mode, resolve_graph, resolve_mode
from treetap._core.trees.filters import Filter, is_catch_all, predicate_of
from treetap._core.trees.traverse import nodes_below, recursive_map
from treetap._core.variables.metadata import MISSING
from treetap._modules.random_streams import Rngs, RngStream, Shape, as_key

ShapeRules = Mapping[Filter, Shape] | Shape | None
Policy = Literal["scalars_only", "match_shape"] | Callable[..., jax.Array]


class Rule(NamedTuple):
    """What to do with the streams that a filter takes.

    Attributes:
        method: The method of the stream that makes another: split, broadcast, fork.
        filter: Which streams.
        arguments: Of the method: the shape, for those that take one.
    """

    method: str
    filter: Filter
    arguments: tuple[Shape, ...] = ()


def _rules(
    split: ShapeRules, fork: Filter | Sequence[Filter] | None, broadcast: ShapeRules
) -> list[Rule]:
    rules: list[Rule] = []
    for name, given in (("split", split), ("broadcast", broadcast)):
        if given is not None:
            pairs = given if isinstance(given, Mapping) else {...: given}
            rules += [Rule(name, filter, (shape,)) for filter, shape in pairs.items()]
    if fork is not None:
        filters = fork if isinstance(fork, list | tuple) else [fork]
        rules += [Rule("fork", filter) for filter in filters]
    return rules


def _rule_for(path: Path, stream: RngStream, rules: list[Rule]) -> Rule | None:
    """The rule for a stream: the one that names it, else a catch-all."""
    matching = [rule for rule in rules if predicate_of(rule.filter)(path, stream)]
    named = [rule for rule in matching if not is_catch_all(rule.filter)]
    if len(named) > 1:
        shown = ", ".join(f"{rule.method} ({rule.filter!r})" for rule in named)
        raise StructureError(
            f"with_rngs: the stream at {show_path(path)} matches multiple rules: "
            f"{shown}. Let one rule take it."
        )
    if not matching:
        return None
    rule = (named or matching)[0]
    if stream.key.shape:
        raise StructureError(
            f"with_rngs: the stream at {show_path(path)} has keys of shape "
            f"{stream.key.shape}, so it gives no single key to {rule.method}. Map over "
            "it."
        )
    return rule


def with_rngs(
    node: Any = MISSING,
    /,
    *,
    split: ShapeRules = None,
    fork: Filter | Sequence[Filter] | None = None,
    broadcast: ShapeRules = None,
    only: Filter = True,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """A copy of `node` with its random streams split, forked or broadcast.

    The original's streams advance by one for each that is replaced; streams without a
    rule, and all other Variables, are shared. A rule that names a stream wins over one
    for all (`...`). Without a node, a decorator that does this to all arguments.

    Args:
        node: Any tree with streams in it.
        split: A shape for every stream, or a mapping from filter to shape.
        fork: Which streams to fork.
        broadcast: As `split`, repeating one key.
        only: Which streams to touch at all.
        graph: Keep shared references instead of refusing them.
        graph_updates: Accepted for symmetry; the result is always a copy.

    Examples:
        >>> import treetap as tt
        >>> rngs = tt.Rngs(params=0, dropout=1)
        >>> tt.with_rngs(rngs, split={"dropout": 3}).dropout.key.shape
        (3,)
    """
    rules = _rules(split, fork, broadcast)
    wanted = predicate_of(only)

    def apply(tree: Any) -> Any:
        mode = resolve_graph(graph)
        # All rules are looked up, and what is wrong found, before any counter moves.
        streams = nodes_below(tree, RngStream, mode, "with_rngs")
        touched = [pair for pair in streams if wanted(*pair)]
        chosen = {path: _rule_for(path, stream, rules) for path, stream in touched}

        def replaced(path: Path, value: Any) -> Any:
            if rule := chosen.get(path):
                return getattr(value, rule.method)(*rule.arguments)
            return value

        return recursive_map(replaced, tree, graph=mode)

    return _applied(node, apply)


def reseed(
    node: Any,
    /,
    *,
    policy: Policy = "scalars_only",
    graph: bool | None = None,
    **seeds: Any,
) -> None:
    """Gives random streams new keys, in place, and sets their counters to zero.

    An `Rngs`, or a stream, gets exactly the keys `Rngs(**seeds)` has. Streams inside
    another object, in the order of `iter_graph`, get the successive keys of the stream
    of their tag in `Rngs(**seeds)`.

    Args:
        node: Any tree with streams in it.
        policy: What to do with streams of several keys: refuse (`"scalars_only"`),
            split the new key (`"match_shape"`), or call `(path, key, shape) -> key`.
        graph: Visit shared streams once instead of refusing them.
        **seeds: Seeds or keys by tag. A tag that no stream has is an error if a stream
            goes without a new key.

    Examples:
        >>> import treetap as tt
        >>> rngs = tt.Rngs(dropout=0)
        >>> key = rngs.dropout()
        >>> tt.reseed(rngs, dropout=0)
        >>> bool(rngs.dropout() == key)
        True
    """
    if not (callable(policy) or policy in ("scalars_only", "match_shape")):
        raise ValueError(
            f"reseed: `policy` is {policy!r}; expected 'scalars_only', 'match_shape' "
            "or a function of (path, key, shape)."
        )
    found = nodes_below(node, RngStream, resolve_graph(graph), "reseed")
    known = {stream.tag for _, stream in found}
    unknown = sorted(seeds.keys() - known)
    if unknown and known - seeds.keys():
        raise StructureError(
            f"reseed: no stream is tagged {', '.join(map(repr, unknown))}; the tags "
            f"here are {sorted(known)}. A layer built from a default stream has the "
            "tag 'default'."
        )
    sources = Rngs(**seeds)
    planned = []
    for path, stream in found:
        if stream.tag in seeds:
            stream._check_trace()
            is_root = isinstance(node, Rngs | RngStream)
            key = as_key(seeds[stream.tag]) if is_root else sources[stream.tag]()
            key = _shaped(key, stream.key.shape, path, policy)
            counter = jnp.zeros(key.shape, jnp.uint32)
            planned.append(StreamBackup(stream, key, counter))
    restore_rngs(planned)


def _shaped(key: jax.Array, shape: tuple[int, ...], path: Path, policy: Policy) -> Any:
    """A new key in the shape of the old one."""
    if shape == key.shape:
        return key
    if key.shape:
        raise StructureError(
            f"reseed: the stream at {show_path(path)} has keys of shape {shape}, the "
            f"new one is of shape {key.shape}."
        )
    if callable(policy):
        return policy(path, key, shape)
    if policy == "match_shape":
        return jax.random.split(key, shape)
    raise StructureError(
        f"reseed: the stream at {show_path(path)} has keys of shape {shape}. Say "
        "`policy='match_shape'` to split the new key, or give a function."
    )


def split_rngs(
    node: Any = MISSING,
    /,
    *,
    splits: Shape,
    only: Filter = ...,
    squeeze: bool = False,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """A copy of `node` with its random streams split; the original's advance by one.

    Without a node, a decorator that does this to all arguments of a call.

    Args:
        node: Any tree with streams in it.
        splits: How many keys each stream gets.
        only: Which streams.
        squeeze: With `splits=1`, keep the keys scalar.
        graph: Keep shared references instead of refusing them.
        graph_updates: With `graph`, split in place and give back what was there, for
            `restore_rngs` or a `with` block; a decorator does that around the call.

    Examples:
        >>> import treetap as tt
        >>> tt.split_rngs(tt.Rngs(0), splits=4).default.key.shape
        (4,)
    """
    if squeeze and splits != 1:
        raise ValueError(f"split_rngs: `squeeze` needs splits=1, got {splits}.")
    mode = resolve_mode(graph, graph_updates)
    shape = () if squeeze else splits  # () gives the one key that 1 gives, as a scalar
    divided = functools.partial(with_rngs, split=shape, only=only, graph=bool(mode))
    return _applied(node, divided, mode)


def fork_rngs(
    node: Any = MISSING,
    /,
    *,
    split: ShapeRules = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """A copy of `node` with its random streams forked, or split where rules say so.

    Without a node, a decorator that does this to all arguments of a call.

    Args:
        node: Any tree with streams in it.
        split: A shape for every stream, or a mapping from filter to shape; streams
            that no filter takes are then left alone.
        graph: Keep shared references instead of refusing them.
        graph_updates: As for `split_rngs`.
    """
    fork = ... if split is None else None
    mode = resolve_mode(graph, graph_updates)

    forked = functools.partial(with_rngs, split=split, fork=fork, graph=bool(mode))
    return _applied(node, forked, mode)


class StreamBackup(NamedTuple):
    """A stream, and the key and counter it had."""

    stream: RngStream
    key: Any
    count: Any


def _backup(stream: RngStream, source: RngStream) -> StreamBackup:
    """The key and counter of `source`, for `stream`."""
    return StreamBackup(stream, source.key[...], source.count[...])


class SplitBackups(list[StreamBackup], AbstractContextManager["SplitBackups"]):
    """What streams were before they were changed in place.

    `restore_rngs` brings it back; as a context manager, it does so at the end.
    """

    def __exit__(self, *exception: object) -> None:
        restore_rngs(self)


def restore_rngs(backups: Iterable[StreamBackup], /) -> None:
    """Gives random streams the keys and counters they had."""
    for stream, key, count in backups:
        stream.key.set_value(key)
        stream.count.set_value(count)


def backup_keys(node: Any, /, *, graph: bool | None = None) -> SplitBackups:
    """What the random streams in an object are now."""
    found = nodes_below(node, RngStream, resolve_graph(graph), "backup_keys")
    return SplitBackups(_backup(stream, stream) for _, stream in found)


def _in_place(tree: Any, change: Callable[[Any], Any]) -> SplitBackups:
    """Changes the streams in a tree as `change` does in a copy."""
    made = nodes_below(change(tree), RngStream, True, "split_rngs")
    found = nodes_below(tree, RngStream, True, "split_rngs")
    pairs = [(old, new) for (_, old), (_, new) in zip(found, made)]
    pairs = [(old, new) for old, new in pairs if old.key is not new.key]
    backups = SplitBackups(_backup(old, old) for old, _ in pairs)
    restore_rngs(_backup(old, new) for old, new in pairs)
    return backups


def _applied(node: Any, change: Callable[[Any], Any], mode: Mode = Mode.TREE) -> Any:
    """A changed copy, or with graph updates backups of what was changed in place.

    Without a node, a decorator that does this to all arguments of a call.
    """
    in_place = mode is Mode.UPDATES
    if node is not MISSING:
        return _in_place(node, change) if in_place else change(node)

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            if in_place:
                with _in_place((args, kwargs), change):
                    return fn(*args, **kwargs)
            args, kwargs = change((args, kwargs))
            return fn(*args, **kwargs)

        return call

    return decorate
