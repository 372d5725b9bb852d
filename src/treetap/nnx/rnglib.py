# SPDX-License-Identifier: Apache-2.0
"""rnglib: random streams.

Most are names of treetap, as NNX has them in this module.
"""

# ruff: noqa: PLC0414 - `as` says that a name is public here

from treetap._core.variables.metadata import MISSING as MISSING
from treetap._modules.random_rules import SplitBackups as SplitBackups
from treetap._modules.random_rules import StreamBackup as StreamBackup
from treetap._modules.random_rules import backup_keys as backup_keys
from treetap.nnx import A as A
from treetap.nnx import All, Not
from treetap.nnx import Pytree as Pytree
from treetap.nnx import RngCount as RngCount
from treetap.nnx import RngKey as RngKey
from treetap.nnx import Rngs as Rngs
from treetap.nnx import RngState as RngState
from treetap.nnx import RngStream as RngStream
from treetap.nnx import Variable as Variable
from treetap.nnx import fork_rngs as fork_rngs
from treetap.nnx import reseed as reseed
from treetap.nnx import restore_rngs as restore_rngs
from treetap.nnx import split_rngs as split_rngs
from treetap.nnx import with_rngs as with_rngs
from treetap.nnx.annotations import AxesValue as AxesValue
from treetap.nnx.annotations import Counts as Counts
from treetap.nnx.annotations import Key as Key
from treetap.nnx.annotations import KeylessInitializer as KeylessInitializer
from treetap.nnx.annotations import OutShardingType as OutShardingType
from treetap.nnx.annotations import RngValue as RngValue
from treetap.nnx.annotations import SplitPattern as SplitPattern

NotKey = All(RngState, Not(RngKey))
