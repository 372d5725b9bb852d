# SPDX-License-Identifier: Apache-2.0
"""lora: low-rank adapters.

Most are names of treetap, as NNX has them in this module.
"""

# ruff: noqa: PLC0414 - `as` says that a name is public here

from treetap.initializers import he_uniform as _he_uniform
from treetap.initializers import zeros
from treetap.nnx import A as A
from treetap.nnx import Initializer as Initializer
from treetap.nnx import Linear as Linear
from treetap.nnx import LoRA as LoRA
from treetap.nnx import LoRALinear as LoRALinear
from treetap.nnx import LoRAParam as LoRAParam
from treetap.nnx import Module as Module
from treetap.nnx.annotations import Array as Array
from treetap.nnx.annotations import Axis as Axis
from treetap.nnx.annotations import Dtype as Dtype
from treetap.nnx.annotations import PromoteDtypeFn as PromoteDtypeFn
from treetap.nnx.annotations import Size as Size

default_a_initializer = _he_uniform()
default_b_initializer = zeros
