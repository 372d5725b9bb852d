# SPDX-License-Identifier: Apache-2.0
"""treetap: neural-network modules for JAX.

Modules are plain trees, the Variables inside them are mutable, and every value that
flows through a model can be seen and changed without editing the model. This namespace
works in tree mode; `treetap.nnx` offers the same library under NNX's names and
defaults.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _AnyType

from treetap import _deprecated as _deprecated
from treetap._applying import call as call
from treetap._applying import map as map
from treetap._attributes import data as data
from treetap._attributes import dataclass as dataclass
from treetap._attributes import has_data as has_data
from treetap._attributes import is_data as is_data
from treetap._attributes import register_data_type as register_data_type
from treetap._attributes import static as static
from treetap._axis_names import PARTITION_NAME as PARTITION_NAME
from treetap._axis_names import transform_metadata as transform_metadata
from treetap._batching import pmap as pmap
from treetap._batching import shard_map as shard_map
from treetap._batching import vmap as vmap
from treetap._branching import checkify as checkify
from treetap._branching import cond as cond
from treetap._branching import switch as switch
from treetap._changes import set_structure_policy as set_structure_policy
from treetap._changes import structure_policy as structure_policy
from treetap._compiling import eval_shape as eval_shape
from treetap._compiling import jit as jit
from treetap._compiling import make_jaxpr as make_jaxpr
from treetap._containers import Dict as Dict
from treetap._containers import List as List
from treetap._containers import Sequential as Sequential
from treetap._copies import as_pure as as_pure
from treetap._copies import clone as clone
from treetap._custom_rules import custom_vjp as custom_vjp
from treetap._differentiating import grad as grad
from treetap._differentiating import jvp as jvp
from treetap._differentiating import remat as remat
from treetap._differentiating import value_and_grad as value_and_grad
from treetap._differentiating import vjp as vjp
from treetap._errors import AliasError as AliasError
from treetap._errors import AttributeStatusError as AttributeStatusError
from treetap._errors import CaptureError as CaptureError
from treetap._errors import CycleError as CycleError
from treetap._errors import FilterError as FilterError
from treetap._errors import MetadataError as MetadataError
from treetap._errors import StructureError as StructureError
from treetap._errors import TraceContextError as TraceContextError
from treetap._errors import TreetapError as TreetapError
from treetap._filters import All as All
from treetap._filters import Any as Any
from treetap._filters import Everything as Everything
from treetap._filters import Not as Not
from treetap._filters import Nothing as Nothing
from treetap._filters import OfType as OfType
from treetap._filters import PathContains as PathContains
from treetap._filters import PathIn as PathIn
from treetap._filters import WithTag as WithTag
from treetap._fixing import jit_partial as jit_partial
from treetap._kinds import BatchStat as BatchStat
from treetap._kinds import Cache as Cache
from treetap._kinds import Intermediate as Intermediate
from treetap._kinds import Param as Param
from treetap._kinds import Perturbation as Perturbation
from treetap._kinds import RngCount as RngCount
from treetap._kinds import RngKey as RngKey
from treetap._kinds import RngState as RngState
from treetap._looping import fori_loop as fori_loop
from treetap._looping import while_loop as while_loop
from treetap._metadata import VariableMetadata as VariableMetadata
from treetap._metadata import with_metadata as with_metadata
from treetap._modules import Module as Module
from treetap._modules import iter_children as iter_children
from treetap._modules import iter_modules as iter_modules
from treetap._placement import logical_axis_rules as logical_axis_rules
from treetap._prefixes import prefix as prefix
from treetap._pytrees import Pytree as Pytree
from treetap._pytrees import check_pytree as check_pytree
from treetap._randomness import Rngs as Rngs
from treetap._randomness import RngStream as RngStream
from treetap._reseeding import fork_rngs as fork_rngs
from treetap._reseeding import reseed as reseed
from treetap._reseeding import split_rngs as split_rngs
from treetap._reseeding import with_rngs as with_rngs
from treetap._scanning import Carry as Carry
from treetap._scanning import scan as scan
from treetap._settings import set_graph_mode as set_graph_mode
from treetap._settings import set_graph_updates as set_graph_updates
from treetap._settings import use_eager_sharding as use_eager_sharding
from treetap._settings import using_eager_sharding as using_eager_sharding
from treetap._sharing import find_duplicates as find_duplicates
from treetap._specs import GraphDef as GraphDef
from treetap._splitting import GraphState as GraphState
from treetap._splitting import flatten as flatten
from treetap._splitting import graphdef as graphdef
from treetap._splitting import is_variable as is_variable
from treetap._splitting import merge as merge
from treetap._splitting import split as split
from treetap._splitting import state as state
from treetap._splitting import unflatten as unflatten
from treetap._splitting import unpack as unpack
from treetap._splitting import variables as variables
from treetap._states import FlatState as FlatState
from treetap._states import State as State
from treetap._states import filter_state as filter_state
from treetap._states import from_flat_state as from_flat_state
from treetap._states import map_state as map_state
from treetap._states import merge_state as merge_state
from treetap._states import replace_by_pure_dict as replace_by_pure_dict
from treetap._states import restore_int_paths as restore_int_paths
from treetap._states import split_state as split_state
from treetap._states import to_flat_state as to_flat_state
from treetap._states import to_pure_dict as to_pure_dict
from treetap._updates import pop as pop
from treetap._updates import set_metadata as set_metadata
from treetap._updates import update as update
from treetap._updates import with_vars as with_vars
from treetap._variables import Variable as Variable
from treetap._views import view as view
from treetap._views import view_info as view_info
from treetap._views import with_attributes as with_attributes
from treetap._walks import iter_graph as iter_graph
from treetap._walks import recursive_map as recursive_map

if _TYPE_CHECKING:
    from treetap import compat as compat
    from treetap import nnx as nnx
    from treetap._capturing import capture as capture
    from treetap._emitting import set_sow_outside_capture as set_sow_outside_capture
    from treetap._emitting import tap as tap
    from treetap._observing import observe as observe
    from treetap._observing import sites as sites
    from treetap._records import Record as Record
    from treetap._records import Site as Site
    from treetap._selectors import Select as Select

# Imported when they are asked for: those who only train need not wait for them.
_LATER = {
    "tap": "_emitting",
    "set_sow_outside_capture": "_emitting",
    "capture": "_capturing",
    "observe": "_observing",
    "sites": "_observing",
    "Record": "_records",
    "Site": "_records",
    "Select": "_selectors",
}


def __getattr__(name: str) -> _AnyType:
    if name in ("compat", "nnx"):
        return _import_module(f"treetap.{name}")
    if name in _LATER:
        value = getattr(_import_module(f"treetap.{_LATER[name]}"), name)
        globals()[name] = value
        return value
    if name == "__version__":  # looked up when asked for: it reads files
        from importlib.metadata import version

        return version("treetap")
    raise AttributeError(f"module 'treetap' has no attribute {name!r}")


__all__ = [
    "PARTITION_NAME",
    "AliasError",
    "All",
    "Any",
    "AttributeStatusError",
    "BatchStat",
    "Cache",
    "CaptureError",
    "Carry",
    "CycleError",
    "Dict",
    "Everything",
    "FilterError",
    "FlatState",
    "GraphDef",
    "GraphState",
    "Intermediate",
    "List",
    "MetadataError",
    "Module",
    "Not",
    "Nothing",
    "OfType",
    "Param",
    "PathContains",
    "PathIn",
    "Perturbation",
    "Pytree",
    "Record",
    "RngCount",
    "RngKey",
    "RngState",
    "RngStream",
    "Rngs",
    "Select",
    "Sequential",
    "Site",
    "State",
    "StructureError",
    "TraceContextError",
    "TreetapError",
    "Variable",
    "VariableMetadata",
    "WithTag",
    "as_pure",
    "call",
    "capture",
    "check_pytree",
    "checkify",
    "clone",
    "compat",
    "cond",
    "custom_vjp",
    "data",
    "dataclass",
    "eval_shape",
    "filter_state",
    "find_duplicates",
    "flatten",
    "fori_loop",
    "fork_rngs",
    "from_flat_state",
    "grad",
    "graphdef",
    "has_data",
    "is_data",
    "is_variable",
    "iter_children",
    "iter_graph",
    "iter_modules",
    "jit",
    "jit_partial",
    "jvp",
    "logical_axis_rules",
    "make_jaxpr",
    "map",
    "map_state",
    "merge",
    "merge_state",
    "nnx",
    "observe",
    "pmap",
    "pop",
    "prefix",
    "recursive_map",
    "register_data_type",
    "remat",
    "replace_by_pure_dict",
    "reseed",
    "restore_int_paths",
    "scan",
    "set_graph_mode",
    "set_graph_updates",
    "set_metadata",
    "set_sow_outside_capture",
    "set_structure_policy",
    "shard_map",
    "sites",
    "split",
    "split_rngs",
    "split_state",
    "state",
    "static",
    "structure_policy",
    "switch",
    "tap",
    "to_flat_state",
    "to_pure_dict",
    "transform_metadata",
    "unflatten",
    "unpack",
    "update",
    "use_eager_sharding",
    "using_eager_sharding",
    "value_and_grad",
    "variables",
    "view",
    "view_info",
    "vjp",
    "vmap",
    "while_loop",
    "with_attributes",
    "with_metadata",
    "with_rngs",
    "with_vars",
]
