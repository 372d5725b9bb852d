# SPDX-License-Identifier: Apache-2.0
"""cond, switch and checkify: one of several functions, and one that may fail.

Branches may change different Variables. Which ones any of them changes is found by
tracing each branch once; all branches then return those, and the rest is left alone.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from treetap._changes import Policy, with_policy
from treetap._lift import (
    Inputs,
    Updates,
    inputs_of,
    resolve_mode,
    run,
    transform,
    unpack_output,
)


def _written_by(branch: Any, inputs: Inputs, name: str) -> set[int]:
    """The Variables a branch changes."""
    found: list[Updates] = []

    def probe(values: Any) -> None:
        found.append(run(branch, inputs.definition, values, name=name)[1])

    jax.eval_shape(probe, inputs.values())
    return {number for lane in found[0].written.lanes for number, _ in lane}


def _branched(
    name: str, choose: Any, branches: Sequence[Any], operands: Any, graph: bool
) -> Any:
    inputs = inputs_of(operands, {}, graph, name)
    written = set[int]().union(*(_written_by(b, inputs, name) for b in branches))

    def purified(branch: Any) -> Callable[[Any], Any]:
        def pure(values: Any) -> Any:
            return run(
                branch,
                inputs.definition,
                values,
                name=name,
                keep=lambda number: number in written,
            )

        return pure

    out, updates = choose([purified(branch) for branch in branches], inputs.values())
    inputs.write_back(updates)
    return unpack_output(out)


def cond(
    pred: Any,
    true_fun: Callable[..., Any],
    false_fun: Callable[..., Any],
    *operands: Any,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    on_structure_change: Policy | None = None,
) -> Any:
    """Calls one of two functions, as `pred` says.

    Args:
        pred: What decides.
        true_fun: Called when it holds.
        false_fun: Called when it does not.
        *operands: The arguments of both.
        graph: Allow shared references.
        graph_updates: Only False is supported.
        on_structure_change: As for `treetap.jit`.
    """
    mode = resolve_mode(graph, graph_updates, "cond")

    def choose(branches: Any, values: Any) -> Any:
        return jax.lax.cond(pred, *branches, values)

    branches = [with_policy(b, on_structure_change) for b in (true_fun, false_fun)]
    return _branched("cond", choose, branches, operands, mode)


def switch(
    index: Any,
    branches: Sequence[Callable[..., Any]],
    *operands: Any,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    on_structure_change: Policy | None = None,
) -> Any:
    """Calls one of several functions, by number.

    Args:
        index: Which one; clamped into the range.
        branches: The functions.
        *operands: The arguments of all.
        graph: Allow shared references.
        graph_updates: Only False is supported.
        on_structure_change: As for `treetap.jit`.
    """
    mode = resolve_mode(graph, graph_updates, "switch")

    def choose(pure: Any, values: Any) -> Any:
        return jax.lax.switch(index, pure, values)

    chosen = [with_policy(branch, on_structure_change) for branch in branches]
    return _branched("switch", choose, chosen, operands, mode)


@transform
def checkify(
    f: Callable[..., Any],
    errors: Any = None,
    *,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    on_structure_change: Policy | None = None,
) -> Callable[..., Any]:
    """A function that returns `(error, result)`; Variables change either way.

    Args:
        f: The function.
        errors: What to check; as for `jax.experimental.checkify.checkify`, whose
            `user_checks` are the default.
        graph: Allow shared references.
        graph_updates: Only False is supported.
        on_structure_change: As for `treetap.jit`.
    """
    mode = bool(graph)

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        inputs = inputs_of(args, kwargs, mode, "checkify")

        def pure(values: Any) -> Any:
            return run(f, inputs.definition, values, name="checkify")

        from jax.experimental import checkify as jax_checkify  # takes a while to import

        chosen = jax_checkify.user_checks if errors is None else errors
        error, (out, updates) = jax_checkify.checkify(pure, chosen)(inputs.values())
        inputs.write_back(updates)
        return error, unpack_output(out)

    return call
