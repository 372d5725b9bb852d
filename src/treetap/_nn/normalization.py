# SPDX-License-Identifier: Apache-2.0
"""Normalization: layers that bring features to mean 0 and variance 1.

Batch, layer, root-mean-square, group and instance normalization differ in the axes they
take moments over. All take them in float32 or wider, whatever the inputs are, and, if
asked, over a named axis of a mapping as well. They divide, multiply by a scale and add
a bias in that dtype, and only then go back to the dtype asked for.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from treetap._core.errors import StructureError
from treetap._core.variables.kinds import BatchStat, Param
from treetap._core.wording import typed
from treetap._modules.random_streams import Rngs
from treetap._nn.dtypes import common_dtype
from treetap._nn.dtypes import promote_dtype as default_promote
from treetap._nn.parameters import (
    NO_METADATA,
    Arguments,
    Array,
    Dtype,
    Initializer,
    Layer,
    Metadata,
    Promote,
    as_static,
    broadcastable,
    canonical_axes,
    check_features,
    check_sizes,
    held,
    is_positive,
    mode_of_call,
    sizes_of,
    where,
)
from treetap.initializers import ones, zeros

Axes = int | Sequence[int]


def wide(x: Any) -> jax.Array:
    """Return the array in float32, or in what is wider."""
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def checked_mask(layer: Any, mask: Any, shape: tuple[int, ...]) -> Any:
    """Return a mask of the elements that count, of the shape of the inputs."""
    if mask is None:
        return None
    mask = jnp.asarray(mask)
    if mask.dtype != jnp.bool_:
        raise StructureError(
            f"{where(layer)}: `mask` must be boolean, it says which elements count; "
            f"got {typed(mask)}."
        )
    mask = broadcastable(layer, "mask", mask, "the inputs", shape)
    return jnp.broadcast_to(mask, shape)


def _square(x: jax.Array) -> jax.Array:
    """Return squares; of complex numbers, those of their lengths."""
    return jnp.square(jnp.abs(x)) if jnp.iscomplexobj(x) else jnp.square(x)


def _mean(x: jax.Array, axes: Sequence[int], mask: Any) -> jax.Array:
    """Return the mean of what counts over axes, which stay with size 1."""
    return jnp.mean(x, axis=tuple(axes), keepdims=True, where=mask)


class Normalizing(Layer):
    """Base of layers that normalize: how moments are taken, and what follows them."""

    # What a replaced `promote_dtype` is called with, after the inputs, as NNX does.
    _promoted_together = ("scale", "bias")

    feature_axes: int | tuple[int, ...]  # but for `BatchNorm` and `GroupNorm`
    reduction_axes: Any  # of `LayerNorm`, `RMSNorm` and `GroupNorm`
    scale: Param[Any] | None
    bias: Param[Any] | None

    def _set_up(self, arguments: Arguments) -> None:
        """Keep how to take moments, as static attributes; make scale and bias."""
        features = check_sizes(self, num_features=arguments["num_features"])
        (self.num_features,) = features
        for name in ("reduction_axes", "feature_axes"):
            if name in arguments:
                setattr(self, name, as_static(arguments[name]))
        self.use_scale: bool = arguments["use_scale"]
        self.epsilon = float(arguments["epsilon"])
        self.axis_name: str | None = arguments["axis_name"]
        self.axis_index_groups: Any = as_static(arguments["axis_index_groups"])
        self.use_fast_variance: bool = arguments["use_fast_variance"]
        bias = features if "use_bias" in arguments else None
        self._make_parameters(arguments, scale=features, bias=bias)

    def _over_mapping(self, *means: jax.Array) -> list[jax.Array]:
        """Return means over the named axis as well, in one collective."""
        if self.axis_name is None:
            return list(means)
        stacked, groups = jnp.stack(means), self.axis_index_groups
        return list(lax.pmean(stacked, self.axis_name, axis_index_groups=groups))

    def _moments(self, x: jax.Array, axes: Sequence[int], mask: Any) -> list[Any]:
        """Return mean and biased variance over axes, which stay with size 1.

        The fast variance is the mean square less the square of the mean: one pass over
        the array, and one collective. Rounding may leave it below 0, where there is no
        variance, so it is cut off there.
        """
        mean = _mean(x, axes, mask)
        if self.use_fast_variance:
            mean, square = self._over_mapping(mean, _mean(_square(x), axes, mask))
            return [mean, jnp.maximum(0.0, square - _square(mean))]
        (mean,) = self._over_mapping(mean)
        return [mean, *self._over_mapping(_mean(_square(x - mean), axes, mask))]

    def _normalized_over(
        self, inputs: Array, reduced: Axes, features: Axes, mask: Any
    ) -> jax.Array:
        """Normalize inputs by their moments over axes.

        Args:
            inputs: The inputs, as they were given.
            reduced: The axes to take moments over.
            features: The axes that scale and bias are for.
            mask: Which elements count.
        """
        x = wide(inputs)
        shape = self._feature_shape(x, features)
        axes = canonical_axes(self, reduced, x.ndim)
        counted = checked_mask(self, mask, x.shape)
        return self._normalized(x, self._moments(x, axes, counted), inputs, shape)

    def _normalized(
        self, x: jax.Array, moments: list[Any], inputs: Array, shape: Sequence[int]
    ) -> jax.Array:
        """Subtract the mean, divide by the deviation, scale, add the bias, and cast.

        Args:
            x: The inputs in the dtype of the moments.
            moments: The mean, or None for zero, and the variance.
            inputs: The inputs as they were given.
            shape: The shape of scale and bias against `x`.
        """
        mean, var = moments
        scale, bias = held(self.scale), held(self.bias)
        dtype = self._result_dtype(inputs, scale, bias)
        factor = lax.rsqrt(var + jnp.asarray(self.epsilon, var.dtype))
        if scale is not None:
            factor = factor * jnp.reshape(jnp.asarray(scale, factor.dtype), shape)
        y = (x if mean is None else x - mean) * factor
        if bias is not None:
            y = y + jnp.reshape(jnp.asarray(bias, y.dtype), shape)
        return y.astype(dtype)

    def _result_dtype(self, *values: Any) -> Dtype:
        """Return the dtype of the outputs; a replaced `promote_dtype` decides it."""
        if self.promote_dtype is not default_promote:
            others = (held(getattr(self, name)) for name in self._promoted_together)
            given = (values[0], *others)
            return self.promote_dtype(given, dtype=self.dtype)[0].dtype
        return common_dtype(values) if self.dtype is None else self.dtype

    def _feature_shape(self, x: jax.Array, axes: Axes) -> list[int]:
        """Return the shape of scale and bias against `x`: that of its feature axes."""
        taken = canonical_axes(self, axes, x.ndim)
        shape = [size if i in taken else 1 for i, size in enumerate(x.shape)]
        for parameter in (held(self.scale), held(self.bias)):
            features = math.prod(sizes_of(parameter, (math.prod(shape),)))
            if parameter is not None and math.prod(shape) != features:
                raise StructureError(
                    f"{where(self)}: expected {features} features on axis {axes}, got "
                    f"{typed(x)}."
                )
        return shape


class BatchNorm(Normalizing):
    """Normalize each feature over the batch, and remember the moments to evaluate.

    Args:
        num_features: The number of features.
        use_running_average: Whether to use the moments remembered instead of those of
            the batch; `view`, `train` and `eval` set it.
        axis: The axis of the features.
        momentum: The share of the old in the remembered moments after a batch.
        epsilon: Added to the variance.
        dtype: The dtype of the outputs; without it, the one that inputs and parameters
            promote to. Moments are in float32 or wider.
        param_dtype: The dtype of the parameters.
        use_bias: Whether to add a bias.
        use_scale: Whether to multiply by a scale.
        bias_init: The initializer of the bias.
        scale_init: The initializer of the scale.
        axis_name: An axis of a surrounding `vmap` or `shard_map` to take moments over
            as well.
        axis_index_groups: Which of its indices belong together.
        use_fast_variance: Whether to take the variance from the mean square, in one
            pass, instead of from the deviations.
        promote_dtype: What says to which dtype inputs and parameters promote, called as
            `promote_dtype`; one of your own decides the dtype of the outputs.
        rngs: Random streams; `params` gives one key to each parameter.
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

    _promoted_together = ("mean", "var", "scale", "bias")

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
        if not isinstance(axis, int | np.integer):
            raise StructureError(
                f"BatchNorm: `axis` must be the one axis of the features, got {axis!r}."
            )
        self.axis = int(axis)
        self.momentum = float(momentum)
        self.use_running_average = use_running_average
        self._set_up(locals())
        stored = jnp.promote_types(jnp.float32, param_dtype)
        self.mean = BatchStat(jnp.zeros(self.num_features, stored))
        self.var = BatchStat(jnp.ones(self.num_features, stored))

    def __call__(
        self,
        x: Array,
        use_running_average: bool | None = None,
        *,
        mask: Array | None = None,
    ) -> jax.Array:
        """Normalize `x`; in training, move the remembered moments.

        Args:
            x: An array with the features on `axis`.
            use_running_average: Instead of the layer's own.
            mask: Which elements count.
        """
        use_average = mode_of_call(self, "use_running_average", use_running_average)
        features = sizes_of(held(self.mean), (self.num_features,))[0]
        check_features(self, x, features, self.axis)
        inputs = wide(x)
        shape = self._feature_shape(inputs, self.axis)
        if use_average:
            remembered = (held(self.mean), held(self.var))
            moments = [jnp.reshape(n.astype(inputs.dtype), shape) for n in remembered]
        else:
            axes = [i for i in range(inputs.ndim) if i != self.axis % inputs.ndim]
            counted = checked_mask(self, mask, inputs.shape)
            moments = self._moments(inputs, axes, counted)
            self._remember(*moments)
        return self._normalized(inputs, moments, x, shape)

    def _remember(self, mean: jax.Array, var: jax.Array) -> None:
        share = self.momentum
        for stat, new in ((self.mean, mean), (self.var, var)):
            old = stat.get_value()
            batch = lax.stop_gradient(jnp.reshape(new, old.shape)).astype(old.dtype)
            stat.set_value(share * old + (1 - share) * batch)

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Set the mode of a view.

        Args:
            use_running_average: Whether to use the moments remembered.
        """
        if use_running_average is not None:
            self.use_running_average = use_running_average


class LayerNorm(Normalizing):
    """Normalize the features of each element of the batch.

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
        promote_dtype: What says to which dtype inputs and parameters promote, called as
            `promote_dtype`; one of your own decides the dtype of the outputs.
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
        self._set_up(locals())

    def __call__(self, x: Array, *, mask: Array | None = None) -> jax.Array:
        """Normalize `x`.

        Args:
            x: An array with the features on the feature axes.
            mask: Which elements count.
        """
        return self._normalized_over(x, self.reduction_axes, self.feature_axes, mask)


