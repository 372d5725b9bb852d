# SPDX-License-Identifier: Apache-2.0
"""Payloads: what a report's page is told, as dicts, lists, texts and numbers.

A payload has the sites of all steps in order of execution, each with its figures by
step, and the verdict: what first was not finite, and when. What was not measured is
left out. `html` adds pictures and writes it into the page.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

import jax
import numpy as np

from treetap._capture.module_paths import class_named
from treetap._capture.statistics.figures import Bars, Figures
from treetap._core.display import readable_bytes
from treetap._core.wording import typed
from treetap._observe.records import Record, Site
from treetap._report.rows import leaves_below, parameters_of

Entry = dict[str, Any]
Pair = tuple[Figures, Figures | None]  # of a value, and of its gradient
Row = list[Pair | None]  # by site; None where a step has no such site

MOST_BARS = 10_000  # histograms in a page; with more, only the last step has them

NUMBERS = {
    "count": "count",
    "mean": "mean",
    "std": "std",
    "low": "low",
    "high": "high",
    "max": "abs_max",
    "norm": "norm",
    "dead": "dead",
    "nan": "nan",
    "inf": "infinite",
}
BY_PART = ("mean", "std", "low", "high", "norm", "dead")


class Trouble(NamedTuple):
    """Where something was not finite: the sooner, the smaller."""

    step: int
    is_grad: bool
    site: int
    figures: Figures


def payload_of(
    records: Sequence[Record],
    rows: Sequence[Row],
    steps: Sequence[Any],
    title: str,
    model: Any,
) -> Entry:
    """All that the page shows, except pictures.

    Args:
        records: One for each step.
        rows: For each step the figures of all sites, in the order of `sites_of`.
        steps: Their numbers.
        title: As of `report`.
        model: As of `report`.
    """
    sites = sites_of(records)
    is_many = 2 * len(sites) * len(records) > MOST_BARS
    has_bars = [not is_many or row is rows[-1] for row in rows]
    entries = [
        _site(site, [row[n] for row in rows], has_bars) for n, site in enumerate(sites)
    ]
    _add_notes(sites, entries)
    notes = []
    if is_many and len(records) > 1:
        notes.append("Histograms are of the last step only: there are many sites.")
    values, grads = first_troubles(rows)
    first = min(filter(None, (values, grads)), default=None)
    return {
        "title": title or _name(model, sites),
        "about": _about(sites, records, steps, model),
        "steps": list(steps),
        "sites": entries,
        "verdicts": _verdicts(rows, values, grads),
        "first": {
            "site": None if first is None else first.site,
            "step": None if first is None else first.step,
        },
        "notes": notes,
    }


def sites_of(records: Sequence[Record]) -> list[Site]:
    """Each site as it was last, in order of execution.

    A site that only some steps have comes after the one that it follows there.
    """
    order = [site.text for site in records[-1]]
    known = set(order)
    for record in records:
        texts = [site.text for site in record]
        if known.issuperset(texts):
            continue
        place = 0
        for text in texts:
            if text in known:
                place = order.index(text) + 1
                continue
            order.insert(place, text)
            known.add(text)
            place += 1
    last = {site.text: site for record in records for site in record}
    return [last[text] for text in order]


def _name(model: Any, sites: Sequence[Site]) -> str:
    if model is not None:
        return type(model).__name__
    roots = [class_name(site) for site in sites if not site.path and site.module]
    return roots[-1] if roots else "Report"


def _about(
    sites: Sequence[Site], records: Sequence[Record], steps: Sequence[Any], model: Any
) -> list[str]:
    """The line under the title."""
    count = len(sites)
    found = [f"{count:,} site" + ("" if count == 1 else "s")]
    found.append(readable_bytes(max(record.nbytes for record in records)))
    if model is not None:
        found.append(f"{parameters_of(leaves_below(model)).elements:,} parameters")
    if len(steps) > 1:
        found.append(f"{len(steps)} steps, {steps[0]} to {steps[-1]}")
    elif steps and steps[0] is not None:
        found.append(f"step {steps[0]}")
    return found


# Sites.


def _site(site: Site, found: Sequence[Pair | None], has_bars: Sequence[bool]) -> Entry:
    pairs = list(zip(found, has_bars))
    values = [pair and _figures(pair[0], bars) for pair, bars in pairs]
    grads = [pair and pair[1] and _figures(pair[1], bars) for pair, bars in pairs]
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
    if any(values):
        entry["values"] = values
    if any(grads):
        entry["grads"] = grads
    return entry


def class_name(site: Site) -> str:
    """The class of the Module a site is in, without where it was defined."""
    cls = class_named(site.module)
    if cls is not None:
        return cls.__name__
    return unquote(site.module.rstrip("!").partition("*")[0]).rpartition(".")[2]


def _type(site: Site) -> str:
    leaves = [leaf for leaf in jax.tree.leaves(site.value) if hasattr(leaf, "dtype")]
    if not leaves:
        return ""
    more = f" +{len(leaves) - 1}" if len(leaves) > 1 else ""
    return typed(leaves[0]) + more


def _figures(figures: Figures, has_bars: bool = True) -> Entry | None:
    """Figures without what was not measured; None if nothing was."""
    found: Entry = {}
    for key, name in NUMBERS.items():
        number = getattr(figures, name)
        if number is not None:
            found[key] = _number(number)
    if figures.nonfinite and not (figures.nan or figures.infinite):
        found["bad"] = True
    if figures.bars is not None and has_bars:
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
        series = [getattr(part, NUMBERS[key]) for part in parts]
        if any(number is not None for number in series):
            found[key] = [None if x is None else _number(x) for x in series]
    bad = [int(bool(part.nonfinite)) for part in parts]
    if any(bad):
        found["bad"] = bad
    return found


def _add_notes(sites: Sequence[Site], entries: Sequence[Entry]) -> None:
    """Says of branches that were not taken, and of loops how often they ran."""
    flags = jax.device_get([(site.taken, site.count) for site in sites])
    for entry, (taken, count) in zip(entries, flags):
        if taken is not None and not np.any(taken):
            entry["note"] = "branch not taken"
        elif taken is not None and not np.all(taken):
            entry["note"] = f"taken {int(np.sum(taken))} of {np.size(taken)} times"
        elif count is not None:
            times = np.unique(count)
            entry["note"] = "ran " + " to ".join(map(str, times[[0, -1]])) + " times"
            if len(times) == 1:
                entry["note"] = f"ran {times[0]} times"


# The verdict.


def first_troubles(rows: Sequence[Row]) -> tuple[Trouble | None, Trouble | None]:
    """The first value and the first gradient, as made, that are not all finite."""
    values = (x for x in _troubles(rows) if not x.is_grad)
    grads = (x for x in _troubles(rows) if x.is_grad)
    return next(values, None), next(grads, None)


def _troubles(rows: Sequence[Row]) -> Iterator[Trouble]:
    """What is not finite, in the order made: gradients from the last site back."""
    for step, row in enumerate(rows):
        places = range(len(row))
        for which, order in ((0, places), (1, reversed(places))):
            for n in order:
                pair = row[n]
                figures = None if pair is None else pair[which]
                if figures is not None and figures.nonfinite:
                    yield Trouble(step, bool(which), n, figures)


def troubles_text(figures: Figures) -> str:
    """How many NaN and infinities there are."""
    found = []
    if figures.nan:
        found.append(f"{figures.nan:,} NaN")
    if figures.infinite:
        found.append(f"{figures.infinite:,} Inf")
    return ", ".join(found) or "not finite"


def _verdicts(
    rows: Sequence[Row], value: Trouble | None, grad: Trouble | None
) -> list[Entry]:
    troubles = sorted(filter(None, (value, grad)), key=lambda x: x[:2])
    if troubles:
        return [_verdict(trouble) for trouble in troubles]
    measured = [[pair for pair in row if pair] for row in rows]
    known = [pair[0].nonfinite is not None for row in measured for pair in row]
    kind, text = "good", "All finite"
    if not any(known):
        kind, text = "unknown", "Whether values are finite was not measured"
    elif not all(known):
        text = f"All finite, of {sum(known):,} values that were measured"
    elif any(pair[1] is not None for row in measured for pair in row):
        text = "All finite, values and gradients"
    return [{"kind": kind, "text": text, "site": None, "step": None}]


def _verdict(trouble: Trouble) -> Entry:
    what = "gradient" if trouble.is_grad else ""
    return {
        "kind": "bad",
        "text": f"First non-finite {what}".strip() + ":",
        "site": trouble.site,
        "step": trouble.step,
        "troubles": troubles_text(trouble.figures),
    }
