# SPDX-License-Identifier: Apache-2.0
"""Events: numbers and histograms on their way to TensorBoard and other loggers.

`EventWriter` writes TensorBoard's files; its histograms are counts and edges, so the
numbers themselves need not be at hand. `scalars_of` and `bars_of` put figures in flat
dicts by tag, and `write` gives these to whatever a user logs with; it knows a writer by
its methods. `Record.log` and `watch` use it.
"""

import contextlib
import math
import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from treetap._capture.statistics.figures import Bars, Figures

Pair = tuple[Figures, Figures | None]  # of a value, and of its gradient

_SCALARS = ("mean", "std", "low", "high", "abs_max", "norm", "dead", "nonfinite")
_METHODS = ("add_scalar", "write_scalars", "scalar")  # by which a writer is known


def named(found: dict[str, Pair], prefix: str, parts: bool) -> dict[str, Pair]:
    """Figures by what their tags begin with.

    Args:
        found: Figures by site.
        prefix: What all names begin with, before a `/`.
        parts: Whether iterations and shards are there one by one, too.
    """
    several: dict[str, Pair] = {}
    for text, (figures, grad) in found.items():
        several[text] = figures, grad
        others = grad.parts if grad else ()
        same = len(others) == len(figures.parts)
        for n, part in enumerate(figures.parts if parts else ()):
            several[f"{text}[{n}]"] = part, others[n] if same else None
    prefix = prefix.rstrip("/")
    return {f"{prefix}/{name}" if prefix else name: x for name, x in several.items()}


def scalars_of(pairs: dict[str, Pair]) -> dict[str, float]:
    """Figures of values and gradients by tag; all are finite, or NaN."""
    found: dict[str, float | None] = {}
    for root, (figures, grad) in pairs.items():
        found |= {f"{root}/{name}": getattr(figures, name) for name in _SCALARS}
        if grad is None:
            continue
        found |= {f"{root}/grad/{name}": getattr(grad, name) for name in _SCALARS}
        if grad.norm is not None and figures.norm is not None:
            ratio = grad.norm / figures.norm if figures.norm else math.nan
            found[f"{root}/grad/ratio"] = ratio
    known = {tag: float(x) for tag, x in found.items() if x is not None}
    return {tag: x if math.isfinite(x) else math.nan for tag, x in known.items()}


def bars_of(pairs: dict[str, Pair]) -> dict[str, Bars]:
    """Histograms of values and gradients by tag, as far as there are any."""
    return {
        f"{root}/{tag}": figures.bars
        for root, pair in pairs.items()
        for tag, figures in zip(("values", "grad/values"), pair)
        if figures is not None and figures.bars is not None
    }


