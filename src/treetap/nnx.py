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

from treetap import (
    _applying,
    _batching,
    _branching,
    _compiling,
    _copies,
    _custom_rules,
    _differentiating,
    _fixing,
    _inspecting,
    _looping,
    _modules,
    _prefixes,
    _reseeding,
    _scanning,
    _settings,
    _sharding,
    _splitting,
    _views,
    _walks,
    compat,
    initializers,
    metrics,
)
from treetap import _traversals as traversals
from treetap._applying import call
from treetap._attributes import (
    data,
    dataclass,
    has_data,
    is_data,
    register_data_type,
    static,
)
from treetap._axis_names import PARTITION_NAME, transform_metadata
from treetap._capturing import capture
from treetap._containers import Dict, List, Sequential
from treetap._contexts import (
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
from treetap._copies import as_pure
from treetap._deprecated import (
    first_from,
    pure,
    register_variable_name,
    var_defaults,
    variable_name_from_type,
    variable_type_from_name,
    vars_as,
)
from treetap._differentiating import DiffState
from treetap._errors import AttributeStatusError as _AttributeStatusError
from treetap._filters import (
    All,
    Any,
    Everything,
    Not,
    Nothing,
    OfType,
    PathContains,
    WithTag,
)
from treetap._kinds import (
    BatchStat,
    Cache,
    Intermediate,
    Param,
    Perturbation,
    RngCount,
    RngKey,
    RngState,
)
from treetap._layers.activations import (
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
from treetap._layers.adapters import LoRA, LoRALinear, LoRAParam
from treetap._layers.attention import (
    combine_masks,
    dot_product_attention,
    make_attention_mask,
    make_causal_mask,
)
from treetap._layers.carries import RNNCellBase
from treetap._layers.cells import (
    GRUCell,
    LSTMCell,
    OptimizedLSTMCell,
    SimpleCell,
)
from treetap._layers.convolution import Conv, ConvTranspose
from treetap._layers.dropout import Dropout
from treetap._layers.embedding import Embed
from treetap._layers.grouping import GroupNorm, InstanceNorm
from treetap._layers.linear import Einsum, Linear, LinearGeneral
from treetap._layers.multihead import MultiHeadAttention
from treetap._layers.normalization import BatchNorm, LayerNorm, RMSNorm
from treetap._layers.pooling import avg_pool, max_pool, min_pool, pool
from treetap._layers.recurrence import RNN, Bidirectional
from treetap._layers.reparametrization import SpectralNorm, WeightNorm
from treetap._metadata import VariableMetadata, with_metadata
from treetap._modules import Module
from treetap._placement import logical_axis_rules
from treetap._prefixes import StateAxes, StateSharding
from treetap._pytrees import Pytree, check_pytree
from treetap._randomness import Rngs, RngStream
from treetap._report.summary import tabulate
from treetap._reseeding import restore_rngs
from treetap._scanning import Carry
from treetap._settings import use_eager_sharding, using_eager_sharding
from treetap._sharding import (
    get_named_sharding,
    get_partition_spec,
    with_partitioning,
)
from treetap._sharing import find_duplicates
from treetap._specs import GraphDef
from treetap._splitting import GraphState, merge, unflatten
from treetap._states import (
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
from treetap._training.averaging import EMA as _EMA
from treetap._training.model_and_optimizer import (
    ModelAndOptimizer as _ModelAndOptimizer,
)
from treetap._training.optimizer import OptArray, OptState, OptVariable
from treetap._training.optimizer import Optimizer as _Optimizer
from treetap._updates import pop, set_metadata, update, with_vars
from treetap._variables import Variable
from treetap.initializers import Initializer
from treetap.metrics import Metric, MultiMetric

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


cached_partial = _updates_by_default(_fixing.cached_partial)
checkify = _updates_by_default(_branching.checkify)
cond = _updates_by_default(_branching.cond)
custom_vjp = _updates_by_default(_custom_rules.custom_vjp)
eval_shape = _updates_by_default(_inspecting.eval_shape)
fori_loop = _updates_by_default(_looping.fori_loop)
fork_rngs = _updates_by_default(_reseeding.fork_rngs)
grad = _updates_by_default(_differentiating.grad)
jit = _updates_by_default(_compiling.jit)
jit_partial = _updates_by_default(_fixing.jit_partial)
jvp = _updates_by_default(_differentiating.jvp)
make_jaxpr = _updates_by_default(_inspecting.make_jaxpr)
pmap = _updates_by_default(_batching.pmap)
remat = _updates_by_default(_differentiating.remat)
scan = _updates_by_default(_scanning.scan)
shard_map = _updates_by_default(_batching.shard_map)
split_rngs = _updates_by_default(_reseeding.split_rngs)
switch = _updates_by_default(_branching.switch)
value_and_grad = _updates_by_default(_differentiating.value_and_grad)
vjp = _updates_by_default(_differentiating.vjp)
vmap = _updates_by_default(_batching.vmap)
while_loop = _updates_by_default(_looping.while_loop)

abstract_with_sharding = _graph_by_default(_sharding.abstract_with_sharding)
as_abstract = _graph_by_default(_sharding.as_abstract)
clone = _graph_by_default(_copies.clone)
flatten = _graph_by_default(_splitting.flatten)
get_abstract_model = _graph_by_default(_sharding.get_abstract_model)
graphdef = _graph_by_default(_splitting.graphdef)
iter_children = _graph_by_default(_modules.iter_children)
iter_graph = _graph_by_default(_walks.iter_graph)
iter_module_children = iter_children
iter_modules = _graph_by_default(_modules.iter_modules)
map = _graph_by_default(_applying.map)
prefix = _graph_by_default(_prefixes.prefix)
recursive_map = _graph_by_default(_walks.recursive_map)
reseed = _graph_by_default(_reseeding.reseed)
split = _graph_by_default(_splitting.split)
state = _graph_by_default(_splitting.state)
unpack = _graph_by_default(_splitting.unpack)
variables = state
view = _graph_by_default(_views.view)
view_info = _graph_by_default(_views.view_info)
with_attributes = _graph_by_default(_views.with_attributes)
with_rngs = _graph_by_default(_reseeding.with_rngs)


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
