# SPDX-License-Identifier: Apache-2.0
"""Nested mappings as flat ones and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import treetap as tt
from treetap.nnx import traversals

keys = st.text("abc", min_size=1, max_size=2)
nested = st.recursive(
    st.integers(), lambda inner: st.dictionaries(keys, inner, min_size=1), max_leaves=6
).filter(lambda made: isinstance(made, dict))


@given(nested)
def test_unflatten_inverts_flatten(xs):
    assert traversals.unflatten_mapping(traversals.flatten_mapping(xs)) == xs
    joined = traversals.flatten_mapping(xs, sep="/")
    assert traversals.unflatten_mapping(joined, sep="/") == xs
    assert dict(traversals.flatten_to_sequence(xs)) == traversals.flatten_mapping(xs)


def test_empty_mappings_are_dropped_unless_kept():
    xs = {"a": {}, "b": {"c": 1}}
    assert traversals.flatten_mapping(xs) == {("b", "c"): 1}
    kept = traversals.flatten_mapping(xs, keep_empty_nodes=True)
    assert repr(kept[("a",)]) == "empty_node"
    assert traversals.unflatten_mapping(kept) == xs
    assert traversals.flatten_to_sequence(xs) == [(("b", "c"), 1)]


def test_leaves_can_be_chosen():
    xs = {"a": {"b": {"c": 1}}}
    flat = traversals.flatten_mapping(xs, is_leaf=lambda path, value: len(path) == 2)
    assert flat == {("a", "b"): {"c": 1}}


def test_what_is_no_mapping_is_refused():
    with pytest.raises(
        TypeError, match="flatten_mapping: expected a mapping, got list"
    ):
        traversals.flatten_mapping([])
    with pytest.raises(
        TypeError, match="unflatten_mapping: expected a mapping, got int"
    ):
        traversals.unflatten_mapping(3)


@pytest.mark.parametrize(
    ("flat", "text"),
    [
        ({("a",): 1, ("a", "b"): 2}, "a is a value and also the start of a/b"),
        ({("a", "b"): 2, ("a",): 1}, "a is a value and also the start of other paths"),
        ({(): 1}, "cannot hold a value at its root"),
    ],
)
def test_paths_through_a_value_are_refused_in_any_order(flat, text):
    with pytest.raises(tt.StructureError, match=text):
        traversals.unflatten_mapping(flat)
