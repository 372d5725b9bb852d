# SPDX-License-Identifier: Apache-2.0
"""Recurrent cells: one step in time, from a carry and an input to both anew.

A cell says how its carry begins; `RNN` runs it over a sequence. `LSTMCell` tells what
the common arguments mean.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from treetap._attributes import data
from treetap._errors import StructureError
from treetap._layers.dropout import forked, next_key
from treetap._layers.dtypes import promote_dtype as default_promote
from treetap._layers.linear import Linear
from treetap._layers.parameters import (
    NO_METADATA,
    Array,
    Dtype,
    Initializer,
    Metadata,
    Promote,
    check_rngs,
    check_sizes,
    default_kernel_init,
    text_of,
    where,
)
from treetap._modules import Module
from treetap._randomness import Rngs, RngStream
from treetap.initializers import orthogonal, zeros

Activation = Callable[..., Any]
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
        raise NotImplementedError

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
        raise NotImplementedError


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

    def _begin(self, keep_rngs: bool, rngs: Any, carry_init: Any) -> None:
        """Checks the sizes, and keeps what older programs let a cell keep."""
        check_sizes(
            *(self,),
            in_features=self.in_features,
            hidden_features=self.hidden_features,
        )
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
        draw = functools.partial(next_key, self, rngs, "carry")
        made = []
        for _ in range(self._carries):
            key: Any = None if rngs is None else draw()
            made.append((zeros if init is None else init)(key, shape, self.param_dtype))
        return made[0] if self._carries == 1 else tuple(made)


def _deprecated(old: str, new: str) -> None:
    warnings.warn(f"{old} is deprecated; use {new}.", DeprecationWarning, stacklevel=5)


class LSTMCell(Cell):
    """A long short-term memory, with a matrix for each gate.

    The carry is a pair: what is remembered, and the outputs.

    Args:
        in_features: The features of the inputs.
        hidden_features: The features of the carry and the outputs.
        gate_fn: The activation of the gates.
        activation_fn: The activation of what is remembered and put out.
        kernel_init: The initializer of the matrices for the inputs.
        recurrent_kernel_init: The initializer of those for the carry.
        bias_init: The initializer of the biases.
        dtype: The dtype to compute in, as for `Linear`.
        param_dtype: The dtype of the parameters.
        carry_init: Deprecated; give it to `initialize_carry`.
        promote_dtype: What brings inputs and parameters to one dtype.
        keep_rngs: Deprecated; whether to keep a stream for the carry.
        rngs: Random streams.
        kernel_metadata: Metadata of the matrices for the inputs.
        recurrent_kernel_metadata: Metadata of those for the carry.
        bias_metadata: Metadata of the biases.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> cell = tt.LSTMCell(3, 4, rngs=tt.Rngs(0))
        >>> carry = cell.initialize_carry((1, 3))
        >>> carry, y = cell(carry, jnp.ones((1, 3)))
        >>> y.shape
        (1, 4)
    """

    _carries = 2

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        gate_fn: Activation = jax.nn.sigmoid,
        activation_fn: Activation = jnp.tanh,
        kernel_init: Initializer = default_kernel_init,
        recurrent_kernel_init: Initializer = float32_orthogonal,
        bias_init: Initializer = zeros,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        carry_init: Initializer | None = None,
        promote_dtype: Promote = default_promote,
        keep_rngs: bool = False,
        rngs: Rngs,
        kernel_metadata: Metadata = NO_METADATA,
        recurrent_kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
    ):
        self.in_features = in_features
        self.hidden_features = hidden_features
        self.gate_fn = gate_fn
        self.activation_fn = activation_fn
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype
        self._begin(keep_rngs, rngs, carry_init)
        denses = Denses(
            *(dtype, param_dtype, promote_dtype, rngs, bias_init, bias_metadata),
            (kernel_init, kernel_metadata),
            (recurrent_kernel_init, recurrent_kernel_metadata),
        )
        sizes = (in_features, hidden_features)
        self.ii, self.if_, self.ig, self.io = (
            denses.make(denses.of_inputs, sizes, use_bias=False) for _ in range(4)
        )
        sizes = (hidden_features, hidden_features)
        self.hi, self.hf, self.hg, self.ho = (
            denses.make(denses.of_carry, sizes, use_bias=True) for _ in range(4)
        )

    def __call__(
        self, carry: tuple[Array, Array], inputs: Array
    ) -> tuple[tuple[Array, Array], Array]:
        """One step.

        Args:
            carry: What is remembered, and the outputs of the step before.
            inputs: An array with `in_features` on its last axis.
        """
        self.check_carry(carry, jnp.shape(inputs)[:-1])
        c, h = carry
        i = self.gate_fn(self.ii(inputs) + self.hi(h))
        f = self.gate_fn(self.if_(inputs) + self.hf(h))
        g = self.activation_fn(self.ig(inputs) + self.hg(h))
        o = self.gate_fn(self.io(inputs) + self.ho(h))
        c = f * c + i * g
        h = o * self.activation_fn(c)
        return (c, h), h


class OptimizedLSTMCell(Cell):
    """A long short-term memory, with one matrix for all gates.

    The same function as `LSTMCell`, faster; the parameters are arranged otherwise
    (gates i, f, g, o side by side), so those of one do not fit the other.

    Args:
        in_features: This and those that follow, as for `LSTMCell`.
        hidden_features: The features of the carry and the outputs.
        gate_fn: The activation of the gates.
        activation_fn: The activation of what is remembered and put out.
        kernel_init: The initializer of the matrix for the inputs.
        recurrent_kernel_init: The initializer of the one for the carry.
        bias_init: The initializer of the bias.
        dtype: The dtype to compute in.
        param_dtype: The dtype of the parameters.
        carry_init: Deprecated; give it to `initialize_carry`.
        promote_dtype: What brings inputs and parameters to one dtype.
        keep_rngs: Deprecated; whether to keep a stream for the carry.
        rngs: Random streams.
        kernel_metadata: Metadata of the matrix for the inputs.
        recurrent_kernel_metadata: Metadata of the one for the carry.
        bias_metadata: Metadata of the bias.
    """

    _carries = 2

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        gate_fn: Activation = jax.nn.sigmoid,
        activation_fn: Activation = jnp.tanh,
        kernel_init: Initializer = default_kernel_init,
        recurrent_kernel_init: Initializer = default_recurrent_init,
        bias_init: Initializer = zeros,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        carry_init: Initializer | None = None,
        promote_dtype: Promote = default_promote,
        keep_rngs: bool = False,
        rngs: Rngs,
        kernel_metadata: Metadata = NO_METADATA,
        recurrent_kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
    ):
        self.in_features = in_features
        self.hidden_features = hidden_features
        self.gate_fn = gate_fn
        self.activation_fn = activation_fn
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype
        self._begin(keep_rngs, rngs, carry_init)
        denses = Denses(
            *(dtype, param_dtype, promote_dtype, rngs, bias_init, bias_metadata),
            (kernel_init, kernel_metadata),
            (recurrent_kernel_init, recurrent_kernel_metadata),
        )
        width = 4 * hidden_features
        self.dense_i = denses.make(denses.of_inputs, (in_features, width), False)
        self.dense_h = denses.make(denses.of_carry, (hidden_features, width), True)

    def __call__(
        self, carry: tuple[Array, Array], inputs: Array
    ) -> tuple[tuple[Array, Array], Array]:
        """One step.

        Args:
            carry: What is remembered, and the outputs of the step before.
            inputs: An array with `in_features` on its last axis.
        """
        self.check_carry(carry, jnp.shape(inputs)[:-1])
        c, h = carry
        i, f, g, o = jnp.split(self.dense_i(inputs) + self.dense_h(h), 4, axis=-1)
        c = self.gate_fn(f) * c + self.gate_fn(i) * self.activation_fn(g)
        h = self.gate_fn(o) * self.activation_fn(c)
        return (c, h), h


class GRUCell(Cell):
    """A gated recurrent unit; the bias is on the side of the inputs.

    Args:
        in_features: This and those that follow, as for `LSTMCell`.
        hidden_features: The features of the carry and the outputs.
        gate_fn: The activation of the gates.
        activation_fn: The activation of what is new.
        kernel_init: The initializer of the matrix for the inputs.
        recurrent_kernel_init: The initializer of the one for the carry.
        bias_init: The initializer of the bias.
        dtype: The dtype to compute in.
        param_dtype: The dtype of the parameters.
        carry_init: Deprecated; give it to `initialize_carry`.
        promote_dtype: What brings inputs and parameters to one dtype.
        keep_rngs: Deprecated; whether to keep a stream for the carry.
        rngs: Random streams.
        kernel_metadata: Metadata of the matrix for the inputs.
        recurrent_kernel_metadata: Metadata of the one for the carry.
        bias_metadata: Metadata of the bias.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        gate_fn: Activation = jax.nn.sigmoid,
        activation_fn: Activation = jnp.tanh,
        kernel_init: Initializer = default_kernel_init,
        recurrent_kernel_init: Initializer = default_recurrent_init,
        bias_init: Initializer = zeros,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        carry_init: Initializer | None = None,
        promote_dtype: Promote = default_promote,
        keep_rngs: bool = False,
        rngs: Rngs,
        kernel_metadata: Metadata = NO_METADATA,
        recurrent_kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
    ):
        self.in_features = in_features
        self.hidden_features = hidden_features
        self.gate_fn = gate_fn
        self.activation_fn = activation_fn
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype
        self._begin(keep_rngs, rngs, carry_init)
        denses = Denses(
            *(dtype, param_dtype, promote_dtype, rngs, bias_init, bias_metadata),
            (kernel_init, kernel_metadata),
            (recurrent_kernel_init, recurrent_kernel_metadata),
        )
        width = 3 * hidden_features
        self.dense_i = denses.make(denses.of_inputs, (in_features, width), True)
        self.dense_h = denses.make(denses.of_carry, (hidden_features, width), False)

    def __call__(self, carry: Array, inputs: Array) -> tuple[Array, Array]:
        """One step.

        Args:
            carry: The outputs of the step before.
            inputs: An array with `in_features` on its last axis.
        """
        self.check_carry(carry, jnp.shape(inputs)[:-1])
        x_r, x_z, x_n = jnp.split(self.dense_i(inputs), 3, axis=-1)
        h_r, h_z, h_n = jnp.split(self.dense_h(carry), 3, axis=-1)
        r, z = self.gate_fn(x_r + h_r), self.gate_fn(x_z + h_z)
        n = self.activation_fn(x_n + r * h_n)
        h = (1.0 - z) * n + z * carry
        return h, h


