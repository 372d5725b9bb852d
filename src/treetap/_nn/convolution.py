# SPDX-License-Identifier: Apache-2.0
"""Convolutions, with channels last and any number of batch axes.

A kernel is `[window axes..., in, out]`. Padding is by name or by number; the names
beyond JAX's own pad the inputs (or fold the outputs) and then leave no edge.

`Convolution` is what both kinds share: the kernel, its mask, padding by name or number,
and how many batch axes become one and come back.
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
from treetap._core.wording import typed
from treetap._modules.random_streams import Rngs
from treetap._nn.dtypes import promote_dtype as default_promote
from treetap._nn.linear import Affine, with_bias
from treetap._nn.parameters import (
    NO_METADATA,
    Arguments,
    Array,
    Dtype,
    Initializer,
    Metadata,
    Precision,
    Promote,
    Shape,
    as_static,
    check_all_sizes,
    check_features,
    check_sizes,
    default_kernel_init,
    held,
    is_positive,
    sizes_of,
    where,
)
from treetap.initializers import zeros

Numbers = int | Sequence[int] | None
Padding = str | int | Sequence[int | tuple[int, int]]
NAMES = ("SAME", "VALID", "SAME_LOWER")
OWN_NAMES = ("CIRCULAR", "REFLECT", "CAUSAL")


class FixedArray:
    """An array as part of a structure: it never changes, and is compared by value."""

    __slots__ = ("_parts",)

    def __init__(self, array: np.ndarray):
        self._parts = (array.shape, array.dtype, array.tobytes())

    @property
    def array(self) -> np.ndarray:
        """The array, which cannot be written to."""
        return np.ndarray(*self._parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FixedArray) and self._parts == other._parts

    def __hash__(self) -> int:
        return hash(self._parts)

    def __repr__(self) -> str:
        return f"FixedArray({typed(self.array)})"


class Convolution(Affine):
    """Base of convolutions: a window that slides over the middle axes of inputs."""

    def _set_up(
        self, arguments: Arguments, sizes: tuple[int, ...], channels: Sequence[int]
    ) -> None:
        """Check and keep the arguments of all convolutions; make kernel and bias.

        Args:
            arguments: Those of the constructor.
            sizes: The channels of the inputs, and of the outputs.
            channels: Those of the kernel, its last two axes.
        """
        window = arguments["kernel_size"]
        self.kernel_size = check_all_sizes(self, "kernel_size", window)
        self.kernel_shape = (*self.kernel_size, *channels)
        self._mask = static(self._checked_mask(arguments["mask"]))
        self._make_parameters(arguments, kernel=self.kernel_shape, bias=sizes[1:])
        self.in_features, self.out_features = sizes
        self.strides: Numbers = as_static(arguments["strides"])
        self.padding: Padding = as_static(arguments["padding"])
        self.kernel_dilation: Numbers = as_static(arguments["kernel_dilation"])

    def _checked_mask(self, mask: Any) -> FixedArray | None:
        """Return a mask of the kernel in a form that can be part of the structure."""
        if mask is None:
            return None
        name = type(self).__name__
        if isinstance(mask, Tracer):
            raise StructureError(
                f"{name}: `mask` is part of the layer's structure, so it must be known "
                "when the layer is made; got a traced array."
            )
        if np.shape(mask) != self.kernel_shape:
            raise StructureError(
                f"{name}: `mask` must have the shape of the kernel, "
                f"{self.kernel_shape}, got {typed(mask)}."
            )
        return FixedArray(np.asarray(mask))

    @property
    def mask(self) -> np.ndarray | None:
        """What the kernel is multiplied with."""
        return None if self._mask is None else self._mask.array

    def _prepared(
        self, inputs: Array, axis: int = -2, groups: int = 1
    ) -> tuple[tuple[jax.Array, ...], Shape]:
        """Return inputs with one batch axis, kernel and bias; also all batch axes.

        Args:
            inputs: The inputs.
            axis: The axis of the kernel that has a size for the channels of the inputs.
            groups: How often it has to be taken for all channels.
        """
        kernel, bias = held(self.kernel), held(self.bias)
        channels = sizes_of(kernel, self.kernel_shape)[axis] * groups
        check_features(self, inputs, channels)
        inputs, kernel, bias = self._promoted(inputs, kernel, bias)
        axes = len(self.kernel_size)
        if inputs.ndim < axes + 1:
            raise StructureError(
                f"{where(self)}: a window of {axes} axes needs inputs with as many "
                f"axes and the features after them, got {typed(inputs)}."
            )
        batch = inputs.shape[: inputs.ndim - axes - 1]
        inputs = jnp.reshape(inputs, (math.prod(batch), *inputs.shape[len(batch) :]))
        if self.mask is not None:
            kernel = kernel * self.mask.astype(kernel.dtype)
        return (inputs, kernel, bias), batch

    def _finished(self, outputs: jax.Array, bias: Any, batch: Shape) -> jax.Array:
        """Return outputs with the bias added, and the batch axes of the inputs."""
        outputs = with_bias(outputs, bias)
        return jnp.reshape(outputs, (*batch, *outputs.shape[1:]))

    def _for_all_axes(self, value: Any) -> Sequence[Any]:
        """Return one number as often as the window has axes; several as they are."""
        if isinstance(value, Sequence):
            return value
        return (value,) * len(self.kernel_size)

    def _per_axis(self, name: str) -> tuple[int, ...]:
        """Return a setting by window axis; one number, or None for 1, is for all."""
        value, axes = getattr(self, name), len(self.kernel_size)
        numbers = self._for_all_axes(1 if value is None else value)
        if not all(map(is_positive, numbers)) or len(numbers) != axes:
            raise StructureError(
                f"{where(self)}: `{name}` must be a positive integer, or {axes} of "
                f"them, one for each axis of the window; got {value!r}."
            )
        return tuple(map(int, numbers))

    def _checked_padding(self) -> str | list[tuple[int, int]]:
        """Return padding as a name, or as a pair for each window axis."""
        padding, axes = self.padding, len(self.kernel_size)
        if isinstance(padding, str) and padding.upper() in (*NAMES, *OWN_NAMES):
            if padding.upper() == "CAUSAL" and axes != 1:
                raise StructureError(
                    f"{where(self)}: CAUSAL padding is for windows of one axis, this "
                    f"one has {axes}."
                )
            return padding.upper()
        given = self._for_all_axes(padding)
        pairs = [each if isinstance(each, Sequence) else (each, each) for each in given]
        numbers = [number for pair in pairs for number in pair]
        is_good = all(isinstance(number, int | np.integer) for number in numbers)
        if not is_good or [len(pair) for pair in pairs] != [2] * axes:
            raise StructureError(
                f"{where(self)}: `padding` must be one of "
                f"{', '.join(NAMES + OWN_NAMES)}, a number, or a number or pair for "
                f"each of the {axes} window axes; got {padding!r}."
            )
        return [(int(before), int(after)) for before, after in pairs]


class Conv(Convolution):
    """Convolve the inputs with a kernel: a weighted sum of each window of them.

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
        dtype: The dtype to compute in; without it, the one that inputs and parameters
            promote to.
        param_dtype: The dtype of the parameters.
        precision: As for `jax.lax.conv_general_dilated`.
        kernel_init: The initializer of the kernel.
        bias_init: The initializer of the bias.
        conv_general_dilated: What to compute with, called as
            `jax.lax.conv_general_dilated`.
        promote_dtype: What brings inputs and parameters to one dtype, called as
            `promote_dtype`.
        preferred_element_type: As for `jax.lax.conv_general_dilated`.
        rngs: Random streams; `params` gives one key to each parameter.
        kernel_metadata: Metadata of the kernel, such as `out_sharding`.
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
        sizes = check_sizes(self, in_features=in_features, out_features=out_features)
        (groups,) = check_sizes(self, feature_group_count=feature_group_count)
        if groups < 1 or any(size % groups for size in sizes):
            raise StructureError(
                f"Conv: feature_group_count={groups} must divide in_features="
                f"{in_features} and out_features={out_features}."
            )
        self._set_up(locals(), sizes, (sizes[0] // groups, sizes[1]))
        self.input_dilation = as_static(input_dilation)
        self.feature_group_count = groups
        self.conv_general_dilated = conv_general_dilated

    def __call__(self, inputs: Array, out_sharding: Any = None) -> jax.Array:
        """Convolve `inputs`.

        Args:
            inputs: `[batch..., window axes..., in_features]`.
            out_sharding: The sharding of the result, on an explicit mesh.
        """
        groups = self.feature_group_count
        (inputs, kernel, bias), batch = self._prepared(inputs, groups=groups)
        inputs, padding = self._padded(inputs)
        axes = len(self.kernel_size)
        order = (0, axes + 1, *range(1, axes + 1))
        kernel_order = (axes + 1, axes, *range(axes))
        outputs = self.conv_general_dilated(
            inputs,
            kernel,
            self._per_axis("strides"),
            padding,
            lhs_dilation=self._per_axis("input_dilation"),
            rhs_dilation=self._per_axis("kernel_dilation"),
            dimension_numbers=lax.ConvDimensionNumbers(order, kernel_order, order),
            feature_group_count=groups,
            **self._options(out_sharding),
        )
        return self._finished(outputs, bias, batch)

    def _padded(self, inputs: jax.Array) -> tuple[jax.Array, Any]:
        """Pad in ways that JAX does not know; also return the padding left to it."""
        padding, dilation = self._checked_padding(), self._per_axis("kernel_dilation")
        if padding not in OWN_NAMES:
            return inputs, padding
        spans = [d * (k - 1) for k, d in zip(self.kernel_size, dilation)]
        if padding == "CAUSAL":
            return jnp.pad(inputs, [(0, 0), (spans[0], 0), (0, 0)]), "VALID"
        pairs = [(0, 0), *((s // 2, (s + 1) // 2) for s in spans), (0, 0)]
        mode = "wrap" if padding == "CIRCULAR" else "reflect"
        return jnp.pad(inputs, pairs, mode=mode), "VALID"


class ConvTranspose(Convolution):
    """Convolve transposed: each input element paints a window of the outputs.

    Args:
        in_features: The channels of the inputs.
        out_features: The channels of the outputs.
        kernel_size: The size of the window on each axis; one number for one axis.
        strides: How far apart the windows are painted.
        padding: `"SAME"`, `"VALID"`, `"CIRCULAR"` (what is painted beyond the edges is
            folded onto the other side), `"CAUSAL"` (one axis; what would be painted
            beyond the end is dropped), a number, or numbers or pairs by axis.
        kernel_dilation: How far apart the window's elements are.
        use_bias: Whether to add a bias.
        mask: What the kernel is multiplied with, of its shape; fixed.
        dtype: The dtype to compute in; without it, the one that inputs and parameters
            promote to.
        param_dtype: The dtype of the parameters.
        precision: As for `jax.lax.conv_transpose`.
        kernel_init: The initializer of the kernel.
        bias_init: The initializer of the bias.
        transpose_kernel: Whether to be the very transpose of `Conv`: windows mirrored,
            and a kernel of `[window axes..., out, in]`.
        promote_dtype: What brings inputs and parameters to one dtype, called as
            `promote_dtype`.
        preferred_element_type: As for `jax.lax.conv_transpose`.
        rngs: Random streams; `params` gives one key to each parameter.
        kernel_metadata: Metadata of the kernel, such as `out_sharding`.
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
        sizes = check_sizes(self, in_features=in_features, out_features=out_features)
        self._set_up(locals(), sizes, sizes[::-1] if transpose_kernel else sizes)
        self.transpose_kernel = transpose_kernel

    def __call__(self, inputs: Array) -> jax.Array:
        """Convolve `inputs` transposed.

        Args:
            inputs: `[batch..., window axes..., in_features]`.
        """
        axis = -1 if self.transpose_kernel else -2
        (inputs, kernel, bias), batch = self._prepared(inputs, axis)
        strides, padding = self._per_axis("strides"), self._checked_padding()
        if padding == "REFLECT":
            raise StructureError(
                f"{where(self)}: a transposed convolution cannot pad by REFLECT: there "
                "is nothing to mirror. Use CIRCULAR, SAME or VALID."
            )
        outputs = lax.conv_transpose(
            inputs,
            kernel,
            strides,
            "VALID" if padding in OWN_NAMES else padding,
            rhs_dilation=self._per_axis("kernel_dilation"),
            transpose_kernel=self.transpose_kernel,
            **self._options(),
        )
        periods = [size * s for size, s in zip(inputs.shape[1:-1], strides)]
        if padding == "CAUSAL":
            outputs = outputs[:, : periods[0]]
        elif padding == "CIRCULAR":
            for axis, period in enumerate(periods, 1):
                outputs = self._folded(outputs, axis, period)
        return self._finished(outputs, bias, batch)

    def _folded(self, outputs: jax.Array, axis: int, period: int) -> jax.Array:
        """Add what is painted beyond an edge on the other side, and centre the rest."""
        beyond = outputs.shape[axis] - period
        pairs = [(0, 0)] * outputs.ndim
        pairs[axis] = (0, -beyond % period)
        outputs = jnp.pad(outputs, pairs)
        shape = list(outputs.shape)
        shape[axis : axis + 1] = [-1, period]
        outputs = jnp.sum(jnp.reshape(outputs, shape), axis=axis)
        before = (beyond + 1) // 2 if self.transpose_kernel else beyond // 2
        return jnp.roll(outputs, -before, axis=axis)
