# SPDX-License-Identifier: Apache-2.0
"""ema: averages of parameters.

Most are names of treetap, as NNX has them in this module.
"""

# ruff: noqa: PLC0414 - `as` says that a name is public here

from treetap.nnx import EMA as EMA
from treetap.nnx import A as A
