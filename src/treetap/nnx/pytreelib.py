# SPDX-License-Identifier: Apache-2.0
"""pytreelib: objects whose attributes are a JAX tree.

Most are names of treetap, as NNX has them in this module.
"""

# ruff: noqa: PLC0414 - `as` says that a name is public here

from treetap._core.trees.pytree import PytreeMeta
from treetap._core.variables.metadata import MISSING as MISSING
from treetap.nnx import A as A
from treetap.nnx import Data as Data
from treetap.nnx import Object as Object
from treetap.nnx import Pytree as Pytree
from treetap.nnx import Static as Static
from treetap.nnx import Variable as Variable
from treetap.nnx import check_pytree as check_pytree
from treetap.nnx import data as data
from treetap.nnx import dataclass as dataclass
from treetap.nnx import has_data as has_data
from treetap.nnx import is_data as is_data
from treetap.nnx import register_data_type as register_data_type
from treetap.nnx import static as static

ObjectMeta = PytreeMeta
