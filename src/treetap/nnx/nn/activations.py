# SPDX-License-Identifier: Apache-2.0
"""activations: functions between layers.

Most are names of treetap, as NNX has them in this module.
"""

# ruff: noqa: PLC0414 - `as` says that a name is public here

from treetap.nnx import PReLU as PReLU
from treetap.nnx import celu as celu
from treetap.nnx import elu as elu
from treetap.nnx import gelu as gelu
from treetap.nnx import glu as glu
from treetap.nnx import hard_sigmoid as hard_sigmoid
from treetap.nnx import hard_silu as hard_silu
from treetap.nnx import hard_swish as hard_swish
from treetap.nnx import hard_tanh as hard_tanh
from treetap.nnx import identity as identity
from treetap.nnx import leaky_relu as leaky_relu
from treetap.nnx import log_sigmoid as log_sigmoid
from treetap.nnx import log_softmax as log_softmax
from treetap.nnx import logsumexp as logsumexp
from treetap.nnx import one_hot as one_hot
from treetap.nnx import relu as relu
from treetap.nnx import relu6 as relu6
from treetap.nnx import selu as selu
from treetap.nnx import sigmoid as sigmoid
from treetap.nnx import silu as silu
from treetap.nnx import soft_sign as soft_sign
from treetap.nnx import softmax as softmax
from treetap.nnx import softplus as softplus
from treetap.nnx import standardize as standardize
from treetap.nnx import swish as swish
from treetap.nnx import tanh as tanh
from treetap.nnx.annotations import Array as Array
from treetap.nnx.annotations import Dtype as Dtype
from treetap.nnx.annotations import PromoteDtypeFn as PromoteDtypeFn
