# SPDX-License-Identifier: Apache-2.0
"""Recurrent cells: one step in time, from a carry and an input to both anew.

A cell says how its carry begins; `RNN` runs it over a sequence. `LSTMCell` tells what
the common arguments mean.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from treetap._modules.random_streams import Rngs
from treetap._nn.carries import (
    Cell,
    Denses,
    default_recurrent_init,
    float32_orthogonal,
)
from treetap._nn.dtypes import promote_dtype as default_promote
from treetap._nn.parameters import (
    NO_METADATA,
    Array,
    Dtype,
    Initializer,
    Metadata,
    Promote,
    default_kernel_init,
)
from treetap.initializers import zeros

Activation = Callable[..., Any]


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
        self._set_sizes(in_features, hidden_features)
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


class FusedCell(Cell):
    """Base of cells with one matrix for all gates, and a bias on one side."""

    _gates = 0
    _bias_of_inputs = False

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
        self._set_sizes(in_features, hidden_features)
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
        width = self._gates * self.hidden_features
        sizes, bias = (self.in_features, width), self._bias_of_inputs
        self.dense_i = denses.make(denses.of_inputs, sizes, use_bias=bias)
        sizes = (self.hidden_features, width)
        self.dense_h = denses.make(denses.of_carry, sizes, use_bias=not bias)


class OptimizedLSTMCell(FusedCell):
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
    _gates = 4

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


class GRUCell(FusedCell):
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

    _gates = 3
    _bias_of_inputs = True

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
        self._set_sizes(in_features, hidden_features)
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
