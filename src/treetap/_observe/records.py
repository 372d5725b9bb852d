# SPDX-License-Identifier: Apache-2.0
"""Records: what was heard in a run, site by site, in order of execution."""

import contextlib
import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass

from treetap._capture.selectors import as_select, refuse_nothing, site_text
from treetap._capture.statistics.figures import Figures
from treetap._capture.statistics.measures import Wanted, figures_of_all
from treetap._capture.statistics.reduced import (
    Reduced,
    arranged,
    as_mask,
    is_reduced,
    on_each,
)
from treetap._capture.walk.operations import SHARD_MAP, stacked_by
from treetap._capture.walk.spots import Axis
from treetap._core import display
from treetap._core.errors import CaptureError, StructureError
from treetap._core.paths import Path
from treetap._core.trees.state import State, nested
from treetap._core.wording import first_few, typed
from treetap._observe.loggers import (
    Pair,
    bars_of,
    named,
    opened,
    scalars_of,
    write,
)

STATIC = {"static": True}  # metadata of fields that are no values of a tree


class FirstAxes(NamedTuple):
    """What the first axes of the arrays of a site are.

    Attributes:
        levels: Those mappings, loops and shards around it, outermost first, that an
            array has an axis of.
        leaves: For each leaf of the value, which of these it has.
        taken: The same for `taken`.
        turns: The same for `count`.
        grads: For each array of the gradient, what it has in front.
    """

    levels: tuple[Axis, ...]
    leaves: tuple[tuple[int, ...], ...]
    taken: tuple[int, ...] = ()
    turns: tuple[int, ...] = ()
    grads: tuple[tuple[Axis, ...], ...] = ()


