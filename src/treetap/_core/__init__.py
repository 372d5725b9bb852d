# SPDX-License-Identifier: Apache-2.0
"""The core: what a model is made of."""
