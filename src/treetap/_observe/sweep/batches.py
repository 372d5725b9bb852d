# SPDX-License-Identifier: Apache-2.0
"""Batches: how many patches run at once, by the memory that there is."""

import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from treetap._observe.sweep.rows import Weight

OF_DEVICE, OF_HOST = 0.8, 0.25  # how much of the free memory may be taken
# Larger batches are no faster on a CPU: its caches are small.
MOST_ON_HOST = 2**28


class Batch(NamedTuple):
    """How many patches run at once.

    Attributes:
        points: How many points.
        places: How many places of each.
    """

    points: int
    places: int

    @classmethod
    def of(cls, points: int, places: int, count: int) -> "Batch":
        """At most so many patches."""
        if count < points:
            return cls(max(count, 1), 1)
        return cls(points, min(count // points, places))

    @classmethod
    def fitting(cls, weight: Weight, points: int, places: int, free: float) -> "Batch":
        """As many patches as there is memory for; one if there is not enough for it."""
        total, parts = places, 1
        while places > 1 and weight.peak(places) > free:
            parts *= 2
            places = math.ceil(total / parts)
        some = points
        while some > 1 and weight.peak(places, some / points) > free:
            some = math.ceil(some / 2)
        return cls(some, places)

    def run(self, results: Callable[[Any], Any], places: Any) -> Any:
        """What a function gives for some places, so many at a time.

        Args:
            results: From places to an array, whose second axis has one for each.
            places: The numbers of all places.
        """
        count = len(places)
        if count <= self.places:
            return results(places)
        parts = math.ceil(count / self.places)
        size = math.ceil(count / parts)
        padded = jnp.pad(places, (0, parts * size - count))
        found = jax.lax.map(results, padded.reshape(parts, size))
        found = jnp.moveaxis(found, 0, 1)
        return found.reshape(len(found), parts * size, *found.shape[3:])[:, :count]


def free_memory() -> float:
    """How many bytes a program may take, on the device with the least."""
    found = []
    for device in jax.local_devices():
        facts = device.memory_stats() or {}
        if "bytes_limit" in facts:
            free = facts["bytes_limit"] - facts.get("bytes_in_use", 0)
            found.append(OF_DEVICE * free)
        else:
            found.append(min(OF_HOST * _free_on_host(), MOST_ON_HOST))
    return min(found)


def _free_on_host() -> float:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not on this system
        return 2**30
