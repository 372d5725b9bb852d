# SPDX-License-Identifier: Apache-2.0
"""graph: the former name of the module `graphlib`, which has the same names."""

from treetap.nnx.graphlib import *  # noqa: F403 - all of them
