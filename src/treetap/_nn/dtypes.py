# SPDX-License-Identifier: Apache-2.0
"""Dtypes: in which one a layer computes.

A layer brings its inputs and parameters to one dtype before it computes: the one it was
given, or the one JAX promotes them to.
"""

from typing import Any

import jax.numpy as jnp


def promote_dtype(
    values: tuple[Any, ...], /, *, dtype: Any = None, inexact: bool = True
) -> tuple[Any, ...]:
    """Cast values to one dtype; None stays None.

    Args:
        values: Arrays, or None.
        dtype: The dtype; without it, what JAX promotes the values to.
        inexact: Whether it must be a floating or complex one; whole numbers become
            float32 then.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> [x.dtype.name for x in tt.promote_dtype((jnp.ones(2), jnp.arange(2)))]
        ['float32', 'float32']
    """
    # Lists, which JAX does not promote, are arrays to NNX.
    values = tuple(jnp.asarray(x) if isinstance(x, list | tuple) else x for x in values)
    if dtype is None:
        dtype = common_dtype(values, inexact)
    elif inexact and not jnp.issubdtype(dtype, jnp.inexact):
        raise ValueError(
            f"promote_dtype: the dtype must be floating or complex, got "
            f"{jnp.dtype(dtype).name}. Say `inexact=False` to compute in it anyway."
        )
    return tuple(None if x is None else jnp.asarray(x, dtype) for x in values)


def common_dtype(values: tuple[Any, ...], inexact: bool = True) -> Any:
    """Return the dtype JAX promotes values to; floating or complex if it must be."""
    found = jnp.result_type(*(value for value in values if value is not None))
    if inexact and not jnp.issubdtype(found, jnp.inexact):
        return jnp.promote_types(jnp.float32, found)
    return found
