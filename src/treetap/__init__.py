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
from treetap._changes import set_structure_policy as set_structure_policy
from treetap._changes import structure_policy as structure_policy
from treetap._copies import as_pure as as_pure
from treetap._copies import clone as clone
from treetap._errors import AliasError as AliasError
from treetap._errors import AttributeStatusError as AttributeStatusError
from treetap._errors import CaptureError as CaptureError
from treetap._errors import CycleError as CycleError
from treetap._errors import FilterError as FilterError
from treetap._errors import MetadataError as MetadataError
from treetap._errors import StructureError as StructureError
from treetap._errors import TraceContextError as TraceContextError
from treetap._errors import TreetapError as TreetapError
from treetap._errors import WeightsError as WeightsError
from treetap._filters import All as All
from treetap._filters import Any as Any
from treetap._filters import Everything as Everything
from treetap._filters import Not as Not
from treetap._filters import Nothing as Nothing
from treetap._filters import OfType as OfType
from treetap._filters import PathContains as PathContains
from treetap._filters import PathIn as PathIn
from treetap._filters import WithTag as WithTag
from treetap._kinds import BatchStat as BatchStat
from treetap._kinds import Cache as Cache
from treetap._kinds import Intermediate as Intermediate
from treetap._kinds import Param as Param
from treetap._kinds import Perturbation as Perturbation
from treetap._kinds import RngCount as RngCount
from treetap._kinds import RngKey as RngKey
from treetap._kinds import RngState as RngState
from treetap._metadata import VariableMetadata as VariableMetadata
from treetap._metadata import with_metadata as with_metadata
from treetap._modules import Module as Module
from treetap._modules import iter_children as iter_children
from treetap._modules import iter_modules as iter_modules
from treetap._placement import logical_axis_rules as logical_axis_rules
from treetap._pytrees import Pytree as Pytree
from treetap._pytrees import check_pytree as check_pytree
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
from treetap._walks import iter_graph as iter_graph
from treetap._walks import recursive_map as recursive_map

