# SPDX-License-Identifier: Apache-2.0
"""Patching: which values carry what makes one run different from another.

A *patch* puts the value of a clean run into a corrupted one, at one place: a site, one
iteration of it, one index along an axis. `patch_grid` tries all of them in one program;
`attribution` estimates them by a gradient, in one pass.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.tree_util import register_dataclass

from treetap._capture.walk import jax_compat
from treetap._capture.walk.operations import SCAN
from treetap._capture.walk.spots import Axis
from treetap._core.errors import CaptureError
from treetap._core.settings import Mode
from treetap._core.trace_level import is_eager
from treetap._observe.closures import Opened
from treetap._observe.edit import edit
from treetap._observe.kept_programs import KeptCall, KeptProgram, Outline
from treetap._observe.records import STATIC, Record, Site
from treetap._observe.sweep.batches import Batch, free_memory
from treetap._observe.sweep.flat import Flat, flattened
from treetap._observe.sweep.points import Unsuited, point
from treetap._observe.sweep.regions import narrowed
from treetap._observe.sweep.rows import (
    Patch,
    Patched,
    check_points,
    points_of,
    run_once,
    weigh,
)
from treetap._transforms.lift.compiled import Jit
from treetap._transforms.lift.lift import Lift
from treetap.edits import Edit, Target, masked, replace

MAX_SHRINK = 12


def _as_array(value: Any) -> jax.Array:
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


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


_chosen: WeakKeyDictionary[Record, dict[Any, Any]] = WeakKeyDictionary()


class _Sites(NamedTuple):
    """The sites that are patched; static, as a part of the key of a program.

    Attributes:
        texts: What they are called.
        axes: The axes that each value has in front.
        axis: The axis that sites are cut along, as the function sees them; or None.
        size: How many places there are along it; 1 if there is none.
    """

    texts: tuple[str, ...]
    axes: tuple[tuple[Axis, ...], ...]
    axis: int | None
    size: int

    @classmethod
    def of(
        cls, clean: Record, select: Any, axis: int | None, what: str
    ) -> "tuple[_Sites, list[jax.Array]]":
        """The sites of a Record, kept as long as the Record is; and their values."""
        if isinstance(select, str | type):
            known, key = _chosen.setdefault(clean, {}), (select, axis, what)
            if key not in known:
                known[key] = cls._of(clean.select(select), axis, what)
            sites, values = known[key]
        else:
            sites, values = cls._of(clean.select(select), axis, what)
        return sites, [
            x if isinstance(x, jax.Array) else jnp.asarray(x) for x in values
        ]

    @classmethod
    def _of(
        cls, clean: Record, axis: int | None, what: str
    ) -> "tuple[_Sites, list[Any]]":
        """The sites of a Record; refuses such as cannot be patched."""
        axes, sizes, values = [], set(), []
        for site in clean:
            leaves = jax.tree.leaves(site.value)
            if site.how == "sow" or len(leaves) != 1:
                raise CaptureError(
                    f"{what}: {site.text} is {site.how} of {len(leaves)} arrays. "
                    "Choose sites that are one array, and not sown."
                )
            axes.append(site.axes)
            values.append(leaves[0])
            base = jnp.shape(leaves[0])[len(site.axes) :]
            if axis is not None and not -len(base) <= axis < len(base):
                raise CaptureError(
                    f"{what}: {site.text} has the shape {base}, and no axis {axis}."
                )
            sizes |= set() if axis is None else {base[axis]}
        if len(sizes) > 1:
            raise CaptureError(
                f"{what}: the sites have different sizes along axis {axis}: {sizes}. "
                "Patch them one after the other, or without `axis`."
            )
        texts = tuple(site.text for site in clean)
        return cls(texts, tuple(axes), axis, *sizes or {1}), values

    def scans(self, number: int) -> tuple[int, ...]:
        """How many iterations each scan around a site has; shards are one."""
        return tuple(x.size for x in self.axes[number] if x.kind == SCAN.name)

    def patches(self) -> list[Patch]:
        """All that is patched: sites, iteration by iteration."""
        numbers = range(len(self.texts))
        return [(n, turns) for n in numbers for turns in np.ndindex(*self.scans(n))]

    def places(self) -> tuple[str, ...]:
        """What the patched values are called."""
        return tuple(
            self.texts[n] + (f"[{','.join(map(str, turns))}]" if turns else "")
            for n, turns in self.patches()
        )

    def value_at(self, values: Sequence[Any], patch: Patch) -> Any:
        """The clean value of a site in an iteration."""
        number, turns = patch
        left = iter(turns)
        index = [
            next(left) if axis.kind == SCAN.name else slice(None)
            for axis in self.axes[number]
        ]
        return values[number][tuple(index)]

    def mixed(self, fn: Any, mix: Any, values: Any, weights: Sequence[Any]) -> Any:
        """The function with values mixed into those of the sites, by weights."""
        fits = Target.of_edit, Target.by_turn
        changes = {
            functools.partial(_is_at, text): Edit(mix, (replace(value), own), fits)
            for text, value, own in zip(self.texts, values, weights)
        }
        return edit(fn, changes)

    def weights(self, values: Sequence[Any], dtype: Any) -> list[jax.Array]:
        """A weight for each patch, all of them zero.

        They have the axes of scans, then a shape that broadcasts to the value.
        """
        found = []
        for n, value in enumerate(values):
            base = jnp.shape(value)[len(self.axes[n]) :]
            cut = [1] * len(base)
            if self.axis is not None:
                cut[self.axis] = self.size
            found.append(jnp.zeros((*self.scans(n), *cut), dtype))
        return found

    def grid(self, effects: jax.Array, baseline: jax.Array) -> PatchGrid:
        """The effects of all patches, in order."""
        sizes = () if self.axis is None else (self.size,)
        places = self.places()
        shape = (len(places), *sizes, *jnp.shape(effects)[1:])
        return PatchGrid(jnp.reshape(effects, shape), baseline, places)


class _Program(KeptProgram):
    """A program of the patches of some sites, kept for other numbers.

    Its arguments are Modules and arrays, those that the functions bring along first,
    and the clean values. A call that fits takes the short way of `jit`.
    """

    def __init__(self, what: str, sites: _Sites, opened: Opened):
        super().__init__(opened)
        self.what, self.sites = what, sites
        self.outline: Outline  # of the call that is traced now
        self.run = self._compiled()

    def _compiled(self) -> Jit[..., PatchGrid]:
        def patched(held: Any, args: Any, values: list[Any]) -> PatchGrid:
            self.is_of((held, args))
            self.outline, call = Outline.of(self.opened, held, args, self.what)
            inputs = list(map(jnp.asarray, call.inputs))
            return self.sites.grid(*self.traced(inputs, values))

        return Jit(patched, Lift(self.what, Mode.GRAPH), {})

    def traced(self, inputs: list[Any], values: list[Any]) -> tuple[Any, Any]:
        """The effects of all patches in a row, and the baseline, while JAX traces."""
        raise NotImplementedError

    def metric_of(self, inputs: Sequence[Any], change: Callable[[Any], Any]) -> Any:
        """The metric of the function, which is changed, as an array."""
        (fn, metric), args, _ = self.outline.parts(inputs)
        return jnp.asarray(metric(change(fn)(*args)))

    def looked_at(self, fn: Callable[..., Any], *given: Any) -> Any:
        """The results of a function that is traced once, to see its constants."""
        leaves, tree = jax.tree.flatten(given)
        trees = []

        def flat(*values: Any) -> list[Any]:
            outs, out_tree = jax.tree.flatten(fn(*tree.unflatten(values)))
            trees.append(out_tree)
            return outs

        body = jax_compat.body_of(jax_compat.traced(flat, map(jax.typeof, leaves)))
        self.look_at(body.consts)
        return trees[0].unflatten(jax_compat.evaluate(body, leaves))


class _Grid(_Program):
    """The program of `patch_grid`.

    Attributes:
        batch_size: How many patches run at once; None for as many as fit.
        is_run: Whether it is run, and not a part of something that is traced, and maybe
            differentiated: a program that is written out has lost its own rules.
        shrink: How often it was found that there is less memory: each time, half as
            many patches run at once.
    """

    def __init__(
        self, sites: _Sites, batch_size: int | None, is_run: bool, opened: Opened
    ):
        self.batch_size, self.is_run, self.shrink = batch_size, is_run, 0
        super().__init__("patch_grid", sites, opened)

    def __call__(self, *given: Any) -> PatchGrid:
        """The effects of all patches."""
        try:
            return self.run(*given)
        except jax.errors.JaxRuntimeError as error:
            is_memory = "out of memory" in str(error).lower()
            if not is_memory or self.batch_size or self.shrink > MAX_SHRINK:
                raise
        self.shrink += 1
        self.run = self._compiled()
        return self(*given)

    def traced(self, inputs: list[Any], values: list[Any]) -> tuple[Any, Any]:
        """The effects of all patches in a row, and the baseline, while JAX traces."""
        if self.is_run:
            with contextlib.suppress(Unsuited):
                return self._shared(inputs, values)
        return self._whole(inputs, values)

    def _batch(self, flat: Flat) -> Batch:
        points, places = len(self.sites.patches()), self.sites.size
        if self.batch_size is not None:
            return Batch.of(points, places, self.batch_size)
        return Batch.fitting(
            weigh(flat), points, places, free_memory() / 2**self.shrink
        )

    def _shared(self, inputs: Any, values: Any) -> Any:
        """The patches of a program that is written out, which share what they can."""
        sites = self.sites
        changes = {
            functools.partial(_is_at, text): functools.partial(point, number=n)
            for n, text in enumerate(sites.texts)
        }
        marked = functools.partial(edit, edits=changes)
        types = list(map(jax.typeof, inputs))
        flat = flattened(lambda *xs: [self.metric_of(xs, marked)], types)
        self.look_at(flat.consts.values())
        clean = {patch: sites.value_at(values, patch) for patch in sites.patches()}
        check_points(flat, clean)
        flat = narrowed(flat)
        batch, env = self._batch(flat), run_once(flat, inputs)
        axis, order = sites.axis, [patch for _, patch in points_of(flat)]
        if axis is not None and axis < 0:
            axis += len(jnp.shape(values[0])) - len(sites.axes[0])
        baseline = jnp.asarray(jax_compat.read(env, flat.results[0]))
        missing = jnp.broadcast_to(baseline, (sites.size, *baseline.shape))
        found = dict.fromkeys(clean, missing)
        before: Any = ()
        for n in range(0, len(order), batch.points):
            chosen = order[n : n + batch.points]
            patched = Patched(flat, env, clean, axis, chosen)
            # One after the other: each batch waits for the one before.
            places, _ = jax.lax.optimization_barrier((jnp.arange(sites.size), before))
            before = batch.run(patched.results, places)
            found |= zip(chosen, before)
        effects = jnp.stack([found[patch] for patch in clean]) - baseline[None, None]
        return effects.reshape(-1, *baseline.shape), baseline

    def _whole(self, inputs: Any, values: Any) -> Any:
        """The patches of the whole program, mapped over weights."""
        none, of_sites = ravel_pytree(self.sites.weights(values, bool))
        size = self.batch_size or math.ceil((none.size + 1) / 2**self.shrink)

        def one(number: Any, inputs: Any, values: Any) -> Any:
            weights = of_sites(jnp.arange(none.size) == number)
            mixed = functools.partial(
                self.sites.mixed, mix=masked, values=values, weights=weights
            )
            return self.metric_of(inputs, mixed)

        def every(inputs: Any, values: Any) -> Any:
            # The first has the number -1, that of no patch.
            numbers = jnp.arange(-1, none.size)
            run = functools.partial(one, inputs=inputs, values=values)
            if size > none.size:
                return jax.vmap(run)(numbers)
            return jax.lax.map(run, numbers, batch_size=size)

        found = self.looked_at(every, inputs, values)
        return found[1:] - found[0][None], found[0]


class _Attribution(_Program):
    """The program of `attribution`."""

    def __call__(self, *given: Any) -> PatchGrid:
        """The estimated effects of all patches."""
        return self.run(*given)

    def traced(self, inputs: list[Any], values: list[Any]) -> tuple[Any, Any]:
        """The estimated effects in a row, and the baseline, while JAX traces."""

        def measured(weights: Any, inputs: Any, values: Any) -> Any:
            mixed = functools.partial(
                self.sites.mixed, mix=_blended, values=values, weights=weights
            )
            return self.metric_of(inputs, mixed)

        run = jax.value_and_grad(measured)
        zeros = self.sites.weights(values, float)
        baseline, effects = self.looked_at(run, zeros, inputs, values)
        return ravel_pytree(effects)[0], baseline


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

    What patches share is computed once, and what was compiled serves the next call with
    other numbers.

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
        batch_size: How many patches run at once; by default, as many as there is memory
            for.

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
    chosen, values = _Sites.of(clean, sites, axis, "patch_grid")
    facts = chosen, batch_size, is_eager()
    kept = KeptCall[_Grid]("patch_grid", (fn, metric), *facts)
    make = functools.partial(_Grid, *facts)
    return kept.run(make, lambda program: program(kept.held, args, values))


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
    chosen, values = _Sites.of(clean, sites, axis, "attribution")
    kept = KeptCall[_Attribution]("attribution", (fn, metric), chosen)
    make = functools.partial(_Attribution, "attribution", chosen)
    return kept.run(make, lambda program: program(kept.held, args, values))
