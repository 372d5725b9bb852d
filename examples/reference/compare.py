# SPDX-License-Identifier: Apache-2.0
"""A run of a model beside its reference: the largest error at every site.

A table of names says where the reference of a site is, by the paths of both:

    {"blocks/{i}/attn": "transformer.h.{i}.attn"}

What stands in braces carries over. If only the reference has it, the layers are stacked
in the model: the leading axis of the site counts them, and each is compared. A site is
`path:method`, or just the path for `__call__`. A tuple `(name, 0, 3)` is the first of
three equal parts of the reference's last axis. Nothing is left out in silence: a site
without a reference, and a name without a site, are errors.
"""

import argparse
import itertools
import math
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from safetensors.numpy import load_file

import treetap as tt

DATA = pathlib.Path(__file__).parents[2] / "tests" / "data" / "models"
TOLERANCE = 1e-4

Source = str | tuple[str, int, int]


@dataclass(frozen=True)
class Row:
    """One site and its reference; the error is the largest difference of any number."""

    site: str
    reference: str
    error: float


def folder_argument(name: str) -> pathlib.Path:
    """The folder given on the command line, or the small checkpoint of that name."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "folder",
        nargs="?",
        type=pathlib.Path,
        default=DATA / name,
        help="a Hugging Face folder; a small random checkpoint by default",
    )
    return parser.parse_args().folder


def expected_of(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """The reference of a folder; none if there is only a checkpoint."""
    path = folder / "expected.safetensors"
    return load_file(path) if path.is_file() else {}


def compare(
    record: tt.Record, expected: Mapping[str, np.ndarray], names: Mapping[str, Source]
) -> list[Row]:
    """The errors of all sites of a record, in order of execution."""
    patterns = {_pattern(site): source for site, source in names.items()}
    found: list[tuple[int, list[Row]]] = []  # by how many layers they are of
    lost: list[str] = []
    unused = set(patterns)
    for site in record:
        hits = [(p, match) for p in patterns if (match := p.fullmatch(site.text))]
        if not hits:
            lost.append(site.text)
            continue
        pattern, match = hits[0]
        unused.discard(pattern)
        rows = list(_rows(site, expected, patterns[pattern], match.groupdict()))
        found.append((len(rows), rows))
    if lost or unused:
        raise ValueError(
            f"compare: sites without a name: {lost}; names without a site: "
            f"{[pattern.pattern for pattern in unused]}. Complete the table of names."
        )
    # what ran layer by layer is told layer by layer
    runs = itertools.groupby(found, key=lambda item: item[0])
    layers = (zip(*(rows for _, rows in run)) for _, run in runs)
    return [row for run in layers for layer in run for row in layer]


def _pattern(site: str) -> re.Pattern[str]:
    path, _, method = site.partition(":")
    parts = re.split(r"\{(\w+)\}", path)
    names = parts[1::2]
    parts[::2] = [re.escape(part) for part in parts[::2]]
    parts[1::2] = [f"(?P<{name}>[^/:]+)" for name in names]
    tail = re.escape(method or "__call__")
    return re.compile(f"{''.join(parts)}:{tail}" if path else tail)


def _rows(
    site: tt.Site,
    expected: Mapping[str, np.ndarray],
    source: Source,
    found: dict[str, Any],
) -> Iterator[Row]:
    name, part, parts = (source, 0, 1) if isinstance(source, str) else source
    if "{" in name and not found:
        for n, value in enumerate(site.value):
            key = re.sub(r"\{\w+\}", str(n), name)
            yield _row(f"{site.text}[{n}]", value, key, expected, (part, parts))
    else:
        key = name.format(**found)
        yield _row(site.text, site.value, key, expected, (part, parts))


def _row(
    text: str,
    value: jax.Array,
    key: str,
    expected: Mapping[str, np.ndarray],
    part: tuple[int, int],
) -> Row:
    reference = np.split(expected[key], part[1], axis=-1)[part[0]]
    # heads are an axis of their own here, and patches may be two
    difference = np.asarray(value) - reference.reshape(value.shape)
    error = float(np.abs(difference).max())
    return Row(text, key, math.inf if math.isnan(error) else error)


def show(rows: Sequence[Row], title: str) -> None:
    """Prints a table of errors; stops the program if one is beyond the tolerance."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("output of", overflow="fold")
    table.add_column("reference", overflow="fold")
    table.add_column("max error", justify="right", no_wrap=True)
    for row in rows:
        style = "green" if row.error <= TOLERANCE else "bold red"
        error = Text(f"{row.error:.1e}", style)
        site = row.site.replace(":__call__", "").replace("__call__", "the model")
        table.add_row(Text(site), Text(row.reference), error)
    worst = max(rows, key=lambda row: row.error)
    found = f"the largest error is {worst.error:.1e}, at {worst.site}"
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    if worst.error > TOLERANCE:
        raise SystemExit(f"{title}: {found}; at most {TOLERANCE:g} is allowed.")
    print(f"{len(rows)} outputs within {TOLERANCE:g}; {found}.")
