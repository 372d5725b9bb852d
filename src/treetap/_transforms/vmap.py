# SPDX-License-Identifier: Apache-2.0
"""vmap, pmap and shard_map: one function over many slices.

A Variable that changes comes back along the axis (or with the specification) it went in
with; one that is the same for all slices may only be given a value that is.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, Unpack

import jax

from treetap._core.bounded_cache import BoundedCache
from treetap._core.errors import StructureError
from treetap._core.paths import show_path
from treetap._core.settings import Mode
from treetap._core.trees.graphdef import GraphDef
from treetap._core.trees.sharing import places
from treetap._core.variables.metadata import MISSING
from treetap._core.variables.values import is_ref
from treetap._core.variables.variable import Variable
from treetap._transforms.lift.arguments import (
    Positions,
    positional,
    put_statics,
    take_statics,
)
from treetap._transforms.lift.axis_names import NO_NAMES, with_names
from treetap._transforms.lift.lift import (
    Inputs,
    Lift,
    Options,
    Updates,
    transform,
)
from treetap._transforms.lift.prefixes import check_prefix
from treetap._transforms.lift.program import MAX_PROGRAMS, Key
from treetap._transforms.lift.results import Results

P = ParamSpec("P")
R = TypeVar("R")


def _mapped(
    lift: Lift,
    f: Any,
    how: Callable[..., Any],
    prefixes: dict[str, Any],
    *,
    nothing: Any = None,
    statics: Positions | None = None,
    keeps: bool = False,
) -> Callable[..., Any]:
    """A function mapped by JAX over flat values, each with a prefix of its own.

    Args:
        lift: The lift.
        f: The function.
        how: JAX's transform, with all arguments but the prefixes.
        prefixes: For the positional arguments and for the result, by argument.
        nothing: The prefix of a part without leaves. If there is one, the prefixes
            count positional arguments only, and with graph updates Variables are put
            where their prefix says even if nobody changed them.
        statics: Arguments that are part of the program.
        keeps: Whether to keep the mapped function for later calls, as it is compiled.
    """
    name, mode = lift.name, lift.mode
    (argument, given), (out_argument, out) = prefixes.items()
    counted = len(given) if isinstance(given, tuple) else 0
    check_prefix(given, name, argument, mode)
    results = Results(out, mode, name, out_argument, nothing)

    def made(key: Key, source: Inputs | GraphDef) -> Callable[[Any], Any]:
        groups: Any = key.groups
        keep = key.kept() if nothing is not None else ()
        run = functools.partial(lift.run, groups=groups, results=results, keep=keep)
        # The second part stands for what is static, and has no leaves.
        updates = Updates(tuple(groups.prefixes), nothing)  # pyright: ignore[reportArgumentType] - a prefix
        ins, outs = (groups.by_leaf(),), (results.for_jax, updates)
        pure = functools.partial(run, put_statics(f, key.statics), source)
        return how(pure, **{argument: ins, out_argument: outs})

    compiled: BoundedCache[Key, Callable[[Any], Any]] = BoundedCache(MAX_PROGRAMS)

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        if mode is Mode.UPDATES or (kwargs and nothing is not None):
            args, kwargs = (
                positional(f, args, kwargs, name, argument, count=counted),
                {},
            )
        args, kwargs, taken = take_statics(statics, args, kwargs)
        inputs = lift.inputs(args, kwargs)
        if keeps:
            _refuse_lost_refs(inputs)
        groups = inputs.spread({"args": given, "kwargs": 0}, argument)
        key = Key(inputs.definition, taken, (), groups)
        try:
            make = functools.partial(made, key, inputs.outline())
            mapped = compiled.made(key, make) if keeps and key.lasts else make()
            found = mapped(inputs.values())
        except ValueError as error:
            raise _named(error, inputs, groups.by_leaf()) from None
        return inputs.finish(*found)

    return call


def _named(error: ValueError, inputs: Inputs, axes: list[Any]) -> ValueError:
    """JAX's complaint about an axis, with the Variables it may be about."""
    if "axis spec None" not in str(error):
        return error
    fixed = {id(x) for x, axis in zip(inputs.leaves, axes) if axis is None}
    found = [
        f"{show_path(path)} ({type(value).__name__})"
        for path, value in places(inputs.tree)
        if isinstance(value, Variable) and id(value) in fixed
    ]
    return type(error)(
        f"{inputs.name}: a Variable with axis None was given a value that differs from "
        f"slice to slice, at {inputs.name} of one of {', '.join(found) or '(none)'}: "
        f"{error}"
    )


# From then on `jax.pmap` deletes the Refs that it is given.
_LOSES_REFS = (0, 11)


