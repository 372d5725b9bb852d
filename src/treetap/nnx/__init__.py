# SPDX-License-Identifier: Apache-2.0
"""NNX's names with NNX's defaults: `from treetap import nnx` runs an NNX program.

Everything here is the library itself. Two things differ from `import treetap`:
functions with a `graph` argument keep shared references, and transforms carry changes
of structure out, unless told otherwise; and NNX's deprecated names are here, with their
warnings.
"""

import functools
from collections.abc import Callable
from typing import Any as _Any
from typing import TypeVar

from treetap import initializers, metrics
from treetap._core import settings as _settings
from treetap._core.errors import AttributeStatusError as _AttributeStatusError
from treetap._core.settings import use_eager_sharding, using_eager_sharding
from treetap._core.trees import apply as _apply
from treetap._core.trees import copies as _copies
from treetap._core.trees import split as _split
from treetap._core.trees import traverse as _traverse
from treetap._core.trees.apply import call
from treetap._core.trees.attributes import (
    data,
    dataclass,
    has_data,
    is_data,
    register_data_type,
    static,
)
from treetap._core.trees.copies import as_pure
from treetap._core.trees.filters import (
    All,
    Any,
    Everything,
    Not,
    Nothing,
    OfType,
    PathContains,
    WithTag,
)
from treetap._core.trees.graphdef import GraphDef
from treetap._core.trees.pytree import Pytree, check_pytree
from treetap._core.trees.sharing import find_duplicates
from treetap._core.trees.split import GraphState, merge, unflatten
from treetap._core.trees.state import (
    FlatState,
    State,
    filter_state,
    from_flat_state,
    map_state,
    merge_state,
    replace_by_pure_dict,
    restore_int_paths,
    split_state,
    to_flat_state,
    to_pure_dict,
)
from treetap._core.trees.update import pop, set_metadata, update, with_vars
from treetap._core.variables.kinds import (
    BatchStat,
    Cache,
    Intermediate,
    Param,
    Perturbation,
    RngCount,
    RngKey,
    RngState,
)
from treetap._core.variables.metadata import VariableMetadata, with_metadata
from treetap._core.variables.placement import logical_axis_rules
from treetap._core.variables.variable import Variable
from treetap._modules import module as _module
from treetap._modules import random_rules as _random_rules
from treetap._modules import views as _views
from treetap._modules.containers import Dict, List, Sequential
from treetap._modules.module import Module
from treetap._modules.random_rules import restore_rngs
from treetap._modules.random_streams import Rngs, RngStream
from treetap._nn.activations import (
    PReLU,
    celu,
    elu,
    gelu,
    glu,
    hard_sigmoid,
    hard_silu,
    hard_swish,
    hard_tanh,
    identity,
    leaky_relu,
    log_sigmoid,
    log_softmax,
    logsumexp,
    one_hot,
    relu,
    relu6,
    selu,
    sigmoid,
    silu,
    soft_sign,
    softmax,
    softplus,
    standardize,
    swish,
    tanh,
)
from treetap._nn.adapters import LoRA, LoRALinear, LoRAParam
from treetap._nn.attention import (
    combine_masks,
    dot_product_attention,
    make_attention_mask,
    make_causal_mask,
)
from treetap._nn.cells import (
    GRUCell,
    LSTMCell,
    OptimizedLSTMCell,
    RNNCellBase,
    SimpleCell,
)
from treetap._nn.convolution import Conv, ConvTranspose
from treetap._nn.dropout import Dropout
from treetap._nn.embedding import Embed
from treetap._nn.linear import Einsum, Linear, LinearGeneral
from treetap._nn.multihead import MultiHeadAttention
from treetap._nn.normalization import (
    BatchNorm,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    RMSNorm,
)
from treetap._nn.pooling import avg_pool, max_pool, min_pool, pool
from treetap._nn.recurrence import RNN, Bidirectional
from treetap._nn.reparametrization import SpectralNorm, WeightNorm
from treetap._observe.capture import capture
from treetap._report.summary import tabulate
from treetap._train.ema import EMA as _EMA
from treetap._train.model_and_optimizer import ModelAndOptimizer as _ModelAndOptimizer
from treetap._train.optimizer import OptArray, OptState, OptVariable
from treetap._train.optimizer import Optimizer as _Optimizer
from treetap._transforms import cond as _cond
from treetap._transforms import custom_vjp as _custom_vjp
from treetap._transforms import grad as _grad
from treetap._transforms import inspect as _inspect
from treetap._transforms import jit as _jit
from treetap._transforms import jit_partial as _jit_partial
from treetap._transforms import loops as _loops
from treetap._transforms import scan as _scan
from treetap._transforms import sharding as _sharding
from treetap._transforms import vmap as _vmap
from treetap._transforms.grad import DiffState
from treetap._transforms.lift import prefixes as _prefixes
from treetap._transforms.lift.axis_names import PARTITION_NAME, transform_metadata
from treetap._transforms.lift.prefixes import StateAxes, StateSharding
from treetap._transforms.scan import Carry
from treetap._transforms.sharding import (
    get_named_sharding,
    get_partition_spec,
    with_partitioning,
)
from treetap.initializers import Initializer
from treetap.metrics import Metric, MultiMetric
from treetap.nnx import compat as compat
from treetap.nnx import traversals as traversals
from treetap.nnx.contexts import (
    MergeContext,
    NodeStates,
    SplitContext,
    UpdateContext,
    current_update_context,
    from_tree,
    merge_context,
    split_context,
    to_tree,
    update_context,
)
from treetap.nnx.deprecated import (
    first_from,
    pure,
    register_variable_name,
    var_defaults,
    variable_name_from_type,
    variable_type_from_name,
    vars_as,
)

