# SPDX-License-Identifier: Apache-2.0
"""metrics: figures gathered over batches.

Most are names of treetap, as NNX has them in this module.
"""

# ruff: noqa: PLC0414 - `as` says that a name is public here

from treetap.metrics import Accuracy as Accuracy
from treetap.metrics import Average as Average
from treetap.metrics import Metric as Metric
from treetap.metrics import MetricState as MetricState
from treetap.metrics import MultiMetric as MultiMetric
from treetap.metrics import Statistics as Statistics
from treetap.metrics import Welford as Welford
from treetap.nnx import Pytree as Pytree
from treetap.nnx import Variable as Variable
