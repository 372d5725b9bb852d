# SPDX-License-Identifier: Apache-2.0
"""NNX's names with NNX's defaults: `from treetap import nnx` runs an NNX program.

Everything here is the library itself. Two things differ from `import treetap`:
functions with a `graph` argument keep shared references, and transforms carry changes
of structure out, unless told otherwise; and NNX's deprecated names are here, with their
warnings. Each public name stands once, with the file that defines it; `__all__` is read
off them.

What only NNX needs is in this folder:

* `defaults`: the two settings, and how functions get them, here and in `compat`;
* `compat`: the same functions in graph mode, whatever the settings say;
* `contexts`: split and merge contexts, for transforms of one's own;
* `traversals`: nested mappings as flat ones, and back;
* `states`: `update` and `merge_state`, which ask less than those of `treetap`;
* `objects`: `Object` and `display`;
* `deprecated`: names that NNX has deprecated. Importing it gives `Variable`, `Module`,
  `GraphDef` and `State` their deprecated methods, so it is loaded with this namespace,
  and not by `import treetap`;
* `flax_parts`, `as_flax`: standing in for `flax` itself, so that a program runs
  unedited.

Only the command line imports this folder; it may import all others.
"""

from types import ModuleType as _ModuleType

from jax.nn import celu as celu
from jax.nn import elu as elu
from jax.nn import gelu as gelu
from jax.nn import glu as glu
from jax.nn import hard_sigmoid as hard_sigmoid
from jax.nn import hard_silu as hard_silu
from jax.nn import hard_swish as hard_swish
from jax.nn import hard_tanh as hard_tanh
from jax.nn import identity as identity
from jax.nn import leaky_relu as leaky_relu
from jax.nn import log_sigmoid as log_sigmoid
from jax.nn import log_softmax as log_softmax
from jax.nn import logsumexp as logsumexp
from jax.nn import one_hot as one_hot
from jax.nn import relu as relu
from jax.nn import relu6 as relu6
from jax.nn import selu as selu
from jax.nn import sigmoid as sigmoid
from jax.nn import silu as silu
from jax.nn import soft_sign as soft_sign
from jax.nn import softmax as softmax
from jax.nn import softplus as softplus
from jax.nn import standardize as standardize
from jax.nn import swish as swish
from jax.numpy import tanh as tanh

