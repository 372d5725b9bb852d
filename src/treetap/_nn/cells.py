# SPDX-License-Identifier: Apache-2.0
"""Recurrent cells: one step in time, from a carry and inputs to the next carry.

A cell says how its carry begins, and `RNN` runs it over a sequence. The cells here have
a carry of one or two vectors, and linear maps of the inputs and of the carry; what they
have in common, and the checks of the carry, is in `Cell`.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from treetap._core.errors import StructureError
from treetap._core.variables.values import broadcasts
from treetap._core.wording import typed
from treetap._modules.module import Module
from treetap._modules.random_streams import Rngs, RngStream
from treetap._nn.dropout import forked, next_key
from treetap._nn.dtypes import promote_dtype as default_promote
from treetap._nn.linear import Linear
from treetap._nn.parameters import (
    NO_METADATA,
    Arguments,
    Array,
    Dtype,
    Initializer,
    Layer,
    Metadata,
    Promote,
    check_features,
    check_rngs,
    check_sizes,
    chosen,
    default_kernel_init,
    held,
    sizes_of,
    where,
)
from treetap.initializers import orthogonal, zeros

Activation = Callable[..., Any]

_orthogonal = orthogonal()


def float32_orthogonal(key: Any, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
    """Return an orthogonal matrix, made in float32 and then cast."""
    return _orthogonal(key, shape, jnp.float32).astype(dtype)


def default_recurrent_init(key: Any, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
    """Return an orthogonal matrix, made in float32 if the dtype is narrower."""
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
        """Return the carry to begin with.

        Args:
            input_shape: The shape of the inputs of one step.
            rngs: Random streams, or a stream; the initializer of zeros needs none.
            carry_init: The initializer; zeros without it.
        """
        raise NotImplementedError(
            f"{type(self).__name__}: give the cell a method `initialize_carry(shape, "
            "rngs, carry_init)`, or call the RNN with `initial_carry`."
        )


class Cell(RNNCellBase, Layer):
    """A cell whose carry is one or more vectors of `hidden_features`."""

    _carries = 1
    _input_map = "dense_i"  # which map of the inputs shows how many features they have

    @property
    def num_feature_axes(self) -> int:
        """How many of the last axes of the inputs belong to one step: one."""
        return 1

    def _begin(self, arguments: Arguments) -> list[Callable[..., Linear]]:
        """Check and keep arguments of the constructor.

        Returns:
            What makes a linear map of the inputs, and what makes one of the carry. Both
            are called with the sizes of the map; `use_bias=False` leaves the bias out.
        """
        sizes = chosen(arguments, "in_features", "hidden_features")
        self.in_features, self.hidden_features = check_sizes(self, **sizes)
        rngs = check_rngs(self, arguments["rngs"])
        keep_rngs, carry_init = arguments["keep_rngs"], arguments["carry_init"]
        name = type(self).__name__
        if keep_rngs:
            _deprecated(f"`{name}(keep_rngs=True)`", "`rngs` of the call")
        if carry_init is not None:
            _deprecated(f"`{name}(carry_init=...)`", "`carry_init` of the call")
        self.rngs: RngStream | None = forked(self, rngs if keep_rngs else None, "carry")
        self.carry_init: Initializer | None = carry_init
        self.activation_fn: Activation = arguments["activation_fn"]
        self._keep_options(arguments)
        alike = ("bias_init", "bias_metadata", "rngs")
        types = ("dtype", "param_dtype", "promote_dtype")
        return [
            functools.partial(
                Linear,
                kernel_init=arguments[f"{kernel}_init"],
                kernel_metadata=arguments[f"{kernel}_metadata"],
                **chosen(arguments, *alike, *types),
            )
            for kernel in ("kernel", "recurrent_kernel")
        ]

    def _check_inputs(self, inputs: Array) -> None:
        """Refuse inputs that do not have the features of the cell.

        Args:
            inputs: An array with the features on its last axis.
        """
        kernel = held(getattr(getattr(self, self._input_map, None), "kernel", None))
        check_features(self, inputs, sizes_of(kernel, (self.in_features,))[0])

    def _check_carry(self, carry: Any, batch: tuple[int, ...]) -> None:
        """Refuse a carry whose shapes do not fit the inputs.

        Args:
            carry: The carry.
            batch: The shape of the inputs of one step, without the features.
        """
        shape = (*batch, self.hidden_features)
        given, what = (carry,), f"an array of shape {shape}"
        if self._carries == 2:
            given = carry if isinstance(carry, tuple | list) else ()
            what = f"a pair of arrays of shape {shape}"
        fits = [hasattr(x, "shape") and broadcasts(x.shape, shape) for x in given]
        if fits != [True] * self._carries:
            found = jax.tree.map(typed, carry)
            raise StructureError(
                f"{where(self)}: the carry must be {what}, got {found}. Begin with "
                "`cell.initialize_carry(...)`."
            )

    def initialize_carry(
        self,
        input_shape: tuple[int, ...],
        rngs: Rngs | RngStream | None = None,
        carry_init: Initializer | None = None,
    ) -> Any:
        """Return the carry to begin with.

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
        made = [
            jnp.zeros(shape, self.param_dtype)
            if init is None
            else init(next_key(self, rngs, "carry"), shape, self.param_dtype)
            for _ in range(self._carries)
        ]
        return made[0] if self._carries == 1 else tuple(made)


