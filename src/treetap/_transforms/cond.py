# SPDX-License-Identifier: Apache-2.0
"""cond, switch and checkify: one of several functions, and one that may fail.

Branches may change different Variables, and JAX wants the same outputs of all. So each
branch is traced once, into a jaxpr that returns what this branch changes. Then it is
known what any of them changes: JAX gets functions that run these jaxprs, and add what
other branches change as it was. No branch is traced twice, however deep it is nested,
nor when the function is called again: see `kept_traces`.
"""

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Unpack

import jax
from jax.extend.core import jaxpr_as_fun

from treetap._core.errors import StructureError
from treetap._core.paths import show_path
from treetap._core.trees.graphdef import leaf_paths
from treetap._transforms.lift.arguments import NO_STATICS
from treetap._transforms.lift.kept_traces import kept
from treetap._transforms.lift.lift import (
    Inputs,
    Lift,
    Options,
    Updates,
    transform,
)
from treetap._transforms.lift.program import Key


class _Branch:
    """A branch as it was traced, and what it changes.

    Objects come out of the jaxpr even if the branch leaves them alone, in case another
    branch does not; JAX does not compute what is dropped afterwards.

    Attributes:
        metadata: By the number of a Variable that it changes: new metadata, or None.
        refs: The same of Variables with a Ref, whose values do not come out.
        structures: By the same: the structure of the new value.
        objects: By number: the objects, as the branch leaves them.
        idle: The numbers of those that it leaves alone.
    """

    def __init__(self, branch: Callable[..., Any], inputs: Inputs, lift: Lift):
        source = inputs.outline()
        run = functools.partial(lift.run, all_objects=True)
        key = Key(inputs.definition, NO_STATICS, (), None)
        pure = kept((branch,), key, lift, lambda fn: functools.partial(run, fn, source))
        jaxpr, shapes = jax.make_jaxpr(pure, return_shape=True)(inputs.values())
        self._run = jaxpr_as_fun(jaxpr)
        self._structure = jax.tree.structure(shapes)
        _, (groups, written) = shapes
        self.idle = written.idle
        self.metadata: dict[int, Any] = dict(written.groups[0])
        self.refs: dict[int, Any] = dict(written.refs)
        self.structures = dict(zip(self.metadata, map(jax.tree.structure, groups[0])))
        self.objects = {update.spec.number: update for update in written.objects}

    def run(
        self, values: list[Any], metadata: dict[int, Any], objects: Collection[Any]
    ) -> Any:
        """The result and the updates of a branch that changes all of these."""
        out, updates = self._structure.unflatten(self._run(*jax.tree.leaves(values)))
        supply = iter(updates.values[0])
        changed = dict(zip(self.metadata, supply))
        news = [changed.get(number, values[number]) for number in metadata]
        for number, update in self.objects.items():
            held = [next(supply) for _ in update.places]
            news += held if number in objects else ()
        kept = tuple(update for n, update in self.objects.items() if n in objects)
        groups = (tuple(metadata.items()),)
        common = {"groups": groups, "objects": kept, "idle": frozenset()}
        written = replace(updates.written, **common)
        return out, Updates((news,), written)


def _refuse_unlike(branches: list[_Branch], inputs: Inputs, objects: Any) -> None:
    """Refuses branches that change the same thing into things of different kinds."""
    name = inputs.name
    first, *rest = ([x.objects[n].spec for n in objects] for x in branches)
    if any(specs != first for specs in rest):
        raise TypeError(
            f"{name}: the branches change the structure of the operands in different "
            "ways. Make the same attributes, of the same kinds, in all of them."
        )
    paths = list(leaf_paths(inputs.definition.spec))
    for number in {n for x in branches for n in (*x.metadata, *x.refs)}:
        leaf = inputs.leaves[number]
        where = f"the {type(leaf).__name__} at {show_path(paths[number])}"
        metadata = [(x.metadata | x.refs).get(number) for x in branches]
        if any(facts != metadata[0] for facts in metadata):
            raise TypeError(
                f"{name}: the branches leave {where} with different metadata. Set the "
                "same metadata in all of them, or set them outside."
            )
        before = jax.tree.structure(leaf._box[0])
        found = [x.structures.get(number, before) for x in branches]
        if any(structure != found[0] for structure in found):
            texts = " and ".join(map(str, dict.fromkeys(found)))
            raise StructureError(
                f"{name}: {where} holds {texts} at the end of different branches. Give "
                "it a value of the same structure in all of them."
            )


def _branched(
    name: str, choose: Any, branches: Sequence[Any], operands: Any, options: Options
) -> Any:
    lift = Lift.of(name, options, label="operands")
    inputs = lift.inputs(operands, {})
    different = {id(branch): branch for branch in branches}
    traced = {n: _Branch(branch, inputs, lift) for n, branch in different.items()}
    found = [traced[id(branch)] for branch in branches]
    objects = {n for x in found for n in x.objects if n not in x.idle}
    _refuse_unlike(found, inputs, objects)
    metadata = {n: facts for x in found for n, facts in x.metadata.items()}
    metadata = dict(sorted(metadata.items()))

    run = functools.partial(_Branch.run, metadata=metadata, objects=objects)
    pure = {n: functools.partial(run, branch) for n, branch in traced.items()}
    chosen = [pure[id(branch)] for branch in branches]
    return inputs.finish(*choose(chosen, inputs.values()))


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
    choose = functools.partial(jax.lax.switch, index)
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
