# SPDX-License-Identifier: Apache-2.0
"""Capture: how a value comes out of a running program, or goes into it."""
