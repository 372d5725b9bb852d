# SPDX-License-Identifier: Apache-2.0
"""Normalising layers: batch, layer, root-mean-square, group, instance.

All divide by moments (see `moments`) in float32 or wider, multiply by a scale and add a
bias, and only then go back to the dtype asked for. `LayerNorm` tells what the common
arguments mean.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from treetap._core.errors import StructureError
from treetap._core.variables.kinds import BatchStat
from treetap._modules.module import Module
from treetap._modules.random_streams import Rngs
from treetap._nn.dtypes import common_dtype
from treetap._nn.dtypes import promote_dtype as default_promote
from treetap._nn.moments import Across, checked_mask, mean_square, moments, wide
from treetap._nn.parameters import (
    NO_METADATA,
    Array,
    Dtype,
    Initializer,
    Metadata,
    Promote,
    absent,
    as_tuple,
    canonical_axes,
    check_features,
    check_sizes,
    parameter,
    text_of,
    value_of,
    where,
)
from treetap.initializers import ones, zeros

Axes = int | Sequence[int]


class Normalizing(Module):
    """Base of layers that normalise: the parameters, and the last steps."""

    scale: Any
    bias: Any
    dtype: Any
    param_dtype: Any
    epsilon: float
    axis_name: Any
    axis_index_groups: Any
    use_fast_variance: bool
    promote_dtype: Promote

    def _make(
        self,
        num_features: int,
        scale: tuple[bool, Initializer, Metadata],
        bias: tuple[bool, Initializer, Metadata],
        rngs: Any,
    ) -> None:
        """Makes scale and bias, in this order."""
        dtype = self.param_dtype
        for name, (used, init, metadata) in (("scale", scale), ("bias", bias)):
            made = absent()
            if used:
                shape = (num_features,)
                made = parameter(self, name, init, shape, dtype, rngs, metadata)
            setattr(self, name, made)

    def _across(self) -> Across:
        """How to take moments."""
        return Across(self.axis_name, self.axis_index_groups, self.use_fast_variance)

    def _normalized(
        self, x: jax.Array, mean: Any, var: jax.Array, inputs: Any, shape: Any
    ) -> jax.Array:
        """The steps after the moments.

        Args:
            x: The inputs in the dtype of the moments.
            mean: The mean, or None for zero.
            var: The variance.
            inputs: The inputs as they were given.
            shape: The shape of scale and bias against `x`.
        """
        scale, bias = value_of(self.scale), value_of(self.bias)
        dtype = self._result_dtype((inputs, scale, bias))
        factor = lax.rsqrt(var + jnp.asarray(self.epsilon, var.dtype))
        if scale is not None:
            factor = factor * jnp.reshape(scale.astype(factor.dtype), shape)
        y = (x if mean is None else x - mean) * factor
        if bias is not None:
            y = y + jnp.reshape(bias.astype(y.dtype), shape)
        return y.astype(dtype)

    def _result_dtype(self, values: tuple[Any, ...]) -> Any:
        """The dtype of the outputs; a replacement of `promote_dtype` decides it."""
        if self.promote_dtype is not default_promote:
            return self.promote_dtype(values, dtype=self.dtype)[0].dtype
        return common_dtype(values) if self.dtype is None else self.dtype

    def _feature_shape(self, x: jax.Array, axes: Axes, features: int) -> Any:
        """The shape of scale and bias against `x`: its feature axes."""
        taken = canonical_axes(self, axes, x.ndim)
        shape = [size if i in taken else 1 for i, size in enumerate(x.shape)]
        if math.prod(shape) != features:
            raise StructureError(
                f"{where(self)}: expected {features} features on axis {axes}, got "
                f"{text_of(x)}."
            )
        return shape


def fixed_groups(groups: Any) -> Any:
    """Groups of indices, as a static attribute can hold them."""
    return None if groups is None else tuple(map(tuple, groups))


class BatchNorm(Normalizing):
    """Normalises each feature over the batch, and remembers the moments to evaluate.

    Args:
        num_features: The number of features.
        use_running_average: Whether to use the moments remembered instead of those of
            the batch; `view`, `train` and `eval` set it.
        axis: The axis of the features.
        momentum: The share of the old in the remembered moments after a batch.
        epsilon: This and those that follow, as for `LayerNorm`.
        dtype: The dtype of the outputs.
        param_dtype: The dtype of the parameters.
        use_bias: Whether to add a bias.
        use_scale: Whether to multiply by a scale.
        bias_init: The initializer of the bias.
        scale_init: The initializer of the scale.
        axis_name: An axis of a surrounding `vmap` or `shard_map`.
        axis_index_groups: Which of its indices belong together.
        use_fast_variance: How the variance is taken.
        promote_dtype: A replacement decides the dtype of the outputs.
        rngs: Random streams.
        bias_metadata: Metadata of the bias.
        scale_metadata: Metadata of the scale.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> layer = tt.BatchNorm(2, momentum=0.9, rngs=tt.Rngs(0))
        >>> layer(jnp.array([[1.0, 2.0], [3.0, 6.0]])).round(2)
        Array([[-1., -1.],
               [ 1.,  1.]], dtype=float32)
        >>> layer.mean[...]
        Array([0.2, 0.4], dtype=float32)
    """

    def __init__(
        self,
        num_features: int,
        *,
        use_running_average: bool | None = False,
        axis: int = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-5,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = zeros,
        scale_init: Initializer = ones,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: Promote = default_promote,
        rngs: Rngs,
        bias_metadata: Metadata = NO_METADATA,
        scale_metadata: Metadata = NO_METADATA,
    ):
        (num_features,) = check_sizes(self, num_features=num_features)
        stored = jnp.promote_types(jnp.float32, param_dtype)
        self.mean = BatchStat(jnp.zeros((num_features,), stored))
        self.var = BatchStat(jnp.ones((num_features,), stored))
        self.num_features = num_features
        self.use_running_average = use_running_average
        if not isinstance(axis, int | np.integer):
            raise StructureError(
                f"BatchNorm: `axis` is the one axis of the features, not {axis!r}."
            )
        self.axis = int(axis)
        self.momentum = float(momentum)
        self.epsilon = float(epsilon)
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.use_bias = use_bias
        self.use_scale = use_scale
        self.axis_name = axis_name
        self.axis_index_groups = fixed_groups(axis_index_groups)
        self.use_fast_variance = use_fast_variance
        self.promote_dtype = promote_dtype
        scale = (use_scale, scale_init, scale_metadata)
        bias = (use_bias, bias_init, bias_metadata)
        self._make(num_features, scale, bias, rngs)

    def __call__(
        self,
        x: Array,
        use_running_average: bool | None = None,
        *,
        mask: Array | None = None,
    ) -> jax.Array:
        """The normalised `x`; in training, the remembered moments move.

        Args:
            x: An array with the features on `axis`.
            use_running_average: Instead of the layer's own.
            mask: Which elements count.
        """
        if use_running_average is None:
            use_running_average = self.use_running_average
        if use_running_average is None:
            raise StructureError(
                f"{where(self)}: `use_running_average` is given neither to the layer "
                "nor to the call. Use `train()`, `eval()` or `view(...)`."
            )
        check_features(self, x, self.num_features, self.axis)
        inputs = wide(x)
        (axis,) = canonical_axes(self, self.axis, inputs.ndim)
        shape = [1] * inputs.ndim
        shape[axis] = self.num_features
        if use_running_average:
            mean = jnp.reshape(self.mean.get_value().astype(inputs.dtype), shape)
            var = jnp.reshape(self.var.get_value().astype(inputs.dtype), shape)
        else:
            axes = [i for i in range(inputs.ndim) if i != axis]
            counted = checked_mask(self, mask, inputs.shape)
            mean, var = moments(inputs, axes, self._across(), counted)
            self._remember(mean, var)
        return self._normalized(inputs, mean, var, x, shape)

    def _remember(self, mean: jax.Array, var: jax.Array) -> None:
        share = self.momentum
        for stat, new in ((self.mean, mean), (self.var, var)):
            old = stat.get_value()
            batch = lax.stop_gradient(jnp.reshape(new, old.shape)).astype(old.dtype)
            stat.set_value(share * old + (1 - share) * batch)

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Sets the mode of a view.

        Args:
            use_running_average: Whether to use the moments remembered.
        """
        if use_running_average is not None:
            self.use_running_average = use_running_average


