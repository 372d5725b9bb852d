# SPDX-License-Identifier: Apache-2.0
"""Prefixes: one value for a whole argument, or one for each of its parts.

`in_axes`, `in_shardings` and their like are trees that stop early. `spread` gives every
leaf of the arguments its own value, in the order of `take_leaves`. Where objects are
shared, all ways to a Variable must give the same value.
"""

from collections.abc import Callable, Mapping
from typing import Any

from treetap._applying import map as map_leaves
from treetap._attributes import Node
from treetap._errors import AliasError, StructureError
from treetap._filters import predicate_of
from treetap._pytrees import opened
from treetap._trees import Path, show_path
from treetap._variables import Variable


def _parts(value: Any) -> Any:
    """Keys and children of what a prefix may follow into; None where it must stop."""
    if isinstance(value, Variable) or value is None:
        return None
    return opened(value)


class _Spread:
    """One spreading: values by leaf, and by Variable to compare the ways to it."""

    def __init__(self, name: str, argument: str):
        self.name = name
        self.argument = argument
        self.values: list[Any] = []
        self.known: dict[int, tuple[Path, Any]] = {}
        self.entered: set[int] = set()
        self.active: set[int] = set()

    def follow(self, prefix: Any, value: Any, path: Path) -> None:
        """Goes down the prefix and the value together, as far as the prefix goes."""
        inside = None if _is_end(prefix) else _parts(prefix)
        if inside is None:
            self.cover(prefix, value, path)
            return
        if isinstance(value, Node) and id(value) in self.active:
            return
        below = _parts(value)
        keys, children = tuple(inside[0]), tuple(inside[1])
        if below is None or tuple(below[0]) != keys:
            held = "nothing inside" if below is None else f"{list(below[0])}"
            raise StructureError(
                f"{self.name}: `{self.argument}` does not fit the arguments at "
                f"{show_path(path)}: it has entries {list(keys)}, the "
                f"{type(value).__name__} there has {held}."
            )
        is_again = isinstance(value, Node) and id(value) in self.entered
        before = len(self.values)
        self.active.add(id(value))
        self.entered.add(id(value))
        for key, inner, child in zip(keys, children, below[1]):
            self.follow(inner, child, (*path, key))
        self.active.discard(id(value))
        if is_again:
            del self.values[before:]

    def cover(self, prefix: Any, value: Any, path: Path) -> None:
        """Gives every leaf below a value the same prefix."""
        if isinstance(value, Variable):
            self.variable(prefix, value, path)
            return
        inside = opened(value)
        if inside is None:
            self.values.append(prefix)
            return
        if id(value) in self.active:
            return
        is_again = isinstance(value, Node) and id(value) in self.entered
        self.active.add(id(value))
        self.entered.add(id(value))
        before = len(self.values)
        for key, child in zip(*inside):
            self.cover(prefix, child, (*path, key))
        self.active.discard(id(value))
        if is_again:
            del self.values[before:]  # compared, not counted twice

    def variable(self, prefix: Any, variable: Variable[Any], path: Path) -> None:
        """Notes the prefix of a Variable, which must be the same on all ways to it."""
        first = self.known.get(id(variable))
        if first is None:
            self.known[id(variable)] = (path, prefix)
            self.values.append(prefix)
        elif first[1] != prefix:
            raise AliasError(
                f"{self.name}: Inconsistent aliasing detected: the same "
                f"{type(variable).__name__} gets different values of "
                f"`{self.argument}`:\n  {show_path(first[0])}: {first[1]}\n"
                f"  {show_path(path)}: {prefix}\nGive all places the same value, or "
                "pass copies."
            )


def _is_end(prefix: Any) -> bool:
    return not isinstance(prefix, tuple | list | dict | Node)


def spread(prefix: Any, value: Any, name: str, argument: str) -> list[Any]:
    """One prefix value for each leaf below `value`, in the order of `take_leaves`."""
    work = _Spread(name, argument)
    work.follow(prefix, value, ())
    return work.values


def check_prefix(prefix: Any, name: str, argument: str) -> None:
    """Refuses what cannot stand in a prefix."""
    if isinstance(prefix, Variable):
        raise StructureError(
            f"{name}: Variables prefixes are not supported: `{argument}` contains a "
            f"{type(prefix).__name__}. Make a prefix with `treetap.prefix`."
        )
    inside = None if _is_end(prefix) else _parts(prefix)
    for child in inside[1] if inside else ():
        check_prefix(child, name, argument)


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
        return _rule_for(rules, path, leaf)

    return map_leaves(value_for, node, graph=graph, recreate_variables=False)


def _rule_for(rules: Rules, path: Path, leaf: Any) -> Any:
    if not isinstance(rules, Mapping):
        return rules(path, leaf)
    for filter, value in rules.items():
        if predicate_of(filter)(path, leaf):
            return value
    raise StructureError(
        f"prefix: No filter matched {show_path(path)} ({type(leaf).__name__}). Add "
        "`...` for the rest."
    )
