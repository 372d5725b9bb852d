# SPDX-License-Identifier: Apache-2.0
"""Initializers: functions of a key, a shape and a dtype that give starting values.

They are JAX's own (`jax.nn.initializers`), with factories for zeros and ones beside.
"""

from collections.abc import Callable
from typing import Any

from jax.nn.initializers import (
    Initializer,
    constant,
    delta_orthogonal,
    glorot_normal,
    glorot_uniform,
    he_normal,
    he_uniform,
    kaiming_normal,
    kaiming_uniform,
    lecun_normal,
    lecun_uniform,
    normal,
    ones,
    orthogonal,
    truncated_normal,
    uniform,
    variance_scaling,
    xavier_normal,
    xavier_uniform,
    zeros,
)


def zeros_init() -> Callable[..., Any]:
    """An initializer that gives zeros.

    Examples:
        >>> import jax, treetap as tt
        >>> tt.initializers.zeros_init()(jax.random.key(0), (2,))
        Array([0., 0.], dtype=float32)
    """
    return zeros


def ones_init() -> Callable[..., Any]:
    """An initializer that gives ones."""
    return ones


__all__ = [
    "Initializer",
    "constant",
    "delta_orthogonal",
    "glorot_normal",
    "glorot_uniform",
    "he_normal",
    "he_uniform",
    "kaiming_normal",
    "kaiming_uniform",
    "lecun_normal",
    "lecun_uniform",
    "normal",
    "ones",
    "ones_init",
    "orthogonal",
    "truncated_normal",
    "uniform",
    "variance_scaling",
    "xavier_normal",
    "xavier_uniform",
    "zeros",
    "zeros_init",
]