class RMSNorm(Normalizing):
    """Divide the features of each element of the batch by their root mean square.

    Args:
        num_features: The number of features: the product of the feature axes.
        epsilon: Added to the mean square.
        dtype: The dtype of the outputs; without it, the one that inputs and parameters
            promote to. Moments are in float32 or wider.
        param_dtype: The dtype of the parameters.
        use_scale: Whether to multiply by a scale.
        scale_init: The initializer of the scale.
        reduction_axes: The axes to take the mean over.
        feature_axes: The axes that the scale is for.
        axis_name: An axis of a surrounding `vmap` or `shard_map` to take moments over
            as well.
        axis_index_groups: Which of its indices belong together.
        use_fast_variance: Of no effect: there is one way.
        promote_dtype: What says to which dtype inputs and parameters promote, called as
            `promote_dtype`; one of your own decides the dtype of the outputs.
        rngs: Random streams; `params` gives one key to each parameter.
        scale_metadata: Metadata of the scale.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> tt.RMSNorm(2, rngs=tt.Rngs(0))(jnp.array([[3.0, 3.0]])).round(2)
        Array([[1., 1.]], dtype=float32)
    """

    _promoted_together = ("scale",)

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
        self._set_up(locals())

    def __call__(self, x: Array, mask: Array | None = None) -> jax.Array:
        """Normalize `x`.

        Args:
            x: An array with the features on the feature axes.
            mask: Which elements count.
        """
        return self._normalized_over(x, self.reduction_axes, self.feature_axes, mask)

    def _moments(self, x: jax.Array, axes: Sequence[int], mask: Any) -> list[Any]:
        """Return no mean, and the mean of the squares, over axes."""
        return [None, *self._over_mapping(_mean(_square(x), axes, mask))]


