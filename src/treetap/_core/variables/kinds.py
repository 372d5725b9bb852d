# SPDX-License-Identifier: Apache-2.0
"""The kinds of Variables, and the names by which collections of them are called.

A kind is a subclass of Variable with nothing in it: its type is its meaning. The
registry maps a collection name (`params`) to a kind (`Param`) and back.
"""

import functools
import types
from typing import Any, TypeVar

from treetap._core.errors import MetadataError
from treetap._core.variables.variable import MISSING, A, Variable

K = TypeVar("K", bound=type[Variable[Any]])


class Param(Variable[A]):
    """A trainable parameter."""


class BatchStat(Variable[A]):
    """A running statistic of the data."""


class Cache(Variable[A]):
    """A value kept from one step of decoding to the next."""


class Intermediate(Variable[A]):
    """A value recorded on the way through a model."""


class Perturbation(Intermediate[A]):
    """A zero added to a value on the way, to get the gradient there."""


class RngState(Variable[A]):
    """State of a random stream."""

    _counted_as = "RngState"


class RngKey(RngState[A]):
    """The key of a random stream; its metadata `tag` is the stream's name."""


class RngCount(RngState[A]):
    """How many keys a random stream has given."""


_by_name: dict[str, type[Variable[Any]]] = {
    "params": Param,
    "batch_stats": BatchStat,
    "cache": Cache,
    "intermediates": Intermediate,
    "perturbations": Perturbation,
}


def all_kinds() -> list[type[Variable[Any]]]:
    """Variable and every kind that this program has, bases before what derives."""
    found: list[type[Variable[Any]]] = [Variable]
    for kind in found:  # which grows while it is gone through
        found += [each for each in kind.__subclasses__() if each not in found]
    return found


def kind_of_name(
    name: str, *, base: type[Variable[Any]] = Variable, allow_register: bool = False
) -> type[Variable[Any]]:
    """The kind registered under a collection name.

    Args:
        name: The collection's name.
        base: What a newly made kind derives from.
        allow_register: Make and register a kind when the name is new.
    """
    if name in _by_name:
        return _by_name[name]
    if not allow_register:
        raise MetadataError(
            f"No kind of Variable is registered as {name!r}; known are "
            f"{sorted(_by_name)}. Register one with `register_variable_name`."
        )
    return register_kind(name, types.new_class(name, (base,)))


def name_of_kind(kind: type[Variable[Any]], *, allow_register: bool = False) -> str:
    """The collection name under which a kind is registered."""
    for name, known in _by_name.items():
        if known is kind:
            return name
    if not allow_register:
        raise MetadataError(
            f"The kind {kind.__name__} is not registered under any name. "
            "Register it with `register_variable_name`."
        )
    register_kind(kind.__name__, kind)
    return kind.__name__


def register_kind(name: str, typ: Any = MISSING, *, overwrite: bool = False) -> Any:
    """Registers a kind under a collection name; also a decorator.

    Args:
        name: The collection's name.
        typ: The kind; without it, a decorator.
        overwrite: Take the name from the kind that has it.
    """
    if typ is MISSING:
        return functools.partial(register_kind, name, overwrite=overwrite)
    if name in _by_name and not overwrite:
        raise MetadataError(
            f"The name {name!r} is taken by {_by_name[name].__name__}. "
            "Choose another, or say `overwrite=True`."
        )
    _by_name[name] = typ
    return typ
