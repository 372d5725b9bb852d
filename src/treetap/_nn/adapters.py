# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters: a small trainable map beside a large frozen one.

The adapter's parameters are a kind of their own, `LoRAParam`, so that a filter can
choose to train them alone.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treetap._core.errors import StructureError
from treetap._core.trees.attributes import data
from treetap._core.variables.kinds import Param
from treetap._core.variables.values import broadcasts
from treetap._core.variables.variable import A, Variable
from treetap._core.wording import typed
from treetap._modules.random_streams import Rngs
from treetap._nn.dtypes import promote_dtype as default_promote
from treetap._nn.linear import Linear
from treetap._nn.parameters import (
    NO_METADATA,
    Array,
    Dtype,
    Initializer,
    Layer,
    Metadata,
    Promote,
    check_features,
    check_rngs,
    check_sizes,
    chosen,
    held,
    make_parameter,
    sizes_of,
    where,
)
from treetap.initializers import he_uniform, zeros

default_a_initializer = he_uniform()


class LoRAParam(Param[A]):
    """A parameter of a low-rank adapter."""


class LoRA(Layer):
    """Map by two thin matrices, `inputs @ lora_a @ lora_b`, beside a module if given.

    Args:
        in_features: The size of the last axis of the inputs.
        lora_rank: The rank.
        out_features: The size of the last axis of the outputs.
        base_module: A module whose result is added.
        dtype: The dtype to compute in; without it, the one that inputs and parameters
            promote to.
        param_dtype: The dtype of the parameters.
        a_initializer: The initializer of the first matrix.
        b_initializer: The initializer of the second: zeros, so that the adapter begins
            by changing nothing.
        lora_param_type: The kind of Variable of both.
        promote_dtype: What brings inputs and parameters to one dtype, called as
            `promote_dtype`.
        rngs: Random streams; `params` gives one key to each matrix.
        a_metadata: Metadata of the first matrix.
        b_metadata: Metadata of the second.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> rngs = tt.Rngs(0)
        >>> base = tt.Linear(4, 3, rngs=rngs)
        >>> adapted = tt.LoRA(4, 2, 3, base_module=base, rngs=rngs)
        >>> x = jnp.ones((1, 4))
        >>> bool((adapted(x) == base(x)).all())
        True
    """

    def __init__(
        self,
        in_features: int,
        lora_rank: int,
        out_features: int,
        *,
        base_module: Callable[..., Any] | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        a_initializer: Initializer = default_a_initializer,
        b_initializer: Initializer = zeros,
        lora_param_type: type[Variable[Any]] = LoRAParam,
        promote_dtype: Promote = default_promote,
        rngs: Rngs,
        a_metadata: Metadata = NO_METADATA,
        b_metadata: Metadata = NO_METADATA,
    ):
        sizes = chosen(locals(), "in_features", "lora_rank", "out_features")
        self.in_features, rank, self.out_features = check_sizes(self, **sizes)
        if base_module is not None and not callable(base_module):
            raise StructureError(
                "LoRA: `base_module` must be callable, got "
                f"{type(base_module).__name__}."
            )
        self._keep_options(locals())
        self.lora_param_type = lora_param_type
        self.base_module = data(base_module)
        draw = check_rngs(self, rngs).params
        make = partial(make_parameter, self, dtype=param_dtype, kind=lora_param_type)
        shape = (self.in_features, rank)
        self.lora_a = make("lora_a", a_initializer, draw(), shape, metadata=a_metadata)
        shape = (rank, self.out_features)
        self.lora_b = make("lora_b", b_initializer, draw(), shape, metadata=b_metadata)

    def __call__(self, x: Array, **kwargs: Any) -> jax.Array:
        """Map `x`, and add what the base module makes of it.

        Args:
            x: An array with `in_features` on its last axis.
            **kwargs: For the base module.
        """
        lora_a, lora_b = held(self.lora_a), held(self.lora_b)
        check_features(self, x, sizes_of(lora_a, (self.in_features,))[0])
        inputs, lora_a, lora_b = self._promoted(x, lora_a, lora_b)
        out = inputs @ lora_a @ lora_b
        if self.base_module is None:
            return out
        base = self.base_module(x, **kwargs)
        if not broadcasts(np.shape(base), out.shape):
            raise StructureError(
                f"{where(self)}: `base_module` returned {typed(base)}, which the map "
                f"of shape {out.shape} cannot be added to."
            )
        return out + base


class LoRALinear(Linear):
    """Map linearly, with a low-rank adapter beside the kernel.

    Args:
        in_features: The size of the last axis of the inputs.
        out_features: The size of the last axis of the outputs.
        lora_rank: The rank of the adapter.
        lora_dtype: The dtype the adapter computes in; without it, the one that inputs
            and parameters promote to.
        lora_param_dtype: The dtype of its parameters.
        a_initializer: The initializer of its first matrix.
        b_initializer: The initializer of its second: zeros, so that the adapter begins
            by changing nothing.
        lora_param_type: The kind of Variable of both.
        lora_promote_dtype: What brings its inputs and parameters to one dtype, called
            as `promote_dtype`.
        rngs: Random streams; `params` gives one key to each parameter.
        a_metadata: Metadata of the first matrix.
        b_metadata: Metadata of the second.
        **kwargs: Options of `Linear`, such as `use_bias` and `dtype`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        lora_rank: int,
        lora_dtype: Dtype | None = None,
        lora_param_dtype: Dtype = jnp.float32,
        a_initializer: Initializer = default_a_initializer,
        b_initializer: Initializer = zeros,
        lora_param_type: type[Variable[Any]] = LoRAParam,
        lora_promote_dtype: Promote = default_promote,
        rngs: Rngs,
        a_metadata: Metadata = NO_METADATA,
        b_metadata: Metadata = NO_METADATA,
        **kwargs: Any,
    ):
        check_sizes(self, lora_rank=lora_rank)
        super().__init__(in_features, out_features, rngs=rngs, **kwargs)
        alike = ("lora_param_type", "rngs", "a_initializer", "b_initializer")
        options = chosen(locals(), *alike, "a_metadata", "b_metadata")
        options |= {"dtype": lora_dtype, "param_dtype": lora_param_dtype}
        options["promote_dtype"] = lora_promote_dtype
        self.lora = LoRA(in_features, lora_rank, out_features, **options)

    def __call__(self, x: Array, out_sharding: Any = None) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride] - NNX's name for it
        """Map `x`, and add what the adapter makes of it.

        Args:
            x: An array with `in_features` on its last axis.
            out_sharding: The sharding of the result, on an explicit mesh.
        """
        return super().__call__(x, out_sharding=out_sharding) + self.lora(x)