@register_dataclass
@dataclass(frozen=True, eq=False)
class Site:
    """One value on the way through a model.

    Attributes:
        value: The value; a shape and type in a listing.
        grad: Its gradient, or None; a tuple by order under repeated differentiation.
        taken: In a branch, whether the branch was taken.
        count: In a `while` loop, how often it ran; the value is the last one.
        reduced: What reducers know of the value, or None: see `stats`.
        grad_reduced: What they know of its gradient, or None.
        path: The Module it is in.
        name: Its name: of the method, or the one given.
        index: How many calls of the same site came before.
        kind: The kind of Variable it is sown as, or None.
        how: `"tap"`, `"sow"`, `"perturb"`, `"output"` of a method; `"scope"` or
            `"checkpoint_name"` by `tap_scopes`.
        wraps: The operations around it that gave it axes (`scan`, `shard_map`) or flags
            (`cond`, `while`), outermost first.
        module: The class of the Module.
        first_axes: What the first axes of its arrays are; see `axes`.
    """

    value: Any
    grad: Any = None
    taken: Any = None
    count: Any = None
    reduced: Any = None
    grad_reduced: Any = None
    path: Path = field(default=(), metadata=STATIC)
    name: str = field(default="", metadata=STATIC)
    index: int = field(default=0, metadata=STATIC)
    kind: type | None = field(default=None, metadata=STATIC)
    how: str = field(default="tap", metadata=STATIC)
    wraps: tuple[str, ...] = field(default=(), metadata=STATIC)
    module: str = field(default="", metadata=STATIC)
    first_axes: FirstAxes | None = field(default=None, metadata=STATIC)

    @property
    def axes(self) -> Any:
        """What the first axes of the value are, outermost first: see `Axis`.

        A leaf that is the same for all rows of a `vmap` has no axis of it. If the
        leaves of a tree differ in this, a tree of such tuples.
        """
        if self.first_axes is None:
            raise CaptureError(
                f"Site.axes: the record of {self.text} was saved before axes were."
            )
        count = len(self.first_axes.leaves)
        found = [axes_of(self, "value", n) for n in range(count)]
        if len(set(found)) < 2:
            return found[0] if found else ()
        tree = self.reduced if self.value is None else self.value
        return jax.tree.unflatten(_structure(tree), found)

    @property
    def text(self) -> str:
        """How the site is written: `blocks/3/attn:__call__#1`."""
        return site_text(self.path, self.name, self.index)

    @property
    def stats(self) -> dict[str, Any]:
        """Statistics by the names of their reducers; those of a tree are in trees.

        Iterations of a scan and shards are apart, along first axes; see `total`.
        """
        return _stats(self.reduced)

    @property
    def grad_stats(self) -> Any:
        """Statistics of the gradient; a tuple by order, as `grad`."""
        orders = _by_order(self.grad_reduced, self.reduced)
        found = tuple(map(_stats, orders))
        return found if orders is self.grad_reduced else found[0]

    @property
    def figures(self) -> Figures:
        """What the value is like, in numbers on the host: see `Figures`."""
        return figures_of_all([_wanted(self)])[0]

    @property
    def grad_figures(self) -> Figures | None:
        """What its gradient is like, the first if there are several; None if none."""
        wanted = _wanted_gradient(self)
        return None if wanted is None else figures_of_all([wanted])[0]

    def merge(self, other: "Site") -> "Site":
        """The statistics of both: of another microbatch, or step."""
        both = self, other
        mine, others = ((x.text, x.how, x.wraps, x.module) for x in both)
        if mine != others:
            raise CaptureError(f"Site.merge: {mine} and {others} are different sites.")
        if self.value is not None or self.grad is not None:
            raise CaptureError(
                f"Site.merge: {self.text} has values, and only statistics can be "
                "merged. Observe with `reduce=` and without `values=True`."
            )
        states, more = ((site.reduced, site.grad_reduced) for site in both)
        one, two = (jax.tree.structure(x, is_leaf=is_reduced) for x in (states, more))
        if one != two:
            raise CaptureError(
                f"Site.merge: {self.text} has statistics of different structure in the "
                "two."
            )
        reduced, grad_reduced = on_each(Reduced.merge, states, more)
        return replace(
            self,
            taken=jax.tree.map(jnp.logical_or, self.taken, other.taken),
            count=jax.tree.map(jnp.add, self.count, other.count),
            reduced=reduced,
            grad_reduced=grad_reduced,
        )

    def total(self) -> "Site":
        """The same with its statistics over all iterations and shards together."""
        states = self.reduced, self.grad_reduced
        reduced, grad_reduced = on_each(Reduced.total, states)
        return replace(self, reduced=reduced, grad_reduced=grad_reduced)

    @property
    def shape(self) -> Any:
        """The shape of the value; a tree of shapes if it is one of arrays."""
        return jax.tree.map(np.shape, self.value)

    @property
    def dtype(self) -> Any:
        """The type of the value's numbers; a tree if it is one of arrays."""
        return jax.tree.map(lambda x: getattr(x, "dtype", type(x)), self.value)

    @property
    def nbytes(self) -> int:
        """How much memory the value and its statistics take."""
        kept = self.value, self.reduced, self.grad_reduced
        return display.size_of(kept).nbytes

    def _cells(self) -> tuple[str, str, str, str, str]:
        held = jax.tree.leaves(self.reduced, is_leaf=is_reduced)
        texts = [
            typed(leaf) if hasattr(leaf, "dtype") else type(leaf).__name__
            for leaf in jax.tree.leaves(self.value)
        ]
        texts += [name for reduced in held for name, _ in reduced.reducers]
        types = ", ".join(dict.fromkeys(texts))
        under = ", ".join(self.wraps)
        size = display.readable_bytes(self.nbytes)
        return self.text, self.how, types, size, under

    def __repr__(self) -> str:
        text, how, types, size, under = self._cells()
        tail = f", under {under}" if under else ""
        return f"Site({text!r}, {how}, {types}, {size}{tail})"


