# SPDX-License-Identifier: Apache-2.0
"""Normalising layers over part of an element: groups of channels, or each channel.

Both take moments over the axes between batch and features; see `normalization`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treetap._core.errors import StructureError
from treetap._modules.random_streams import Rngs
from treetap._nn.dtypes import promote_dtype as default_promote
from treetap._nn.moments import checked_mask, moments, wide
from treetap._nn.normalization import Axes, Normalizing, fixed, fixed_groups
from treetap._nn.parameters import (
    NO_METADATA,
    Array,
    Dtype,
    Initializer,
    Metadata,
    Promote,
    canonical_axes,
    check_features,
    check_sizes,
    text_of,
    where,
)
from treetap.initializers import ones, zeros


class GroupNorm(Normalizing):
    """Normalises groups of features of each element of the batch.

    Args:
        num_features: The number of features, on the last axis.
        num_groups: The number of groups; None if `group_size` is given.
        group_size: The features of a group; None if `num_groups` is given.
        epsilon: This and those that follow, as for `LayerNorm`.
        dtype: The dtype of the outputs.
        param_dtype: The dtype of the parameters.
        use_bias: Whether to add a bias.
        use_scale: Whether to multiply by a scale.
        bias_init: The initializer of the bias.
        scale_init: The initializer of the scale.
        reduction_axes: The axes to take moments over, besides the features of a group;
            all but the first without it.
        axis_name: An axis of a surrounding `vmap` or `shard_map`.
        axis_index_groups: Which of its indices belong together.
        use_fast_variance: How the variance is taken.
        promote_dtype: A replacement decides the dtype of the outputs.
        rngs: Random streams.
        bias_metadata: Metadata of the bias.
        scale_metadata: Metadata of the scale.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> layer = tt.GroupNorm(4, num_groups=2, rngs=tt.Rngs(0))
        >>> layer(jnp.array([[1.0, 3.0, 10.0, 30.0]])).round(2)
        Array([[-1.,  1., -1.,  1.]], dtype=float32)
    """

    def __init__(
        self,
        num_features: int,
        num_groups: int | None = 32,
        group_size: int | None = None,
        *,
        epsilon: float = 1e-6,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = zeros,
        scale_init: Initializer = ones,
        reduction_axes: Axes | None = None,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: Promote = default_promote,
        rngs: Rngs,
        bias_metadata: Metadata = NO_METADATA,
        scale_metadata: Metadata = NO_METADATA,
    ):
        (num_features,) = check_sizes(self, num_features=num_features)
        groups, size = _groups(num_features, num_groups, group_size)
        self.feature_axis = -1
        self.num_groups = groups
        self.group_size = size
        self.epsilon = float(epsilon)
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.use_bias = use_bias
        self.use_scale = use_scale
        self.reduction_axes = None if reduction_axes is None else fixed(reduction_axes)
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
            x: An array with the features on its last axis, after a batch axis.
            mask: Which elements count.
        """
        inputs = wide(x)
        check_features(self, inputs, self.num_groups * self.group_size)
        if self.reduction_axes is None:
            axes = tuple(range(1, inputs.ndim))
        else:
            axes = canonical_axes(self, self.reduction_axes, inputs.ndim)
        if inputs.ndim < 2:
            raise StructureError(
                f"{where(self)}: expected a batch axis before the features, got "
                f"{text_of(inputs)}."
            )
        counted = checked_mask(self, mask, inputs.shape)
        split = (*inputs.shape[:-1], self.num_groups, self.group_size)
        grouped = jnp.reshape(inputs, split)
        if counted is not None:
            counted = jnp.reshape(counted, split)
        last = inputs.ndim - 1
        taken = [*(axis for axis in axes if axis != last), last + 1]
        mean, var = moments(grouped, taken, self._across(), counted)
        shape = (1,) * last + (self.num_groups, self.group_size)
        out = self._normalized(grouped, mean, var, x, shape)
        return jnp.reshape(out, inputs.shape)


def _groups(features: int, groups: int | None, size: int | None) -> tuple[int, int]:
    """The number of groups, and their size."""
    if (groups is None) == (size is None):
        raise StructureError(
            f"GroupNorm: give either `num_groups` or `group_size`, the other as None; "
            f"got num_groups={groups}, group_size={size}."
        )
    number: Any = size if groups is None else groups
    name = "group_size" if groups is None else "num_groups"
    is_whole = isinstance(number, int | np.integer)
    if not is_whole or number < 1 or features % number:
        raise StructureError(
            f"GroupNorm: {name}={number} does not divide num_features={features}."
        )
    other = features // int(number)
    return (int(number), other) if size is None else (other, int(number))


class InstanceNorm(Normalizing):
    """Normalises each feature of each element of the batch over the other axes.

    Args:
        num_features: This and those that follow, as for `LayerNorm`.
        epsilon: Added to the variance.
        dtype: The dtype of the outputs.
        param_dtype: The dtype of the parameters.
        use_bias: Whether to add a bias.
        use_scale: Whether to multiply by a scale.
        bias_init: The initializer of the bias.
        scale_init: The initializer of the scale.
        feature_axes: The axes of the features.
        axis_name: An axis of a surrounding `vmap` or `shard_map`.
        axis_index_groups: Which of its indices belong together.
        use_fast_variance: How the variance is taken.
        promote_dtype: A replacement decides the dtype of the outputs.
        rngs: Random streams.
        bias_metadata: Metadata of the bias.
        scale_metadata: Metadata of the scale.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> layer = tt.InstanceNorm(1, rngs=tt.Rngs(0))
        >>> layer(jnp.array([[[1.0], [3.0]]])).round(2)[0, :, 0]
        Array([-1.,  1.], dtype=float32)
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
            x: `[batch, axes..., features]`.
            mask: Which elements count.
        """
        inputs = wide(x)
        features = canonical_axes(self, self.feature_axes, inputs.ndim)
        if 0 in features:
            raise StructureError(
                f"{where(self)}: the first axis is the batch and cannot hold features, "
                f"but feature_axes={self.feature_axes} of {text_of(x)}."
            )
        shape = self._feature_shape(inputs, features, self.num_features)
        axes = [i for i in range(1, inputs.ndim) if i not in features]
        if not axes:
            raise StructureError(
                f"{where(self)}: {text_of(x)} has no axis between batch and features "
                "to normalise over."
            )
        counted = checked_mask(self, mask, inputs.shape)
        mean, var = moments(inputs, axes, self._across(), counted)
        return self._normalized(inputs, mean, var, x, shape)
