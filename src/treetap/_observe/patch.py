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
from jax.flatten_util import ravel_pytree
from jax.tree_util import register_dataclass

from treetap import edits
from treetap._capture.walk.operations import SCAN
from treetap._capture.walk.plans import Axes
from treetap._core.errors import CaptureError
from treetap._observe.edit import edit
from treetap._observe.observe import sites as sites_of
from treetap._observe.records import Record, Site


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
        found = []
        for n in np.argsort(-np.abs(effects), axis=None)[:count]:
            place, *index = map(int, np.unravel_index(n, effects.shape))
            at = index[0] if index else None
            found.append((self.places[place], at, float(effects.flat[n])))
        return found


class _Part:
    """The patches of one site: at each iteration of scans, and index along an axis.

    Args:
        clean: The site, with the clean value.
        here: The site in the run that is patched, as `sites` lists it.
        axis: The axis that it is cut along; or None.
        what: The public function at work, for messages.

    Attributes:
        text: The site.
        value: The clean value.
        size: How many indices there are along the axis, if there is one.
        shape: Of its weights, one for each patch, in order: how many iterations each
            scan has (in shards all are patched at once), then a shape that broadcasts
            to the value and tells indices apart.
        places: What the patched values are called.
    """

    def __init__(self, clean: Site, here: Site, axis: int | None, what: str):
        self.text = clean.text
        leaves = jax.tree.leaves(clean.value)
        if clean.how == "sow" or len(leaves) != 1:
            raise CaptureError(
                f"{what}: {clean.text} is {clean.how} of {len(leaves)} arrays. Choose "
                "sites that are one array, and not sown."
            )
        self.value = jnp.asarray(leaves[0])
        base = jax.tree.leaves(here.value)[0].shape[len(here.axes) :]
        if axis is not None and not -len(base) <= axis < len(base):
            raise CaptureError(
                f"{what}: {clean.text} has the shape {base}, and no axis {axis}."
            )
        self.size = () if axis is None else (base[axis],)
        scans = [one.size for one in here.axes if one.kind == SCAN.name]
        cut = [n if axis in (i, i - len(base)) else 1 for i, n in enumerate(base)]
        self.shape = (*scans, *cut)
        self.places = [
            f"{clean.text}[{','.join(map(str, index))}]" if index else clean.text
            for index in np.ndindex(*scans)
        ]

    def is_at(self, heard: Site) -> bool:
        """Whether a site is this one: a selector."""
        return heard.text == self.text


def _parts(
    fn: Callable[..., Any], clean: Record, args: Any, axis: int | None, what: str
) -> list[_Part]:
    """The patches of all sites of a clean run."""
    here = sites_of(fn, *args)
    parts = [_Part(site, here[site.text], axis, what) for site in clean]
    sizes = {size for part in parts for size in part.size}
    if len(sizes) > 1:
        raise CaptureError(
            f"{what}: the sites have different sizes along axis {axis}: {sizes}. "
            "Patch them one after the other, or without `axis`."
        )
    return parts


@register_dataclass
@dataclass(frozen=True, eq=False)
class _Patch(edits.Edit):
    """Another value, as far as weights say, which are for each iteration by itself.

    Attributes:
        value: The other value.
        weights: With the axes of scans in front; in shards, of all loops.
        mix: From the weights, the other value and the old one to what is put there.
    """

    value: Any
    weights: Any
    mix: Callable[..., Any] = field(metadata={"static": True})

    def __call__(self, value: Any) -> Any:
        def one(old: Any) -> Any:
            new = jnp.broadcast_to(jnp.asarray(self.value, old.dtype), old.shape)
            return self.mix(self.weights, new, old)

        return jax.tree.map(one, value)

    def fitted(self, target: edits.Target) -> tuple[edits.Edit, list[Axes]]:
        patch = _Patch(self.value, target.on_all_shards(self.weights), self.mix)
        weights = Axes(loops=bool(target.loops))
        return patch, [*target.spread(self.value)[1], weights]


def _blended(weights: Any, new: Any, old: Any) -> Any:
    return old + (weights * (new - old)).astype(old.dtype)


def _measured(
    fn: Callable[..., Any], metric: Any, parts: Sequence[_Part], mix: Any, dtype: Any
) -> tuple[Callable[..., Any], jax.Array]:
    """The metric as a function of weights, clean values and arguments; zero weights.

    All weights are in one row: of the first part, then of the second, and so on.
    """
    zeros, of_parts = ravel_pytree([jnp.zeros(part.shape, dtype) for part in parts])

    def measured(weights: jax.Array, values: Sequence[Any], args: Any) -> Any:
        each = zip(parts, values, of_parts(weights))
        changes = {part.is_at: _Patch(value, own, mix) for part, value, own in each}
        return metric(edit(fn, changes)(*args))

    return measured, zeros


def _grid(parts: Sequence[_Part], effects: jax.Array, baseline: jax.Array) -> PatchGrid:
    """The effects of all patches, in order."""
    places = tuple(place for part in parts for place in part.places)
    shape = (len(places), *parts[0].size, *jnp.shape(effects)[1:])
    return PatchGrid(jnp.reshape(effects, shape), baseline, places)


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
    measured, none = _measured(fn, metric, parts, jnp.where, bool)

    @jax.jit
    def run(values: Any, args: Any, numbers: Any) -> Any:
        def one(number: Any) -> Any:
            return jnp.asarray(measured(jnp.arange(none.size) == number, values, args))

        if batch_size is None:
            return jax.vmap(one)(numbers)
        return jax.lax.map(one, numbers, batch_size=batch_size)

    # The first has the number -1, that of no patch.
    found = run([part.value for part in parts], args, jnp.arange(-1, none.size))
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
    measured, zeros = _measured(fn, metric, parts, _blended, float)
    run = jax.jit(jax.value_and_grad(measured))
    baseline, effects = run(zeros, [part.value for part in parts], args)
    return _grid(parts, effects, baseline)
