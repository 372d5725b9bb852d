# SPDX-License-Identifier: Apache-2.0
"""What leaves a named scope: values of a jaxpr by the scopes they were computed in.

Every operation of a jaxpr has a name stack: the scopes it was traced in, outermost
first, and marks of the transforms it went through. Each time a scope is entered JAX
makes a new entry, so operations in a row that share the very entry are one visit. Its
values are the results of these operations that others use, or that the jaxpr returns.

`exits` lists the visits of a jaxpr by the operation they end with; `tap_scopes` runs a
jaxpr with taps there. Marks are treated so: `vmap` stays in the path as JAX writes it,
because such a value has one more axis, wherever JAX keeps it; `jvp` is left out; what
is `transpose`d, or computed again for that, is the way back, and is no visit.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.core import ShapedArray
from jax.extend.core import Literal

from treetap._capture.name_stacks import (
    is_backward,
    is_differentiated,
    is_of_module,
    scopes_forward,
)
from treetap._capture.walk.jaxpr_cache import JaxprCache
from treetap._capture.walk.operations import operation_of

NAMED = "name"  # the operation that `jax.ad_checkpoint.checkpoint_name` leaves


class Exit(NamedTuple):
    """Values to be named after an operation.

    Attributes:
        depth: How much of the operation's name stack is around them.
        variables: The values, in the order in which they were computed.
        name: What `checkpoint_name` calls the value; None where a scope ends.
    """

    depth: int
    variables: tuple[Any, ...]
    name: str | None = None


class Uses:
    """Where the values of a jaxpr are used last.

    Args:
        jaxpr: The jaxpr.
        live: Which of its results are used on the way forward.
    """

    def __init__(self, jaxpr: Any, live: Sequence[bool]):
        end = len(jaxpr.eqns)
        uses = [
            (atom, n, is_backward(eqn))
            for n, eqn in enumerate(jaxpr.eqns)
            for atom in eqn.invars
        ]
        uses += [(atom, end, False) for atom, flag in zip(jaxpr.outvars, live) if flag]
        uses = [use for use in uses if not isinstance(use[0], Literal)]
        self._all = {atom: n for atom, n, _ in uses}
        self._forward = {atom: n for atom, n, is_back in uses if not is_back}

    def is_after(self, eqn: Any, variable: Any, n: int) -> bool:
        """Whether a result is used after an operation; residuals do not count."""
        known = self._forward if is_differentiated(eqn) else self._all
        return known.get(variable, -1) > n

    def live_results(self, eqn: Any, n: int) -> tuple[bool, ...]:
        """Which results of an operation are used on the way forward; all it carries."""
        used = [self.is_after(eqn, var, n) for var in eqn.outvars]
        carried = len(operation_of(eqn.primitive, eqn.params).carried(eqn.params))
        return (*[True] * carried, *used[carried:])


def exits(jaxpr: Any, uses: Uses) -> dict[int, list[Exit]]:
    """The values to be named, by the operation they come after, inner scopes first."""
    found: dict[int, list[Exit]] = defaultdict(list)
    visits: list[tuple[int, Any, int]] = []

    def close(count: int, last: int) -> None:
        while len(visits) > count:
            depth, part, first = visits.pop()
            if is_of_module(part):
                continue
            variables = tuple(
                var
                for eqn in jaxpr.eqns[first : last + 1]
                for var in eqn.outvars
                if isinstance(var.aval, ShapedArray) and uses.is_after(eqn, var, last)
            )
            if variables:
                found[last].append(Exit(depth, variables))

    for n, eqn in enumerate(jaxpr.eqns):
        chain = list(scopes_forward(eqn))
        goes_on = [old[1] is new[1] for old, new in zip(visits, chain)]
        same = [*goes_on, False].index(False)
        close(same, n - 1)
        visits += [(depth, part, n) for depth, part in chain[same:]]
        if eqn.primitive.name == NAMED and not is_backward(eqn):
            depth = len(eqn.source_info.name_stack.stack)
            found[n].append(Exit(depth, tuple(eqn.outvars), eqn.params["name"]))
    close(0, len(jaxpr.eqns) - 1)
    return found


_telling: JaxprCache[bool] = JaxprCache()


def is_telling(jaxpr: Any) -> bool:
    """Whether anything in a jaxpr, or in those inside it, has a name."""
    return _telling.get(jaxpr, None, lambda: any(map(_tells, jaxpr.eqns)))


def _tells(eqn: Any) -> bool:
    bodies = operation_of(eqn.primitive, eqn.params).bodies(eqn.params)
    return not is_backward(eqn) and (
        eqn.primitive.name == NAMED
        or not all(is_of_module(part) for _, part in scopes_forward(eqn))
        or any(is_telling(body.jaxpr) for body in bodies)
    )
