# SPDX-License-Identifier: Apache-2.0
"""EqualFunctions: a static value made of functions that compares by what they are.

Python compares functions by identity, so two optax transformations made by the same
call are unequal, and a jitted step would be traced again for each. Here functions are
equal when they run the same code in the same module with equal contents: closure,
defaults, the parts of a `functools.partial` or of a bound method. Contents are compared
as all static values are: see `static_values`.

Contents are read when two are compared, not before: one that has been changed since
compares as what it is now. What a program was traced with is kept by the program.
"""

import types
from typing import Any

from treetap._core.static_values import FunctionHolder, Snapshot


class EqualFunctions(FunctionHolder):
    """Holds a value made of functions; equal to others whose functions do the same.

    Args:
        value: A function, or a tuple, list or dict with functions at any depth.

    Examples:
        >>> from treetap._train.comparable_functions import EqualFunctions
        >>> def times(n):
        ...     return lambda x: n * x
        >>> EqualFunctions(times(2)) == EqualFunctions(times(2))
        True
        >>> EqualFunctions(times(2)) == EqualFunctions(times(2.0))
        False
    """

    __slots__ = ()

    def __init__(self, value: Any):
        object.__setattr__(self, "value", value)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} cannot be changed.")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EqualFunctions):
            return NotImplemented
        return self is other or Snapshot(self).key == Snapshot(other).key

    def __hash__(self) -> int:
        """Hash what cannot change: the code of functions, if they are in a tuple."""
        parts = self.value if isinstance(self.value, tuple) else (self.value,)
        codes = [x.__code__ for x in parts if isinstance(x, types.FunctionType)]
        return hash((type(self.value), *codes))

    def __copy__(self) -> "EqualFunctions":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "EqualFunctions":
        return self  # as Python copies functions

    def __reduce__(self) -> Any:
        return EqualFunctions, (self.value,)

    def __repr__(self) -> str:
        return repr(self.value)
