# SPDX-License-Identifier: Apache-2.0
"""observe: values and gradients of everything on the way, in one pass.

No model needs to be edited for it: the results of methods are sites, beside what `tap`,
`sow` and `perturb` name.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from treetap._capture.callee import keep_name, refuse_uncallable
from treetap._capture.listening import Listening
from treetap._capture.selectors import Select, as_select, refuse_nothing, site_text
from treetap._capture.session import Call
from treetap._capture.statistics.reduced import Placed, Reduction, measured
from treetap._capture.statistics.reducers import as_reducers
from treetap._capture.walk import jax_compat
from treetap._capture.walk.plans import Choice, is_inexact
from treetap._core.display import readable_bytes
from treetap._core.errors import CaptureError
from treetap._core.variables.kinds import Intermediate
from treetap._modules.methods import method_names
from treetap._observe.around_compiled import around_compiled
from treetap._observe.handlers import Handler, PureCall, value_of
from treetap._observe.records import FirstAxes, Record, Site
from treetap._observe.verify import compare, run_slowly

Leaves = dict[int, dict[int, Any]]  # by order of differentiation, and by number
# All that is emitted, and all but the results of methods.
VALUES = Listening(None, Intermediate, True), Listening(None, None, True)


def site_of(call: Call, leaves: Sequence[Any] | None, **found: Any) -> Site:
    """A call as a site, with the leaves of its value, if any, and what was found."""
    site = object.__new__(Site)  # past `__init__`, which is slow where all is frozen
    site.__dict__.update(
        value=None if leaves is None else value_of(call, leaves),
        path=call.where.path,
        name=call.label.name,
        index=call.index,
        kind=call.label.kind,
        how=call.label.how,
        wraps=call.spot.wraps,
        module=call.where.kind,
        **found,
    )
    return site


class Selecting(Handler):
    """A handler that takes sites by selectors, and refuses those that take none.

    Results of methods are many, and each that is emitted costs time at tracing. So they
    are emitted only if some selector could take one.

    Args:
        what: The public function at work, for messages.
        selectors: The selectors, a site of any of which is taken; all if none.
        asked: What is emitted if a selector may take results of methods, and if none
            does.

    Attributes:
        is_wide: Whether results of methods are emitted.
        passed: The sites that selectors were asked about, for the error text.
        taken: Those that each selector took.
    """

    def __init__(self, what: str, selectors: list[Select], asked: Sequence[Listening]):
        self.what, self.selectors = what, selectors
        names = [one.names for one in selectors]
        has_outputs = any(n is None or n & method_names for n in names)
        self.is_wide = has_outputs or not selectors
        self.passed: list[Site] = []
        self.taken: list[list[Site]] = [[] for _ in selectors]
        super().__init__(asked[0] if self.is_wide else asked[1])

    def takers(self, call: Call) -> list[int]:
        """The selectors that take a call, by number.

        They look at a site of types, not values.
        """
        site = site_of(call, call.spot.avals)
        self.passed.append(site)
        numbers = [n for n, chosen in enumerate(self.selectors) if chosen(site)]
        for n in numbers:
            self.taken[n].append(site)
        return numbers

    def wants(self, call: Call) -> bool:
        """Whether a selector takes a call; all are wanted if there are none."""
        return not self.selectors or bool(self.takers(call))

    def hidden(self, call: Call) -> None:
        """Refuses a call where the walk cannot go, if a selector takes it."""
        if self.takers(call):
            super().hidden(call)

    def check(self, look: Callable[[], Record] | None = None) -> None:
        """Refuses selectors that took nothing, and names sites that are near.

        Args:
            look: Lists all sites; asked where not all of them were emitted.
        """
        for selector, taken in zip(self.selectors, self.taken):
            near = self.passed
            if not taken and look is not None and not self.is_wide:
                with contextlib.suppress(Exception):  # not all functions can be traced
                    near = list(look()) or near
            if not taken:
                raise refuse_nothing(selector, [site.text for site in near], self.what)


class _Observation(Selecting):
    """One observed run: records the calls that are selected."""

    def __init__(self, select: Any, grads: bool):
        self.grads = grads
        self.unreachable: list[tuple[str, str]] = []
        self.heard_calls: list[Call] = []  # those that no selector takes, too
        chosen = [] if select is None else [as_select(select)]
        super().__init__("observe", chosen, VALUES)

    def wants(self, call: Call) -> bool:
        """Whether the selector takes a call."""
        self.heard_calls.append(call)
        return super().wants(call)

    def hidden(self, call: Call) -> None:
        """Lists a call where the walk cannot go, unless it was asked for."""
        if self.selectors:
            super().hidden(call)
        else:
            text = site_text(call.where.path, call.label.name, call.index)
            self.unreachable.append((text, call.spot.hidden_in))

    def record(self, values: bool, look: Callable[[], Record] | None = None) -> Record:
        """The Record of the run.

        Args:
            values: Whether it has the values.
            look: Lists all sites, for the error if none was selected.
        """
        self.check(look)
        sites = [self.site(call, values) for call in self.session.calls]
        of_sites = [x for site in sites for x in (site.grad, site.grad_reduced)]
        if self.grads and not self.selectors and all(x is None for x in of_sites):
            raise CaptureError(
                "observe: no value has a gradient. " + _WHY.format(which="them")
            )
        return Record(tuple(sites), tuple(self.unreachable))

    def site(self, call: Call, values: bool) -> Site:
        """A call as a site, with what was recorded of it."""
        states, grad, grad_reduced = call.states, None, None
        if self.grads and self.has_gradient(call):
            if self.session.taking.record:
                grad = _by_order(call, call.gradients, _zeros)
            if states is not None:
                grad_reduced = _by_order(call, call.gradient_states, _measured_zeros)
        return site_of(
            call,
            call.values if values else None,
            grad=grad,
            reduced=None if states is None else value_of(call, states),
            grad_reduced=grad_reduced,
            first_axes=_first_axes(call, grad is not None),
            **{flag: placed.array for flag, placed in call.flags.items()},
        )

    def has_gradient(self, call: Call) -> bool:
        """Whether a value has a gradient; an error if it was selected and has none.

        A value that depends on what is differentiated has one, of zeros where no
        cotangent came. But if something is differentiated forward, or a cotangent could
        not be matched to its value, zeros could be wrong: then it is an error, too.
        """
        spot = call.spot
        is_still = spot.order == 0 or call.label.how == "sow"
        if not any(map(is_inexact, spot.avals)) or (is_still and not self.selectors):
            return False
        is_lost = self.session.is_forward or call.label.name in self.session.unmatched
        is_whole = call.gradients.keys() >= {*range(1, spot.order + 1)}
        if is_still or (is_lost and not is_whole):
            raise _refuse_gradient(call)
        return True


def _by_order(call: Call, found: Leaves, missing: Callable[[Call, int], Any]) -> Any:
    """What there is of a gradient, in the value's tree; several orders as a tuple.

    Args:
        call: The call of the value.
        found: What was found, by order of differentiation and by leaf.
        missing: What there is for a leaf of which nothing was found.
    """
    trees = []
    for order, moved in enumerate(call.spot.moved, 1):
        held = {**found.get(order, {})}
        held |= {n: missing(call, n) for n in moved if n not in held}
        trees.append(value_of(call, [held.get(n) for n in range(len(call.spot.own))]))
    return trees[0] if len(trees) == 1 else tuple(trees)


def _first_axes(call: Call, has_grad: bool) -> FirstAxes:
    """What the first axes of the arrays of a site are."""
    spot = call.spot
    if not spot.levels and not has_grad:
        return FirstAxes((), spot.has)
    flags = (call.flags.get(flag, Placed(None)) for flag in ("taken", "count"))
    held = (*spot.has, *(placed.levels for placed in flags))
    used = sorted(set(itertools.chain(*held)))
    *leaves, taken, turns = (tuple(used.index(n) for n in levels) for levels in held)
    own = spot.axes()
    grads = [
        call.gradient_axes.get(order, {}).get(n, own[n])
        for order, moved in enumerate(spot.moved if has_grad else (), 1)
        for n in moved
    ]
    levels = tuple(spot.levels[n] for n in used)
    return FirstAxes(levels, tuple(leaves), taken, turns, tuple(grads))


def _zeros(call: Call, n: int) -> Any:
    """A gradient of zeros."""
    return jax_compat.zeros_of(call.spot.avals[n])


def _measured_zeros(call: Call, n: int) -> Any:
    """What is measured of a gradient of zeros, apart as the value's."""
    assert call.states is not None
    like = call.states[n]
    zeros = measured(like.reducers, Placed(jax_compat.zeros_of(call.spot.own[n])))
    axes = jnp.shape(like.seen)
    zeros = jax.tree.map(lambda x: jnp.broadcast_to(x, (*axes, *x.shape)), zeros)
    return replace(zeros, seen=like.seen)


