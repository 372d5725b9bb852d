# SPDX-License-Identifier: Apache-2.0
"""vmap and shard_map: one function over many slices.

A Variable that changes comes back along the axis (or with the specification) it went in
with; one that is the same for all slices may only be given a value that is.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax

from treetap._lift import (
    Lanes,
    Updates,
    inputs_of,
    refuse_bound_method,
    resolve_mode,
    run,
    unpack_output,
)
from treetap._metadata import MISSING
from treetap._prefixes import check_prefix, spread

P = ParamSpec("P")
R = TypeVar("R")


def _axes_of(given: Any, args: Any, kwargs: Any, name: str, argument: str) -> list[Any]:
    chosen = tuple(given) if isinstance(given, list) else given
    prefix = {"args": chosen, "kwargs": 0}
    return spread(prefix, {"args": args, "kwargs": kwargs}, name, argument)


def vmap(
    f: Callable[P, R] = MISSING,
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_name: Any = None,
    axis_size: int | None = None,
    spmd_axis_name: Any = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Callable[P, R]:
    """Maps a function over axes of its arguments.

    Args:
        f: The function; without it, a decorator.
        in_axes: An axis, None, or a prefix of the positional arguments; an entry stands
            for a whole Module. Keyword arguments are mapped over axis 0.
        out_axes: The same for the result.
        axis_name: As for `jax.vmap`.
        axis_size: As for `jax.vmap`.
        spmd_axis_name: As for `jax.vmap`.
        graph: Allow shared references.
        graph_updates: Only False is supported.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> counts = tt.Variable(jnp.zeros(3))
        >>> def add(count, x):
        ...     count[...] += x
        >>> tt.vmap(add)(counts, jnp.arange(3.0))
        >>> counts[...]
        Array([0., 1., 2.], dtype=float32)
    """
    mode = resolve_mode(graph, graph_updates, "vmap")
    options = {
        "in_axes": in_axes,
        "out_axes": out_axes,
        "axis_name": axis_name,
        "axis_size": axis_size,
        "spmd_axis_name": spmd_axis_name,
    }
    if f is MISSING:
        return functools.partial(vmap, **options, graph=mode, graph_updates=False)  # pyright: ignore[reportReturnType] - a decorator
    refuse_bound_method(f, "vmap")
    check_prefix(in_axes, "vmap", "in_axes")
    check_prefix(out_axes, "vmap", "out_axes")

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        inputs = inputs_of(args, kwargs, mode, "vmap")
        axes = _axes_of(in_axes, args, kwargs, "vmap", "in_axes")
        lanes = Lanes(axes)

        def pure(values: list[Any]) -> Any:
            return run(
                f,
                inputs.definition,
                values,
                name="vmap",
                lanes=lanes.of_leaf,
                count=len(lanes.prefixes),
            )

        updates_axes = Updates(tuple(lanes.prefixes), 0)  # pyright: ignore[reportArgumentType] - a prefix
        mapped = jax.vmap(
            pure,
            in_axes=(axes,),
            out_axes=(out_axes, updates_axes),
            axis_name=axis_name,
            axis_size=axis_size,
            spmd_axis_name=spmd_axis_name,
        )
        out, updates = mapped(inputs.values())
        inputs.write_back(updates)
        return unpack_output(out)

    return call


def shard_map(
    f: Callable[P, R] = MISSING,
    *,
    mesh: Any = None,
    in_specs: Any,
    out_specs: Any,
    axis_names: Any = frozenset(),
    check_vma: bool = True,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Callable[P, R]:
    """Runs a function on every device over its own shards.

    Args:
        f: The function; without it, a decorator.
        mesh: The mesh; the ambient one by default.
        in_specs: A specification, or a prefix of the positional arguments; an entry
            stands for a whole Module.
        out_specs: The same for the result.
        axis_names: As for `jax.shard_map`.
        check_vma: As for `jax.shard_map`.
        graph: Allow shared references.
        graph_updates: Only False is supported.
    """
    mode = resolve_mode(graph, graph_updates, "shard_map")
    if f is MISSING:
        return functools.partial(  # pyright: ignore[reportReturnType] - a decorator
            shard_map,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=axis_names,
            check_vma=check_vma,
            graph=mode,
            graph_updates=False,
        )
    refuse_bound_method(f, "shard_map")
    check_prefix(in_specs, "shard_map", "in_specs")

    @functools.wraps(f)
    def call(*args: Any) -> Any:
        inputs = inputs_of(args, {}, mode, "shard_map")
        specs = _axes_of(in_specs, args, {}, "shard_map", "in_specs")
        lanes = Lanes(specs)

        def pure(values: list[Any]) -> Any:
            return run(
                f,
                inputs.definition,
                values,
                name="shard_map",
                lanes=lanes.of_leaf,
                count=len(lanes.prefixes),
            )

        updates_specs = Updates(tuple(lanes.prefixes), None)  # pyright: ignore[reportArgumentType] - a prefix
        mapped = jax.shard_map(
            pure,
            mesh=mesh,
            in_specs=(specs,),
            out_specs=(out_specs, updates_specs),
            axis_names=axis_names,
            check_vma=check_vma,
        )
        out, updates = mapped(inputs.values())
        inputs.write_back(updates)
        return unpack_output(out)

    return call
