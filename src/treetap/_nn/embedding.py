# SPDX-License-Identifier: Apache-2.0
"""Embed: a table with a row for each of a number of things.

Looking up is indexing; `attend` goes back, from a vector to a score for each row.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from treetap._core.errors import StructureError
from treetap._core.variables.kinds import Param
from treetap._core.wording import typed
from treetap._modules.random_streams import Rngs
from treetap._nn.dtypes import promote_dtype as default_promote
from treetap._nn.parameters import (
    NO_METADATA,
    Array,
    Dtype,
    Initializer,
    Layer,
    Metadata,
    Promote,
    check_features,
    check_sizes,
    held,
    sizes_of,
    where,
)
from treetap.initializers import variance_scaling

default_embed_init = variance_scaling(1.0, "fan_in", "normal", out_axis=0)


class Embed(Layer):
    """Look up vectors in a table, by number.

    A number past the end gives NaN, a negative one counts from the end.

    Args:
        num_embeddings: The number of rows.
        features: The length of each.
        dtype: The dtype of the results; that of the table without it.
        param_dtype: The dtype of the table.
        embedding_init: The initializer of the table.
        promote_dtype: What casts the table (and in `attend` the query as well), called
            as `promote_dtype`.
        rngs: Random streams; `params` gives a key to the table.
        embedding_metadata: Metadata of the table.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> table = tt.Embed(10, 4, rngs=tt.Rngs(0))
        >>> table(jnp.array([[1, 2, 3]])).shape
        (1, 3, 4)
    """

    embedding: Param[Any]

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        embedding_init: Initializer = default_embed_init,
        promote_dtype: Promote = default_promote,
        rngs: Rngs,
        embedding_metadata: Metadata = NO_METADATA,
    ):
        shape = check_sizes(self, num_embeddings=num_embeddings, features=features)
        self._make_parameters(locals(), embedding=shape)
        self.num_embeddings, self.features = shape
        if dtype is None:
            self.dtype = self.embedding.dtype

    def __call__(self, inputs: Array, out_sharding: Any = None) -> jax.Array:
        """Return the rows that `inputs` names.

        Args:
            inputs: Whole numbers, of any shape.
            out_sharding: The sharding of the result, on an explicit mesh. By default
                that of `inputs` and the features, if every row is whole somewhere.
        """
        inputs = jnp.asarray(inputs)
        if not jnp.issubdtype(inputs.dtype, jnp.integer):
            raise StructureError(
                f"{where(self)}: rows are looked up by whole numbers, not by "
                f"{typed(inputs)}. Cast them with `.astype(int)`."
            )
        (table,) = self.promote_dtype(
            (held(self.embedding),), dtype=self.dtype, inexact=False
        )
        if out_sharding is None:
            out_sharding = _sharding_of_rows(table, inputs)
        if out_sharding is None:
            return _rows(table, inputs)
        take: Any = jax.sharding.auto_axes(_rows, out_sharding=out_sharding)
        return take(table, inputs)

    def attend(self, query: Array, out_sharding: Any = None) -> jax.Array:
        """Return a score for each row: the product of `query` and the transposed table.

        Args:
            query: An array with `features` on its last axis.
            out_sharding: The sharding of the result, on an explicit mesh.
        """
        table = held(self.embedding)
        check_features(self, query, sizes_of(table, (self.features,))[-1])
        query, table = self._promoted(query, table)
        return jnp.dot(query, table.T, out_sharding=out_sharding)


def _sharding_of_rows(table: jax.Array, numbers: jax.Array) -> PartitionSpec | None:
    """Return the sharding of rows that each device can look up; None if JAX decides.

    As soon as the numbers are split, JAX asks for the sharding of the result. There is
    only one choice if the table is not split along its rows, and its features not over
    an axis that the numbers are split over.
    """
    held, asked = jax.typeof(table).sharding, jax.typeof(numbers).sharding
    kinds = (*held.mesh.axis_types, *asked.mesh.axis_types)
    if any(kind is not AxisType.Explicit for kind in kinds) or not any(asked.spec):
        return None
    across, features = (*held.spec, None, None)[:2]
    missing = [None] * (numbers.ndim - len(asked.spec))
    parts = [*asked.spec, *missing, features]
    used = [n for x in parts if x for n in (x if isinstance(x, tuple) else (x,))]
    is_clear = across is None and len(used) == len(set(used))
    return PartitionSpec(*parts) if is_clear else None


def _rows(table: jax.Array, numbers: jax.Array) -> jax.Array:
    """Look rows up; a table of one row is broadcast instead."""
    if table.shape[0] == 1:
        row = jnp.reshape(table, (1,) * numbers.ndim + (-1,))
        return jnp.broadcast_to(row, (*numbers.shape, table.shape[1]))
    return jnp.take(table, numbers, axis=0)
