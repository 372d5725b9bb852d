# SPDX-License-Identifier: Apache-2.0
"""What a box does as if it were its content: arithmetic, comparison, conversion.

Every operator takes the value out of both operands and applies Python's own operator,
so mixed arithmetic, reflected operands and promotion are exactly those of the values.
Results are plain values, never Variables.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


def _binary(apply: Callable[[Any, Any], Any]) -> Any:
    def method(self: "ValueOperators", other: Any) -> Any:
        return apply(self.get_value(), unboxed(other))

    return method


def _both(apply: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    """An operator, and the same with the operands in the other order."""

    def reflected(self: "ValueOperators", other: Any) -> Any:
        return apply(unboxed(other), self.get_value())

    return _binary(apply), reflected


def _unary(apply: Callable[[Any], Any]) -> Any:
    def method(self: "ValueOperators") -> Any:
        return apply(self.get_value())

    return method


def _in_place(symbol: str) -> Any:
    def method(self: "ValueOperators", other: Any) -> Any:
        raise NotImplementedError(
            f"`v {symbol} x` would replace the {type(self).__name__} by a bare value. "
            f"Write `v[...] {symbol} x` to change what it holds."
        )

    return method


def unboxed(value: Any) -> Any:
    """The value of a Variable, or the argument itself."""
    return value.get_value() if isinstance(value, ValueOperators) else value


class ValueOperators:
    """Mixin: the operators and protocols of the value inside.

    Subclasses offer `get_value()`.
    """

    __slots__ = ()
    __array_priority__ = 200  # numpy on the left leaves operators to us

    def get_value(self) -> Any:
        """Returns the value inside."""
        raise NotImplementedError

    __add__, __radd__ = _both(operator.add)
    __sub__, __rsub__ = _both(operator.sub)
    __mul__, __rmul__ = _both(operator.mul)
    __matmul__, __rmatmul__ = _both(operator.matmul)
    __truediv__, __rtruediv__ = _both(operator.truediv)
    __floordiv__, __rfloordiv__ = _both(operator.floordiv)
    __mod__, __rmod__ = _both(operator.mod)
    __divmod__, __rdivmod__ = _both(divmod)
    __pow__, __rpow__ = _both(operator.pow)
    __lshift__, __rlshift__ = _both(operator.lshift)
    __rshift__, __rrshift__ = _both(operator.rshift)
    __and__, __rand__ = _both(operator.and_)
    __xor__, __rxor__ = _both(operator.xor)
    __or__, __ror__ = _both(operator.or_)

    __eq__ = _binary(operator.eq)
    __ne__ = _binary(operator.ne)
    __lt__ = _binary(operator.lt)
    __le__ = _binary(operator.le)
    __gt__ = _binary(operator.gt)
    __ge__ = _binary(operator.ge)
    __hash__ = None  # pyright: ignore[reportAssignmentType] - `==` compares values

    __neg__ = _unary(operator.neg)
    __pos__ = _unary(operator.pos)
    __abs__ = _unary(operator.abs)
    __invert__ = _unary(operator.invert)
    __complex__ = _unary(complex)
    __int__ = _unary(int)
    __float__ = _unary(float)
    __index__ = _unary(operator.index)
    __trunc__ = _unary(math.trunc)
    __floor__ = _unary(math.floor)
    __ceil__ = _unary(math.ceil)

    __len__ = _unary(len)
    __iter__ = _unary(iter)
    __contains__ = _binary(operator.contains)

    __iadd__, __isub__, __imul__ = map(_in_place, ("+=", "-=", "*="))
    __imatmul__, __itruediv__, __ifloordiv__ = map(_in_place, ("@=", "/=", "//="))
    __imod__, __ipow__, __ilshift__ = map(_in_place, ("%=", "**=", "<<="))
    __irshift__, __iand__, __ixor__ = map(_in_place, (">>=", "&=", "^="))
    __ior__ = _in_place("|=")

    def __round__(self, ndigits: int = 0) -> Any:
        return round(self.get_value(), ndigits)

    def __bool__(self) -> bool:
        """The truth of a scalar; for anything with a length, whether it has items."""
        value = self.get_value()
        if np.ndim(value) if hasattr(value, "dtype") else hasattr(value, "__len__"):
            return len(value) > 0
        return bool(value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.get_value()(*args, **kwargs)

    def __format__(self, spec: str) -> str:
        return format(self.get_value(), spec) if spec else str(self)

    def __jax_array__(self) -> Any:
        value = self.get_value()
        is_array = isinstance(value, Tracer) or isinstance(value, jax.Array)  # noqa: SIM101 - most are tracers, and that is told quicker
        return value if is_array else jnp.asarray(value)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.get_value(), dtype=dtype, copy=copy)
