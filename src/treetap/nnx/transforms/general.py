# SPDX-License-Identifier: Apache-2.0
"""general: any transform of pure functions, made to take objects.

    @split_inputs
    @jax.jit
    @merge_inputs
    def step(model, x): ...

The outer decorator hands over pure trees, the inner one rebuilds the objects in there;
what became of them is what becomes of the caller's.
"""

import functools
from collections.abc import Callable
from typing import Any

from treetap._core.variables.metadata import MISSING
from treetap.nnx.contexts import from_tree, to_tree, update_context


def split_inputs(
    f: Callable[..., Any] = MISSING, *, ctxtag: str = "split_merge_inputs"
) -> Callable[..., Any]:
    """Calls a function of pure trees with objects; the outer decorator.

    Args:
        f: The function; without it, a decorator.
        ctxtag: What the two decorators know each other by.
    """
    if f is MISSING:
        return functools.partial(split_inputs, ctxtag=ctxtag)

    @functools.wraps(f)
    def call(*args: Any) -> Any:
        with update_context(ctxtag):
            returned = f(*to_tree(args, ctxtag=ctxtag))
            _, out = from_tree(returned, ctxtag=ctxtag, is_inner=False)
        return out

    return call


def merge_inputs(
    f: Callable[..., Any] = MISSING, *, ctxtag: str = "split_merge_inputs"
) -> Callable[..., Any]:
    """Calls a function of objects with pure trees; the inner decorator.

    Args:
        f: The function; without it, a decorator.
        ctxtag: What the two decorators know each other by.
    """
    if f is MISSING:
        return functools.partial(merge_inputs, ctxtag=ctxtag)

    @functools.wraps(f)
    def call(*pure_args: Any) -> Any:
        args = from_tree(pure_args, ctxtag=ctxtag, is_inner=True)
        out = f(*args)
        return to_tree((args, out), ctxtag=ctxtag)

    return call
