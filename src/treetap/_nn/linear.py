# SPDX-License-Identifier: Apache-2.0
"""Linear maps: over the last axis, over any axes, and by an einsum string.

They share a base with the convolutions, `Affine`: a kernel that inputs are multiplied
by, a bias that may be missing, and how the product is computed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

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
    Precision,
    Promote,
    Shape,
    as_tuple,
    canonical_axes,
    check_all_sizes,
    check_features,
    check_sizes,
    default_kernel_init,
    held,
    sizes_of,
    where,
)
from treetap.initializers import zeros


def given(**options: Any) -> dict[str, Any]:
    """Return options that are not None: a user's own operation need not know them."""
    return {name: value for name, value in options.items() if value is not None}


def with_bias(outputs: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Return outputs with a bias, if there is one, added over their last axes."""
    if bias is None:
        return outputs
    ahead = (1,) * (outputs.ndim - bias.ndim)
    return outputs + jnp.reshape(bias, ahead + bias.shape)


class Affine(Layer):
    """Base of layers that multiply inputs by a kernel, and may add a bias.

    A layer makes `kernel` and `bias` and says how it computes. The operation of a call
    gets its keywords from `_options`.
    """

    kernel: Param[Any]
    bias: Param[Any] | None

    def _options(self, out_sharding: Any = None) -> dict[str, Any]:
        """Return the keywords of the operation that multiplies."""
        element_type = self.preferred_element_type
        more = given(preferred_element_type=element_type, out_sharding=out_sharding)
        return {"precision": self.precision, **more}


class Linear(Affine):
    """Map the last axis linearly: `inputs @ kernel + bias`.

    Args:
        in_features: The size of the last axis of the inputs.
        out_features: The size of the last axis of the outputs.
        use_bias: Whether to add a bias.
        dtype: The dtype to compute in; without it, the one that inputs and parameters
            promote to.
        param_dtype: The dtype of the parameters.
        precision: As for `jax.lax.dot_general`.
        kernel_init: The initializer of the kernel: a function of a key, a shape and a
            dtype.
        bias_init: The initializer of the bias.
        dot_general: What to compute with, called as `jax.lax.dot_general`.
        promote_dtype: What brings inputs and parameters to one dtype, called as
            `promote_dtype`.
        preferred_element_type: As for `jax.lax.dot_general`.
        rngs: Random streams; `params` gives one key to each parameter.
        kernel_metadata: Metadata of the kernel, such as `out_sharding`.
        bias_metadata: Metadata of the bias.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> layer = tt.Linear(2, 3, rngs=tt.Rngs(0))
        >>> layer(jnp.ones((4, 2))).shape
        (4, 3)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: Precision = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = zeros,
        dot_general: Callable[..., Any] = lax.dot_general,
        promote_dtype: Promote = default_promote,
        preferred_element_type: Dtype | None = None,
        rngs: Rngs,
        kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
    ):
        sizes = check_sizes(self, in_features=in_features, out_features=out_features)
        self._make_parameters(locals(), kernel=sizes, bias=sizes[1:])
        self.in_features, self.out_features = sizes
        self.dot_general = dot_general

    def __call__(self, inputs: Array, out_sharding: Any = None) -> jax.Array:
        """Map `inputs`.

        Args:
            inputs: An array with `in_features` on its last axis.
            out_sharding: The sharding of the result, on an explicit mesh.
        """
        kernel, bias = held(self.kernel), held(self.bias)
        check_features(self, inputs, sizes_of(kernel, (self.in_features,))[0])
        inputs, kernel, bias = self._promoted(inputs, kernel, bias)
        summed = ((inputs.ndim - 1,), (0,)), ((), ())
        options = self._options(out_sharding)
        return with_bias(self.dot_general(inputs, kernel, summed, **options), bias)


class FrozenMapping(Mapping[Any, Any]):
    """A mapping that can be part of a structure: it never changes, and has a hash."""

    def __init__(self, items: Mapping[Any, Any]):
        self._items = dict(items)

    def __getitem__(self, key: Any) -> Any:
        return self._items[key]

    def __iter__(self) -> Any:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


