# SPDX-License-Identifier: Apache-2.0
"""Statistics: figures of arrays, computed while a program runs or on the host."""
