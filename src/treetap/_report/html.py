# SPDX-License-Identifier: Apache-2.0
"""report: what a run was like, as one HTML page that needs nothing else.

The page is a few plain files (`page/`) put together with a block of JSON. It loads
nothing: a content security policy allows this one script and no connection. Names from
models are data to it, never markup. All numbers are taken when the report is made, so
that values may be given away afterwards.
"""

import base64
import functools
import hashlib
import html
import json
import os
import pathlib
import secrets
import shutil
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from treetap._core.display import readable_bytes
from treetap._core.errors import CaptureError
from treetap._observe.records import Record, Site
from treetap._report.payload import Row, payload_of, sites_of
from treetap._report.pictures import pictures_of

PICTURE_BUDGET = 8_000_000
FRAME_HEIGHT = 720
PARTS = ("base.js", "tree.js", "table.js", "drawings.js", "panel.js", "report.js")
# Within a script element these could end it, or begin something else.
ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&"}


@dataclass(frozen=True, repr=False, eq=False)
class Report:
    """A page about what was observed; shows itself in a notebook.

    Attributes:
        title: What is at its top.
        verdict: What it says first: whether all was finite, and what was not.
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
        if path.is_dir():
            raise IsADirectoryError(f"Report.save: {path} is a folder; name a file.")
        if not path.parent.is_dir():
            raise FileNotFoundError(
                f"Report.save: there is no folder {path.parent}. Make it first."
            )
        beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        try:
            # A lone surrogate in a name is no reason to lose the report.
            beside.write_bytes(self.html.encode("utf-8", "replace"))
            if path.exists():
                shutil.copymode(path, beside)
            os.replace(beside, path)
        except OSError as error:
            raise type(error)(
                f"Report.save: {path} could not be written: {error.strerror}. Choose a "
                "folder that can be written to."
            ) from error
        finally:
            beside.unlink(missing_ok=True)
        return path

    def _repr_html_(self) -> str:
        return (
            f'<iframe srcdoc="{html.escape(self.html)}" sandbox="allow-scripts" '
            f'title="{html.escape(self.title)}" width="100%" height="{FRAME_HEIGHT}" '
            'style="border: 1px solid #8884; border-radius: 6px"></iframe>'
        )

    def __repr__(self) -> str:
        count, steps = len(self.payload["sites"]), len(self.payload["steps"])
        parts = [f"{count} sites" if count != 1 else "1 site"]
        if steps > 1:
            parts.append(f"{steps} steps")
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
    found = [record.figures() for record in held]
    rows = [[figures.get(site.text) for site in sites] for figures in found]
    payload = payload_of(held, rows, numbers, title, model)
    _add_pictures(payload, sites, rows)
    verdicts = [_verdict_text(one, payload) for one in payload["verdicts"]]
    return Report(payload["title"], "; ".join(verdicts), payload)


def _page(name: str) -> str:
    """A file of the page; browsers know one way to end a line."""
    file = resources.files("treetap._report").joinpath("page", name)
    return file.read_text("utf-8").replace("\r\n", "\n")


def _records(records: Any) -> list[Record]:
    held = [records] if isinstance(records, Record) else records
    if not isinstance(held, Iterable) or isinstance(held, str | bytes):
        raise TypeError(
            f"report: the records are a {type(held).__name__}. Give a Record, the "
            "second result of `observe`, or a list of them."
        )
    held = list(held)
    for place, record in enumerate(held):
        if not isinstance(record, Record):
            raise TypeError(
                f"report: item {place} of the records is a {type(record).__name__}. "
                "Give Records: the second result of `observe`."
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


def _add_pictures(
    payload: dict[str, Any], sites: Sequence[Site], rows: Sequence[Row]
) -> None:
    """Adds pictures of the values as they were last, as far as there is room."""
    last = [
        max(step for step, row in enumerate(rows) if row[n] is not None)
        for n in range(len(sites))
    ]
    pairs = [rows[step][n] for n, step in enumerate(last)]
    known = [None if pair is None else pair[0] for pair in pairs]
    pictures, left_out = pictures_of(sites, known, PICTURE_BUDGET)
    for n, picture in pictures.items():
        payload["sites"][n]["pictures"] = {**picture, "step": last[n]}
    if left_out:
        payload["notes"].append(
            f"Pictures of {left_out:,} sites were left out: all together may take "
            f"{readable_bytes(PICTURE_BUDGET)}. Select fewer sites to see theirs."
        )


def _verdict_text(verdict: dict[str, Any], payload: dict[str, Any]) -> str:
    if verdict["site"] is None:
        return verdict["text"]
    site = payload["sites"][verdict["site"]]["text"]
    steps = payload["steps"]
    at = f" at step {steps[verdict['step']]}" if len(steps) > 1 else ""
    return f"{verdict['text']} {site}{at} ({verdict['troubles']})"
