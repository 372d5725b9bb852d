# SPDX-License-Identifier: Apache-2.0
"""The self-check: what captures rely on in JAX, and would miss without an error.

Most of what JAX might change raises an error here, and a new version is tried before it
is supported. But a user may have a version that is newer than this library. A few
things could then fail in silence: values would be missing, be there twice, or have the
wrong path. So the first capture on such a version tries these things on programs of a
few lines, and says which of them does not hold.
"""

import functools
from collections.abc import Callable
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
from treetap._capture.walk.witness import equations_in
from treetap._core.errors import CaptureError

NEWEST_TESTED = (0, 12, 0)


def _tapped(x: Any) -> Any:
    tree = jax.tree.structure(0)
    return bind_tap(Label("self-check", None, "tap", tree), [x])[0]


def _unused(x: Any) -> Any:
    _tapped(2 * x)
    return jnp.sin(x)


def _equations(fn: Callable[..., Any], x: Any = 1.0) -> list[tuple[Any, Any]]:
    """The equations of a differentiated function, and in which others each is."""
    return list(equations_in(jax.make_jaxpr(jax.grad(fn))(x)))


def _found(primitive: Any, fn: Callable[..., Any]) -> list[tuple[Any, Any]]:
    return [one for one in _equations(fn) if one[0].primitive is primitive]


def _loop(x: Any) -> Any:
    return jax.lax.scan(lambda c, _: (_unused(c), None), x, length=2)[0]


def _is_kept_once() -> bool:
    """A tap that nothing depends on is in the program, and once."""
    ways = [jax.jit(_unused), _loop]
    if not jax_compat.has_new_remat():
        ways += [jax.checkpoint(_unused), jax.checkpoint(_loop)]
    return all(len(_found(tap_p, fn)) == 1 for fn in ways)


def _is_marked_again() -> bool:
    """A tap that is computed again for the way back has `again_p` in its place."""
    if jax_compat.has_new_remat():  # such taps are refused
        return True
    fn = jax.checkpoint(lambda x: jnp.sin(_tapped(jnp.sin(x))))
    return [len(_found(x, fn)) for x in (tap_p, again_p)] == [1, 1]


def _stays_in_its_loop() -> bool:
    """A tap of what is the same in all iterations is not taken out of the loop."""

    def fn(x: Any) -> Any:
        return jax.lax.scan(lambda c, _: (c * _tapped(jnp.sin(x)), None), x, length=2)[
            0
        ]

    return [bool(around) for _, around in _found(tap_p, fn)] == [True]


def _sees_mappings() -> bool:
    """A tap of what is not mapped knows of the mapping around it."""

    def fn(x: Any) -> Any:
        return jnp.sum(jax.vmap(lambda y: y * _tapped(x))(jnp.ones(3)))

    ((tap, _),) = _found(tap_p, fn)
    return [one.size for one in tap.params["maps"]] == [3]


def _has_scopes() -> bool:
    """Scopes are in name stacks as they were opened, apart from transforms."""

    def fn(x: Any) -> Any:
        with jax.named_scope(ModuleScope("shown", "where")), jax.named_scope("vmap"):
            return jnp.sum(jax.vmap(jnp.sin)(x))

    stacks = [eqn.source_info.name_stack for eqn, _ in _equations(fn, jnp.ones(3))]
    named = [stack for stack in stacks if scopes_in(stack) == ("where",)]
    scopes = {x.name for one in named for x in one.stack if not is_transform(x)}
    return "vmap" in scopes and 1 in map(mappings_in, named)


def _tells_the_way_back() -> bool:
    """Operations of the way back are told from those of the way forward."""
    found = [is_transposed(eqn) for eqn, _ in _equations(lambda x: jnp.sin(x) * 2)]
    return any(found) and not all(found)


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

    def failure(check: Callable[[], bool]) -> str:
        try:
            return "" if check() else str(check.__doc__)
        except Exception as error:  # a program that no longer runs is told, too
            return f"{check.__doc__} ({type(error).__name__}: {error})"

    return list(filter(None, map(failure, CHECKS)))


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
