# SPDX-License-Identifier: Apache-2.0
"""Variables: mutable boxes that hold the values of a model."""
