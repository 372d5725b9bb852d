# SPDX-License-Identifier: Apache-2.0
"""Timing of alternatives side by side: rounds interleaved, medians, ratios to a floor.

These machines are noisy, so absolute times mean little: contenders of one group take
turns within every round, and what is reported first is the ratio to the group's floor.
"""

import gc
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

Contender = Callable[[], Any]


class Row(NamedTuple):
    """One contender's result."""

    group: str
    name: str
    microseconds: float
    ratio: float
    target: float | None


class Figure(NamedTuple):
    """Something that is counted, not timed: the same in every run, or nearly."""

    what: str
    found: float
    target: float
    unit: str
    beside: dict[str, float]


def one_round(fn: Contender, calls: int) -> float:
    """Seconds per call over a number of calls, until all is done.

    JAX runs behind Python. What a contender left to do must not be paid by the next, so
    a contender returns what there is to wait for.
    """
    out = None
    start = time.perf_counter()
    for _ in range(calls):
        out = fn()
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / calls


def calls_for(fn: Contender, seconds: float = 0.1) -> int:
    """How many calls fill a round."""
    fn()
    return max(1, int(seconds / max(one_round(fn, 3), 1e-9)))


def compare(
    group: str,
    contenders: dict[str, Contender],
    targets: dict[str, float] | None = None,
    rounds: int = 15,
) -> list[Row]:
    """Times contenders in turns; the first is the floor."""
    calls = {name: calls_for(fn) for name, fn in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, fn in contenders.items():
                times[name].append(one_round(fn, calls[name]))
    finally:
        gc.enable()
    floor = next(iter(contenders))
    return [
        Row(
            group,
            name,
            statistics.median(samples) * 1e6,
            statistics.median(
                own / base for own, base in zip(samples, times[floor], strict=True)
            ),
            (targets or {}).get(name),
        )
        for name, samples in times.items()
    ]


def table(rows: list[Row], digits: int = 2) -> str:
    """The rows as a Markdown table; ratios have that many digits."""
    lines = [
        "| operation | contender | µs | ratio to floor | target | met |",
        "|---|---|---:|---:|---:|:-:|",
    ]
    for row in rows:
        target = f"≤ {row.target:g}x" if row.target else ""
        met = "" if not row.target else ("yes" if row.ratio <= row.target else "NO")
        lines.append(
            f"| {row.group} | {row.name} | {row.microseconds:,.1f} "
            f"| {row.ratio:.{digits}f}x | {target} | {met} |"
        )
    return "\n".join(lines)


def figure_table(figures: list[Figure]) -> str:
    """Figures as a Markdown table."""
    lines = ["| what | found | target | met | beside it |", "|---|---:|---:|:-:|---|"]
    for what, found, target, unit, beside in figures:
        met = "yes" if found <= target else "NO"
        others = ", ".join(f"{name} {value:,g}" for name, value in beside.items())
        lines.append(
            f"| {what} | {found:,g} {unit} | ≤ {target:,g} | {met} | {others} |"
        )
    return "\n".join(lines)


def write(
    path: pathlib.Path | None, rows: list[Row], figures: list[Figure] | None = None
) -> None:
    """Writes results as JSON, if there is a path to write them to."""
    if path is None:
        return
    report = {
        "jax": jax.__version__,
        "rows": [row._asdict() for row in rows],
        "figures": [figure._asdict() for figure in figures or ()],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
