# SPDX-License-Identifier: Apache-2.0
"""watch: a training step that tells, now and then, what goes on inside.

Most calls go to the step as it is. Every so often a second program runs in its place:
the same step with statistics of what is on the way, compiled once. So watching costs
what the statistics cost, divided by how rarely they are taken.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Unpack

from treetap._capture.callee import keep_name, refuse_uncallable
from treetap._capture.statistics.reducers import (
    AbsMax,
    Histogram,
    Moments,
    NonFinite,
    Norm,
    as_reducers,
)
from treetap._core.settings import Mode
from treetap._observe.handlers import owner_of, with_owner, without_partials
from treetap._observe.loggers import is_writer, opened
from treetap._observe.observe import observe
from treetap._observe.records import Record
from treetap._transforms.jit import jit
from treetap._transforms.lift.compiled import Jit, JitOptions

STATISTICS = (Moments(), AbsMax(), Norm(), NonFinite(), Histogram())


class Watched(contextlib.AbstractContextManager["Watched"]):
    """A function that is watched; made by `watch`.

    Attributes:
        step: How many calls there were; the number of the next one. May be set, when
            a training continues.
        every: How many calls there are from one look to the next.
        last: The Record of the last look, or None.
    """

    def __init__(
        self, fn: Callable[..., Any], observed: Callable[..., Any], every: int, to: Any
    ):
        keep_name(self, fn)
        self.step = 0
        self.every = every
        self.last: Record | None = None
        self._fn, self._observed = fn, observed
        self._given = to
        self._to: Any = opened(to, "watch")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the function."""
        if self.step % self.every or self._to is None:
            out = self._fn(*args, **kwargs)
        else:
            out, record = self._observed(*args, **kwargs)
            self.last = record
            if is_writer(self._to):
                record.log(self._to, self.step)
            else:
                self._to(record, self.step)
        self.step += 1
        return out

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def close(self) -> None:
        """Ends the watch; calls go on as of the function itself.

        The files of a folder are written and closed. A writer that was given is not.
        """
        to, self._to = self._to, None
        if to is not None and to is not self._given:
            to.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def watch(
    fn: Callable[..., Any],
    every: int = 100,
    select: Any = None,
    *,
    to: Any,
    grads: bool = False,
    reduce: Any = STATISTICS,
    **options: Unpack[JitOptions],
) -> Watched:
    """A function that also logs, every so often, what its values are like.

    The first call is looked at, and then every hundredth, say: a program runs that
    also takes statistics, compiled once. The result is that of the function, and
    Modules change in place as it changes them.

    Args:
        fn: A training step or another function that can be compiled, or already is;
            also a Module, or a method of one.
        every: How many calls there are from one look to the next.
        select: Which sites: a glob such as `"blocks/*/attn"`, a `Select`, a class, a
            function of a site, or a list of them; all by default.
        to: Where it goes: a folder for TensorBoard's event files, a writer as for
            `Record.log`, or a function of a Record and a step.
        grads: Whether to look at gradients, too; `fn` must differentiate.
        reduce: The statistics: reducers such as `Moments()`, a list of them, or a
            mapping from names to them; those that are logged by default.
        **options: Those of `treetap.jit`, for the program that takes statistics. The
            options of a `treetap.jit` are known (but for `pack`); those of a `jax.jit`
            are not: name them here again.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> def step(x):
        ...     return tt.tap(2 * x, "h") + 1
        >>> seen = []
        >>> def note(record, step):
        ...     seen.append((step, record["h"].figures.abs_max))
        >>> watched = tt.watch(step, every=2, to=note)
        >>> [float(watched(jnp.array(x))) for x in (1.0, 2.0, 3.0)]
        [3.0, 5.0, 7.0]
        >>> seen
        [(0, 2.0), (2, 6.0)]
    """
    refuse_uncallable(fn, "watch")
    if type(every) is not int or every < 1:
        raise ValueError(
            f"watch: `every` is {every!r}. Give a number of calls, 1 or more."
        )
    if reduce is None:
        raise ValueError(
            "watch: `reduce` is None, and watching keeps statistics, not values. Give "
            "reducers, or use `observe`."
        )
    as_reducers(reduce)
    target, fixed, named, known = _taken_apart(fn)
    observed = functools.partial(observe, select=select, grads=grads, reduce=reduce)
    looking, owner = observed(target), owner_of(target)
    if owner is not None:
        named, looking = {_OWNER: owner, **named}, _of_owner(target, observed)
    given: Any = {**known, **options}
    compiled = jit(looking, **given)

    def look(*args: Any, **kwargs: Any) -> Any:
        return compiled(*fixed, *args, **{**named, **kwargs})

    return Watched(fn, look, every, to)


# By keyword, so that numbers of arguments are those that a call of the Module has.
_OWNER = "the Module"


def _of_owner(fn: Any, observed: Callable[..., Any]) -> Callable[..., Any]:
    """An observed Module, or method, as a function of the Module."""

    def call(*args: Any, **kwargs: Any) -> Any:
        owner = kwargs.pop(_OWNER)
        return observed(with_owner(fn, owner))(*args, **kwargs)

    return keep_name(call, fn)


def _taken_apart(fn: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any], Any]:
    """A function itself, the arguments that it brings along, and options of its jit."""
    fn, fixed, named = without_partials(fn, (), {})
    if not isinstance(fn, Jit):
        return fn, fixed, named, {}
    known: dict[str, Any] = {
        **fn.options,
        "graph": bool(fn.lift.mode),
        "graph_updates": fn.lift.mode is Mode.UPDATES,
    }
    known.pop("pack", None)
    if known.get("out_shardings") is not None:
        known["out_shardings"] = (known["out_shardings"], None)
    return fn.fun, (*fn._fixed, *fixed), named, known
