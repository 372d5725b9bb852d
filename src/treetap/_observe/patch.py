# SPDX-License-Identifier: Apache-2.0
"""Patching: which values carry what makes one run different from another.

A *patch* puts the value of a clean run into a corrupted one, at one place: a site, one
iteration of it, one index along an axis. `patch_grid` tries all of them in one program;
`attribution` estimates them by a gradient, in one pass.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass

from treetap import edits
from treetap._capture.walk.operations import SCAN
from treetap._capture.walk.plans import Axes
from treetap._core.errors import CaptureError
from treetap._observe.edit import edit
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
    """The patches of one site: the scans around it, and the axis it is cut along."""

    site: Site
    value: jax.Array
    target: edits.Target
    axis: int | None

    @property
    def scans(self) -> tuple[int, ...]:
        """How many iterations each scan has; in shards all are patched at once."""
        return tuple(size for name, size in self.target.loops if name == SCAN.name)

    @property
    def places(self) -> list[str]:
        """What the patched values are called."""
        text = self.site.text
        if not self.scans:
            return [text]
        indices = np.ndindex(*self.scans)
        return [f"{text}[{','.join(map(str, index))}]" for index in indices]

    @property
    def base(self) -> tuple[int, ...]:
        """The shape of the value as the function sees it."""
        return self.target.types[0].shape[self.target.rows :]

    @property
    def size(self) -> int | None:
        """How many indices there are along the axis."""
        return None if self.axis is None else self.base[self.axis]

    @property
    def cut(self) -> tuple[int, ...]:
        """A shape that broadcasts to the value and tells indices apart."""
        return tuple(n if i == self.axis else 1 for i, n in enumerate(self.base))

    def patch(self, value: jax.Array, place: jax.Array, index: jax.Array) -> edits.Edit:
        """The clean value at one place and index; with a place below 0 nowhere."""
        mask = jnp.full(self.cut, place >= 0)
        if self.axis is not None:
            mask &= jax.lax.broadcasted_iota(jnp.int32, self.cut, self.axis) == index
        change = edits.replace(value).where(mask)
        if not self.scans:
            return change
        return change.at(jnp.unravel_index(jnp.maximum(place, 0), self.scans))


@register_dataclass
@dataclass(frozen=True, eq=False)
class _Blend(edits.Edit):
    """On the way to another value by some weight, for each iteration by itself."""

    value: Any
    weights: Any

    def __call__(self, value: Any) -> Any:
        def one(old: Any, new: Any) -> Any:
            return old + (self.weights * (new - old)).astype(old.dtype)

        new = jax.tree.leaves(self.value)[0]
        return jax.tree.map(
            lambda old: one(old, jnp.broadcast_to(new, old.shape)), value
        )

    def fitted(self, target: edits.Target) -> tuple[edits.Edit, list[Axes]]:
        return self, [
            *target.axes_of_tree(self.value),
            Axes(loops=bool(target.loops)),
        ]


class _Ask(edits.Edit):
    """Changes nothing, and keeps what it is told of the value."""

    def __init__(self) -> None:
        self.targets: list[edits.Target] = []

    def fitted(self, target: edits.Target) -> tuple[edits.Edit, list[Axes]]:
        self.targets.append(target)
        return edits.apply(lambda value: value), []


class _Patches:
    """What is to be patched, and what is run."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        chosen: Record,
        axis: int | None,
        what: str,
    ):
        values = [_array_at(site, what) for site in chosen]
        asked = [_Ask() for _ in chosen]
        changes = dict(zip(map(_key, chosen), asked))
        jax.eval_shape(lambda args: [edit(fn, changes)(*args), None][1], args)
        self.parts = [
            _with_axis(_Part(site, value, ask.targets[0], axis), what)
            for site, value, ask in zip(chosen, values, asked)
        ]
        sizes = {part.size for part in self.parts}
        if len(sizes) > 1:
            raise CaptureError(
                f"{what}: the sites have different sizes along axis {axis}: {sizes}. "
                "Patch them one after the other, or without `axis`."
            )
        self.values = [part.value for part in self.parts]
        self.keys = [_key(part.site) for part in self.parts]
        self.places = tuple(place for part in self.parts for place in part.places)
        self.size = sizes.pop()

    def grid(self, effects: jax.Array, baseline: jax.Array) -> PatchGrid:
        """The effects of all patches, in order."""
        lead = (len(self.places),) if self.size is None else (-1, self.size)
        shape = (*lead, *jnp.shape(effects)[1:])
        return PatchGrid(jnp.reshape(effects, shape), baseline, self.places)


