# SPDX-License-Identifier: Apache-2.0
"""Tables of comparisons: a line for each site, compact where there is little room."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from treetap._report.table import Fitting, short_types

if TYPE_CHECKING:
    from rich.table import Table

SHOWN = 8  # names of what is alone


class Line(Protocol):
    """What a table shows of one site."""

    @property
    def site(self) -> str: ...
    @property
    def other(self) -> str: ...
    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]: ...
    @property
    def dtypes(self) -> tuple[str, str]: ...
    @property
    def max_abs(self) -> float: ...
    @property
    def relative(self) -> float: ...
    @property
    def cosine(self) -> float: ...
    @property
    def ulp(self) -> float | None: ...
    @property
    def limit(self) -> float: ...
    @property
    def reason(self) -> str: ...


def number(value: float | None) -> str:
    """A distance in a few letters."""
    if value is None or math.isnan(value):
        return "-"
    return "0" if value == 0 else "inf" if math.isinf(value) else f"{value:.1e}"


def _steps(value: float | None) -> str:
    return f"{value:.0f}" if value is not None and value < 1e5 else number(value)


def _cosine(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.6f}"


def types_text(line: Line) -> str:
    """Shapes and types of both sides, once where they are the same."""
    texts = [
        f"{dtype}[{','.join(map(str, shape))}]"
        for shape, dtype in zip(line.shapes, line.dtypes)
    ]
    return " / ".join(dict.fromkeys(texts))


def table_of(lines: Sequence[Line]) -> Fitting:
    """The table of a comparison."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    has_names = any(line.other != line.site for line in lines)

    def draw(compact: bool) -> "Table":
        table = Table(
            box=box.SIMPLE_HEAD,
            show_edge=False,
            padding=0 if compact else (0, 1),
        )
        heads = ["site", *(["in b"] if has_names and not compact else []), "type"]
        figures = ["max abs", "relative", *([] if compact else ["cosine", "ulp"])]
        if compact:
            heads.remove("type")
        for head in heads:
            table.add_column(head, overflow="fold")
        for head in figures:
            table.add_column(head, justify="right", no_wrap=True)
        table.add_column("limit", justify="right", no_wrap=True)
        table.add_column("", overflow="fold")
        for line in lines:
            cells = _cells(line, heads, compact)
            style = "bold red" if line.reason else ""
            table.add_row(*(Text(cell, style) for cell in cells))
        return table

    return Fitting(draw)


def _cells(line: Line, heads: Sequence[str], compact: bool) -> list[str]:
    texts = {"site": line.site, "in b": line.other}
    texts["type"] = short_types(types_text(line))
    figures = [number(line.max_abs), number(line.relative)]
    if not compact:
        figures += [_cosine(line.cosine), _steps(line.ulp)]
    mark = line.reason and ("differs" if compact else line.reason)
    return [*(texts[head] for head in heads), *figures, number(line.limit), mark]


def alone_text(names: Sequence[str], side: str) -> str:
    """A sentence on sites that only one side has; empty when there are none."""
    if not names:
        return ""
    shown = ", ".join(names[:SHOWN]) + (" …" if len(names) > SHOWN else "")
    return f"Only in {side} ({len(names)}): {shown}."


def plain(value: Any) -> Any:
    """A number as JSON has it: what is not finite is a text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
