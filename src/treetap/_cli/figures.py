# SPDX-License-Identifier: Apache-2.0
"""Figures: an observed run as rows of numbers, for the terminal and for programs.

A Look is what `treetap inspect` shows: one row for each site with the figures of its
value and gradient, and the first of them that is not finite.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from treetap._capture.statistics.figures import Figures
from treetap._capture.statistics.reducers import (
    AbsMax,
    DeadUnits,
    Histogram,
    Moments,
    NonFinite,
    Norm,
)
from treetap._cli.console import (
    BLOCKS,
    LETTERS,
    console_of,
    many,
    number_text,
    share_text,
    spark,
)
from treetap._cli.programs import Program
from treetap._core import display
from treetap._core.wording import json_number, typed
from treetap._observe.observe import observe, sites
from treetap._observe.records import Record, Site
from treetap._report.page import NUMBERS, first_troubles
from treetap._report.table import Column, Listing, short_types

REDUCERS = (Moments(), AbsMax(), Norm(), NonFinite(), Histogram(), DeadUnits())
SPARK = 12
SITE_WIDTH = 26  # what a name gets before other columns do
REMEDY = "; --json has everything"


class Row(NamedTuple):
    """A site and its figures.

    Attributes:
        site: The site.
        type: Shapes and types of its value, as text.
        nbytes: The memory that the value takes.
        value: The figures of the value.
        gradient: The figures of its gradient; None if it has none.
    """

    site: Site
    type: str
    nbytes: int
    value: Figures
    gradient: Figures | None

    @property
    def ratio(self) -> float | None:
        """The norm of the gradient over that of the value."""
        norms = self.gradient and self.gradient.norm, self.value.norm
        if norms[0] is None or not norms[1]:
            return None
        return norms[0] / norms[1]

    @property
    def nonfinite(self) -> str:
        """What is not finite, in a few words; empty if all is."""
        parts = [_bad_text(self.value)]
        if self.gradient is not None and self.gradient.nonfinite:
            parts.append(f"grad {_bad_text(self.gradient)}")
        return ", ".join(filter(None, parts))


class First(NamedTuple):
    """Where the first number that is not finite is.

    Attributes:
        site: The text of the site.
        part: `value` or `gradient`.
        figures: Those of the value or gradient.
        turn: In a scan, the first iteration that has some, or the shard.
    """

    site: str
    part: str
    figures: Figures
    turn: int | None

    def __str__(self) -> str:
        what = "gradient of " if self.part == "gradient" else ""
        where = "" if self.turn is None else f" at [{self.turn}]"
        count = self.figures.count
        of = f" of {count:,} numbers" if count else ""
        return f"{what}{self.site}{where} ({_bad_text(self.figures)}{of})"


@dataclass(frozen=True)
class Look:
    """What was seen of a run.

    Attributes:
        record: The record.
        rows: Its sites with their figures.
        loss: The loss, if gradients were asked for.
        first: The first that is not finite.
    """

    record: Record
    rows: tuple[Row, ...]
    loss: float | None
    first: First | None


def _bad_text(figures: Figures) -> str:
    if not figures.nonfinite:
        return ""
    if figures.nan is None or figures.infinite is None:
        return f"{figures.nonfinite:,} not finite"
    counts = ((figures.nan, "NaN"), (figures.infinite, "inf"))
    return ", ".join(f"{count:,} {name}" for count, name in counts if count)


def observed(program: Program, select: Any, *, grads: bool, reduce: bool) -> Look:
    """Runs a program, and looks at every site that is selected."""
    run = observe(
        program.fn, select, grads=grads, reduce=list(REDUCERS) if reduce else None
    )
    types: Mapping[str, Site] = {}
    if reduce:  # the values are gone then, and their shapes with them
        types = _listed(program, select)
    out, record = run(*program.args, **program.kwargs)
    loss = float(out[0]) if program.loss else None
    return look_at(record, loss, types)


def _listed(program: Program, select: Any) -> dict[str, Site]:
    with contextlib.suppress(Exception):  # not every function can be looked at
        found = sites(program.fn, *program.args, select=select, **program.kwargs)
        return {site.text: site for site in found}
    return {}


def look_at(
    record: Record, loss: float | None = None, types: Mapping[str, Site] | None = None
) -> Look:
    """A record with its figures."""
    figures = record.figures()
    given = types or {}
    rows = tuple(
        Row(
            site,
            type_text(given.get(site.text, site)),
            given.get(site.text, site).nbytes,
            *figures[site.text],
        )
        for site in record
    )
    return Look(record, rows, loss, first_nonfinite(rows))


def first_nonfinite(rows: tuple[Row, ...]) -> First | None:
    """The first as made: values in their order, then gradients from the last site."""
    found = first_troubles([[(row.value, row.gradient) for row in rows]])
    trouble = next(filter(None, found), None)
    if trouble is None:
        return None
    figures, part = trouble.figures, "gradient" if trouble.is_grad else "value"
    turns = [n for n, one in enumerate(figures.parts) if one.nonfinite]
    turn = turns[0] if turns else None
    return First(rows[trouble.site].site.text, part, figures, turn)


def type_text(site: Site) -> str:
    """Shapes and types of a site's value; each once."""
    leaves = jax.tree.leaves(site.value)
    texts = [
        typed(leaf) if hasattr(leaf, "dtype") else type(leaf).__name__
        for leaf in leaves
    ]
    counts = {text: texts.count(text) for text in texts}
    return ", ".join(t if n == 1 else f"{n} {t}" for t, n in counts.items())


