# SPDX-License-Identifier: Apache-2.0
"""Selectors: which sites of a model are meant.

A selector is made from

- a glob: `"blocks/*/attn/**"` for paths, `"**/mlp:__call__"` for a name there too;
- a compiled regular expression, searched in `path:name`;
- a class: of Modules, or a kind of Variable;
- a function from a site to True or False;

and combined with `&`, `|` and `~`. What it looks at of a site are `path`, `name`,
`index`, `kind` and `module`.
"""

import fnmatch
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from treetap._capture.module_paths import class_named
from treetap._core.errors import CaptureError
from treetap._core.paths import Path
from treetap._core.variables.variable import Variable
from treetap._core.wording import escaped, near_to, shown


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
        # The names are all that it can take; None if it can be any.
        matches, self.names = _rule(what)
        self._matches, self._text = matches, repr(what)
        if call is not None:
            self._matches = lambda site: site.index == call and matches(site)
            self._text += f", call={call}"

    def __call__(self, site: Any) -> bool:
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


Matches = Callable[[Any], bool]
Names = frozenset[str] | None


def _made(matches: Matches, text: str, names: Names = None) -> Select:
    made = object.__new__(Select)
    made._matches, made._text, made.names = matches, text, names
    return made


def as_select(what: Any) -> Select:
    """A selector from what one can be made from; a list means any of its items."""
    if isinstance(what, Select):
        return what
    if isinstance(what, list | tuple):
        chosen = [as_select(item) for item in what]
        return _made(lambda site: any(one(site) for one in chosen), repr(what))
    return Select(what)


def _rule(what: Any) -> tuple[Matches, Names]:
    """Which sites something takes, and the names it can take."""
    if isinstance(what, str):
        return _glob(what)
    if isinstance(what, Select):
        return what._matches, what.names
    if isinstance(what, re.Pattern):
        return lambda site: bool(what.search(site_text(site.path, site.name))), None
    if isinstance(what, type):
        return functools.partial(_is_of, what), None
    if callable(what):
        return lambda site: bool(what(site)), None
    raise CaptureError(
        f"A selector is a glob, a regular expression, a class or a function, not "
        f"{what!r}."
    )


def _is_of(what: type, site: Any) -> bool:
    """Whether a site is of a kind of Variable, or in a Module of a class."""
    cls = site.kind if issubclass(what, Variable) else class_named(site.module)
    return cls is not None and issubclass(cls, what)


def _glob(text: str) -> tuple[Matches, Names]:
    """Sites by a glob: of the path and the name after `:`, or of both joined by `/`."""
    body, _, index = text.partition("#")
    if index and re.fullmatch(r"\d{1,9}", index) is None:
        raise CaptureError(f"The call index in the selector {text!r} is not a number.")
    path, colon, name = body.partition(":")
    pattern, name = [part for part in path.split("/") if part], name or "*"

    def matches(site: Any) -> bool:
        if index and site.index != int(index):
            return False
        parts = [str(key) for key in site.path]
        if fnmatch.fnmatchcase(site.name, name) and _fits(pattern, parts):
            return True
        return not colon and _fits(pattern, [*parts, site.name])

    return matches, None if set(name) & set("*?[") else frozenset({name})


def _fits(pattern: Sequence[str], parts: Sequence[str]) -> bool:
    """Whether a glob takes a path: `*` is within a part, `**` any number of parts."""
    ends = {0}  # how many parts the pattern so far can have taken
    for wanted in pattern:
        if wanted == "**":
            first = min(ends, default=len(parts) + 1)
            ends = {*range(first, len(parts) + 1)}
        else:
            takes = [fnmatch.fnmatchcase(part, wanted) for part in parts]
            ends = {n + 1 for n, flag in enumerate(takes) if flag and n in ends}
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
