# SPDX-License-Identifier: Apache-2.0
"""Texts from elsewhere, in messages: short, printable, and names that look like one.

A file or a user may give names of any length, with anything in them, in any number.
What is shown of them fits a line and leads no terminal astray, and looking for the one
that was meant takes bounded time.
"""

import difflib
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

LONG, MANY = 200, 1000  # letters of a name, and names, that are looked at
LONGEST = 600  # letters of what another library says


def quoted(name: str) -> str:
    """A name, safe to print and not longer than a line."""
    return repr(name if len(name) <= 120 else f"{name[:80]}…{name[-30:]}")


def shown(name: str) -> str:
    """A name as it is, unless a line or a terminal could not take it."""
    return name if name.isprintable() and len(name) <= 120 else quoted(name)


def printable(text: str) -> str:
    """A text without what would steer a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def escaped(text: str) -> str:
    """A text in one line; what would steer a terminal is written as Python does it."""
    return text if text.isprintable() else repr(text)[1:-1]


def words_of(error: BaseException) -> str:
    """What an error of another library says; it may quote a broken file at length."""
    text = str(error)
    if len(text) > LONGEST:
        text = f"{text[: LONGEST - 100]}…{text[-99:]}"
    return printable(text)


def near_to(
    name: str, names: Iterable[str], count: int, cutoff: float = 0.6
) -> list[str]:
    """Names that look like one, the likest first; of many, or long ones, not all."""
    short = [each for each in itertools.islice(names, MANY) if len(each) <= LONG]
    return difflib.get_close_matches(name[:LONG], short, n=count, cutoff=cutoff)


def many(count: int, name: str) -> str:
    """`1 site`, `2 sites`."""
    return f"{count:,} {name}" + ("" if count == 1 else "s")


def first_few(
    items: Sequence[Any], count: int = 8, before: str = "", end: str = ", "
) -> str:
    """The first few items as text, and how many more there are.

    Args:
        items: What to list.
        count: How many are written out.
        before: What stands before each, for lists that have a line an item.
        end: What stands between two.

    Examples:
        >>> from treetap._core.wording import first_few
        >>> first_few(["a", "b", "c"], 2)
        'a, b and 1 more'
        >>> print(first_few(["a", "b", "c"], 1, before="  - ", end="\\n"))
          - a
          - and 2 more
    """
    text = end.join(f"{before}{item}" for item in items[:count])
    if len(items) <= count:
        return text
    rest = f"and {len(items) - count:,} more"
    return f"{text}{end}{before}{rest}" if before else f"{text} {rest}"


def typed(value: Any) -> str:
    """An array, or its type, as people write it: `float32[2,3]`.

    Examples:
        >>> import numpy as np
        >>> from treetap._core.wording import typed
        >>> typed(np.zeros((2, 3), np.float32))
        'float32[2,3]'
    """
    dtype = getattr(value, "dtype", None)
    kind = type(value).__name__ if dtype is None else dtype
    return type_text(kind, np.shape(value))


def type_text(dtype: Any, shape: Iterable[int]) -> str:
    """The same, for a type and a shape."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def json_number(value: Any) -> Any:
    """A number as JSON has it: one that is not finite is a text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
