# SPDX-License-Identifier: Apache-2.0
"""Values: what a Variable can hold, and what can be asked of it.

`with_item` is what `v[index] = x` means for every kind of value: one part is replaced,
and the original is left as it was. A `Marked` value is on its way into an attribute of
an object, and is the one thing that a Variable refuses by name.
"""

import copy
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from treetap._core.errors import StructureError
from treetap._core.wording import typed

# Types of arrays and numbers.
NUMERIC = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


@dataclass(slots=True, eq=False, repr=False)
class Marked:
    """What `data(x)` and `static(x)` give: a value with the wish to be one of these.

    Assigning it to an attribute stores the value inside; anywhere else it is a mistake.
    """

    value: Any
    is_data: bool

    def __repr__(self) -> str:
        return f"{'data' if self.is_data else 'static'}({self.value!r})"


def is_ref(value: Any) -> bool:
    """Whether a value is a `jax.Ref`; arrays are told apart first, which is quicker."""
    return not isinstance(value, jax.Array) and isinstance(value, jax.Ref)


def without_ref(value: Any) -> Any:
    """The array that a `jax.Ref` holds; other values as they are."""
    return value[...] if is_ref(value) else value


def is_buffer(value: Any) -> bool:
    """Whether a value is an array that is there, not one that is being traced."""
    return isinstance(value, jax.Array) and not isinstance(value, Tracer)


def is_gone(value: Any) -> bool:
    """Whether a value is an array whose buffer was given away."""
    return is_buffer(value) and value.is_deleted()


def why_missing(value: Any, remedy: str) -> str:
    """Why the numbers of a value cannot be had; empty when they can.

    Args:
        value: The value.
        remedy: What to do with it outside of transforms, such as "save it".
    """
    if isinstance(value, Tracer):
        return f"is being traced; {remedy} outside of transforms"
    if isinstance(value, jax.ShapeDtypeStruct):
        return "is abstract: it has a shape and no values"
    return "was donated or deleted" if is_gone(value) else ""


def broadcasts(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether an array of a shape broadcasts to a whole one."""
    pairs = zip(reversed(shape), reversed(whole))
    return len(shape) <= len(whole) and all(n in (1, m) for n, m in pairs)


def is_key(value: Any) -> bool:
    """Whether a value is an array of typed random keys, or stands for one."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def is_inexact(value: Any) -> bool:
    """Whether all numbers in a value are such that have derivatives."""
    if isinstance(value, jax.Array):
        return _is_inexact(value.dtype)
    return all(_is_inexact(jnp.result_type(x)) for x in jax.tree.leaves(value))


@functools.cache
def _is_inexact(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


def with_item(current: Any, index: Any, value: Any) -> Any:
    """`current` with the part at `index` replaced; `current` itself stays as it was."""
    if isinstance(current, jax.Array):
        if index is Ellipsis and _fits(current, value):
            return value
        if not is_key(current):
            value = jnp.asarray(value).astype(current.dtype)
        return current.at[index].set(value)
    if isinstance(current, jax.ShapeDtypeStruct) and index is Ellipsis:
        value = jnp.asarray(value)
        if value.shape != current.shape or value.dtype != current.dtype:
            raise StructureError(
                f"An abstract {typed(current)} cannot become {typed(value)}. Use "
                "`set_value` for another shape."
            )
    if index is Ellipsis and not isinstance(current, np.ndarray):
        return value
    changed: Any = copy.copy(current)
    changed[index] = value
    return changed


def write_ref(ref: Any, index: Any, value: Any) -> None:
    """Writes into a Ref, which keeps its shape and dtype."""
    if index is Ellipsis:
        value = jnp.asarray(value, ref.dtype)
        try:
            value = jnp.broadcast_to(value, ref.shape)
        except ValueError:
            raise StructureError(
                f"A Ref keeps its shape: {value.shape} does not fit into {ref.shape}."
            ) from None
    ref[index] = value


def _fits(current: jax.Array, value: Any) -> bool:
    """Whether `value` can stand for `current` as it is: same shape, type and place."""
    is_alike = isinstance(value, jax.Array) and value.shape == current.shape
    if not is_alike or value.dtype != current.dtype:
        return False
    is_traced = isinstance(value, Tracer) or isinstance(current, Tracer)
    return is_traced or value.sharding == current.sharding
