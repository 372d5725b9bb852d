# SPDX-License-Identifier: Apache-2.0
"""summary: a table of a model.

Most are names of treetap, as NNX has them in this module.
"""

# ruff: noqa: PLC0414 - `as` says that a name is public here

from treetap.nnx import tabulate as tabulate
