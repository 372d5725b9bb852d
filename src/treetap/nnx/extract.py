# SPDX-License-Identifier: Apache-2.0
"""extract: objects in trees as pure trees, and prefixes of trees.

Most are names of treetap, as NNX has them in this module.
"""

# ruff: noqa: PLC0414 - `as` says that a name is public here

from treetap._transforms.lift.prefixes import PrefixFilter
from treetap.nnx import A as A
from treetap.nnx import NodeStates as NodeStates
from treetap.nnx import Pytree as Pytree
from treetap.nnx import State as State
from treetap.nnx import from_tree as from_tree
from treetap.nnx import prefix as prefix
from treetap.nnx import to_tree as to_tree
from treetap.nnx.annotations import Index as Index
from treetap.nnx.annotations import KeyPath as KeyPath
from treetap.nnx.annotations import Leaf as Leaf
from treetap.nnx.annotations import PathParts as PathParts
from treetap.nnx.annotations import Prefix as Prefix
from treetap.nnx.contexts import is_tree_node as is_tree_node

PrefixMapping = PrefixFilter
