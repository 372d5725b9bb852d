# SPDX-License-Identifier: Apache-2.0
"""Scopes: where in a model an operation is, while somebody listens.

A Module's method runs in a named scope whose name says where the Module is. Scopes are
part of JAX's name stack: they stay with operations through every transform, and start
anew in a function that is traced on its own. So a jitted function that is traced once
and called for many layers does not say which layer it belongs to; the scopes around its
calls do. `resolve` puts the two together.

What is known when a capture opens is known by identity. Inside a function that JAX
traces, Modules are rebuilt, and know only their places: each where it is in its parent.
So a scope says from where to go (its *base*), and by which keys. The base is one of

    None              the root: the Module is known to the capture by its path
    2                 the Module of the scope two further out
    "app.Model"       a rebuilt app.Model, as a traced function has them
    "?app.Model"      an app.Model that is not part of what is captured

with one for each capture, the outermost first. Named scopes of another library are
below the scope around.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from threading import Lock
from typing import Any, NamedTuple
from urllib.parse import quote, unquote
from weakref import WeakKeyDictionary, WeakValueDictionary

import jax

from treetap._capture.name_stacks import ModuleScope, Scope
from treetap._core.paths import Path
from treetap._core.trees.attributes import Node
from treetap._core.trees.pytree import adopt, opened
from treetap._core.trees.traverse import nodes_below
from treetap._core.variables.variable import Variable


class Root(NamedTuple):
    """An outermost object among the arguments of a capture, and its path."""

    path: Path
    node: Any


class Where(NamedTuple):
    """A resolved place: the path of a Module, and its class as text."""

    path: Path
    kind: str


class Roots:
    """What a capture knows of a model when it opens.

    Attributes:
        tops: The outermost objects.
        number: Of the capture, among those around; the outermost has 0.
        start: How many scopes were open.
        paths: The path of every object inside the roots, by its place.
    """

    def __init__(self, roots: Sequence[Root], number: int = 0):
        self.number = number
        self.start = len(_frames.get())
        self.paths: dict[int, Path] = {}
        self._classes: dict[int, set[type]] = {}  # those inside each object
        for root in roots:
            self._visit(root.path, root.node)
        self.tops = [Where(root.path, self.kind_text(root.node)) for root in roots]

    def kind_text(self, module: Any) -> str:
        """The class of a Module, with `!` if none of that class is inside it."""
        cls, below = type(module), self._classes.get(id(module._pytree__place))
        below = _classes_below(module) if below is None else below  # it was made since
        return _class_text(cls) + "!" * (cls not in below)

    def _visit(self, path: Path, value: Any) -> set[type]:
        """Notes the objects in a value, each once; the classes of all inside it."""
        below: set[type] = set()
        if isinstance(value, Node):
            place = id(value._pytree__place)
            if place in self.paths:
                return self._classes[place]
            self.paths[place], self._classes[place] = path, below
        for key, child in _objects_in(value):
            below |= self._visit((*path, key), child)
            below.add(type(child))
        return below


_ENDS = Variable, jax.Array


def _objects_in(value: Any) -> list[tuple[Any, Any]]:
    """The objects and containers in a value, with their keys."""
    pairs = zip(*(opened(value) or ((), ())))
    return [pair for pair in pairs if not isinstance(pair[1], _ENDS)]


def _classes_below(value: Any) -> set[type]:
    """The classes of all that is inside a value, which may be a cycle."""
    waiting, seen = [value], set[int]()
    for one in waiting:
        more = [child for _, child in _objects_in(one) if id(child) not in seen]
        seen |= set(map(id, more))
        waiting += more
    return set(map(type, waiting[1:]))


# The places of the Modules whose methods run, with what their scopes say.
_frames: ContextVar[tuple[tuple[Any, Scope], ...]] = ContextVar("frames", default=())
_captures: ContextVar[tuple[Roots, ...]] = ContextVar("captures", default=())
_texts: "WeakKeyDictionary[type, str]" = WeakKeyDictionary()
_classes: "WeakValueDictionary[str, type]" = WeakValueDictionary()


def class_named(text: str) -> type | None:
    """The class of Modules that a scope speaks of."""
    return _classes.get(text.rstrip("!"))


_naming = Lock()


def _class_text(cls: type) -> str:
    """A text of a class of its own; two threads get the same."""
    text = _texts.get(cls)
    if text is None:
        with _naming:
            name = quote(f"{cls.__module__}.{cls.__qualname__}", safe=".")
            twins = (f"{name}*{n}" for n in itertools.count(2))  # defined again
            texts = itertools.chain([name], twins)
            text = next(text for text in texts if _classes.get(text, cls) is cls)
            _texts[cls], _classes[text] = text, cls
    return text


def _place_in(
    known: Roots, module: Any, frames: Sequence[Any]
) -> tuple[int | str | None, Path]:
    """Where a Module is, for one capture: a base and keys."""
    place, keys = module._pytree__place, ()
    while True:
        if (path := known.paths.get(id(place))) is not None:
            return None, (*path, *keys)
        for distance, (frame, _) in enumerate(reversed(frames)):
            if frame is place:
                return distance, keys
        parent, key, cls, is_rebuilt = place
        if parent is None:  # what was built was not captured; what was rebuilt may be
            return "?" * (not is_rebuilt) + _class_text(cls), keys
        place, keys = parent, (*(key if isinstance(key, tuple) else (key,)), *keys)


class inside:
    """Runs a method of a Module in its scope."""

    __slots__ = ("_scope", "_token")

    def __init__(self, module: Any):
        frames, captures = _frames.get(), _captures.get()
        places = tuple([_place_in(c, module, frames[c.start :]) for c in captures])
        scope, keys = Scope(places, captures[0].kind_text(module)), places[0][1]
        shown = str(keys[-1]) if keys else type(module).__name__
        self._scope = jax.named_scope(ModuleScope(shown, scope))
        self._token = _frames.set((*frames, (module._pytree__place, scope)))

    def __enter__(self) -> None:
        self._scope.__enter__()

    def __exit__(self, *exception: Any) -> None:
        _frames.reset(self._token)
        self._scope.__exit__(*exception)


def scope_below(path: Path) -> Scope:
    """A scope that no Module opened."""
    return Scope(((None, path),), "")


def inside_once(module: Any) -> AbstractContextManager[None]:
    """The scope of a Module; nothing if it is the innermost one."""
    frames = _frames.get()
    is_open = bool(frames) and frames[-1][0] is module._pytree__place
    return nullcontext() if is_open else inside(module)


def open_scopes(known: Roots) -> tuple[Scope, ...]:
    """The scopes that are open in one of the captures around."""
    return tuple([scope for _, scope in _frames.get()[known.start :]])


@contextmanager
def rooted(roots: Sequence[Root]) -> Iterator[Roots]:
    """Opens a capture; gives what it knows."""
    captures = _captures.get()
    opening = Roots(roots, len(captures))
    token = _captures.set((*captures, opening))
    try:
        yield opening
    finally:
        _captures.reset(token)


def resolve(
    scopes: Sequence[Scope], known: Roots, among: Iterable[Path] | None = None
) -> Where:
    """The path that scopes lead to, for one of the captures around.

    Args:
        scopes: What they say, outermost first.
        known: What the capture knows.
        among: Paths of the roots that a rebuilt Module may be; by default all.
    """
    if scopes and scopes[-1].kind:
        base, keys = scopes[-1].place_in(known.number)
        if base is None:  # most are known, no matter what is around
            return Where(keys, scopes[-1].kind)
    around: list[Where] = []
    here = Where((), "")
    for scope in scopes:
        base, keys = scope.place_in(known.number)
        if not scope.kind:  # no Module counts it when it looks further out
            here = Where((*here.path, *keys), "")
            continue
        start = ()
        if isinstance(base, str):
            roots = [x for x in known.tops if among is None or x.path in among]
            start = _argument(base, around[-1:] or roots, around[-1:])
        elif base is not None and base < len(around):
            start = around[-1 - base].path
        here = Where((*start, *keys), scope.kind)
        around.append(here)
    return here


def _argument(top: str, candidates: Sequence[Where], around: Sequence[Where]) -> Path:
    """The path of a Module of some class that came into a function as an argument.

    It is that of the one around or of a root, if it can be no other one; else it is
    called by its class, below the one around.
    """
    alike = [one for one in candidates if one.kind.rstrip("!") == top]
    if [one.kind for one in alike] == [f"{top}!"]:
        return alike[0].path
    short = unquote(top.partition("*")[0].rpartition(".")[2])
    return (*(key for one in around for key in one.path), short)


def is_of_argument(scope: Scope) -> bool:
    """Whether a scope is that of a Module that came into a function as an argument."""
    return any(isinstance(base, str) and base[0] != "?" for base, _ in scope.places)


def find_roots(tree: Any, path: Path = ()) -> Iterator[Root]:
    """The outermost objects in a tree of arguments."""
    if isinstance(tree, Node):
        yield Root(path, tree)
        return
    for key, child in zip(*(opened(tree) or ())):
        yield from find_roots(child, (*path, key))


# Places of rebuilt objects.


def put_in_place(original: Any, copy: Any) -> None:
    """Lets rebuilt objects be where the caller's are, for those who listen."""
    for (_, one), (_, two) in zip(find_roots(original), find_roots(copy)):
        two._pytree__place[:2] = one._pytree__place[:2]


def name_shared(tree: Any) -> None:
    """Lets rebuilt objects that stand twice be where they are met first."""
    found = dict(nodes_below(tree, Node, True, "capture"))
    for path, node in found.items():
        for end in reversed(range(len(path))):
            if path[:end] in found:
                adopt(node, path[end:], found[path[:end]]._pytree__place)
                break
