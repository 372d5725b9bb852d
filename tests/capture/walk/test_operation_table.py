# SPDX-License-Identifier: Apache-2.0
"""The table of operations: complete in itself, and the only place that knows them."""

import ast
import pathlib

import jax
import jax.numpy as jnp
import pytest

import treetap
from treetap._capture.walk.operations import OPERATIONS, operation_of, stacked_by

SOURCE = pathlib.Path(treetap.__file__).parent
# Here the same words are the names of transforms, or options of the command line.
OTHERS = ("_transforms", "nnx", "_cli", "_core", "_modules", "_nn", "_train")
NAMES = {*OPERATIONS} - {"call"}  # a word that has other meanings
READERS = [
    path
    for path in sorted(SOURCE.rglob("*.py"))
    if path.relative_to(SOURCE).parts[0] not in OTHERS
    and path.name not in {"operations.py", "jax_compat.py"}
]


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=lambda one: one.name)
def test_an_entry_says_one_thing_of_what_comes_out(operation):
    assert operation.flag in {"", "taken", "count"}
    assert not (operation.flag and operation.turns)


def test_an_operation_that_is_not_in_the_table_has_no_bodies():
    (eqn,) = jax.make_jaxpr(lambda x: jax.pure_callback(jnp.sin, x, x))(1.0).eqns
    assert [*operation_of(eqn.primitive, eqn.params).bodies(eqn.params)] == []


def test_only_scans_and_shards_put_an_axis_in_front():
    assert stacked_by([*OPERATIONS, "of another version"]) == ["scan", "shard_map"]


def test_nobody_else_knows_an_operation_by_name():
    found = [
        f"{path.relative_to(SOURCE)}:{node.lineno} {node.value}"
        for path in READERS
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value in NAMES
    ]
    assert found == []
