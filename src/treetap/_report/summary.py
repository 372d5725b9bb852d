# SPDX-License-Identifier: Apache-2.0
"""summary and tabulate: what a model is made of and does, as a table.

Both trace the model once, on a copy and without computing anything, and show a row for
each method of each Module that is called, in the order in which the calls start.
`summary` gives an object with the figures; `tabulate` gives NNX's table as text. "Total
Parameters" counts Params; other kinds of Variable are shown apart.
"""

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treetap._core.display import Size, in_thousands, readable_bytes
from treetap._core.paths import Path
from treetap._core.trees.pytree import kind_name
from treetap._core.variables.metadata import REQUIRED
from treetap._core.variables.variable import Variable
from treetap._modules.random_streams import RngStream
from treetap._report.rows import (
    Row,
    leaves_below,
    own_leaves,
    parameters_of,
    rows_of,
    sizes_dict,
    sizes_of,
)
from treetap._report.table import (
    NOTHING,
    Column,
    Fitting,
    html_of,
    printed,
    printed_plainly,
    short_types,
)
from treetap._report.texts import text_of


@dataclass(frozen=True, repr=False)
class Summary:
    """The calls and sizes of a model; prints as a table.

    Attributes:
        name: The class of the model.
        rows: One for each method of each Module that is called; each has `path`,
            `type`, `method`, `inputs`, `outputs`, `calls`, `parameters`, `nbytes`,
            `own_parameters`, `sizes` and `flops`.
        sizes: What the model holds, by kind of Variable, each Variable once.
        parameters: How many numbers its Params are.
        nbytes: How many bytes they take.
        flops: FLOPs of the call; None if they are not known.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> class Double(tt.Module):
        ...     def __init__(self):
        ...         self.by = tt.Param(jnp.array(2.0))
        ...
        ...     def __call__(self, x):
        ...         return x * self.by
        >>> found = tt.summary(Double(), jnp.ones((1, 3)))
        >>> found.parameters, found.flops, found.rows[0].outputs
        (1, 3, 'float32[1,3]')
    """

    name: str
    rows: tuple[Row, ...]
    sizes: tuple[tuple[str, Size], ...]
    parameters: int
    nbytes: int
    flops: int | None

    @property
    def totals(self) -> dict[str, Size]:
        """Elements and bytes by kind of Variable."""
        return dict(self.sizes)

    def to_dict(self) -> dict[str, Any]:
        """All figures as dicts, lists, texts and numbers, as JSON has them."""
        return {
            "name": self.name,
            "parameters": self.parameters,
            "bytes": self.nbytes,
            "flops": self.flops,
            "sizes": sizes_dict(self.sizes),
            "rows": [row.to_dict() for row in self.rows],
        }

    def _columns(self, compact: bool) -> list[Column]:
        rows = self.rows
        counted = [row.parameters for row in rows]
        params = [count_text(n) if compact else f"{n:,}" for n in counted]
        sizes = [readable_bytes(row.nbytes) for row in rows]
        flops = [count_text(row.flops) for row in rows]
        nbytes, total = readable_bytes(self.nbytes), count_text(self.flops)
        path, *rest = call_columns(rows, compact, "(root)")
        return [
            path._replace(total="Total"),
            *rest,
            Column("params", params, is_number=True, total=f"{self.parameters:,}"),
            Column("size", sizes, is_number=True, total=nbytes),
            Column("FLOPs", flops, is_number=True, total=total),
        ]

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich import box

        options = {
            "styles": {n: "bold" for n, row in enumerate(self.rows) if not row.path},
            "highlights": HIGHLIGHTS,
            "title": f"{self.name} summary",
            "caption": others_text(self.sizes, ", ") or None,
        }
        yield Fitting(self._columns, {"box": box.ROUNDED}, options)

    def __str__(self) -> str:
        return printed_plainly(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        others = others_text(self.sizes, ", ")
        caption = ". ".join(filter(None, [f"{self.name} summary", others]))
        return html_of(self._columns(False), caption)


# Texts of cells. A compact table writes types of numbers as jaxprs do (`f32[4,8]`),
# large numbers in powers of a thousand, long names of classes over two lines, and paths
# as an outline: a Module below the one that holds it, by its key there.


TIMES = "\N{MULTIPLICATION SIGN}"
HIGHLIGHTS = {
    r"\b[a-z]\w*(<\w+>)?(?=\[)": "dim",  # the type of an array
    rf" {TIMES}[\d?]+$": "yellow",
}


def count_text(count: int | None) -> str:
    """A number of operations in powers of a thousand; `-` if it is not known."""
    return "-" if count is None else in_thousands(count, ("", "K", "M", "G", "T", "P"))


def labels(
    rows: Sequence[Row], compact: bool, root: str = "", as_nnx: bool = False
) -> list[str]:
    """What rows are called: by path, or compact, below the row of what holds it.

    How often a row is called follows, unless it is once; not in NNX's tables.
    """
    around: list[Path] = []
    found: list[str] = []
    for row in rows:
        while around and not _is_inside(row.path, around[-1]):
            around.pop()
        level = len(around[-1]) if around and compact else 0
        indent = "  " * len(around) if compact else ""
        times = "?" if row.calls is None else row.calls
        text = indent + row.text_below(level, as_nnx) or root
        is_told = times != 1 and not as_nnx
        found.append(text + (f" {TIMES}{times}" if is_told else ""))
        around += [row.path] if row.path else []
    return found


def _is_inside(path: Path, other: Path) -> bool:
    return len(path) > len(other) and path[: len(other)] == other


def class_text(row: Row, compact: bool) -> str:
    """The name of a class; compact, a long one is broken before a capital."""
    name = row.type.__name__
    parts = re.findall(r"[^A-Z]+|[A-Z]+[^A-Z]*", name)
    if not compact or len(name) <= 12 or len(parts) < 2:
        return name
    ends = [len("".join(parts[:n])) for n in range(1, len(parts))]
    middle = min(ends, key=lambda end: max(end, len(name) - end))
    return f"{name[:middle]}\n{name[middle:]}"


def call_columns(
    rows: Sequence[Row], compact: bool, root: str = "", as_nnx: bool = False
) -> list[Column]:
    """What is called, and with what."""

    short = short_types if compact else str
    return [
        Column("path", labels(rows, compact, root, as_nnx)),
        Column("type", [class_text(row, compact) for row in rows]),
        Column("inputs", [short(row.inputs) for row in rows]),
        Column("outputs", [short(row.outputs) for row in rows]),
    ]


def others_text(sizes: Sequence[tuple[str, Size]], separator: str) -> str:
    """What a model holds beside Params."""
    return separator.join(f"{kind}: {size}" for kind, size in sizes if kind != "Param")


def summary(
    obj: Any,
    /,
    *args: Any,
    method: str = "__call__",
    flops: bool = True,
    depth: int | None = None,
    **kwargs: Any,
) -> Summary:
    """What a model is made of and does, as an object that prints as a table.

    Nothing is computed, and the model is not changed, its random streams included.

    Args:
        obj: A Module, or another Pytree object, concrete or abstract.
        *args: Arguments of its method, concrete or abstract; what is not an array is
            handed over as it is.
        method: The method to call.
        flops: Whether to count FLOPs, as XLA does for a lowered program.
        depth: How long the paths of rows may be; 0 for the model itself.
        **kwargs: Keyword arguments of its method.

    Returns:
        A `Summary`. A row is one method of one Module with arguments of some types: its
        sizes are those of the Module and everything inside it, its FLOPs those of one
        call. `×12` after a path says that it is called twelve times, in loops and
        mappings too.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> class Affine(tt.Module):
        ...     def __init__(self, size):
        ...         self.w = tt.Param(jnp.ones((size, size)))
        ...
        ...     def __call__(self, x):
        ...         return x @ self.w
        >>> print(tt.summary(tt.Sequential(Affine(4), Affine(4)), jnp.ones(4)))
                                     Sequential summary
        ╭──────────┬────────────┬────────────┬────────────┬────────┬───────┬───────╮
        │ path     │ type       │ inputs     │ outputs    │ params │  size │ FLOPs │
        ├──────────┼────────────┼────────────┼────────────┼────────┼───────┼───────┤
        │ (root)   │ Sequential │ float32[4] │ float32[4] │     32 │ 128 B │    64 │
        │ layers/0 │ Affine     │ float32[4] │ float32[4] │     16 │  64 B │    32 │
        │ layers/1 │ Affine     │ float32[4] │ float32[4] │     16 │  64 B │    32 │
        ├──────────┼────────────┼────────────┼────────────┼────────┼───────┼───────┤
        │ Total    │            │            │            │     32 │ 128 B │    64 │
        ╰──────────┴────────────┴────────────┴────────────┴────────┴───────┴───────╯
    """  # noqa: RUF002 - the sign that is printed
    figures = ["flops"] * flops
    found = rows_of(obj, method, args, kwargs, "summary", depth=depth, figures=figures)
    rows = tuple(row for row, _ in found)
    total = parameters_of(leaves_below(obj))
    return Summary(type(obj).__name__, rows, sizes_of(obj), *total, flops=rows[0].flops)


def hide_streams(row: Row) -> bool:
    """Which rows `tabulate` shows by default: all but those of random streams."""
    return not issubclass(row.type, RngStream)


def tabulate(
    obj: Any,
    *args: Any,
    depth: int | None = None,
    method: str = "__call__",
    row_filter: Callable[[Any], bool] = hide_streams,
    table_kwargs: Mapping[str, Any] = NOTHING,
    column_kwargs: Mapping[str, Any] = NOTHING,
    console_kwargs: Mapping[str, Any] = NOTHING,
    compute_flops: bool = False,
    compute_vjp_flops: bool = False,
    **kwargs: Any,
) -> str:
    """A table of the calls in a model, with the Variables of each Module by kind.

    Args:
        obj: As for `summary`.
        *args: As for `summary`.
        depth: As for `summary`; a method but `__call__` counts as one more key.
        method: As for `summary`.
        row_filter: Which rows to show, by `row.type`, `row.path` and the other
            attributes of the rows of a `Summary`.
        table_kwargs: Options of `rich.table.Table`.
        column_kwargs: Options of its `add_column`.
        console_kwargs: Options of `rich.console.Console`, such as `width`. Colours are
            on; `{"force_terminal": False}` gives plain text.
        compute_flops: Whether to count FLOPs.
        compute_vjp_flops: Whether to count those of a call with its derivatives by
            Variables and arguments.
        **kwargs: As for `summary`.

    Returns:
        The table as text.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> class Scale(tt.Module):
        ...     def __init__(self):
        ...         self.by = tt.Param(jnp.ones(3))
        ...
        ...     def __call__(self, x):
        ...         return x * self.by
        >>> plain = {"force_terminal": False}
        >>> print(tt.tabulate(Scale(), jnp.ones(3), console_kwargs=plain))
                               Scale Summary
        ┏━━━━━━┳━━━━━━━┳━━━━━━━━━━━━┳━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━┓
        ┃ path ┃ type  ┃ inputs     ┃ outputs    ┃ Param          ┃
        ┡━━━━━━╇━━━━━━━╇━━━━━━━━━━━━╇━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━┩
        │      │ Scale │ float32[3] │ float32[3] │ by: float32[3] │
        │      │       │            │            │                │
        │      │       │            │            │ 3 (12 B)       │
        ├──────┼───────┼────────────┼────────────┼────────────────┤
        │      │       │            │      Total │ 3 (12 B)       │
        └──────┴───────┴────────────┴────────────┴────────────────┘
        <BLANKLINE>
                        Total Parameters: 3 (12 B)
    """
    figures = ["flops"] * compute_flops + ["vjp_flops"] * compute_vjp_flops
    options = {"depth": depth, "figures": figures, "as_nnx": True}
    found = rows_of(obj, method, args, kwargs, "tabulate", **options)
    shown = [(row, node) for row, node in found if row_filter(row)]
    sizes, parameters = sizes_of(obj), parameters_of(leaves_below(obj))
    caption = f"\nTotal Parameters: {parameters}\n{others_text(sizes, chr(10))}"

    options = {
        "highlights": HIGHLIGHTS,
        "column_options": column_kwargs,
        "title": f"{type(obj).__name__} Summary",
        "caption": caption.rstrip(),
        "show_lines": True,
        "show_footer": True,
        **table_kwargs,
    }
    columns = functools.partial(_columns_of, shown, figures, sizes)
    table = Fitting(columns, NOTHING, options)
    return printed(table, {"force_terminal": True, **console_kwargs})


def _columns_of(
    found: Sequence[tuple[Row, Any]],
    figures: Sequence[str],
    sizes: Sequence[tuple[str, Size]],
    compact: bool,
) -> list[Column]:
    """The columns of `tabulate`: the call, its FLOPs, and each kind of Variable."""
    from rich.text import Text

    def short(text: str) -> str:
        if not compact:
            return text
        return re.sub(r"(?m)^([\d,]+) \(", r"\1\n(", short_types(text))

    rows = [row for row, _ in found]
    columns = call_columns(rows, compact, as_nnx=True)
    for head in figures:
        counts = (getattr(row, head) for row in rows)
        texts = ["-" if count is None else f"{count:,}" for count in counts]
        columns.append(Column(head, texts, is_number=True))
    columns[-1] = columns[-1]._replace(total=Text("Total", justify="right"))
    for kind, size in sizes:
        texts = [short(_kind_text(row, node, kind)) for row, node in found]
        columns.append(Column(kind, texts, total=short(str(size))))
    return columns


def _kind_text(row: Row, node: Any, kind: str) -> str:
    """The Variables of one kind that a Module holds itself, and the size of all."""
    size = dict(row.sizes).get(kind)
    if size is None:
        return ""
    own = [(name, x) for name, x in own_leaves(node) if kind_name(x) == kind]
    lines = [_variable_text(name, value) for name, value in own]
    return "\n".join([*lines, *[""] * bool(lines), str(size)])


def _variable_text(name: str, value: Any) -> str:
    """A Variable by name and type, with what its metadata say."""
    if not isinstance(value, Variable):
        return f"{name}: {text_of(value)}"
    text = text_of(value.get_raw_value())
    hidden = {*REQUIRED, "mesh"}
    metadata = {k: x for k, x in value.get_metadata().items() if k not in hidden}
    if not metadata and "\n" not in text:
        return f"{name}: {text}"
    body = text.replace("\n", "\n    ")
    lines = [f"  {key}: {metadata[key]}" for key in sorted(metadata)]
    return "\n".join([f"{name}:", *lines, f"  value: {body}"])
