# SPDX-License-Identifier: Apache-2.0
"""statelib: States and what is done with them.

Most are names of treetap, as NNX has them in this module.
"""

# ruff: noqa: PLC0414 - `as` says that a name is public here

from treetap._core.trees.state import diff_state
from treetap.nnx import A as A
from treetap.nnx import FlatState as FlatState
from treetap.nnx import State as State
from treetap.nnx import filter_state as filter_state
from treetap.nnx import from_flat_state as from_flat_state
from treetap.nnx import map_state as map_state
from treetap.nnx import merge_state as merge_state
from treetap.nnx import replace_by_pure_dict as replace_by_pure_dict
from treetap.nnx import restore_int_paths as restore_int_paths
from treetap.nnx import split_state as split_state
from treetap.nnx import to_flat_state as to_flat_state
from treetap.nnx import to_pure_dict as to_pure_dict
from treetap.nnx.annotations import ExtractValueFn as ExtractValueFn
from treetap.nnx.annotations import Key as Key
from treetap.nnx.annotations import PathParts as PathParts
from treetap.nnx.annotations import SetValueFn as SetValueFn

diff = diff_state
