# SPDX-License-Identifier: Apache-2.0
"""Parameters: how layers make their Variables, and how their errors name them.

A constructor names all its arguments, for people who read it, and hands them on as
`locals()`: `Layer._make_parameters` makes the parameters, in the order given, and
keeps the options that many layers have. Every initializer is called with a key of its
own, constants too: so the number of keys drawn, and with it every value that follows,
does not depend on what the initializers do.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from treetap._core.errors import StructureError
from treetap._core.paths import show_path
from treetap._core.trees.attributes import data
from treetap._core.variables.kinds import Param
from treetap._core.variables.metadata import VariableMetadata
from treetap._core.variables.operators import unboxed
from treetap._core.variables.values import broadcasts
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


# Checks of arguments and inputs.


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
    return f"{name} at {show_path(keys)}" if keys else name


def is_positive(value: Any) -> TypeGuard[int]:
    """Whether a value is an integer of at least 1."""
    return isinstance(value, int | np.integer) and bool(value >= 1)


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


def check_all_sizes(layer: Any, name: str, sizes: Any) -> tuple[int, ...]:
    """Return one size or several under one name, as `check_sizes` does."""
    given = as_tuple(sizes)
    return tuple(size for each in given for size in check_sizes(layer, **{name: each}))


def check_rate(layer: Any, name: str, rate: Any) -> float:
    """Return a rate as Python's number; it must be between 0 and 1."""
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


def held(parameter: Any) -> Any:
    """Return what a layer computes with: the value of a parameter.

    In a parameter's place may stand an array, or an object of somebody else's that
    gives its array for `[...]`, as those of quantisers do; so may one inside a
    Variable.
    """
    value = unboxed(parameter)
    if value is None or isinstance(value, jax.Array | np.ndarray | float | int):
        return value
    return value[...] if hasattr(value, "__getitem__") else value


def sizes_of(array: Any, expected: Shape) -> Shape:
    """Return the shape of an array that stands in a parameter's place.

    Inputs are checked against the parameter that is there, which may be a shard of the
    one that was made. What has no shape is taken to be as expected.
    """
    return tuple(getattr(array, "shape", expected))


def check_rngs(layer: Any, rngs: Any) -> Rngs:
    """Return the random streams to draw parameters from; anything else is refused."""
    if isinstance(rngs, Rngs):
        return rngs
    found = "an RngStream" if isinstance(rngs, RngStream) else f"{rngs!r}"
    raise TypeError(
        f"{type(layer).__name__}: `rngs` must be an Rngs, such as `Rngs(0)`, to draw "
        f"parameters from; got {found}."
    )


def as_static(value: Any) -> Any:
    """Return numbers, nested at will, in a form that can be part of a structure.

    Sequences become tuples, integers of numpy become Python's; the rest stays.
    """
    if isinstance(value, Iterable) and not isinstance(value, str):
        return tuple(map(as_static, value))
    return int(value) if isinstance(value, np.integer) else value


def as_tuple(value: int | Sequence[int]) -> tuple[int, ...]:
    """Return one number or several as a tuple."""
    numbers = as_static(value)
    return numbers if isinstance(numbers, tuple) else (numbers,)


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
    if not broadcasts(array.shape, shape):
        raise StructureError(
            f"{where(layer)}: `{name}` must broadcast to {what} of shape {shape}, got "
            f"{typed(array)}."
        )
    return jnp.reshape(array, (1,) * (len(shape) - array.ndim) + array.shape)


def mode_of_call(layer: Any, name: str, given: Any) -> Any:
    """Return an option of a call, or else its layer's own: one must be given."""
    value = getattr(layer, name) if given is None else given
    if value is None:
        raise StructureError(
            f"{where(layer)}: `{name}` is given neither to the layer nor to the call. "
            "Use `train()`, `eval()` or `view(...)`."
        )
    return value


# Parameters and options.


def chosen(arguments: Arguments, *names: str) -> dict[str, Any]:
    """Return some of a constructor's arguments, to hand them on."""
    return {name: arguments[name] for name in names}


class Layer(Module):
    """Base of layers with parameters: what many constructors have in common.

    What is declared here are the options that layers keep as they are given. Each layer
    has those of them that its constructor has.

    Attributes:
        dtype: The dtype to compute in; None for the one that values promote to.
        param_dtype: The dtype of the parameters.
        promote_dtype: What brings values to one dtype, called as `promote_dtype`.
        precision: As for `jax.lax.dot_general`.
        preferred_element_type: As for `jax.lax.dot_general`.
        use_bias: Whether to add a bias.
    """

    dtype: Dtype | None
    param_dtype: Dtype
    promote_dtype: Promote
    precision: Precision
    preferred_element_type: Dtype | None
    use_bias: bool

    def _keep_options(self, arguments: Arguments) -> None:
        """Keep those of a constructor's arguments that are declared in `Layer`."""
        for name in Layer.__annotations__:
            if name in arguments:
                setattr(self, name, arguments[name])

    def _make_parameters(
        self,
        arguments: Arguments,
        drawn_as: Mapping[str, Shape] = NO_METADATA,
        **shapes: Shape | None,
    ) -> None:
        """Make parameters, set them as attributes, and keep the common options.

        Args:
            arguments: Those of the constructor. `kernel_init`, `kernel_metadata` and,
                if there is one, `use_kernel` are for the parameter `kernel`,
                `param_dtype` is for all; `rngs` gives one key of the stream `params` to
                each.
            drawn_as: Shapes that initializers are asked for, where the parameter is of
                another.
            **shapes: The shapes by the names of the parameters, in the order of keys;
                None for one that this layer does not have.
        """
        dtype = arguments["param_dtype"]
        for name, shape in shapes.items():
            made: Any = data(None)
            if shape is not None and arguments.get(f"use_{name}", True):
                key = check_rngs(self, arguments["rngs"]).params()
                init, more = arguments[f"{name}_init"], arguments[f"{name}_metadata"]
                asked = drawn_as.get(name, shape)
                made = make_parameter(self, name, init, key, shape, dtype, more, asked)
            setattr(self, name, made)
        self._keep_options(arguments)

    def _promoted(self, *values: Any) -> tuple[Any, ...]:
        """Return arrays, and what Variables hold, in the dtype to compute in."""
        return self.promote_dtype(tuple(map(unboxed, values)), dtype=self.dtype)


def make_parameter(  # noqa: PLR0917 - all that there is to say of one
    layer: Any,
    name: str,
    init: Initializer,
    key: Any,
    shape: Shape,
    dtype: Dtype,
    metadata: Metadata = NO_METADATA,
    drawn_as: Shape | None = None,
    kind: type[Variable[Any]] = Param,
) -> Variable[Any]:
    """Return a new parameter; its initializer must give the shape that it is asked for.

    Args:
        layer: The layer.
        name: The parameter, for messages.
        init: The initializer, a function of a key, a shape and a dtype.
        key: The key to draw with.
        shape: The shape of the parameter.
        dtype: The dtype that the initializer is asked for.
        metadata: Metadata of the Variable, beside those that the initializer gives.
        drawn_as: The shape that it is asked for, if that is another.
        kind: The kind of Variable.
    """
    asked = shape if drawn_as is None else drawn_as
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
    if asked != shape:
        made = jnp.reshape(made, shape)
    if isinstance(value, VariableMetadata):
        made = VariableMetadata(made, value.metadata)
    return kind(made, **metadata)
