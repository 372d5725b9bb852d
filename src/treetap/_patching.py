# SPDX-License-Identifier: Apache-2.0
"""Patching: which values carry what makes one run different from another.

A *patch* puts the value of a clean run into a corrupted one, at one place: a site, one
iteration of it, one index along an axis. `patch_grid` tries all of them in one program;
`attribution` estimates them by a gradient, in one pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass

from treetap import edits
from treetap._editing import edit
from treetap._errors import CaptureError
from treetap._observing import observe
from treetap._records import Record, Site


@register_dataclass
@dataclass(frozen=True, eq=False)
class PatchGrid:
    """What patches do to a metric.

    Attributes:
        effects: By patch: by place, then by index along the axis if one was given; how
            much the metric changes.
        baseline: The metric without any patch.
        places: The sites; `"h[2]"` is the third iteration of one.
    """

    effects: Any
    baseline: Any
    places: tuple[str, ...] = field(default=(), metadata={"static": True})

    def top(self, count: int = 5) -> list[tuple[str, int | None, float]]:
        """The patches with the largest effects: place, index along the axis, effect."""
        effects = np.asarray(self.effects)
        if effects.ndim > 2:
            raise CaptureError(
                "PatchGrid.top: the metric is not a single number, so that effects "
                f"have the shape {effects.shape}. Look at `effects`."
            )
        order = np.argsort(-np.abs(effects), axis=None)[:count]
        places = [np.unravel_index(n, effects.shape) for n in order]
        return [
            (
                self.places[place[0]],
                int(place[1]) if len(place) > 1 else None,
                float(effects[place]),
            )
            for place in places
        ]


class _Part(NamedTuple):
    """The patches of one site: its loops, and how long it is along the axis."""

    site: Site
    value: Any
    loops: tuple[int, ...]
    axis: int | None

    @property
    def places(self) -> list[str]:
        """What they are called."""
        text = self.site.text
        indices = np.ndindex(*self.loops)
        if not self.loops:
            return [text]
        return [f"{text}[{','.join(map(str, index))}]" for index in indices]

    @property
    def size(self) -> int | None:
        """How many indices there are along the axis."""
        return None if self.axis is None else self.value.shape[self.axis]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a mask that tells patches apart."""
        count = len(self.loops)
        rest = [
            size if count + n == self.axis else 1
            for n, size in enumerate(self.value.shape[count:])
        ]
        return (*self.loops, *rest)


def _parts(record: Record, sites: Any, axis: int | None, what: str) -> list[_Part]:
    """The sites to be patched, of a clean run."""
    found: list[_Part] = []
    for site in record.select(sites):
        leaves = jax.tree.leaves(site.value)
        if site.how == "sow" or len(leaves) != 1:
            raise CaptureError(
                f"{what}: {site.text} is {site.how} of {len(leaves)} arrays. Choose "
                "sites that are one array, and not sown."
            )
        value = jnp.asarray(leaves[0])
        count = sum(name in {"scan", "shard_map"} for name in site.wraps)
        place = None if axis is None else axis if axis < 0 else axis + count
        if place is not None and place < 0:
            place += value.ndim
        if place is not None and not count <= place < value.ndim:
            raise CaptureError(
                f"{what}: {site.text} has the shape {value.shape[count:]}, and no axis "
                f"{axis}."
            )
        found.append(_Part(site, value, value.shape[:count], place))
    sizes = {part.size for part in found}
    if len(sizes) > 1:
        raise CaptureError(
            f"{what}: the sites have different sizes along axis {axis}: {sizes}. Patch "
            "them one after the other, or without `axis`."
        )
    return found


def _key(site: Site) -> Callable[[Any], bool]:
    return lambda heard: heard.text == site.text


def _masks(parts: Sequence[_Part]) -> list[Any]:
    """For each site a mask for all patches; the first one patches nothing."""
    counts = [int(np.prod(part.shape)) for part in parts]
    total, masks, start = 1 + sum(counts), [], 1
    for part, count in zip(parts, counts):
        mask = np.zeros((total, count), bool)
        mask[start : start + count] = np.eye(count, dtype=bool)
        masks.append(jnp.asarray(mask.reshape(total, *part.shape)))
        start += count
    return masks


