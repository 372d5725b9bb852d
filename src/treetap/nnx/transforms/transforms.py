# SPDX-License-Identifier: Apache-2.0
"""transforms: branches, checks and shapes.

Most are names of treetap, as NNX has them in this module.
"""

# ruff: noqa: PLC0414 - `as` says that a name is public here

from treetap._core.variables.metadata import MISSING as MISSING
from treetap.nnx import A as A
from treetap.nnx import M as M
from treetap.nnx import Module as Module
from treetap.nnx import checkify as checkify
from treetap.nnx import cond as cond
from treetap.nnx import eval_shape as eval_shape
from treetap.nnx import make_jaxpr as make_jaxpr
from treetap.nnx import switch as switch
from treetap.nnx.annotations import AxisName as AxisName
from treetap.nnx.annotations import Index as Index
from treetap.nnx.annotations import Leaf as Leaf
from treetap.nnx.proxy_caller import CallableProxy as CallableProxy
from treetap.nnx.proxy_caller import DelayedAccessor as DelayedAccessor
