# SPDX-License-Identifier: Apache-2.0
"""compare: two runs of a model, site by site, and the first where they part.

A port against the original, bfloat16 against float32, before against after a change.
The result is in order of execution, so its first line that differs is where to look.
Sites without a partner are part of the result, and of whether the two agree.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from treetap._capture.selectors import as_select, refuse_nothing
from treetap._compare.align import Aligner
from treetap._compare.sources import Side, side_of
from treetap._compare.tolerances import (
    FACTOR,
    Limits,
    Measures,
    measure,
)
from treetap._compare.unroll import Pair, in_order
from treetap._core.errors import CaptureError
from treetap._core.wording import (
    first_few,
    json_number,
    many,
    near_to,
    quoted,
    shown,
    type_text,
)
from treetap._io.weight_rules import Tensor
from treetap._observe.records import Record
from treetap._report.table import (
    Column,
    Listing,
    numbers,
    printed_plainly,
    short_types,
)

NAN = float("nan")
UNKNOWN = Measures(NAN, NAN, NAN, NAN, None, 0, 0)
Comparable = Record | Mapping[str, Any] | str | os.PathLike[str]
Layout = Sequence[int] | str | Callable[[np.ndarray], Any]


@dataclass(frozen=True)
class Difference:
    """How one site of two runs differs.

    Attributes:
        site: What it is called in the first: `[2]` is an iteration of a loop, `@grad`
            a gradient.
        other: What it is called in the second.
        shapes: Of both.
        dtypes: Of both.
        max_abs: The largest difference of two numbers.
        relative: The norm of the difference over the norm of the second.
        peak: The largest difference over the largest number of the second.
        cosine: Of the angle between the two.
        ulp: The largest distance in steps of the coarser type; None for integers.
        unequal: How many numbers are not the same.
        size: How many there are.
        limit: What `relative` may be.
        floor: What `relative` is from rounding alone, if there is `noise`.
        reason: Why the site counts as different; empty when it does not.
    """

    site: str
    other: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, str]
    max_abs: float
    relative: float
    peak: float
    cosine: float
    ulp: float | None
    unequal: int
    size: int
    limit: float
    floor: float | None
    reason: str

    @property
    def diverges(self) -> bool:
        """Whether the two are further apart than they may be."""
        return bool(self.reason)


@dataclass(frozen=True, repr=False)
class Comparison:
    """Two runs side by side, in order of execution; true if they agree.

    They agree when no site differs by more than it may, and none is alone.

    Attributes:
        differences: A line for each site that both have: values in order of
            execution, then gradients in theirs.
        only_a: Sites that only the first has.
        only_b: Sites that only the second has.

    Examples:
        >>> import numpy as np, treetap as tt
        >>> a = {"up": np.ones(3), "down": np.ones(3)}
        >>> tt.compare(a, {"up": np.ones(3), "down": 1.5 * np.ones(3)})
        Comparison(2 sites compared, 1 differs; first down, relative 3.3e-01)
    """

    differences: tuple[Difference, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]

    @property
    def diverging(self) -> tuple[Difference, ...]:
        """The sites that differ by more than they may."""
        return tuple(each for each in self.differences if each.diverges)

    @property
    def first(self) -> Difference | None:
        """The first of these, where to look; None if there is none."""
        return next(iter(self.diverging), None)

    def __bool__(self) -> bool:
        return not (self.diverging or self.only_a or self.only_b)

    def __len__(self) -> int:
        return len(self.differences)

    def __iter__(self) -> Iterator[Difference]:
        return iter(self.differences)

    def __getitem__(self, site: str) -> Difference:
        """The line of a site, by its name in the first run."""
        for each in self.differences:
            if each.site == site:
                return each
        raise KeyError(f"Comparison: no site {site!r} was compared.")

    def to_dict(self) -> dict[str, Any]:
        """All of it as what JSON has; numbers that are not finite are texts."""
        lines = map(asdict, self.differences)
        return {
            "agrees": bool(self),
            "first": self.first and self.first.site,
            "differences": [{k: json_number(x) for k, x in e.items()} for e in lines],
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
        }

    def _title(self) -> str:
        far = len(self.diverging)
        differ = "1 differs" if far == 1 else f"{far or 'none'} differ"
        return f"{many(len(self.differences), 'site')} compared, {differ}"

    def _caption(self) -> str:
        first = self.first
        texts = [f"First to differ: {first.site} ({first.reason})."] if first else []
        for names, side in ((self.only_a, "a"), (self.only_b, "b")):
            if names:
                texts.append(f"Only in {side} ({len(names)}): {first_few(names)}.")
        return "\n".join(texts)

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.text import Text

        yield Text(self._title(), "italic")
        yield _listing(self.differences)
        if caption := self._caption():
            yield Text(caption)

    def __str__(self) -> str:
        return printed_plainly(self)

    def __repr__(self) -> str:
        text = self._title()
        if first := self.first:
            text += f"; first {first.site}, relative {_number(first.relative)}"
        alone = len(self.only_a), len(self.only_b)
        text += f"; alone {alone[0]} and {alone[1]}" if any(alone) else ""
        return f"Comparison({text})"


def _listing(lines: Sequence[Difference]) -> Listing:
    """The table of a comparison."""
    columns = [Column("site", [line.site for line in lines], least=16)]
    if any(line.other != line.site for line in lines):
        columns.append(Column("in b", [line.other for line in lines], rank=5, least=16))
    columns += [
        Column("type", [_types_text(line) for line in lines], rank=6, least=18),
        numbers("max abs", (_number(line.max_abs) for line in lines), 3),
        numbers("relative", (_number(line.relative) for line in lines), 1),
        numbers("cosine", (_cosine(line.cosine) for line in lines), 8),
        numbers("ulp", (_steps(line.ulp) for line in lines), 7),
        numbers("limit", (_number(line.limit) for line in lines), 4),
        Column("", [line.reason for line in lines], rank=2, least=14),
    ]
    far = {n: "bold red" for n, line in enumerate(lines) if line.reason}
    return Listing(columns, far)


def _types_text(line: Difference) -> str:
    """Shapes and types of both sides, once where they are the same."""
    texts = [type_text(dtype, shape) for shape, dtype in zip(line.shapes, line.dtypes)]
    return short_types(" / ".join(dict.fromkeys(texts)))


def _number(value: float | None) -> str:
    """A distance in a few letters."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.1e}" if value else "0"


