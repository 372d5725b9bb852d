# SPDX-License-Identifier: Apache-2.0
"""Training: the optimizer around an optax transformation, and averages of a model.

Everything here is a Pytree whose Variables change in place, so it goes through every
transform beside the model. The road of one step of training:

- `matching`: the model's Variables, and the gradients, are read by path and compared
  with what belongs to them. An error lists everything that does not fit.
- `optimizer`: optax computes on States of plain arrays; then model and state are
  written in one go. What optax keeps stands in Variables, sharded as the parameters.
- `ema`: averages of the same Variables move towards their new values.
- `comparable_functions`: transformations and filters are functions, which Python
  compares by identity. As `EqualFunctions` they compare by what they do, so that a
  jitted step is traced once for optimizers that are made alike.

Metrics are in the public file `treetap.metrics`. From here on up may import this:
`_io`, `_report`, `_compare`, `nnx` and the command line.
"""
