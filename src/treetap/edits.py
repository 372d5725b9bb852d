# SPDX-License-Identifier: Apache-2.0
"""Edits: what to put in the place of a value on the way; see `treetap.edit`.

An edit is a function from a value to another of the same structure, shapes and types.
It is also a tree: its arrays are traced, so that a sweep over other numbers compiles
once, `jax.vmap` over edits makes a grid, and gradients flow to them.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import register_dataclass

from treetap._capture.statistics.reduced import arranged
from treetap._capture.walk.operations import SCAN, WHILE
from treetap._capture.walk.plans import Axes
from treetap._capture.walk.spots import Axis, Spot
from treetap._core.errors import CaptureError
from treetap._core.variables.values import NUMERIC, broadcasts
from treetap._core.wording import typed
from treetap._observe.closures import Opened
from treetap._observe.records import STATIC, Site, is_loop

Fitted = tuple[Any, list[Axes]]
Fit = Callable[..., Fitted]
_ANY, _REAL = (np.generic,), (np.number, np.bool_)
_KINDS = {"add": _REAL, "scale": _REAL, "mean": (np.inexact,)}


class Target(NamedTuple):
    """The value that an edit is for.

    Attributes:
        text: The site.
        spot: The types of its leaves, and the axes that they have.
    """

    text: str
    spot: Spot

    @property
    def loops(self) -> list[Axis]:
        """The loops and shards that give it axes; a `while` gives none."""
        return [axis for axis in self.spot.levels if is_loop(axis)]

    def axes_of(self, array: Any, leaf: int) -> Axes:
        """Which axes an array has, that goes with a leaf of the value."""
        shape, base = jnp.shape(array), self.spot.bases[leaf]
        mapped, whole = self.spot.own[leaf].shape, self.spot.avals[leaf].shape
        sizes = tuple(axis.size for axis in self.loops)
        if broadcasts(shape, base):
            return Axes()
        turns, inner = shape[: len(sizes)], shape[len(sizes) :]
        is_whole = len(inner) == len(base) and broadcasts(inner, base)
        is_by_turn = turns == sizes and is_whole
        if shape == mapped and is_by_turn:
            raise CaptureError(
                f"edit: at {self.text} as many rows are mapped as a loop has "
                f"iterations, so which of them an array of shape {shape} is for cannot "
                f"be told. Give it the axes of both: {whole}."
            )
        if shape == whole:
            return Axes(rows=mapped != base, loops=bool(sizes))
        if shape == mapped or is_by_turn:
            return Axes(rows=shape == mapped, loops=is_by_turn)
        raise CaptureError(
            f"edit: the value at {self.text} has the shape {base}, {whole} with the "
            f"axes of mappings and loops; an array of the edit has {shape}. It must "
            "have one of these shapes, or one that broadcasts to the first."
        )

    def check_kinds(self, what: str) -> None:
        """Refuses what can be done with numbers of some kinds only."""
        for aval in self.spot.own:
            if not any(
                jnp.issubdtype(aval.dtype, kind) for kind in _KINDS.get(what, _ANY)
            ):
                raise CaptureError(
                    f"edits.{what}: the value at {self.text} is of type {aval.dtype}, "
                    "where that has no meaning. Say what is meant with `edits.apply`."
                )

    # How an argument of an edit goes in, and the axes that each of its arrays has.

    def as_given(self, tree: Any) -> Fitted:
        """A tree whose arrays are the same for all."""
        return tree, [Axes()] * len(jax.tree.leaves(tree))

    def of_edit(self, edit: "Edit") -> Fitted:
        """Another edit."""
        return edit.fitted(self)

    def spread(self, value: Any) -> Fitted:
        """A tree like the value, of such a one or one array."""
        (leaves, tree), own = jax.tree.flatten(value), self.spot.label.tree
        is_for_all = jax.tree_util.treedef_is_leaf(tree)
        if is_for_all:
            leaves, tree = leaves * own.num_leaves, own
        if tree != own:
            raise CaptureError(
                f"edit: the value at {self.text} is {own}, and the edit has "
                f"{tree}. Give the same structure, or one array."
            )
        axes = [self.axes_of(array, n) for n, array in enumerate(leaves)]
        if is_for_all and len(set(axes)) > 1:
            raise CaptureError(
                f"edit: one array of shape {jnp.shape(value)} cannot stand for all "
                f"leaves at {self.text}. Give one for each leaf."
            )
        return tree.unflatten(leaves), axes

    def numbers(self, value: Any) -> Fitted:
        """The same of numbers that the value can hold."""
        tree, axes = self.spread(value)
        for array, own in zip(jax.tree.leaves(tree), self.spot.own):
            kinds = {own.dtype, array.dtype}
            has_keys = any(jnp.issubdtype(kind, jax.dtypes.prng_key) for kind in kinds)
            is_wider = has_keys or jnp.result_type(array, own.dtype) != own.dtype
            if len(kinds) > 1 and is_wider:
                remedy = f"`.astype({str(own.dtype)!r})`"
                raise CaptureError(
                    f"edit: the value at {self.text} is of type {own.dtype}; an array "
                    f"of the edit is of type {array.dtype}, shape {array.shape}. Give "
                    f"{'keys of that type' if has_keys else remedy}."
                )
        return tree, axes

    def by_turn(self, weights: jax.Array) -> Fitted:
        """Weights with the axes of scans in front, for all shards at once."""
        loops = self.loops
        scans = [n for n, axis in enumerate(loops) if axis.kind == SCAN.name]
        sizes = [axis.size for axis in loops]
        whole = arranged(weights, scans, range(len(loops)), sizes)
        return whole, [Axes(loops=bool(loops))]

    def at(self, iteration: tuple[jax.Array, ...]) -> Fitted:
        """A mask of one iteration; of a traced one nobody knows whether there is."""
        wraps = self.spot.wraps
        scans = [axis.size for axis in self.loops if axis.kind == SCAN.name]
        if WHILE.name in wraps or len(scans) != len(iteration):
            raise CaptureError(
                f"Edit.at: {len(iteration)} iterations are given for {self.text}, "
                f"which is under {', '.join(wraps) or 'no loop'}. Give one for each "
                "`scan` around it; the iterations of a `while` have no numbers."
            )
        for number, size in zip(iteration, scans):
            if not jnp.issubdtype(number.dtype, jnp.integer):
                raise CaptureError(
                    f"Edit.at: the iteration of {self.text} is {typed(number)}. Give "
                    "an integer."
                )
            if not isinstance(number, Tracer) and not -size <= int(number) < size:
                raise CaptureError(
                    f"Edit.at: {self.text} has {size} iterations, and number "
                    f"{int(number)} is not among them. They are 0 to {size - 1}."
                )
        # A traced number outside of the loop is no iteration.
        return self.by_turn(jnp.zeros(scans, bool).at[iteration].set(True, mode="drop"))


def _on_leaves(fn: Callable[..., Any], array: Any, *values: Any) -> Any:
    """A function of leaves of values, and of an array: one for all, or a tree alike."""
    return jax.tree.map(fn, jax.tree.broadcast(array, values[0]), *values)


def _like(array: Any, value: Any) -> jax.Array:
    """An array in the shape of another, and of its type."""
    array, kind = jnp.broadcast_to(array, jnp.shape(value)), jax.typeof(value)
    return array if array.dtype == kind.dtype else array.astype(kind.dtype)


def _nothing(value: Any) -> Any:
    raise NotImplementedError(
        "Edit: this edit says nothing of what to do. Take one of those in "
        "`treetap.edits`, such as `scale(2.0)`, or give a function of the value "
        "instead."
    )


@dataclass(frozen=True)
class _Given:
    """A function that somebody gave; what it reads may change from run to run."""

    function: Callable[..., Any]

    def __call__(self, value: Any, *params: Any) -> Any:
        return self.function(value, *params)


class _Code:
    """The code of such a function in one run, apart from what it brings along.

    It is a part of programs: it equals code that reads the same, so that a function
    that is made anew needs no other program, and one that reads something else does.
    """

    def __init__(self, opened: Opened):
        self.opened, self.key = opened, opened.key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Code) and other.key == self.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __call__(self, value: Any, held: Sequence[Any], *params: Any) -> Any:
        (function,) = self.opened.with_held(held)
        return function(value, *params)


@register_dataclass
@dataclass(frozen=True, eq=False)
class Edit:
    """A change of a value: called with the value, gives another.

    The functions of this room make edits.

    Attributes:
        function: From the value, and further arguments, to the other one.
        args: These arguments: trees of arrays, or other edits.
        fits: How each of them is fitted to a value; none once they are.
        what: What it is called, if only some kinds of numbers will do.
    """

    function: Callable[..., Any] = field(default=_nothing, metadata=STATIC)
    args: tuple[Any, ...] = ()
    fits: tuple[Fit, ...] = field(default=(), metadata=STATIC)
    what: str = field(default="", metadata=STATIC)

    def __call__(self, value: Any) -> Any:
        """The value after the edit."""
        if Target.at in self.fits:
            raise CaptureError(
                "Edit.at: an edit of one iteration has no meaning outside the loop. "
                "Give it to `edit`."
            )
        return self.function(value, *self.args)

    def fitted(self, target: Target) -> "tuple[Edit, list[Axes]]":
        """The edit for a value, and the axes that each of its arrays has."""
        target.check_kinds(self.what)
        if isinstance(self.function, _Given):
            opened = Opened((self.function.function,))
            args = opened.taken(), *self.args
            fits = Target.as_given, *self.fits
            return Edit(_Code(opened), args, fits).fitted(target)
        found = [fit(target, each) for fit, each in zip(self.fits, self.args)]
        args = tuple(each for each, _ in found)
        axes = [one for _, several in found for one in several]
        return dataclasses.replace(self, args=args, fits=(), what=""), axes

    def at(self, iteration: Any) -> "Edit":
        """The same in one iteration of a scan; in others the value is as it was.

        Args:
            iteration: Its number, which may be traced; in loops inside one another a
                tuple, the outermost first.
        """
        numbers = iteration if isinstance(iteration, tuple) else (iteration,)
        numbers = tuple(map(jnp.asarray, numbers))
        return Edit(masked, (self, numbers), (Target.of_edit, Target.at))

    def where(self, mask: Any) -> "Edit":
        """The same where a mask is true; elsewhere the value is as it was.

        Args:
            mask: Of booleans, that broadcasts to the value: positions, or heads.
        """
        mask = jnp.asarray(mask, bool)
        return Edit(masked, (self, mask), (Target.of_edit, Target.spread))


def _chosen(mask: Any, new: Any, old: Any) -> Any:
    return jnp.where(jnp.broadcast_to(mask, jnp.shape(old)), new, old)


def masked(value: Any, edit: Edit, mask: Any) -> Any:
    """A value that is edited where a mask is true."""
    return _on_leaves(_chosen, mask, edit(value), value)


def _put(value: Any, other: Any) -> Any:
    return _on_leaves(_like, other, value)


def _sum(value: Any, other: Any) -> Any:
    return _on_leaves(lambda more, old: _like(old + more, old), other, value)


def _product(value: Any, other: Any) -> Any:
    return _on_leaves(lambda factor, old: _like(old * factor, old), other, value)


class _Mean(NamedTuple):
    axis: Any

    def __call__(self, value: Any) -> Any:
        means = jax.tree.map(lambda x: jnp.mean(x, self.axis, keepdims=True), value)
        return jax.tree.map(_like, means, value)


_zeros = functools.partial(jax.tree.map, jnp.zeros_like)


def _with(value: Any, what: str, function: Callable[..., Any]) -> Edit:
    """An edit by another value, which may be in a Site."""
    value = value.value if isinstance(value, Site) else value
    leaves = jax.tree.leaves(value)
    if not leaves:
        raise CaptureError(f"{what}: there is no value in {value!r}. Give arrays.")
    if not all(isinstance(leaf, NUMERIC) for leaf in leaves):
        raise CaptureError(
            f"{what}: {value!r} is not made of arrays. Give arrays or numbers."
        )
    return Edit(function, (jax.tree.map(jnp.asarray, value),), (Target.numbers,), what)


def replace(value: Any) -> Edit:
    """Another value in its place.

    Args:
        value: A tree like the value, or one array for all its leaves; each broadcasts
            to its leaf. With the axes of loops in front it is a value for each
            iteration, as a Record has it.

    Examples:
        >>> import treetap as tt
        >>> f = lambda x: tt.tap(x, "x") + 1
        >>> float(tt.edit(f, {"x": tt.edits.replace(5.0)})(0.0))
        6.0
    """
    return _with(value, "replace", _put)


def swap(site: Site) -> Edit:
    """The value of a site of a Record, of another run, in its place.

    Args:
        site: Such as `record["blocks/3:__call__"]`.

    Examples:
        >>> import treetap as tt
        >>> f = lambda x: tt.tap(x * 2, "x") + 1
        >>> _, record = tt.observe(f)(10.0)
        >>> float(tt.edit(f, {"x": tt.edits.swap(record["x"])})(0.0))
        21.0
    """
    if not isinstance(site, Site):
        raise CaptureError(
            f"swap: expected a site of a Record, got a {type(site).__name__}. Use "
            "`replace` for a value."
        )
    return _with(site, "swap", _put)


def zero() -> Edit:
    """Zeros in its place.

    Examples:
        >>> import treetap as tt
        >>> f = lambda x: tt.tap(x, "x") + 1
        >>> float(tt.edit(f, {"x": tt.edits.zero()})(3.0))
        1.0
    """
    return Edit(_zeros)


def mean(axis: int | tuple[int, ...] | None = None) -> Edit:
    """Its mean in its place, along an axis or over all.

    Args:
        axis: Which axis, or axes; all by default. Axes of mappings and loops do not
            count: it is the value as the function sees it.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> f = lambda x: tt.tap(x, "x") * 10
        >>> tt.edit(f, {"x": tt.edits.mean(0)})(jnp.array([1.0, 3.0])).tolist()
        [20.0, 20.0]
    """
    return Edit(_Mean(axis), what="mean")


def add(value: Any) -> Edit:
    """Something added to it: a steering vector.

    Args:
        value: A tree like the value, or one array for all its leaves; each broadcasts
            to its leaf. With the axes of loops in front there is one for each
            iteration.

    Examples:
        >>> import treetap as tt
        >>> f = lambda x: tt.tap(x, "x") * 10
        >>> float(tt.edit(f, {"x": tt.edits.add(0.5)})(1.0))
        15.0
    """
    return _with(value, "add", _sum)


def scale(factor: Any) -> Edit:
    """A multiple of it.

    Args:
        factor: A tree like the value, or one array for all its leaves; each broadcasts
            to its leaf. With the axes of loops in front there is one for each
            iteration.

    Examples:
        >>> import treetap as tt
        >>> f = lambda x: tt.tap(x, "x") + 1
        >>> float(tt.edit(f, {"x": tt.edits.scale(3.0)})(1.0))
        4.0
    """
    return _with(factor, "scale", _product)


def apply(function: Callable[..., Any], *params: Any) -> Edit:
    """What a function makes of it.

    Args:
        function: From the value, and the parameters, to another of the same structure,
            shapes and types. One with other code, or that reads other values that are
            no arrays, is another program to compile.
        *params: Trees of arrays; other ones are not.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> f = lambda x: tt.tap(x, "x") + 1
        >>> clip = tt.edits.apply(jnp.minimum, 2.0)
        >>> float(tt.edit(f, {"x": clip})(5.0))
        3.0
    """
    if not callable(function):
        raise CaptureError(f"apply: expected a function, got {function!r}.")
    fits = (Target.as_given,) * len(params)
    return Edit(_Given(function), jax.tree.map(jnp.asarray, params), fits)
