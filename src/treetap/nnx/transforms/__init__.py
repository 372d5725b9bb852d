# SPDX-License-Identifier: Apache-2.0
"""NNX's modules of transforms of JAX.

Each is a list of names, as NNX has it in a module of that name:
autodiff, compilation, general, iteration, transforms.
"""

from treetap.nnx.transforms import autodiff as autodiff
from treetap.nnx.transforms import compilation as compilation
from treetap.nnx.transforms import general as general
from treetap.nnx.transforms import iteration as iteration
from treetap.nnx.transforms import transforms as transforms
