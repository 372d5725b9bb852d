# SPDX-License-Identifier: Apache-2.0
"""How objects print: constructor-like text, one attribute a line, sizes as comments.

A class offers `_display_parts()`, which names what to show; text and treescope both
draw from it, so the two always tell the same. An object that is already being printed
shows as `Type(...)`, so cycles end.
"""

import math
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from treetap._core.scopes import scoped

_printing: ContextVar[frozenset[int]] = ContextVar("printing", default=frozenset())
_in_object: ContextVar[bool] = ContextVar("in_object", default=False)


class Parts(NamedTuple):
    """What an object shows.

    Attributes:
        comment: A note beside its name; objects of several Variables give their sizes.
        items: Its attributes by label; an empty label is not shown.
        brackets: What stands around them.
        separator: What stands between a label and its value.
        is_object: Whether arrays inside it are shown by shape and type only.
    """

    comment: str
    items: Iterable[tuple[str, Any]]
    brackets: tuple[str, str] = ("(", ")")
    separator: str = "="
    is_object: bool = False


class Shown:
    """Mixin: `repr`, treescope and notebooks, from `_display_parts()`."""

    __slots__ = ()
    _display_colored: ClassVar[bool] = False  # a background for each class

    if TYPE_CHECKING:

        def _display_parts(self) -> Parts: ...

    def __repr__(self) -> str:
        return show(self)

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        """Treescope's rendering."""
        from treescope import repr_lib

        parts = self._display_parts()
        items = {label or str(n): item for n, (label, item) in enumerate(parts.items)}
        return repr_lib.render_object_constructor(
            object_type=type(self),
            attributes=items,
            path=path,
            subtree_renderer=subtree_renderer,
            roundtrippable=False,
            color=color_of(type(self).__name__) if self._display_colored else None,
        )

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """What a notebook shows: treescope's tree, with arrays as pictures.

        Not `_repr_html_`: treescope would show that beside its own tree.
        """
        import treescope

        pictures = treescope.ArrayAutovisualizer()
        with treescope.active_autovisualizer.set_scoped(pictures):
            page = treescope.render_to_html(self)
        return {"text/plain": repr(self), "text/html": page}


class Raw(str):
    """Text to be printed as it stands, without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def in_thousands(count: int, units: Sequence[str]) -> str:
    """Writes a number in powers of a thousand, with a unit for each: `1.5 M`."""
    size, power = float(count), 0
    while size >= 999.95 and power < len(units) - 1:
        size, power = size / 1000, power + 1
    text = f"{size:.1f}" if power else str(count)
    return f"{text} {units[power]}".rstrip()


def readable_bytes(count: int) -> str:
    """Writes a number of bytes in powers of a thousand."""
    return in_thousands(count, ("B", "KB", "MB", "GB", "TB"))


class Size(NamedTuple):
    """A number of elements, and the bytes they take."""

    elements: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.elements:,} ({readable_bytes(self.nbytes)})"


def size_of(value: Any) -> Size:
    """Elements and bytes of the arrays inside a value."""
    leaves = jax.tree.leaves(value)
    arrays = [x for x in leaves if hasattr(x, "shape") and hasattr(x, "dtype")]
    counts = [math.prod(array.shape) for array in arrays]
    sizes = [n * array.dtype.itemsize for n, array in zip(counts, arrays)]
    return Size(sum(counts), sum(sizes))


def has_arrays(value: Any) -> bool:
    """Whether there is an array (or an abstract one) inside a value."""
    return any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(value))


def short(value: Any) -> Any:
    """Arrays of more than one element by shape and type; the rest as they are."""
    if isinstance(value, jax.Array | np.ndarray) and value.size > 1:
        return Raw(f"Array(shape={value.shape}, dtype={value.dtype!r})")
    return value


def _is_dtype(value: Any) -> bool:
    """Whether a value is a class that stands for a dtype, such as `jnp.float32`."""
    if not isinstance(value, type):
        return False
    return isinstance(value, type(jnp.float32)) or issubclass(value, np.generic)


def _show_leaf(value: Any) -> str:
    if _is_dtype(value):
        return value.__name__
    return repr(short(value) if _in_object.get() else value)


def block(items: Iterable[str]) -> str:
    """Texts below each other, set in."""
    return "\n  " + ",\n".join(items).replace("\n", "\n  ") + "\n"


def _show_container(value: Any) -> str:
    """Text of a plain container whose items may be objects of ours."""
    opening, closing = {dict: "{}", list: "[]", tuple: "()"}[type(value)]
    if isinstance(value, dict):
        items = [f"{key!r}: {show(item)}" for key, item in value.items()]
    else:
        items = [show(item) for item in value]
    if isinstance(value, tuple) and len(items) == 1:
        items[0] += ","
    line = opening + ", ".join(items) + closing
    if "\n" not in line and len(line) < 70:
        return line
    return f"{opening}{block(items)}{closing}"


def show(value: Any) -> str:
    """The text of a value; objects of ours are laid out over several lines."""
    if not isinstance(value, Shown):
        if type(value) in (list, tuple, dict):
            return _show_container(value)
        return _show_leaf(value)
    name = type(value).__name__
    printing = _printing.get()
    if id(value) in printing:
        return f"{name}(...)"
    with scoped(_printing, printing | {id(value)}):
        parts = value._display_parts()
        with scoped(_in_object, _in_object.get() or parts.is_object):
            lines = [
                (f"{label}{parts.separator}{show(item)}" if label else show(item))
                for label, item in parts.items
            ]
    opening, closing = parts.brackets
    inside = f" # {parts.comment}\n" if parts.comment else ""
    if lines:
        inside = inside.removesuffix("\n") + block(lines)
    return f"{name}{opening}{inside}{closing}"


def color_of(name: str) -> str:
    """A background colour for a class, the same in every process."""
    hue = sum(ord(letter) * (index + 7) for index, letter in enumerate(name)) % 360
    return f"oklch(0.92 0.06 {hue})"
