# SPDX-License-Identifier: Apache-2.0
"""Blame: which operation made the first number that is not finite."""
