# SPDX-License-Identifier: Apache-2.0
"""The program `treetap`: what the library knows of a model, at the command line.

The road of a command, file by file:

- `main`: the commands, and what each of them does.
- `command`: what all have in common: their options, which come as a `Request`, and how
  they end. `failures` puts what went wrong into one message.
- `targets`: imports what a TARGET names. `inputs`: arrays for it, and weights.
  `programs`: what is run then, the call or the gradient of a loss.
- `figures`: what was seen, as a table and as JSON. `console`: where it is printed.
- `demo`: the built-in model, for when there is no TARGET yet. It learns the poem in
  `jabberwocky.txt`.
- `run_nnx`: a program written for flax.nnx, run with treetap in flax's place.

Only `treetap.__main__` imports this folder.
"""