F = TypeVar("F", bound=Callable[..., _Any])


class set_graph_mode(_settings.set_graph_mode, key="nnx_graph_mode", default=True):
    """As `treetap.set_graph_mode`; on here when nobody has set it."""


class set_graph_updates(
    _settings.set_graph_updates, key="nnx_graph_updates", default=True
):
    """As `treetap.set_graph_updates`; on here when nobody has set it."""


def _graph_mode(graph: bool | None) -> bool:
    """The mode an argument gives, else the setting of this namespace."""
    return set_graph_mode.current_value() if graph is None else graph


def _graph_by_default(fn: F) -> F:
    """The same function, in graph mode unless an argument or a setting says else."""

    @functools.wraps(fn)
    def call(*args: _Any, graph: bool | None = None, **kwargs: _Any) -> _Any:
        return fn(*args, graph=_graph_mode(graph), **kwargs)

    return call  # pyright: ignore[reportReturnType] - the signature is that of `fn`


def _updates_by_default(fn: F) -> F:
    """The same transform, with graph updates unless told otherwise."""

    @functools.wraps(fn)
    def call(
        *args: _Any,
        graph: bool | None = None,
        graph_updates: bool | None = None,
        **kwargs: _Any,
    ) -> _Any:
        if graph_updates is None:
            graph_updates = set_graph_updates.current_value()
        modes = {"graph": _graph_mode(graph), "graph_updates": graph_updates}
        return fn(*args, **modes, **kwargs)

    return call  # pyright: ignore[reportReturnType] - the signature is that of `fn`


cached_partial = _updates_by_default(_jit_partial.cached_partial)
checkify = _updates_by_default(_cond.checkify)
cond = _updates_by_default(_cond.cond)
custom_vjp = _updates_by_default(_custom_vjp.custom_vjp)
eval_shape = _updates_by_default(_inspect.eval_shape)
fori_loop = _updates_by_default(_loops.fori_loop)
fork_rngs = _updates_by_default(_random_rules.fork_rngs)
grad = _updates_by_default(_grad.grad)
jit = _updates_by_default(_jit.jit)
jit_partial = _updates_by_default(_jit_partial.jit_partial)
jvp = _updates_by_default(_grad.jvp)
make_jaxpr = _updates_by_default(_inspect.make_jaxpr)
pmap = _updates_by_default(_vmap.pmap)
remat = _updates_by_default(_grad.remat)
scan = _updates_by_default(_scan.scan)
shard_map = _updates_by_default(_vmap.shard_map)
split_rngs = _updates_by_default(_random_rules.split_rngs)
switch = _updates_by_default(_cond.switch)
value_and_grad = _updates_by_default(_grad.value_and_grad)
vjp = _updates_by_default(_grad.vjp)
vmap = _updates_by_default(_vmap.vmap)
while_loop = _updates_by_default(_loops.while_loop)

