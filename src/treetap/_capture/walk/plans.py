# SPDX-License-Identifier: Apache-2.0
"""What is fed into marked values: arrays that go in, and how they are used there.

The arrays travel through the walk as further inputs of every program on the way, so
that other numbers need no other program. How they are used is a static thing, part of a
plan: `Adding` for what `perturb` adds to a tap, `Editing` for edits. Along the loops
around a spot an array is either the same for all iterations, or has their axes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from treetap._capture.edit_points import derived, edit_p
from treetap._capture.walk import jax_compat
from treetap._core.errors import CaptureError

Feeds = Sequence[Sequence[Any] | None]


class Fed(NamedTuple):
    """What is fed into one value: how, and the arrays."""

    how: Any
    arrays: list[Any]


def flat_feeds(feeds: Feeds) -> list[Any]:
    """What is fed, in one list."""
    return [value for feed in feeds if feed is not None for value in feed]


def shaped_feeds(plan: Sequence[Any], flat: Sequence[Any]) -> Feeds:
    """The inverse of `flat_feeds`."""
    supply = iter(flat)
    return [
        [next(supply) for _ in range(choice.feed.width)] if choice.feed else None
        for choice in plan
    ]


class Adding(NamedTuple):
    """Arrays that are added, one for each leaf; they have the axes of all loops."""

    width: int
    what = "`perturb`"

    def fixed(self, arrays: Sequence[Any], where: str) -> list[Any]:
        """The arrays as they go into a function with a rule of its own."""
        return list(arrays)

    def places(self, outer: int) -> list[int | None]:
        """For each array where the axis of a loop is, or None."""
        return [outer] * self.width

    def added(self, values: list[Any], arrays: Sequence[Any]) -> list[Any]:
        """The operands of a tap with the arrays added to them."""
        fed = [value + more for value, more in zip(values, arrays)]
        return fed + values[len(fed) :]


class Axes(NamedTuple):
    """Which axes an array of an edit has in front of those of the value itself.

    Attributes:
        rows: Those of mappings.
        loops: Those of loops and shards.
    """

    rows: bool = False
    loops: bool = False


class Editing(NamedTuple):
    """Edits, one after the other.

    Attributes:
        text: The site, for errors.
        tree: The structure of the edits.
        axes: For each of their arrays, the axes it has.
    """

    text: str
    tree: Any
    axes: tuple[Axes, ...]
    what = "`edit`"

    def fixed(self, arrays: Sequence[Any], where: str) -> list[Any]:
        """The arrays, refused if they are differentiated."""

        @jax.custom_jvp
        def same(array: Any) -> Any:
            return array

        @same.defjvp
        def _(primals: Any, tangents: Any) -> Any:
            raise CaptureError(
                f"edit: {self.text} is inside a {where}, whose rule has no derivative "
                "with respect to the edit. Move the tap outside, or stop the gradient "
                "of the edit's arrays."
            )

        return [same(array) if is_inexact(array) else array for array in arrays]

    @property
    def width(self) -> int:
        """How many arrays there are."""
        return len(self.axes)

    def places(self, outer: int) -> list[int | None]:
        """For each array where the axis of a loop is, or None."""
        found = [(outer if axes.rows else 0, axes.loops) for axes in self.axes]
        return [place if loops else None for place, loops in found]

    def edited(
        self, params: dict[str, Any], values: Any, arrays: Any, keep: bool
    ) -> list[Any]:
        """What `edit_p` gives with the edits in the place of the identity.

        Args:
            params: Its parameters.
            values: Its operands.
            arrays: The arrays of the edits.
            keep: Whether it stays in, for somebody who edits further out.
        """
        label, recipe = params["label"], params["recipe"]
        ticket = values[-1]

        def call(operands: Any, arrays: Any) -> list[Any]:
            def base(*leaves: Any) -> list[Any]:
                out = self._applied(label.tree, leaves, arrays)
                if keep:
                    out = edit_p.bind(*out, ticket, label=label, rows=0, recipe=())
                return out

            return derived(base, recipe, label.tree.num_leaves).call(*operands)

        ins = [0 if axes.rows else None for axes in self.axes]
        for _ in range(params["rows"]):
            call = jax.vmap(call, in_axes=(0, ins))
        return call(list(values[:-1]), list(arrays))

    def _applied(self, tree: Any, leaves: Any, arrays: Any) -> list[Any]:
        value = jax.tree.unflatten(tree, leaves)
        for edit in jax.tree.unflatten(self.tree, arrays):
            value = edit(value)
        out, found = jax.tree.flatten(value)
        if found != tree:
            raise CaptureError(
                f"edit: the edit of {self.text} gives {found}, and the value there is "
                f"{tree}. An edit gives what it gets, with other numbers."
            )
        return [self._checked(new, old) for new, old in zip(out, leaves)]

    def _checked(self, new: Any, old: Any) -> Any:
        """A leaf after the edit, refused if it is of another shape or type."""
        new, kind = jnp.asarray(new), jax.typeof(old)
        is_fit = new.shape == kind.shape and (
            new.dtype == kind.dtype
            or (new.weak_type and jnp.result_type(new, old) == kind.dtype)
        )
        if not is_fit:
            raise CaptureError(
                f"edit: the edit of {self.text} gives {_text(new)}, and the value "
                f"there is {_text(old)}. Shapes and types must be the same."
            )
        new = new.astype(kind.dtype)
        axes = tuple(jax_compat.varying(old))
        return jax_compat.as_varying(new, axes) if axes else new


def is_inexact(value: Any) -> bool:
    """Whether a value is an array of numbers that may be not finite."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _text(value: Any) -> str:
    return f"{value.dtype}{list(jnp.shape(value))}".replace(" ", "")
