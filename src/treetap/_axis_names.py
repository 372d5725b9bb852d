# SPDX-License-Identifier: Apache-2.0
"""transform_metadata: axis names that follow an axis in and out of a mapping.

A Variable's `out_sharding` has one name per axis. Inside a mapped function an axis is
gone, so its name must go too, and come back outside; this decorator, put right under
the mapping transform with the same axes, does that.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from treetap._errors import MetadataError
from treetap._graphs import take_leaves
from treetap._lift import inputs_of
from treetap._metadata import MISSING
from treetap._prefixes import check_prefix, spread
from treetap._settings import resolve_graph
from treetap._variables import Variable

P = ParamSpec("P")
R = TypeVar("R")

PARTITION_NAME = "partition_name"


def _names_without(variable: Variable[Any], axis: int, partition: Any) -> Any:
    """The names a Variable has without a mapped axis; None if it has no names."""
    names = variable.get_metadata("out_sharding", None)
    if names is None:
        return None
    held = list(names)
    place = axis if axis >= 0 else len(held) + axis
    found = held[place] if 0 <= place < len(held) else None
    if found != partition:
        raise MetadataError(
            f"transform_metadata: expected {partition!r} at axis {axis} of "
            f"out_sharding {tuple(names)!r} of a {type(variable).__name__}, found "
            f"{found!r}."
        )
    return (*held[:place], *held[place + 1 :])


def _with(variable: Variable[Any], axis: int, partition: Any) -> None:
    """Puts the name of a mapped axis in, after None for axes that have no name."""
    names = variable.get_metadata("out_sharding", None)
    if names is not None:
        held = list(names)
        place = axis if axis >= 0 else len(held) + 1 + axis
        held += [None] * (place - len(held))
        held.insert(place, partition)
        variable.set_metadata(out_sharding=tuple(held))
    variable.add_axis(axis, partition)


def transform_metadata(
    f: Callable[P, R] = MISSING,
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    partition: str | None,
    graph: bool | None = None,
) -> Callable[P, R]:
    """Lets `out_sharding` follow the axis of a mapping transform around `f`.

    Args:
        f: The function; without it, a decorator.
        in_axes: The axes given to the mapping transform.
        out_axes: The same for the result.
        partition: The name of the axis.
        graph: Allow shared references.
    """
    mode = resolve_graph(graph)
    if f is MISSING:
        return functools.partial(  # pyright: ignore[reportReturnType] - a decorator
            transform_metadata,
            in_axes=in_axes,
            out_axes=out_axes,
            partition=partition,
            graph=mode,
        )
    check_prefix(in_axes, "transform_metadata", "in_axes")
    name = "transform_metadata"

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        inputs = inputs_of(args, kwargs, mode, name)
        axes = spread({"args": in_axes, "kwargs": 0}, inputs.tree, name, "in_axes")
        pairs = [
            (leaf, axis)
            for leaf, axis in zip(inputs.leaves, axes)
            if isinstance(leaf, Variable) and isinstance(axis, int)
        ]
        names = [_names_without(v, axis, partition) for v, axis in pairs]
        for (variable, axis), held in zip(pairs, names):
            if held is not None:
                variable.set_metadata(out_sharding=held)
            variable.remove_axis(axis, partition)
        try:
            out = f(*args, **kwargs)
        finally:
            for variable, axis in pairs:
                _with(variable, axis, partition)
        own = {id(variable) for variable, _ in pairs}
        _, leaves = take_leaves({"out": out}, True, name)
        axes = spread({"out": out_axes}, {"out": out}, name, "out_axes")
        for leaf, axis in zip(leaves, axes):
            is_new = isinstance(leaf, Variable) and id(leaf) not in own
            if is_new and isinstance(axis, int):
                _with(leaf, axis, partition)
        return out

    return call
