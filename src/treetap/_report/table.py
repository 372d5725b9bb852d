# SPDX-License-Identifier: Apache-2.0
"""Tables: rows as rich draws them, in full or, where that is too wide, compact.

A compact table writes types of numbers as jaxprs do (`f32[4,8]`), large numbers in
powers of a thousand, long names of classes over two lines; it has no frame, and shows
paths as an outline: a Module below the one that holds it, by its key there.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from treetap._core import display
from treetap._core.paths import Path
from treetap._core.variables.metadata import REQUIRED
from treetap._core.variables.variable import Variable
from treetap._report.rows import Entry, Row, Size, kind_name, own_leaves
from treetap._report.texts import text_of

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table
    from rich.text import Text

Draw = Callable[[bool], "Table"]  # from whether to be compact
Options = Mapping[str, Any]

HEADS = ("path", "type", "inputs", "outputs", "params", "size", "FLOPs")
TIMES = "\N{MULTIPLICATION SIGN}"
FIGURES = frozenset({"params", "size", "FLOPs", "flops", "vjp_flops"})


class Fitting:
    """A table that is compact where it would be too wide."""

    def __init__(self, draw: Draw):
        self._draw = draw

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> Any:
        from rich.measure import Measurement

        table = self._draw(False)
        unbounded = options.update(max_width=100_000)
        width = Measurement.get(console, unbounded, table).maximum
        yield table if width <= options.max_width else self._draw(True)


def printed(table: Any, options: Options) -> str:
    """What a console prints, as text, without spaces at the ends of lines."""
    from rich.console import Console

    given: dict[str, Any] = {"file": io.StringIO(), "force_jupyter": False, **options}
    console = Console(**given)
    with console.capture() as text:
        console.print(table)
    return "\n".join(line.rstrip() for line in text.get().splitlines())


# Cells.


_TYPES = re.compile(r"\b(b?float|u?int|complex)(\d+)")
_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}
_STYLES = (
    (r"\b[a-z]\w*(<\w+>)?(?=\[)", "dim"),  # the type of an array
    (rf" {TIMES}[\d?]+$", "yellow"),
)


def short_types(text: str) -> str:
    """A text with types of numbers as jaxprs write them."""
    return _TYPES.sub(lambda found: _SHORT[found[1]] + found[2], text)


def styled(text: str, style: str = "") -> "Text":
    """A text with its parts in colours; it is not read as markup."""
    from rich.text import Text

    made = Text(text, style=style)
    for pattern, look in _STYLES:
        made.highlight_regex(pattern, look)
    return made


def count_text(count: int | None) -> str:
    """A number of operations in powers of a thousand; `-` if it is not known."""
    if count is None:
        return "-"
    size = float(count)
    for unit in ("", " K", " M", " G", " T"):
        if size < 999.95:
            return f"{size:.1f}{unit}" if unit else str(count)
        size /= 1000
    return f"{size:.1f} P"


def labels(rows: Sequence[Row], compact: bool) -> list[str]:
    """What rows are called: by path, or compact, below the row of what holds it."""
    if not compact:
        return [row.text for row in rows]
    around: list[Path] = []
    found: list[str] = []
    for row in rows:
        while around and not _is_inside(row.path, around[-1]):
            around.pop()
        level = len(around[-1]) if around else 0
        found.append("  " * len(around) + row.text_below(level))
        around += [row.path] if row.path else []
    return found


def _is_inside(path: Path, other: Path) -> bool:
    return len(path) > len(other) and path[: len(other)] == other


def times_text(row: Row) -> str:
    """How often a row is called, unless it is once."""
    if row.calls == 1:
        return ""
    return f" {TIMES}{'?' if row.calls is None else row.calls}"


def class_text(row: Row, compact: bool) -> str:
    """The name of a class; compact, a long one is broken before a capital."""
    name = row.type.__name__
    parts = re.findall(r"[^A-Z]+|[A-Z]+[^A-Z]*", name)
    if not compact or len(name) <= 12 or len(parts) < 2:
        return name
    ends = [len("".join(parts[:n])) for n in range(1, len(parts))]
    middle = min(ends, key=lambda end: max(end, len(name) - end))
    return f"{name[:middle]}\n{name[middle:]}"


def summary_cells(row: Row, label: str, compact: bool = False) -> list[str]:
    """A row of a summary, as text."""
    cells = [
        (label or "(root)") + times_text(row),
        class_text(row, compact),
        row.inputs,
        row.outputs,
        count_text(row.parameters) if compact else f"{row.parameters:,}",
        display.readable_bytes(row.nbytes),
        count_text(row.flops),
    ]
    if compact:
        cells[2:4] = map(short_types, cells[2:4])
    return cells


def total_cells(parameters: Size, flops: int | None) -> list[str]:
    """The last row of a summary."""
    size = display.readable_bytes(parameters.nbytes)
    return ["Total", "", "", "", f"{parameters.elements:,}", size, count_text(flops)]


def others_text(sizes: Sequence[tuple[str, Size]], separator: str) -> str:
    """What a model holds beside Params."""
    texts = (f"{kind}: {size}" for kind, size in sizes if kind != "Param")
    return separator.join(texts)


# Tables.


def summary_table(
    title: str, caption: str, rows: Sequence[Row], total: Sequence[str]
) -> Fitting:
    """The table of a summary."""
    from rich import box
    from rich.table import Table

    def draw(compact: bool) -> Table:
        table = Table(
            title=title,
            caption=caption or None,
            box=box.SIMPLE_HEAD if compact else box.ROUNDED,
            show_footer=True,
            show_edge=not compact,
            padding=0 if compact else (0, 1),
        )
        for head, text in zip(HEADS, total):
            if head in FIGURES:
                table.add_column(head, text, justify="right", no_wrap=True)
            else:
                table.add_column(head, text, overflow="fold")
        for row, label in zip(rows, labels(rows, compact)):
            cells = summary_cells(row, label, compact)
            style = "" if row.path else "bold"
            table.add_row(*(styled(cell, style) for cell in cells))
        return table

    return Fitting(draw)


def variables_table(
    name: str,
    entries: Sequence[Entry],
    columns: Sequence[str],
    *,
    sizes: Sequence[tuple[str, Size]],
    parameters: Size,
    table_options: Options,
    column_options: Options,
) -> Fitting:
    """The table of `tabulate`: a column for each kind of Variable."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    rows = [entry.row for entry in entries]
    caption = f"\nTotal Parameters: {parameters}\n{others_text(sizes, chr(10))}"

    def draw(compact: bool) -> Table:
        frame: dict[str, Any] = {}
        if compact:
            frame = {"box": box.SIMPLE_HEAD, "padding": 0, "show_edge": False}
        given = {"title": f"{name} Summary", "caption": caption.rstrip(), **frame}
        flags = {"show_lines": True, "show_footer": True}
        table = Table(**{**given, **flags, **table_options})
        for head in columns:
            justify = "right" if head in FIGURES else "left"
            choices: Options = {"justify": justify, "overflow": "fold"}
            footer = Text("Total", justify="right") if head == columns[-1] else ""
            table.add_column(head, footer, **{**choices, **column_options})
        for kind, size in sizes:
            total = _two_lines(str(size), compact)
            table.add_column(kind, total, **{"overflow": "fold", **column_options})
        for entry, label in zip(entries, labels(rows, compact)):
            cells = [_cell(entry.row, head, label, compact) for head in columns]
            for kind, _ in sizes:
                cells.append(_two_lines(_kind_cell(entry, kind), compact))
            if compact:
                cells[2:] = map(short_types, cells[2:])
            table.add_row(*map(styled, cells))
        return table

    return Fitting(draw)