_WHY = (
    "One pass gives gradients of values that depend on what is differentiated, when "
    "the differentiation is inside: `observe(jax.grad(loss), grads=True)`. For "
    "{which}, `perturb` the value and differentiate with respect to `init`: see "
    "`capture`."
)


def _refuse_gradient(call: Call) -> CaptureError:
    if call.label.how == "sow":
        why = (
            "is sown, and a sown value does not flow on, so nothing has a gradient "
            "through it. Use `tap` or `perturb`, and their result."
        )
    elif call.spot.order == 0 and call.label.how in ("scope", "checkpoint_name"):
        why = (
            "has no gradient: it depends on nothing that is differentiated, or "
            "`tap_scopes` is outside the differentiation. Put it inside: "
            "`jax.grad(lambda p: loss(tap_scopes(model)(p, x)))`."
        )
    else:
        why = (
            "has no gradient: it depends on nothing that is differentiated, or lies "
            "inside a custom rule, or the differentiation is outside, or forward. "
        ) + _WHY.format(which="this one")
    text = site_text(call.where.path, call.label.name, call.index)
    return CaptureError(f"observe: {text} {why}")


def observe(
    fn: Callable[..., Any],
    select: Any = None,
    *,
    values: bool | None = None,
    grads: bool = False,
    reduce: Any = None,
    max_iterations: int = 0,
    verify: bool = False,
) -> Callable[..., Any]:
    """A function that also returns a Record of the values on the way.

    Args:
        fn: A Module, a function of Modules or of arrays, or a gradient function such as
            `jax.value_and_grad(loss)`.
        select: Which sites: a glob such as `"blocks/*/attn"`, a `Select`, a class, a
            function, or a list of them; all by default.
        values: Whether to keep the values; by default, unless they are reduced.
        grads: Whether to keep their gradients; `fn` must differentiate. With `reduce`
            they are measured, too, and kept if values are.
        reduce: Statistics to take of values and gradients where they are, inside loops
            too: reducers such as `Moments()`, a list of them, or a mapping from names
            to them. They are in `site.stats` and `site.grad_stats`.
        max_iterations: Keep this many iterations of a `while` loop, along a new axis,
            instead of the last one; `site.count` says how many there were.
        verify: Run the call a second time in an independent, slow way, compare all that
            was recorded, and raise an error that names the first site that differs.
            `record.verified` is then True.

    Returns:
        A function with the result `(result, Record)`.

    Examples:
        >>> import jax, jax.numpy as jnp, treetap as tt
        >>> def loss(w, x):
        ...     return jnp.sum(tt.tap(w * x, "h") ** 2)
        >>> grads, record = tt.observe(jax.grad(loss), grads=True)(2.0, 3.0)
        >>> float(record["h"].value), float(record["h"].grad)
        (6.0, 12.0)
    """
    refuse_uncallable(fn, "observe")
    reduction = None if reduce is None else Reduction(as_reducers(reduce))
    keeps = reduction is None if values is None else values
    is_kept = keeps or reduction is None or verify
    taking = Choice(is_kept, None, max_iterations, reduction)

    def run(*args: Any, **kwargs: Any) -> Any:
        work = _Observation(select, grads)
        again = functools.partial(fn, *args, **kwargs)
        slow = run_slowly(fn, args, kwargs, work.asked, grads) if verify else None
        try:
            with work.around(fn, args, kwargs, taking=taking, gradients=grads) as out:
                record = work.record(keeps, functools.partial(sites, again))
                if slow is not None:
                    compare(slow, work.heard_calls, grads)
                    record = replace(record, verified=True)
                return out, record
        finally:
            work.heard_calls.clear()  # they would keep arrays, see `Session.close`

    called = run
    if not verify:
        called = around_compiled("observe", fn, run, select, taking, keeps, grads)

    def observed(*args: Any, **kwargs: Any) -> Any:
        try:
            return called(*args, **kwargs)
        except jax.errors.JaxRuntimeError as error:
            _add_bill(error, keeps, functools.partial(fn, *args, **kwargs), select)
            raise

    return keep_name(observed, fn)