def _refuse_lost_refs(inputs: Inputs) -> None:
    """Refuses Variables with Refs where `jax.pmap` cannot take them."""
    if jax.__version_info__ < _LOSES_REFS:
        return
    for path, value in places(inputs.tree):
        if isinstance(value, Variable) and is_ref(value.get_raw_value()):
            raise StructureError(
                f"pmap: the {type(value).__name__} at {show_path(path)} holds a Ref, "
                f"which `jax.pmap` of JAX {jax.__version__} cannot take. Make it "
                "without `ref=True`, or map it with `treetap.vmap`."
            )


@transform
def vmap(
    f: Callable[P, R] = MISSING,
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_name: Any = None,
    axis_size: int | None = None,
    spmd_axis_name: Any = None,
    transform_metadata: Mapping[str, Any] = NO_NAMES,
    **options: Unpack[Options],
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
        transform_metadata: With graph updates, names of the mapped axis: see
            `treetap.transform_metadata`, which serves all modes.
        **options: As for `treetap.jit`.

    Examples:
        >>> import jax.numpy as jnp, treetap as tt
        >>> counts = tt.Variable(jnp.zeros(3))
        >>> def add(count, x):
        ...     count[...] += x
        >>> tt.vmap(add)(counts, jnp.arange(3.0))
        >>> counts[...]
        Array([0., 1., 2.], dtype=float32)
    """
    lift = Lift.of("vmap", options)
    f = with_names(f, in_axes, out_axes, transform_metadata, lift.mode)
    named = {"axis_name": axis_name, "axis_size": axis_size}
    how = functools.partial(jax.vmap, **named, spmd_axis_name=spmd_axis_name)
    return _mapped(lift, f, how, {"in_axes": in_axes, "out_axes": out_axes})


@transform
def pmap(
    f: Callable[P, R] = MISSING,
    *,
    axis_name: Any = None,
    in_axes: Any = 0,
    out_axes: Any = 0,
    static_broadcasted_argnums: int | Sequence[int] = (),
    devices: Any = None,
    backend: str | None = None,
    axis_size: int | None = None,
    donate_argnums: int | Sequence[int] = (),
    transform_metadata: Mapping[str, Any] = NO_NAMES,
    **options: Unpack[Options],
) -> Callable[P, R]:
    """As `vmap`, over devices.

    Args:
        f: The function; without it, a decorator.
        axis_name: As for `jax.pmap`.
        in_axes: As for `treetap.vmap`.
        out_axes: As for `treetap.vmap`.
        static_broadcasted_argnums: Arguments that are part of the program.
        devices: As for `jax.pmap`.
        backend: As for `jax.pmap`.
        axis_size: As for `jax.pmap`.
        donate_argnums: Accepted, but buffers are kept; donate with `treetap.jit`.
        transform_metadata: As for `treetap.vmap`.
        **options: As for `treetap.jit`.
    """
    lift = Lift.of("pmap", options)
    f = with_names(f, in_axes, out_axes, transform_metadata, lift.mode)
    statics = Positions(f, static_broadcasted_argnums, None, "pmap: static arguments")
    del donate_argnums  # a permission, not a demand: buffers are kept
    named = {"axis_name": axis_name, "axis_size": axis_size}
    how = functools.partial(jax.pmap, **named, devices=devices, backend=backend)
    axes = {"in_axes": in_axes, "out_axes": out_axes}
    return _mapped(lift, f, how, axes, statics=statics, keeps=True)


@transform
def shard_map(
    f: Callable[P, R] = MISSING,
    *,
    mesh: Any = None,
    in_specs: Any,
    out_specs: Any,
    axis_names: Any = frozenset(),
    check_vma: bool = True,
    **options: Unpack[Options],
) -> Callable[P, R]:
    """Runs a function on every device over its own shards.

    Args:
        f: The function; without it, a decorator.
        mesh: The mesh; the ambient one by default.
        in_specs: A specification, or a prefix of the positional arguments; an entry
            stands for a whole Module. With graph updates, all Variables come back with
            the sharding that it says; else those that were changed.
        out_specs: The same for the result.
        axis_names: As for `jax.shard_map`.
        check_vma: As for `jax.shard_map`.
        **options: As for `treetap.jit`.
    """
    lift = Lift.of("shard_map", options)
    given = {"axis_names": axis_names, "check_vma": check_vma}
    how = functools.partial(jax.shard_map, mesh=mesh, **given)
    specs = {"in_specs": in_specs, "out_specs": out_specs}
    return _mapped(lift, f, how, specs, nothing=jax.P())