def _deprecated(old: str, new: str) -> None:
    warnings.warn(f"{old} is deprecated; use {new}.", UserWarning, stacklevel=5)


class LSTMCell(Cell):
    """Step a long short-term memory, with a matrix for each gate.

    The carry is a pair: what is remembered, and the outputs.

    Args:
        in_features: The features of the inputs.
        hidden_features: The features of the carry and the outputs.
        gate_fn: The activation of the gates.
        activation_fn: The activation of what is remembered and put out.
        kernel_init: The initializer of the matrices for the inputs.
        recurrent_kernel_init: The initializer of those for the carry.
        bias_init: The initializer of the biases.
        dtype: The dtype to compute in; without it, the one that inputs and parameters
            promote to.
        param_dtype: The dtype of the parameters.
        carry_init: Deprecated; give it to `initialize_carry`.
        promote_dtype: What brings inputs and parameters to one dtype, called as
            `promote_dtype`.
        keep_rngs: Deprecated; whether to keep a stream for the carry.
        rngs: Random streams; `params` gives one key to each parameter.
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
    _input_map = "ii"

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
        of_inputs, of_carry = self._begin(locals())
        self.gate_fn = gate_fn
        size = hidden_features
        self.ii, self.if_, self.ig, self.io = (
            of_inputs(in_features, size, use_bias=False) for _ in range(4)
        )
        self.hi, self.hf, self.hg, self.ho = (of_carry(size, size) for _ in range(4))

    def __call__(
        self, carry: tuple[Array, Array], inputs: Array
    ) -> tuple[tuple[Array, Array], Array]:
        """Take one step.

        Args:
            carry: What is remembered, and the outputs of the step before.
            inputs: An array with `in_features` on its last axis.
        """
        self._check_carry(carry, jnp.shape(inputs)[:-1])
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
        of_inputs, of_carry = self._begin(locals())
        self.gate_fn = gate_fn
        width = self._gates * self.hidden_features
        bias = self._bias_of_inputs
        self.dense_i = of_inputs(self.in_features, width, use_bias=bias)
        self.dense_h = of_carry(self.hidden_features, width, use_bias=not bias)


class OptimizedLSTMCell(FusedCell):
    """Step a long short-term memory, with one matrix for all gates.

    The same function as `LSTMCell`, faster; the parameters are arranged otherwise
    (gates i, f, g, o side by side), so those of one do not fit the other.

    Args:
        in_features: The features of the inputs.
        hidden_features: The features of the carry and the outputs.
        gate_fn: The activation of the gates.
        activation_fn: The activation of what is remembered and put out.
        kernel_init: The initializer of the matrix for the inputs.
        recurrent_kernel_init: The initializer of the one for the carry.
        bias_init: The initializer of the bias.
        dtype: The dtype to compute in; without it, the one that inputs and parameters
            promote to.
        param_dtype: The dtype of the parameters.
        carry_init: Deprecated; give it to `initialize_carry`.
        promote_dtype: What brings inputs and parameters to one dtype, called as
            `promote_dtype`.
        keep_rngs: Deprecated; whether to keep a stream for the carry.
        rngs: Random streams; `params` gives one key to each parameter.
        kernel_metadata: Metadata of the matrix for the inputs.
        recurrent_kernel_metadata: Metadata of the one for the carry.
        bias_metadata: Metadata of the bias.
    """

    _carries = 2
    _gates = 4

    def __call__(
        self, carry: tuple[Array, Array], inputs: Array
    ) -> tuple[tuple[Array, Array], Array]:
        """Take one step.

        Args:
            carry: What is remembered, and the outputs of the step before.
            inputs: An array with `in_features` on its last axis.
        """
        self._check_carry(carry, jnp.shape(inputs)[:-1])
        c, h = carry
        i, f, g, o = jnp.split(self.dense_i(inputs) + self.dense_h(h), 4, axis=-1)
        c = self.gate_fn(f) * c + self.gate_fn(i) * self.activation_fn(g)
        h = self.gate_fn(o) * self.activation_fn(c)
        return (c, h), h


class GRUCell(FusedCell):
    """Step a gated recurrent unit; the bias is on the side of the inputs.

    Args:
        in_features: The features of the inputs.
        hidden_features: The features of the carry and the outputs.
        gate_fn: The activation of the gates.
        activation_fn: The activation of what is new.
        kernel_init: The initializer of the matrix for the inputs.
        recurrent_kernel_init: The initializer of the one for the carry.
        bias_init: The initializer of the bias.
        dtype: The dtype to compute in; without it, the one that inputs and parameters
            promote to.
        param_dtype: The dtype of the parameters.
        carry_init: Deprecated; give it to `initialize_carry`.
        promote_dtype: What brings inputs and parameters to one dtype, called as
            `promote_dtype`.
        keep_rngs: Deprecated; whether to keep a stream for the carry.
        rngs: Random streams; `params` gives one key to each parameter.
        kernel_metadata: Metadata of the matrix for the inputs.
        recurrent_kernel_metadata: Metadata of the one for the carry.
        bias_metadata: Metadata of the bias.
    """

    _gates = 3
    _bias_of_inputs = True

    def __call__(self, carry: Array, inputs: Array) -> tuple[Array, Array]:
        """Take one step.

        Args:
            carry: The outputs of the step before.
            inputs: An array with `in_features` on its last axis.
        """
        self._check_carry(carry, jnp.shape(inputs)[:-1])
        x_r, x_z, x_n = jnp.split(self.dense_i(inputs), 3, axis=-1)
        h_r, h_z, h_n = jnp.split(self.dense_h(carry), 3, axis=-1)
        r, z = self.gate_fn(x_r + h_r), self.gate_fn(x_z + h_z)
        n = self.activation_fn(x_n + r * h_n)
        h = (1.0 - z) * n + z * carry
        return h, h


class SimpleCell(Cell):
    """Step the plain recurrent cell: an activation of the sum of two linear maps.

    Args:
        in_features: The features of the inputs.
        hidden_features: The features of the carry and the outputs.
        dtype: The dtype to compute in; without it, the one that inputs and parameters
            promote to.
        param_dtype: The dtype of the parameters.
        carry_init: Deprecated; give it to `initialize_carry`.
        residual: Whether to add the carry as well.
        activation_fn: The activation.
        kernel_init: The initializer of the matrix for the inputs.
        recurrent_kernel_init: The initializer of the one for the carry.
        bias_init: The initializer of the bias.
        promote_dtype: What brings inputs and parameters to one dtype, called as
            `promote_dtype`.
        keep_rngs: Deprecated; whether to keep a stream for the carry.
        rngs: Random streams; `params` gives one key to each parameter.
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
        of_inputs, of_carry = self._begin(locals())
        self.residual = residual
        self.dense_h = of_carry(hidden_features, hidden_features, use_bias=False)
        self.dense_i = of_inputs(in_features, hidden_features, use_bias=True)

    def __call__(self, carry: Array, inputs: Array) -> tuple[Array, Array]:
        """Take one step.

        Args:
            carry: The outputs of the step before.
            inputs: An array with `in_features` on its last axis.
        """
        self._check_carry(carry, jnp.shape(inputs)[:-1])
        h = self.dense_i(inputs) + self.dense_h(carry)
        if self.residual:
            h = h + carry
        h = self.activation_fn(h)
        return h, h
