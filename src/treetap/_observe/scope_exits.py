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


def last_uses(jaxpr: Any, live: Sequence[bool]) -> dict[Any, int]:
    """Which operation uses each value last; the results come after all of them.

    That the way back uses a value that is differentiated does not count: such a use is
    that of a residual.

    Args:
        jaxpr: The jaxpr.
        live: Which of its results are used on the way forward.
    """
    moved = [eqn.outvars for eqn in jaxpr.eqns if is_differentiated(eqn)]
    differentiated = {variable for variables in moved for variable in variables}
    results = [atom for atom, flag in zip(jaxpr.outvars, live) if flag]
    uses = [(eqn.invars, is_backward(eqn)) for eqn in jaxpr.eqns]
    last: dict[Any, int] = {}
    for n, (atoms, is_back) in enumerate([*uses, (results, False)]):
        known = [atom for atom in atoms if not isinstance(atom, Literal)]
        last |= {x: n for x in known if not (is_back and x in differentiated)}
    return last


def live_results(eqn: Any, n: int, last: dict[Any, int]) -> tuple[bool, ...]:
    """Which results of an operation are used on the way forward; all it carries."""
    used = [last.get(variable, -1) > n for variable in eqn.outvars]
    carried = len(operation_of(eqn.primitive, eqn.params).carried(eqn.params))
    return (*[True] * carried, *used[carried:])


def exits(jaxpr: Any, last: dict[Any, int]) -> dict[int, list[Exit]]:
    """The values to be named, by the operation they come after, inner scopes first."""
    found: dict[int, list[Exit]] = defaultdict(list)
    visits: list[tuple[int, Any, int]] = []
    for n, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name == NAMED and not is_backward(eqn):
            depth = len(eqn.source_info.name_stack.stack)
            found[n].append(Exit(depth, tuple(eqn.outvars), eqn.params["name"]))
    chains = [list(scopes_forward(eqn)) for eqn in jaxpr.eqns]
    for end, chain in enumerate([*chains, []]):
        goes_on = [old[1] is new[1] for old, new in zip(visits, chain)]
        same = [*goes_on, False].index(False)
        while len(visits) > same:
            depth, part, first = visits.pop()
            if is_of_module(part):
                continue
            variables = tuple(
                var
                for eqn in jaxpr.eqns[first:end]
                for var in eqn.outvars
                if isinstance(var.aval, ShapedArray) and last.get(var, -1) >= end
            )
            if variables:
                found[end - 1].append(Exit(depth, variables))
        visits += [(depth, part, end) for depth, part in chain[same:]]
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
