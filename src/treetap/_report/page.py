# SPDX-License-Identifier: Apache-2.0
"""report: what a run was like, as one HTML page that needs nothing else.

The page is a few plain files (`page_files/`) put together with a payload, a block of
JSON. It loads nothing: a content security policy allows this one script and no
connection. Names from models are data to it, never markup. All numbers are taken when
the report is made, so that values may be given away afterwards.

The payload has the sites of all steps in order of execution, each with its figures by
step, and the verdict: what first was not finite, and when.
"""

import base64
import functools
import hashlib
import html
import itertools
import json
import math
import os
import pathlib
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, NamedTuple
from urllib.parse import unquote

import jax
import numpy as np

from treetap._capture.statistics.figures import Bars, Figures
from treetap._core.display import readable_bytes
from treetap._core.errors import CaptureError
from treetap._core.wording import many, typed
from treetap._io.files import written_whole
from treetap._observe.records import Record, Site
from treetap._report.pictures import pictures_of
from treetap._report.rows import leaves_below, parameters_of

PICTURE_BUDGET = 8_000_000
MOST_BARS = 10_000  # histograms in a page; with more, only the last step has them
FRAME_HEIGHT = 720
PARTS = ("base.js", "tree.js", "table.js", "drawings.js", "panel.js", "report.js")
# Within a script element these could end it, or begin something else.
ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&"}

Entry = dict[str, Any]
Pair = tuple[Figures, Figures | None]  # of a value, and of its gradient
Row = list[Pair | None]  # by site; None where a step has no such site

NUMBERS = "count mean std low high abs_max norm dead nan infinite".split()
BY_PART = ("mean", "std", "low", "high", "norm", "dead")


