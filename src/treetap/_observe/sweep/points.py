# SPDX-License-Identifier: Apache-2.0
"""Points: where patches go into a program.

A point is an identity that an edit puts at a site, so that the site can be found again
in the program that JAX traced, however it got there. It holds the number of the site
and, under `jax.vmap`, how many axes of mappings its value has in front.
"""

from typing import Any

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


class Unsuited(Exception):
    """A program cannot be written out: it is patched as a whole, see `patch`."""


point_p = Primitive("patch_point")


def point(value: Any, number: int) -> Any:
    """Marks a value, the only one of a site."""
    return point_p.bind(value, site=number, mappings=0, turns=(), region=None)


def _same(value: Any, **params: Any) -> Any:
    return value


def _batched(values: Any, dims: Any, *, mappings: int, **params: Any) -> Any:
    moved = jnp.moveaxis(values[0], dims[0], 0)
    return point_p.bind(moved, mappings=mappings + 1, **params), 0


def _differentiated(primals: Any, tangents: Any, **params: Any) -> Any:
    raise Unsuited("a site is differentiated")


point_p.def_impl(_same)
point_p.def_abstract_eval(_same)
batching.primitive_batchers[point_p] = _batched
ad.primitive_jvps[point_p] = _differentiated
mlir.register_lowering(point_p, mlir.lower_fun(_same, multiple_results=False))
