# SPDX-License-Identifier: Apache-2.0
"""visualization: showing objects.

Most are names of treetap, as NNX has them in this module.
"""

# ruff: noqa: PLC0414 - `as` says that a name is public here

import sys

from treetap.nnx import display as display

in_ipython = "IPython" in sys.modules
