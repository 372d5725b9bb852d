# SPDX-License-Identifier: Apache-2.0
"""What recurrent cells have in common: the carry, and how their linear maps are made.

A cell goes from a carry and an input to both anew, and says how its carry begins.
"""

import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from treetap._core.errors import StructureError
from treetap._core.trees.attributes import data
from treetap._modules.module import Module
from treetap._modules.random_streams import Rngs, RngStream
from treetap._nn.dropout import forked, next_key
from treetap._nn.linear import Linear
from treetap._nn.parameters import (
    Initializer,
    Metadata,
    check_rngs,
    check_sizes,
    text_of,
    where,
)
from treetap.initializers import orthogonal

_orthogonal = orthogonal()


def float32_orthogonal(key: Any, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
    """An orthogonal matrix made in float32, then cast."""
    return _orthogonal(key, shape, jnp.float32).astype(dtype)


def default_recurrent_init(key: Any, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
    """An orthogonal matrix, made in float32 if the dtype is narrower."""
    wide = jnp.promote_types(dtype, jnp.float32)
    return _orthogonal(key, shape, wide).astype(dtype)


class RNNCellBase(Module):
    """Base of recurrent cells: `cell(carry, inputs) -> (carry, outputs)`."""

    @property
    def num_feature_axes(self) -> int:
        """How many of the last axes of the inputs belong to one step."""
        raise NotImplementedError(
            f"{type(self).__name__}: give the cell a property `num_feature_axes`, for "
            "instance 1 for inputs that are vectors."
        )

    def initialize_carry(
        self,
        input_shape: tuple[int, ...],
        rngs: Rngs | RngStream | None = None,
        carry_init: Initializer | None = None,
    ) -> Any:
        """The carry to begin with.

        Args:
            input_shape: The shape of the inputs of one step.
            rngs: Random streams, or a stream; the initializer of zeros needs none.
            carry_init: The initializer; zeros without it.
        """
        raise NotImplementedError(
            f"{type(self).__name__}: give the cell a method `initialize_carry(shape, "
            "rngs, carry_init)`, or call the RNN with `initial_carry`."
        )


class Denses(NamedTuple):
    """What the linear maps of a cell have in common, and how each side is made."""

    dtype: Any
    param_dtype: Any
    promote_dtype: Any
    rngs: Any
    bias_init: Any
    bias_metadata: Any
    of_inputs: tuple[Initializer, Metadata]
    of_carry: tuple[Initializer, Metadata]

    def make(self, side: Any, sizes: tuple[int, int], use_bias: bool) -> Linear:
        """A linear map, of the inputs or of the carry."""
        kernel_init, kernel_metadata = side
        return Linear(
            *sizes,
            use_bias=use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=kernel_init,
            bias_init=self.bias_init,
            promote_dtype=self.promote_dtype,
            rngs=self.rngs,
            kernel_metadata=kernel_metadata,
            bias_metadata=self.bias_metadata,
        )


class Cell(RNNCellBase):
    """A cell whose carry is one or more vectors of `hidden_features`."""

    _carries = 1

    in_features: int
    hidden_features: int
    param_dtype: Any
    carry_init: Any
    rngs: Any

    @property
    def num_feature_axes(self) -> int:
        """How many of the last axes of the inputs belong to one step: one."""
        return 1

    def _set_sizes(self, in_features: int, hidden_features: int) -> None:
        self.in_features, self.hidden_features = check_sizes(
            self, in_features=in_features, hidden_features=hidden_features
        )

    def _begin(self, keep_rngs: bool, rngs: Any, carry_init: Any) -> None:
        """Checks the streams, and keeps what older programs let a cell keep."""
        check_rngs(self, rngs)
        name = type(self).__name__
        if keep_rngs:
            _deprecated(f"`{name}(keep_rngs=True)`", "`rngs` of the call")
        if carry_init is not None:
            _deprecated(f"`{name}(carry_init=...)`", "`carry_init` of the call")
        self.rngs = forked(self, rngs, "carry") if keep_rngs else data(None)
        self.carry_init = carry_init

    def check_carry(self, carry: Any, batch: tuple[int, ...]) -> None:
        """Refuses a carry that is not for inputs of a batch.

        Args:
            carry: The carry.
            batch: The shape of the inputs of one step, without the features.
        """
        shape = (*batch, self.hidden_features)
        if self._carries == 1:
            given, what = (carry,), f"an array of shape {shape}"
        else:
            given = carry if isinstance(carry, tuple | list) else ()
            what = f"a pair of arrays of shape {shape}"
        is_good = len(given) == self._carries
        if not is_good or any(getattr(part, "shape", None) != shape for part in given):
            found = jax.tree.map(text_of, carry)
            raise StructureError(
                f"{where(self)}: the carry is {what}, got {found}. Begin with "
                "`cell.initialize_carry(...)`."
            )

    def initialize_carry(
        self,
        input_shape: tuple[int, ...],
        rngs: Rngs | RngStream | None = None,
        carry_init: Initializer | None = None,
    ) -> Any:
        """The carry to begin with.

        Args:
            input_shape: The shape of the inputs of one step.
            rngs: Random streams, or a stream; the initializer of zeros needs none.
            carry_init: The initializer; zeros without it.
        """
        shape = (*input_shape[:-1], self.hidden_features)
        init = self.carry_init if carry_init is None else carry_init
        rngs = self.rngs if rngs is None else rngs
        if init is not None and rngs is None:
            raise StructureError(
                f"{where(self)}: the carry is drawn by `carry_init`, but no `rngs` are "
                "provided. Give them to `initialize_carry`, or to the RNN."
            )
        if rngs is not None and not isinstance(rngs, Rngs | RngStream | jax.Array):
            next_key(self, rngs, "carry")  # says what is wrong
        made = []
        for _ in range(self._carries):
            if init is None:
                made.append(jnp.zeros(shape, self.param_dtype))
            else:
                key = next_key(self, rngs, "carry")
                made.append(init(key, shape, self.param_dtype))
        return made[0] if self._carries == 1 else tuple(made)


def _deprecated(old: str, new: str) -> None:
    warnings.warn(f"{old} is deprecated; use {new}.", DeprecationWarning, stacklevel=5)
