# SPDX-License-Identifier: Apache-2.0
"""Closures: what functions read beside their arguments, taken out of them.

A program that is kept for the next call must not hold what may be another by then. A
function may close over a model, name one that is global, or be a method or a partial
that brings one along; and next time the model has other numbers. `Opened` takes the
Modules, Variables and arrays out of functions: they become arguments of the program,
and `with_held` makes the functions anew around what the program was given.

Everything else that the code reads is part of the key of the program (`Opened.key`):
the code itself, and numbers, texts and configurations in closures, defaults and
globals, compared as static values are. The code of a class is reached through the
objects that are handed over: what its methods read counts, too (`read_by`).

**What is not seen.** Attributes of objects that Python does not describe, and what code
of installed packages reads from its own globals, are not looked at. An array that comes
from there stands in the traced program as a constant that nobody here knows. Who traces
a program looks for such constants (`Opened.knows`), and does not keep it if there are
any.
"""

import functools
import os
import sysconfig
import types
from collections.abc import Hashable, Iterable, Iterator
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import jax

from treetap._core.bounded_cache import BoundedCache
from treetap._core.static_values import Identity, exact
from treetap._core.trees.attributes import Node
from treetap._core.trees.traverse import iter_graph
from treetap._core.variables.variable import Variable

_OPENED = type | types.FunctionType | types.MethodType | functools.partial
HELD = Node | Variable | jax.Array | jax.Ref
_PATHS = sysconfig.get_paths()
_INSTALLED = (
    "<frozen",
    os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep,
    *(_PATHS[name] + os.sep for name in ("stdlib", "purelib", "platlib")),
)


class Hole(NamedTuple):
    """Stands in a function for what is held."""

    number: int


class Opened:
    """Functions, and what they read, apart.

    Args:
        functions: The functions.
        may_hold: Whether they can be made anew around something else. What methods of
            classes read could not: it counts by identity.

    Attributes:
        held: Modules, Variables and arrays that the functions bring along, until they
            are taken.
        heads: The code, and how all is put together; hashable.
        values: Whatever else the code reads, to be compared as static values are.
        names: What each of these is, for messages.
        functions: The functions around holes, so that nothing that is held is kept.
    """

    def __init__(self, functions: tuple[Any, ...], may_hold: bool = True):
        self.held: list[Any] = []
        self.heads: list[Any] = []
        self.values: list[Any] = []
        self.names: list[str] = []
        self._numbers: dict[int, int] = {}  # of what is held, by identity
        # By identity: a number, and whether something that is held is in it.
        self._met: dict[int, tuple[int, bool]] = {}
        self._alive: list[Any] = []  # so that no identity is given to another value
        self._look(functions, "function", may_hold)
        self.functions, self._open = functions, set[int]()
        if self.held:
            opened = {key for key, (_, has) in self._met.items() if has}
            holes = {id(value): Hole(n) for n, value in enumerate(self.held)}
            rebuilding = _Rebuilding(holes, opened)
            self.functions = rebuilding.anew(functions)
            self._made = rebuilding.made
            self._open = {*map(id, self._made)}
        self._alive = []

    @property
    def key(self) -> Hashable:
        """Equal for functions of equal code that reads the same."""
        return tuple(self.heads), exact(tuple(self.values))

    def taken(self) -> list[Any]:
        """What is held; it is not kept here any longer."""
        held, self.held = self.held, []
        return held

    def with_held(self, held: Iterable[Any]) -> tuple[Any, ...]:
        """The functions around such Modules, Variables and arrays, in order."""
        return _Rebuilding({}, self._open, [*held]).anew(self.functions)

    def knows(self, array: Any) -> bool:
        """Whether an array that is a constant of a traced program is in the key."""
        return any(isinstance(x, Identity) and x.value is array for x in self.heads)

    def _look(self, value: Any, name: str, may_hold: bool) -> bool:
        """Notes all that is in a value; whether there is something that is held."""
        if isinstance(value, HELD):
            return self._hold(value, may_hold)
        if _is_opaque(value):
            self.heads.append(Identity(value))
            return False
        inside = _inside(value)
        if inside is None:
            self.heads.append("value")
            self.values.append(value)
            self.names.append(name)
            return False
        if id(value) in self._met:
            number, has = self._met[id(value)]
            self.heads.append(("again", number))
            return has
        # While it is looked at it may come again, and may hold something then.
        number = len(self._met)
        self._met[id(value)] = number, True
        self._alive.append(value)
        head, parts = inside
        self.heads += (type(value), head, len(parts))
        found = [
            self._look(part, own or name, may_hold and is_own)
            for own, part, is_own in parts
        ]
        self._met[id(value)] = number, any(found)
        return any(found)

    def _hold(self, value: Any, may_hold: bool) -> bool:
        if not may_hold:
            self.heads.append(Identity(value))
            return False
        number = self._numbers.setdefault(id(value), len(self.held))
        self.held += [value] if number == len(self.held) else []
        self.heads.append(Hole(number))
        return True


