# SPDX-License-Identifier: Apache-2.0
"""summary and tabulate: what a model is made of and does, as a table.

Both trace the model once, on a copy and without computing anything, and show a row for
each method of each Module that is called, in the order in which the calls start.
`summary` gives an object with the figures; `tabulate` gives NNX's table as text. "Total
Parameters" counts Params; other kinds of Variable are shown apart.
"""

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from treetap._modules.random_streams import RngStream
from treetap._report.rows import (
    Row,
    Size,
    entries_of,
    leaves_below,
    parameters_of,
    sizes_dict,
    sizes_of,
)
from treetap._report.table import (
    FIGURES,
    HEADS,
    others_text,
    printed,
    summary_cells,
    summary_table,
    total_cells,
    variables_table,
)

NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


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

    def _total(self) -> list[str]:
        return total_cells(Size(self.parameters, self.nbytes), self.flops)

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        others = others_text(self.sizes, ", ")
        yield summary_table(f"{self.name} summary", others, self.rows, self._total())

    def __str__(self) -> str:
        return printed(self, {"force_terminal": False, "color_system": None})

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def line(cells: Sequence[str], tag: str = "td") -> str:
            found = []
            for head, cell in zip(HEADS, cells):
                side = "right" if head in FIGURES else "left"
                text = html.escape(cell).replace("\n", "<br>")
                found.append(f'<{tag} style="text-align:{side}">{text}</{tag}>')
            return f"<tr>{''.join(found)}</tr>"

        body = "".join(line(summary_cells(row, row.text)) for row in self.rows)
        others = others_text(self.sizes, ", ")
        caption = html.escape(". ".join(filter(None, [f"{self.name} summary", others])))
        table = f"{line(HEADS, 'th')}{body}{line(self._total(), 'th')}"
        return f"<table><caption>{caption}</caption>{table}</table>"


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
    entries = entries_of(
        obj, method, args, kwargs, name="summary", depth=depth, flops=flops
    )
    rows = tuple(entry.row for entry in entries)
    total = parameters_of(leaves_below(obj))
    name = type(obj).__name__
    return Summary(name, rows, sizes_of(obj), *total, flops=rows[0].flops)


def hide_streams(row: Row) -> bool:
    """Which rows `tabulate` shows by default: all but those of random streams."""
    return not issubclass(row.type, RngStream)


def tabulate(
    obj: Any,
    /,
    *args: Any,
    depth: int | None = None,
    method: str = "__call__",
    row_filter: Callable[[Any], bool] = hide_streams,
    table_kwargs: Mapping[str, Any] = NO_OPTIONS,
    column_kwargs: Mapping[str, Any] = NO_OPTIONS,
    console_kwargs: Mapping[str, Any] = NO_OPTIONS,
    compute_flops: bool = False,
    compute_vjp_flops: bool = False,
    **kwargs: Any,
) -> str:
    """A table of the calls in a model, with the Variables of each Module by kind.

    Args:
        obj: As for `summary`.
        *args: As for `summary`.
        depth: As for `summary`.
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
    entries = entries_of(
        obj,
        method,
        args,
        kwargs,
        name="tabulate",
        depth=depth,
        flops=compute_flops,
        vjp_flops=compute_vjp_flops,
    )
    columns = ["path", "type", "inputs", "outputs"]
    columns += ["flops"] * compute_flops + ["vjp_flops"] * compute_vjp_flops
    table = variables_table(
        type(obj).__name__,
        [entry for entry in entries if row_filter(entry.row)],
        columns,
        sizes=sizes_of(obj),
        parameters=parameters_of(leaves_below(obj)),
        table_options=table_kwargs,
        column_options=column_kwargs,
    )
    return printed(table, {"force_terminal": True, **console_kwargs})
