# SPDX-License-Identifier: Apache-2.0
"""normalization: layers that normalize.

Most are names of treetap, as NNX has them in this module.
"""

# ruff: noqa: PLC0414 - `as` says that a name is public here

from treetap.nnx import BatchNorm as BatchNorm
from treetap.nnx import GroupNorm as GroupNorm
from treetap.nnx import Initializer as Initializer
from treetap.nnx import InstanceNorm as InstanceNorm
from treetap.nnx import LayerNorm as LayerNorm
from treetap.nnx import Module as Module
from treetap.nnx import RMSNorm as RMSNorm
from treetap.nnx import SpectralNorm as SpectralNorm
from treetap.nnx import WeightNorm as WeightNorm
from treetap.nnx.annotations import Array as Array
from treetap.nnx.annotations import Axes as Axes
from treetap.nnx.annotations import Dtype as Dtype
from treetap.nnx.annotations import PromoteDtypeFn as PromoteDtypeFn
from treetap.nnx.deprecated import first_from as first_from
