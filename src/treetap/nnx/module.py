# SPDX-License-Identifier: Apache-2.0
"""module: Modules, views of them, and capture.

Most are names of treetap, as NNX has them in this module.
"""

# ruff: noqa: PLC0414 - `as` says that a name is public here

from treetap._capture.listening import append
from treetap._core.trees.pytree import PytreeMeta
from treetap.nnx import A as A
from treetap.nnx import M as M
from treetap.nnx import Module as Module
from treetap.nnx import Pytree as Pytree
from treetap.nnx import State as State
from treetap.nnx import capture as capture
from treetap.nnx import iter_children as iter_children
from treetap.nnx import iter_module_children as iter_module_children
from treetap.nnx import iter_modules as iter_modules
from treetap.nnx import split_state as split_state
from treetap.nnx import view as view
from treetap.nnx import view_info as view_info
from treetap.nnx import with_attributes as with_attributes
from treetap.nnx.annotations import Key as Key
from treetap.nnx.annotations import Path as Path
from treetap.nnx.annotations import PathParts as PathParts
from treetap.nnx.annotations import StateMapping as StateMapping
from treetap.nnx.deprecated import first_from as first_from

ModuleMeta = PytreeMeta
tuple_reduce = append

tuple_init = tuple
