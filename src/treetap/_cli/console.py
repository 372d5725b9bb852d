# SPDX-License-Identifier: Apache-2.0
"""Showing: consoles, progress, and tables that fit the terminal.

Tables go to stdout, progress to stderr and only where that is a terminal. A table that
is too wide leaves out the columns that matter least, and says which; it is never
garbled. What is piped has no colours and all columns.
"""

import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from treetap._core.wording import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.progress import Progress
    from rich.table import Table
    from rich.text import Text

PIPED_WIDTH = 160
SITE_WIDTH = 26  # what a name gets before other columns do
BLOCKS, LETTERS = " ▁▂▃▄▅▆▇█", " .:-=+*#@"


def console_of() -> "Console":
    """The console of results."""
    from rich.console import Console

    is_free = not sys.stdout.isatty() and not os.environ.get("COLUMNS", "").isdigit()
    width = PIPED_WIDTH if is_free else None
    return Console(file=sys.stdout, width=width, highlight=False, soft_wrap=False)


@contextmanager
def progress_of(enabled: bool = True) -> Iterator["Progress"]:
    """Bars for long work, on stderr; nothing where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(file=sys.stderr)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("{task.fields[told]}"),
    )
    shown = enabled and sys.stderr.isatty() and not console.is_dumb_terminal
    with Progress(
        *columns,
        console=console,
        disable=not shown,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # else what is printed is a result
    ) as progress:
        yield progress


@contextmanager
def waiting(text: str, enabled: bool = True) -> Iterator[None]:
    """Says what is going on, while it is."""
    with progress_of(enabled) as progress:
        progress.add_task(text, total=None, told="")
        yield


def many(count: int, name: str) -> str:
    """`1 site`, `2 sites`."""
    return f"{count:,} {name}" + ("" if count == 1 else "s")


def number_text(value: float | None) -> str:
    """A number in at most eight letters; `-` if it is not known."""
    if value is None:
        return "-"
    size = abs(value)
    if size == 0:
        return "0"
    if not 1e-3 <= size < 1e5:
        return f"{value:.1e}"
    digits = 3 if size < 10 else 2 if size < 100 else 1 if size < 1000 else 0
    return f"{value:.{digits}f}"


def share_text(value: float | None) -> str:
    """A share in percent; `-` if it is not known."""
    if value is None:
        return "-"
    return "<1%" if 0 < value < 0.01 else f"{value:.0%}"


def spark(counts: Sequence[float], width: int, signs: str = BLOCKS) -> str:
    """A histogram in a line of blocks, from its first full bin to its last."""
    full = [n for n, count in enumerate(counts) if count > 0]
    if not full:
        return ""
    inner = list(counts)[full[0] : full[-1] + 1]
    if len(inner) == 1:
        return signs[-1]
    width = min(width, len(inner))
    cuts = [len(inner) * n // width for n in range(width + 1)]
    sums = [sum(inner[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]
    most, steps = max(sums), len(signs) - 2
    levels = [1 + round(steps * each / most) if each > 0 else 0 for each in sums]
    return "".join(signs[level] for level in levels)


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        head: Its title.
        cells: Its texts, one for each row.
        rank: How much it matters: those of the highest numbers go first.
        is_number: Whether it is set flush right.
        least: What it may be narrowed to, by folding; 0 if it may not.
        total: What stands below it.
    """

    head: str
    cells: Sequence[str]
    rank: int
    is_number: bool = True
    least: int = 0
    total: str = ""

    @property
    def full(self) -> int:
        """How wide it would be."""
        from rich.cells import cell_len

        return max(map(cell_len, (self.head, self.total, *self.cells)))

    @property
    def needed(self) -> int:
        """How wide it has to be."""
        return min(self.full, self.least) if self.least else self.full


GAP = 2
NO_STYLES: Mapping[int, str] = MappingProxyType({})


class Listing:
    """A table that leaves out columns until it fits.

    Args:
        columns: In their order.
        styles: Of rows, by number; rich's.
    """

    def __init__(
        self, columns: Sequence[Column], styles: Mapping[int, str] = NO_STYLES
    ):
        self.columns, self.styles = columns, styles

    def fitting(self, width: int) -> list[Column]:
        """The columns that there is room for."""
        kept = list(self.columns)
        while len(kept) > 1 and _width(kept) > width:
            kept.remove(max(kept, key=lambda column: column.rank))
        return kept

    def __rich_console__(
        self, console: "Console", options: "ConsoleOptions"
    ) -> Iterator[Any]:
        from rich.text import Text

        kept = self.fitting(options.max_width)
        yield self._table(kept, options.max_width)
        left_out = [each.head for each in self.columns if each not in kept]
        if left_out:
            told = f"Too narrow to show: {', '.join(left_out)}; --json has everything."
            yield Text(told, "dim")

    def _table(self, kept: Sequence[Column], width: int) -> "Table":
        from rich import box
        from rich.table import Table

        table = Table(
            box=box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            padding=(0, 1, 0, 0),
            show_footer=any(column.total for column in kept),
        )
        spare = width - _width(kept)
        for column in kept:
            size = min(column.full, column.needed + max(spare, 0))
            spare -= size - column.needed
            table.add_column(
                column.head,
                column.total,
                justify="right" if column.is_number else "left",
                width=min(size, width),
                no_wrap=not column.least,
                overflow="fold" if column.least else "ellipsis",
            )
        for n in range(len(kept[0].cells)):
            style = self.styles.get(n, "")
            cells = [_cell(column, n, style) for column in kept]
            table.add_row(*cells)
        return table


def _width(columns: Sequence[Column]) -> int:
    return sum(column.needed + GAP for column in columns) - GAP


def _cell(column: Column, n: int, style: str) -> "Text":
    from rich.text import Text

    return Text(printable(column.cells[n]), style or _STYLES.get(column.head, ""))


_STYLES = {"histogram": "cyan", "type": "dim", "how": "dim"}
