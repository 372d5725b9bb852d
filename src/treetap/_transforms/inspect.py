# SPDX-License-Identifier: Apache-2.0
"""eval_shape and make_jaxpr: transforms that only look at a function.

Nothing is computed and nothing is changed; what is shared in the arguments is refused,
as it is where they run.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, Unpack

import jax
from jax.sharding import NamedSharding, PartitionSpec

from treetap._core.errors import StructureError
from treetap._core.settings import Mode, resolve_mode
from treetap._core.trees.pytree import variables_below
from treetap._core.variables.metadata import MISSING
from treetap._core.variables.placement import mesh_of, resolve_sharding
from treetap._transforms.lift.arguments import Positions, put_statics, take_statics
from treetap._transforms.lift.lift import Lift, Options, transform
from treetap._transforms.lift.structure_watch import Policy

R = TypeVar("R")


@transform
def eval_shape(
    f: Callable[..., R],
    *args: Any,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    on_structure_change: Policy | None = None,
    **kwargs: Any,
) -> R:
    """The result of `f` with abstract leaves; nothing is computed or changed.

    A Module made outside that `f` returns comes out as an abstract copy.

    Args:
        f: The function.
        *args: Its arguments, concrete or abstract.
        graph: As for `treetap.jit`.
        graph_updates: As for `treetap.jit`.
        on_structure_change: As for `treetap.jit`.
        **kwargs: Its keyword arguments.
    """
    mode = resolve_mode(graph, graph_updates)
    lift = Lift("eval_shape", mode, on_structure_change, copies=True)
    out = lift.abstract(f, lift.inputs(args, kwargs))
    return _with_shardings(out, PartitionSpec() if mode is Mode.UPDATES else None)


def _with_shardings(out: Any, default: PartitionSpec | None) -> Any:
    """Gives abstract Variables the sharding their metadata ask for, where they can.

    Args:
        out: What holds the Variables.
        default: What is asked for, on the mesh there is, by one without annotation.
    """
    for variable in variables_below(out):
        raw, metadata = variable._box[0], variable._metadata
        is_unplaced = isinstance(raw, jax.ShapeDtypeStruct) and raw.sharding is None
        mesh = mesh_of(metadata) if is_unplaced else None
        if mesh is not None:
            sharding = resolve_sharding(metadata)  # None without an annotation
            if sharding is None and default is not None:
                sharding = NamedSharding(mesh, default)
            variable.set_raw_value(raw.update(sharding=sharding))
    return out


@transform
def make_jaxpr(
    f: Callable[..., Any] = MISSING,
    *,
    static_argnums: int | Sequence[int] = (),
    **options: Unpack[Options],
) -> Callable[..., Any]:
    """A function that returns the jaxpr of `f` in its pure form.

    Args:
        f: The function; without it, a decorator.
        static_argnums: Arguments that are part of the program.
        **options: As for `treetap.jit`, without graph updates.
    """
    lift = Lift.of("make_jaxpr", options)
    if lift.mode is Mode.UPDATES:
        raise StructureError(
            "nnx.make_jaxpr does not support graph_updates=True. A jaxpr has no place "
            "for changes of structure; pass `graph_updates=False`."
        )
    statics = Positions(f, static_argnums, None, "make_jaxpr: static arguments")

    @functools.wraps(f)
    def made(*args: Any, **kwargs: Any) -> Any:
        args, kwargs, taken = take_statics(statics, args, kwargs)
        called = put_statics(f, taken)
        inputs = lift.inputs(args, kwargs)

        def pure(values: list[Any]) -> Any:
            return lift.run(called, inputs, values)[0]

        return jax.make_jaxpr(pure)(inputs.values())

    return made
