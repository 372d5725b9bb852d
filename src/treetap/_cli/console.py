# SPDX-License-Identifier: Apache-2.0
"""Consoles: where results and progress go, and numbers as a terminal has room for.

Results go to stdout, progress to stderr and only where that is a terminal. What is
piped has no colours and all columns.
"""

import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

PIPED_WIDTH = 160
BLOCKS, LETTERS = " ▁▂▃▄▅▆▇█", " .:-=+*#@"


def console_of() -> "Console":
    """The console of results."""
    from rich.console import Console

    is_free = not sys.stdout.isatty() and not os.environ.get("COLUMNS", "").isdigit()
    width = PIPED_WIDTH if is_free else None
    return Console(file=sys.stdout, width=width, highlight=False, soft_wrap=False)


@contextmanager
def progress_of() -> Iterator["Progress"]:
    """Bars for long work, on stderr; nothing where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(file=sys.stderr)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("{task.fields[state]}"),
        console=console,
        disable=not sys.stderr.isatty() or console.is_dumb_terminal,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # else what is printed is a result
    ) as progress:
        yield progress


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Shows what is going on, until it ends."""
    with progress_of() as progress:
        progress.add_task(text, total=None, state="")
        yield


def number_text(value: float | None) -> str:
    """A number in at most eight letters; `-` if it is not known."""
    if value is None:
        return "-"
    size = abs(value)
    if size == 0:
        return "0"
    if not 1e-3 <= size < 1e5:
        return f"{value:.1e}"
    digits = 3 if size < 10 else 2 if size < 100 else 1 if size < 1000 else 0
    return f"{value:.{digits}f}"


def share_text(value: float | None) -> str:
    """A share in percent; `-` if it is not known."""
    if value is None:
        return "-"
    return "<1%" if 0 < value < 0.01 else f"{value:.0%}"


def spark(counts: Sequence[float], width: int, signs: str = BLOCKS) -> str:
    """A histogram in a line of blocks, from its first full bin to its last."""
    full = [n for n, count in enumerate(counts) if count > 0]
    if not full:
        return ""
    inner = list(counts)[full[0] : full[-1] + 1]
    if len(inner) == 1:
        return signs[-1]
    width = min(width, len(inner))
    cuts = [len(inner) * n // width for n in range(width + 1)]
    sums = [sum(inner[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]
    most, steps = max(sums), len(signs) - 2
    levels = [1 + round(steps * each / most) if each > 0 else 0 for each in sums]
    return "".join(signs[level] for level in levels)
