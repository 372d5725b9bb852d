# SPDX-License-Identifier: Apache-2.0
"""Prefixes: one value for a whole argument, or one for each of its parts.

`in_axes`, `in_shardings` and their like are trees that stop early. `spread` gives every
leaf of the arguments its own value, in the order of `take_leaves`. Where objects are
shared, all ways to a Variable must give the same value.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import jax

from treetap._core.errors import AliasError, StructureError
from treetap._core.paths import Path, show_path
from treetap._core.settings import Mode
from treetap._core.trees.attributes import Node
from treetap._core.trees.filters import PathIn, predicate_of
from treetap._core.trees.pytree import opened
from treetap._core.trees.sharing import places
from treetap._core.trees.split import map as map_leaves
from treetap._core.trees.state import State, flat_items
from treetap._core.variables.variable import Variable

FOLLOWED = (tuple, list, dict, State, Node)  # where a prefix goes on inside


@dataclass(init=False, repr=False, slots=True, unsafe_hash=True)
class PrefixFilter(Mapping[Any, Any]):
    """One prefix value for each kind of Variable in an object, chosen by filters.

    Args:
        rules: A mapping from filter to value, pairs, or a State of values. The first
            filter that takes a Variable decides.
    """

    filters: tuple[Any, ...]
    given: tuple[Any, ...]

    def __init__(self, rules: Any, /):
        pairs = rules.items() if isinstance(rules, Mapping) else rules
        if isinstance(rules, State):
            pairs = [(PathIn(path), value) for path, value in flat_items(rules)]
        self.filters, self.given = tuple(zip(*pairs)) or ((), ())

    def map_prefix(self, path: Path, variable: Any) -> Any:
        """The value for a Variable, given its path."""
        return _rule_for(self, path, variable, type(self).__name__)

    def __getitem__(self, filter: Any) -> Any:
        if filter not in self.filters:
            raise KeyError(filter)
        return self.given[self.filters.index(filter)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.filters)

    def __len__(self) -> int:
        return len(self.filters)

    def __repr__(self) -> str:
        shown = ", ".join(f"{filter!r}: {value!r}" for filter, value in self.items())
        return f"{type(self).__name__}({{{shown}}})"


class StateAxes(PrefixFilter):
    """Axes by kind of Variable, for mapping transforms with graph updates.

    Examples:
        >>> from treetap import nnx
        >>> nnx.StateAxes({nnx.Param: 0, ...: None}).axes
        (0, None)
    """

    __slots__ = ()

    axes = property(attrgetter("given"), doc="The values.")


class StateSharding(PrefixFilter):
    """Shardings by kind of Variable, for `jit` and `shard_map` with graph updates."""

    __slots__ = ()

    shardings = property(attrgetter("given"), doc="The values.")


class Rule(NamedTuple):
    """What decides about the leaves below an object: a prefix, and where it began."""

    prefix: Any
    start: int

    def at(self, path: Path, leaf: Any, name: str) -> Any:
        """The prefix of a leaf. Outside all objects a filter sees an empty path."""
        if not isinstance(self.prefix, PrefixFilter):
            return self.prefix
        inner = path[self.start :] if self.start >= 0 else ()
        return _rule_for(self.prefix, inner, leaf, name)


class Spread:
    """One walk that gives every leaf below a value its part of a prefix.

    Attributes:
        values: One prefix for each leaf, in the order of `take_leaves`.
        owners: For each object, by identity, the rule and the path it was met with.
        known: For each Variable, by identity, the path and prefix it was met with
            first. It may be met again, by another way, with the same prefix only.
        entered: What was entered so far, by identity; its leaves count once.
        active: What the walk is inside of, by identity, and does not enter again.
        is_first: Whether the first prefix of a Variable counts, instead of there being
            only one.
    """

    def __init__(self, name: str, argument: str, is_first: bool = False):
        self.name = name
        self.argument = argument
        self.is_first = is_first
        self.values: list[Any] = []
        self.owners: dict[int, tuple[Rule, Path]] = {}
        self.known: dict[int, tuple[Path, Any]] = {}
        self.entered: set[int] = set()
        self.active: set[int] = set()

    def follow(self, prefix: Any, value: Any, path: Path) -> None:
        """Goes down the prefix and the value together, as far as the prefix goes."""
        inside = opened(prefix) if isinstance(prefix, FOLLOWED) else None
        if inside is None:
            self.cover(Rule(prefix, -1), value, path)
            return
        if id(value) in self.active:
            return
        below = None if value is None else opened(value)
        keys, children = tuple(inside[0]), tuple(inside[1])
        if below is None or tuple(below[0]) != keys:
            held = "nothing inside" if below is None else f"{list(below[0])}"
            raise StructureError(
                f"{self.name}: `{self.argument}` does not fit the arguments at "
                f"{show_path(path)}: it has entries {list(keys)}, the "
                f"{type(value).__name__} there has {held}."
            )
        with self.inside(value):
            for key, inner, child in zip(keys, children, below[1]):
                self.follow(inner, child, (*path, key))

    def cover(self, rule: Rule, value: Any, path: Path) -> None:
        """Gives the leaves below a value what one rule says."""
        if rule.start < 0 and isinstance(value, Node | Variable):
            rule = rule._replace(start=len(path))  # a filter sees paths from here
        if isinstance(value, Variable):
            self.variable(rule.at(path, value, self.name), value, path)
            return
        below = opened(value)
        if below is None:
            self.values.append(rule.at(path, value, self.name))
            return
        if id(value) in self.active:
            return
        if isinstance(value, Node):
            self.owners.setdefault(id(value), (rule, path))
        with self.inside(value):
            for key, child in zip(*below):
                self.cover(rule, child, (*path, key))

    @contextmanager
    def inside(self, value: Any) -> Iterator[None]:
        """Marks a value while its children are visited; one visited again adds none."""
        is_again = isinstance(value, Node) and id(value) in self.entered
        before = len(self.values)
        self.active.add(id(value))
        self.entered.add(id(value))
        yield
        self.active.discard(id(value))
        if is_again:
            del self.values[before:]  # compared, not counted twice

    def variable(self, prefix: Any, variable: Variable[Any], path: Path) -> None:
        """Notes the prefix of a Variable, which must be the same on all ways to it."""
        first = self.known.get(id(variable))
        if first is None:
            self.known[id(variable)] = (path, prefix)
            self.values.append(prefix)
        elif first[1] != prefix and not self.is_first:
            raise AliasError(
                f"{self.name}: Inconsistent aliasing detected: Duplicate "
                f"{type(variable).__name__}, with different values of "
                f"`{self.argument}`:\n  {show_path(first[0])}: {first[1]}\n"
                f"  {show_path(path)}: {prefix}\nGive all places the same value, or "
                "pass copies."
            )


def distinct(values: Iterable[Any]) -> list[Any]:
    """Each value once, in order of appearance; they need not be hashable."""
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


@dataclass(slots=True)
class PrefixGroups:
    """The leaves of a call in groups: those with the same prefix are together.

    A program returns one list of changed values for each group, because JAX is told
    where outputs lie before anybody knows which Variables will change.

    Attributes:
        of_leaf: The group of each leaf.
        prefixes: The prefix of each group.
        owners: By number, the rule for an object, and the path it was met at.
        known: By number, the path and the prefix of a Variable.
        carried: Groups whose plain values are passed on to the next step of a loop.
    """

    of_leaf: list[int]
    prefixes: list[Any]
    owners: dict[int, tuple[Rule, Path]] = field(compare=False)
    known: dict[int, tuple[Path, Any]] = field(compare=False)
    carried: set[int] = field(compare=False, default_factory=set)

    def by_leaf(self) -> list[Any]:
        """The prefix of each leaf."""
        return [self.prefixes[group] for group in self.of_leaf]


def spread(
    prefix: Any, value: Any, name: str, argument: str, is_first: bool = False
) -> list[Any]:
    """One prefix value for each leaf below `value`, in the order of `take_leaves`."""
    work = Spread(name, argument, is_first)
    work.follow(prefix, value, ())
    return work.values


def is_whole(prefix: Any) -> bool:
    """Whether a part of a prefix speaks of a whole object, leaf by leaf."""
    return isinstance(prefix, PrefixFilter | Node)


def is_entry(prefix: Any) -> bool:
    """Whether a part of a prefix is not to be opened as a container."""
    return prefix is None or is_whole(prefix)


def values_in(prefix: Any) -> list[Any]:
    """Every value a prefix can give, in order of appearance."""
    found: list[Any] = []
    for part in jax.tree.leaves(prefix, is_leaf=is_entry):
        if isinstance(part, PrefixFilter):
            found += part.given
        else:
            found += jax.tree.leaves(part, is_leaf=lambda x: x is None)
    return found


def filter_values(prefix: Any) -> list[Any]:
    """The values that the filters in a prefix can give to leaves made inside."""
    parts = jax.tree.leaves(prefix, is_leaf=is_entry)
    return [x for part in parts if isinstance(part, PrefixFilter) for x in part.given]


def check_prefix(prefix: Any, name: str, argument: str, mode: Mode) -> None:
    """Refuses what cannot stand in a prefix."""
    for _, part in places(prefix):
        kind = type(part).__name__
        if isinstance(part, Variable):
            raise StructureError(
                f"{name}: Variables prefixes are not supported: `{argument}` contains "
                f"a {kind}. Make a prefix with `treetap.prefix`."
            )
        if isinstance(part, PrefixFilter) and mode is not Mode.UPDATES:
            raise StructureError(
                f"{name}: `{argument}` cannot contain `{kind}` objects without graph "
                "updates. Make a prefix of the object with `treetap.prefix`, or use "
                "`graph=True, graph_updates=True`."
            )
        if isinstance(part, Node) and mode is Mode.UPDATES:
            raise StructureError(
                f"{name}: Graph nodes are not allowed as prefixes with graph updates: "
                f"`{argument}` contains a {kind}. Use `StateAxes` or `StateSharding`, "
                "or `graph_updates=False`."
            )


Rules = Mapping[Any, Any] | Callable[[Path, Any], Any]


def prefix(node: Any, rules: Rules, /, *, graph: bool | None = None) -> Any:
    """A prefix for `node`: each Variable and array replaced by what a rule says.

    Args:
        node: A Module, or any tree of Modules.
        rules: A function of (path, leaf), or a mapping from filter to value, in which
            the first filter that takes a leaf decides.
        graph: Allow shared references.

    Examples:
        >>> import treetap as tt
        >>> model = tt.Dict(w=tt.Param(1.0), n=tt.Variable(0))
        >>> axes = tt.prefix(model, {tt.Param: 0, ...: None})
        >>> axes.w, axes.n
        (0, None)
    """

    def value_for(path: Path, leaf: Any) -> Any:
        if isinstance(rules, Mapping):
            return _rule_for(rules, path, leaf, "prefix")
        return rules(path, leaf)

    found: dict[Path, Any] = {}
    first: dict[int, Path] = {}
    for path, leaf in places(node):
        if opened(leaf) is not None:
            continue
        value = found[path] = value_for(path, leaf)
        if not isinstance(leaf, Variable):
            continue
        before = first.setdefault(id(leaf), path)
        if found[before] != value:
            kind, paths = type(leaf).__name__, (show_path(before), show_path(path))
            text = (
                f"prefix: the {kind} found at paths {paths[0]} and {paths[1]} would "
                f"have the prefix {found[before]!r} at the first and {value!r} at the "
                "second. Give both the same."
            )
            raise AliasError(text, "prefix", kind, paths)
    return map_leaves(
        lambda path, _: found[path], node, graph=graph, recreate_variables=False
    )


def _rule_for(rules: Mapping[Any, Any], path: Path, leaf: Any, name: str) -> Any:
    """The value of the first filter that takes a leaf."""
    for filter, value in rules.items():
        if predicate_of(filter)(path, leaf):
            return value
    raise StructureError(
        f"{name}: No filter matched {show_path(path)} ({type(leaf).__name__}). Add "
        "`...` for the rest."
    )
