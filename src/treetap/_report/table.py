# SPDX-License-Identifier: Apache-2.0
"""Tables, as rich draws them: all that the library prints in rows and columns.

A table is a list of `Column`s. Two things may happen where it would be too wide. A
`Fitting` table is drawn anew, by whatever its maker calls compact. A `Listing` leaves
out the columns that matter least, and says which; it is never garbled.
"""

import html
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from treetap._core.wording import printable

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

Options = Mapping[str, Any]
NOTHING: Mapping[Any, Any] = MappingProxyType({})
GAP = 2  # between the columns of a listing


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        head: Its title.
        cells: Its texts, one for each row.
        is_number: Whether it is set flush right, and never broken.
        total: What stands below it.
        rank: In a listing, how little it matters: the highest ranks go first.
        least: In a listing, what it may be narrowed to, by folding; 0 if it may not.
        style: Of its cells; rich's.
    """

    head: str
    cells: Sequence[str]
    is_number: bool = False
    total: "str | Text" = ""
    rank: int = 0
    least: int = 0
    style: str = ""

    @property
    def full(self) -> int:
        """How wide it would be."""
        from rich.cells import cell_len

        return max(map(cell_len, (self.head, str(self.total), *self.cells)))

    @property
    def needed(self) -> int:
        """How wide it has to be."""
        return min(self.full, self.least) if self.least else self.full


def numbers(head: str, cells: Iterable[str], rank: int) -> Column:
    """A column of numbers in a listing."""
    return Column(head, list(cells), is_number=True, rank=rank)


def table_of(
    columns: Sequence[Column],
    *,
    widths: Sequence[int | None] | None = None,
    styles: Mapping[int, str] = NOTHING,
    highlights: Mapping[str, str] = NOTHING,
    column_options: Options = NOTHING,
    **options: Any,
) -> "Table":
    """A table of columns; no text is read as markup, or steers a terminal.

    Args:
        columns: In their order.
        widths: Of the columns, where they are settled.
        styles: Of rows, by number; rich's.
        highlights: Styles of parts of texts, by regular expressions.
        column_options: Options of rich's `add_column`, instead of those here.
        **options: Options of rich's `Table`.
    """
    from rich.table import Table
    from rich.text import Text

    def cell(text: str, style: str) -> Text:
        made = Text("\n".join(map(printable, text.split("\n"))), style)
        for pattern, look in highlights.items():
            made.highlight_regex(pattern, look)
        return made

    table = Table(**{"show_footer": any(column.total for column in columns), **options})
    for column, width in zip(columns, widths or [None] * len(columns)):
        given: dict[str, Any] = {
            "justify": "right" if column.is_number else "left",
            "no_wrap": column.is_number,
            "overflow": "ellipsis" if column.is_number else "fold",
            "width": width,
        }
        table.add_column(column.head, column.total, **{**given, **column_options})
    for n, texts in enumerate(zip(*(column.cells for column in columns))):
        looks = [styles.get(n) or column.style for column in columns]
        table.add_row(*map(cell, texts, looks))
    return table


def compact_frame() -> dict[str, Any]:
    """Options of a table that has no frame, only a line below its heads."""
    from rich import box

    return {"box": box.SIMPLE_HEAD, "show_edge": False, "padding": 0}


class Fitting(NamedTuple):
    """A table that is compact, and has no frame, where it would be too wide.

    Attributes:
        columns: Makes the columns; its argument is whether they are to be compact.
        frame: Options of the table where it has room.
        options: Options of `table_of`.
    """

    columns: Callable[[bool], Sequence[Column]]
    frame: Options
    options: Options

    def _table(self, compact: bool) -> "Table":
        frame = compact_frame() if compact else self.frame
        return table_of(self.columns(compact), **{**frame, **self.options})

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.measure import Measurement

        table = self._table(False)
        unbounded = options.update(max_width=100_000)
        width = Measurement.get(console, unbounded, table).maximum
        yield table if width <= options.max_width else self._table(True)


class Listing(NamedTuple):
    """A table that leaves out columns until it fits.

    Attributes:
        columns: In their order.
        styles: Of rows, by number; rich's.
        remedy: What to say of where the columns that were left out can be seen.
    """

    columns: Sequence[Column]
    styles: Mapping[int, str] = NOTHING
    remedy: str = ""

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.text import Text

        kept = list(self.columns)
        while len(kept) > 1 and _width(kept) > options.max_width:
            kept.remove(max(kept, key=lambda column: column.rank))
        yield self._table(kept, options.max_width)
        gone = [each.head for each in self.columns if each.head and each not in kept]
        if gone:
            yield Text(f"Too narrow to show: {', '.join(gone)}{self.remedy}.", "dim")

    def _table(self, kept: Sequence[Column], width: int) -> "Table":
        """The table: what room there is beyond what is needed goes to the first."""
        spare = max(0, width - _width(kept))
        widths: list[int] = []
        for column in kept:
            size = min(column.full, column.needed + spare)
            spare -= size - column.needed
            widths.append(min(size, width))
        frame = {**compact_frame(), "padding": (0, GAP - 1, 0, 0), "pad_edge": False}
        return table_of(kept, widths=widths, styles=self.styles, **frame)


def _width(columns: Sequence[Column]) -> int:
    return sum(column.needed + GAP for column in columns) - GAP


def html_of(columns: Sequence[Column], caption: str) -> str:
    """The same columns as a table of HTML, for notebooks."""

    def line(cells: Sequence[Any], tag: str = "td") -> str:
        found = []
        for column, cell in zip(columns, cells):
            side = "right" if column.is_number else "left"
            text = html.escape(str(cell)).replace("\n", "<br>")
            found.append(f'<{tag} style="text-align:{side}">{text}</{tag}>')
        return f"<tr>{''.join(found)}</tr>"

    heads = line([column.head for column in columns], "th")
    body = "".join(map(line, zip(*(column.cells for column in columns))))
    totals = line([column.total for column in columns], "th")
    title = f"<caption>{html.escape(caption)}</caption>"
    return f"<table>{title}{heads}{body}{totals}</table>"


def printed(table: Any, options: Options) -> str:
    """What a console prints, as text, without spaces at the ends of lines."""
    from rich.console import Console

    given: dict[str, Any] = {"file": io.StringIO(), "force_jupyter": False, **options}
    console = Console(**given)
    with console.capture() as text:
        console.print(table)
    return "\n".join(line.rstrip() for line in text.get().splitlines())


def printed_plainly(table: Any) -> str:
    """The same, without colours."""
    return printed(table, {"force_terminal": False, "color_system": None})


_TYPES = re.compile(r"\b(b?float|u?int|complex)(\d+)")
SHORT_TYPES = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}
_LONG_TYPES = {short: name for name, short in SHORT_TYPES.items()}


def short_types(text: str) -> str:
    """A text with types of numbers as jaxprs write them: `f32[4,8]`."""
    return _TYPES.sub(lambda found: SHORT_TYPES[found[1]] + found[2], text)


def long_type(name: str) -> str:
    """A type of numbers in full, of one that may be short: `f32` is `float32`."""
    pattern = r"^[a-z]+(?=\d+$)"
    return re.sub(pattern, lambda found: _LONG_TYPES.get(found[0], found[0]), name)
