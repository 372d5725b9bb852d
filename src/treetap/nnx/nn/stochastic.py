# SPDX-License-Identifier: Apache-2.0
"""stochastic: dropout.

Most are names of treetap, as NNX has them in this module.
"""

# ruff: noqa: PLC0414 - `as` says that a name is public here

from treetap.nnx import Dropout as Dropout
from treetap.nnx import Module as Module
from treetap.nnx.deprecated import first_from as first_from
