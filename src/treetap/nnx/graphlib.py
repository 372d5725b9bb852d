# SPDX-License-Identifier: Apache-2.0
"""graphlib: taking objects apart and putting them together, by reference.

Most are names of treetap, as NNX has them in this module.
"""

# ruff: noqa: PLC0414 - `as` says that a name is public here

from typing import Any

import jax
import numpy as np
from jax.tree_util import all_leaves

from treetap._core.paths import plain_key
from treetap._core.trees.attributes import Node as _Node
from treetap._core.trees.graphdef import ObjectSpec, SharedSpec, VariableSpec
from treetap._core.trees.state import FlatState as FlatState
from treetap._core.variables.values import is_ref
from treetap._core.variables.variable import Variable as _Variable
from treetap.nnx import A as A
from treetap.nnx import GraphDef as GraphDef
from treetap.nnx import GraphState as GraphState
from treetap.nnx import MergeContext as MergeContext
from treetap.nnx import PureState as PureState
from treetap.nnx import SplitContext as SplitContext
from treetap.nnx import State as State
from treetap.nnx import Static as Static
from treetap.nnx import UpdateContext as UpdateContext
from treetap.nnx import Variable as Variable
from treetap.nnx import as_pure as as_pure
from treetap.nnx import cached_partial as cached_partial
from treetap.nnx import call as call
from treetap.nnx import clone as clone
from treetap.nnx import current_update_context as current_update_context
from treetap.nnx import find_duplicates as find_duplicates
from treetap.nnx import flatten as flatten
from treetap.nnx import graphdef as graphdef
from treetap.nnx import iter_children as iter_children
from treetap.nnx import iter_graph as iter_graph
from treetap.nnx import iter_module_children as iter_module_children
from treetap.nnx import map as map
from treetap.nnx import map_state as map_state
from treetap.nnx import merge as merge
from treetap.nnx import merge_context as merge_context
from treetap.nnx import pop as pop
from treetap.nnx import pure as pure
from treetap.nnx import recursive_map as recursive_map
from treetap.nnx import set_graph_mode as set_graph_mode
from treetap.nnx import set_graph_updates as set_graph_updates
from treetap.nnx import set_metadata as set_metadata
from treetap.nnx import split as split
from treetap.nnx import split_context as split_context
from treetap.nnx import state as state
from treetap.nnx import unflatten as unflatten
from treetap.nnx import unpack as unpack
from treetap.nnx import update as update
from treetap.nnx import update_context as update_context
from treetap.nnx import variables as variables
from treetap.nnx import vars_as as vars_as
from treetap.nnx import with_vars as with_vars
from treetap.nnx.annotations import Index as Index
from treetap.nnx.annotations import Key as Key
from treetap.nnx.annotations import Leaf as Leaf
from treetap.nnx.annotations import PathParts as PathParts
from treetap.nnx.deprecations import deprecated as deprecated
from treetap.nnx.proxy_caller import ApplyCaller as ApplyCaller
from treetap.nnx.proxy_caller import CallableProxy as CallableProxy
from treetap.nnx.proxy_caller import DelayedAccessor as DelayedAccessor

GraphFlatState = FlatState
NodeDef = ObjectSpec
NodeRef = SharedSpec
VariableDef = VariableSpec
is_array_ref = is_ref


def is_graph_node(x: Any) -> bool:
    """Whether a value is a Module or another object of ours."""
    return isinstance(x, _Node)


def is_pytree_node(x: Any) -> bool:
    """Whether a value is a container that JAX takes apart."""
    if isinstance(x, _Node | _Variable):
        return False
    return x is None or not all_leaves([x])


def is_node(x: Any) -> bool:
    """Whether there is something inside a value: an object or a container."""
    return is_graph_node(x) or is_pytree_node(x)


def is_node_leaf(x: Any) -> bool:
    """Whether a value is a leaf of objects: a Variable or an array."""
    return is_ref(x) or isinstance(x, _Variable | jax.Array | np.ndarray)


def jax_to_nnx_path(jax_path: tuple[Any, ...], /) -> tuple[Any, ...]:
    """A path of JAX's as one of names and numbers."""
    return tuple(plain_key(entry) for entry in jax_path)
