# SPDX-License-Identifier: Apache-2.0
"""Edits: what to put in the place of a value on the way; see `treetap.edit`.

An edit is a function from a value to another of the same structure, shapes and types.
It is also a tree: its arrays are traced, so that a sweep over other numbers compiles
once, `jax.vmap` over edits makes a grid, and gradients flow to them.
"""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import register_dataclass

from treetap._capture.walk.operations import SCAN, WHILE
from treetap._capture.walk.plans import Axes
from treetap._capture.walk.spots import Axis, Spot
from treetap._core.errors import CaptureError
from treetap._core.wording import typed
from treetap._observe.records import Site, is_loop


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

    def on_all_shards(self, array: jax.Array) -> jax.Array:
        """An array that has the axes of scans in front, with those of shards, too."""
        sizes = [axis.size for axis in self.loops]
        shards = [n for n, axis in enumerate(self.loops) if axis.kind != SCAN.name]
        array = jnp.expand_dims(array, shards)
        return jnp.broadcast_to(array, (*sizes, *array.shape[len(sizes) :]))

    def axes_of(self, array: Any, leaf: int) -> Axes:
        """Which axes an array has, that goes with a leaf of the value."""
        shape, base = jnp.shape(array), self.spot.bases[leaf]
        mapped, whole = self.spot.own[leaf].shape, self.spot.avals[leaf].shape
        sizes = tuple(axis.size for axis in self.loops)
        if _fits(shape, base):
            return Axes()
        turns, inner = shape[: len(sizes)], shape[len(sizes) :]
        is_by_turn = turns == sizes and len(inner) == len(base) and _fits(inner, base)
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

    def check_type(self, array: Any, leaf: int) -> None:
        """Refuses numbers that the value cannot hold."""
        dtype = self.spot.own[leaf].dtype
        kinds = {dtype, array.dtype}
        has_keys = any(jnp.issubdtype(kind, jax.dtypes.prng_key) for kind in kinds)
        if len(kinds) > 1 and (has_keys or jnp.result_type(array, dtype) != dtype):
            remedy = "keys of that type" if has_keys else f"`.astype({str(dtype)!r})`"
            raise CaptureError(
                f"edit: the value at {self.text} is of type {dtype}; an array of the "
                f"edit is of type {array.dtype}, shape {array.shape}. Give {remedy}."
            )

    def check_kinds(self, what: str, *kinds: Any) -> None:
        """Refuses what can be done with numbers of some kinds only."""
        for aval in self.spot.own:
            if not any(jnp.issubdtype(aval.dtype, kind) for kind in kinds):
                raise CaptureError(
                    f"edits.{what}: the value at {self.text} is of type {aval.dtype}, "
                    "where that has no meaning. Say what is meant with `edits.apply`."
                )

    def spread(self, value: Any, numbers: bool = True) -> tuple[Any, list[Axes]]:
        """A tree like the value, of such a one or one array, and its arrays' axes.

        Args:
            value: The tree, or the array.
            numbers: Whether its numbers are for the value, which must hold them.
        """
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
        for n, array in enumerate(leaves if numbers else ()):
            self.check_type(array, n)
        return tree.unflatten(leaves), axes


def _fits(shape: tuple[int, ...], base: tuple[int, ...]) -> bool:
    """Whether an array of a shape broadcasts to another."""
    pairs = zip(reversed(shape), reversed(base))
    return len(shape) <= len(base) and all(mine in (1, other) for mine, other in pairs)


def _on_leaves(fn: Callable[..., Any], array: Any, *values: Any) -> Any:
    """A function of an array and each leaf of values alike.

    Args:
        fn: From an array of the leaf's shape, and the leaf of each value.
        array: One for all leaves, or a tree of one for each.
        *values: The values.
    """

    def on_part(array: Any, *parts: Any) -> Any:
        return jax.tree.map(lambda *x: fn(_broadcast(array, x[0]), *x), *parts)

    return jax.tree.map(on_part, array, *values)


def _broadcast(array: Any, value: Any) -> jax.Array:
    return jnp.broadcast_to(jnp.asarray(array), jnp.shape(value))


def _cast(array: jax.Array, value: Any) -> jax.Array:
    dtype = jax.typeof(value).dtype
    return array if array.dtype == dtype else array.astype(dtype)


_NO_SORT = (
    "{}: this edit says nothing of what to do. Take one of those in `treetap.edits`, "
    "such as `scale(2.0)`, or give a function of the value instead."
)


class Edit:
    """A change of a value: called with the value, gives another.

    The functions of this room make edits.
    """

    def __call__(self, value: Any) -> Any:
        """The value after the edit."""
        raise NotImplementedError(_NO_SORT.format(type(self).__name__))

    def fitted(self, target: Target) -> tuple["Edit", list[Axes]]:
        """The edit for a value, and the axes that each of its arrays has."""
        raise NotImplementedError(_NO_SORT.format(type(self).__name__))

    def at(self, iteration: Any) -> "Edit":
        """The same in one iteration of a scan; in others the value is as it was.

        Args:
            iteration: Its number, which may be traced; in loops inside one another a
                tuple, the outermost first.
        """
        numbers = iteration if isinstance(iteration, tuple) else (iteration,)
        return _At(self, tuple(jnp.asarray(number) for number in numbers))

    def where(self, mask: Any) -> "Edit":
        """The same where a mask is true; elsewhere the value is as it was.

        Args:
            mask: Of booleans, that broadcasts to the value: positions, or heads.
        """
        return _Where(self, jnp.asarray(mask, bool))


