# SPDX-License-Identifier: Apache-2.0
"""Observing: what people do with the values on the way through a model."""
