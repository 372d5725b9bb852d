# SPDX-License-Identifier: Apache-2.0
"""Training: the optimizer around an optax transformation, and averages of a model.

Metrics are in `treetap.metrics`. Everything here is a Pytree whose Variables change in
place, so it goes through every transform beside the model.
"""