def _steps(value: float | None) -> str:
    return f"{value:.0f}" if value is not None and value < 1e5 else _number(value)


def _cosine(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.6f}"


def compare(
    a: Comparable,
    b: Comparable,
    *,
    rename: Mapping[str, str | Tensor] | None = None,
    layout: Mapping[Any, Layout] | Layout | None = None,
    select: Any = None,
    ignore: Any = (),
    tolerance: float | Mapping[Any, float] | None = None,
    absolute: float = 0.0,
    noise: Comparable | None = None,
    noise_factor: float = FACTOR,
) -> Comparison:
    """Compares two runs, site by site, in order of execution of the first.

    Each is a Record, a mapping of names to arrays, or a safetensors file: of
    `save_record`, or of another program. `name@grad` in those is a gradient; gradients
    are compared where both have them. Distances are those of float64. Values in a
    `scan` are compared iteration by iteration, if there are at most 4096.

    Sites are paired by name; `blocks/0/attn:__call__` also with `blocks.0.attn`. Axes
    that are merged in one and split in the other, as of heads, are no difference.

    Args:
        a: The one run.
        b: The other, which errors are relative to.
        rename: What sites of `a` are called in `b`: rules as for `load_weights`, from
            patterns (`blocks/{i}/attn` for the Module's result, `path:name` for
            others) to names or `tensor(...)`s with steps, such as
            `tensor("h.{i}.qkv").part(0, of=3, axis=2)`, or `.stack()` for what is
            scanned in `a` only.
        layout: How arrays of `b` are turned to be like those of `a`: axes
            `(0, 2, 3, 1)`, a text `"NCHW->NHWC"`, or a function; for all sites, or a
            mapping from selectors of sites of `a`.
        select: Which sites of `a`; all by default.
        ignore: Selectors of sites, of either, that may be alone.
        tolerance: What the relative error of a site may be, for all or by selector. By
            default 1e-10, 2e-5, 5e-3, 4e-2 for float64, float32, float16, bfloat16,
            whichever of the two is coarser; integers must be equal. A single number may
            be off by four times as much of the largest.
        absolute: A difference of numbers that never counts.
        noise: A third run, of the same computation as `a` or as `b`, that differs from
            it by rounding alone: in float64, or in another order. It takes the place of
            `tolerance`: a site differs when its error is more than `noise_factor` times
            that of rounding, which is how far the third run is from the nearer one.
        noise_factor: 8 by default: two sound programs that round differently stay
            within a few times the error of one of them, and a mistake is mostly far
            above.

    Returns:
        The Comparison; `print` shows a table, `first` is the first site to differ.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> def run(epsilon):
        ...     def f(x):
        ...         x = tt.tap(x / jnp.sqrt(jnp.var(x) + epsilon), "norm")
        ...         return tt.tap(2 * x, "out")
        ...     return tt.observe(f)(jnp.arange(4.0))[1]
        >>> comparison = tt.compare(run(1e-3), run(1e-5))
        >>> bool(comparison), comparison.first.site
        (False, 'norm')
    """
    limits = Limits(tolerance, absolute, noise_factor)
    aligner = Aligner(rename, layout)
    sides = [side_of(a, "a"), side_of(b, "b")]
    aligner.refuse_unused(sides[0])
    chosen = as_select("**" if select is None else select)
    ours = [entry for entry in sides[0] if chosen(entry.site)]
    if not ours:
        raise refuse_nothing(chosen, [e.text for e in sides[0]], "compare")
    pairs, only_a, only_b = aligner.align(ours, sides[1])
    if not pairs:
        raise _refuse_strangers(ours, sides[1])
    if noise is not None:
        pairs = _with_floor(pairs, ours, noise, aligner)
    allowed = as_select([*ignore] if isinstance(ignore, list | tuple) else ignore)
    alone = [
        tuple(e.label for e in only if chosen(e.site) and not allowed(e.site))
        for only in (only_a, only_b)
    ]
    lines = tuple(_difference(pair, limits) for pair in in_order(pairs))
    return Comparison(lines, *alone)


