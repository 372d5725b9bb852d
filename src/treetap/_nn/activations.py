# SPDX-License-Identifier: Apache-2.0
"""PReLU: the one activation that has a parameter.

All others are functions of JAX, which the root offers under the names models use.
"""

import jax
import jax.numpy as jnp

from treetap._core.variables.kinds import Param
from treetap._nn.dtypes import promote_dtype as default_promote
from treetap._nn.parameters import (
    NO_METADATA,
    Array,
    Dtype,
    Layer,
    Metadata,
    Promote,
    held,
)


class PReLU(Layer):
    """Rectify: keep what is positive, and multiply the rest by a learned slope.

    Args:
        negative_slope_init: The slope to begin with.
        dtype: The dtype to compute in; that of the inputs without it.
        param_dtype: The dtype of the slope.
        promote_dtype: What brings inputs and slope to one dtype, called as
            `promote_dtype`.
        negative_slope_metadata: Metadata of the slope.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> tt.PReLU(0.5)(jnp.array([-2.0, 3.0]))
        Array([-1.,  3.], dtype=float32)
    """

    def __init__(
        self,
        negative_slope_init: float = 0.01,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        promote_dtype: Promote = default_promote,
        negative_slope_metadata: Metadata = NO_METADATA,
    ):
        self.negative_slope = Param(
            jnp.asarray(negative_slope_init, param_dtype), **negative_slope_metadata
        )
        self._keep_options(locals())

    def __call__(self, inputs: Array) -> jax.Array:
        """Rectify `inputs`.

        Args:
            inputs: An array.
        """
        slope = held(self.negative_slope)
        if self.dtype is None:
            inputs = jnp.asarray(inputs)
            slope = jnp.asarray(slope, inputs.dtype)
        else:
            inputs, slope = self.promote_dtype((inputs, slope), dtype=self.dtype)
        return jnp.where(inputs >= 0, inputs, slope * inputs)