if _TYPE_CHECKING:
    from treetap import compat as compat
    from treetap import edits as edits
    from treetap import initializers as initializers
    from treetap import metrics as metrics
    from treetap import nnx as nnx
    from treetap._axis_names import PARTITION_NAME as PARTITION_NAME
    from treetap._axis_names import transform_metadata as transform_metadata
    from treetap._batching import pmap as pmap
    from treetap._batching import shard_map as shard_map
    from treetap._batching import vmap as vmap
    from treetap._blaming import Blame as Blame
    from treetap._blaming import blame as blame
    from treetap._blaming import guard as guard
    from treetap._branching import checkify as checkify
    from treetap._branching import cond as cond
    from treetap._branching import switch as switch
    from treetap._building import build as build
    from treetap._capturing import capture as capture
    from treetap._comparing.comparison import Comparison as Comparison
    from treetap._comparing.comparison import Difference as Difference
    from treetap._comparing.comparison import compare as compare
    from treetap._compiling import jit as jit
    from treetap._containers import Dict as Dict
    from treetap._containers import List as List
    from treetap._containers import Sequential as Sequential
    from treetap._custom_rules import custom_vjp as custom_vjp
    from treetap._differentiating import grad as grad
    from treetap._differentiating import jvp as jvp
    from treetap._differentiating import remat as remat
    from treetap._differentiating import value_and_grad as value_and_grad
    from treetap._differentiating import vjp as vjp
    from treetap._editing import edit as edit
    from treetap._emitting import set_sow_outside_capture as set_sow_outside_capture
    from treetap._emitting import tap as tap
    from treetap._events import EventWriter as EventWriter
    from treetap._figures import Bars as Bars
    from treetap._figures import Figures as Figures
    from treetap._files.checkpoints import restore_checkpoint as restore_checkpoint
    from treetap._files.checkpoints import save_checkpoint as save_checkpoint
    from treetap._files.rules import tensor as tensor
    from treetap._files.weights import load_weights as load_weights
    from treetap._files.weights import save_weights as save_weights
    from treetap._fixing import jit_partial as jit_partial
    from treetap._foreign import tap_scopes as tap_scopes
    from treetap._inspecting import eval_shape as eval_shape
    from treetap._inspecting import make_jaxpr as make_jaxpr
    from treetap._layers.activations import PReLU as PReLU
    from treetap._layers.activations import celu as celu
    from treetap._layers.activations import elu as elu
    from treetap._layers.activations import gelu as gelu
    from treetap._layers.activations import glu as glu
    from treetap._layers.activations import hard_sigmoid as hard_sigmoid
    from treetap._layers.activations import hard_silu as hard_silu
    from treetap._layers.activations import hard_swish as hard_swish
    from treetap._layers.activations import hard_tanh as hard_tanh
    from treetap._layers.activations import identity as identity
    from treetap._layers.activations import leaky_relu as leaky_relu
    from treetap._layers.activations import log_sigmoid as log_sigmoid
    from treetap._layers.activations import log_softmax as log_softmax
    from treetap._layers.activations import logsumexp as logsumexp
    from treetap._layers.activations import one_hot as one_hot
    from treetap._layers.activations import relu as relu
    from treetap._layers.activations import relu6 as relu6
    from treetap._layers.activations import selu as selu
    from treetap._layers.activations import sigmoid as sigmoid
    from treetap._layers.activations import silu as silu
    from treetap._layers.activations import soft_sign as soft_sign
    from treetap._layers.activations import softmax as softmax
    from treetap._layers.activations import softplus as softplus
    from treetap._layers.activations import standardize as standardize
    from treetap._layers.activations import swish as swish
    from treetap._layers.activations import tanh as tanh
    from treetap._layers.adapters import LoRA as LoRA
    from treetap._layers.adapters import LoRALinear as LoRALinear
    from treetap._layers.adapters import LoRAParam as LoRAParam
    from treetap._layers.attention import combine_masks as combine_masks
    from treetap._layers.attention import dot_product_attention as dot_product_attention
    from treetap._layers.attention import make_attention_mask as make_attention_mask
    from treetap._layers.attention import make_causal_mask as make_causal_mask
    from treetap._layers.carries import RNNCellBase as RNNCellBase
    from treetap._layers.cells import GRUCell as GRUCell
    from treetap._layers.cells import LSTMCell as LSTMCell
    from treetap._layers.cells import OptimizedLSTMCell as OptimizedLSTMCell
    from treetap._layers.cells import SimpleCell as SimpleCell
    from treetap._layers.convolution import Conv as Conv
    from treetap._layers.convolution import ConvTranspose as ConvTranspose
    from treetap._layers.dropout import Dropout as Dropout
    from treetap._layers.dtypes import promote_dtype as promote_dtype
    from treetap._layers.embedding import Embed as Embed
    from treetap._layers.grouping import GroupNorm as GroupNorm
    from treetap._layers.grouping import InstanceNorm as InstanceNorm
    from treetap._layers.linear import Einsum as Einsum
    from treetap._layers.linear import Linear as Linear
    from treetap._layers.linear import LinearGeneral as LinearGeneral
    from treetap._layers.multihead import MultiHeadAttention as MultiHeadAttention
    from treetap._layers.normalization import BatchNorm as BatchNorm
    from treetap._layers.normalization import LayerNorm as LayerNorm
    from treetap._layers.normalization import RMSNorm as RMSNorm
    from treetap._layers.pooling import avg_pool as avg_pool
    from treetap._layers.pooling import max_pool as max_pool
    from treetap._layers.pooling import min_pool as min_pool
    from treetap._layers.pooling import pool as pool
    from treetap._layers.recurrence import RNN as RNN
    from treetap._layers.recurrence import Bidirectional as Bidirectional
    from treetap._layers.recurrence import flip_sequences as flip_sequences
    from treetap._layers.reparametrization import SpectralNorm as SpectralNorm
    from treetap._layers.reparametrization import WeightNorm as WeightNorm
    from treetap._looping import fori_loop as fori_loop
    from treetap._looping import while_loop as while_loop
    from treetap._observing import observe as observe
    from treetap._observing import sites as sites
    from treetap._patching import PatchGrid as PatchGrid
    from treetap._patching import attribution as attribution
    from treetap._patching import patch_grid as patch_grid
    from treetap._prefixes import prefix as prefix
    from treetap._randomness import Rngs as Rngs
    from treetap._randomness import RngStream as RngStream
    from treetap._records import Record as Record
    from treetap._records import Site as Site
    from treetap._reducers import AbsMax as AbsMax
    from treetap._reducers import AllFinite as AllFinite
    from treetap._reducers import DeadUnits as DeadUnits
    from treetap._reducers import DeadUnitsFound as DeadUnitsFound
    from treetap._reducers import Histogram as Histogram
    from treetap._reducers import HistogramFound as HistogramFound
    from treetap._reducers import Moments as Moments
    from treetap._reducers import MomentsFound as MomentsFound
    from treetap._reducers import NonFinite as NonFinite
    from treetap._reducers import NonFiniteFound as NonFiniteFound
    from treetap._reducers import Norm as Norm
    from treetap._reducers import Reducer as Reducer
    from treetap._reducers import TopK as TopK
    from treetap._reducers import TopKFound as TopKFound
    from treetap._report.html import Report as Report
    from treetap._report.html import report as report
    from treetap._report.summary import Summary as Summary
    from treetap._report.summary import summary as summary
    from treetap._report.summary import tabulate as tabulate
    from treetap._reseeding import fork_rngs as fork_rngs
    from treetap._reseeding import reseed as reseed
    from treetap._reseeding import split_rngs as split_rngs
    from treetap._reseeding import with_rngs as with_rngs
    from treetap._scanning import Carry as Carry
    from treetap._scanning import scan as scan
    from treetap._selectors import Select as Select
    from treetap._sharding import as_abstract as as_abstract
    from treetap._sharding import get_abstract_model as get_abstract_model
    from treetap._sharding import get_named_sharding as get_named_sharding
    from treetap._sharding import get_partition_spec as get_partition_spec
    from treetap._sharding import with_partitioning as with_partitioning
    from treetap._standing_in import as_flax as as_flax
    from treetap._storing.arrays import StoredArray as StoredArray
    from treetap._storing.records import load_record as load_record
    from treetap._storing.records import save_record as save_record
    from treetap._storing.stores import Store as Store
    from treetap._storing.writers import StoreWriter as StoreWriter
    from treetap._training.averaging import EMA as EMA
    from treetap._training.optimizer import OptArray as OptArray
    from treetap._training.optimizer import Optimizer as Optimizer
    from treetap._training.optimizer import OptState as OptState
    from treetap._training.optimizer import OptVariable as OptVariable
    from treetap._views import view as view
    from treetap._views import view_info as view_info
    from treetap._views import with_attributes as with_attributes
    from treetap._watching import watch as watch
    from treetap.metrics import Metric as Metric
    from treetap.metrics import MultiMetric as MultiMetric

