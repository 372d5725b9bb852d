# SPDX-License-Identifier: Apache-2.0
"""Layers, a family a file: what a model is built of.

Signatures, attribute names, shapes, initial values and the order of random keys are
those of NNX, so a model gets the same parameters from the same seed.
"""
