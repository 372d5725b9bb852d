# SPDX-License-Identifier: Apache-2.0
"""Scopes: where in a model an operation is, while somebody listens.

A Module's method runs in a named scope whose text says where the Module is, relative to
the method around it. Scopes are part of JAX's name stack: they stay with operations
through every transform, and start anew in a function that is traced on its own. So a
jitted function that is traced once and called for many layers does not say which layer
it belongs to; the scopes around its calls do. `resolve` puts the two together.

A text is one of

    2<blocks/3|app.Block!      below the Module two scopes further out
    /model/blocks/3|app.Block  from a root of the capture
    ~app.Model!blocks/3|...    below some app.Model that came in as an argument

followed by the class of the Module, with `!` if no Module of that class is inside it.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple
from urllib.parse import quote, unquote
from weakref import WeakKeyDictionary, WeakSet

import jax

from treetap._attributes import Node
from treetap._pytrees import opened
from treetap._trees import Path
from treetap._variables import Variable
from treetap._walk import MARK


class Root(NamedTuple):
    """A Module among the arguments of a capture: its path, class and place."""

    path: Path
    kind: str
    place: Any


_frames: ContextVar[tuple[Any, ...]] = ContextVar("frames", default=())
_roots: ContextVar[tuple[Root, ...]] = ContextVar("roots", default=())
_classes: dict[str, "WeakSet[type]"] = {}
_texts: "WeakKeyDictionary[type, str]" = WeakKeyDictionary()


def classes_named(text: str) -> Iterable[type]:
    """The classes of Modules that a scope may speak of."""
    return _classes.get(text.rstrip("!"), ())


def _class_text(cls: type) -> str:
    text = _texts.get(cls)
    if text is None:
        text = quote(f"{cls.__module__}.{cls.__qualname__}", safe=".")
        _texts[cls] = text
        _classes.setdefault(text, WeakSet()).add(cls)
    return text


def kind_text(module: Any) -> str:
    """The class of a Module, with `!` if none of that class is inside it."""
    cls = type(module)
    waiting = [module]
    while waiting:
        below = opened(waiting.pop())
        for child in below[1] if below is not None else ():
            if type(child) is cls:
                return _class_text(cls)
            if not isinstance(child, Variable):
                waiting.append(child)
    return _class_text(cls) + "!"


_PLAIN = re.compile(r"[\w/]*", re.ASCII)


def _joined(keys: Iterable[Any]) -> str:
    text = "/".join(map(str, keys))
    if _PLAIN.fullmatch(text):
        return text
    return "/".join(quote(part, safe="") for part in text.split("/"))


def _split(text: str) -> Path:
    parts = (unquote(part) for part in text.split("/") if part)
    return tuple(int(part) if part.isdigit() else part for part in parts)


def scope_text(module: Any) -> str:
    """Where a Module is, as seen from the method that is running."""
    frames, roots = _frames.get(), _roots.get()
    place, keys = module._pytree__place, []
    while True:
        for distance, frame in enumerate(reversed(frames)):
            if frame is place:
                return f"{distance}<{_joined(reversed(keys))}"
        for root in roots:
            if root.place is place:
                return f"/{_joined((*root.path, *reversed(keys)))}"
        if place[0] is None:
            return f"~{_class_text(place[2])}!{_joined(reversed(keys))}"
        keys.append(place[1])
        place = place[0]


class inside:
    """Runs a method of a Module in its scope."""

    __slots__ = ("_scope", "_token")

    def __init__(self, module: Any):
        text = f"{MARK}{scope_text(module)}|{kind_text(module)}"
        self._scope = jax.named_scope(text)
        self._token = _frames.set((*_frames.get(), module._pytree__place))

    def __enter__(self) -> None:
        self._scope.__enter__()

    def __exit__(self, *exception: Any) -> None:
        _frames.reset(self._token)
        self._scope.__exit__(*exception)


def is_inside(module: Any) -> bool:
    """Whether the innermost scope is that of a Module."""
    frames = _frames.get()
    return bool(frames) and frames[-1] is module._pytree__place


@contextmanager
def rooted(roots: tuple[Root, ...]) -> Iterator[None]:
    """Begins a capture: no method is running, and these are its roots."""
    tokens = _frames.set(()), _roots.set(roots)
    try:
        yield
    finally:
        _frames.reset(tokens[0])
        _roots.reset(tokens[1])


class Where(NamedTuple):
    """A resolved place: the path of a Module, and its class as text."""

    path: Path
    kind: str


def resolve(scopes: Sequence[str], roots: Sequence[Root]) -> Where:
    """The path that scopes lead to."""
    around: list[Where] = []
    for text in scopes:
        body, _, kind = text.rpartition("|")
        if body.startswith("/"):
            path = _split(body[1:])
        elif body.startswith("~"):
            top, _, rest = body[1:].partition("!")
            path = (*_top(top, around, roots), *_split(rest))
        else:
            distance, _, rest = body.partition("<")
            index = len(around) - 1 - int(distance)
            path = (*(around[index].path if index >= 0 else ()), *_split(rest))
        around.append(Where(path, kind))
    return around[-1] if around else Where((), "")


def _top(top: str, around: list[Where], roots: Sequence[Root]) -> Path:
    """The path of a Module of some class that came into a function as an argument.

    It is that of the Module around, or of a root, if it can be no other one; else it is
    called by its class.
    """
    if around:
        here = around[-1]
        return here.path if here.kind == top + "!" else (*here.path, _short(top))
    alike = [root for root in roots if root.kind.rstrip("!") == top]
    if len(alike) == 1 and alike[0].kind.endswith("!"):
        return alike[0].path
    return (_short(top),)


def _short(kind: str) -> str:
    return unquote(kind.rsplit(".", 1)[-1])


def find_roots(tree: Any, path: Path = ()) -> Iterator[Root]:
    """The outermost objects in a tree of arguments."""
    if isinstance(tree, Node):
        yield Root(path, kind_text(tree), tree._pytree__place)
        return
    below = opened(tree)
    if below is not None:
        for key, child in zip(*below):
            yield from find_roots(child, (*path, key))