def _array_at(site: Site, what: str) -> jax.Array:
    """The value of a site that can be patched."""
    leaves = jax.tree.leaves(site.value)
    if site.how == "sow" or len(leaves) != 1:
        raise CaptureError(
            f"{what}: {site.text} is {site.how} of {len(leaves)} arrays. Choose sites "
            "that are one array, and not sown."
        )
    return jnp.asarray(leaves[0])


def _with_axis(part: _Part, what: str) -> _Part:
    """The same with an axis counted from the front."""
    rank, axis = len(part.base), part.axis
    if axis is not None and not -rank <= axis < rank:
        raise CaptureError(
            f"{what}: {part.site.text} has the shape {part.base}, and no axis {axis}."
        )
    return part if axis is None else part._replace(axis=axis % rank)


def _key(site: Site) -> Callable[[Any], bool]:
    return lambda heard: heard.text == site.text


def _numbers(patches: _Patches) -> tuple[jax.Array, jax.Array]:
    """For each patch the place in each site, and the index; the first is no patch."""
    size = patches.size or 1
    counts = [len(part.places) for part in patches.parts]
    total, start = 1 + sum(counts) * size, 1
    places = np.full((total, len(counts)), -1, np.int32)
    for n, count in enumerate(counts):
        places[start : start + count * size, n] = np.repeat(np.arange(count), size)
        start += count * size
    indices = (np.arange(total, dtype=np.int32) - 1) % size
    return jnp.asarray(places), jnp.asarray(indices)


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
    patches = _Patches(fn, args, clean.select(sites), axis, "patch_grid")

    @jax.jit
    def run(args: Any, values: Any, numbers: Any) -> Any:
        def one(numbers: Any) -> Any:
            places, index = numbers
            changes = {
                key: part.patch(value, places[n], index)
                for n, (key, part, value) in enumerate(
                    zip(patches.keys, patches.parts, values)
                )
            }
            return jnp.asarray(metric(edit(fn, changes)(*args)))

        if batch_size is None:
            return jax.vmap(one)(numbers)
        return jax.lax.map(one, numbers, batch_size=batch_size)

    found = run(args, patches.values, _numbers(patches))
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
    patches = _Patches(fn, args, clean.select(sites), axis, "attribution")
    loops = [[size for _, size in part.target.loops] for part in patches.parts]

    @jax.jit
    def run(args: Any, values: Any) -> Any:
        def measured(weights: Any) -> Any:
            pairs = zip(patches.keys, values, weights)
            changes = {key: _Blend(value, weight) for key, value, weight in pairs}
            return metric(edit(fn, changes)(*args))

        pairs = zip(loops, patches.parts)
        zeros = [jnp.zeros((*sizes, *part.cut)) for sizes, part in pairs]
        return jax.value_and_grad(measured)(zeros)

    baseline, slopes = run(args, patches.values)
    effects = []
    for part, slope in zip(patches.parts, slopes):
        names = [name for name, _ in part.target.loops]
        shards = tuple(n for n, name in enumerate(names) if name != SCAN.name)
        effects.append(jnp.sum(slope, shards).reshape(-1))
    return patches.grid(jnp.concatenate(effects), baseline)
