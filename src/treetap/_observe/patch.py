# SPDX-License-Identifier: Apache-2.0
"""Patching: which values carry what makes one run different from another.

A *patch* puts the value of a clean run into a corrupted one, at one place: a site, one
iteration of it, one index along an axis. `patch_grid` tries all of them in one program;
`attribution` estimates them by a gradient, in one pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass

from treetap import edits
from treetap._capture.walk.operations import SCAN
from treetap._capture.walk.plans import Axes
from treetap._core.errors import CaptureError
from treetap._observe.edit import edit
from treetap._observe.observe import sites as sites_of
from treetap._observe.records import Record, Site, is_loop


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

    effects: jax.Array
    baseline: jax.Array
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
        found = []
        for n in order:
            place, *index = map(int, np.unravel_index(n, effects.shape))
            effect = float(effects.flat[n])
            found.append((self.places[place], index[0] if index else None, effect))
        return found


class _Part:
    """The patches of one site: at each iteration of scans, and index along an axis.

    Args:
        clean: The site, with the clean value.
        here: The site in the run that is patched, as `sites` lists it.
        start: How many places come before, at other sites.
        axis: The axis that it is cut along; or None.
        what: The public function at work, for messages.

    Attributes:
        text: The site.
        value: The clean value.
        loops: The loops and shards that give the value axes.
        size: How many indices there are along the axis, or None.
        cut: A shape that broadcasts to the value and tells indices apart.
        scans: How many iterations each scan has; in shards all are patched at once.
        places: What the patched values are called.
    """

    def __init__(
        self, clean: Site, here: Site, start: int, axis: int | None, what: str
    ):
        self.text, self.start = clean.text, start
        self.value = _array_at(clean, what)
        base = jax.tree.leaves(here.value)[0].shape[len(here.axes) :]
        if axis is not None and not -len(base) <= axis < len(base):
            raise CaptureError(
                f"{what}: {clean.text} has the shape {base}, and no axis {axis}."
            )
        self.axis = None if axis is None else axis % len(base)
        self.size = None if axis is None else base[axis]
        self.cut = tuple(n if i == self.axis else 1 for i, n in enumerate(base))
        self.loops = [one for one in here.axes if is_loop(one)]
        self.scans = tuple(x.size for x in self.loops if x.kind == SCAN.name)
        self.places = [
            f"{clean.text}[{','.join(map(str, index))}]" if index else clean.text
            for index in np.ndindex(*self.scans)
        ]

    def is_at(self, heard: Site) -> bool:
        """Whether a site is this one: a selector."""
        return heard.text == self.text

    def patch(self, value: jax.Array, number: jax.Array) -> edits.Edit:
        """The clean value where the patch of a number is, if that is here at all."""
        place, index = jnp.divmod(number, self.size or 1)
        place -= self.start
        mask = jnp.full(self.cut, (place >= 0) & (place < len(self.places)))
        if self.axis is not None:
            mask &= jax.lax.broadcasted_iota(jnp.int32, self.cut, self.axis) == index
        change = edits.replace(value).where(mask)
        if not self.scans:
            return change
        return change.at(jnp.unravel_index(jnp.maximum(place, 0), self.scans))


def _array_at(site: Site, what: str) -> jax.Array:
    """The value of a site that can be patched."""
    leaves = jax.tree.leaves(site.value)
    if site.how == "sow" or len(leaves) != 1:
        raise CaptureError(
            f"{what}: {site.text} is {site.how} of {len(leaves)} arrays. Choose sites "
            "that are one array, and not sown."
        )
    return jnp.asarray(leaves[0])


def _parts(
    fn: Callable[..., Any], clean: Record, args: Any, axis: int | None, what: str
) -> list[_Part]:
    """The patches of all sites of a clean run, which have places one after another."""
    here = sites_of(fn, *args)
    parts: list[_Part] = []
    for site in clean:
        start = sum(len(part.places) for part in parts)
        parts.append(_Part(site, here[site.text], start, axis, what))
    sizes = {part.size for part in parts}
    if len(sizes) > 1:
        raise CaptureError(
            f"{what}: the sites have different sizes along axis {axis}: {sizes}. "
            "Patch them one after the other, or without `axis`."
        )
    return parts


def _edited(
    fn: Callable[..., Any], parts: Sequence[_Part], changes: Sequence[edits.Edit]
) -> Callable[..., Any]:
    """The function with an edit for each part."""
    return edit(fn, {part.is_at: one for part, one in zip(parts, changes)})


def _grid(parts: Sequence[_Part], effects: jax.Array, baseline: jax.Array) -> PatchGrid:
    """The effects of all patches, in order."""
    places = tuple(place for part in parts for place in part.places)
    size = parts[0].size
    cut = () if size is None else (size,)
    shape = (len(places), *cut, *jnp.shape(effects)[1:])
    return PatchGrid(jnp.reshape(effects, shape), baseline, places)


@register_dataclass
@dataclass(frozen=True, eq=False)
class _Blend(edits.Edit):
    """On the way to another value by some weight, for each iteration by itself."""

    value: Any
    weights: Any

    def __call__(self, value: Any) -> Any:
        def one(old: Any) -> Any:
            new = jnp.broadcast_to(self.value, old.shape)
            return old + (self.weights * (new - old)).astype(old.dtype)

        return jax.tree.map(one, value)

    def fitted(self, target: edits.Target) -> tuple[edits.Edit, list[Axes]]:
        weights = Axes(loops=bool(target.loops))
        return self, [*target.spread_numbers(self.value)[1], weights]


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
        fn: A Module, or a function of Modules or of arrays, that leaves its Modules as
            they are.
        clean: A Record of the clean run, with the sites.
        args: The arguments of the corrupted run.
        sites: Which sites are patched: a glob such as `"blocks/*/attn"`, a `Select`, a
            class, a function of a site, or a list of them. Under a scan each iteration
            is patched by itself.
        metric: From the result of `fn` to a number, or an array.
        axis: Patch each index along this axis of the value by itself: a position, or a
            head. Axes of loops and mappings do not count: it is the value as the
            function sees it.
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
    parts = _parts(fn, clean.select(sites), args, axis, "patch_grid")
    total = sum(len(part.places) for part in parts) * (parts[0].size or 1)

    @jax.jit
    def run(args: Any, values: Any, numbers: Any) -> Any:
        def one(number: Any) -> Any:
            changes = [one.patch(value, number) for one, value in zip(parts, values)]
            return jnp.asarray(metric(_edited(fn, parts, changes)(*args)))

        if batch_size is None:
            return jax.vmap(one)(numbers)
        return jax.lax.map(one, numbers, batch_size=batch_size)

    # The first has the number -1, that of no patch.
    values = [part.value for part in parts]
    found = run(args, values, jnp.arange(-1, total, dtype=jnp.int32))
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
        fn: A Module, or a function of Modules or of arrays, that leaves its Modules as
            they are. It is differentiated.
        clean: A Record of the clean run, with the sites.
        args: The arguments of the corrupted run.
        sites: Which sites are estimated: a glob such as `"blocks/*/attn"`, a `Select`,
            a class, a function of a site, or a list of them. Under a scan each
            iteration is one by itself.
        metric: From the result of `fn` to a number.
        axis: Estimate each index along this axis of the value by itself: a position,
            or a head. Axes of loops and mappings do not count: it is the value as the
            function sees it.

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
    parts = _parts(fn, clean.select(sites), args, axis, "attribution")

    @jax.jit
    def run(args: Any, values: Any) -> Any:
        def measured(weights: Any) -> Any:
            changes = [_Blend(*pair) for pair in zip(values, weights)]
            return metric(_edited(fn, parts, changes)(*args))

        zeros = [
            jnp.zeros((*(loop.size for loop in part.loops), *part.cut))
            for part in parts
        ]
        return jax.value_and_grad(measured)(zeros)

    baseline, slopes = run(args, [part.value for part in parts])
    effects = []
    for part, slope in zip(parts, slopes):
        loops = enumerate(part.loops)
        shards = tuple(n for n, loop in loops if loop.kind != SCAN.name)
        effects.append(jnp.sum(slope, shards).reshape(-1))
    return _grid(parts, jnp.concatenate(effects), baseline)
