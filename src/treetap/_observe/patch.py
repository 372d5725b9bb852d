# SPDX-License-Identifier: Apache-2.0
"""Patching: which values carry what makes one run different from another.

A *patch* puts the value of a clean run into a corrupted one, at one place: a site, one
iteration of it, one index along an axis. `patch_grid` tries all of them in one program;
`attribution` estimates them by a gradient, in one pass.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.tree_util import register_dataclass

from treetap._capture.walk.operations import SCAN
from treetap._core.errors import CaptureError
from treetap._observe.edit import edit
from treetap._observe.observe import sites as sites_of
from treetap._observe.records import STATIC, Record, Site
from treetap.edits import Edit, Target, masked, replace


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
    places: tuple[str, ...] = field(default=(), metadata=STATIC)

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
            effect = float(effects.flat[n])
            found.append((self.places[place], index[0] if index else None, effect))
        return found


def _blended(value: Any, edit: Edit, weights: Any) -> Any:
    """A value that is edited as far as weights say."""

    def one(old: Any, new: Any) -> Any:
        return old + (weights * (new - old)).astype(old.dtype)

    return jax.tree.map(one, value, edit(value))


def _is_at(text: str, site: Site) -> bool:
    return site.text == text


class _Patches:
    """The patches of some sites: at each iteration of scans, and index along an axis.

    Args:
        fn: The function that is patched.
        clean: The sites, with the clean values.
        args: The arguments of the run that is patched.
        axis: The axis that sites are cut along; or None.
        what: The public function at work, for messages.

    Attributes:
        texts: The sites.
        values: The clean values.
        shapes: Of the weights of each site, one for each patch, in order: how many
            iterations each scan has (in shards all are patched at once), then a shape
            that broadcasts to the value and tells indices apart.
        places: What the patched values are called.
        size: How many indices there are along the axis, if there is one.
    """

    def __init__(self, fn: Any, clean: Record, args: Any, axis: int | None, what: str):
        self.fn, here = fn, sites_of(fn, *args)
        self.texts = [site.text for site in clean]
        self.values, self.shapes, self.places, sizes = [], [], [], set()
        for site in clean:
            leaves, like = jax.tree.leaves(site.value), here[site.text]
            if site.how == "sow" or len(leaves) != 1:
                raise CaptureError(
                    f"{what}: {site.text} is {site.how} of {len(leaves)} arrays. "
                    "Choose sites that are one array, and not sown."
                )
            base = jax.tree.leaves(like.value)[0].shape[len(like.axes) :]
            if axis is not None and not -len(base) <= axis < len(base):
                raise CaptureError(
                    f"{what}: {site.text} has the shape {base}, and no axis {axis}."
                )
            scans = [one.size for one in like.axes if one.kind == SCAN.name]
            cut = [n if axis in (i, i - len(base)) else 1 for i, n in enumerate(base)]
            sizes |= set() if axis is None else {base[axis]}
            self.values.append(jnp.asarray(leaves[0]))
            self.shapes.append((*scans, *cut))
            for index in np.ndindex(*scans):
                turn = f"[{','.join(map(str, index))}]" if index else ""
                self.places.append(site.text + turn)
        if len(sizes) > 1:
            raise CaptureError(
                f"{what}: the sites have different sizes along axis {axis}: {sizes}. "
                "Patch them one after the other, or without `axis`."
            )
        self.size = tuple(sizes)

    def measured(
        self, metric: Any, mix: Any, dtype: Any
    ) -> tuple[Callable[..., Any], jax.Array]:
        """The metric by weights, clean values and arguments; and weights of zero.

        All weights are in one row: of the first site, then of the second, and so on.
        """
        zeros = [jnp.zeros(shape, dtype) for shape in self.shapes]
        zeros, of_sites = ravel_pytree(zeros)
        fits = Target.of_edit, Target.by_turn

        def measured(weights: jax.Array, values: Sequence[Any], args: Any) -> Any:
            changes = {
                functools.partial(_is_at, text): Edit(mix, (replace(value), own), fits)
                for text, value, own in zip(self.texts, values, of_sites(weights))
            }
            return metric(edit(self.fn, changes)(*args))

        return measured, zeros

    def grid(self, effects: jax.Array, baseline: jax.Array) -> PatchGrid:
        """The effects of all patches, in order."""
        shape = (len(self.places), *self.size, *jnp.shape(effects)[1:])
        return PatchGrid(jnp.reshape(effects, shape), baseline, tuple(self.places))


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
    patches = _Patches(fn, clean.select(sites), args, axis, "patch_grid")
    measured, none = patches.measured(metric, masked, bool)

    @jax.jit
    def run(values: Any, args: Any, numbers: Any) -> Any:
        def one(number: Any) -> Any:
            return jnp.asarray(measured(jnp.arange(none.size) == number, values, args))

        if batch_size is None:
            return jax.vmap(one)(numbers)
        return jax.lax.map(one, numbers, batch_size=batch_size)

    # The first has the number -1, that of no patch.
    found = run(patches.values, args, jnp.arange(-1, none.size))
    baseline = found[0]
    return patches.grid(found[1:] - baseline[None], baseline)


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
    patches = _Patches(fn, clean.select(sites), args, axis, "attribution")
    measured, zeros = patches.measured(metric, _blended, float)
    run = jax.jit(jax.value_and_grad(measured))
    baseline, effects = run(zeros, patches.values, args)
    return patches.grid(effects, baseline)
