# SPDX-License-Identifier: Apache-2.0
"""vmap, pmap and shard_map: one function over many slices.

A Variable that changes comes back along the axis (or with the specification) it went in
with; one that is the same for all slices may only be given a value that is.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax

from treetap._changes import Policy
from treetap._lift import (
    Lanes,
    Updates,
    inputs_of,
    run,
    transform,
    unpack_output,
)
from treetap._metadata import MISSING
from treetap._prefixes import check_prefix, spread

P = ParamSpec("P")
R = TypeVar("R")


Mapping = Callable[[Any, list[Any], Any], Callable[[Any], Any]]


def _mapped(
    name: str,
    f: Any,
    graph: bool,
    prefix: tuple[str, Any],
    mapping: Mapping,
    *,
    nothing: Any = None,
    keywords: bool = True,
) -> Callable[..., Any]:
    """A function mapped by JAX over flat values, each with a prefix of its own.

    Args:
        name: The transform.
        f: The function.
        graph: The mode.
        prefix: The argument's name and its value for the positional arguments.
        mapping: Makes JAX's function from the pure one, the prefixes of its values, and
            those of the updates.
        nothing: A prefix for what has no leaves.
        keywords: Whether keyword arguments are taken, and mapped over axis 0.
    """
    argument, given = prefix
    check_prefix(given, name, argument)
    given = tuple(given) if isinstance(given, list) else given

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs and not keywords:
            raise TypeError(
                f"{name}: {sorted(kwargs)} were passed by keyword, but `{argument}` "
                "has entries for positional arguments only."
            )
        inputs = inputs_of(args, kwargs, graph, name)
        axes = spread({"args": given, "kwargs": 0}, inputs.tree, name, argument)
        lanes = Lanes(axes)

        def pure(values: list[Any]) -> Any:
            return run(
                f,
                inputs.definition,
                values,
                name=name,
                lanes=lanes.of_leaf,
                count=len(lanes.prefixes),
            )

        # The second part stands for what is static, and has no leaves.
        updates_axes = Updates(tuple(lanes.prefixes), nothing)  # pyright: ignore[reportArgumentType] - a prefix
        out, updates = mapping(pure, axes, updates_axes)(inputs.values())
        inputs.write_back(updates)
        return unpack_output(out)

    return call


@transform
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
    on_structure_change: Policy | None = None,
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
        on_structure_change: As for `treetap.jit`.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> counts = tt.Variable(jnp.zeros(3))
        >>> def add(count, x):
        ...     count[...] += x
        >>> tt.vmap(add)(counts, jnp.arange(3.0))
        >>> counts[...]
        Array([0., 1., 2.], dtype=float32)
    """
    mode = bool(graph)
    check_prefix(out_axes, "vmap", "out_axes")

    def mapping(pure: Any, axes: list[Any], updates_axes: Any) -> Any:
        return jax.vmap(
            pure,
            in_axes=(axes,),
            out_axes=(out_axes, updates_axes),
            axis_name=axis_name,
            axis_size=axis_size,
            spmd_axis_name=spmd_axis_name,
        )

    return _mapped("vmap", f, mode, ("in_axes", in_axes), mapping)


@transform
def pmap(
    f: Callable[P, R] = MISSING,
    *,
    axis_name: Any = None,
    in_axes: Any = 0,
    out_axes: Any = 0,
    devices: Any = None,
    backend: str | None = None,
    axis_size: int | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    on_structure_change: Policy | None = None,
) -> Callable[P, R]:
    """As `vmap`, over devices.

    Args:
        f: The function; without it, a decorator.
        axis_name: As for `jax.pmap`.
        in_axes: As for `treetap.vmap`.
        out_axes: As for `treetap.vmap`.
        devices: As for `jax.pmap`.
        backend: As for `jax.pmap`.
        axis_size: As for `jax.pmap`.
        graph: Allow shared references.
        graph_updates: Only False is supported.
        on_structure_change: As for `treetap.jit`.
    """
    mode = bool(graph)
    placed = {"axis_name": axis_name, "devices": devices, "backend": backend}
    check_prefix(out_axes, "pmap", "out_axes")

    def mapping(pure: Any, axes: list[Any], updates_axes: Any) -> Any:
        axes_out = (out_axes, updates_axes)
        options = {**placed, "axis_size": axis_size}
        return jax.pmap(pure, in_axes=(axes,), out_axes=axes_out, **options)

    return _mapped("pmap", f, mode, ("in_axes", in_axes), mapping)


@transform
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
    on_structure_change: Policy | None = None,
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
        on_structure_change: As for `treetap.jit`.
    """
    mode = bool(graph)

    def mapping(pure: Any, specs: list[Any], updates_specs: Any) -> Any:
        return jax.shard_map(
            pure,
            mesh=mesh,
            in_specs=(specs,),
            out_specs=(out_specs, updates_specs),
            axis_names=axis_names,
            check_vma=check_vma,
        )

    return _mapped(
        "shard_map",
        f,
        mode,
        ("in_specs", in_specs),
        mapping,
        nothing=jax.P(),
        keywords=False,
    )