class SimpleCell(Cell):
    """The plain recurrent cell: an activation of the sum of two linear maps.

    Args:
        in_features: This and those that follow, as for `LSTMCell`.
        hidden_features: The features of the carry and the outputs.
        dtype: The dtype to compute in.
        param_dtype: The dtype of the parameters.
        carry_init: Deprecated; give it to `initialize_carry`.
        residual: Whether to add the carry as well.
        activation_fn: The activation.
        kernel_init: The initializer of the matrix for the inputs.
        recurrent_kernel_init: The initializer of the one for the carry.
        bias_init: The initializer of the bias.
        promote_dtype: What brings inputs and parameters to one dtype.
        keep_rngs: Deprecated; whether to keep a stream for the carry.
        rngs: Random streams.
        kernel_metadata: Metadata of the matrix for the inputs.
        recurrent_kernel_metadata: Metadata of the one for the carry.
        bias_metadata: Metadata of the bias.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        dtype: Dtype | None = jnp.float32,
        param_dtype: Dtype = jnp.float32,
        carry_init: Initializer | None = None,
        residual: bool = False,
        activation_fn: Activation = jnp.tanh,
        kernel_init: Initializer = default_kernel_init,
        recurrent_kernel_init: Initializer = default_recurrent_init,
        bias_init: Initializer = zeros,
        promote_dtype: Promote = default_promote,
        keep_rngs: bool = False,
        rngs: Rngs,
        kernel_metadata: Metadata = NO_METADATA,
        recurrent_kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
    ):
        self.in_features = in_features
        self.hidden_features = hidden_features
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.residual = residual
        self.activation_fn = activation_fn
        self.promote_dtype = promote_dtype
        self._begin(keep_rngs, rngs, carry_init)
        denses = Denses(
            *(dtype, param_dtype, promote_dtype, rngs, bias_init, bias_metadata),
            (kernel_init, kernel_metadata),
            (recurrent_kernel_init, recurrent_kernel_metadata),
        )
        size = hidden_features
        self.dense_h = denses.make(denses.of_carry, (size, size), False)
        self.dense_i = denses.make(denses.of_inputs, (in_features, size), True)

    def __call__(self, carry: Array, inputs: Array) -> tuple[Array, Array]:
        """One step.

        Args:
            carry: The outputs of the step before.
            inputs: An array with `in_features` on its last axis.
        """
        self.check_carry(carry, jnp.shape(inputs)[:-1])
        h = self.dense_i(inputs) + self.dense_h(carry)
        if self.residual:
            h = h + carry
        h = self.activation_fn(h)
        return h, h