def _add_bill(error: Exception, keeps: bool, call: Any, select: Any) -> None:
    """Adds to an error for want of memory what the values that are kept take."""
    if "out of memory" not in str(error).lower():
        return
    if not keeps:
        error.add_note("observe: only statistics are kept; the function needs more.")
        return
    with contextlib.suppress(Exception):  # the first error is the one to see
        found = sites(call, select=select)
        largest = sorted(found, key=lambda site: -site.nbytes)[:5]
        rows = [f"  {readable_bytes(site.nbytes):>9}  {site.text}" for site in largest]
        error.add_note(
            f"observe: the {len(found)} values that are kept take "
            f"{readable_bytes(found.nbytes)}, the largest:\n" + "\n".join(rows) + "\n"
            "Choose fewer with `select`, or keep statistics of them with `reduce`."
        )


def sites(
    fn: Callable[..., Any], *args: Any, select: Any = None, **kwargs: Any
) -> Record:
    """All sites of a call with their shapes and sizes; nothing is computed or changed.

    Args:
        fn: A Module, a function of Modules or of arrays, or a gradient function.
        *args: Its arguments, concrete or abstract.
        select: Which sites: a glob such as `"blocks/*/attn"`, a `Select`, a class, a
            function, or a list of them; all by default.
        **kwargs: Its keyword arguments.

    Returns:
        A Record of shapes and types.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> tt.sites(lambda x: tt.tap(x @ x, "square"), jnp.ones((2, 2)))
        Record: 1 sites, 16 B
        site    how  type          size  under
        square  tap  float32[2,2]  16 B
    """
    # Python's numbers stay as they are: they may be flags.
    pure = PureCall(fn, args, kwargs, "sites", lambda value: hasattr(value, "dtype"))
    found: list[Record] = []

    def traced(inputs: list[Any]) -> None:
        fn, args, kwargs, _ = pure.with_inputs(inputs)
        work = _Observation(select, False)
        with work.around(fn, args, kwargs):
            for heard in work.session.calls:
                heard.values = list(map(_abstract, heard.values))
                heard.flags = {}
            found.append(work.record(True))

    jax.eval_shape(traced, pure.inputs)
    return found[0]


def _abstract(value: Any) -> Any:
    if isinstance(value, jax.Array):
        return jax.ShapeDtypeStruct(value.shape, value.dtype)
    return value
