# SPDX-License-Identifier: Apache-2.0
"""Selectors: which sites of a model are meant.

A selector is made from

- a glob: `"blocks/*/attn/**"` for paths, `"**/mlp:__call__"` for a name there too;
- a compiled regular expression, searched in `path:name`;
- a class: of Modules, or a kind of Variable;
- a function from a site to True or False;

and combined with `&`, `|` and `~`.
"""

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from treetap._capture.module_paths import class_named
from treetap._core.errors import CaptureError
from treetap._core.paths import Path
from treetap._core.variables.variable import Variable
from treetap._core.wording import escaped, near_to, shown


class Selectable(Protocol):
    """What a selector looks at."""

    @property
    def path(self) -> Path: ...
    @property
    def name(self) -> str: ...
    @property
    def index(self) -> int: ...
    @property
    def kind(self) -> type | None: ...
    @property
    def module(self) -> str: ...


def site_text(path: Path, name: str, index: int = 0) -> str:
    """How a site is written: `blocks/3/attn:__call__`, and `#1` for its second call.

    Names may come from a file; they are printed harmlessly.
    """
    place = "/".join(map(str, path))
    text = escaped(f"{place}:{name}" if place else name)
    return f"{text}#{index}" if index else text


class Select:
    """A selector; see the module's text.

    Args:
        what: A glob, a regular expression, a class or a function.
        call: Only this call of each site.

    Examples:
        >>> import treetap as tt
        >>> first = tt.Select("blocks/*/attn") & ~tt.Select("blocks/0/**")
    """

    __slots__ = ("_matches", "_text", "names")
    _matches: Callable[[Any], bool]

    def __init__(self, what: Any = "**", *, call: int | None = None):
        self.names = _names_in(what)  # all that it can take; None if it can be any
        self._text = repr(what) if call is None else f"{what!r}, call={call}"
        matches = self._matches = _matcher(what)
        if call is not None:
            self._matches = lambda site: site.index == call and matches(site)

    def __call__(self, site: Selectable) -> bool:
        """Whether a site is meant."""
        return self._matches(site)

    def __repr__(self) -> str:
        text = self._text
        is_wrapped = text.startswith("(") and text.endswith(")")
        return f"Select{text}" if is_wrapped else f"Select({text})"

    def __and__(self, other: Any) -> "Select":
        other = as_select(other)
        known = [one.names for one in (self, other) if one.names is not None]
        names = frozenset.intersection(*known) if known else None
        text = f"({self._text} & {other._text})"
        return _made(lambda site: self(site) and other(site), text, names)

    def __or__(self, other: Any) -> "Select":
        other = as_select(other)
        text = f"({self._text} | {other._text})"
        names = None
        if self.names is not None and other.names is not None:
            names = self.names | other.names
        return _made(lambda site: self(site) or other(site), text, names)

    def __invert__(self) -> "Select":
        return _made(lambda site: not self(site), f"~{self._text}")


Names = frozenset[str] | None


def _made(matches: Callable[[Any], bool], text: str, names: Names = None) -> Select:
    made = object.__new__(Select)
    made._matches, made._text, made.names = matches, text, names
    return made


def _names_in(what: Any) -> Names:
    """The names a selector can take, if it says so."""
    if isinstance(what, Select):
        return what.names
    name = what.partition("#")[0].partition(":")[2] if isinstance(what, str) else ""
    return frozenset({name}) if name and not set(name) & set("*?[") else None


def as_select(what: Any) -> Select:
    """A selector from what one can be made from; a list means any of its items."""
    if isinstance(what, Select):
        return what
    if isinstance(what, list | tuple):
        chosen = [as_select(item) for item in what]
        return _made(lambda site: any(one(site) for one in chosen), repr(what))
    return Select(what)


def _matcher(what: Any) -> Callable[[Any], bool]:
    if isinstance(what, str):
        return _glob(what)
    if isinstance(what, re.Pattern):
        return lambda site: bool(what.search(site_text(site.path, site.name)))
    if isinstance(what, type):
        is_kind = issubclass(what, Variable)

        def matches(site: Any) -> bool:
            cls = site.kind if is_kind else class_named(site.module)
            return cls is not None and issubclass(cls, what)

        return matches
    if callable(what):
        return lambda site: bool(what(site))
    raise CaptureError(
        f"A selector is a glob, a regular expression, a class or a function, not "
        f"{what!r}."
    )


def _glob(text: str) -> Callable[[Any], bool]:
    """Sites by a glob: of the path and the name after `:`, or of both joined by `/`."""
    body, _, index = text.partition("#")
    if index and re.fullmatch(r"\d{1,9}", index) is None:
        raise CaptureError(f"The call index in the selector {text!r} is not a number.")
    path, colon, name = body.partition(":")
    pattern = [part for part in path.split("/") if part]
    is_anywhere = pattern == ["**"]

    def matches(site: Any) -> bool:
        if index and site.index != int(index):
            return False
        if colon and not fnmatch.fnmatchcase(site.name, name or "*"):
            return False
        if is_anywhere:
            return True
        parts = [str(key) for key in site.path]
        spellings = [parts] if colon else [parts, [*parts, site.name]]
        return any(_fits(pattern, spelling) for spelling in spellings)

    return matches


def _fits(pattern: Sequence[str], parts: Sequence[str]) -> bool:
    """Whether a glob takes a path: `*` is within a part, `**` any number of parts."""
    ends = {0}  # how many parts the pattern so far can have taken
    for wanted in pattern:
        if wanted == "**":
            ends = set(range(min(ends), len(parts) + 1))
        else:
            ends = {
                n + 1
                for n in ends
                if n < len(parts) and fnmatch.fnmatchcase(parts[n], wanted)
            }
        if not ends:
            return False
    return len(parts) in ends


def refuse_nothing(selector: Select, texts: Iterable[str], what: str) -> CaptureError:
    """The error for a selector that took nothing, with the sites it may have meant."""
    known = sorted(set(texts))
    near = near_to(selector._text.strip("'\""), known, 5, 0.3) or known[:8]
    lines = "\n".join(f"  {shown(text)}" for text in near)
    return CaptureError(
        f"{what}: {selector} matches none of {len(known)} sites. Near it are:\n"
        + (lines or "  (there are no sites at all)")
    )
