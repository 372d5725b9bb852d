# SPDX-License-Identifier: Apache-2.0
"""reprlib: printing objects of one's own as Modules print, an attribute a line.

A class derives from `Representable` and yields an `Object`, then an `Attr` for each
attribute, from `__nnx_repr__`. Nothing is coloured.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class Object:
    """How an object prints: its name, and what stands around its attributes."""

    type: str | type
    start: str = "("
    end: str = ")"
    kv_sep: str = "="
    indent: str = "  "
    empty_repr: str = ""
    comment: str = ""
    same_line: bool = False


@dataclass
class Attr:
    """An attribute of an object that is printed; a raw one is text as it stands."""

    key: str
    value: Any
    start: str = ""
    end: str = ""
    use_raw_value: bool = False
    use_raw_key: bool = False


class Representable:
    """Mixin: prints what `__nnx_repr__` yields."""

    __slots__ = ()

    def __nnx_repr__(self) -> Iterator[Object | Attr]:
        """An `Object`, then an `Attr` for each attribute."""
        raise NotImplementedError(f"{type(self).__name__} has no `__nnx_repr__`.")

    def __repr__(self) -> str:
        return get_repr(self)

    __str__ = __repr__


def get_repr(obj: Representable) -> str:
    """The text of an object that has `__nnx_repr__`.

    Args:
        obj: The object.
    """
    if not isinstance(obj, Representable):
        raise TypeError(
            f"get_repr: expected a Representable, got {type(obj).__name__}."
        )
    parts: Iterator[Any] = iter(obj.__nnx_repr__())
    head = next(parts)
    lines: list[str] = []
    for attr in parts:
        is_text = attr.use_raw_value and isinstance(attr.value, str)
        value = attr.value if is_text else repr(attr.value)
        separator = head.kv_sep if attr.key else ""
        lines.append(f"{attr.start}{attr.key}{separator}{value}{attr.end}")
    name = head.type if isinstance(head.type, str) else head.type.__name__
    opening = f"{name}{head.start}{head.comment}"
    if not lines:
        return head.empty_repr or opening + head.end
    if head.same_line:
        return f"{opening}{', '.join(lines)}{head.end}"
    inside = textwrap.indent(",\n".join(lines), head.indent)
    return f"{opening}\n{inside}\n{head.end}"


@dataclass(repr=False)
class PrettyMapping(Representable):
    """Prints a mapping, an item a line."""

    mapping: Mapping[Any, Any]

    def __nnx_repr__(self) -> Iterator[Object | Attr]:
        """The items, under their keys."""
        yield Object(type(self), "({", "})", ": ")
        for key, value in self.mapping.items():
            yield Attr(repr(key), value, use_raw_key=True)


@dataclass(repr=False)
class PrettySequence(Representable):
    """Prints a sequence, an item a line."""

    sequence: Sequence[Any]

    def __nnx_repr__(self) -> Iterator[Object | Attr]:
        """The items."""
        yield Object(type(self), "([", "])")
        for value in self.sequence:
            yield Attr("", value)
