# SPDX-License-Identifier: Apache-2.0
"""What the programs in this folder print of their parameters: a hash of the bytes."""

import hashlib

import jax
import numpy as np
from flax import nnx


def raw(value):
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.ascontiguousarray(value)


def of(model):
    """One hash for all Variables of a model, and how many numbers they have."""
    flat = nnx.to_flat_state(nnx.state(model))
    arrays = {"/".join(map(str, path)): raw(variable[...]) for path, variable in flat}
    digest = hashlib.sha256()
    for path in sorted(arrays):
        digest.update(path.encode())
        digest.update(arrays[path].tobytes())
    size = sum(array.size for array in arrays.values())
    return f"{digest.hexdigest()[:16]} of {size}"