class GroupNorm(Normalizing):
    """Normalize groups of features of each element of the batch.

    Args:
        num_features: The number of features, on the last axis.
        num_groups: The number of groups; None if `group_size` is given.
        group_size: The features of a group; None if `num_groups` is given.
        epsilon: Added to the variance.
        dtype: The dtype of the outputs; without it, the one that inputs and parameters
            promote to. Moments are in float32 or wider.
        param_dtype: The dtype of the parameters.
        use_bias: Whether to add a bias.
        use_scale: Whether to multiply by a scale.
        bias_init: The initializer of the bias.
        scale_init: The initializer of the scale.
        reduction_axes: The axes to take moments over, besides the features of a group;
            all but the first without it.
        axis_name: An axis of a surrounding `vmap` or `shard_map` to take moments over
            as well.
        axis_index_groups: Which of its indices belong together.
        use_fast_variance: Whether to take the variance from the mean square, in one
            pass, instead of from the deviations.
        promote_dtype: What says to which dtype inputs and parameters promote, called as
            `promote_dtype`; one of your own decides the dtype of the outputs.
        rngs: Random streams; `params` gives one key to each parameter.
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
        (features,) = check_sizes(self, num_features=num_features)
        self.feature_axis = -1
        self.num_groups, self.group_size = _groups(features, num_groups, group_size)
        self._set_up(locals())

    def __call__(self, x: Array, *, mask: Array | None = None) -> jax.Array:
        """Normalize `x`.

        Args:
            x: An array with the features on its last axis, after a batch axis.
            mask: Which elements count.
        """
        inputs = wide(x)
        check_features(self, inputs, self.num_groups * self.group_size)
        last = inputs.ndim - 1
        given = range(1, last) if self.reduction_axes is None else self.reduction_axes
        axes = canonical_axes(self, given, inputs.ndim)
        if inputs.ndim < 2:
            raise StructureError(
                f"{where(self)}: expected a batch axis before the features, got "
                f"{typed(inputs)}."
            )
        counted = checked_mask(self, mask, inputs.shape)
        split = (*inputs.shape[:-1], self.num_groups, self.group_size)
        grouped = jnp.reshape(inputs, split)
        if counted is not None:
            counted = jnp.reshape(counted, split)
        taken = [*(axis for axis in axes if axis != last), last + 1]
        means = self._moments(grouped, taken, counted)
        moments = [jnp.repeat(m.squeeze(-1), self.group_size, last) for m in means]
        return self._normalized(inputs, moments, x, (1,) * last + (-1,))


def _groups(features: int, groups: int | None, size: int | None) -> tuple[int, int]:
    """Return the number of groups, and their size."""
    if (groups is None) == (size is None):
        raise StructureError(
            f"GroupNorm: give either `num_groups` or `group_size`, the other as None; "
            f"got num_groups={groups}, group_size={size}."
        )
    name, number = ("num_groups", groups) if size is None else ("group_size", size)
    if not is_positive(number) or features % number:
        raise StructureError(
            f"GroupNorm: {name}={number} does not divide num_features={features}."
        )
    other = features // int(number)
    return (int(number), other) if size is None else (other, int(number))


class InstanceNorm(Normalizing):
    """Normalize each feature of each element of the batch over the other axes.

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
        feature_axes: The axes that scale and bias are for.
        axis_name: An axis of a surrounding `vmap` or `shard_map` to take moments over
            as well.
        axis_index_groups: Which of its indices belong together.
        use_fast_variance: Whether to take the variance from the mean square, in one
            pass, instead of from the deviations.
        promote_dtype: What says to which dtype inputs and parameters promote, called as
            `promote_dtype`; one of your own decides the dtype of the outputs.
        rngs: Random streams; `params` gives one key to each parameter.
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
        self._set_up(locals())

    def __call__(self, x: Array, *, mask: Array | None = None) -> jax.Array:
        """Normalize `x`.

        Args:
            x: `[batch, axes..., features]`.
            mask: Which elements count.
        """
        rank = np.ndim(x)
        features = canonical_axes(self, self.feature_axes, rank)
        if 0 in features:
            raise StructureError(
                f"{where(self)}: the first axis is the batch and cannot hold features, "
                f"but feature_axes={self.feature_axes} of {typed(x)}."
            )
        axes = [axis for axis in range(1, rank) if axis not in features]
        return self._normalized_over(x, axes, self.feature_axes, mask)