abstract_with_sharding = _graph_by_default(_sharding.abstract_with_sharding)
as_abstract = _graph_by_default(_sharding.as_abstract)
clone = _graph_by_default(_copies.clone)
flatten = _graph_by_default(_split.flatten)
get_abstract_model = _graph_by_default(_sharding.get_abstract_model)
graphdef = _graph_by_default(_split.graphdef)
iter_children = _graph_by_default(_module.iter_children)
iter_graph = _graph_by_default(_traverse.iter_graph)
iter_module_children = iter_children
iter_modules = _graph_by_default(_module.iter_modules)
map = _graph_by_default(_apply.map)
prefix = _graph_by_default(_prefixes.prefix)
recursive_map = _graph_by_default(_traverse.recursive_map)
reseed = _graph_by_default(_random_rules.reseed)
split = _graph_by_default(_split.split)
state = _graph_by_default(_split.state)
unpack = _graph_by_default(_split.unpack)
variables = state
view = _graph_by_default(_views.view)
view_info = _graph_by_default(_views.view_info)
with_attributes = _graph_by_default(_views.with_attributes)
with_rngs = _graph_by_default(_random_rules.with_rngs)


class Object(Pytree, pytree=False):
    """A Pytree that stays out of JAX's registry."""

    def __init_subclass__(cls, *, pytree: bool = False, **kwargs: _Any):
        if pytree:
            raise _AttributeStatusError(
                f"{cls.__name__}: an Object is not a pytree. Derive from "
                "Pytree instead."
            )
        super().__init_subclass__(pytree=False, **kwargs)


class Optimizer(_Optimizer[_Any]):
    """As `treetap.Optimizer`; in graph mode unless an argument or a setting says else.

    Args:
        model: This and those that follow, as for `treetap.Optimizer`.
        tx: An optax transformation.
        wrt: A filter: what is trained.
        graph: Keep shared references.
    """

    def __init__(self, model: _Any, tx: _Any, *, wrt: _Any, graph: bool | None = None):
        super().__init__(model, tx, wrt=wrt, graph=_graph_mode(graph))


class ModelAndOptimizer(_ModelAndOptimizer):
    """Deprecated: a model with its optimizer in one object; use `Optimizer`.

    Args:
        model: The model.
        tx: An optax transformation.
        wrt: A filter: what is trained.
    """

    def __init__(self, model: _Any, tx: _Any, *, wrt: _Any = Param):
        super().__init__(model, tx, wrt=wrt, graph=_graph_mode(None))


class EMA(_EMA):
    """As `treetap.EMA`; in graph mode unless an argument or a setting says else.

    Args:
        params: This and those that follow, as for `treetap.EMA`.
        decay: How much of the average stays.
        only: Which Variables to average.
        graph: Keep shared references.
    """

    def __init__(
        self,
        params: _Any,
        decay: float,
        *,
        only: _Any = ...,
        graph: bool | None = None,
    ):
        super().__init__(params, decay, only=only, graph=_graph_mode(graph))


def display(*objects: _Any) -> None:
    """Shows objects: through treescope in a notebook, as text elsewhere."""
    try:
        from IPython.core.getipython import get_ipython  # pyright: ignore[reportMissingImports] - only in notebooks

        in_notebook = get_ipython() is not None
    except ImportError:
        in_notebook = False
    for item in objects:
        if in_notebook:
            import treescope

            treescope.display(item)
        else:
            print(item)


