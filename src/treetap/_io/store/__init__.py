# SPDX-License-Identifier: Apache-2.0
"""Stores: Records as safetensors files, and many of them in a folder of arrays."""