# Imported when they are asked for: a program waits only for what it uses.
_MODULES = ("compat", "edits", "initializers", "metrics", "nnx")
_ROOMS = {
    "_compiling": "jit",
    "_prefixes": "prefix",
    "_containers": "Dict List Sequential",
    "_randomness": "Rngs RngStream",
    "_axis_names": "PARTITION_NAME transform_metadata",
    "_batching": "pmap shard_map vmap",
    "_branching": "checkify cond switch",
    "_custom_rules": "custom_vjp",
    "_fixing": "jit_partial",
    "_inspecting": "eval_shape make_jaxpr",
    "_looping": "fori_loop while_loop",
    "_reseeding": "fork_rngs reseed split_rngs with_rngs",
    "_scanning": "Carry scan",
    "_views": "view view_info with_attributes",
    "_differentiating": "grad jvp remat value_and_grad vjp",
    "_emitting": "set_sow_outside_capture tap",
    "_capturing": "capture",
    "_observing": "observe sites",
    "_editing": "edit",
    "_events": "EventWriter",
    "_figures": "Bars Figures",
    "_watching": "watch",
    "_report.html": "Report report",
    "_standing_in": "as_flax",
    "_foreign": "tap_scopes",
    "_patching": "PatchGrid attribution patch_grid",
    "_records": "Record Site",
    "_selectors": "Select",
    "_layers.linear": "Linear LinearGeneral Einsum",
    "_layers.convolution": "Conv ConvTranspose",
    "_layers.embedding": "Embed",
    "_layers.adapters": "LoRA LoRALinear LoRAParam",
    "_layers.activations": (
        "PReLU celu elu gelu glu hard_sigmoid hard_silu hard_swish hard_tanh "
        "identity leaky_relu log_sigmoid log_softmax logsumexp one_hot relu "
        "relu6 selu sigmoid silu soft_sign softmax softplus standardize swish "
        "tanh"
    ),
    "_layers.normalization": "BatchNorm LayerNorm RMSNorm",
    "_layers.grouping": "GroupNorm InstanceNorm",
    "_layers.reparametrization": "SpectralNorm WeightNorm",
    "_layers.dropout": "Dropout",
    "_layers.dtypes": "promote_dtype",
    "_layers.attention": (
        "combine_masks dot_product_attention make_attention_mask make_causal_mask"
    ),
    "_layers.multihead": "MultiHeadAttention",
    "_layers.carries": "RNNCellBase",
    "_layers.cells": "GRUCell LSTMCell OptimizedLSTMCell SimpleCell",
    "_layers.recurrence": "Bidirectional RNN flip_sequences",
    "_layers.pooling": "avg_pool max_pool min_pool pool",
    "_training.optimizer": "OptArray OptState OptVariable Optimizer",
    "_training.averaging": "EMA",
    "_building": "build",
    "metrics": "Metric MultiMetric",
    "_sharding": (
        "as_abstract get_abstract_model get_named_sharding get_partition_spec "
        "with_partitioning"
    ),
    "_files.weights": "load_weights save_weights",
    "_files.rules": "tensor",
    "_files.checkpoints": "restore_checkpoint save_checkpoint",
    "_reducers": (
        "AbsMax AllFinite DeadUnits DeadUnitsFound Histogram HistogramFound Moments "
        "MomentsFound NonFinite NonFiniteFound Norm Reducer TopK TopKFound"
    ),
    "_blaming": "Blame blame guard",
    "_report.summary": "Summary summary tabulate",
    "_comparing.comparison": "Comparison Difference compare",
    "_storing.arrays": "StoredArray",
    "_storing.records": "load_record save_record",
    "_storing.stores": "Store",
    "_storing.writers": "StoreWriter",
}
_LATER = {name: room for room, names in _ROOMS.items() for name in names.split()}


