# SPDX-License-Identifier: Apache-2.0
"""dtypes: in which dtype a layer computes.

Most are names of treetap, as NNX has them in this module.
"""

# ruff: noqa: PLC0414 - `as` says that a name is public here

from typing import Any

import jax.numpy as jnp

from treetap._nn.dtypes import promote_dtype
from treetap.nnx.annotations import Dtype as Dtype


def canonicalize_dtype(*args: Any, dtype: Any = None, inexact: bool = True) -> Any:
    """The dtype that `promote_dtype` brings values to."""
    return jnp.result_type(*promote_dtype(args, dtype=dtype, inexact=inexact)[:1])
