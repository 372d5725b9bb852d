# SPDX-License-Identifier: Apache-2.0
"""iteration: mapping and loops.

Most are names of treetap, as NNX has them in this module.
"""

# ruff: noqa: PLC0414 - `as` says that a name is public here

from treetap.nnx import A as A
from treetap.nnx import Carry as Carry
from treetap.nnx import M as M
from treetap.nnx import Module as Module
from treetap.nnx import State as State
from treetap.nnx import StateAxes as StateAxes
from treetap.nnx import fori_loop as fori_loop
from treetap.nnx import pmap as pmap
from treetap.nnx import scan as scan
from treetap.nnx import transform_metadata as transform_metadata
from treetap.nnx import vmap as vmap
from treetap.nnx import while_loop as while_loop
from treetap.nnx.annotations import AxisName as AxisName
from treetap.nnx.annotations import Index as Index
from treetap.nnx.annotations import Leaf as Leaf
from treetap.nnx.flax_parts import FrozenDict as FrozenDict