def _two_lines(text: str, compact: bool) -> str:
    """A size over two lines where there is little room."""
    return re.sub(r"(?m)^([\d,]+) \(", r"\1\n(", text) if compact else text


def _cell(row: Row, head: str, label: str, compact: bool) -> str:
    if head == "path":
        return label + times_text(row)
    if head == "type":
        return class_text(row, compact)
    value = getattr(row, head)
    if isinstance(value, str):
        return value
    return "-" if value is None else f"{value:,}"


def _kind_cell(entry: Entry, kind: str) -> str:
    """The Variables of one kind that a Module holds itself, and the size of all."""
    size = dict(entry.row.sizes).get(kind)
    if size is None:
        return ""
    own = [(name, x) for name, x in own_leaves(entry.node) if kind_name(x) == kind]
    lines = [_variable_text(name, value) for name, value in own]
    return "\n".join([*lines, *[""] * bool(lines), str(size)])


def _variable_text(name: str, value: Any) -> str:
    """A Variable by name and type, with what its metadata say."""
    if not isinstance(value, Variable):
        return f"{name}: {text_of(value)}"
    text = text_of(value.get_raw_value())
    hidden = {*REQUIRED, "mesh"}
    told = {k: x for k, x in value.get_metadata().items() if k not in hidden}
    if not told and "\n" not in text:
        return f"{name}: {text}"
    body = text.replace("\n", "\n    ")
    lines = [f"  {key}: {told[key]}" for key in sorted(told)]
    return "\n".join([f"{name}:", *lines, f"  value: {body}"])