def _is_opaque(value: Any) -> bool:
    """Whether what is inside a value is its own affair, as of compiled functions."""
    is_ours = isinstance(value, _OPENED)
    return (hasattr(value, "__wrapped__") and not is_ours) or isinstance(
        value, types.ModuleType
    )


def read_by(classes: Iterable[type]) -> Opened:
    """What the methods of some classes read, and their code."""
    functions = [fn for kind in classes for fn in _functions_of(kind)]
    return Opened(tuple(functions), may_hold=False)


def classes_in(value: Any) -> set[type]:
    """The classes of all objects in a value."""
    return {type(node) for _, node in iter_graph(value, graph=True)}


Part = tuple[str, Any, bool]  # its name, if known; itself; if it may be made anew


def _inside(value: Any) -> tuple[Any, list[Part]] | None:
    """What is inside a value that can be made anew: a head, and parts; else None."""
    kind = type(value)
    if kind is types.FunctionType:
        return _inside_function(value)
    if isinstance(value, type):
        functions = _functions_of(value)
        return (value, [("", x, False) for x in functions]) if functions else None
    if kind is types.MethodType:
        return None, [("", value.__func__, True), ("", value.__self__, True)]
    if kind is functools.partial:
        named = [(name, x, True) for name, x in value.keywords.items()]
        parts = [("", x, True) for x in (value.func, *value.args)]
        return tuple(value.keywords), parts + named
    items, tree = _one_level(value)
    if jax.tree_util.treedef_is_leaf(tree):  # or something empty
        return None
    return tree, [("", x, True) for x in items]


def _one_level(value: Any) -> tuple[list[Any], Any]:
    """The items of a container of JAX, and its structure."""
    return jax.tree.flatten(value, is_leaf=lambda x: x is not value)


def _inside_function(fn: types.FunctionType) -> tuple[Any, list[Part]]:
    """Its closure, defaults, attributes, and what it reads from globals and modules."""
    code, named = fn.__code__, _globals_of(fn)
    own = [
        *zip(code.co_freevars, map(_content, fn.__closure__ or ())),
        *(("", x) for x in fn.__defaults__ or ()),
        *(fn.__kwdefaults__ or {}).items(),
        *named.items(),
        *vars(fn).items(),
    ]
    of_modules = [
        (f"{name}.{attribute}", getattr(module, attribute), False)
        for name, module in named.items()
        if isinstance(module, types.ModuleType) and _is_users(module.__dict__)
        for attribute in _names_in(code)
        if hasattr(module, attribute)
    ]
    head = code, *(name for name, _ in own)
    return head, [*((name, x, True) for name, x in own), *of_modules]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was assigned yet
        return None


