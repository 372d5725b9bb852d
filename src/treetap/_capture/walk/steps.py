# SPDX-License-Identifier: Apache-2.0
"""A step: one operation that holds jaxprs, to be run by a plan."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from jax.extend.core import Primitive

from treetap._capture.walk.plans import Found, Part, Rewritten
from treetap._capture.walk.spots import Spot

Params = dict[str, Any]
Ran = tuple[list[Any], Found]  # results, and what came out of all bodies


class Walker(Protocol):
    """Who runs bodies by plans, such as `run.Walk`."""

    def run(self, part: Part, values: Sequence[Any]) -> tuple[list[Any], Found]:
        """Runs a body: its results, and what came out at each spot."""
        ...

    def rewritten(self, part: Part) -> Rewritten:
        """A body that takes what is fed, too, and gives what comes out."""
        ...

    def spots(self, jaxpr: Any) -> Sequence[Spot]:
        """The spots of an open jaxpr."""
        ...


class Step(NamedTuple):
    """One operation to be run by a plan.

    Attributes:
        primitive: The operation.
        params: Its parameters.
        values: Its operands.
        walk: Who runs them.
    """

    primitive: Primitive
    params: Params
    values: list[Any]
    walk: Walker
