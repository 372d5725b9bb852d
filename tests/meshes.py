# SPDX-License-Identifier: Apache-2.0
"""Meshes for tests; a test that needs more devices than there are is skipped."""

import jax
import pytest
from jax.sharding import AxisType


def devices_of(count):
    devices = jax.devices()
    if len(devices) < count:
        pytest.skip(f"needs {count} devices")
    return devices[:count]


def mesh_of(sizes, names, kind=AxisType.Auto):
    count = 1
    for size in sizes:
        count *= size
    kinds = (kind,) * len(sizes)
    return jax.make_mesh(sizes, names, axis_types=kinds, devices=devices_of(count))