class LinearGeneral(Affine):
    """Map any axes linearly.

    The kernel has the batch axes, the axes that are summed over, and the new ones; the
    outputs have the batch axes, what is left of the inputs, and the new ones.

    Args:
        in_features: The sizes of the axes that are summed over.
        out_features: The sizes of the new axes.
        axis: The axes of the inputs to sum over, one for each of `in_features`.
        batch_axis: The axes that inputs and kernel share, with their sizes; the first
            axes of the inputs.
        use_bias: Whether to add a bias.
        dtype: The dtype to compute in; without it, the one that inputs and parameters
            promote to.
        param_dtype: The dtype of the parameters.
        kernel_init: The initializer of the kernel. It is asked for a matrix: all axes
            summed over, by all new ones.
        bias_init: The initializer of the bias.
        precision: As for `jax.lax.dot_general`.
        promote_dtype: What brings inputs and parameters to one dtype, called as
            `promote_dtype`.
        dot_general: What to compute with, called as `jax.lax.dot_general`, which is
            used without it.
        dot_general_cls: Deprecated; a class whose instances are such functions.
        preferred_element_type: As for `jax.lax.dot_general`.
        rngs: Random streams; `params` gives one key to each parameter.
        kernel_metadata: Metadata of the kernel, such as `out_sharding`.
        bias_metadata: Metadata of the bias.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> layer = tt.LinearGeneral((2, 3), 4, axis=(1, 2), rngs=tt.Rngs(0))
        >>> layer(jnp.ones((5, 2, 3))).shape
        (5, 4)
    """

    def __init__(
        self,
        in_features: int | Sequence[int],
        out_features: int | Sequence[int],
        *,
        axis: int | Sequence[int] = -1,
        batch_axis: Mapping[int, int] = NO_METADATA,  # pyright: ignore[reportArgumentType] - empty
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = zeros,
        precision: Precision = None,
        promote_dtype: Promote = default_promote,
        dot_general: Callable[..., Any] | None = None,
        dot_general_cls: Any = None,
        preferred_element_type: Dtype | None = None,
        rngs: Rngs,
        kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
    ):
        self.in_features = check_all_sizes(self, "in_features", in_features)
        self.out_features = check_all_sizes(self, "out_features", out_features)
        self.axis = as_tuple(axis)
        self.batch_axis = FrozenMapping(batch_axis)
        batch = self._checked_batch()
        sizes = (*batch, *self.in_features, *self.out_features)
        sums = (*batch, *self.out_features)
        matrix = (math.prod((*batch, *self.in_features)), math.prod(self.out_features))
        flat = {"kernel": matrix, "bias": (math.prod(sums),)}
        self._make_parameters(locals(), flat, kernel=sizes, bias=sums)
        self.dot_general = dot_general
        self.dot_general_cls = dot_general_cls

    def _checked_batch(self) -> Shape:
        """Return the sizes of the batch axes, if all sizes fit together."""
        check_all_sizes(self, "batch_axis", self.batch_axis.values())
        if len(self.in_features) != len(self.axis):
            raise StructureError(
                f"LinearGeneral: in_features={self.in_features} and axis={self.axis} "
                "must be equally many: one size for each axis summed over."
            )
        batch = sorted(self.batch_axis)
        if batch != list(range(len(batch))):
            raise StructureError(
                f"LinearGeneral: the batch axes are {tuple(self.batch_axis)}, but must "
                "be the first ones, 0, 1, ... Move them to the front of the inputs."
            )
        return tuple(self.batch_axis[i] for i in batch)

    def __call__(self, inputs: Array, out_sharding: Any = None) -> jax.Array:
        """Map `inputs`.

        Args:
            inputs: An array.
            out_sharding: The sharding of the result, on an explicit mesh.
        """
        kernel, bias = held(self.kernel), held(self.bias)
        axes = self._axes_of(inputs, kernel)
        inputs, kernel, bias = self._promoted(inputs, kernel, bias)
        batch = tuple(range(len(self.batch_axis)))
        summed = tuple(range(len(batch), len(batch) + len(axes)))
        dimensions = (axes, summed), (batch, batch)
        operation = lax.dot_general if self.dot_general is None else self.dot_general
        if self.dot_general_cls is not None:
            operation = self.dot_general_cls()
        outputs = operation(inputs, kernel, dimensions, **self._options(out_sharding))
        if bias is not None:
            left = (1,) * (inputs.ndim - len(batch) - len(axes))
            shape = bias.shape[: len(batch)] + left + bias.shape[len(batch) :]
            bias = jnp.reshape(bias, shape)
        return with_bias(outputs, bias)

    def _axes_of(self, inputs: Array, kernel: Any) -> tuple[int, ...]:
        """Return the axes of the inputs to sum over, if they have the kernel's sizes.

        Args:
            inputs: The inputs.
            kernel: The kernel that is there.
        """
        shape, batches = jnp.shape(inputs), len(self.batch_axis)
        axes = canonical_axes(self, self.axis, len(shape))
        made = (*(self.batch_axis[i] for i in range(batches)), *self.in_features)
        sizes = sizes_of(kernel, made)
        batch, summed = sizes[:batches], sizes[batches : batches + len(axes)]
        wrong = tuple(shape[axis] for axis in axes) != summed
        if wrong or shape[: len(batch)] != batch or any(a < len(batch) for a in axes):
            first = f" after the batch axes {batch}" if batch else ""
            raise StructureError(
                f"{where(self)}: expected {summed} on the axes {self.axis}"
                f"{first}, got {typed(inputs)}."
            )
        return axes


