# SPDX-License-Identifier: Apache-2.0
"""recurrent: recurrent cells, and what runs them.

Most are names of treetap, as NNX has them in this module.
"""

# ruff: noqa: PLC0414 - `as` says that a name is public here

from treetap._nn.cells import float32_orthogonal
from treetap._nn.parameters import default_kernel_init as default_kernel_init
from treetap._nn.recurrence import flip_sequences as flip_sequences
from treetap.initializers import zeros_init
from treetap.nnx import RNN as RNN
from treetap.nnx import A as A
from treetap.nnx import Bidirectional as Bidirectional
from treetap.nnx import Carry as Carry
from treetap.nnx import GRUCell as GRUCell
from treetap.nnx import Initializer as Initializer
from treetap.nnx import Linear as Linear
from treetap.nnx import LSTMCell as LSTMCell
from treetap.nnx import Module as Module
from treetap.nnx import OptimizedLSTMCell as OptimizedLSTMCell
from treetap.nnx import RNNCellBase as RNNCellBase
from treetap.nnx import SimpleCell as SimpleCell
from treetap.nnx import sigmoid as sigmoid
from treetap.nnx import tanh as tanh
from treetap.nnx.annotations import Array as Array
from treetap.nnx.annotations import Dtype as Dtype
from treetap.nnx.annotations import Output as Output
from treetap.nnx.annotations import PromoteDtypeFn as PromoteDtypeFn
from treetap.nnx.annotations import Shape as Shape

modified_orthogonal = float32_orthogonal

default_bias_init = zeros_init()
