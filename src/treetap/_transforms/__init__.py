# SPDX-License-Identifier: Apache-2.0
"""Transforms: what JAX does with functions, for functions of models."""
