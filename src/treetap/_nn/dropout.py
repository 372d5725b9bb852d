# SPDX-License-Identifier: Apache-2.0
"""Dropout: zeros at random places while training, nothing while evaluating.

The stream a layer was given is forked when it is made, so that layers do not share one.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from treetap._core.errors import StructureError
from treetap._core.trees.attributes import data
from treetap._core.wording import typed
from treetap._modules.module import Module
from treetap._modules.random_streams import Rngs, RngStream
from treetap._nn.parameters import (
    Array,
    canonical_axes,
    check_rate,
    mode_of_call,
    where,
)


def forked(layer: Any, rngs: Any, name: str) -> Any:
    """Return a stream of the layer's own, from streams or a stream; None from None."""
    if rngs is None:
        return data(None)
    stream = rngs[name] if isinstance(rngs, Rngs) else rngs
    if not isinstance(stream, RngStream):
        raise TypeError(
            f"{type(layer).__name__}: `rngs` must be an Rngs, an RngStream or None, "
            f"got {type(rngs).__name__}."
        )
    return stream.fork()


def next_key(layer: Any, rngs: Any, name: str) -> Any:
    """Return the key to use, from streams, a stream, or a key itself."""
    stream = rngs[name] if isinstance(rngs, Rngs) else rngs
    if isinstance(stream, RngStream):
        return stream()
    dtype: Any = rngs.dtype if isinstance(rngs, jax.Array) else None
    if dtype == jnp.uint32 or jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return rngs  # a key, as raw data or typed
    raise TypeError(
        f"{where(layer)}: `rngs` must be an Rngs, an RngStream or a key, got "
        f"{typed(rngs)}."
    )


def key_of_call(layer: Any, given: Any, name: str) -> Any:
    """Return the key that a call drops with: from its own streams, or the layer's."""
    rngs = layer.rngs if given is None else given
    if rngs is None:
        raise StructureError(
            f"{where(layer)}: `deterministic` is False, but no `rngs` argument was "
            f"provided to {type(layer).__name__}. Give `rngs` to the layer or to the "
            "call."
        )
    return next_key(layer, rngs, name)


class Dropout(Module):
    """Set elements to zero at random, and scale the others up to make up for it.

    Args:
        rate: The share of elements to drop, from 0 to 1.
        broadcast_dims: Axes along which elements are dropped together.
        deterministic: Whether to leave the inputs alone; `view`, `train` and `eval` set
            it.
        rng_collection: The name of the stream.
        rngs: Random streams, or a stream; without it, each call brings its own.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> layer = tt.Dropout(0.5, rngs=tt.Rngs(0))
        >>> sorted({float(x) for x in layer(jnp.ones(100))})
        [0.0, 2.0]
        >>> bool((tt.view(layer, deterministic=True)(jnp.ones(100)) == 1).all())
        True
    """

    def __init__(
        self,
        rate: float,
        *,
        broadcast_dims: Sequence[int] = (),
        deterministic: bool | None = False,
        rng_collection: str = "dropout",
        rngs: Rngs | RngStream | None = None,
    ):
        self.rate = check_rate(self, "rate", rate)
        self.broadcast_dims = tuple(broadcast_dims)
        self.deterministic = deterministic
        self.rng_collection = rng_collection
        self.rngs = forked(self, rngs, rng_collection)

    def __call__(
        self,
        inputs: Array,
        *,
        deterministic: bool | None = None,
        rngs: Rngs | RngStream | jax.Array | None = None,
    ) -> jax.Array:
        """Drop some of the `inputs`.

        Args:
            inputs: An array.
            deterministic: Instead of the layer's own.
            rngs: Random streams, a stream, or a key, instead of the layer's own.
        """
        if mode_of_call(self, "deterministic", deterministic) or self.rate == 0:
            return inputs
        if self.rate == 1:
            return jnp.zeros_like(inputs)
        inputs = jnp.asarray(inputs)
        if not jnp.issubdtype(inputs.dtype, jnp.inexact):
            raise StructureError(
                f"{where(self)}: elements that are kept are scaled, so inputs must be "
                f"floating or complex; got {typed(inputs)}."
            )
        keep = 1.0 - self.rate
        shared = canonical_axes(self, self.broadcast_dims, inputs.ndim)
        kept = _kept(key_of_call(self, rngs, self.rng_collection), keep, inputs, shared)
        return jnp.where(kept, inputs / keep, jnp.zeros_like(inputs))

    def set_view(self, deterministic: bool | None = None) -> None:
        """Set the mode of a view.

        Args:
            deterministic: Whether to leave the inputs alone.
        """
        if deterministic is not None:
            self.deterministic = deterministic


def _kept(
    key: Any, keep: float, inputs: jax.Array, shared: tuple[int, ...]
) -> jax.Array:
    """Return which elements to keep, sharded as the inputs are."""
    shape = tuple(1 if i in shared else n for i, n in enumerate(inputs.shape))
    mesh, spec = jax.typeof(inputs).sharding.mesh, jax.typeof(inputs).sharding.spec
    names = (None if i in shared else name for i, name in enumerate(spec))
    placed = NamedSharding(mesh, PartitionSpec(*names)) if any(spec) else None
    return jax.random.bernoulli(key, keep, shape, out_sharding=placed)
