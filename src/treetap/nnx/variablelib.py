# SPDX-License-Identifier: Apache-2.0
"""variablelib: Variables, their kinds and metadata.

Most are names of treetap, as NNX has them in this module.
"""

# ruff: noqa: PLC0414 - `as` says that a name is public here

from collections.abc import Callable
from typing import Any

from treetap._core.variables.kinds import _by_name
from treetap._core.variables.metadata import MISSING as MISSING
from treetap._core.variables.values import is_ref
from treetap._core.variables.variable import Variable as Variable
from treetap._core.variables.variable import VariableMeta as VariableMeta
from treetap.nnx import A as A
from treetap.nnx import BatchStat as BatchStat
from treetap.nnx import Cache as Cache
from treetap.nnx import Intermediate as Intermediate
from treetap.nnx import Param as Param
from treetap.nnx import Perturbation as Perturbation
from treetap.nnx import VariableMetadata as VariableMetadata
from treetap.nnx import register_variable_name as register_variable_name
from treetap.nnx import use_eager_sharding as use_eager_sharding
from treetap.nnx import using_eager_sharding as using_eager_sharding
from treetap.nnx import var_defaults as var_defaults
from treetap.nnx import variable_name_from_type as variable_name_from_type
from treetap.nnx import variable_type_from_name as variable_type_from_name
from treetap.nnx import with_metadata as with_metadata
from treetap.nnx.annotations import AxisIndex as AxisIndex
from treetap.nnx.annotations import AxisName as AxisName
from treetap.nnx.annotations import Leaf as Leaf
from treetap.nnx.deprecated import VarDefaults as VarDefaults

VariableState = Variable
VariableTypeCache = _by_name
is_array_ref = is_ref

GetValueHook = SetValueHook = CreateValueHook = Callable[..., Any]
AddAxisHook = RemoveAxisHook = Callable[..., Any]
