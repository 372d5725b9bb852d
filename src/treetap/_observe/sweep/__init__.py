# SPDX-License-Identifier: Apache-2.0
"""Sweeps: a program run with many patches, computing once what they share.

A patch at a site changes nothing before it, and the metric reads a part of what comes
after. `jax.vmap` over all patches of the whole program knows neither. Here the program
is written out as one flat list of equations, and then

- `points` marks where patches go in, and names what cannot be written out;
- `flat` writes a program out: calls are opened, loops with sites in them unrolled;
- `regions` computes of each value only the region that is read later;
- `rows` runs the program once for what all patches share, and each equation once more
  for the patches before it, mapped over these; it also says how much memory that takes.

`patch` (one folder up) is the public side.
"""
