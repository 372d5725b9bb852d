# SPDX-License-Identifier: Apache-2.0
"""Layers that run another with weights made from its own: normalized ones.

The wrapped layer keeps its weights; a call runs a copy that shares everything with it
but the weights that are replaced. So gradients reach the weights, what the layer
writes is kept, and evaluating changes nothing.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from treetap._core.errors import StructureError
from treetap._core.paths import Path
from treetap._core.trees.attributes import data
from treetap._core.trees.build import rebuilt
from treetap._core.trees.filters import Filter, PathContains
from treetap._core.trees.split import state
from treetap._core.trees.state import to_flat_state
from treetap._core.variables.kinds import BatchStat, Param
from treetap._core.variables.variable import Variable
from treetap._modules.module import Module
from treetap._modules.random_streams import Rngs
from treetap._nn.dtypes import promote_dtype as default_promote
from treetap._nn.normalization import wide
from treetap._nn.parameters import (
    Arguments,
    Array,
    Dtype,
    Initializer,
    Layer,
    Promote,
    as_static,
    canonical_axes,
    check_rngs,
    is_positive,
    make_parameter,
    where,
)
from treetap.initializers import normal, ones

KERNELS = PathContains("kernel")


def parameters_of(layer: Any, filter: Filter) -> dict[Path, Variable[Any]]:
    """Return the Variables of a layer that a filter takes, by path, in order."""
    found = to_flat_state(state(layer, filter, graph=True))
    return {path: value for path, value in found if isinstance(value, Variable)}


class Reparametrized(Layer):
    """Base of layers that run another with weights made from its own."""

    def _wrap(self, arguments: Arguments) -> None:
        """Keep the layer, and what its weights are computed in."""
        layer = arguments["layer_instance"]
        if not isinstance(layer, Module) or not callable(layer):
            raise TypeError(
                f"{type(self).__name__}: `layer_instance` must be a Module that can be "
                f"called, got {type(layer).__name__}."
            )
        self.layer_instance = layer
        self.epsilon: float = arguments["epsilon"]
        self._keep_options(arguments)

    def _with_weights(self, weights: dict[int, Variable[Any]]) -> Any:
        """Return a copy of the layer that shares its Variables, except some weights.

        Args:
            weights: What stands in the place of a Variable, by the identity of that.
        """

        def weight(variable: Variable[Any]) -> Variable[Any]:
            return weights.get(id(variable), variable)

        layer = self.layer_instance
        copy = rebuilt(layer, True, type(self).__name__, variable=weight)
        copy._pytree__place[:2] = layer._pytree__place[:2]  # it stands where that does
        return copy


def _unit(x: jax.Array, epsilon: float, axes: Any = None) -> jax.Array:
    """Divide `x` by its length over axes."""
    length = jnp.sum(jnp.square(jnp.abs(x)), axis=axes, keepdims=True)
    return x * lax.rsqrt(length + jnp.asarray(epsilon, length.dtype))


class SpectralNorm(Reparametrized):
    """Run a layer with its weights divided by their largest singular value.

    The value is found by power iteration, a few steps in every call, from where the
    call before left off.

    Args:
        layer_instance: The layer.
        n_steps: The steps of a call.
        epsilon: Added to lengths that are divided by.
        dtype: The dtype of the weights that the layer runs with; their own without it.
        param_dtype: The dtype of what is remembered.
        error_on_non_matrix: Whether weights of more than two axes are refused, instead
            of flattened to matrices.
        update_stats: Whether a call keeps what it found; `train`, `eval` and `view` set
            it, as `use_running_average`.
        rngs: Random streams.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> rngs = tt.Rngs(0)
        >>> layer = tt.SpectralNorm(tt.Linear(3, 4, rngs=rngs), n_steps=50, rngs=rngs)
        >>> y = layer(jnp.ones((1, 3)))
        >>> kernel = layer.layer_instance.kernel[...]
        >>> largest = jnp.linalg.norm(kernel, 2)
        >>> bool(abs(layer.batch_stats["kernel", "sigma"][...] - largest) < 1e-4)
        True
    """

    def __init__(
        self,
        layer_instance: Any,
        *,
        n_steps: int = 1,
        epsilon: float = 1e-12,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        error_on_non_matrix: bool = False,
        update_stats: bool = True,
        rngs: Rngs,
    ):
        self._wrap(locals())
        if not is_positive(n_steps):
            raise StructureError(
                f"SpectralNorm: `n_steps` must be a positive integer, got {n_steps!r}."
            )
        self.n_steps = int(n_steps)
        self.error_on_non_matrix = error_on_non_matrix
        self.use_running_average = not update_stats
        stats: dict[Path, Any] = {}
        begin = normal(stddev=0.01)
        for path, variable in parameters_of(layer_instance, Param).items():
            if variable.ndim >= 2:
                key = check_rngs(self, rngs).params()
                shape = (1, variable.shape[-1])
                stats[(*path, "u")] = BatchStat(begin(key, shape, param_dtype))
                stats[(*path, "sigma")] = BatchStat(jnp.ones((), param_dtype))
        self.batch_stats = data(stats)

    def __call__(
        self, x: Array, update_stats: bool | None = None, **kwargs: Any
    ) -> Any:
        """Run the layer on `x` with its weights normalized.

        Args:
            x: The inputs.
            update_stats: Instead of the layer's own.
            **kwargs: For the layer.
        """
        if update_stats is None:
            update_stats = not self.use_running_average
        weights: dict[int, Variable[Any]] = {}
        stats: dict[Path, Any] = {}
        for path, variable in parameters_of(self.layer_instance, Param).items():
            if (*path, "u") in self.batch_stats:
                value, u, sigma = self._normalized(path, variable)
                weights[id(variable)] = variable.replace(value)
                stats |= {(*path, "u"): u, (*path, "sigma"): sigma}
        out = self._with_weights(weights)(x, **kwargs)
        if update_stats:
            for path, value in stats.items():
                stat = self.batch_stats[path]
                stat.set_value(lax.stop_gradient(value).astype(stat.dtype))
        return out

    def _normalized(self, path: Path, variable: Any) -> tuple[Any, Any, Any]:
        """Return a weight over its largest singular value, with vector and value."""
        value = variable.get_value()
        if value.ndim > 2 and self.error_on_non_matrix:
            raise StructureError(
                f"{where(self)}: {'/'.join(map(str, path))} has the shape "
                f"{value.shape}, not that of a matrix, and error_on_non_matrix is set."
            )
        matrix = jnp.reshape(wide(value), (-1, value.shape[-1]))
        fixed = lax.stop_gradient(matrix)
        u = self.batch_stats[*path, "u"].get_value().astype(matrix.dtype)
        v = u
        for _ in range(self.n_steps):
            v = _unit(u @ fixed.T, self.epsilon)
            u = _unit(v @ fixed, self.epsilon)
        sigma = (v @ matrix @ u.T)[0, 0]
        divisor = jnp.where(sigma != 0, sigma, jnp.ones_like(sigma))
        divided = jnp.reshape(matrix / divisor, value.shape)
        return divided.astype(self.dtype or value.dtype), u, sigma

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Set the mode of a view.

        Args:
            use_running_average: Whether calls leave what is remembered alone.
        """
        if use_running_average is not None:
            self.use_running_average = use_running_average


