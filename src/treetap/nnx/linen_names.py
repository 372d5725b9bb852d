# SPDX-License-Identifier: Apache-2.0
"""The names of Linen that NNX programs mention without using Linen.

Libraries that serve Linen and NNX alike import `flax.linen` at their head, subclass its
Modules, and ask whether a model is one. All of that works here: the classes are there,
and nothing is ever an instance of one. Making one is the error that says why. The
activations, initializers and `promote_dtype` of Linen are functions on arrays; they are
there in earnest.
"""

import functools
from types import GenericAlias, SimpleNamespace
from typing import Any, NoReturn, TypeVar

from treetap._nn import dtypes as nn_dtypes

T = TypeVar("T")
# What holds the Modules that are being called: for Linen's part of a library, none is.
_context = SimpleNamespace(module_stack=[None], capture_stack=[])


class Module:
    """A Linen Module: can be named, subclassed and asked about, but not made."""

    __class_getitem__ = classmethod(GenericAlias)

    def __init_subclass__(cls, **kwargs: Any):
        """Takes what a dataclass can be given, such as `kw_only=True`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuses to make a Module."""
        raise NotImplementedError(
            f"{cls.__name__} is a class of Linen, of which treetap, standing in for "
            "flax, has the names alone: treetap has NNX's Modules only. "
            "Port it to nnx, or run it under flax."
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Is never called, as there are no instances."""

    def param(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Is never called, as there are no instances."""


@functools.cache
def named(name: str) -> type[Module]:
    """The class of a name: one and the same each time."""
    return Module if name == "Module" else type(name, (Module,), {})


def compact(fun: T) -> T:
    """Marks a method of a Module; gives it back as it is."""
    return fun


def unbox(tree: T) -> T:
    """Takes values out of Linen's boxes, of which there are none."""
    return tree


def promote_dtype(*args: Any, dtype: Any = None, inexact: bool = True) -> list[Any]:
    """The values in one dtype, as `nnx`'s function of this name gives them."""
    return list(nn_dtypes.promote_dtype(args, dtype=dtype, inexact=inexact))


def canonicalize_dtype(*args: Any, dtype: Any = None, inexact: bool = True) -> Any:
    """The dtype that `promote_dtype` brings values to."""
    found = [value for value in args if value is not None]
    (value, *_) = promote_dtype(*found, dtype=dtype, inexact=inexact)
    return value.dtype