__all__ = [
    "EMA",
    "PARTITION_NAME",
    "RNN",
    "All",
    "Any",
    "BatchNorm",
    "BatchStat",
    "Bidirectional",
    "Cache",
    "Carry",
    "Conv",
    "ConvTranspose",
    "Dict",
    "DiffState",
    "Dropout",
    "Einsum",
    "Embed",
    "Everything",
    "FlatState",
    "GRUCell",
    "GraphDef",
    "GraphState",
    "GroupNorm",
    "Initializer",
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
    "MergeContext",
    "Metric",
    "ModelAndOptimizer",
    "Module",
    "MultiHeadAttention",
    "MultiMetric",
    "NodeStates",
    "Not",
    "Nothing",
    "Object",
    "OfType",
    "OptArray",
    "OptState",
    "OptVariable",
    "OptimizedLSTMCell",
    "Optimizer",
    "PReLU",
    "Param",
    "PathContains",
    "Perturbation",
    "Pytree",
    "RMSNorm",
    "RNNCellBase",
    "RngCount",
    "RngKey",
    "RngState",
    "RngStream",
    "Rngs",
    "Sequential",
    "SimpleCell",
    "SpectralNorm",
    "SplitContext",
    "State",
    "StateAxes",
    "StateSharding",
    "UpdateContext",
    "Variable",
    "VariableMetadata",
    "WeightNorm",
    "WithTag",
    "abstract_with_sharding",
    "as_abstract",
    "as_pure",
    "avg_pool",
    "cached_partial",
    "call",
    "capture",
    "celu",
    "check_pytree",
    "checkify",
    "clone",
    "combine_masks",
    "compat",
    "cond",
    "current_update_context",
    "custom_vjp",
    "data",
    "dataclass",
    "display",
    "dot_product_attention",
    "elu",
    "eval_shape",
    "filter_state",
    "find_duplicates",
    "first_from",
    "flatten",
    "fori_loop",
    "fork_rngs",
    "from_flat_state",
    "from_tree",
    "gelu",
    "get_abstract_model",
    "get_named_sharding",
    "get_partition_spec",
    "glu",
    "grad",
    "graphdef",
    "hard_sigmoid",
    "hard_silu",
    "hard_swish",
    "hard_tanh",
    "has_data",
    "identity",
    "initializers",
    "is_data",
    "iter_children",
    "iter_graph",
    "iter_module_children",
    "iter_modules",
    "jit",
    "jit_partial",
    "jvp",
    "leaky_relu",
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
    "merge_context",
    "merge_state",
    "metrics",
    "min_pool",
    "one_hot",
    "pmap",
    "pool",
    "pop",
    "prefix",
    "pure",
    "recursive_map",
    "register_data_type",
    "register_variable_name",
    "relu",
    "relu6",
    "remat",
    "replace_by_pure_dict",
    "reseed",
    "restore_int_paths",
    "restore_rngs",
    "scan",
    "selu",
    "set_graph_mode",
    "set_graph_updates",
    "set_metadata",
    "shard_map",
    "sigmoid",
    "silu",
    "soft_sign",
    "softmax",
    "softplus",
    "split",
    "split_context",
    "split_rngs",
    "split_state",
    "standardize",
    "state",
    "static",
    "swish",
    "switch",
    "tabulate",
    "tanh",
    "to_flat_state",
    "to_pure_dict",
    "to_tree",
    "transform_metadata",
    "traversals",
    "unflatten",
    "unpack",
    "update",
    "update_context",
    "use_eager_sharding",
    "using_eager_sharding",
    "value_and_grad",
    "var_defaults",
    "variable_name_from_type",
    "variable_type_from_name",
    "variables",
    "vars_as",
    "view",
    "view_info",
    "vjp",
    "vmap",
    "while_loop",
    "with_attributes",
    "with_metadata",
    "with_partitioning",
    "with_rngs",
    "with_vars",
]