@register_dataclass
@dataclass(frozen=True, eq=False)
class _Combined(Edit):
    """A function of each leaf of the value, and of its part of another one."""

    other: Any
    combine: Callable[[Any, Any], Any] = field(metadata={"static": True})
    arithmetic: str = field(default="", metadata={"static": True})  # its name, if it is

    def __call__(self, value: Any) -> Any:
        def one(other: Any, old: Any) -> Any:
            return _cast(self.combine(old, other), old)

        return _on_leaves(one, self.other, value)

    def fitted(self, target: Target) -> tuple[Edit, list[Axes]]:
        if self.arithmetic:
            target.check_kinds(self.arithmetic, np.number, np.bool_)
        other, axes = target.spread(self.other)
        return _Combined(other, self.combine, self.arithmetic), axes


def _other(_: Any, other: Any) -> Any:
    return other


@register_dataclass
@dataclass(frozen=True, eq=False)
class _Mean(Edit):
    axis: Any = field(metadata={"static": True})

    def __call__(self, value: Any) -> Any:
        def one(x: Any) -> Any:
            return _broadcast(_cast(jnp.mean(x, self.axis, keepdims=True), x), x)

        return jax.tree.map(one, value)

    def fitted(self, target: Target) -> tuple[Edit, list[Axes]]:
        target.check_kinds("mean", np.inexact)
        return self, []


@register_dataclass
@dataclass(frozen=True, eq=False)
class _Apply(Edit):
    params: tuple[Any, ...]
    function: Callable[..., Any] = field(metadata={"static": True})

    def __call__(self, value: Any) -> Any:
        return self.function(value, *self.params)

    def fitted(self, target: Target) -> tuple[Edit, list[Axes]]:
        return self, [Axes()] * len(jax.tree.leaves(self.params))


@register_dataclass
@dataclass(frozen=True, eq=False)
class _Where(Edit):
    edit: Edit
    mask: Any

    def __call__(self, value: Any) -> Any:
        return _on_leaves(jnp.where, self.mask, self.edit(value), value)

    def fitted(self, target: Target) -> tuple[Edit, list[Axes]]:
        edit, axes = self.edit.fitted(target)
        mask, more = target.spread(self.mask, numbers=False)
        return _Where(edit, mask), [*axes, *more]


@register_dataclass
@dataclass(frozen=True, eq=False)
class _At(Edit):
    edit: Edit
    iteration: tuple[jax.Array, ...]

    def __call__(self, value: Any) -> Any:
        raise CaptureError(
            "Edit.at: an edit of one iteration has no meaning outside the loop. Give "
            "it to `edit`."
        )

    def fitted(self, target: Target) -> tuple[Edit, list[Axes]]:
        edit, axes = self.edit.fitted(target)
        wraps = target.spot.wraps
        scans = [axis.size for axis in target.loops if axis.kind == SCAN.name]
        if WHILE.name in wraps or len(scans) != len(self.iteration):
            raise CaptureError(
                f"Edit.at: {len(self.iteration)} iterations are given for "
                f"{target.text}, which is under {', '.join(wraps) or 'no loop'}. Give "
                "one for each `scan` around it; the iterations of a `while` have no "
                "numbers."
            )
        for number, size in zip(self.iteration, scans):
            _check_iteration(number, size, target.text)
        # On all shards at once; a traced number outside of the loop is no iteration.
        mask = jnp.zeros(scans, bool).at[self.iteration].set(True, mode="drop")
        return _Where(edit, target.on_all_shards(mask)), [*axes, Axes(loops=True)]


def _check_iteration(number: jax.Array, size: int, text: str) -> None:
    """Refuses an iteration that a loop does not have; of a traced one nobody knows."""
    if not jnp.issubdtype(number.dtype, jnp.integer):
        raise CaptureError(
            f"Edit.at: the iteration of {text} is {typed(number)}. Give an integer."
        )
    if not isinstance(number, Tracer) and not -size <= int(number) < size:
        raise CaptureError(
            f"Edit.at: {text} has {size} iterations, and number {int(number)} is not "
            f"among them. They are 0 to {size - 1}."
        )


_zeros = functools.partial(jax.tree.map, jnp.zeros_like)
_NUMBERS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


def _arrays(value: Any, what: str) -> Any:
    """A tree with arrays for leaves, taken out of a Site."""
    value = value.value if isinstance(value, Site) else value
    leaves = jax.tree.leaves(value)
    if not leaves:
        raise CaptureError(f"{what}: there is no value in {value!r}. Give arrays.")
    if not all(isinstance(leaf, _NUMBERS) for leaf in leaves):
        raise CaptureError(
            f"{what}: {value!r} is not made of arrays. Give arrays or numbers."
        )
    return jax.tree.map(jnp.asarray, value)


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
    return _Combined(_arrays(value, "replace"), _other)


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
    return _Combined(_arrays(site, "swap"), _other)


def zero() -> Edit:
    """Zeros in its place.

    Examples:
        >>> import treetap as tt
        >>> f = lambda x: tt.tap(x, "x") + 1
        >>> float(tt.edit(f, {"x": tt.edits.zero()})(3.0))
        1.0
    """
    return _Apply((), _zeros)


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
    return _Mean(axis)


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
    return _Combined(_arrays(value, "add"), operator.add, "add")


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
    return _Combined(_arrays(factor, "scale"), operator.mul, "scale")


def apply(function: Callable[..., Any], *params: Any) -> Edit:
    """What a function makes of it.

    Args:
        function: From the value, and the parameters, to another of the same structure,
            shapes and types. Another function is another program to compile.
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
    return _Apply(jax.tree.map(jnp.asarray, params), function)
