# SPDX-License-Identifier: Apache-2.0
"""The self-check: what captures rely on in JAX, and would miss without an error.

Most of what JAX might change raises an error here, and a new version is tried before it
is supported. But a user may have a version that is newer than this library. A few
things could then fail in silence: values would be missing, be there twice, or have the
wrong path. So the first capture on such a version tries these things on programs of a
few lines, and says which of them does not hold.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from treetap._capture.marks import Label, again_p, bind_tap, tap_p
from treetap._capture.name_stacks import (
    ModuleScope,
    is_transform,
    is_transposed,
    mappings_in,
    scopes_in,
)
from treetap._capture.walk import jax_compat
from treetap._core.errors import CaptureError

NEWEST_TESTED = (0, 12, 0)


def _tapped(x: Any) -> Any:
    tree = jax.tree.structure(0)
    return bind_tap(Label("self-check", None, "tap", tree), [x])[0]


def _unused(x: Any) -> Any:
    _tapped(2 * x)
    return jnp.sin(x)


def _equations(fn: Callable[..., Any], *args: Any) -> list[tuple[Any, int]]:
    """The equations of a differentiated function, with how many are around each."""

    def below(jaxpr: Any, depth: int) -> Iterator[tuple[Any, int]]:
        for eqn in jaxpr.eqns:
            yield eqn, depth
            for body in jax_compat.bodies_in(eqn.params):
                yield from below(body.jaxpr, depth + 1)

    return list(below(jax.make_jaxpr(jax.grad(fn))(*args), 0))


def _count(primitive: Any, fn: Callable[..., Any]) -> int:
    found = _equations(fn, 1.0)
    return sum(eqn.primitive is primitive for eqn, _ in found)


def _loop(x: Any) -> Any:
    return jax.lax.scan(lambda c, _: (_unused(c), None), x, length=2)[0]


def _same_in_all_iterations(x: Any) -> Any:
    def step(carry: Any, _: Any) -> Any:
        return carry * _tapped(jnp.sin(x)), None

    return jax.lax.scan(step, x, length=2)[0]


def _is_kept_once() -> bool:
    """A tap that nothing depends on is in the program, and once."""
    ways = [jax.jit(_unused), _loop]
    if not jax_compat.has_new_remat():
        ways += [jax.checkpoint(_unused), jax.checkpoint(_loop)]
    return all(_count(tap_p, fn) == 1 for fn in ways)


def _is_marked_again() -> bool:
    """A tap that is computed again for the way back has `again_p` in its place."""
    if jax_compat.has_new_remat():  # such taps are refused
        return True

    def fn(x: Any) -> Any:
        return jnp.sin(_tapped(jnp.sin(x)))

    return _count(tap_p, jax.checkpoint(fn)) == _count(again_p, jax.checkpoint(fn)) == 1


def _stays_in_its_loop() -> bool:
    """A tap of what is the same in all iterations is not taken out of the loop."""
    found = _equations(_same_in_all_iterations, 1.0)
    return [depth > 0 for eqn, depth in found if eqn.primitive is tap_p] == [True]


def _sees_mappings() -> bool:
    """A tap of what is not mapped knows of the mapping around it."""

    def fn(x: Any) -> Any:
        return jnp.sum(jax.vmap(lambda y: y * _tapped(x))(jnp.ones(3)))

    maps = [e.params["maps"] for e, _ in _equations(fn, 1.0) if e.primitive is tap_p]
    return [[one.size for one in each] for each in maps] == [[3]]


def _has_scopes() -> bool:
    """Scopes are in name stacks as they were opened, apart from transforms."""
    scope = ModuleScope("shown", "where")

    def fn(x: Any) -> Any:
        with jax.named_scope(scope), jax.named_scope("vmap"):
            return jnp.sum(jax.vmap(jnp.sin)(x))

    stacks = [eqn.source_info.name_stack for eqn, _ in _equations(fn, jnp.ones(3))]
    named = [stack for stack in stacks if scopes_in(stack) == ("where",)]
    scopes = [x for stack in named for x in stack.stack if not is_transform(x)]
    return {mappings_in(stack) for stack in named} >= {1} and "vmap" in {
        part.name for part in scopes
    }


def _tells_the_way_back() -> bool:
    """Operations of the way back are told from those of the way forward."""
    found = _equations(lambda x: jnp.sin(x) * 2, 1.0)
    return 0 < sum(is_transposed(eqn) for eqn, _ in found) < len(found)


CHECKS = (
    _is_kept_once,
    _is_marked_again,
    _stays_in_its_loop,
    _sees_mappings,
    _has_scopes,
    _tells_the_way_back,
)


def failures() -> list[str]:
    """What does not hold in this version of JAX."""
    found: list[str] = []
    for check in CHECKS:
        try:
            holds = check()
        except Exception as error:  # a program that no longer runs is told, too
            found.append(f"{check.__doc__} ({type(error).__name__}: {error})")
        else:
            found += [] if holds else [str(check.__doc__)]
    return found


@functools.cache
def check_newer_jax(version: tuple[int, ...]) -> None:
    """Refuses captures on a version of JAX that is newer than those tested and differs.

    Args:
        version: The version of JAX.
    """
    if version[:3] <= NEWEST_TESTED:
        return
    if found := failures():
        running, tested = (".".join(map(str, x)) for x in (version, NEWEST_TESTED))
        raise CaptureError(
            f"A capture cannot be trusted on JAX {running}: this version of treetap "
            f"was tested up to JAX {tested}, and these no longer hold. "
            f"{' '.join(found)} Use JAX {tested}, or a newer treetap."
        )
