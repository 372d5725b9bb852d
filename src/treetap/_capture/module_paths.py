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

import re
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
        tops: The classes of the outermost objects, by their paths.
        number: Of the capture, among those around; the outermost has 0.
        start: How many scopes were open.
        paths: The path of every object inside the roots, by its place; as text, too.
        kinds: The class of each, as `kind_text` gives it.
        known: Where the scope of each of them leads, by the scope's text.
    """

    def __init__(self, roots: Sequence[Root], number: int = 0):
        self.number = number
        self.start = len(_frames.get())
        self.paths: dict[int, tuple[Path, str]] = {}
        self.kinds: dict[int, str] = {}
        self.known: dict[str, Where] = {}
        for root in roots:
            text = f"/{_joined(root.path)}" if root.path else ""
            self._visit(root.node, root.path, text)
        self.tops = {root.path: self.kind_of(root.node) for root in roots}

    def kind_of(self, module: Any) -> str:
        """The class of a Module, as it was when the capture opened, if it was there."""
        return self.kinds.get(id(module._pytree__place)) or kind_text(module)

    def _visit(self, value: Any, path: Path, text: str) -> set[type]:
        """Notes the objects in a value; gives their classes."""
        cls, below, found = type(value), opened(value), set[type]()
        place = id(value._pytree__place) if isinstance(value, Node) else None
        if place in self.paths:
            return {cls}
        if place is not None:
            self.paths[place] = path, text or "/"
        for key, child in zip(*below) if below is not None else ():
            if not isinstance(child, Variable | jax.Array):
                found |= self._visit(child, (*path, key), f"{text}/{_encoded(key)}")
        if place is not None:
            kind = _class_text(cls) + ("" if cls in found else "!")
            self.kinds[place] = kind
            self.known[f"{text or '/'}|{kind}"] = Where(path, kind)
            found.add(cls)
        return found


_frames: ContextVar[tuple[Any, ...]] = ContextVar("frames", default=())
_captures: ContextVar[tuple[Roots, ...]] = ContextVar("captures", default=())
_texts: "WeakKeyDictionary[type, str]" = WeakKeyDictionary()
_classes: "WeakValueDictionary[str, type]" = WeakValueDictionary()


def class_named(text: str) -> type | None:
    """The class of Modules that a scope speaks of."""
    return _classes.get(text.rstrip("!"))


_naming = Lock()


def _class_text(cls: type) -> str:
    return _texts.get(cls) or _named(cls)


def _named(cls: type) -> str:
    """Gives a class a text of its own; two threads get the same."""
    with _naming:
        text = quote(f"{cls.__module__}.{cls.__qualname__}", safe=".")
        twins = 1
        while _classes.get(text, cls) is not cls:  # a class that was defined again
            twins += 1
            text = f"{text.partition('*')[0]}*{twins}"
        _texts[cls], _classes[text] = text, cls
    return text


def kind_text(module: Any) -> str:
    """The class of a Module, with `!` if none of that class is inside it."""
    cls = type(module)
    waiting, seen = [module], set[int]()
    while waiting:
        below = opened(waiting.pop())
        for child in below[1] if below is not None else ():
            if type(child) is cls:
                return _class_text(cls)
            if not isinstance(child, Variable) and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)
    return _class_text(cls) + "!"


_PLAIN = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def _encoded(key: Any) -> str:
    """A key as text: numbers as digits, and strings never so."""
    if isinstance(key, int):
        return str(key)
    text = str(key)
    if _PLAIN.fullmatch(text):
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
    place, keys = module._pytree__place, []
    while True:
        found = known.paths.get(id(place))
        if found is not None:
            path, text = found
            return text if not keys else f"/{_joined((*path, *reversed(keys)))}"
        for distance, (frame, _) in enumerate(reversed(frames)):
            if frame is place:
                return f"{distance}<{_joined(reversed(keys))}"
        if place[0] is None:
            break
        key = place[1]
        keys += reversed(key) if isinstance(key, tuple) else (key,)
        place = place[0]
    # What was built is not what was captured; what was rebuilt may be.
    mark = "~" if place[3] else "?"
    return f"{mark}{_class_text(place[2])}!{_joined(reversed(keys))}"


class inside:
    """Runs a method of a Module in its scope."""

    __slots__ = ("_scope", "_token")

    def __init__(self, module: Any):
        frames, captures = _frames.get(), _captures.get()
        texts = [_text_for(module, c, frames[c.start :]) for c in captures]
        same = len(texts) == 1 or len(set(texts)) == 1
        told = texts[0] if same else ";".join(texts)
        place = module._pytree__place
        text = f"{told}|{captures[-1].kind_of(module)}"
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
    here = known.known.get(scopes[-1]) if scopes else None
    if here is not None:
        return here
    around: list[Where] = []
    here = Where((), "")
    for text in scopes:
        told, _, kind = text.rpartition("|")
        parts = told.split(";")
        body = parts[min(known.number, len(parts) - 1)]
        if body.startswith("+"):  # no Module counts it when it looks further out
            here = Where((*here.path, *_split(body[1:])), "")
            continue
        if body.startswith("/"):
            path = _split(body[1:])
        elif body[0] in "~?":
            top, _, rest = body[1:].partition("!")
            if around:
                start = _below(around[-1], top, body[0] == "~")
            else:
                roots = known.tops if among is None else among
                start = _top(top, known, roots if body[0] == "~" else ())
            path = (*start, *_split(rest))
        else:
            distance, _, rest = body.partition("<")
            index = len(around) - 1 - int(distance)
            path = (*(around[index].path if index >= 0 else ()), *_split(rest))
        here = Where(path, kind)
        around.append(here)
    return here


def _below(here: Where, top: str, is_rebuilt: bool) -> Path:
    """The path of a Module of some class, inside another: it, if it can be no other."""
    same = is_rebuilt and here.kind == top + "!"
    return here.path if same else (*here.path, _short(top))


def _top(top: str, known: Roots, roots: Iterable[Path]) -> Path:
    """The path of a Module of some class that came into a function as an argument.

    It is that of a root, if it can be no other one; else it is called by its class.
    """
    alike = [path for path in roots if known.tops[path].rstrip("!") == top]
    if len(alike) == 1 and known.tops[alike[0]].endswith("!"):
        return alike[0]
    return (_short(top),)


def _short(kind: str) -> str:
    return unquote(kind.partition("*")[0].rsplit(".", 1)[-1])


def find_roots(tree: Any, path: Path = ()) -> Iterator[Root]:
    """The outermost objects in a tree of arguments."""
    if isinstance(tree, Node):
        yield Root(path, tree)
        return
    below = opened(tree)
    if below is not None:
        for key, child in zip(*below):
            yield from find_roots(child, (*path, key))


# Places of rebuilt objects.


def put_in_place(original: Any, copy: Any) -> None:
    """Lets rebuilt objects be where the caller's are, for those who listen."""
    if isinstance(original, Node):
        copy._pytree__place[:2] = original._pytree__place[:2]
    elif (below := opened(original)) is not None:
        for one, two in zip(below[1], (opened(copy) or ((), ()))[1]):
            put_in_place(one, two)


def name_shared(tree: Any) -> None:
    """Lets rebuilt objects that stand twice be where they are met first."""
    seen: set[int] = set()

    def visit(value: Any) -> None:
        below = opened(value)
        if below is None or id(value) in seen:
            return
        seen.add(id(value))
        for key, child in zip(*below):
            is_below = isinstance(value, Node) and isinstance(child, Node)
            if is_below and id(child) not in seen:
                adopt(child, key, value._pytree__place)
            visit(child)

    visit(tree)
