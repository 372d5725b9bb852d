# SPDX-License-Identifier: Apache-2.0
"""Parameters: how layers make their Variables, and how their errors name them.

A constructor names all its arguments, for who reads it, and hands them on together, as
`locals()`: `Layer` keeps the options that many layers have, and `make_parameters` makes
the parameters, in the order given. Every initializer is called with a key of its own,
constants too: the number of keys drawn, and so every value that follows, does not
depend on what the initializers do.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treetap._core.errors import StructureError
from treetap._core.trees.attributes import data
from treetap._core.variables.kinds import Param
from treetap._core.variables.metadata import VariableMetadata
from treetap._core.variables.variable import Variable
from treetap._core.wording import typed
from treetap._modules.module import Module
from treetap._modules.random_streams import Rngs, RngStream
from treetap.initializers import lecun_normal

Array = Any  # of JAX or numpy, a tracer, or a Variable that holds one
Arguments = Mapping[str, Any]  # of a layer's constructor, by name
Dtype = Any
Initializer = Callable[..., Any]
Metadata = Mapping[str, Any]
Precision = Any
Promote = Callable[..., Any]
Shape = tuple[int, ...]

NO_METADATA: Metadata = MappingProxyType({})
default_kernel_init = lecun_normal()


# What a layer is told.


def where(layer: Any) -> str:
    """Name a layer in an error: its class, and where it is in the model.

    A function, which stands nowhere, is given by its name.
    """
    if isinstance(layer, str):
        return layer
    place, keys = layer._pytree__place, []
    while place is not None and place[1] is not None:
        key = place[1]
        keys[:0] = map(str, key if isinstance(key, tuple) else (key,))
        place = place[0]
    name = type(layer).__name__
    return f"{name} at {'/'.join(keys)}" if keys else name


def check_sizes(layer: Any, **sizes: Any) -> tuple[int, ...]:
    """Return sizes as Python's integers; others, and negative ones, are refused.

    Numbers of numpy would be arrays of the layer; sizes are part of its structure.
    """
    for name, size in sizes.items():
        is_integer = isinstance(size, int | np.integer) and not isinstance(size, bool)
        if not is_integer or size < 0:
            raise StructureError(
                f"{type(layer).__name__}: `{name}` must be a non-negative integer, got "
                f"{size!r}."
            )
    return tuple(map(int, sizes.values()))


def check_all_sizes(layer: Any, name: str, sizes: Iterable[Any]) -> tuple[int, ...]:
    """Return the sizes under one name as Python's integers, as `check_sizes` does."""
    return tuple(size for each in sizes for size in check_sizes(layer, **{name: each}))


def check_rate(layer: Any, name: str, rate: Any) -> float:
    """Return a rate as Python's number; one that is no share is refused."""
    if not isinstance(rate, int | float | np.number) or not 0 <= rate <= 1:
        raise StructureError(
            f"{where(layer)}: `{name}` must be a number from 0 to 1, got {rate!r}."
        )
    return float(rate)


def check_features(layer: Any, inputs: Any, features: int, axis: int = -1) -> None:
    """Refuse inputs that do not have the layer's features on the axis."""
    shape = np.shape(inputs)
    if len(shape) < max(-axis, axis + 1) or shape[axis] != features:
        raise StructureError(
            f"{where(layer)}: expected inputs with {features} features on axis {axis}, "
            f"got {typed(inputs)}."
        )


def check_rngs(layer: Any, rngs: Any) -> Rngs:
    """Return the random streams to draw parameters from; anything else is refused."""
    if isinstance(rngs, Rngs):
        return rngs
    found = "an RngStream" if isinstance(rngs, RngStream) else f"{rngs!r}"
    raise TypeError(
        f"{type(layer).__name__}: `rngs` must be an Rngs, such as `Rngs(0)`, to draw "
        f"parameters from; got {found}."
    )


def as_tuple(value: int | Sequence[int]) -> tuple[int, ...]:
    """Return one number or several as a tuple."""
    numbers = (value,) if isinstance(value, int | np.integer) else value
    return tuple(int(n) if isinstance(n, np.integer) else n for n in numbers)


def static_axes(axes: int | Sequence[int]) -> int | tuple[int, ...]:
    """Return one axis or several in a form that can be part of a layer's structure."""
    return int(axes) if isinstance(axes, int | np.integer) else as_tuple(axes)


def canonical_axes(layer: Any, axes: int | Sequence[int], rank: int) -> tuple[int, ...]:
    """Return axes counted from the front, in the order given, each of them once."""
    given = as_tuple(axes)
    found = tuple(axis + rank if axis < 0 else axis for axis in given)
    if any(not 0 <= axis < rank for axis in found) or len(set(found)) != len(found):
        raise StructureError(
            f"{where(layer)}: the axes {given} are not different axes of an array of "
            f"rank {rank}."
        )
    return found