def _grid(parts: Sequence[_Part], effects: Any, baseline: Any) -> PatchGrid:
    places = [place for part in parts for place in part.places]
    size = parts[0].size
    lead = (len(places),) if size is None else (len(places), size)
    rest = jnp.shape(effects)[1:]
    return PatchGrid(effects.reshape(*lead, *rest), baseline, tuple(places))


def patch_grid(
    fn: Callable[..., Any],
    clean: Record,
    args: tuple[Any, ...],
    sites: Any,
    metric: Callable[[Any], Any],
    *,
    axis: int | None = None,
    batch_size: int | None = None,
) -> PatchGrid:
    """Activation patching: each value of a clean run, alone, in a corrupted run.

    All patches are one compiled program.

    Args:
        fn: As for `edit`; one that leaves its Modules as they are.
        clean: A Record of the clean run, with the sites.
        args: The arguments of the corrupted run.
        sites: A selector of sites, as for `observe`; under a scan each iteration is
            patched by itself.
        metric: From the result of `fn` to a number, or an array.
        axis: Patch each index along this axis of the value by itself: a position, or a
            head. Axes of loops do not count.
        batch_size: How many patches run at once; all by default.

    Returns:
        The effects of all patches.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> def f(x):
        ...     return tt.tap(2 * x, "a") + tt.tap(3 * x, "b")
        >>> _, clean = tt.observe(f)(1.0)
        >>> tt.patch_grid(f, clean, (0.0,), ["a", "b"], lambda out: out).top()
        [('b', None, 3.0), ('a', None, 2.0)]
    """
    parts = _parts(clean, sites, axis, "patch_grid")

    @jax.jit
    def run(args: Any, values: Any, masks: Any) -> Any:
        def one(masks: Any) -> Any:
            changes = {
                _key(part.site): edits.replace(value).where(mask)
                for part, value, mask in zip(parts, values, masks)
            }
            return jnp.asarray(metric(edit(fn, changes)(*args)))

        if batch_size is None:
            return jax.vmap(one)(masks)
        return jax.lax.map(one, masks, batch_size=batch_size)

    found = run(args, [part.value for part in parts], _masks(parts))
    baseline = found[0]
    return _grid(parts, found[1:] - baseline[None], baseline)


def attribution(
    fn: Callable[..., Any],
    clean: Record,
    args: tuple[Any, ...],
    sites: Any,
    metric: Callable[[Any], Any],
    *,
    axis: int | None = None,
) -> PatchGrid:
    """Attribution patching: the effects of `patch_grid` to first order, in one pass.

    The difference of the values, times the gradient of the metric in the corrupted run.

    Args:
        fn: As for `patch_grid`.
        clean: As for `patch_grid`.
        args: As for `patch_grid`.
        sites: As for `patch_grid`.
        metric: From the result of `fn` to a number.
        axis: As for `patch_grid`.

    Returns:
        The estimated effects of all patches.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> def f(x):
        ...     return tt.tap(2 * x, "a") + tt.tap(3 * x, "b")
        >>> _, clean = tt.observe(f)(1.0)
        >>> tt.attribution(f, clean, (0.0,), ["a", "b"], lambda out: out).top()
        [('b', None, 3.0), ('a', None, 2.0)]
    """
    parts = _parts(clean, sites, axis, "attribution")
    keys = [_key(part.site) for part in parts]

    @jax.jit
    def run(args: Any, values: Any) -> Any:
        def measured(offsets: Any) -> Any:
            changes = {key: edits.add(x) for key, x in zip(keys, offsets)}
            out, record = observe(edit(fn, changes), keys)(*args)
            return metric(out), record

        zeros = jax.tree.map(jnp.zeros_like, values)
        (baseline, record), grads = jax.value_and_grad(measured, has_aux=True)(zeros)
        effects = []
        for part, value, grad in zip(parts, values, grads):
            held = jax.tree.leaves(record[part.site.text].value)[0]
            product = (value - held) * grad
            axes = tuple(n for n, size in enumerate(part.shape) if size == 1)
            axes = tuple(n for n in axes if n >= len(part.loops) and n != part.axis)
            effects.append(jnp.sum(product, axes).reshape(-1))
        return jnp.concatenate(effects), baseline

    effects, baseline = run(args, [part.value for part in parts])
    return _grid(parts, effects, baseline)
