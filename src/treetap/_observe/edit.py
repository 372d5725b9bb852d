# SPDX-License-Identifier: Apache-2.0
"""edit: a function with other values on the way, in its derivatives too.

The edits are fed into the run by a session, see `session` and `plans`; the places
where they can go are in the program only while somebody edits.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from treetap._capture.callee import keep_name, refuse_uncallable
from treetap._capture.listening import Listening
from treetap._capture.selectors import Select, as_select
from treetap._capture.session import Call
from treetap._capture.walk.plans import Editing, Fed
from treetap._core.errors import CaptureError
from treetap._observe.handlers import value_of
from treetap._observe.observe import VALUES, Selecting, sites
from treetap._observe.records import Record, Site
from treetap.edits import Edit, Target, apply, swap

EDITS = tuple(Listening(frozenset(), None, False, edits) for edits in (2, 1))


def _as_edits(given: Any) -> list[Edit]:
    """Edits from one, a site, a function, or a list of these."""
    if isinstance(given, list | tuple):
        return [edit for one in given for edit in _as_edits(one)]
    if isinstance(given, Edit):
        return [given]
    if isinstance(given, Site):
        return [swap(given)]
    if callable(given):
        return [apply(given)]
    raise CaptureError(
        f"edit: expected an edit, got a {type(given).__name__}. Make one with "
        "`treetap.edits`, such as `edits.replace(value)`."
    )


class _Edited(Selecting):
    """One edited run.

    Attributes:
        edits: What is done to the sites that each selector takes.
    """

    def __init__(self, selectors: list[Select], edits: list[list[Edit]]):
        self.edits = edits
        super().__init__("edit", selectors, EDITS)

    def wants(self, call: Call) -> bool:
        """Nothing is recorded."""
        return False

    def feeds(self, call: Call) -> Fed | None:
        """The edits of a call."""
        numbers = self.takers(call)
        if call.label.how == "sow":
            return None
        target = Target(self.passed[-1].text, call.spot)
        fitted = [edit.fitted(target) for n in numbers for edit in self.edits[n]]
        if not fitted:
            return None
        arrays, tree = jax.tree.flatten([edit for edit, _ in fitted])
        axes = tuple(one for _, axes in fitted for one in axes)
        return Fed(Editing(target.text, tree, axes), arrays)

    def check(self, look: Callable[[], Record] | None = None) -> None:
        """Refuses selectors that took no site, or only such as do not flow on."""
        super().check(look)
        for taken in self.taken:
            if all(site.how == "sow" for site in taken):
                raise CaptureError(
                    f"edit: {taken[0].text} is sown, and a sown value does not flow "
                    "on, so an edit would change nothing. Use `tap` or `perturb`, and "
                    "their result."
                )


class _Stop(BaseException):
    """Raised where a run is to end: not for anybody else to catch."""


class _Stopping(Selecting):
    """One run that ends at a site."""

    def heard(self, call: Call) -> None:
        """Ends the run with the value."""
        raise _Stop(value_of(call, call.values))


def _stopping(fn: Callable[..., Any], select: Any) -> Callable[..., Any]:
    """A function that ends at a site, with its value."""
    chosen = [as_select(select)]

    def stopped(*args: Any, **kwargs: Any) -> Any:
        work = _Stopping("edit: stop_at", chosen, VALUES)
        try:
            with work.around(fn, args, kwargs):
                work.check(functools.partial(sites, fn, *args, **kwargs))
        except _Stop as found:
            return found.args[0]

    return keep_name(stopped, fn)


def edit(
    fn: Callable[..., Any], edits: Mapping[Any, Any], *, stop_at: Any = None
) -> Callable[..., Any]:
    """A function with other values on the way.

    Derivatives inside `fn` are those of the edited program; gradients also flow to the
    arrays of the edits. Other arrays are not another program.

    Args:
        fn: A Module, a function of Modules or of arrays, or a gradient function such as
            `jax.grad(loss)`; or what `observe` gives, to see the edited values.
        edits: From selectors (a glob such as `"blocks/*/attn"`, a `Select`, a class, a
            function of a site) to edits: see `treetap.edits`; a site
            of a Record, a function, or a list of these, one after the other.
        stop_at: A selector of a site: the run ends there, with its value.

    Returns:
        A function like `fn`.

    Examples:
        >>> import jax, treetap as tt
        >>> f = jax.jit(lambda x: tt.tap(x * 2, "double") + 1)
        >>> float(tt.edit(f, {"double": tt.edits.add(10.0)})(3.0))
        17.0
        >>> float(jax.grad(tt.edit(f, {"double": tt.edits.zero()}))(3.0))
        0.0
    """
    refuse_uncallable(fn, "edit")
    if not isinstance(edits, Mapping):
        raise CaptureError(
            f"edit: expected a mapping from selectors to edits, got a "
            f"{type(edits).__name__}."
        )
    chosen, changes = list(map(as_select, edits)), list(map(_as_edits, edits.values()))
    inner = fn if stop_at is None else _stopping(fn, stop_at)

    def edited(*args: Any, **kwargs: Any) -> Any:
        work = _Edited(chosen, changes)
        with work.around(inner, args, kwargs, edits=True) as out:
            work.check(functools.partial(sites, fn, *args, **kwargs))
        return out

    return keep_name(edited, fn)
