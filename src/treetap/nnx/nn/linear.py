# SPDX-License-Identifier: Apache-2.0
"""linear: layers that multiply by a kernel.

Most are names of treetap, as NNX has them in this module.
"""

# ruff: noqa: PLC0414 - `as` says that a name is public here

from treetap._nn.embedding import default_embed_init as default_embed_init
from treetap._nn.parameters import default_kernel_init as default_kernel_init
from treetap.initializers import zeros_init
from treetap.nnx import Conv as Conv
from treetap.nnx import ConvTranspose as ConvTranspose
from treetap.nnx import Einsum as Einsum
from treetap.nnx import Embed as Embed
from treetap.nnx import Initializer as Initializer
from treetap.nnx import Linear as Linear
from treetap.nnx import LinearGeneral as LinearGeneral
from treetap.nnx import Module as Module
from treetap.nnx.annotations import Array as Array
from treetap.nnx.annotations import Axis as Axis
from treetap.nnx.annotations import ConvGeneralDilatedT as ConvGeneralDilatedT
from treetap.nnx.annotations import DotGeneralT as DotGeneralT
from treetap.nnx.annotations import Dtype as Dtype
from treetap.nnx.annotations import EinsumT as EinsumT
from treetap.nnx.annotations import LaxPadding as LaxPadding
from treetap.nnx.annotations import PaddingLike as PaddingLike
from treetap.nnx.annotations import PrecisionLike as PrecisionLike
from treetap.nnx.annotations import PromoteDtypeFn as PromoteDtypeFn
from treetap.nnx.annotations import Shape as Shape
from treetap.nnx.annotations import Size as Size
from treetap.nnx.deprecated import first_from as first_from
from treetap.nnx.flax_parts import FrozenDict as FrozenDict

default_bias_init = zeros_init()


def canonicalize_padding(padding: PaddingLike, rank: int) -> LaxPadding:
    """Padding as JAX takes it: a name, or a pair for each axis.

    Args:
        padding: A name, a number, or a number or pair for each axis.
        rank: The number of axes.
    """
    if isinstance(padding, str):
        return padding
    each = [padding] * rank if isinstance(padding, int) else list(padding)
    if len(each) != rank:
        raise ValueError(
            f"canonicalize_padding: expected a name, a number or {rank} of them, or of "
            f"pairs; got {padding!r}."
        )
    return [(axis, axis) if isinstance(axis, int) else tuple(axis) for axis in each]