# For people.


def look_shown(look: Look, title: str, notes: Sequence[str]) -> list[Any]:
    """What to print of a look: a title, the table, the verdict, what else there is."""
    from rich.text import Text

    signs = LETTERS if console_of().options.ascii_only else BLOCKS
    shown: list[Any] = [Text(title, "bold"), figures_listing(look, signs)]
    if look.first is None:
        shown.append(Text("All is finite.", "green"))
    else:
        told = f"First not finite: {look.first}."
        if look.first.part == "gradient":
            told = f"All values are finite. {told}"
        shown.append(Text(told, "bold red"))
        hint = "`treetap blame` names the operation that made it."
        shown.append(Text(hint, "dim"))
    return [*shown, *map(Text, notes)]


def figures_listing(look: Look, signs: str) -> Listing:
    """The table of a look; histograms are drawn with some signs."""
    rows = look.rows

    def number(head: str, rank: int, texts: Iterator[str]) -> Column:
        return Column(head, list(texts), True, rank=rank)

    columns = [Column("site", [row.site.text for row in rows], least=SITE_WIDTH)]
    if look.first is not None:
        marks = [_mark(row, look.first) for row in rows]
        columns.append(Column("not finite", marks, rank=1, least=12))
    if any(row.type for row in rows):
        types = [short_types(row.type) for row in rows]
        columns.append(Column("type", types, rank=8, least=18, style="dim"))
        sizes = (display.readable_bytes(row.nbytes) for row in rows)
        columns.append(number("memory", 10, sizes))
    bars = [_bars_text(row.value, signs) for row in rows]
    values = [row.value for row in rows]
    columns += [
        Column("histogram", bars, rank=5, style="cyan"),
        number("mean", 6, (number_text(f.mean) for f in values)),
        number("std", 3, (number_text(f.std) for f in values)),
        number("max", 2, (number_text(f.abs_max) for f in values)),
        number("dead", 7, (share_text(f.dead) for f in values)),
    ]
    if any(row.gradient is not None for row in rows):
        slopes = [row.gradient or Figures() for row in rows]
        columns.append(number("grad", 4, (number_text(f.norm) for f in slopes)))
        columns.append(number("ratio", 9, (number_text(r.ratio) for r in rows)))
    return Listing(columns, _styles(look), REMEDY)


def _mark(row: Row, first: First) -> str:
    is_first = row.site.text == first.site
    return f"first: {row.nonfinite}" if is_first else row.nonfinite


def _bars_text(figures: Figures, signs: str) -> str:
    if figures.bars is None:
        return ""
    return spark(figures.bars.counts.tolist(), SPARK, signs)


def _styles(look: Look) -> dict[int, str]:
    styles = {n: "red" for n, row in enumerate(look.rows) if row.nonfinite}
    for n, row in enumerate(look.rows):
        if look.first is not None and row.site.text == look.first.site:
            styles[n] = "bold white on red"
    return styles


def sites_listing(record: Record) -> Listing:
    """The table of sites, with the memory that a capture of them takes."""
    found = list(record)
    types = [short_types(type_text(site)) for site in found]
    sizes = [display.readable_bytes(site.nbytes) for site in found]
    under = [", ".join(site.wraps) for site in found]
    count, total = many(len(found), "site"), display.readable_bytes(record.nbytes)
    columns = [
        Column("site", [site.text for site in found], least=SITE_WIDTH, total=count),
        Column("how", [site.how for site in found], rank=4, style="dim"),
        Column("type", types, rank=2, least=18, style="dim"),
        Column("memory", sizes, True, rank=1, total=total),
    ]
    if any(under):
        columns.append(Column("under", under, rank=3, least=8))
    return Listing(columns, remedy=REMEDY)


# For programs.


_NUMBERS = (*NUMBERS.values(), "nonfinite")


def figures_dict(figures: Figures) -> dict[str, Any]:
    """Figures as JSON has them."""
    found = {name: json_number(getattr(figures, name)) for name in _NUMBERS}
    if figures.bars is not None:
        bars = figures.bars
        found["histogram"] = {
            "counts": bars.counts.tolist(),
            "edges": [json_number(edge) for edge in bars.edges.tolist()],
        }
    if figures.parts:
        found["parts"] = [
            {name: json_number(getattr(part, name)) for name in _NUMBERS}
            for part in figures.parts
        ]
    return found


def site_dict(site: Site) -> dict[str, Any]:
    """A site, without its values, as JSON has it."""
    return {
        "site": site.text,
        "how": site.how,
        "type": type_text(site),
        "bytes": site.nbytes,
        "under": list(site.wraps),
    }


def look_dict(look: Look) -> dict[str, Any]:
    """A look as JSON has it."""
    rows = [
        {
            **site_dict(row.site),
            "type": row.type,
            "bytes": row.nbytes,
            "value": figures_dict(row.value),
            "gradient": None if row.gradient is None else figures_dict(row.gradient),
            "ratio": json_number(row.ratio),
        }
        for row in look.rows
    ]
    first = look.first and {
        "site": look.first.site,
        "part": look.first.part,
        "at": look.first.turn,
        "nonfinite": look.first.figures.nonfinite,
    }
    return {
        "finite": look.first is None,
        "first_nonfinite": first,
        "loss": json_number(look.loss),
        "bytes": sum(row.nbytes for row in look.rows),
        "sites": rows,
    }
