# SPDX-License-Identifier: Apache-2.0
"""spmd: where Variables are placed on many devices.

Most are names of treetap, as NNX has them in this module.
"""

# ruff: noqa: PLC0414 - `as` says that a name is public here

from collections.abc import Mapping
from typing import Any, TypeVar

from jax.sharding import PartitionSpec

from treetap._core.trees.pytree import variables_below
from treetap._transforms.lift.axis_names import (
    names_of,
    names_without,
    put_name,
    take_name,
)
from treetap.nnx import PARTITION_NAME as PARTITION_NAME
from treetap.nnx import Variable
from treetap.nnx import abstract_with_sharding as abstract_with_sharding
from treetap.nnx import as_abstract as as_abstract
from treetap.nnx import eval_shape as eval_shape
from treetap.nnx import get_abstract_model as get_abstract_model
from treetap.nnx import get_named_sharding as get_named_sharding
from treetap.nnx import get_partition_spec as get_partition_spec
from treetap.nnx import with_partitioning as with_partitioning
from treetap.nnx.annotations import Sharding as Sharding
from treetap.nnx.deprecations import deprecated as deprecated

A = TypeVar("A")


def get_var_pspec(v: Variable[Any]) -> PartitionSpec | None:
    """The PartitionSpec of a Variable."""
    return get_partition_spec(v).get_raw_value()


def add_axis(tree: A, index: int, transform_metadata: Mapping[str, Any]) -> A:
    """Puts the name of an axis into the metadata of every Variable, in place.

    Args:
        tree: Any tree of Variables.
        index: The axis.
        transform_metadata: The names, as for the mapping transforms.
    """
    names = names_of(transform_metadata)
    for variable in variables_below(tree):
        put_name(variable, index, names)
    return tree


def remove_axis(tree: A, index: int, transform_metadata: Mapping[str, Any]) -> A:
    """The inverse of `add_axis`; a name that is not there is an error.

    Args:
        tree: Any tree of Variables.
        index: The axis.
        transform_metadata: The names, as for the mapping transforms.
    """
    names = names_of(transform_metadata)
    found = [(v, names_without(v, index, names)) for v in variables_below(tree)]
    for variable, held in found:
        take_name(variable, index, names, held)
    return tree