class Einsum(Affine):
    """Multiply inputs by a kernel as an einsum says, and add a bias if asked to.

    Args:
        einsum_str: The two operands and the result, such as `"nta,hab->nthb"`; None if
            each call says it.
        kernel_shape: The shape of the kernel.
        bias_shape: The shape of the bias: of the axes the result has from the kernel.
        dtype: The dtype to compute in; without it, the one that inputs and parameters
            promote to.
        param_dtype: The dtype of the parameters.
        precision: As for `jax.numpy.einsum`.
        kernel_init: The initializer of the kernel.
        bias_init: The initializer of the bias.
        promote_dtype: What brings inputs and parameters to one dtype, called as
            `promote_dtype`.
        einsum_op: What to compute with, called as `jax.numpy.einsum`.
        preferred_element_type: As for `jax.numpy.einsum`.
        rngs: Random streams; `params` gives one key to each parameter.
        kernel_metadata: Metadata of the kernel, such as `out_sharding`.
        bias_metadata: Metadata of the bias.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> layer = tt.Einsum("ta,ab->tb", (2, 3), (3,), rngs=tt.Rngs(0))
        >>> layer(jnp.ones((4, 2))).shape
        (4, 3)
    """

    def __init__(
        self,
        einsum_str: str | None,
        kernel_shape: int | Shape,
        bias_shape: int | Shape | None = None,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: Precision = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = zeros,
        promote_dtype: Promote = default_promote,
        einsum_op: Callable[..., Any] = jnp.einsum,
        preferred_element_type: Dtype | None = None,
        rngs: Rngs,
        kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
    ):
        if einsum_str is not None:
            _terms(self, einsum_str)
        kernel_shape = check_all_sizes(self, "kernel_shape", kernel_shape)
        if bias_shape is not None:
            bias_shape = check_all_sizes(self, "bias_shape", bias_shape)
        self._make_parameters(locals(), kernel=kernel_shape, bias=bias_shape)
        self.einsum_str = einsum_str
        self.kernel_shape = kernel_shape
        self.bias_shape = bias_shape
        self.einsum_op = einsum_op

    def __call__(
        self, inputs: Array, einsum_str: str | None = None, out_sharding: Any = None
    ) -> jax.Array:
        """Multiply `inputs` by the kernel.

        Args:
            inputs: The first operand.
            einsum_str: Instead of the layer's own.
            out_sharding: The sharding of the result, on an explicit mesh.
        """
        text = self.einsum_str if einsum_str is None else einsum_str
        if text is None:
            raise StructureError(
                f"{where(self)}: no einsum string. Give one to the layer or the call."
            )
        text = text.replace(" ", "")
        terms = _terms(self, text)
        kernel, bias = held(self.kernel), held(self.bias)
        sizes = sizes_of(kernel, self.kernel_shape)
        self._check(text, terms, inputs, sizes)
        inputs, kernel, bias = self._promoted(inputs, kernel, bias)
        outputs = self.einsum_op(text, inputs, kernel, **self._options(out_sharding))
        if bias is not None:
            bias = self._over_result(bias, terms, sizes, outputs.ndim)
        return with_bias(outputs, bias)

    def _check(
        self, text: str, terms: tuple[str, str, str], inputs: Any, kernel: Shape
    ) -> None:
        """Refuse operands that do not have the axes that the string says."""
        sizes: dict[str, int] = {}
        fits = all(letter in terms[0] + terms[1] for letter in terms[2])
        for letters, shape in zip(terms, (np.shape(inputs), kernel)):
            axes = _axes(letters, len(shape))
            fits &= len(axes) == len(shape)
            for axis, size in zip(axes, shape):
                fits &= axis.isdigit() or sizes.setdefault(axis, size) == size
        if not fits:
            raise StructureError(
                f"{where(self)}: {text!r} does not fit inputs {typed(inputs)} and a "
                f"kernel of {kernel}."
            )

    def _over_result(
        self, bias: jax.Array, terms: tuple[str, str, str], kernel: Shape, rank: int
    ) -> jax.Array:
        """Return the bias, with size 1 on axes that are not from the kernel."""
        _, letters, result = terms
        sizes = dict(zip(_axes(letters, len(kernel)), kernel))
        axes = _axes(result, rank)
        shape = tuple(sizes.get(axis, 1) for axis in axes)
        if math.prod(shape) != bias.size:
            kept = tuple(sizes[axis] for axis in axes if axis in sizes)
            raise StructureError(
                f"{where(self)}: the result of {','.join(terms[:2])}->{result} has "
                f"the axes {kept} from the kernel, but the bias is of {bias.shape}."
            )
        return jnp.reshape(bias, shape)


def _axes(letters: str, rank: int) -> list[str]:
    """Name each axis of an array: by its letter, and where "..." stands by a number.

    Numbers count from the last axis back, because that is how einsum lines up what
    stands for "..." in several operands. There are more names than axes, or fewer, if
    an array of this rank does not fit the letters.
    """
    before, dots, after = letters.partition("...")
    unnamed = range(rank - len(before + after)) if dots else ()
    return [*before, *map(str, reversed(unnamed)), *after]


def _terms(layer: Any, text: str) -> tuple[str, str, str]:
    """Split an einsum string: axes of the inputs, of the kernel, of the result."""
    text = text.replace(" ", "")
    if text.count("->") != 1 or text.count(",") != 1:
        raise StructureError(
            f"{type(layer).__name__}: {text!r} is not the einsum of two operands and a "
            'named result. Write it like "ab,bc->ac".'
        )
    left, result = text.split("->")
    inputs, kernel = left.split(",")
    return inputs, kernel, result