class WeightNorm(Reparametrized):
    """Run a layer with weights of length one, times a scale that is trained.

    Args:
        layer_instance: The layer.
        feature_axes: The axes that have a scale each; lengths are over the others. None
            for one scale, and one length, for all.
        use_scale: Whether to multiply by a scale.
        scale_init: The initializer of the scales.
        epsilon: Added to squared lengths that are divided by.
        dtype: The dtype of the weights that the layer runs with; their own without it.
        param_dtype: The dtype of the scales.
        variable_filter: Which weights.
        promote_dtype: Kept for layers that derive from this one.
        rngs: Random streams; the stream `params` stays where it is.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> rngs = tt.Rngs(0)
        >>> layer = tt.WeightNorm(tt.Linear(3, 4, rngs=rngs), rngs=rngs)
        >>> layer(jnp.ones((1, 3))).shape
        (1, 4)
        >>> [path for path, _ in tt.to_flat_state(tt.state(layer.scales, tt.Param))]
        [(('kernel',),)]
    """

    def __init__(
        self,
        layer_instance: Any,
        *,
        feature_axes: int | Sequence[int] | None = -1,
        use_scale: bool = True,
        scale_init: Initializer = ones,
        epsilon: float = 1e-12,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        variable_filter: Filter = KERNELS,
        promote_dtype: Promote = default_promote,
        rngs: Rngs,
    ):
        self._wrap(locals())
        self.feature_axes = () if feature_axes is None else as_static(feature_axes)
        self.use_scale = use_scale
        self.scale_init = scale_init
        self.variable_filter = variable_filter
        self.scales = data(self._scales(check_rngs(self, rngs)) if use_scale else None)

    def _scales(self, rngs: Rngs) -> dict[Path, Any]:
        """Make scales, with keys from a copy of the stream, which stays as it is."""
        key = rngs.params.copy()()
        scales: dict[Path, Any] = {}
        found = parameters_of(self.layer_instance, self.variable_filter)
        for i, (path, variable) in enumerate(found.items(), 1):
            axes = canonical_axes(self, self.feature_axes, variable.ndim)
            shape = tuple(variable.shape[axis] for axis in axes)
            own_key = jax.random.fold_in(key, i)
            scales[path] = make_parameter(
                self, "scales", self.scale_init, own_key, shape, self.param_dtype
            )
        return scales

    def __call__(self, x: Array, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on `x` with its weights normalized.

        Args:
            x: The inputs.
            *args: For the layer.
            **kwargs: For the layer.
        """
        found = parameters_of(self.layer_instance, self.variable_filter)
        weights = {
            id(variable): variable.replace(self._normalized(path, variable))
            for path, variable in found.items()
        }
        return self._with_weights(weights)(x, *args, **kwargs)

    def _normalized(self, path: Path, variable: Any) -> jax.Array:
        """Return a weight of length one times its scale."""
        value = variable.get_value()
        features = canonical_axes(self, self.feature_axes, value.ndim)
        axes = tuple(i for i in range(value.ndim) if i not in features)
        unit = _unit(wide(value), self.epsilon, axes)
        if self.scales is not None:
            scale = self.scales[path].get_value().astype(unit.dtype)
            order = sorted(range(len(features)), key=lambda i: features[i])
            shape = [n if i in features else 1 for i, n in enumerate(value.shape)]
            unit = unit * jnp.reshape(jnp.transpose(scale, order), shape)
        return unit.astype(self.dtype or value.dtype)
