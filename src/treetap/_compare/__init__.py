# SPDX-License-Identifier: Apache-2.0
"""Comparisons: two runs side by side, and the first site where they part."""
