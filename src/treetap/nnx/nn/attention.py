# SPDX-License-Identifier: Apache-2.0
"""attention: attention and its masks.

Most are names of treetap, as NNX has them in this module.
"""

# ruff: noqa: PLC0414 - `as` says that a name is public here

from typing import Any

from jax import numpy as jnp

from treetap._nn.parameters import default_kernel_init as default_kernel_init
from treetap.nnx import Initializer as Initializer
from treetap.nnx import LayerNorm as LayerNorm
from treetap.nnx import LinearGeneral as LinearGeneral
from treetap.nnx import Module as Module
from treetap.nnx import MultiHeadAttention as MultiHeadAttention
from treetap.nnx import combine_masks as combine_masks
from treetap.nnx import dot_product_attention as dot_product_attention
from treetap.nnx import make_attention_mask as make_attention_mask
from treetap.nnx import make_causal_mask as make_causal_mask
from treetap.nnx.annotations import Array as Array
from treetap.nnx.annotations import DotGeneralT as DotGeneralT
from treetap.nnx.annotations import Dtype as Dtype
from treetap.nnx.annotations import PrecisionLike as PrecisionLike
from treetap.nnx.annotations import PromoteDtypeFn as PromoteDtypeFn
from treetap.nnx.annotations import Shape as Shape
from treetap.nnx.deprecated import first_from as first_from


def dot_product_attention_weights(
    query: Array, key: Array, *args: Any, **kwargs: Any
) -> Array:
    """The weights of `dot_product_attention`: `[batch..., heads, queries, keys]`.

    Args:
        query: As for `dot_product_attention`.
        key: The same.
        *args: Its further arguments, without `value`.
        **kwargs: The same, by name.
    """
    length, heads = key.shape[-3:-1]
    # Each key's value says which key it is; so what is summed are the weights alone.
    one_of = jnp.eye(length, dtype=jnp.result_type(query, key))[:, None, :]
    one_of = jnp.broadcast_to(one_of, (*key.shape[:-3], length, heads, length))
    found = dot_product_attention(query, key, one_of, *args, **kwargs)
    return jnp.moveaxis(found, -2, -3)