@dataclass(frozen=True, repr=False, eq=False)
class Report:
    """A page about what was observed; shows itself in a notebook.

    Attributes:
        title: What is at its top.
        verdict: Its first line: whether all was finite, and what was not.
        payload: All that the page shows, as dicts, lists, texts and numbers.
    """

    title: str
    verdict: str
    payload: dict[str, Any]

    @functools.cached_property
    def html(self) -> str:
        """The page: one file that needs no network."""
        template, style = _page("report.html"), _page("report.css")
        parts = "\n".join(map(_page, PARTS))
        script = f'"use strict";\n(() => {{\n{parts}}})();\n'
        digest = hashlib.sha256(script.encode()).digest()
        data = json.dumps(self.payload, allow_nan=False, separators=(",", ":"))
        return string.Template(template).substitute(
            title=html.escape(self.title),
            digest=base64.b64encode(digest).decode(),
            style=style,
            script=script,
            data=data.translate(ESCAPES),
        )

    def save(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Writes the page to a file, all or nothing.

        Args:
            path: The file, in a folder that is there; it is replaced if it exists.

        Returns:
            The path.

        Raises:
            OSError: The folder is not there, or the file cannot be written.
        """
        path = pathlib.Path(path)
        try:
            with written_whole(path, "Report.save") as beside:
                # A lone surrogate in a name is no reason to lose the report.
                beside.write_bytes(self.html.encode("utf-8", "replace"))
        except OSError as error:
            # `written_whole` raised it, with a text for people
            if error.strerror is None:
                raise
            raise type(error)(
                f"Report.save: {path} could not be written: {error.strerror}. Choose a "
                "folder that can be written to."
            ) from error
        return path

    def _repr_html_(self) -> str:
        return (
            f'<iframe srcdoc="{html.escape(self.html)}" sandbox="allow-scripts" '
            f'title="{html.escape(self.title)}" width="100%" height="{FRAME_HEIGHT}" '
            'style="border: 1px solid #8884; border-radius: 6px"></iframe>'
        )

    def __repr__(self) -> str:
        sites, steps = len(self.payload["sites"]), len(self.payload["steps"])
        parts = [many(sites, "site"), *([many(steps, "step")] if steps > 1 else [])]
        return f"Report({self.title!r}, {', '.join(parts)}: {self.verdict})"


def report(
    records: Record | Iterable[Record],
    *,
    title: str = "",
    model: Any = None,
    steps: Iterable[int] | None = None,
) -> Report:
    """A page about what was observed: figures, histograms, pictures, the first NaN.

    Args:
        records: A Record of `observe`, with or without gradients and statistics; or
            several of one function, at different steps.
        title: What to call it; the class of the model by default.
        model: The model, for the number of its parameters.
        steps: The numbers of the steps, one for each Record; 0, 1, ... by default.

    Returns:
        A report: `save(path)` writes a file, `html` is its text.

    Raises:
        CaptureError: There is no Record, steps do not fit, or values are traced.

    Examples:
        >>> import jax, jax.numpy as jnp, treetap as tt
        >>> def loss(x):
        ...     return jnp.sum(tt.tap(jnp.log(x), "log"))
        >>> watch = tt.observe(jax.grad(loss), grads=True)
        >>> tt.report(watch(jnp.array([1.0, 0.0]))[1], title="Logarithm")
        Report('Logarithm', 1 site: First non-finite: log (1 Inf))
    """
    held = _records(records)
    numbers = _steps(steps, len(held))
    sites = sites_of(held)
    figures = [record.figures() for record in held]
    rows = [[found.get(site.text) for site in sites] for found in figures]
    entries, notes = _entries(sites, rows)
    notes += _illustrate(entries, sites, rows)
    verdicts = _verdicts(rows)
    payload = {
        "title": title or _name(model, sites),
        "about": _about(sites, held, numbers, model),
        "steps": numbers,
        "sites": entries,
        "verdicts": verdicts,
        "first": {key: verdicts[0][key] for key in ("site", "step")},
        "notes": notes,
    }
    texts = [_verdict_text(verdict, entries, numbers) for verdict in verdicts]
    return Report(payload["title"], "; ".join(texts), payload)


def _page(name: str) -> str:
    """A file of the page; browsers know one way to end a line."""
    file = resources.files("treetap._report").joinpath("page_files", name)
    return file.read_text("utf-8").replace("\r\n", "\n")


def _records(records: Any) -> list[Record]:
    is_many = isinstance(records, Iterable) and not isinstance(records, Record)
    held: list[Any] = list(records) if is_many else [records]
    for record in held:
        if not isinstance(record, Record):
            raise TypeError(
                f"report: expected Records, got a {type(record).__name__}. Give the "
                "second result of `observe`, or a list of them."
            )
    if not held:
        raise CaptureError("report: there are no records. Give one or more.")
    return held


def _steps(steps: Iterable[int] | None, count: int) -> Sequence[int | None]:
    if steps is None:
        return list(range(count)) if count > 1 else [None]
    numbers = [int(step) for step in steps]
    if len(numbers) != count:
        raise CaptureError(
            f"report: there are {count} records and {len(numbers)} steps. Give one "
            "number for each record."
        )
    return numbers


def _illustrate(entries: list[Entry], sites: list[Site], rows: list[Row]) -> list[str]:
    """Adds pictures of the values as they were last; gives notes on what has none."""
    last = [
        [(step, pair[0]) for step, pair in enumerate(found) if pair is not None][-1]
        for found in zip(*rows)
    ]
    known = [figures for _, figures in last]
    pictures, left_out = pictures_of(sites, known, PICTURE_BUDGET)
    for n, picture in pictures.items():
        entries[n]["pictures"] = {**picture, "step": last[n][0]}
    note = (
        f"Pictures of {left_out:,} sites were left out: all together may take "
        f"{readable_bytes(PICTURE_BUDGET)}. Select fewer sites to see theirs."
    )
    return [note] if left_out else []


def _verdict_text(verdict: Entry, entries: list[Entry], steps: Sequence[Any]) -> str:
    if verdict["site"] is None:
        return verdict["text"]
    site = entries[verdict["site"]]["text"]
    at = f" at step {steps[verdict['step']]}" if len(steps) > 1 else ""
    return f"{verdict['text']} {site}{at} ({verdict['troubles']})"


# The payload: what the page gets to show, as dicts, lists, texts and numbers. What was
# not measured is left out.


def _entries(sites: list[Site], rows: Sequence[Row]) -> tuple[list[Entry], list[str]]:
    """The sites with their figures by step, and notes on what is left out."""
    notes: list[str] = []
    if len(rows) > 1 and 2 * len(sites) * len(rows) > MOST_BARS:
        rows = [*map(_without_bars, rows[:-1]), rows[-1]]
        notes = ["Histograms are of the last step only: there are many sites."]
    flags = jax.device_get([(site.taken, site.count) for site in sites])
    return [*map(_site, sites, zip(*rows), [_note(*each) for each in flags])], notes


def _without_bars(row: Row) -> Row:
    """The figures of a step without histograms."""

    plain = functools.partial(replace, bars=None)
    return [pair and (plain(pair[0]), pair[1] and plain(pair[1])) for pair in row]


def sites_of(records: Sequence[Record]) -> list[Site]:
    """Each site as it was last, in order of execution.

    A site that only some steps have comes after the one that it follows there.
    """
    order = [site.text for site in records[-1]]
    for record in records:
        texts = [site.text for site in record]
        if set(order).issuperset(texts):
            continue
        place = 0
        for text in texts:
            if text not in order:
                order.insert(place, text)
            place = order.index(text) + 1
    last = {site.text: site for record in records for site in record}
    return [last[text] for text in order]


def _name(model: Any, sites: Sequence[Site]) -> str:
    roots = [class_name(site) for site in sites if not site.path and site.module]
    return ["Report", *roots][-1] if model is None else type(model).__name__


def _about(
    sites: Sequence[Site], records: Sequence[Record], steps: Sequence[Any], model: Any
) -> list[str]:
    """The line under the title."""
    nbytes = max(record.nbytes for record in records)
    found = [many(len(sites), "site"), readable_bytes(nbytes)]
    if model is not None:
        found.append(f"{parameters_of(leaves_below(model)).elements:,} parameters")
    if len(steps) > 1:
        found.append(f"{len(steps)} steps, {steps[0]} to {steps[-1]}")
    elif steps and steps[0] is not None:
        found.append(f"step {steps[0]}")
    return found


# Sites.


def _site(site: Site, pairs: Sequence[Pair | None], note: str) -> Entry:
    values = [pair and _figures(pair[0]) for pair in pairs]
    grads = [pair and pair[1] and _figures(pair[1]) for pair in pairs]
    entry = {
        "text": site.text,
        "path": [str(key) for key in site.path],
        "name": site.name,
        "call": site.index,
        "module": class_name(site),
        "how": site.how,
        "kind": None if site.kind is None else site.kind.__name__,
        "under": list(site.wraps),
        "type": _type(site),
        "bytes": site.nbytes,
    }
    measured = {"values": values, "grads": grads, "note": note}
    return {**entry, **{key: found for key, found in measured.items() if any(found)}}


def _note(taken: Any, count: Any) -> str:
    """Says of a branch how often it was taken, and of a loop how often it ran."""
    if taken is not None and not np.any(taken):
        return "branch not taken"
    if taken is not None and not np.all(taken):
        return f"taken {int(np.sum(taken))} of {np.size(taken)} times"
    if count is None:
        return ""
    ends = dict.fromkeys(np.unique(count)[[0, -1]].tolist())
    return f"ran {' to '.join(map(str, ends))} times"


def class_name(site: Site) -> str:
    """The class of the Module a site is in, without where it was defined."""
    return unquote(site.module.rstrip("!").partition("*")[0]).rpartition(".")[2]


def _type(site: Site) -> str:
    leaves = [leaf for leaf in jax.tree.leaves(site.value) if hasattr(leaf, "dtype")]
    if not leaves:
        return ""
    more = f" +{len(leaves) - 1}" if len(leaves) > 1 else ""
    return typed(leaves[0]) + more


def _figures(figures: Figures) -> Entry | None:
    """Figures without what was not measured; None if nothing was."""
    numbers = {name: getattr(figures, name) for name in NUMBERS}
    found: Entry = {k: _number(x) for k, x in numbers.items() if x is not None}
    if figures.nonfinite and not (figures.nan or figures.infinite):
        found["bad"] = True
    if figures.bars is not None:
        found["bars"] = _bars(figures.bars)
    if len(figures.parts) > 1:
        found["parts"] = _parts(figures.parts)
    return found or None


def _number(number: float) -> float | int | str:
    """A number to six digits; a text if JSON has none for it."""
    if isinstance(number, int):
        return number
    return float(f"{number:.6g}") if math.isfinite(number) else str(number)


def _bars(bars: Bars) -> Entry:
    """Counts and the outermost edges; all of them if they follow no rule."""
    edges = np.asarray(bars.edges, np.float64)
    found: Entry = {"counts": np.asarray(bars.counts).astype(int).tolist()}
    low, high, count = float(edges[0]), float(edges[-1]), len(edges)
    if low > 0 and np.allclose(edges, np.geomspace(low, high, count), rtol=1e-4):
        return {**found, "edges": [low, high], "log": True}
    # In halves: the distance of two numbers may be too large for one.
    even = np.linspace(low / 2, high / 2, count)
    if np.allclose(edges / 2, even, rtol=0, atol=1e-4 * (high / 2 - low / 2)):
        return {**found, "edges": [low, high]}
    return {**found, "edges": edges.tolist()}


def _parts(parts: Sequence[Figures]) -> Entry:
    """Figures of iterations, by figure."""
    found: Entry = {"count": len(parts)}
    for key in BY_PART:
        series = [getattr(part, key) for part in parts]
        if any(number is not None for number in series):
            found[key] = [None if x is None else _number(x) for x in series]
    bad = [int(bool(part.nonfinite)) for part in parts]
    if any(bad):
        found["bad"] = bad
    return found


# The verdict.


class Trouble(NamedTuple):
    """Where something was not finite."""

    step: int
    is_grad: bool
    site: int
    figures: Figures

    @property
    def turn(self) -> int | None:
        """In a scan, the first iteration that has some, or the shard."""
        turns = (n for n, part in enumerate(self.figures.parts) if part.nonfinite)
        return next(turns, None)


def first_troubles(rows: Sequence[Row]) -> list[Trouble]:
    """The first value, and the first gradient, that are not all finite, as made.

    In each step values come first, then gradients from the last site back.
    """
    places = range(len(rows[0]))
    order = [(False, n) for n in places] + [(True, n) for n in reversed(places)]
    found: dict[bool, Trouble] = {}
    for (step, row), (is_grad, n) in itertools.product(enumerate(rows), order):
        pair = row[n]
        figures = pair and pair[is_grad]
        if figures is not None and figures.nonfinite:
            found.setdefault(is_grad, Trouble(step, is_grad, n, figures))
    return list(found.values())


def troubles_text(figures: Figures) -> str:
    """How many NaN and infinities there are."""
    counts = ((figures.nan, "NaN"), (figures.infinite, "Inf"))
    found = [f"{count:,} {name}" for count, name in counts if count]
    return ", ".join(found) or "not finite"


def _verdicts(rows: Sequence[Row]) -> list[Entry]:
    if troubles := first_troubles(rows):
        return [*map(_verdict, troubles)]
    measured = [pair for row in rows for pair in row if pair]
    known = [value.nonfinite is not None for value, _ in measured]
    kind, text = "good", "All finite"
    if not any(known):
        kind, text = "unknown", "Whether values are finite was not measured"
    elif not all(known):
        text = f"All finite, of {sum(known):,} values that were measured"
    elif any(grad is not None for _, grad in measured):
        text = "All finite, values and gradients"
    return [{"kind": kind, "text": text, "site": None, "step": None}]


def _verdict(trouble: Trouble) -> Entry:
    return {
        "kind": "bad",
        "text": f"First non-finite{' gradient' if trouble.is_grad else ''}:",
        "site": trouble.site,
        "step": trouble.step,
        "troubles": troubles_text(trouble.figures),
    }
