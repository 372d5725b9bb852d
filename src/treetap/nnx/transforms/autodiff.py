# SPDX-License-Identifier: Apache-2.0
"""autodiff: derivatives.

Most are names of treetap, as NNX has them in this module.
"""

# ruff: noqa: PLC0414 - `as` says that a name is public here

from treetap._core.variables.metadata import MISSING as MISSING
from treetap._transforms.custom_vjp import CustomVjp as CustomVjp
from treetap.nnx import A as A
from treetap.nnx import DiffState as DiffState
from treetap.nnx import State as State
from treetap.nnx import custom_vjp as custom_vjp
from treetap.nnx import grad as grad
from treetap.nnx import jvp as jvp
from treetap.nnx import remat as remat
from treetap.nnx import value_and_grad as value_and_grad
from treetap.nnx import vjp as vjp
from treetap.nnx.annotations import AxisName as AxisName
