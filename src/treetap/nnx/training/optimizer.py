# SPDX-License-Identifier: Apache-2.0
"""optimizer: optax with its state in Variables.

Most are names of treetap, as NNX has them in this module.
"""

# ruff: noqa: PLC0414 - `as` says that a name is public here

from typing import Any

import jax

from treetap._core.variables.metadata import MISSING as MISSING
from treetap.nnx import M as M
from treetap.nnx import ModelAndOptimizer as ModelAndOptimizer
from treetap.nnx import OptArray as OptArray
from treetap.nnx import Optimizer as Optimizer
from treetap.nnx import OptState as OptState
from treetap.nnx import OptVariable as OptVariable
from treetap.nnx import Param as Param
from treetap.nnx import Pytree as Pytree
from treetap.nnx import Variable as Variable


def to_opt_state(tree: Any) -> Any:
    """What optax keeps, in Variables: those there are as `OptVariable`s.

    Args:
        tree: Any tree of Variables and arrays.
    """

    def kept(leaf: Any) -> Any:
        if not isinstance(leaf, Variable):
            return OptArray(leaf)
        return OptVariable.from_metadata(leaf.get_raw_value(), leaf.get_metadata())

    return jax.tree.map(kept, tree, is_leaf=lambda leaf: isinstance(leaf, Variable))
