# SPDX-License-Identifier: Apache-2.0
"""NNX's modules of layers.

Each is a list of names, as NNX has it in a module of that name:
activations, attention, dtypes, initializers, linear, lora, normalization, recurrent,
stochastic.
"""

from treetap.nnx.nn import activations as activations
from treetap.nnx.nn import attention as attention
from treetap.nnx.nn import dtypes as dtypes
from treetap.nnx.nn import initializers as initializers
from treetap.nnx.nn import linear as linear
from treetap.nnx.nn import lora as lora
from treetap.nnx.nn import normalization as normalization
from treetap.nnx.nn import recurrent as recurrent
from treetap.nnx.nn import stochastic as stochastic
