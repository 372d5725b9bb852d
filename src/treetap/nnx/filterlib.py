# SPDX-License-Identifier: Apache-2.0
"""filterlib: filters, which pick values by type, tag, path or a function.

Most are names of treetap, as NNX has them in this module.
"""

# ruff: noqa: PLC0414 - `as` says that a name is public here

from collections.abc import Sequence

from treetap._core.trees.filters import Filter as Filter
from treetap._core.trees.filters import PathIn as PathIn
from treetap._core.trees.filters import Predicate as Predicate
from treetap._core.trees.filters import predicate_of, predicates_of
from treetap.nnx import All as All
from treetap.nnx import Any as Any
from treetap.nnx import Everything as Everything
from treetap.nnx import Not as Not
from treetap.nnx import Nothing as Nothing
from treetap.nnx import OfType as OfType
from treetap.nnx import PathContains as PathContains
from treetap.nnx import WithTag as WithTag
from treetap.nnx.annotations import FilterLiteral as FilterLiteral
from treetap.nnx.annotations import HasTag as HasTag
from treetap.nnx.annotations import Key as Key
from treetap.nnx.annotations import PathParts as PathParts
from treetap.nnx.annotations import ellipsis as ellipsis

to_predicate = predicate_of


def filters_to_predicates(filters: Sequence[Filter]) -> tuple[Predicate, ...]:
    """Predicates for several filters; a catch-all may only stand at the end."""
    return tuple(predicates_of(filters))
