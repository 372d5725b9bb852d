# SPDX-License-Identifier: Apache-2.0
"""Parameters: how layers make their Variables, and how their errors name them.

Every initializer is called with a key of its own, constants too: the number of keys
drawn, and so every value that follows, does not depend on what the initializers do.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np

from treetap._core.errors import StructureError
from treetap._core.trees.attributes import data
from treetap._core.variables.kinds import Param
from treetap._core.variables.metadata import VariableMetadata
from treetap._core.variables.variable import Variable
from treetap._modules.random_streams import Rngs, RngStream
from treetap.initializers import lecun_normal

Array = Any  # of JAX or numpy, a tracer, or a Variable that holds one
Dtype = Any
Initializer = Callable[..., Any]
Metadata = Mapping[str, Any]
Precision = Any
Promote = Callable[..., Any]
Shape = tuple[int, ...]

NO_METADATA: Metadata = MappingProxyType({})
default_kernel_init = lecun_normal()


def where(layer: Any) -> str:
    """A layer in the words of an error: its class, and where it is in the model."""
    place, keys = layer._pytree__place, []
    while place is not None and place[1] is not None:
        key = place[1]
        keys[:0] = map(str, key if isinstance(key, tuple) else (key,))
        place = place[0]
    name = type(layer).__name__
    return f"{name} at {'/'.join(keys)}" if keys else name


def text_of(value: Any) -> str:
    """An array in the words of an error: `float32[2,3]`."""
    shape, dtype = np.shape(value), getattr(value, "dtype", None)
    kind = type(value).__name__ if dtype is None else str(dtype)
    return f"{kind}[{','.join(map(str, shape))}]"


def check_sizes(layer: Any, **sizes: Any) -> tuple[int, ...]:
    """Sizes as Python's numbers; those that are not whole, or negative, are refused.

    Numbers of numpy would be arrays of the layer; sizes are part of its structure.
    """
    for name, size in sizes.items():
        whole = isinstance(size, int | np.integer) and not isinstance(size, bool)
        if not whole or size < 0:
            raise StructureError(
                f"{type(layer).__name__}: `{name}` is a number of elements, not "
                f"{size!r}."
            )
    return tuple(map(int, sizes.values()))


def check_rate(layer: Any, name: str, rate: Any) -> float:
    """A rate as Python's number; one that is no share is refused."""
    if not isinstance(rate, int | float | np.number) or not 0 <= rate <= 1:
        raise StructureError(f"{layer}: `{name}` is a share from 0 to 1, not {rate!r}.")
    return float(rate)


def check_features(layer: Any, inputs: Any, features: int, axis: int = -1) -> None:
    """Refuses inputs that do not have the layer's features on the axis."""
    shape = np.shape(inputs)
    if len(shape) < max(-axis, axis + 1) or shape[axis] != features:
        raise StructureError(
            f"{where(layer)}: expected inputs with {features} features on axis {axis}, "
            f"got {text_of(inputs)}."
        )


def check_rngs(layer: Any, rngs: Any) -> Rngs:
    """The random streams to draw parameters from."""
    if isinstance(rngs, Rngs):
        return rngs
    found = "an RngStream" if isinstance(rngs, RngStream) else f"{rngs!r}"
    raise TypeError(
        f"{type(layer).__name__}: `rngs` must be an Rngs, such as `Rngs(0)`, to draw "
        f"parameters from; got {found}."
    )


def initialized(  # noqa: PLR0917 - for layers, which know the order
    layer: Any, name: str, init: Initializer, key: Any, shape: Shape, dtype: Any
) -> Any:
    """The starting value an initializer gives, of the shape asked for."""
    try:
        value = init(key, shape, dtype)
    except ZeroDivisionError as error:
        raise StructureError(
            f"{type(layer).__name__}: the initializer of `{name}` has no scale for the "
            f"shape {tuple(shape)}, which has no elements. Give another, such as zeros."
        ) from error
    made = value.raw_value if isinstance(value, VariableMetadata) else value
    if np.shape(made) != tuple(shape):
        raise StructureError(
            f"{type(layer).__name__}: the initializer of `{name}` returned "
            f"{text_of(made)}; asked for was the shape {tuple(shape)}."
        )
    return value


def parameter(  # noqa: PLR0917 - for layers, which know the order
    layer: Any,
    name: str,
    init: Initializer,
    shape: Shape,
    dtype: Any,
    rngs: Any,
    metadata: Metadata,
    *,
    kind: type[Variable[Any]] = Param,
    reshape: Shape | None = None,
) -> Any:
    """A new parameter.

    Args:
        layer: For whom.
        name: What the layer calls it.
        init: The initializer.
        shape: The shape that the initializer is asked for.
        dtype: The dtype.
        rngs: Where the key comes from, the stream `params`.
        metadata: Metadata of the Variable.
        kind: The kind of Variable.
        reshape: The shape of the parameter, if it is another.
    """
    key = check_rngs(layer, rngs).params()
    value = initialized(layer, name, init, key, shape, dtype)
    if reshape is not None:
        if isinstance(value, VariableMetadata):
            raw = jnp.reshape(value.raw_value, reshape)
            value = VariableMetadata(raw, value.metadata)
        else:
            value = jnp.reshape(value, reshape)
    return kind(value, **metadata)


def absent() -> Any:
    """A parameter the layer goes without: there, as data, and None."""
    return data(None)


def value_of(variable: Any) -> Any:
    """What an optional parameter holds."""
    return None if variable is None else variable.get_value()


def as_tuple(value: int | Sequence[int]) -> tuple[int, ...]:
    """One number or several, as a tuple."""
    numbers = (value,) if isinstance(value, int | np.integer) else value
    return tuple(int(n) if isinstance(n, np.integer) else n for n in numbers)


def canonical_axes(layer: Any, axes: int | Sequence[int], rank: int) -> tuple[int, ...]:
    """Axes counted from the front, in the order given; each once."""
    given = as_tuple(axes)
    found = tuple(axis + rank if axis < 0 else axis for axis in given)
    if any(not 0 <= axis < rank for axis in found) or len(set(found)) != len(found):
        raise StructureError(
            f"{where(layer)}: the axes {given} are not different axes of an array of "
            f"rank {rank}."
        )
    return found
