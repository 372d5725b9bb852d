# SPDX-License-Identifier: Apache-2.0
"""Convolutions, with channels last and any number of batch axes.

A kernel is `[window axes..., in, out]`. Padding is by name or by number; the names
beyond JAX's own pad the inputs (or fold the outputs) and then leave no edge.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from treetap._core.errors import StructureError
from treetap._core.trees.attributes import static
from treetap._modules.module import Module
from treetap._modules.random_streams import Rngs
from treetap._nn.dtypes import promote_dtype as default_promote
from treetap._nn.linear import given, over_last
from treetap._nn.parameters import (
    NO_METADATA,
    Array,
    Dtype,
    Initializer,
    Metadata,
    Precision,
    Promote,
    absent,
    check_features,
    check_sizes,
    default_kernel_init,
    parameter,
    text_of,
    value_of,
    where,
)
from treetap.initializers import zeros

Numbers = int | Sequence[int] | None
Padding = str | int | Sequence[int | tuple[int, int]]
NAMES = ("SAME", "VALID", "SAME_LOWER")
OWN_NAMES = ("CIRCULAR", "REFLECT", "CAUSAL")


class FixedArray:
    """An array as part of a structure: it never changes, and is compared by value."""

    __slots__ = ("_hash", "array")

    def __init__(self, array: np.ndarray):
        self.array = array.copy()
        self.array.flags.writeable = False
        self._hash = hash((array.shape, array.dtype.name, array.tobytes()))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FixedArray) or self._hash != other._hash:
            return False
        same_kind = self.array.dtype == other.array.dtype
        return same_kind and np.array_equal(self.array, other.array)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:
        return FixedArray, (self.array,)

    def __repr__(self) -> str:
        return f"FixedArray({text_of(self.array)})"


def fixed_mask(layer: Any, mask: Any, kernel_shape: tuple[int, ...]) -> Any:
    """A mask of the kernel, to keep as part of the structure."""
    if mask is None:
        return static(None)
    if isinstance(mask, Tracer):
        raise StructureError(
            f"{type(layer).__name__}: `mask` is part of the layer's structure, so it "
            "must be known when the layer is made; got a traced array."
        )
    if np.shape(mask) != kernel_shape:
        raise StructureError(
            f"{type(layer).__name__}: `mask` must have the shape of the kernel, "
            f"{kernel_shape}, got {text_of(mask)}."
        )
    return static(FixedArray(np.asarray(mask)))


def masked(kernel: jax.Array, mask: FixedArray | None) -> jax.Array:
    """The kernel, where the mask lets it through."""
    return kernel if mask is None else kernel * mask.array.astype(kernel.dtype)


def per_axis(layer: Any, name: str, value: Numbers, axes: int) -> tuple[int, ...]:
    """A number for each window axis; one number, or None for 1, stands for all."""
    numbers = (1,) * axes if value is None else value
    if not isinstance(numbers, Sequence):
        numbers = (numbers,) * axes
    is_good = all(isinstance(n, int | np.integer) and n >= 1 for n in numbers)
    if not is_good or len(numbers) != axes:
        raise StructureError(
            f"{where(layer)}: `{name}` is a positive number, or {axes} of them, one "
            f"for each axis of the window; got {value!r}."
        )
    return tuple(map(int, numbers))


def window_of(layer: Any, kernel_size: Any) -> tuple[int, ...]:
    """The size of the window on each axis."""
    sizes = kernel_size if isinstance(kernel_size, Sequence) else (kernel_size,)
    for size in sizes:
        check_sizes(layer, kernel_size=size)
    return tuple(map(int, sizes))


def pairs_of(layer: Any, padding: Padding, axes: int) -> str | list[tuple[int, int]]:
    """Padding as a name, or as a pair for each window axis."""
    if isinstance(padding, str):
        if padding.upper() in (*NAMES, *OWN_NAMES):
            return padding.upper()
    elif isinstance(padding, int | np.integer):
        return [(int(padding), int(padding))] * axes
    elif isinstance(padding, Sequence) and len(padding) == axes:
        each = [p if isinstance(p, Sequence) else (p, p) for p in padding]
        numbers = [n for pair in each for n in pair]
        is_good = all(isinstance(n, int | np.integer) for n in numbers)
        if is_good and all(len(pair) == 2 for pair in each):
            return [(int(before), int(after)) for before, after in each]
    raise StructureError(
        f"{where(layer)}: `padding` is one of {', '.join((*NAMES, *OWN_NAMES))}, a "
        f"number, or a number or pair for each of the {axes} window axes; got "
        f"{padding!r}."
    )


def with_one_batch_axis(
    layer: Any, inputs: jax.Array, axes: int
) -> tuple[jax.Array, tuple[int, ...]]:
    """Inputs with their batch axes made one; also what those were."""
    batch = inputs.shape[: inputs.ndim - axes - 1]
    if inputs.ndim < axes + 1:
        raise StructureError(
            f"{where(layer)}: a window of {axes} axes needs inputs with as many axes "
            f"and the features after them, got {text_of(inputs)}."
        )
    if len(batch) == 1:
        return inputs, batch
    return jnp.reshape(inputs, (math.prod(batch), *inputs.shape[len(batch) :])), batch


def with_batch_axes(outputs: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """Outputs with the batch axes that the inputs had."""
    if len(batch) == 1:
        return outputs
    return jnp.reshape(outputs, (*batch, *outputs.shape[1:]))


class Conv(Module):
    """A convolution.

    Args:
        in_features: The channels of the inputs.
        out_features: The channels of the outputs.
        kernel_size: The size of the window on each axis; one number for one axis.
        strides: How far the window moves; one number for all axes.
        padding: `"SAME"`, `"VALID"`, `"CIRCULAR"` (inputs repeat), `"REFLECT"` (they
            are mirrored), `"CAUSAL"` (one axis; nothing ahead is seen), a number, or
            numbers or pairs by axis.
        input_dilation: How far apart the inputs are put.
        kernel_dilation: How far apart the window's elements are.
        feature_group_count: Into how many groups the channels are divided.
        use_bias: Whether to add a bias.
        mask: What the kernel is multiplied with, of its shape; fixed.
        dtype: This and those that follow, as for `Linear`.
        param_dtype: The dtype of the parameters.
        precision: As for `jax.lax.conv_general_dilated`.
        kernel_init: The initializer of the kernel.
        bias_init: The initializer of the bias.
        conv_general_dilated: What to compute with.
        promote_dtype: What brings inputs and parameters to one dtype.
        preferred_element_type: As for `jax.lax.conv_general_dilated`.
        rngs: Random streams.
        kernel_metadata: Metadata of the kernel.
        bias_metadata: Metadata of the bias.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> layer = tt.Conv(3, 8, kernel_size=(3, 3), rngs=tt.Rngs(0))
        >>> layer(jnp.ones((1, 32, 32, 3))).shape
        (1, 32, 32, 8)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: Numbers = 1,
        *,
        padding: Padding = "SAME",
        input_dilation: Numbers = 1,
        kernel_dilation: Numbers = 1,
        feature_group_count: int = 1,
        use_bias: bool = True,
        mask: Array | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: Precision = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = zeros,
        conv_general_dilated: Callable[..., Any] = lax.conv_general_dilated,
        promote_dtype: Promote = default_promote,
        preferred_element_type: Dtype | None = None,
        rngs: Rngs,
        kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
    ):
        in_features, out_features, groups = check_sizes(
            *(self,),
            in_features=in_features,
            out_features=out_features,
            feature_group_count=feature_group_count,
        )
        if groups < 1 or in_features % groups or out_features % groups:
            raise StructureError(
                f"Conv: feature_group_count={groups} must divide in_features="
                f"{in_features} and out_features={out_features}."
            )
        self.kernel_size = window_of(self, kernel_size)
        self.kernel_shape = (*self.kernel_size, in_features // groups, out_features)
        self._mask = fixed_mask(self, mask, self.kernel_shape)
        self.kernel = parameter(
            *(self, "kernel", kernel_init, self.kernel_shape, param_dtype, rngs),
            kernel_metadata,
        )
        self.bias = absent()
        if use_bias:
            shape = (out_features,)
            self.bias = parameter(
                self, "bias", bias_init, shape, param_dtype, rngs, bias_metadata
            )
        self.in_features = in_features
        self.out_features = out_features
        self.strides = _hashable(strides)
        self.padding = _hashable(padding)
        self.input_dilation = _hashable(input_dilation)
        self.kernel_dilation = _hashable(kernel_dilation)
        self.feature_group_count = groups
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.conv_general_dilated = conv_general_dilated
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type

    @property
    def mask(self) -> np.ndarray | None:
        """What the kernel is multiplied with."""
        return None if self._mask is None else self._mask.array

    def __call__(self, inputs: Array, out_sharding: Any = None) -> jax.Array:
        """The convolution of `inputs`.

        Args:
            inputs: `[batch..., window axes..., in_features]`.
            out_sharding: The sharding of the result, on an explicit mesh.
        """
        check_features(self, inputs, self.in_features)
        inputs, kernel, bias = self.promote_dtype(
            (inputs, self.kernel.get_value(), value_of(self.bias)), dtype=self.dtype
        )
        axes = len(self.kernel_size)
        inputs, batch = with_one_batch_axis(self, inputs, axes)
        dilation = per_axis(self, "kernel_dilation", self.kernel_dilation, axes)
        inputs, padding = self._padded(inputs, dilation)
        order = (0, axes + 1, *range(1, axes + 1))
        kernel_order = (axes + 1, axes, *range(axes))
        outputs = self.conv_general_dilated(
            inputs,
            masked(kernel, self._mask),
            per_axis(self, "strides", self.strides, axes),
            padding,
            lhs_dilation=per_axis(self, "input_dilation", self.input_dilation, axes),
            rhs_dilation=dilation,
            dimension_numbers=lax.ConvDimensionNumbers(order, kernel_order, order),
            feature_group_count=self.feature_group_count,
            precision=self.precision,
            **given(
                preferred_element_type=self.preferred_element_type,
                out_sharding=out_sharding,
            ),
        )
        outputs = outputs if bias is None else outputs + over_last(bias, outputs)
        return with_batch_axes(outputs, batch)

    def _padded(
        self, inputs: jax.Array, dilation: tuple[int, ...]
    ) -> tuple[jax.Array, Any]:
        """Inputs padded as only we can, and the padding left to JAX."""
        padding = pairs_of(self, self.padding, len(self.kernel_size))
        spans = [d * (k - 1) for k, d in zip(self.kernel_size, dilation)]
        if padding == "CAUSAL":
            if len(spans) != 1:
                raise StructureError(
                    f"{where(self)}: CAUSAL padding is for windows of one axis, this "
                    f"one has {len(spans)}."
                )
            return jnp.pad(inputs, [(0, 0), (spans[0], 0), (0, 0)]), "VALID"
        if padding in ("CIRCULAR", "REFLECT"):
            pairs = [(0, 0), *((s // 2, (s + 1) // 2) for s in spans), (0, 0)]
            mode = "wrap" if padding == "CIRCULAR" else "reflect"
            return jnp.pad(inputs, pairs, mode=mode), "VALID"
        return inputs, padding


def _hashable(value: Any) -> Any:
    """Numbers, pairs of numbers or a name, with tuples for lists."""
    if isinstance(value, list | tuple):
        return tuple(map(_hashable, value))
    return int(value) if isinstance(value, np.integer) else value


class ConvTranspose(Module):
    """A transposed convolution: each input element paints a window of the outputs.

    Args:
        in_features: The channels of the inputs.
        out_features: The channels of the outputs.
        kernel_size: The size of the window on each axis; one number for one axis.
        strides: How far apart the windows are painted.
        padding: As for `Conv`, without `"REFLECT"`. `"CIRCULAR"` folds what is painted
            beyond the edges onto the other side; `"CAUSAL"` drops what would be painted
            beyond the end.
        kernel_dilation: How far apart the window's elements are.
        use_bias: This and those that follow, as for `Conv`.
        mask: What the kernel is multiplied with, of its shape; fixed.
        dtype: The dtype to compute in.
        param_dtype: The dtype of the parameters.
        precision: As for `jax.lax.conv_transpose`.
        kernel_init: The initializer of the kernel.
        bias_init: The initializer of the bias.
        transpose_kernel: Whether to be the very transpose of `Conv`: windows mirrored,
            and a kernel of `[window axes..., out, in]`.
        promote_dtype: What brings inputs and parameters to one dtype.
        preferred_element_type: As for `jax.lax.conv_transpose`.
        rngs: Random streams.
        kernel_metadata: Metadata of the kernel.
        bias_metadata: Metadata of the bias.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> layer = tt.ConvTranspose(3, 8, (3, 3), strides=2, rngs=tt.Rngs(0))
        >>> layer(jnp.ones((1, 8, 8, 3))).shape
        (1, 16, 16, 8)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: Numbers = None,
        *,
        padding: Padding = "SAME",
        kernel_dilation: Numbers = None,
        use_bias: bool = True,
        mask: Array | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: Precision = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = zeros,
        transpose_kernel: bool = False,
        promote_dtype: Promote = default_promote,
        preferred_element_type: Dtype | None = None,
        rngs: Rngs,
        kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
    ):
        in_features, out_features = check_sizes(
            self, in_features=in_features, out_features=out_features
        )
        self.kernel_size = window_of(self, kernel_size)
        ends = (in_features, out_features)
        self.kernel_shape = (
            *self.kernel_size,
            *(reversed(ends) if transpose_kernel else ends),
        )
        self._mask = fixed_mask(self, mask, self.kernel_shape)
        self.kernel = parameter(
            *(self, "kernel", kernel_init, self.kernel_shape, param_dtype, rngs),
            kernel_metadata,
        )
        self.bias = absent()
        if use_bias:
            shape = (out_features,)
            self.bias = parameter(
                self, "bias", bias_init, shape, param_dtype, rngs, bias_metadata
            )
        self.in_features = in_features
        self.out_features = out_features
        self.strides = _hashable(strides)
        self.padding = _hashable(padding)
        self.kernel_dilation = _hashable(kernel_dilation)
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.transpose_kernel = transpose_kernel
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type

    @property
    def mask(self) -> np.ndarray | None:
        """What the kernel is multiplied with."""
        return None if self._mask is None else self._mask.array

    def __call__(self, inputs: Array) -> jax.Array:
        """The transposed convolution of `inputs`.

        Args:
            inputs: `[batch..., window axes..., in_features]`.
        """
        check_features(self, inputs, self.in_features)
        inputs, kernel, bias = self.promote_dtype(
            (inputs, self.kernel.get_value(), value_of(self.bias)), dtype=self.dtype
        )
        axes = len(self.kernel_size)
        inputs, batch = with_one_batch_axis(self, inputs, axes)
        strides = per_axis(self, "strides", self.strides, axes)
        padding = self._checked_padding()
        folded = padding in OWN_NAMES
        outputs = lax.conv_transpose(
            inputs,
            masked(kernel, self._mask),
            strides,
            "VALID" if folded else padding,
            rhs_dilation=per_axis(self, "kernel_dilation", self.kernel_dilation, axes),
            transpose_kernel=self.transpose_kernel,
            precision=self.precision,
            **given(preferred_element_type=self.preferred_element_type),
        )
        periods = [size * s for size, s in zip(inputs.shape[1:-1], strides)]
        if padding == "CAUSAL":
            outputs = outputs[:, : periods[0]]
        elif padding == "CIRCULAR":
            for axis, period in enumerate(periods, 1):
                outputs = self._folded(outputs, axis, period)
        outputs = outputs if bias is None else outputs + over_last(bias, outputs)
        return with_batch_axes(outputs, batch)

    def _checked_padding(self) -> Any:
        padding = pairs_of(self, self.padding, len(self.kernel_size))
        if padding == "REFLECT":
            raise StructureError(
                f"{where(self)}: a transposed convolution cannot pad by REFLECT: there "
                "is nothing to mirror. Use CIRCULAR, SAME or VALID."
            )
        if padding == "CAUSAL" and len(self.kernel_size) != 1:
            raise StructureError(
                f"{where(self)}: CAUSAL padding is for windows of one axis, this one "
                f"has {len(self.kernel_size)}."
            )
        return padding

    def _folded(self, outputs: jax.Array, axis: int, period: int) -> jax.Array:
        """What is painted beyond the edges, added on the other side, and centred."""
        beyond = outputs.shape[axis] - period
        pairs = [(0, 0)] * outputs.ndim
        pairs[axis] = (0, -beyond % period)
        outputs = jnp.pad(outputs, pairs)
        shape = list(outputs.shape)
        shape[axis : axis + 1] = [-1, period]
        outputs = jnp.sum(jnp.reshape(outputs, shape), axis=axis)
        before = (beyond + 1) // 2 if self.transpose_kernel else beyond // 2
        return jnp.roll(outputs, -before, axis=axis)
