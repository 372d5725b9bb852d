# SPDX-License-Identifier: Apache-2.0
"""compilation: compiled functions and sharded ones.

Most are names of treetap, as NNX has them in this module.
"""

# ruff: noqa: PLC0414 - `as` says that a name is public here

from jax.sharding import AbstractMesh as AbstractMesh
from jax.sharding import Mesh as Mesh
from jax.sharding import PartitionSpec as PartitionSpec

from treetap._core.variables.metadata import MISSING as MISSING
from treetap._transforms.lift.compiled import Jit, Stage
from treetap.nnx import StateSharding as StateSharding
from treetap.nnx import jit as jit
from treetap.nnx import jit_partial as jit_partial
from treetap.nnx import shard_map as shard_map
from treetap.nnx.annotations import AxisName as AxisName
from treetap.nnx.annotations import PathParts as PathParts
from treetap.nnx.annotations import Specs as Specs

Compiled = Stage
JitWrapped = Jit
Lowered = Stage
Traced = Stage
