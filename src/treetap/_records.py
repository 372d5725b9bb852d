# SPDX-License-Identifier: Apache-2.0
"""Records: what was heard in a run, site by site, in order of execution."""

import html
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, overload

import jax
import numpy as np
from jax.tree_util import register_dataclass

from treetap import _display
from treetap._errors import CaptureError
from treetap._selectors import as_select, refuse_nothing, site_text
from treetap._states import State
from treetap._trees import Path


@register_dataclass
@dataclass(frozen=True, eq=False)
class Site:
    """One value on the way through a model.

    Attributes:
        value: The value; a shape and type in a listing.
        grad: Its gradient, or None; a tuple by order under repeated differentiation.
        taken: In a branch, whether the branch was taken.
        count: In a `while` loop, how often it ran; the value is the last one.
        path: The Module it is in.
        name: Its name: of the method, or the one given.
        index: How many calls of the same site came before.
        kind: The kind of Variable it is sown as, or None.
        how: `"tap"`, `"sow"`, `"perturb"` or `"output"` of a method.
        wraps: The operations around it that gave it axes (`scan`, `shard_map`) or flags
            (`cond`, `while`), outermost first.
        module: The class of the Module.
    """

    value: Any
    grad: Any = None
    taken: Any = None
    count: Any = None
    path: Path = field(default=(), metadata={"static": True})
    name: str = field(default="", metadata={"static": True})
    index: int = field(default=0, metadata={"static": True})
    kind: type | None = field(default=None, metadata={"static": True})
    how: str = field(default="tap", metadata={"static": True})
    wraps: tuple[str, ...] = field(default=(), metadata={"static": True})
    module: str = field(default="", metadata={"static": True})

    @property
    def text(self) -> str:
        """How the site is written: `blocks/3/attn:__call__#1`."""
        return site_text(self.path, self.name, self.index)

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
        """How much memory the value takes."""
        return _display.size_of(self.value)[1]

    def _cells(self) -> tuple[str, str, str, str, str]:
        leaves = jax.tree.leaves(self.value)
        types = ", ".join(dict.fromkeys(_type_text(leaf) for leaf in leaves))
        under = ", ".join(self.wraps)
        size = _display.readable_bytes(self.nbytes)
        return self.text, self.how, types, size, under

    def __repr__(self) -> str:
        text, how, types, size, under = self._cells()
        tail = f", under {under}" if under else ""
        return f"Site({text!r}, {how}, {types}, {size}{tail})"


_COLUMNS = ("site", "how", "type", "size", "under")


def _type_text(leaf: Any) -> str:
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return type(leaf).__name__
    return f"{dtype}{list(np.shape(leaf))}".replace(" ", "")


@register_dataclass
@dataclass(frozen=True, eq=False)
class Record:
    """The sites of a run in order of execution; a tree of their values and gradients.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> def f(x):
        ...     return tt.tap(x + 1, "a") * tt.tap(x * 2, "b")
        >>> _, record = tt.observe(f)(jnp.array(3.0))
        >>> [site.text for site in record], float(record["b"].value)
        (['a', 'b'], 6.0)
    """

    sites: tuple[Site, ...]

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
            return Record(self.sites[key])
        if not isinstance(key, str):
            return self.sites[key]
        for site in self.sites:
            if site.text == key:
                return site
        found = self.select(key).sites
        if len(found) == 1:
            return found[0]
        shown = ", ".join(site.text for site in found[:8])
        raise CaptureError(
            f"{key!r} stands for {len(found)} sites: {shown}. Name one of them, or use "
            "`record.select`."
        )

    def select(self, selector: Any) -> "Record":
        """The sites that a selector takes; an error if there are none."""
        chosen = as_select(selector)
        found = tuple(site for site in self.sites if chosen(site))
        if not found:
            texts = [site.text for site in self.sites]
            raise refuse_nothing(chosen, texts, "Record.select")
        return Record(found)

    @property
    def nbytes(self) -> int:
        """How much memory all values take."""
        return sum(site.nbytes for site in self.sites)

    def to_state(self) -> State:
        """Nested mappings by path and name, to tuples of values in call order."""
        root: dict[Any, Any] = {}
        for site in self.sites:
            branch = root
            for key in site.path:
                branch = branch.setdefault(key, {})
                if not isinstance(branch, dict):
                    raise CaptureError(
                        f"Record.to_state: {site.text} is below another site's name."
                    )
            held = branch.get(site.name, ())
            if isinstance(held, dict):
                raise CaptureError(
                    f"Record.to_state: {site.text} is also the name of a child."
                )
            branch[site.name] = (*held, site.value)
        return State(root)

    def _rows(self) -> list[tuple[str, ...]]:
        return [site._cells() for site in self.sites]

    def __repr__(self) -> str:
        rows = [_COLUMNS, *self._rows()]
        widths = [max(len(row[n]) for row in rows) for n in range(len(_COLUMNS))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
            for row in rows
        ]
        total = _display.readable_bytes(self.nbytes)
        return "\n".join([f"Record: {len(self.sites)} sites, {total}", *lines])

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<th>{x}</th>" for x in ("site", "how", "type", "size", "under")
        )
        rows = "".join(
            "<tr>" + "".join(f"<td>{html.escape(x)}</td>" for x in row) + "</tr>"
            for row in self._rows()
        )
        total = _display.readable_bytes(self.nbytes)
        caption = f"<caption>Record: {len(self.sites)} sites, {total}</caption>"
        return f"<table>{caption}<tr>{cells}</tr>{rows}</table>"
