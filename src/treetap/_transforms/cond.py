# SPDX-License-Identifier: Apache-2.0
"""cond, switch and checkify: one of several functions, and one that may fail.

Branches may change different Variables. Which ones any of them changes is found by
tracing each branch once; all branches then return those, and the rest is left alone.
"""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, Unpack

import jax

from treetap._transforms.lift.lift import (
    Inputs,
    Lift,
    Options,
    Written,
    transform,
)


def _written_by(
    branch: Any, inputs: Inputs, lift: Lift, force: Collection[int] = ()
) -> Written:
    """What a branch changes."""
    pure = functools.partial(lift.run, branch, inputs, force=force)
    return jax.eval_shape(pure, inputs.values())[1].written


def _outline(written: Written) -> Any:
    return [update.spec for update in written.objects]


def _branched(
    name: str, choose: Any, branches: Sequence[Any], operands: Any, options: Options
) -> Any:
    lift = Lift.of(name, options)
    inputs = lift.inputs(operands, {})
    found = [_written_by(branch, inputs, lift) for branch in branches]
    objects = [update for written in found for update in written.objects]
    force = {update.spec.number for update in objects if update.spec.number is not None}
    if force:  # a branch that left an object alone gives it out as it is
        found = [_written_by(branch, inputs, lift, force) for branch in branches]
    if any(_outline(written) != _outline(found[0]) for written in found):
        raise TypeError(
            f"{name}: the branches change the structure of the operands in different "
            "ways. Make the same attributes, of the same kinds, in all of them."
        )
    kept = set[int]().union(*(written.numbers() for written in found))

    run = functools.partial(lift.run, keep=kept, force=force)
    pure = [functools.partial(run, branch, inputs) for branch in branches]
    return inputs.finish(*choose(pure, inputs.values()))


def cond(
    pred: Any,
    true_fun: Callable[..., Any],
    false_fun: Callable[..., Any],
    *operands: Any,
    **options: Unpack[Options],
) -> Any:
    """Calls one of two functions, as `pred` says.

    Args:
        pred: What decides.
        true_fun: Called when it holds.
        false_fun: Called when it does not.
        *operands: The arguments of both.
        **options: As for `treetap.jit`.
    """

    def choose(branches: Any, values: Any) -> Any:
        return jax.lax.cond(pred, *branches, values)

    return _branched("cond", choose, (true_fun, false_fun), operands, options)


def switch(
    index: Any,
    branches: Sequence[Callable[..., Any]],
    *operands: Any,
    **options: Unpack[Options],
) -> Any:
    """Calls one of several functions, by number.

    Args:
        index: Which one; clamped into the range.
        branches: The functions.
        *operands: The arguments of all.
        **options: As for `treetap.jit`.
    """

    def choose(pure: Any, values: Any) -> Any:
        return jax.lax.switch(index, pure, values)

    return _branched("switch", choose, branches, operands, options)


@transform
def checkify(
    f: Callable[..., Any],
    errors: Any = None,
    **options: Unpack[Options],
) -> Callable[..., Any]:
    """A function that returns `(error, result)`; Variables change either way.

    Args:
        f: The function.
        errors: What to check; as for `jax.experimental.checkify.checkify`, whose
            `user_checks` are the default.
        **options: As for `treetap.jit`.
    """
    lift = Lift.of("checkify", options)

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        inputs = lift.inputs(args, kwargs)
        pure = functools.partial(lift.run, f, inputs)

        from jax.experimental import checkify as jax_checkify  # takes a while to import

        chosen = jax_checkify.user_checks if errors is None else errors
        error, given = jax_checkify.checkify(pure, chosen)(inputs.values())
        return error, inputs.finish(*given)

    return call