class LayerNorm(Normalizing):
    """Normalises the features of each element of the batch.

    Args:
        num_features: The number of features: the product of the feature axes.
        epsilon: Added to the variance.
        dtype: The dtype of the outputs; without it, the one that inputs and parameters
            promote to. Moments are in float32 or wider.
        param_dtype: The dtype of the parameters.
        use_bias: Whether to add a bias.
        use_scale: Whether to multiply by a scale.
        bias_init: The initializer of the bias.
        scale_init: The initializer of the scale.
        reduction_axes: The axes to take moments over.
        feature_axes: The axes that scale and bias are for.
        axis_name: An axis of a surrounding `vmap` or `shard_map` to take moments over
            as well.
        axis_index_groups: Which of its indices belong together.
        use_fast_variance: Whether to take the variance from the mean square, in one
            pass, instead of from the deviations.
        promote_dtype: A replacement decides the dtype of the outputs.
        rngs: Random streams; `params` gives one key to each parameter.
        bias_metadata: Metadata of the bias.
        scale_metadata: Metadata of the scale.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> layer = tt.LayerNorm(2, rngs=tt.Rngs(0))
        >>> layer(jnp.array([[1.0, 3.0]])).round(2)
        Array([[-1.,  1.]], dtype=float32)
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = zeros,
        scale_init: Initializer = ones,
        reduction_axes: Axes = -1,
        feature_axes: Axes = -1,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: Promote = default_promote,
        rngs: Rngs,
        bias_metadata: Metadata = NO_METADATA,
        scale_metadata: Metadata = NO_METADATA,
    ):
        (num_features,) = check_sizes(self, num_features=num_features)
        self.num_features = num_features
        self.epsilon = float(epsilon)
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.use_bias = use_bias
        self.use_scale = use_scale
        self.reduction_axes = fixed(reduction_axes)
        self.feature_axes = fixed(feature_axes)
        self.axis_name = axis_name
        self.axis_index_groups = fixed_groups(axis_index_groups)
        self.use_fast_variance = use_fast_variance
        self.promote_dtype = promote_dtype
        scale = (use_scale, scale_init, scale_metadata)
        bias = (use_bias, bias_init, bias_metadata)
        self._make(num_features, scale, bias, rngs)

    def __call__(self, x: Array, *, mask: Array | None = None) -> jax.Array:
        """The normalised `x`.

        Args:
            x: An array with the features on the feature axes.
            mask: Which elements count.
        """
        inputs = wide(x)
        shape = self._feature_shape(inputs, self.feature_axes, self.num_features)
        axes = canonical_axes(self, self.reduction_axes, inputs.ndim)
        counted = checked_mask(self, mask, inputs.shape)
        mean, var = moments(inputs, axes, self._across(), counted)
        return self._normalized(inputs, mean, var, x, shape)


def fixed(axes: Axes) -> Axes:
    """Axes, as a static attribute can hold them."""
    return int(axes) if isinstance(axes, int | np.integer) else as_tuple(axes)


class RMSNorm(Normalizing):
    """Divides the features of each element of the batch by their root mean square.

    Args:
        num_features: This and those that follow, as for `LayerNorm`.
        epsilon: Added to the mean square.
        dtype: The dtype of the outputs.
        param_dtype: The dtype of the parameters.
        use_scale: Whether to multiply by a scale.
        scale_init: The initializer of the scale.
        reduction_axes: The axes to take the mean over.
        feature_axes: The axes that the scale is for.
        axis_name: An axis of a surrounding `vmap` or `shard_map`.
        axis_index_groups: Which of its indices belong together.
        use_fast_variance: Of no effect: there is one way.
        promote_dtype: A replacement decides the dtype of the outputs.
        rngs: Random streams.
        scale_metadata: Metadata of the scale.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> tt.RMSNorm(2, rngs=tt.Rngs(0))(jnp.array([[3.0, 3.0]])).round(2)
        Array([[1., 1.]], dtype=float32)
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_scale: bool = True,
        scale_init: Initializer = ones,
        reduction_axes: Axes = -1,
        feature_axes: Axes = -1,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: Promote = default_promote,
        rngs: Rngs,
        scale_metadata: Metadata = NO_METADATA,
    ):
        (num_features,) = check_sizes(self, num_features=num_features)
        self.num_features = num_features
        self.epsilon = float(epsilon)
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.use_scale = use_scale
        self.reduction_axes = fixed(reduction_axes)
        self.feature_axes = fixed(feature_axes)
        self.axis_name = axis_name
        self.axis_index_groups = fixed_groups(axis_index_groups)
        self.use_fast_variance = use_fast_variance
        self.promote_dtype = promote_dtype
        scale = (use_scale, scale_init, scale_metadata)
        self._make(num_features, scale, (False, zeros, NO_METADATA), rngs)

    def __call__(self, x: Array, mask: Array | None = None) -> jax.Array:
        """The normalised `x`.

        Args:
            x: An array with the features on the feature axes.
            mask: Which elements count.
        """
        inputs = wide(x)
        shape = self._feature_shape(inputs, self.feature_axes, self.num_features)
        axes = canonical_axes(self, self.reduction_axes, inputs.ndim)
        counted = checked_mask(self, mask, inputs.shape)
        square = mean_square(inputs, axes, self._across(), counted)
        return self._normalized(inputs, None, square, x, shape)
