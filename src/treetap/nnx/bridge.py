# SPDX-License-Identifier: Apache-2.0
"""Says that NNX's bridge to Linen is left out: treetap has no Linen Modules."""

raise ImportError(
    "treetap.nnx has no bridge: treetap has NNX's Modules only, and no Linen to bridge "
    "to. Port the Modules to nnx, or run them under flax."
)