def _stats(tree: Any) -> dict[str, Any]:
    """Results by name, each in the tree of the value."""
    held, structure = jax.tree.flatten(tree, is_leaf=is_reduced)
    found = [reduced.stats for reduced in held]
    names = [name for name, _ in held[0].reducers] if held else []
    return {
        name: jax.tree.unflatten(structure, [stats[name] for stats in found])
        for name in names
    }


def axes_of(site: Site, part: str, number: int) -> tuple[Axis, ...]:
    """What the first axes of an array of a site are.

    Of a Record that was saved before axes were, only the loops are known.

    Args:
        site: The site.
        part: The attribute it is in: `"value"`, `"grad"`, `"taken"` or `"count"`.
        number: Which of the arrays there.
    """
    first = site.first_axes
    if first is None:
        return tuple(Axis(kind, 0) for kind in stacked_by(site.wraps))
    if part == "grad":
        return first.grads[number]
    flags = {"taken": first.taken, "count": first.turns}
    held = flags[part] if part in flags else first.leaves[number]
    return tuple(first.levels[n] for n in held)


def is_loop(axis: Axis) -> bool:
    """Whether an axis tells iterations or shards apart."""
    return bool(stacked_by([axis.kind]))


def loops_first(array: Any, axes: Sequence[Axis]) -> Any:
    """An array with the axes that tell iterations or shards apart in front."""
    held = range(len(axes))
    return arranged(array, held, _order(held, axes))


def _order(held: Sequence[int], levels: Sequence[Axis]) -> list[int]:
    """Numbers of levels, those first that tell iterations or shards apart."""
    return sorted(held, key=lambda n: not is_loop(levels[n]))


def _wanted(site: Site) -> Wanted:
    """What is to be measured of a site's value, or is known of it."""
    kinds, first, masks = stacked_by(site.wraps), site.first_axes, []
    tree = site.reduced if site.value is None else site.value
    if first is not None and site.value is not None:
        ran = None if site.count is None else site.count > 0
        pairs = (site.taken, first.taken), (ran, first.turns)
        flags = [pair for pair in pairs if pair[0] is not None]
        orders = [_order(held, first.levels) for held in first.leaves]
        tree = list(map(arranged, jax.tree.leaves(site.value), first.leaves, orders))
        masks = [[as_mask(*flag, order) for flag in flags] for order in orders]
    shards = tuple(n for n, kind in enumerate(kinds) if kind == SHARD_MAP.name)
    where = f"Site.figures: {site.text}"
    return Wanted(tree, len(kinds), shards, masks, where=where)


def _wanted_gradient(site: Site) -> Wanted | None:
    """The same for its gradient, which has its own axes in front; None if none."""
    tree = _by_order(site.grad_reduced, site.reduced)[0]
    apart = len(stacked_by(site.wraps))
    if site.grad is not None:
        leaves = jax.tree.leaves(_by_order(site.grad, site.value)[0])
        axes = [axes_of(site, "grad", n) for n in range(len(leaves))]
        apart = sum(map(is_loop, axes[-1])) if axes else 0
        tree = list(map(loops_first, leaves, axes))
    where = f"Site.grad_figures: {site.text}"
    return None if tree is None else Wanted(tree, apart, has_units=False, where=where)


def _structure(tree: Any) -> Any:
    """The structure of a value, or of what is known of one; None stands for a leaf."""
    return jax.tree.structure(tree, is_leaf=lambda x: x is None or is_reduced(x))


def _by_order(grad: Any, like: Any) -> tuple[Any, ...]:
    """A gradient by order of differentiation: it is a tuple where there are several."""
    is_filled = isinstance(grad, tuple) and bool(grad)
    return grad if is_filled and _structure(grad) != _structure(like) else (grad,)