def __getattr__(name: str) -> _AnyType:
    if name in _MODULES:
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
    "EMA",
    "PARTITION_NAME",
    "RNN",
    "AbsMax",
    "AliasError",
    "All",
    "AllFinite",
    "Any",
    "AttributeStatusError",
    "Bars",
    "BatchNorm",
    "BatchStat",
    "Bidirectional",
    "Blame",
    "Cache",
    "CaptureError",
    "Carry",
    "Comparison",
    "Conv",
    "ConvTranspose",
    "CycleError",
    "DeadUnits",
    "DeadUnitsFound",
    "Dict",
    "Difference",
    "Dropout",
    "Einsum",
    "Embed",
    "EventWriter",
    "Everything",
    "Figures",
    "FilterError",
    "FlatState",
    "GRUCell",
    "GraphDef",
    "GraphState",
    "GroupNorm",
    "Histogram",
    "HistogramFound",
    "InstanceNorm",
    "Intermediate",
    "LSTMCell",
    "LayerNorm",
    "Linear",
    "LinearGeneral",
    "List",
    "LoRA",
    "LoRALinear",
    "LoRAParam",
    "MetadataError",
    "Metric",
    "Module",
    "Moments",
    "MomentsFound",
    "MultiHeadAttention",
    "MultiMetric",
    "NonFinite",
    "NonFiniteFound",
    "Norm",
    "Not",
    "Nothing",
    "OfType",
    "OptArray",
    "OptState",
    "OptVariable",
    "OptimizedLSTMCell",
    "Optimizer",
    "PReLU",
    "Param",
    "PatchGrid",
    "PathContains",
    "PathIn",
    "Perturbation",
    "Pytree",
    "RMSNorm",
    "RNNCellBase",
    "Record",
    "Reducer",
    "Report",
    "RngCount",
    "RngKey",
    "RngState",
    "RngStream",
    "Rngs",
    "Select",
    "Sequential",
    "SimpleCell",
    "Site",
    "SpectralNorm",
    "State",
    "Store",
    "StoreWriter",
    "StoredArray",
    "StructureError",
    "Summary",
    "TopK",
    "TopKFound",
    "TraceContextError",
    "TreetapError",
    "Variable",
    "VariableMetadata",
    "WeightNorm",
    "WeightsError",
    "WithTag",
    "as_abstract",
    "as_flax",
    "as_pure",
    "attribution",
    "avg_pool",
    "blame",
    "build",
    "call",
    "capture",
    "celu",
    "check_pytree",
    "checkify",
    "clone",
    "combine_masks",
    "compare",
    "compat",
    "cond",
    "custom_vjp",
    "data",
    "dataclass",
    "dot_product_attention",
    "edit",
    "edits",
    "elu",
    "eval_shape",
    "filter_state",
    "find_duplicates",
    "flatten",
    "flip_sequences",
    "fori_loop",
    "fork_rngs",
    "from_flat_state",
    "gelu",
    "get_abstract_model",
    "get_named_sharding",
    "get_partition_spec",
    "glu",
    "grad",
    "graphdef",
    "guard",
    "hard_sigmoid",
    "hard_silu",
    "hard_swish",
    "hard_tanh",
    "has_data",
    "identity",
    "initializers",
    "is_data",
    "is_variable",
    "iter_children",
    "iter_graph",
    "iter_modules",
    "jit",
    "jit_partial",
    "jvp",
    "leaky_relu",
    "load_record",
    "load_weights",
    "log_sigmoid",
    "log_softmax",
    "logical_axis_rules",
    "logsumexp",
    "make_attention_mask",
    "make_causal_mask",
    "make_jaxpr",
    "map",
    "map_state",
    "max_pool",
    "merge",
    "merge_state",
    "metrics",
    "min_pool",
    "nnx",
    "observe",
    "one_hot",
    "patch_grid",
    "pmap",
    "pool",
    "pop",
    "prefix",
    "promote_dtype",
    "recursive_map",
    "register_data_type",
    "relu",
    "relu6",
    "remat",
    "replace_by_pure_dict",
    "report",
    "reseed",
    "restore_checkpoint",
    "restore_int_paths",
    "save_checkpoint",
    "save_record",
    "save_weights",
    "scan",
    "selu",
    "set_graph_mode",
    "set_graph_updates",
    "set_metadata",
    "set_sow_outside_capture",
    "set_structure_policy",
    "shard_map",
    "sigmoid",
    "silu",
    "sites",
    "soft_sign",
    "softmax",
    "softplus",
    "split",
    "split_rngs",
    "split_state",
    "standardize",
    "state",
    "static",
    "structure_policy",
    "summary",
    "swish",
    "switch",
    "tabulate",
    "tanh",
    "tap",
    "tap_scopes",
    "tensor",
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
    "watch",
    "while_loop",
    "with_attributes",
    "with_metadata",
    "with_partitioning",
    "with_rngs",
    "with_vars",
]
