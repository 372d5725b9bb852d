# SPDX-License-Identifier: Apache-2.0
"""Files: weights as safetensors under rules of renaming, and Orbax checkpoints."""