def broadcastable(
    layer: Any, name: str, array: Array, what: str, shape: Shape
) -> jax.Array:
    """Return an array with an axis for each of a shape: of its size, or of size 1.

    Args:
        layer: The layer, or the name of the function, at work.
        name: What the array is called.
        array: The array.
        what: What has the shape.
        shape: The shape to which the array must broadcast.
    """
    array = jnp.asarray(array)
    sizes = (1,) * (len(shape) - array.ndim) + array.shape
    if len(sizes) != len(shape) or any(n not in (1, m) for n, m in zip(sizes, shape)):
        raise StructureError(
            f"{where(layer)}: `{name}` must broadcast to {what} of shape {shape}, got "
            f"{typed(array)}."
        )
    return jnp.reshape(array, sizes)


def told(layer: Any, name: str, given: Any) -> Any:
    """Return an option of a call, or else its layer's own: one must be given."""
    value = getattr(layer, name) if given is None else given
    if value is None:
        raise StructureError(
            f"{where(layer)}: `{name}` is given neither to the layer nor to the call. "
            "Use `train()`, `eval()` or `view(...)`."
        )
    return value


# What a layer makes and keeps.


def chosen(arguments: Arguments, *names: str) -> dict[str, Any]:
    """Return some of a constructor's arguments, to hand them on."""
    return {name: arguments[name] for name in names}


class Layer(Module):
    """Base of layers with parameters: which dtype these have, and which results.

    Attributes:
        dtype: The dtype to compute in; None for the one that values promote to.
        param_dtype: The dtype of the parameters.
        promote_dtype: What brings values to one dtype, called as `promote_dtype`.
    """

    dtype: Dtype | None
    param_dtype: Dtype
    promote_dtype: Promote

    _layer_options: tuple[str, ...] = ("dtype", "param_dtype", "promote_dtype")

    def _keep_options(self, arguments: Arguments) -> None:
        """Keep those options that layers of this family have, as given."""
        for name in self._layer_options:
            if name in arguments:
                setattr(self, name, arguments[name])

    def _promoted(self, *values: Any) -> tuple[Any, ...]:
        """Return arrays, and what Variables hold, in the dtype to compute in."""
        return self.promote_dtype(held(values), dtype=self.dtype)


def held(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return what Variables hold; arrays and None as they are."""
    return tuple(v.get_value() if isinstance(v, Variable) else v for v in values)


def make_parameters(
    layer: Any,
    arguments: Arguments,
    drawn_as: Mapping[str, Shape] = NO_METADATA,
    **shapes: Shape | None,
) -> None:
    """Make a layer's parameters, and set them as its attributes.

    Args:
        layer: The layer.
        arguments: Those of its constructor. `kernel_init`, `kernel_metadata` and, if
            there is one, `use_kernel` are for the parameter `kernel`, `param_dtype` is
            for all; `rngs` gives one key of the stream `params` to each.
        drawn_as: Shapes that initializers are asked for, where the parameter is of
            another.
        **shapes: The shapes by the names of the parameters, in the order of keys; None
            for one that this layer does not have.
    """
    dtype = arguments["param_dtype"]
    for name, shape in shapes.items():
        made = data(None)
        if shape is not None and arguments.get(f"use_{name}", True):
            key = check_rngs(layer, arguments["rngs"]).params()
            init, metadata = arguments[f"{name}_init"], arguments[f"{name}_metadata"]
            options = {"drawn_as": drawn_as.get(name), "metadata": metadata}
            made = make_parameter(layer, name, init, key, shape, dtype, **options)
        setattr(layer, name, made)


def make_parameter(  # noqa: PLR0917 - the last three as initializers have them
    layer: Any,
    name: str,
    init: Initializer,
    key: Any,
    shape: Shape,
    dtype: Dtype,
    *,
    drawn_as: Shape | None = None,
    kind: type[Variable[Any]] = Param,
    metadata: Metadata = NO_METADATA,
) -> Variable[Any]:
    """Return a new parameter; its initializer must give the shape that it is asked for.

    Args:
        layer: The layer.
        name: The parameter, for messages.
        init: The initializer, a function of a key, a shape and a dtype.
        key: The key to draw with.
        shape: The shape of the parameter.
        dtype: The dtype that the initializer is asked for.
        drawn_as: The shape that it is asked for, if that is another.
        kind: The kind of Variable.
        metadata: Metadata of the Variable, beside those that the initializer gives.
    """
    asked = tuple(shape if drawn_as is None else drawn_as)
    try:
        value = init(key, asked, dtype)
    except ZeroDivisionError as error:
        raise StructureError(
            f"{type(layer).__name__}: the initializer of `{name}` has no scale for the "
            f"shape {asked}, which has no elements. Give another, such as zeros."
        ) from error
    made = value.raw_value if isinstance(value, VariableMetadata) else value
    if np.shape(made) != asked:
        raise StructureError(
            f"{type(layer).__name__}: the initializer of `{name}` returned "
            f"{typed(made)}; asked for was the shape {asked}."
        )
    if drawn_as is not None:
        made = jnp.reshape(made, shape)
    if isinstance(value, VariableMetadata):
        made = VariableMetadata(made, value.metadata)
    return kind(made, **metadata)