def _refuse_strangers(a: Side, b: Side) -> CaptureError:
    """The error for two sides of which nothing is called alike."""
    from_a, from_b = (list(dict.fromkeys(e.text for e in side)) for side in (a, b))
    both = [", ".join(map(shown, texts[:6])) for texts in (from_a, from_b)]
    return CaptureError(
        "compare: no site of `a` has the name of one of `b`.\n"
        f"  a ({len(from_a)}): {both[0]}\n  b ({len(from_b)}): {both[1]}\n"
        "Say with `rename` what sites of `a` are called in `b`: "
        f"`rename={{{_suggested(from_a, from_b)}}}`."
    )


def _suggested(a: Sequence[str], b: Sequence[str]) -> str:
    """A rule, for the two names that look most alike."""
    for text in a[:20]:
        if near := near_to(text, b, 1, 0.3):
            return f"{quoted(text)}: {quoted(near[0])}"
    return f"{quoted(a[0])}: {quoted(b[0])}"


def _with_floor(pairs: list[Pair], a: Side, noise: Any, aligner: Aligner) -> list[Pair]:
    """Pairs with the same array of a third run, under the names of either."""
    third = side_of(noise, "noise")
    wanted = [pair.key for pair in pairs if not pair.reason]
    missing: list[list[str]] = []
    for each in (Aligner(), aligner):
        try:
            found, _, _ = each.align(a, third)
        except CaptureError:  # rules for names that it does not have
            continue
        floors = {pair.key: pair.b for pair in found if not pair.reason}
        missing.append([key[0] for key in wanted if key not in floors])
        if not missing[-1]:
            return [pair._replace(floor=floors.get(pair.key)) for pair in pairs]
    lost = [*map(shown, min(missing, key=len))]
    raise CaptureError(
        f"compare: `noise` lacks {len(lost)} of the sites compared: {first_few(lost)}. "
        "It is a run of the same computation as `a` or as `b`, with the same names."
    )


def _difference(pair: Pair, limits: Limits) -> Difference:
    """Measures a pair, unless there is a reason that it cannot be."""
    a, b = pair.a, pair.b
    b_shape = b.shape if b.own_shape is None else b.own_shape
    found, limit, floor, reason = UNKNOWN, NAN, None, pair.reason
    if not reason:
        arrays = a.read(), b.read()
        if pair.floor is not None:
            quiet = pair.floor.read()
            # it is of the same computation as the one that is nearer
            both = [measure(array, quiet) for array in arrays]
            floor = min(both, key=lambda each: each.relative)
        found, (limit, peak) = measure(*arrays), limits.of(a, b, floor)
        reason = limits.why(found, limit, peak)
    return Difference(
        site=a.label,
        other=b.label,
        shapes=(a.shape, b_shape),
        dtypes=(a.dtype.name, b.dtype.name),
        **found._asdict(),
        limit=limit,
        floor=None if floor is None else floor.relative,
        reason=reason,
    )
