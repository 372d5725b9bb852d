# SPDX-License-Identifier: Apache-2.0
"""Sweeps: a program run with many patches, computing once what they share.

A patch at a site changes nothing before it, and the metric reads a part of what comes
after. `jax.vmap` over all patches of the whole program knows neither. Here the program
is written out as one flat list of equations. In the order of the files:

- `points`: marks where patches go in.
- `flat`: a program written out; calls are opened, loops with sites in them unrolled.
- `regions`: of each value only the region is computed that is read later.
- `rows`: what all patches share is run once, and each equation once more for the
  patches before it, mapped over these; and how much memory that takes.
- `batches`: how many patches run at once.

`patch`, one folder up, is the public side.
"""
