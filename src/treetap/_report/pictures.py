# SPDX-License-Identifier: Apache-2.0
"""Pictures: values as small heat maps, and attention as one for each head.

A picture is a few tiles of at most 64 by 64 bytes: means of blocks, made where the
value is and fetched together. Of further axes one item is shown: the first that is not
finite, or the first. Iterations of a scan, and heads of attention, are tiles. A byte is
0 to 254, from the lowest to the highest end of the scale, or 255 for a block with
something that is not finite.
"""

import base64
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from treetap._capture.statistics.figures import Figures
from treetap._capture.statistics.reduced import is_measurable
from treetap._core.wording import typed
from treetap._observe.records import Site, axes_of, is_loop, loops_first

SIDE = 64  # of a tile, at most
MOST_TILES = 16
WRONG = 255

Index = tuple[int, ...]


class Plan(NamedTuple):
    """Which parts of a value are tiles.

    Attributes:
        axes: How each axis but the last two is written: `i` for iterations, `h` for
            heads, or the number of the one item that is shown.
        indices: Of each tile, all but the last two axes.
        labels: What each tile is called.
        total: How many tiles there could be.
        block: How many rows and columns go into one byte.
        size: Rows and columns of a tile.
        is_attention: Whether rows sum up to one: then the scale begins at zero.
    """

    axes: tuple[str, ...]
    indices: tuple[Index, ...]
    labels: tuple[str, ...]
    total: int
    block: tuple[int, int]
    size: tuple[int, int]
    is_attention: bool

    @property
    def nbytes(self) -> int:
        """About how much it takes as text."""
        rows, columns = self.size
        return len(self.indices) * (4 * (rows * columns + 2) // 3 + 40) + 200


def pictures_of(
    sites: Sequence[Site], figures: Sequence[Figures | None], budget: int
) -> tuple[dict[int, dict[str, Any]], int]:
    """Pictures by the number of their site, and how many are left out.

    Args:
        sites: The sites, with their values.
        figures: Of the values, where they are known.
        budget: How many bytes all pictures may take.
    """
    pending: dict[int, tuple[str, Plan, Any]] = {}
    left_out = 0
    for number, (site, known) in enumerate(zip(sites, figures)):
        leaf, value = _matrix(site.value)
        if value is None:
            continue
        axes, text = axes_of(site, "value", leaf), typed(value)
        value = loops_first(value, axes)
        plan = _plan(value, sum(map(is_loop, axes)), known)
        if plan.nbytes > budget:
            left_out += 1
            continue
        budget -= plan.nbytes
        places = tuple(np.array(plan.indices, int).T)
        pending[number] = text, plan, _tiles(value, places, plan.block)
    fetched = jax.device_get(pending)
    return {number: _picture(*held) for number, held in fetched.items()}, left_out


def _matrix(value: Any) -> tuple[int, Any]:
    """The first array with two axes or more, if there is one, and its number."""
    for number, leaf in enumerate(jax.tree.leaves(value)):
        if isinstance(leaf, Tracer | jax.ShapeDtypeStruct) or not is_measurable(leaf):
            continue
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            continue
        if np.ndim(leaf) >= 2 and np.size(leaf):
            return number, leaf if isinstance(leaf, jax.Array) else _narrowed(leaf)
    return 0, None


def _narrowed(value: Any) -> np.ndarray:
    """An array of the host in a type that every device has; what is large stays."""
    value = np.asarray(value)
    if value.dtype.kind == "c":
        value = np.abs(value)
    if value.dtype.itemsize < 8:
        return value
    most = np.finfo(np.float32).max
    is_finite = np.isfinite(value)
    return np.where(is_finite, np.clip(value, -most, most), value).astype(np.float32)


def _is_attention(value: Any, figures: Figures | None) -> bool:
    """Whether rows sum up to one, as in attention; measured if the figures allow it."""
    is_floating = jnp.issubdtype(value.dtype, jnp.floating)
    if value.ndim < 3 or value.shape[-1] < 2 or not is_floating:
        return False
    if figures is not None and figures.low is not None and figures.mean is not None:
        is_share = figures.low >= 0 and (figures.high or 0) <= 1.01
        if not is_share or abs(figures.mean * value.shape[-1] - 1) >= 0.05:
            return False
    return bool(_are_shares(value))


def _plan(value: Any, loops: int, figures: Figures | None) -> Plan:
    """Says how a value is cut, whose first axes are those of loops."""
    *lead, rows, columns = value.shape
    loops = min(loops, len(lead))
    is_attention = _is_attention(value, figures)
    heads = lead[loops:][-1:] if is_attention else []
    end = len(lead) - len(heads)
    is_wrong = figures is not None and bool(figures.nonfinite)
    item = _first_wrong(value, loops, end) if is_wrong else (0,) * (end - loops)
    places = list(itertools.islice(np.ndindex(*lead[:loops]), MOST_TILES))
    most = max(1, MOST_TILES // len(places))
    some_heads = list(itertools.islice(np.ndindex(*heads), most))
    tiles = list(itertools.product(places, some_heads))
    block = math.ceil(rows / SIDE), math.ceil(columns / SIDE)
    return Plan(
        axes=(*["i"] * loops, *map(str, item), *["h"] * len(heads)),
        indices=tuple((*place, *item, *head) for place, head in tiles),
        labels=tuple(_label(place, head) for place, head in tiles),
        total=math.prod([*lead[:loops], *heads]),
        block=block,
        size=(math.ceil(rows / block[0]), math.ceil(columns / block[1])),
        is_attention=is_attention,
    )


def _label(place: Index, head: Index) -> str:
    """What a tile is called: `3 · head 1`."""
    heads = [f"head {number}" for number in head]
    return " · ".join(filter(None, [",".join(map(str, place)), *heads]))


def _is_spread(value: Any) -> bool:
    """Whether axes of a value are spread over an explicit mesh."""
    spec = getattr(getattr(jax.typeof(value), "sharding", None), "spec", ())
    return any(axis is not None for axis in spec)


def _first_wrong(value: Any, start: int, end: int) -> Index:
    """Where along some axes the first item is that is not finite, or item 0.

    What is spread over an explicit mesh is not searched.
    """
    if start == end or _is_spread(value):
        return (0,) * (end - start)
    others = (*range(start), *range(end, value.ndim))
    is_wrong = np.asarray(_has_wrong(value, others))
    return tuple(map(int, np.unravel_index(is_wrong.argmax(), is_wrong.shape)))


@functools.partial(jax.jit, static_argnums=1)
def _has_wrong(value: Any, axes: tuple[int, ...]) -> Any:
    return jnp.any(~jnp.isfinite(value), axis=axes)


@functools.partial(jax.jit, static_argnums=2)
def _tiles(value: Any, places: Any, block: tuple[int, int]) -> Any:
    """Means `[tile, row, column]`; NaN for blocks that are not all finite."""
    picked = _items(value, places) if places else value[None]
    if jnp.issubdtype(picked.dtype, jnp.complexfloating):
        picked = jnp.abs(picked)
    most = float(jnp.finfo(jnp.float32).max)
    numbers = jnp.clip(picked, -most, most).astype(jnp.float32)
    numbers = jnp.where(jnp.isfinite(picked), numbers, jnp.nan)
    if block == (1, 1):
        return numbers
    size = math.prod(block)
    counts = _block_sums(jnp.ones_like(numbers), block)
    # Divided first, so that the sum of large numbers is not infinite.
    return _block_sums(numbers / size, block) * (size / counts)


def _items(value: Any, places: Any) -> Any:
    """Matrices out of a value, whole on every device of an explicit mesh."""
    if not _is_spread(value):
        return value[places]
    mesh = jax.typeof(value).sharding.mesh
    whole = jax.sharding.NamedSharding(mesh, jax.P(None, None, None))
    return value.at[places].get(out_sharding=whole)


def _block_sums(tiles: Any, block: tuple[int, int]) -> Any:
    """Sums over blocks of rows and columns; what is missing at the ends is zero."""
    count, rows, columns = tiles.shape
    high, wide = math.ceil(rows / block[0]), math.ceil(columns / block[1])
    missing = (0, high * block[0] - rows), (0, wide * block[1] - columns)
    padded = jnp.pad(tiles, ((0, 0), *missing))
    return padded.reshape(count, high, block[0], wide, block[1]).sum((2, 4))


@jax.jit
def _are_shares(value: Any) -> Any:
    """Whether rows are not negative and sum up to one; broken ones do not count."""
    numbers = value.astype(jnp.float32)
    limit = 1e-3 if value.dtype.itemsize >= 4 else 1e-2  # half precision rounds more
    is_broken = ~jnp.all(jnp.isfinite(numbers), axis=-1)
    is_near = jnp.abs(jnp.sum(numbers, axis=-1) - 1) <= limit
    is_share = is_near & jnp.all(numbers >= 0, axis=-1)
    return jnp.all(is_broken | is_share) & jnp.any(is_share)


def _picture(text: str, plan: Plan, means: np.ndarray) -> dict[str, Any]:
    """A picture as the payload of a page has it."""
    codes, scale = _coded(means, is_share=plan.is_attention)
    rows, columns = plan.size
    return {
        "kind": "attention" if plan.is_attention else "heat",
        "of": f"[{', '.join(plan.axes)}, :, :] of {text}" if plan.axes else text,
        "tiles": [
            {"label": label, "data": base64.b64encode(tile.tobytes()).decode()}
            for label, tile in zip(plan.labels, codes)
        ],
        "rows": rows,
        "columns": columns,
        "block": list(plan.block),
        "scale": float(f"{scale:.4g}"),
        "wrong": bool(np.any(codes == WRONG)),
        "shown": len(plan.indices),
        "total": plan.total,
    }


def _coded(means: np.ndarray, *, is_share: bool) -> tuple[np.ndarray, float]:
    """Bytes, and the number that the highest one stands for."""
    is_finite = np.isfinite(means)
    sizes = np.abs(means[is_finite])
    scale = 0.0
    if sizes.size:  # a few outliers must not make all else look like nothing
        scale = sizes.max() if is_share else np.quantile(sizes, 0.99) or sizes.max()
    parts = np.clip(np.where(is_finite, means, 0) / (scale or 1.0), -1, 1)
    codes = np.round(parts * 254 if is_share else 127 + parts * 127)
    return np.where(is_finite, codes, WRONG).astype(np.uint8), float(scale)
