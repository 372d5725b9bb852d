# SPDX-License-Identifier: Apache-2.0
"""Carries: what a loop hands from one step to the next.

JAX wants the same arrays' types after a step as before it. With Variables more is
needed: the caller's Variables get the final values, so a step must return the very
Variables it was given, in the same places.
"""

from typing import Any

from treetap._core.errors import StructureError
from treetap._core.trees.flatten import take_leaves
from treetap._core.trees.graphdef import GraphDef
from treetap._core.variables.variable import Variable


def same_carry(
    definition: GraphDef | None, before: Any, after: Any, name: str
) -> list[Any]:
    """The leaves of a carried value after a step; its Variables must be the same.

    Args:
        definition: The description of the carried value before the step, where static
            attributes may not change either.
        before: The carried value.
        after: What the step returned.
        name: The transform.
    """
    present, old = take_leaves({"carry": before}, True, name)
    definition = definition or present
    found, new = take_leaves({"carry": after}, True, name)
    for one, two in zip(old, new):
        has_variable = isinstance(one, Variable) or isinstance(two, Variable)
        if has_variable and one is not two:
            kind = type(one if isinstance(one, Variable) else two).__name__
            raise StructureError(
                f"{name} Variable identity must be preserved across iterations (Carry "
                f"references must be the same between iterations): a {kind} of the "
                "carry came back as another one, or in another place. Change Variables "
                "in place, and return the value you were given."
            )
    if found.spec != definition.spec:
        raise StructureError(
            f"{name}: the carry changed its structure from\n{definition}\nto\n{found}\n"
            "Return a value like the one you were given."
        )
    return new
