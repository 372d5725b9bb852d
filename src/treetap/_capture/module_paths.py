# SPDX-License-Identifier: Apache-2.0
"""Scopes: where in a model an operation is, while somebody listens.

A Module's method runs in a named scope whose text says where the Module is. Scopes are
part of JAX's name stack: they stay with operations through every transform, and start
anew in a function that is traced on its own. So a jitted function that is traced once
and called for many layers does not say which layer it belongs to; the scopes around its
calls do. `resolve` puts the two together.

What is known when a capture opens is known by identity. Inside a function that JAX
traces, Modules are rebuilt, and know only their places: each where it is in its parent.
A text is one of

    /blocks/3          known to the capture by this path
    2<blocks/3         below the Module of the scope two further out
    ~app.Model!head    below a rebuilt app.Model, as a traced function has them
    ?app.Model!head    below an app.Model that is not part of what is captured

    +encoder/layer_0   below the scope around: named scopes of another library

(with one for each capture, if they differ, the outermost first), then the class of the
Module, with `!` if no Module of that class is inside it.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any, NamedTuple
from urllib.parse import quote, unquote
from weakref import WeakKeyDictionary, WeakValueDictionary

import jax

from treetap._capture.name_stacks import ModuleScope
from treetap._core.paths import Path
from treetap._core.trees.attributes import Node
from treetap._core.trees.pytree import adopt, opened
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
        texts: The path of every object inside the roots, as text, by its place.
        known: The same paths by their texts.
        classes: The classes of the objects inside each, by its place.
    """

    def __init__(self, roots: Sequence[Root], number: int = 0):
        self.number = number
        self.start = len(_frames.get())
        self.texts: dict[int, str] = {}
        self.known: dict[str, Path] = {}
        self.classes: dict[int, set[type]] = {}
        for root in roots:
            self._visit(root.node, root.path)
        self.tops = [Where(root.path, self.kind_text(root.node)) for root in roots]

    def _visit(self, value: Any, path: Path) -> set[type]:
        """Notes the objects in a value; gives the classes of those."""
        below: set[type] = set()
        own = {type(value)} if isinstance(value, Node) else below
        if own:
            place = id(value._pytree__place)
            if place in self.texts:
                return self.classes[place] | own
            text = self.texts[place] = f"/{_joined(path)}"
            self.known[text] = path
            self.classes[place] = below
        for key, child in _children(value):
            if not isinstance(child, Variable | jax.Array):
                below |= self._visit(child, (*path, key))
        return below | own

    def kind_text(self, module: Any) -> str:
        """The class of a Module, with `!` if none of that class is inside it."""
        below = self.classes.get(id(module._pytree__place))
        if below is None:  # it was made since
            return kind_text(module)
        return _class_text(type(module)) + "!" * (type(module) not in below)


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    """What is in an object or a container, with its keys; nothing in a leaf."""
    return zip(*(opened(value) or ((), ())))


_frames: ContextVar[tuple[Any, ...]] = ContextVar("frames", default=())
_captures: ContextVar[tuple[Roots, ...]] = ContextVar("captures", default=())
_texts: "WeakKeyDictionary[type, str]" = WeakKeyDictionary()
_classes: "WeakValueDictionary[str, type]" = WeakValueDictionary()


def class_named(text: str) -> type | None:
    """The class of Modules that a scope speaks of."""
    return _classes.get(text.rstrip("!"))


_naming = Lock()


def _class_text(cls: type) -> str:
    """A text of a class of its own; two threads get the same."""
    if cls not in _texts:
        with _naming:
            name = quote(f"{cls.__module__}.{cls.__qualname__}", safe=".")
            twins = (f"{name}*{n}" for n in itertools.count(2))  # defined again
            texts = itertools.chain([name], twins)
            text = next(text for text in texts if _classes.get(text, cls) is cls)
            _texts[cls], _classes[text] = text, cls
    return _texts[cls]


def kind_text(module: Any) -> str:
    """The class of a Module, with `!` if none of that class is inside it."""
    cls = type(module)
    waiting, seen = [module], set[int]()
    while waiting:
        for _, child in _children(waiting.pop()):
            if type(child) is cls:
                return _class_text(cls)
            if not isinstance(child, Variable) and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)
    return _class_text(cls) + "!"


def _encoded(key: Any) -> str:
    """A key as text: numbers as digits, and strings never so."""
    text = str(key)
    if isinstance(key, int) or (text.isascii() and text.isidentifier()):
        return text
    text = quote(text, safe="")
    return f"%{ord(text[0]):02X}{text[1:]}" if text[:1].isdigit() else text or "%"


def _joined(keys: Iterable[Any]) -> str:
    return "/".join(map(_encoded, keys))


def _decoded(part: str) -> Any:
    if part.isascii() and part.isdigit():
        return int(part)
    return "" if part == "%" else unquote(part)


def _split(text: str) -> Path:
    return tuple(_decoded(part) for part in text.split("/") if part)


