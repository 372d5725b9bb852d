# SPDX-License-Identifier: Apache-2.0
"""transform_metadata: axis names that follow an axis in and out of a mapping.

A Variable's `out_sharding` has one name per axis. Inside a mapped function an axis is
gone, so its name must go too, and come back outside; this decorator, put right under
the mapping transform with the same axes, does that.
"""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

from treetap._core.errors import MetadataError
from treetap._core.settings import Mode, resolve_graph
from treetap._core.variables.metadata import MISSING
from treetap._core.variables.variable import Snapshot, Variable
from treetap._transforms.lift.lift import Inputs, Lift, refuse_returned
from treetap._transforms.lift.prefixes import check_prefix, spread

P = ParamSpec("P")
R = TypeVar("R")

PARTITION_NAME = "partition_name"


Names = Mapping[str, Any]  # of an axis, by the metadata they are in
NO_NAMES: Names = MappingProxyType({})


def names_of(given: Names) -> Names:
    """Names by the metadata that they are in."""
    return {
        "out_sharding" if key == PARTITION_NAME else key: value
        for key, value in given.items()
    }


def names_without(variable: Variable[Any], axis: int, names: Names) -> dict[str, Any]:
    """The metadata a Variable has without a mapped axis."""
    found: dict[str, Any] = {}
    for key, partition in names.items():
        held = variable.get_metadata(key, None)
        if held is None:
            continue
        place = axis if axis >= 0 else len(held) + axis
        here = held[place] if 0 <= place < len(held) else None
        if here != partition:
            raise MetadataError(
                f"transform_metadata: expected {partition!r} at axis {axis} of "
                f"{key} {tuple(held)!r} of a {type(variable).__name__}, found "
                f"{here!r}."
            )
        found[key] = (*held[:place], *held[place + 1 :])
    return found


def put_name(variable: Variable[Any], axis: int, names: Names) -> None:
    """Puts the name of a mapped axis in, after None for axes that have no name."""
    for key, partition in names.items():
        held = variable.get_metadata(key, None)
        if held is not None:
            items = list(held)
            place = axis if axis >= 0 else len(items) + 1 + axis
            items += [None] * (place - len(items))
            items.insert(place, partition)
            variable.set_metadata(**{key: tuple(items)})
    variable.add_axis(axis, names.get("out_sharding"))


def take_name(variable: Variable[Any], axis: int, names: Names, held: Names) -> None:
    """Takes the name of a mapped axis out; `held` is what `names_without` gave."""
    if held:
        variable.set_metadata(**held)
    variable.remove_axis(axis, names.get("out_sharding"))


def follow_axis(
    f: Any, in_axes: Any, out_axes: Any, given: Names, mode: Mode
) -> Callable[..., Any]:
    """A function whose Variables lose the name of an axis inside, and get it back.

    Args:
        f: The function.
        in_axes: The axes of its arguments.
        out_axes: The axes of its result.
        given: Names, by `PARTITION_NAME` or another metadata's name.
        mode: The mode.
    """
    name = "transform_metadata"
    lift, results = Lift(name, mode), Lift(name, min(mode, Mode.GRAPH))
    check_prefix(in_axes, name, "in_axes", mode)
    check_prefix(out_axes, name, "out_axes", mode)
    axes = {"args": in_axes, "kwargs": 0}
    names = names_of(given)

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        inputs = lift.inputs(args, kwargs)
        pairs = _mapped(inputs, axes, "in_axes")
        planned = [names_without(variable, axis, names) for variable, axis in pairs]
        own = {id(variable) for variable, _ in pairs}
        with Snapshot(leaf for leaf in inputs.leaves if isinstance(leaf, Variable)):
            for (variable, axis), held in zip(pairs, planned):
                take_name(variable, axis, names, held)
            out = f(*args, **kwargs)
            returned = Inputs({"out": out}, results)
            if mode is not Mode.UPDATES:
                _refuse_returned(inputs, returned)
            for variable, axis in pairs:
                put_name(variable, axis, names)
        new = _mapped(returned, {"out": out_axes}, "out")
        if mode is Mode.UPDATES:  # objects may have got Variables
            new = _mapped(lift.inputs(args, kwargs), axes, "in_axes") + new
        for variable, axis in new:
            if id(variable) not in own:
                own.add(id(variable))
                put_name(variable, axis, names)
        return out

    return call


def _refuse_returned(inputs: Inputs, returned: Inputs) -> None:
    """Refuses a result in which a Variable of the arguments stands."""
    own = {id(leaf) for leaf in inputs.leaves if isinstance(leaf, Variable)}
    for leaf in returned.leaves:
        if id(leaf) in own:
            raise refuse_returned(inputs.name, inputs.tree | returned.tree, leaf)


def _mapped(inputs: Inputs, prefix: Any, argument: str) -> list[tuple[Any, int]]:
    """Variables that are mapped, and their axes."""
    axes = spread(prefix, inputs.tree, inputs.name, argument)
    return [
        (leaf, axis)
        for leaf, axis in zip(inputs.leaves, axes)
        if isinstance(leaf, Variable) and isinstance(axis, int)
    ]


def with_names(f: Any, in_axes: Any, out_axes: Any, given: Any, mode: Mode) -> Any:
    """`f`, with axis names following the mapped axis as `transform_metadata` asks."""
    if not given:
        return f
    if mode is not Mode.UPDATES:
        raise MetadataError(
            "`transform_metadata=` needs graph updates. Put the decorator "
            "`treetap.transform_metadata` right under the mapping transform."
        )
    return follow_axis(f, in_axes, out_axes, given, Mode.UPDATES)


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
    mode = Mode(resolve_graph(graph))
    given = {PARTITION_NAME: partition}
    axes = {"in_axes": in_axes, "out_axes": out_axes}
    decorate = functools.partial(follow_axis, **axes, given=given, mode=mode)
    return decorate if f is MISSING else decorate(f)  # pyright: ignore[reportReturnType] - a decorator
