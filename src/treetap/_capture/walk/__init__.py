# SPDX-License-Identifier: Apache-2.0
"""The walk: programs that JAX has traced, run again with more inputs and outputs."""
