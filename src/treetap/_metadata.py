# SPDX-License-Identifier: Apache-2.0
"""Metadata: named facts that travel with a Variable.

Three of them every Variable has (`REQUIRED`); they are fixed when it is made. A
Variable without further metadata shares the one mapping `PLAIN`.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from treetap._errors import MetadataError

A = TypeVar("A")

REQUIRED = ("hijax", "ref", "eager_sharding")
_RENAMED = {"sharding": "out_sharding", "sharding_names": "out_sharding"}
PLAIN: dict[str, Any] = {"hijax": False, "ref": False, "eager_sharding": True}


class _Missing:
    """The default of arguments for which None is a value."""

    def __repr__(self) -> str:
        return "<missing>"


MISSING: Any = _Missing()


class VariableMetadata(Generic[A]):
    """What an initializer made by `with_metadata` returns: a value and its metadata."""

    __slots__ = ("metadata", "raw_value")

    def __init__(self, raw_value: A, metadata: Mapping[str, Any]):
        self.raw_value = raw_value
        self.metadata = dict(metadata)


def checked_names(kind: type, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata under their present names; one that could never be read is refused."""
    checked: dict[str, Any] = {}
    for name, value in metadata.items():
        if name in _RENAMED:
            warnings.warn(
                f"{kind.__name__}: the metadata name {name!r} is deprecated; "
                f"use {_RENAMED[name]!r}.",
                DeprecationWarning,
                stacklevel=4,
            )
            name = _RENAMED[name]  # noqa: PLW2901 - the new name stands for the old one
        if name not in PLAIN and hasattr(kind, name):
            raise MetadataError(
                f"{kind.__name__}: {name!r} cannot be the name of metadata: it is an "
                f"attribute of {kind.__name__} itself. Choose another name."
            )
        checked[name] = value
    return checked


def required_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the metadata that is fixed."""
    return {name: metadata[name] for name in REQUIRED}


def with_metadata(
    initializer: Callable[..., Any], **metadata: Any
) -> Callable[..., VariableMetadata[Any]]:
    """Wraps an initializer so that the Variable made from it gets `metadata`.

    >>> import jax, treetap as tt
    >>> init = tt.with_metadata(jax.nn.initializers.zeros, role="bias")
    >>> tt.Param(init(jax.random.key(0), (2,))).role
    'bias'
    """

    def initialize(*args: Any, **kwargs: Any) -> VariableMetadata[Any]:
        made = initializer(*args, **kwargs)
        if isinstance(made, VariableMetadata):
            return VariableMetadata(made.raw_value, {**metadata, **made.metadata})
        return VariableMetadata(made, metadata)

    return initialize
