# SPDX-License-Identifier: Apache-2.0
"""Compiled programs that a process of tests keeps.

JAX keeps all it compiled, and each program takes a few maps of memory. Linux gives a
process 65,530 of them by default; after that XLA ends the process.
"""

import gc
import pathlib

import jax

MANY = 20_000
MAPS = pathlib.Path("/proc/self/maps")


def maps_in_use():
    """How many maps of memory this process has; 0 where that cannot be told."""
    return MAPS.read_bytes().count(b"\n") if MAPS.exists() else 0


def forget_if_many():
    """Forgets all that was compiled before there is too much of it."""
    if maps_in_use() > MANY:
        jax.clear_caches()
        gc.collect()