@register_dataclass
@dataclass(frozen=True, eq=False)
class Record:
    """The sites of a run in order of execution; a tree of their values and gradients.

    Attributes:
        sites: All of them.
        unreachable: Names of values that a capture cannot come to, each with what it is
            inside of, such as the condition of a `while` loop.
        verified: Whether all of it was compared with a second run, by
            `observe(..., verify=True)`.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> def f(x):
        ...     return tt.tap(x + 1, "a") * tt.tap(x * 2, "b")
        >>> _, record = tt.observe(f)(jnp.array(3.0))
        >>> [site.text for site in record], float(record["b"].value)
        (['a', 'b'], 6.0)
    """

    sites: tuple[Site, ...]
    unreachable: tuple[tuple[str, str], ...] = field(default=(), metadata=STATIC)
    verified: bool = field(default=False, metadata=STATIC)

    def __len__(self) -> int:
        return len(self.sites)

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    def __contains__(self, text: object) -> bool:
        return any(site.text == text for site in self.sites)

    @overload
    def __getitem__(self, key: int) -> Site: ...
    @overload
    def __getitem__(self, key: str) -> Site: ...
    @overload
    def __getitem__(self, key: slice) -> "Record": ...
    def __getitem__(self, key: Any) -> Any:
        """A site by position, or by what it is called; `#1` is its second call."""
        if isinstance(key, slice):
            return replace(self, sites=self.sites[key])
        if not isinstance(key, str):
            return self.sites[key]
        same = [site for site in self.sites if site.text == key]
        found = same[:1] or self.select(key).sites
        if len(found) == 1:
            return found[0]
        shown = first_few([site.text for site in found])
        raise CaptureError(
            f"{key!r} stands for {len(found)} sites: {shown}. Name one of them, or use "
            "`record.select`."
        )

    def select(self, selector: Any) -> "Record":
        """The sites that a selector takes; an error if there are none."""
        chosen = as_select(selector)
        found = tuple(filter(chosen, self.sites))
        if not found:
            raise refuse_nothing(chosen, [x.text for x in self.sites], "Record.select")
        return replace(self, sites=found)

    def merge(self, *others: "Record") -> "Record":
        """The statistics of several runs together: of microbatches, or of steps.

        Args:
            *others: Records of the same sites.

        Examples:
            >>> import jax.numpy as jnp, treetap as tt
            >>> watch = tt.observe(lambda x: tt.tap(x, "x"), reduce=[tt.AbsMax()])
            >>> records = [watch(jnp.array(x))[1] for x in (1.0, -3.0, 2.0)]
            >>> float(records[0].merge(*records[1:])["x"].stats["abs_max"])
            3.0
        """
        sites = self.sites
        for other in others:
            if len(other) != len(sites):
                raise CaptureError(
                    f"Record.merge: one record has {len(sites)} sites, another "
                    f"{len(other)}. Merge records of the same function."
                )
            sites = tuple(a.merge(b) for a, b in zip(sites, other.sites))
        verified = all(one.verified for one in (self, *others))
        return replace(self, sites=sites, verified=verified)

    def total(self) -> "Record":
        """The statistics over all iterations and shards together, site by site."""
        return replace(self, sites=tuple(site.total() for site in self.sites))

    def figures(self) -> dict[str, Pair]:
        """What each value is like, and its gradient: numbers on the host, by site.

        All are fetched at once; `Site.figures` has those of a single site.

        Examples:
            >>> import jax, jax.numpy as jnp, treetap as tt
            >>> def loss(x):
            ...     return jnp.sum(tt.tap(2 * x, "h"))
            >>> watch = tt.observe(jax.grad(loss), grads=True)
            >>> value, grad = watch(jnp.array([3.0, 4.0]))[1].figures()["h"]
            >>> value.norm, grad.abs_max
            (10.0, 1.0)
        """
        pairs = [(_wanted(site), _wanted_gradient(site)) for site in self.sites]
        wanted, tree = jax.tree.flatten(pairs, is_leaf=lambda x: isinstance(x, Wanted))
        found = tree.unflatten(figures_of_all(wanted))
        return {site.text: pair for site, pair in zip(self.sites, found)}

    def to_scalars(self, prefix: str = "", *, parts: bool = False) -> dict[str, float]:
        """All figures in a flat dict, such as W&B and other loggers take.

        Args:
            prefix: What all names begin with, before a `/`.
            parts: Whether iterations of a scan, and shards, are there one by one, too:
                as `Block:__call__[3]/norm`.

        Examples:
            >>> import jax.numpy as jnp, treetap as tt
            >>> watch = tt.observe(lambda x: tt.tap(2 * x, "h"), reduce=[tt.Norm()])
            >>> watch(jnp.array([3.0, 4.0]))[1].to_scalars("train")
            {'train/h/norm': 10.0}
        """
        return scalars_of(named(self.figures(), prefix, parts))

    def log(
        self, writer: Any, step: int, prefix: str = "", *, parts: bool = False
    ) -> None:
        """Writes all figures, and histograms if the writer takes their counts.

        Args:
            writer: A folder for TensorBoard's event files (a new file each time); an
                `EventWriter`; a SummaryWriter of PyTorch, tensorboardX, TensorBoard,
                Flax or CLU; or a function of a dict and a step, such as `wandb.log`.
            step: Of the training.
            prefix: What all tags begin with, before a `/`.
            parts: Whether iterations of a scan, and shards, are there one by one, too:
                as `Block:__call__[3]/norm`.
        """
        held = opened(writer, "Record.log")
        pairs = named(self.figures(), prefix, parts)
        with contextlib.nullcontext() if held is writer else held:
            write(held, step, scalars_of(pairs), bars_of(pairs))

    def first_nonfinite(self) -> str | None:
        """The first site that is not all finite, after `guard`; values first.

        Gradients come in the order in which they are made: the last site's first.
        """
        named = [(site.text, site.reduced) for site in self.sites]
        named += [(f"gradient of {x.text}", x.grad_reduced) for x in self.sites[::-1]]
        for text, tree in named:
            for reduced in jax.tree.leaves(tree, is_leaf=is_reduced):
                if "all_finite" not in dict(reduced.reducers):
                    raise CaptureError(
                        f"Record.first_nonfinite: {text} was not measured by "
                        "`AllFinite`. Observe with `guard`."
                    )
                is_bad = reduced.seen & ~jnp.asarray(reduced.stats["all_finite"])
                places = np.argwhere(np.asarray(is_bad)).tolist()
                if places:
                    return f"{text} at {places[0]}" if places[0] else text
        return None

    @property
    def nbytes(self) -> int:
        """How much memory all values and statistics take."""
        return sum(site.nbytes for site in self.sites)

    def to_state(self) -> State:
        """Nested mappings by path and name, to tuples of values in call order."""
        entries: dict[Path, tuple[Any, ...]] = {}
        for site in self.sites:
            place = (*site.path, site.name)
            entries[place] = (*entries.get(place, ()), site.value)
        try:
            return State(nested(entries.items()))
        except StructureError as error:
            raise CaptureError(f"Record.to_state: {error}") from None

    def __repr__(self) -> str:
        rows = self._rows()
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([self._caption(), *lines])

    def _repr_html_(self) -> str:
        body = ""
        for number, row in enumerate(self._rows()):
            tag = "td" if number else "th"
            cells = (f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)
            body += f"<tr>{''.join(cells)}</tr>"
        return f"<table><caption>{self._caption()}</caption>{body}</table>"

    def _rows(self) -> list[tuple[str, ...]]:
        heads = ("site", "how", "type", "size", "under")
        hidden = [(x, "unreachable", "", "", place) for x, place in self.unreachable]
        return [heads, *(site._cells() for site in self.sites), *hidden]

    def _caption(self) -> str:
        text = f"Record: {len(self)} sites, {display.readable_bytes(self.nbytes)}"
        return f"{text}, verified" if self.verified else text
