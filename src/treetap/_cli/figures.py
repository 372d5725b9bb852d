# SPDX-License-Identifier: Apache-2.0
"""Figures: an observed run as rows of numbers, for the terminal and for programs.

A Look is what `treetap inspect` shows: one row for each site with the figures of its
value and gradient, and the first of them that is not finite.
"""

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
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
    number_text,
    share_text,
    spark,
)
from treetap._cli.programs import Program
from treetap._core import display
from treetap._core.wording import json_number, many, typed
from treetap._observe.observe import observe, sites
from treetap._observe.records import Record, Site
from treetap._report.page import NUMBERS, Trouble, first_troubles, troubles_text
from treetap._report.table import NOTHING, Column, Listing, numbers, short_types

REDUCERS = (Moments(), AbsMax(), Norm(), NonFinite(), Histogram(), DeadUnits())
SPARK = 12
SITE_WIDTH = 26  # what a name gets before other columns do
REMEDY = "; --json has everything"


class Row(NamedTuple):
    """A site and its figures.

    Attributes:
        site: The site, with its value or the types of that.
        value: The figures of the value.
        gradient: The figures of its gradient; None if it has none.
    """

    site: Site
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
        pairs = (("", self.value), ("grad ", self.gradient))
        bad = [(label, x) for label, x in pairs if x is not None and x.nonfinite]
        return ", ".join(f"{label}{troubles_text(x)}" for label, x in bad)


class Look(NamedTuple):
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
    first: Trouble | None

    @property
    def verdict(self) -> str:
        """Whether all is finite, and if not, what is the first that is not."""
        if self.first is None:
            return "All is finite."
        figures, turn = self.first.figures, self.first.turn
        what = "First not finite: "
        if self.first.is_grad:
            what = f"All values are finite. {what}gradient of "
        where = "" if turn is None else f" at [{turn}]"
        of = f" of {figures.count:,} numbers" if figures.count else ""
        site = self.rows[self.first.site].site.text
        return f"{what}{site}{where} ({troubles_text(figures)}{of})."


def observed(program: Program, select: Any, *, grads: bool, reduce: bool) -> Look:
    """Runs a program, and looks at every site that is selected."""
    reducers = list(REDUCERS) if reduce else None
    run = observe(program.fn, select, grads=grads, reduce=reducers)
    # With statistics only, the values are gone then, and their shapes with them.
    shapes = _listed(program, select) if reduce else {}
    out, record = run(*program.args, **program.kwargs)
    loss = float(out[0]) if program.loss else None
    return look_at(record, loss, shapes)


def _listed(program: Program, select: Any) -> dict[str, Site]:
    with contextlib.suppress(Exception):  # not every function can be looked at
        found = sites(program.fn, *program.args, select=select, **program.kwargs)
        return {site.text: site for site in found}
    return {}


def look_at(
    record: Record, loss: float | None = None, shapes: Mapping[str, Site] = NOTHING
) -> Look:
    """A record with its figures; `shapes` has sites whose values are gone."""
    figures = record.figures()
    rows = tuple(Row(shapes.get(s.text, s), *figures[s.text]) for s in record)
    troubles = first_troubles([[(row.value, row.gradient) for row in rows]])
    return Look(record, rows, loss, next(iter(troubles), None))


def type_text(site: Site) -> str:
    """Shapes and types of a site's value; each once."""
    leaves = jax.tree.leaves(site.value)
    kinds = (typed(x) if hasattr(x, "dtype") else type(x).__name__ for x in leaves)
    return ", ".join(t if n == 1 else f"{n} {t}" for t, n in Counter(kinds).items())


# For people.


def look_shown(look: Look, title: str, notes: Sequence[str]) -> list[Any]:
    """What to print of a look: a title, the table, the verdict, what else there is."""
    from rich.text import Text

    signs = LETTERS if console_of().options.ascii_only else BLOCKS
    style = "green" if look.first is None else "bold red"
    listing = figures_listing(look, signs)
    shown = [Text(title, "bold"), listing, Text(look.verdict, style)]
    if look.first is not None:
        shown.append(Text("`treetap blame` names the operation that made it.", "dim"))
    return [*shown, *map(Text, notes)]


def figures_listing(look: Look, signs: str) -> Listing:
    """The table of a look; histograms are drawn with some signs."""
    rows = look.rows
    columns = [Column("site", [row.site.text for row in rows], least=SITE_WIDTH)]
    styles = {n: "red" for n, row in enumerate(rows) if row.nonfinite}
    if look.first is not None:
        marks = [row.nonfinite for row in rows]
        place = look.first.site
        marks[place], styles[place] = f"first: {marks[place]}", "bold white on red"
        columns.append(Column("not finite", marks, rank=1, least=12))
    types = [short_types(type_text(row.site)) for row in rows]
    if any(types):
        columns.append(Column("type", types, rank=8, least=18, style="dim"))
        sizes = (display.readable_bytes(row.site.nbytes) for row in rows)
        columns.append(numbers("memory", sizes, 10))
    values = [row.value for row in rows]
    counts = [[] if f.bars is None else f.bars.counts.tolist() for f in values]
    bars = [spark(each, SPARK, signs) for each in counts]
    columns += [
        Column("histogram", bars, rank=5, style="cyan"),
        numbers("mean", (number_text(f.mean) for f in values), 6),
        numbers("std", (number_text(f.std) for f in values), 3),
        numbers("max", (number_text(f.abs_max) for f in values), 2),
        numbers("dead", (share_text(f.dead) for f in values), 7),
    ]
    if any(row.gradient is not None for row in rows):
        slopes = [row.gradient or Figures() for row in rows]
        columns.append(numbers("grad", (number_text(f.norm) for f in slopes), 4))
        columns.append(numbers("ratio", (number_text(r.ratio) for r in rows), 9))
    return Listing(columns, styles, REMEDY)


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


def _numbers_dict(figures: Figures) -> dict[str, Any]:
    names = (*NUMBERS, "nonfinite")
    return {name: json_number(getattr(figures, name)) for name in names}


def figures_dict(figures: Figures) -> dict[str, Any]:
    """Figures as JSON has them."""
    found = _numbers_dict(figures)
    if figures.bars is not None:
        counts, edges = (part.tolist() for part in figures.bars)
        edges = [json_number(edge) for edge in edges]
        found["histogram"] = {"counts": counts, "edges": edges}
    if figures.parts:
        found["parts"] = [_numbers_dict(part) for part in figures.parts]
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
            "value": figures_dict(row.value),
            "gradient": None if row.gradient is None else figures_dict(row.gradient),
            "ratio": json_number(row.ratio),
        }
        for row in look.rows
    ]
    first = look.first and {
        "site": rows[look.first.site]["site"],
        "part": "gradient" if look.first.is_grad else "value",
        "at": look.first.turn,
        "nonfinite": look.first.figures.nonfinite,
    }
    return {
        "finite": look.first is None,
        "first_nonfinite": first,
        "loss": json_number(look.loss),
        "bytes": sum(row.site.nbytes for row in look.rows),
        "sites": rows,
    }
