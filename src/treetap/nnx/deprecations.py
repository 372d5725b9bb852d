# SPDX-License-Identifier: Apache-2.0
"""deprecations: a decorator for functions that have got another name."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def deprecated(new_fn: F) -> F:
    """A function that does what `new_fn` does, and warns that it is the old one.

    Args:
        new_fn: The function to call, and to name in the warning.
    """

    @functools.wraps(new_fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        text = f"This function is deprecated. Use {new_fn.__name__} instead."
        warnings.warn(text, DeprecationWarning, 2)
        return new_fn(*args, **kwargs)

    return call  # pyright: ignore[reportReturnType] - the signature is that of `new_fn`
