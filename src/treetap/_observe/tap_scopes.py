# SPDX-License-Identifier: Apache-2.0
"""Foreign models: the named scopes of any function as sites, without editing it.

Linen, Haiku and Equinox run each module in a `jax.named_scope`. `tap_scopes` traces a
function while somebody listens, and runs the jaxpr again with a tap wherever a scope
ends and at every `checkpoint_name`: see `scope_exits`. The jaxprs inside operations are
made anew with taps in them. From there on all is as if the function had called `tap`:
transforms, gradients, statistics and edits need nothing more.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import jax

from treetap._capture.callee import keep_name, refuse_uncallable
from treetap._capture.edit_points import editable
from treetap._capture.emit import LEAF
from treetap._capture.listening import listening
from treetap._capture.marks import Label, bind_tap
from treetap._capture.module_paths import scope_below
from treetap._capture.name_stacks import (
    ModuleScope,
    is_backward,
    is_transform,
    path_in,
)
from treetap._capture.walk import jax_compat
from treetap._capture.walk.jax_compat import Body
from treetap._capture.walk.jaxpr_cache import JaxprCache
from treetap._capture.walk.operations import operation_of
from treetap._capture.walk.plans import Part, Rewritten
from treetap._capture.walk.spots import Spot
from treetap._capture.walk.steps import Ran, Step
from treetap._observe.scope_exits import (
    Exit,
    exits,
    is_telling,
    last_uses,
    live_results,
)

F = TypeVar("F", bound=Callable[..., Any])


def _in_scope(eqn: Any, depth: int | None = None) -> AbstractContextManager[None]:
    """The scopes an operation was traced in, as a path that taps inside will have.

    Marks of transforms are left out: they are in the path, and what the walk reads from
    marks is about taps that went through a transform, which those inside did not.
    """
    info = eqn.source_info
    parts = info.name_stack.stack[:depth]
    path = path_in(parts)
    kept = tuple(part for part in parts if not is_transform(part))
    stack = type(info.name_stack)(kept)
    if path:
        stack = stack.extend(ModuleScope(str(path[-1]), scope_below(path)))
    own = eqn.replace(source_info=info.replace(name_stack=stack))
    return jax_compat.in_context_of(own)


def _marked(eqn: Any, one: Exit, values: list[Any]) -> list[Any]:
    """Values that are named from here on."""
    tree = LEAF if len(values) == 1 else jax.tree.structure(tuple(values))
    name, how = ("out", "scope") if one.name is None else (one.name, "checkpoint_name")
    label = Label(name, None, how, tree)
    asked = listening.value
    with _in_scope(eqn, one.depth):
        if asked.edits:
            values = editable(label, values)
        return bind_tap(label, values) if asked.taps else values


def _run(body: Body, values: Sequence[Any], live: tuple[bool, ...]) -> list[Any]:
    """Runs a body with taps where scopes end."""
    jaxpr = body.jaxpr
    last = last_uses(jaxpr, live)
    ends = exits(jaxpr, last)
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*body.consts, *values]))
    for n, eqn in enumerate(jaxpr.eqns):
        ins = [jax_compat.read(env, atom) for atom in eqn.invars]
        operation = operation_of(eqn.primitive, eqn.params)
        bodies = list(operation.bodies(eqn.params))
        if is_backward(eqn) or not any(is_telling(body.jaxpr) for body in bodies):
            outs = jax_compat.rebind(eqn, ins)
        else:
            marking = _Marking(live_results(eqn, n, last))
            step = Step(eqn.primitive, eqn.params, ins, marking)
            with _in_scope(eqn):
                outs, _ = operation.run(step, *map(Part, bodies))
        env.update(zip(eqn.outvars, outs))
        for one in ends.get(n, ()):
            held = [env[var] for var in one.variables]
            env.update(zip(one.variables, _marked(eqn, one, held)))
    return [jax_compat.read(env, atom) for atom in jaxpr.outvars]


_made: JaxprCache[Rewritten] = JaxprCache()


class _Marking(NamedTuple):
    """Who runs bodies of operations with taps where scopes end.

    Attributes:
        live: Which of the operation's results are used on the way forward.
    """

    live: tuple[bool, ...]

    def run(self, part: Part, values: Sequence[Any]) -> Ran:
        """Runs a body; nothing comes out yet."""
        return _run(part.body, values, self.live), []

    def rewritten(self, part: Part) -> Rewritten:
        """A body with taps in it."""
        jaxpr = part.body.jaxpr

        def made() -> Rewritten:
            avals = [var.aval for var in jaxpr.invars]
            traced = jax_compat.traced(lambda *x: _run(part.body, x, self.live), avals)
            return Rewritten(traced, jax.tree.structure((jaxpr.outvars, [])))

        key = self.live, listening.value, jax.sharding.get_abstract_mesh()
        return _made.get(jaxpr, key, made)

    def spots(self, jaxpr: Any) -> Sequence[Spot]:
        """None: the rules of functions are left as they are."""
        return ()


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array)


def _traced_call(fn: Any, args: Any, kwargs: Any) -> Any:
    """Calls a function with taps where scopes end.

    The arguments are not replaced by abstract ones: what need not be computed is there.
    """
    kept: list[Any] = []

    def flat() -> list[Any]:
        leaves, tree = jax.tree.flatten(fn(*args, **kwargs))
        kept.extend((tree, [None if _is_array(leaf) else leaf for leaf in leaves]))
        return [leaf for leaf in leaves if _is_array(leaf)]

    body = jax_compat.body_of(jax_compat.traced(flat, ()))
    outs = iter(_run(body, [], (True,) * len(body.jaxpr.outvars)))
    tree, leaves = kept
    filled = [next(outs) if leaf is None else leaf for leaf in leaves]
    return jax.tree.unflatten(tree, filled)


def tap_scopes(fn: F) -> F:
    """A function whose named scopes are sites: for models of other libraries.

    While nobody listens it is `fn` itself that runs. While somebody does, `fn` is
    traced, as by `jax.jit`, and there is a site

    - `path:out` for each visit of a `jax.named_scope`, where path is that of the scopes
      around: the values that leave the scope, one array or a tuple in the order in
      which they were computed (`how` is `"scope"`);
    - `path:name` for each `jax.ad_checkpoint.checkpoint_name` (`how` is
      `"checkpoint_name"`).

    A value that a scope only hands on was not computed there, and is no site. For
    gradients, and for batch axes in front, `tap_scopes` goes inside the transform:
    `jax.grad(lambda p: loss(tap_scopes(model)(p, x)))`, `jax.vmap(tap_scopes(model))`.

    Args:
        fn: A function; such as `net.apply` of Linen, `apply` of `haiku.transform`, or
            an Equinox module. It may not depend on values in Python, nor write to
            objects outside.

    Returns:
        A function like `fn`, for `observe`, `sites` and `edit`.

    Examples:
        >>> import jax, jax.numpy as jnp, treetap as tt
        >>> def model(x):
        ...     with jax.named_scope("encoder"):
        ...         return jnp.sin(x) * 2
        >>> tt.sites(tt.tap_scopes(model), jnp.ones(3))
        Record: 1 sites, 12 B
        site         how    type        size  under
        encoder:out  scope  float32[3]  12 B
    """
    refuse_uncallable(fn, "tap_scopes")

    def tapped(*args: Any, **kwargs: Any) -> Any:
        asked = listening.value
        if asked is None or not (asked.taps or asked.edits):
            return fn(*args, **kwargs)
        return _traced_call(fn, args, kwargs)

    return keep_name(tapped, fn)