@functools.lru_cache(4096)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """The names that code, or code inside it, may read from globals or modules."""
    inner = (_names_in(x) for x in code.co_consts if isinstance(x, types.CodeType))
    return tuple(dict.fromkeys([*code.co_names, *(n for one in inner for n in one)]))


def _is_users(names: dict[str, Any]) -> bool:
    """Whether globals are of no installed package; those of a notebook have no file."""
    return not (names.get("__file__") or "").startswith(_INSTALLED)


def _globals_of(fn: types.FunctionType) -> dict[str, Any]:
    """The globals that a function of the user's names, as far as there are any."""
    held = fn.__globals__
    if not _is_users(held):
        return {}
    return {name: held[name] for name in _names_in(fn.__code__) if name in held}


_known_functions: BoundedCache[type, Any] = BoundedCache(1024)


def _functions_of(kind: type) -> list[types.FunctionType]:
    """The user's functions in a class and its bases."""
    members = tuple(chain.from_iterable(vars(base).values() for base in kind.__mro__))
    known = _known_functions.get(kind)
    if (
        known is None
        or len(known[0]) != len(members)
        or not all(map(is_, known[0], members))
    ):
        known = members, list(chain.from_iterable(map(_functions_in, members)))
        _known_functions.discard(kind)
        _known_functions.add(kind, known)
    return known[1]


def _functions_in(member: Any) -> Iterator[types.FunctionType]:
    """The user's functions that an entry of a class body is made of."""
    for name in ("__func__", "fget"):
        member = getattr(member, name, member)
    while member is not None:
        if isinstance(member, types.FunctionType) and _is_users(member.__globals__):
            yield member
        member = getattr(member, "__wrapped__", None)


class _Rebuilding:
    """Values made anew around others.

    Args:
        others: What stands in the place of what, by identity.
        opened: The identities of the values that are to be made anew.
        held: What stands in the place of holes.

    Attributes:
        made: The values that were made.
    """

    def __init__(self, others: dict[int, Any], opened: set[int], held: Any = ()):
        self.others, self.opened, self.held = dict(others), opened, held
        self.made: list[Any] = []

    def anew(self, value: Any) -> Any:
        """A value made anew, if there is something in it."""
        if isinstance(value, Hole):
            return self.held[value.number]
        if id(value) in self.others:
            return self.others[id(value)]
        if id(value) not in self.opened:
            return value
        made = self._made_of(value)
        self.others[id(value)] = made
        self.made.append(made)
        return made

    def _made_of(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return types.MethodType(*map(self.anew, (value.__func__, value.__self__)))
        if isinstance(value, functools.partial):
            func, *args = map(self.anew, (value.func, *value.args))
            return functools.partial(func, *args, **self._items(value.keywords))
        items, tree = _one_level(value)
        return tree.unflatten(map(self.anew, items))

    def _items(self, items: dict[Any, Any]) -> dict[Any, Any]:
        return {name: self.anew(x) for name, x in items.items()}

    def _function(self, fn: types.FunctionType) -> types.FunctionType:
        """A function with other things in its closure, defaults and globals."""
        cells = tuple(types.CellType() for _ in fn.__closure__ or ())
        own, names = _globals_of(fn), fn.__globals__
        if own:
            facts = ("__name__", "__builtins__", "__file__")
            names = {name: names[name] for name in facts if name in names}
        new = types.FunctionType(fn.__code__, names, fn.__name__, None, cells)
        self.others[id(fn)] = new  # before its closure, which may hold it
        for cell, old in zip(cells, fn.__closure__ or ()):
            cell.cell_contents = self.anew(_content(old))
        if own:
            names.update(self._items(own))
        new.__defaults__ = fn.__defaults__ and tuple(map(self.anew, fn.__defaults__))
        new.__kwdefaults__ = fn.__kwdefaults__ and self._items(fn.__kwdefaults__)
        new.__dict__.update(self._items(vars(fn)))
        new.__qualname__, new.__module__ = fn.__qualname__, fn.__module__
        return new
