# SPDX-License-Identifier: Apache-2.0
"""NNX's modules of optimizers, averages and metrics.

Each is a list of names, as NNX has it in a module of that name:
ema, metrics, optimizer.
"""

from treetap.nnx.training import ema as ema
from treetap.nnx.training import metrics as metrics
from treetap.nnx.training import optimizer as optimizer
