# SPDX-License-Identifier: Apache-2.0
"""initializers: functions that give starting values.

Most are names of treetap, as NNX has them in this module.
"""

# ruff: noqa: PLC0414 - `as` says that a name is public here

from treetap.initializers import Initializer as Initializer
from treetap.initializers import constant as constant
from treetap.initializers import delta_orthogonal as delta_orthogonal
from treetap.initializers import glorot_normal as glorot_normal
from treetap.initializers import glorot_uniform as glorot_uniform
from treetap.initializers import he_normal as he_normal
from treetap.initializers import he_uniform as he_uniform
from treetap.initializers import kaiming_normal as kaiming_normal
from treetap.initializers import kaiming_uniform as kaiming_uniform
from treetap.initializers import lecun_normal as lecun_normal
from treetap.initializers import lecun_uniform as lecun_uniform
from treetap.initializers import normal as normal
from treetap.initializers import ones as ones
from treetap.initializers import ones_init as ones_init
from treetap.initializers import orthogonal as orthogonal
from treetap.initializers import truncated_normal as truncated_normal
from treetap.initializers import uniform as uniform
from treetap.initializers import variance_scaling as variance_scaling
from treetap.initializers import xavier_normal as xavier_normal
from treetap.initializers import xavier_uniform as xavier_uniform
from treetap.initializers import zeros as zeros
from treetap.initializers import zeros_init as zeros_init
from treetap.nnx.annotations import DtypeLikeInexact as DtypeLikeInexact