class EventWriter(contextlib.AbstractContextManager["EventWriter"]):
    """Writes TensorBoard's event files. Needs `pip install "treetap[tensorboard]"`.

    Args:
        folder: Where the file goes; made if it is not there.

    Examples:
        >>> import tempfile, treetap as tt
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with tt.EventWriter(folder) as writer:
        ...         writer.add_scalar("loss", 0.5, step=1)
        ...         writer.add_histogram("weights", ([3, 1], [0.0, 1.0, 2.0]), step=1)
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = os.fspath(folder)
        try:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise ImportError(
                "EventWriter: event files are written by tensorboard, which is not "
                'installed. Run `pip install "treetap[tensorboard]"`.'
            ) from error
        self._writer: Any = EventFileWriter(self.folder)

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Writes a number.

        Args:
            tag: What it is called.
            value: The number.
            step: Of the training.
        """
        self._add(step, tag=tag, simple_value=float(value))

    def add_histogram(self, tag: str, bars: Any, step: int) -> None:
        """Writes a histogram.

        Args:
            tag: What it is called.
            bars: Counts, and edges, of which there is one more; as `Figures.bars`.
            step: Of the training.
        """
        counts, edges = (np.asarray(part, np.float64) for part in bars)
        if counts.ndim != 1 or edges.shape != (counts.size + 1,):
            raise ValueError(
                f"EventWriter.add_histogram: {tag!r} has counts of shape "
                f"{counts.shape} and edges of shape {edges.shape}. Give one edge more "
                "than counts."
            )
        names = ("min", "max", "num", "sum", "sum_squares", "bucket_limit", "bucket")
        self._add(step, tag=tag, histo=dict(zip(names, _raw(counts, edges))))

    def _add(self, step: int, **value: Any) -> None:
        if self._writer is None:
            raise ValueError(
                f"EventWriter: the file in {self.folder!r} is closed. Open another."
            )
        from tensorboard.compat.proto import event_pb2, summary_pb2

        summary = summary_pb2.Summary(value=[value])  # pyright: ignore[reportAttributeAccessIssue] - made at run time
        event = event_pb2.Event(  # pyright: ignore[reportAttributeAccessIssue] - made at run time
            wall_time=time.time(), step=int(step), summary=summary
        )
        self._writer.add_event(event)

    def flush(self) -> None:
        """Writes to disk what is still in memory."""
        if self._writer is None:
            return
        try:
            self._writer.flush()
        except OSError as error:
            raise OSError(
                f"EventWriter: the file in {self.folder!r} could not be written: "
                f"{error}. Events since the last flush may be lost; if the disk is "
                "full, make room."
            ) from error

    def close(self) -> None:
        """Writes the rest and closes the file; nothing if it is closed."""
        try:
            self.flush()  # which tells of what closing alone would lose in silence
        finally:
            writer, self._writer = self._writer, None
            if writer is not None:
                with contextlib.suppress(OSError):  # told by now
                    writer.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _raw(counts: np.ndarray, edges: np.ndarray) -> tuple[Any, ...]:
    """Ends, number, sum, sum of squares, upper edges, counts; the sums by middles."""
    middles = edges[:-1] / 2 + edges[1:] / 2
    with np.errstate(over="ignore"):
        sums = float(counts @ middles), float(counts @ (middles * middles))
    ends = float(edges[0]), float(edges[-1])
    return (*ends, float(counts.sum()), *sums, edges[1:].tolist(), counts.tolist())


def opened(writer: Any, name: str) -> Any:
    """A writer, opened if a folder is given; an error if it is none.

    Args:
        writer: What a user gave.
        name: The public function at work, for messages.
    """
    if isinstance(writer, str | os.PathLike):
        return EventWriter(writer)
    if not isinstance(writer, type) and (is_writer(writer) or callable(writer)):
        return writer
    what = repr(writer) if isinstance(writer, type) else f"a {type(writer).__name__}"
    raise TypeError(
        f"{name}: cannot write to {what}. Give a folder for TensorBoard's files, an "
        "`EventWriter`, a SummaryWriter of PyTorch, tensorboardX, TensorBoard, Flax or "
        "CLU, or a function of a dict of numbers and a step, such as `wandb.log`."
    )


def is_writer(writer: Any) -> bool:
    """Whether something takes numbers by one of the methods that are known."""
    return any(hasattr(writer, name) for name in _METHODS)


def write(
    writer: Any, step: int, scalars: Mapping[str, float], bars: Mapping[str, Bars]
) -> None:
    """Gives numbers and histograms to a writer, in the way it takes them.

    Histograms go to writers that take counts and edges.

    Args:
        writer: What `opened` gave.
        step: Of the training.
        scalars: Numbers by tag.
        bars: Histograms by tag.
    """
    add = getattr(writer, "add_scalar", None) or getattr(writer, "scalar", None)
    if add is not None:
        for tag, value in scalars.items():
            add(tag, value, step)
    elif hasattr(writer, "write_scalars"):
        writer.write_scalars(step, dict(scalars))
    else:
        writer(dict(scalars), step)
    for tag, each in bars.items():
        if isinstance(writer, EventWriter):
            writer.add_histogram(tag, each, step)
        elif hasattr(writer, "add_histogram_raw"):
            writer.add_histogram_raw(tag, *_raw(*each), step)
