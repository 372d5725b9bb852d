# SPDX-License-Identifier: Apache-2.0
"""Filters: what each literal takes, and how predicates behave as values."""

import pickle

import jax
import jax.numpy as jnp
import pytest

import treetap as tt
from treetap._core.trees.filters import (
    PathIn,
    grouped,
    predicate_of,
    predicates_of,
)

PARAM, STAT = tt.Param(jnp.ones(2)), tt.BatchStat(1.0, tag="seen")
PREDICATES = [
    tt.OfType(tt.Param),
    tt.WithTag("seen"),
    tt.PathContains("a"),
    tt.PathContains("a", exact=False),
    PathIn(("a", "b"), ("c",)),
    tt.Any(tt.Param, "seen"),
    tt.All(tt.Param, "seen"),
    tt.Not(tt.Param),
    tt.Everything(),
    tt.Nothing(),
]


def by_length(path, value):
    return len(path) > 1


@pytest.mark.parametrize(
    ("literal", "predicate"),
    [
        (tt.Param, tt.OfType(tt.Param)),
        ("seen", tt.WithTag("seen")),
        (..., tt.Everything()),
        (True, tt.Everything()),
        (None, tt.Nothing()),
        (False, tt.Nothing()),
        ([tt.Param, "seen"], tt.Any(tt.Param, "seen")),
        ((tt.Param, None), tt.Any(tt.Param, False)),
        ([], tt.Any()),
    ],
)
def test_a_literal_stands_for_a_predicate(literal, predicate):
    assert predicate_of(literal) == predicate


def test_a_function_is_its_own_predicate():
    assert predicate_of(by_length) is by_length


@pytest.mark.parametrize(
    ("predicate", "path", "value", "takes"),
    [
        (tt.OfType(tt.Param), (), PARAM, True),
        (tt.OfType(tt.Variable), (), PARAM, True),
        (tt.OfType(jax.Array), (), PARAM, False),
        (tt.OfType(jax.Array), (), jnp.ones(2), True),
        (tt.WithTag("seen"), (), STAT, True),
        (tt.WithTag("other"), (), STAT, False),
        (tt.WithTag("seen"), (), PARAM, False),
        (tt.WithTag("seen"), (), jnp.ones(2), False),
        (tt.PathContains("a"), ("b", "a"), PARAM, True),
        (tt.PathContains("a"), ("ba",), PARAM, False),
        (tt.PathContains("a", exact=False), ("ba",), PARAM, True),
        (tt.PathContains(1, exact=False), (12,), PARAM, True),
        (tt.PathContains(1), ("1",), PARAM, False),
        (PathIn(("a", "b")), ("a", "b"), PARAM, True),
        (PathIn(("a", "b")), ("a",), PARAM, False),
        (tt.Any(tt.Param, "seen"), (), STAT, True),
        (tt.Any(tt.Param, "other"), (), STAT, False),
        (tt.Any(), (), PARAM, False),
        (tt.All(tt.BatchStat, "seen"), (), STAT, True),
        (tt.All(tt.Param, "seen"), (), STAT, False),
        (tt.All(), (), PARAM, True),
        (tt.Not(tt.Param), (), PARAM, False),
        (tt.Not("other"), (), STAT, True),
        (tt.Everything(), (), None, True),
        (tt.Nothing(), (), PARAM, False),
    ],
)
def test_a_predicate_takes(predicate, path, value, takes):
    assert predicate(path, value) is takes


@pytest.mark.parametrize("place", range(len(PREDICATES)))
def test_predicates_are_values(place):
    predicate = PREDICATES[place]
    same = pickle.loads(pickle.dumps(predicate))
    assert same is not predicate
    assert same == predicate
    assert hash(same) == hash(predicate)
    assert repr(same) == repr(predicate)
    assert [p == predicate for p in PREDICATES].index(True) == place
    assert predicate != "something else"


def test_predicates_print_what_they_take():
    assert repr(tt.WithTag("a")) == "WithTag('a')"
    assert repr(tt.PathContains("a")) == "PathContains('a', exact=True)"
    assert repr(tt.Any("a", ...)) == "Any(WithTag('a'), Everything())"
    assert repr(tt.Not(None)) == "Not(Nothing())"


@pytest.mark.parametrize("invalid", [3, 1.5, {"a": 1}, {tt.Param}, b"tag", object()])
def test_other_things_are_no_filters(invalid):
    name = type(invalid).__name__
    with pytest.raises(TypeError, match=f"Invalid filter .* of type {name}. A filter"):
        predicate_of(invalid)
    with pytest.raises(TypeError, match="Invalid filter"):
        tt.Any(tt.Param, invalid)
    with pytest.raises(TypeError, match="Invalid filter"):
        tt.state({"a": tt.Param(1.0)}, invalid)


def test_not_takes_one_filter():
    with pytest.raises(TypeError):
        tt.Not(tt.Param, tt.BatchStat)


@pytest.mark.parametrize("catch_all", [..., True])
def test_a_catch_all_may_only_stand_last(catch_all):
    with pytest.raises(
        tt.FilterError,
        match=r"`\.\.\.` or `True` can only be used as the last filters: "
        rf"{catch_all} stands at position 1 of .*nothing would reach",
    ):
        predicates_of([tt.Param, catch_all, tt.BatchStat])
    assert len(predicates_of([tt.Param, catch_all, ..., True])) == 4


def test_values_go_to_the_first_filter_that_takes_them():
    flat = [(("a",), PARAM), (("b",), STAT), (("c",), 3)]
    groups = grouped(flat, [tt.Param, tt.Variable, ...])
    assert groups == [[(("a",), PARAM)], [(("b",), STAT)], [(("c",), 3)]]
    assert grouped(flat, [tt.Param, tt.Variable]) == groups[:2]


def test_a_remainder_is_named():
    assert grouped([], [tt.BatchStat], "split") == [[]]
    with pytest.raises(
        tt.FilterError,
        match=r"split: Non-exhaustive filters, got a non-empty remainder: a/0 \(Param\)"
        r"\. Add `\.\.\.` as the last filter",
    ):
        grouped([(("a", 0), PARAM)], [tt.BatchStat], "split")


def test_a_long_remainder_is_cut():
    with pytest.raises(tt.FilterError, match=r"4 \(int\) and 3 more\."):
        grouped([((i,), i) for i in range(8)], [tt.BatchStat], "split")


def test_generic_aliases_mean_their_class():
    assert predicate_of(tt.Param[int]) == tt.OfType(tt.Param)


class Free(tt.Module):
    """A Module whose attributes the tests give it."""

    def __init__(self, **attributes):
        for name, value in attributes.items():
            setattr(self, name, value)


def nested_model():
    return Free(
        a=tt.Param(jnp.ones(2)),
        b=Free(c=tt.Param(jnp.zeros(3)), d=tt.BatchStat(jnp.zeros(3))),
    )


@pytest.mark.parametrize("wrong", [3, 1.5, object(), [tt.Param, 3]])
def test_an_invalid_filter_is_a_type_error_that_lists_the_valid_ones(wrong):
    model = nested_model()
    message = "Invalid filter .* of type .*a tag .str., `...`, a bool"
    for call in (tt.split, tt.state, tt.pop, tt.filter_state, tt.split_state):
        argument = tt.state(model) if call.__name__.endswith("_state") else model
        with pytest.raises(TypeError, match=message):
            call(argument, wrong)
    assert len(jax.tree.leaves(model)) == 3
