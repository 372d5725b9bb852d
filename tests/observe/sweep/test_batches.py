# SPDX-License-Identifier: Apache-2.0
"""Batches: as many patches as fit into memory, and all of them in the end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from treetap._observe.sweep import batches
from treetap._observe.sweep.batches import Batch
from treetap._observe.sweep.rows import Weight


@pytest.mark.parametrize(
    ("count", "wanted"),
    [(0, (1, 1)), (1, (1, 1)), (3, (3, 1)), (4, (4, 1)), (9, (4, 2)), (99, (4, 6))],
)
def test_a_batch_of_a_given_size(count, wanted):
    batch = Batch.of(4, 6, count)
    assert batch == wanted
    assert batch.points * batch.places <= max(count, 1)


def test_a_batch_that_fits():
    weight = Weight(100, np.array([10.0, 40.0]))
    for free in (0, 180, 300, 500, 10_000):
        batch = Batch.fitting(weight, 4, 6, free)
        share = batch.points / 4
        fits = weight.peak(batch.places, share) <= free
        assert fits or batch == (1, 1)
    assert Batch.fitting(weight, 4, 6, 10_000) == (4, 6)
    assert Batch.fitting(weight, 4, 6, 250) == (4, 1)
    assert Batch.fitting(weight, 4, 6, 180) == (2, 1)


@pytest.mark.parametrize("places", [1, 2, 3, 5, 7])
def test_all_places_are_run(places):
    numbers, sizes = jnp.arange(5), []

    def results(some):
        sizes.append(len(some))
        return jnp.stack([some * 2, some + 1])[..., None] * jnp.ones((1, 1, 3))

    found = Batch(2, places).run(results, numbers)
    wanted = jnp.stack([numbers * 2, numbers + 1])[..., None] * jnp.ones((1, 1, 3))
    np.testing.assert_array_equal(found, wanted)
    assert max(sizes) <= places


class Device:
    def __init__(self, **stats):
        self.stats = stats

    def memory_stats(self):
        return self.stats or None


def test_free_memory_is_that_of_the_device_with_the_least(monkeypatch):
    full, empty = Device(bytes_limit=100, bytes_in_use=60), Device(bytes_limit=100)
    monkeypatch.setattr(jax, "local_devices", lambda: [empty, full])
    assert batches.free_memory() == batches.OF_DEVICE * 40
    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    assert 0 < batches.free_memory() <= batches.MOST_ON_HOST
    monkeypatch.delattr(batches.os, "sysconf")
    assert batches.free_memory() == batches.OF_HOST * 2**30