def _text_for(module: Any, known: Roots, frames: Sequence[Any]) -> str:
    """Where a Module is, for one capture."""
    place, keys = module._pytree__place, ()
    while True:
        if text := known.texts.get(id(place)):
            return f"{text.rstrip('/')}/{_joined(keys)}" if keys else text
        for distance, (frame, _) in enumerate(reversed(frames)):
            if frame is place:
                return f"{distance}<{_joined(keys)}"
        parent, key, cls, is_rebuilt = place
        if parent is None:  # what was built was not captured; what was rebuilt may be
            return f"{'~' if is_rebuilt else '?'}{_class_text(cls)}!{_joined(keys)}"
        place, keys = parent, (*(key if isinstance(key, tuple) else (key,)), *keys)


class inside:
    """Runs a method of a Module in its scope."""

    __slots__ = ("_scope", "_token")

    def __init__(self, module: Any):
        frames, captures = _frames.get(), _captures.get()
        texts = [_text_for(module, c, frames[c.start :]) for c in captures]
        told = texts[0] if len({*texts}) == 1 else ";".join(texts)
        place = module._pytree__place
        text = f"{told}|{captures[0].kind_text(module)}"
        self._scope = jax.named_scope(ModuleScope(told.rpartition("/")[2], text))
        self._token = _frames.set((*frames, (place, text)))

    def __enter__(self) -> None:
        self._scope.__enter__()

    def __exit__(self, *exception: Any) -> None:
        _frames.reset(self._token)
        self._scope.__exit__(*exception)


def below_text(path: Path) -> str:
    """The text of scopes that no Module opened."""
    return f"+{_joined(path)}|"


def is_inside(module: Any) -> bool:
    """Whether the innermost scope is that of a Module."""
    frames = _frames.get()
    return bool(frames) and frames[-1][0] is module._pytree__place


def open_scopes(known: Roots) -> tuple[str, ...]:
    """The texts of the scopes that are open in one of the captures around."""
    return tuple([text for _, text in _frames.get()[known.start :]])


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
    scopes: Sequence[str], known: Roots, among: Iterable[Path] | None = None
) -> Where:
    """The path that scopes lead to, for one of the captures around.

    Args:
        scopes: Their texts, outermost first.
        known: What the capture knows.
        among: Paths of the roots that a rebuilt Module may be; by default all.
    """
    told, _, kind = (scopes[-1] if scopes else "").rpartition("|")
    if told in known.known:
        return Where(known.known[told], kind)
    roots = [one for one in known.tops if among is None or one.path in among]
    around: list[Where] = []
    here = Where((), "")
    for text in scopes:
        told, _, kind = text.rpartition("|")
        parts = told.split(";")
        body = parts[min(known.number, len(parts) - 1)]
        if body.startswith("+"):  # no Module counts it when it looks further out
            here = Where((*here.path, *_split(body[1:])), "")
            continue
        if body[0] in "~?":
            top, _, rest = body[1:].partition("!")
            candidates = () if body[0] == "?" else around[-1:] or roots
            start = _argument(top, candidates, around[-1:])
        elif body[0] == "/":
            start, rest = (), body
        else:
            distance, _, rest = body.partition("<")
            index = len(around) - 1 - int(distance)
            start = around[index].path if index >= 0 else ()
        here = Where((*start, *_split(rest)), kind)
        around.append(here)
    return here


def _argument(top: str, candidates: Sequence[Where], around: Sequence[Where]) -> Path:
    """The path of a Module of some class that came into a function as an argument.

    It is that of the one around or of a root, if it can be no other one; else it is
    called by its class, below the one around.
    """
    alike = [one for one in candidates if one.kind.rstrip("!") == top]
    if len(alike) == 1 and alike[0].kind.endswith("!"):
        return alike[0].path
    short = unquote(top.partition("*")[0].rpartition(".")[2])
    return (*(key for one in around for key in one.path), short)


def find_roots(tree: Any, path: Path = ()) -> Iterator[Root]:
    """The outermost objects in a tree of arguments."""
    if isinstance(tree, Node):
        yield Root(path, tree)
        return
    for key, child in _children(tree):
        yield from find_roots(child, (*path, key))


# Places of rebuilt objects.


def put_in_place(original: Any, copy: Any) -> None:
    """Lets rebuilt objects be where the caller's are, for those who listen."""
    if isinstance(original, Node):
        copy._pytree__place[:2] = original._pytree__place[:2]
    else:
        for (_, one), (_, two) in zip(_children(original), _children(copy)):
            put_in_place(one, two)


def name_shared(tree: Any, seen: set[int] | None = None) -> None:
    """Lets rebuilt objects that stand twice be where they are met first."""
    seen = set() if seen is None else seen
    below = opened(tree)
    if below is None or id(tree) in seen:
        return
    seen.add(id(tree))
    for key, child in zip(*below):
        is_below = isinstance(tree, Node) and isinstance(child, Node)
        if is_below and id(child) not in seen:
            adopt(child, key, tree._pytree__place)
        name_shared(child, seen)
