# SPDX-License-Identifier: Apache-2.0
"""Functions of States that ask less here than in `treetap`, as NNX has them."""

from collections.abc import Callable
from typing import Any

from treetap._core.trees.state import Nested, State, united
from treetap._core.trees.update import write_states


def update(node: Any, state: Any, /, *states: Any) -> None:
    """Writes a State into an object, in place, as `treetap.update`.

    Beyond that, values may have another shape or dtype than there is, Variables may be
    new, and static attributes may be set.

    Args:
        node: The object to change.
        state: A State, a FlatState or nested dicts.
        *states: More of the same.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from treetap import nnx
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(model))
        >>> nnx.update(model, half)
        >>> model.kernel.dtype
        dtype(bfloat16)
    """
    write_states(node, (state, *states), fits=False)


def merge_state(
    state: Nested, /, *states: Nested, cls: Callable[[Any], Any] = State
) -> Any:
    """The union of several States; where two have a value, the later one's.

    Args:
        state: A State, or nested dicts.
        *states: More of the same.
        cls: What to make of the nested dict.

    Examples:
        >>> from treetap import nnx
        >>> dict(nnx.merge_state({"a": 1, "b": 2}, {"b": 3}))
        {'a': 1, 'b': 3}
    """
    if not states:
        return state
    whole: Any = united({}, state)
    for other in states:
        whole = united(whole, other)
    return cls(whole)