from treetap import initializers as initializers
from treetap import metrics as metrics
from treetap._core.settings import use_eager_sharding as use_eager_sharding
from treetap._core.settings import using_eager_sharding as using_eager_sharding
from treetap._core.trees.attributes import data as data
from treetap._core.trees.attributes import dataclass as dataclass
from treetap._core.trees.attributes import has_data as has_data
from treetap._core.trees.attributes import is_data as is_data
from treetap._core.trees.attributes import register_data_type as register_data_type
from treetap._core.trees.attributes import static as static
from treetap._core.trees.build import as_pure as as_pure
from treetap._core.trees.build import clone as clone
from treetap._core.trees.filters import All as All
from treetap._core.trees.filters import Any as Any
from treetap._core.trees.filters import Everything as Everything
from treetap._core.trees.filters import Not as Not
from treetap._core.trees.filters import Nothing as Nothing
from treetap._core.trees.filters import OfType as OfType
from treetap._core.trees.filters import PathContains as PathContains
from treetap._core.trees.filters import WithTag as WithTag
from treetap._core.trees.graphdef import GraphDef as GraphDef
from treetap._core.trees.pytree import Pytree as Pytree
from treetap._core.trees.pytree import check_pytree as check_pytree
from treetap._core.trees.sharing import find_duplicates as find_duplicates
from treetap._core.trees.split import GraphState as GraphState
from treetap._core.trees.split import call as call
from treetap._core.trees.split import flatten as flatten
from treetap._core.trees.split import graphdef as graphdef
from treetap._core.trees.split import map as map
from treetap._core.trees.split import merge as merge
from treetap._core.trees.split import split as split
from treetap._core.trees.split import state as state
from treetap._core.trees.split import unflatten as unflatten
from treetap._core.trees.split import unpack as unpack
from treetap._core.trees.state import FlatState as FlatState
from treetap._core.trees.state import State as State
from treetap._core.trees.state import filter_state as filter_state
from treetap._core.trees.state import from_flat_state as from_flat_state
from treetap._core.trees.state import map_state as map_state
from treetap._core.trees.state import replace_by_pure_dict as replace_by_pure_dict
from treetap._core.trees.state import restore_int_paths as restore_int_paths
from treetap._core.trees.state import split_state as split_state
from treetap._core.trees.state import to_flat_state as to_flat_state
from treetap._core.trees.state import to_pure_dict as to_pure_dict
from treetap._core.trees.traverse import iter_graph as iter_graph
from treetap._core.trees.traverse import recursive_map as recursive_map
from treetap._core.trees.update import pop as pop
from treetap._core.trees.update import set_metadata as set_metadata
from treetap._core.trees.update import with_vars as with_vars
from treetap._core.variables.kinds import BatchStat as BatchStat
from treetap._core.variables.kinds import Cache as Cache
from treetap._core.variables.kinds import Intermediate as Intermediate
from treetap._core.variables.kinds import Param as Param
from treetap._core.variables.kinds import Perturbation as Perturbation
from treetap._core.variables.kinds import RngCount as RngCount
from treetap._core.variables.kinds import RngKey as RngKey
from treetap._core.variables.kinds import RngState as RngState
from treetap._core.variables.metadata import VariableMetadata as VariableMetadata
from treetap._core.variables.metadata import with_metadata as with_metadata
from treetap._core.variables.placement import logical_axis_rules as logical_axis_rules
from treetap._core.variables.variable import Variable as Variable
from treetap._modules.containers import Dict as Dict
from treetap._modules.containers import List as List
from treetap._modules.containers import Sequential as Sequential
from treetap._modules.module import Module as Module
from treetap._modules.module import iter_children as iter_children
from treetap._modules.module import iter_modules as iter_modules
from treetap._modules.random_rules import fork_rngs as fork_rngs
from treetap._modules.random_rules import reseed as reseed
from treetap._modules.random_rules import restore_rngs as restore_rngs
from treetap._modules.random_rules import split_rngs as split_rngs
from treetap._modules.random_rules import with_rngs as with_rngs
from treetap._modules.random_streams import Rngs as Rngs
from treetap._modules.random_streams import RngStream as RngStream
from treetap._modules.views import view as view
from treetap._modules.views import view_info as view_info
from treetap._modules.views import with_attributes as with_attributes
from treetap._nn.activations import PReLU as PReLU
from treetap._nn.adapters import LoRA as LoRA
from treetap._nn.adapters import LoRALinear as LoRALinear
from treetap._nn.adapters import LoRAParam as LoRAParam
from treetap._nn.attention import combine_masks as combine_masks
from treetap._nn.attention import dot_product_attention as dot_product_attention
from treetap._nn.attention import make_attention_mask as make_attention_mask
from treetap._nn.attention import make_causal_mask as make_causal_mask
from treetap._nn.cells import GRUCell as GRUCell
from treetap._nn.cells import LSTMCell as LSTMCell
from treetap._nn.cells import OptimizedLSTMCell as OptimizedLSTMCell
from treetap._nn.cells import RNNCellBase as RNNCellBase
from treetap._nn.cells import SimpleCell as SimpleCell
from treetap._nn.convolution import Conv as Conv
from treetap._nn.convolution import ConvTranspose as ConvTranspose
from treetap._nn.dropout import Dropout as Dropout
from treetap._nn.embedding import Embed as Embed
from treetap._nn.linear import Einsum as Einsum
from treetap._nn.linear import Linear as Linear
from treetap._nn.linear import LinearGeneral as LinearGeneral
from treetap._nn.multihead import MultiHeadAttention as MultiHeadAttention
from treetap._nn.normalization import BatchNorm as BatchNorm
from treetap._nn.normalization import GroupNorm as GroupNorm
from treetap._nn.normalization import InstanceNorm as InstanceNorm
from treetap._nn.normalization import LayerNorm as LayerNorm
from treetap._nn.normalization import RMSNorm as RMSNorm
from treetap._nn.pooling import avg_pool as avg_pool
from treetap._nn.pooling import max_pool as max_pool
from treetap._nn.pooling import min_pool as min_pool
from treetap._nn.pooling import pool as pool
from treetap._nn.recurrence import RNN as RNN
from treetap._nn.recurrence import Bidirectional as Bidirectional
from treetap._nn.reparametrization import SpectralNorm as SpectralNorm
from treetap._nn.reparametrization import WeightNorm as WeightNorm
from treetap._nn.rotary import RoPE as RoPE
from treetap._nn.rotary import (
    dot_product_attention_with_rope as dot_product_attention_with_rope,
)
from treetap._observe.capture import capture as capture
from treetap._report.summary import tabulate as tabulate
from treetap._train.optimizer import OptArray as OptArray
from treetap._train.optimizer import OptState as OptState
from treetap._train.optimizer import OptVariable as OptVariable
from treetap._transforms.cond import checkify as checkify
from treetap._transforms.cond import cond as cond
from treetap._transforms.cond import switch as switch
from treetap._transforms.custom_vjp import custom_vjp as custom_vjp
from treetap._transforms.grad import DiffState as DiffState
from treetap._transforms.grad import grad as grad
from treetap._transforms.grad import jvp as jvp
from treetap._transforms.grad import remat as remat
from treetap._transforms.grad import value_and_grad as value_and_grad
from treetap._transforms.grad import vjp as vjp
from treetap._transforms.inspect import eval_shape as eval_shape
from treetap._transforms.inspect import make_jaxpr as make_jaxpr
from treetap._transforms.jit import jit as jit
from treetap._transforms.jit_partial import cached_partial as cached_partial
from treetap._transforms.jit_partial import jit_partial as jit_partial
from treetap._transforms.lift.axis_names import PARTITION_NAME as PARTITION_NAME
from treetap._transforms.lift.axis_names import transform_metadata as transform_metadata
from treetap._transforms.lift.prefixes import StateAxes as StateAxes
from treetap._transforms.lift.prefixes import StateSharding as StateSharding
from treetap._transforms.lift.prefixes import prefix as prefix
from treetap._transforms.loops import fori_loop as fori_loop
from treetap._transforms.loops import while_loop as while_loop
from treetap._transforms.scan import Carry as Carry
from treetap._transforms.scan import scan as scan
from treetap._transforms.sharding import (
    abstract_with_sharding as abstract_with_sharding,
)
from treetap._transforms.sharding import as_abstract as as_abstract
from treetap._transforms.sharding import get_abstract_model as get_abstract_model
from treetap._transforms.sharding import get_named_sharding as get_named_sharding
from treetap._transforms.sharding import get_partition_spec as get_partition_spec
from treetap._transforms.sharding import with_partitioning as with_partitioning
from treetap._transforms.vmap import pmap as pmap
from treetap._transforms.vmap import shard_map as shard_map
from treetap._transforms.vmap import vmap as vmap
from treetap.initializers import Initializer as Initializer
from treetap.metrics import Metric as Metric
from treetap.metrics import MultiMetric as MultiMetric
from treetap.nnx import compat as compat
from treetap.nnx import defaults as _defaults
from treetap.nnx import traversals as traversals
from treetap.nnx.contexts import MergeContext as MergeContext
from treetap.nnx.contexts import NodeStates as NodeStates
from treetap.nnx.contexts import SplitContext as SplitContext
from treetap.nnx.contexts import UpdateContext as UpdateContext
from treetap.nnx.contexts import current_update_context as current_update_context
from treetap.nnx.contexts import from_tree as from_tree
from treetap.nnx.contexts import merge_context as merge_context
from treetap.nnx.contexts import split_context as split_context
from treetap.nnx.contexts import to_tree as to_tree
from treetap.nnx.contexts import update_context as update_context
from treetap.nnx.defaults import EMA as EMA
from treetap.nnx.defaults import ModelAndOptimizer as ModelAndOptimizer
from treetap.nnx.defaults import Optimizer as Optimizer
from treetap.nnx.defaults import set_graph_mode as set_graph_mode
from treetap.nnx.defaults import set_graph_updates as set_graph_updates
from treetap.nnx.deprecated import first_from as first_from
from treetap.nnx.deprecated import pure as pure
from treetap.nnx.deprecated import register_variable_name as register_variable_name
from treetap.nnx.deprecated import var_defaults as var_defaults
from treetap.nnx.deprecated import variable_name_from_type as variable_name_from_type
from treetap.nnx.deprecated import variable_type_from_name as variable_type_from_name
from treetap.nnx.deprecated import vars_as as vars_as
from treetap.nnx.objects import Object as Object
from treetap.nnx.objects import display as display
from treetap.nnx.states import merge_state as merge_state
from treetap.nnx.states import update as update

_defaults.give_defaults(
    globals(), set_graph_mode.current_value, set_graph_updates.current_value
)
iter_module_children = iter_children
variables = state

_MODULES = (compat, initializers, metrics, traversals)
__all__ = sorted(  # noqa: PLE0605 - a list, of what is imported above  # pyright: ignore[reportUnsupportedDunderAll] - as above
    [
        name
        for name, held in globals().items()
        if name[0] != "_" and (not isinstance(held, _ModuleType) or held in _MODULES)
    ],
    key=lambda name: (not name.isupper(), not name[0].isupper(), name),
)
