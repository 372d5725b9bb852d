# SPDX-License-Identifier: Apache-2.0
"""Functions that are equal when they do the same, and only then."""

import copy
import dataclasses
import functools
import math
import pickle
import threading

import cloudpickle
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treetap as tt
from treetap._train.comparable_functions import EqualFunctions


def same(one, two):
    first, second = EqualFunctions(one), EqualFunctions(two)
    assert (first == second) is (second == first)
    if first == second:
        assert hash(first) == hash(second)
    return first == second


def holding(value):
    return lambda: value


@pytest.mark.parametrize(
    "value",
    [
        1,
        1.5,
        True,
        None,
        "a",
        b"a",
        2j,
        ...,
        math.nan,
        complex(math.nan, 0.0),
        (1, (2, "b")),
        [1, [2]],
        {"a": [1]},
        frozenset({"a", ("b", 1)}),
        np.float32(0.5),
        np.int8(3),
        np.dtype("int8"),
        jnp.float32,
        tt.Param,
        tt.Not(tt.Param),
        tt.PathContains("head"),
        tt.PathIn(("a", 0), ("b",)),
        tt.State({"a": {"b": True}}),
        optax.EmptyState(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_equal_contents(value):
    assert same(holding(value), holding(copy.deepcopy(value)))


DIFFERENT = [
    (1, True),
    (1, 1.0),
    (1.0, 1 + 0j),
    (0.0, -0.0),
    (0, None),
    (math.nan, 0.0),
    ("a", b"a"),
    ((1,), [1]),
    ((1,), (1, 2)),
    ((1, 2), (2, 1)),
    ([1], [1.0]),
    ({"a": 1}, {"b": 1}),
    ({"a": 1}, {"a": True}),
    ({"a": 1}, {}),
    (np.float32(1), np.float64(1)),
    (np.float32(1), 1.0),
    (np.int8(1), np.int8(2)),
    (tt.Param, tt.BatchStat),
    (tt.Not(tt.Param), tt.Not(tt.BatchStat)),
    (tt.Any(tt.Param), tt.All(tt.Param)),
    (tt.State({"a": 1}), {"a": 1}),
    (frozenset({1}), frozenset({2})),
    (frozenset({1}), frozenset({1.0})),
    (optax.EmptyState(), ()),
    (np.dtype("int8"), np.dtype("int16")),
]


@pytest.mark.parametrize(("one", "two"), DIFFERENT, ids=repr)
def test_different_contents(one, two):
    assert not same(holding(one), holding(two))


def test_the_order_of_a_dict_counts():
    assert not same({"a": 1, "b": 2}, {"b": 2, "a": 1})  # a chain by name has one


def test_what_has_no_value_to_compare_counts_by_identity():
    for value in (jnp.ones(3), object(), threading.Lock()):
        assert same(holding(value), holding(value))
    assert not same(holding(jnp.ones(3)), holding(jnp.ones(3)))
    assert not same(holding(object()), holding(object()))
    ours = EqualFunctions(jnp.ones(3))
    assert ours != 1
    assert {ours: 1}[ours] == 1


def test_code_defaults_and_globals_count():
    def make(default, *, keyword):
        def fn(x=default, *, y=keyword):
            return x, y

        return fn

    assert same(make(1, keyword=2), make(1, keyword=2))
    assert not same(make(1, keyword=2), make(1.0, keyword=2))
    assert not same(make(1, keyword=2), make(1, keyword=3))
    assert not same(lambda x: x + 1, lambda x: x + 2)
    text = "lambda x: scale * x"
    first, second = {"scale": 1}, {"scale": 1}
    code = compile(text, "here", "eval")
    assert same(eval(code, first), eval(code, first))
    assert not same(eval(code, first), eval(code, second))


def test_partials_and_bound_methods():
    part = functools.partial
    assert same(part(holding, 1), part(holding, 1))
    assert same(part(math.pow, y=[1]), part(math.pow, y=[1]))
    assert not same(part(holding, 1), part(holding, True))
    assert not same(part(math.pow, 1), part(math.sqrt, 1))
    assert not same(part(dict, a=1), part(dict, b=1))
    one, two = [1], [1]
    assert same(part(part(holding), one), part(part(holding), two))

    class Rule:
        def __init__(self, rate=1):
            self.rate = rate

        def step(self):
            return 1

        def other(self):
            return 1

    rule = Rule()
    assert same(rule.step, rule.step)
    assert not same(rule.step, rule.other)
    assert same(rule.step, Rule().step)
    assert not same(rule.step, Rule(2).step)


def test_dataclasses_compare_by_field():
    @dataclasses.dataclass(frozen=True)
    class Schedule:
        rate: float
        rule: object

    @dataclasses.dataclass
    class Mutable:
        rate: float

    assert same(Schedule(1.0, holding(2)), Schedule(1.0, holding(2)))
    assert not same(Schedule(1.0, holding(2)), Schedule(1.0, holding(3)))
    assert same(Mutable(1.0), Mutable(1.0))
    assert not same(Mutable(1.0), Mutable(2.0))
    assert not same(Mutable(1.0), Schedule(1.0, None))


def test_cycles_end():
    def recursive(step):
        def fn(n):
            return fn(n - step) if n else 0

        return fn

    assert same(recursive(1), recursive(1))
    assert not same(recursive(1), recursive(2))
    one, two = [1], [1]
    one.append(one)
    two.append(two)
    assert same(one, two)
    two.append(3)
    assert not same(one, two)


def test_a_variable_without_a_value_yet():
    def make(is_set):
        def fn():
            return value

        if is_set:
            value = 1
        return fn

    assert same(make(False), make(False))
    assert not same(make(False), make(True))


def test_deep_contents_do_not_overflow_the_stack():
    one, two = (), ()
    for _ in range(5_000):
        one, two = (one,), (two,)
    assert EqualFunctions(holding(one)) == EqualFunctions(holding(two))


def test_changed_contents_compare_as_what_they_are_now():
    schedule, other = [1, 2], [1, 2]
    first, second = EqualFunctions(holding(schedule)), EqualFunctions(holding(other))
    before = hash(first)
    assert first == second
    schedule.append(3)
    assert first != second
    assert hash(first) == before
    other.append(3)
    assert first == second


TRANSFORMATIONS = {
    "adam": lambda: optax.adam(1e-3),
    "adamw": lambda: optax.adamw(1e-3, weight_decay=0.1),
    "schedule": lambda: optax.adam(
        optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)
    ),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-3)),
    "masked": lambda: optax.masked(optax.sgd(0.1), tt.State({"w": True})),
    "partition": lambda: optax.partition(
        {"a": optax.adam(0.1), "b": optax.set_to_zero()}, {"w": "a"}
    ),
    "inject": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "injected schedule": lambda: optax.inject_hyperparams(optax.sgd)(
        learning_rate=optax.linear_schedule(0.0, 1.0, 3)
    ),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "lbfgs": lambda: optax.lbfgs(),
    "schedule free": lambda: optax.contrib.schedule_free_adamw(1e-3),
    "muon": lambda: optax.contrib.muon(1e-3),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformations_made_alike_are_equal_and_others_are_not(name):
    make = TRANSFORMATIONS[name]
    assert same(make(), make())
    for other, make_other in TRANSFORMATIONS.items():
        assert same(make(), make_other()) is (other == name)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (optax.adam(1e-3), optax.adam(1e-4)),
        (optax.adam(1e-3), optax.adam(1e-3, nesterov=True)),
        (optax.sgd(0.1, momentum=0.0), optax.sgd(0.1, momentum=None)),
        (optax.MultiSteps(optax.sgd(0.1), 2), optax.MultiSteps(optax.sgd(0.1), 3)),
        (
            optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
            optax.inject_hyperparams(optax.adam)(learning_rate=0.2),
        ),
        (
            optax.adam(optax.exponential_decay(1e-3, 10, 0.5)),
            optax.adam(optax.exponential_decay(1e-3, 20, 0.5)),
        ),
    ],
    ids=["rate", "option", "momentum", "steps", "injected", "schedule"],
)
def test_transformations_with_other_settings_differ(one, two):
    assert not same(one, two)


def test_a_wrapper_cannot_be_changed_and_copies_as_itself():
    ours = EqualFunctions((holding(1), len))
    assert copy.copy(ours) is ours
    assert copy.deepcopy(ours) is ours
    with pytest.raises(AttributeError, match="cannot be changed"):
        ours.value = 1
    assert "function" in repr(ours)


def test_a_wrapper_can_be_pickled_with_what_it_holds():
    plain = EqualFunctions((len, {"a": 1}))
    assert pickle.loads(pickle.dumps(plain)) == plain
    loaded = cloudpickle.loads(cloudpickle.dumps(EqualFunctions(optax.sgd(0.1))))
    assert loaded.value.init({"w": 1.0}) == optax.sgd(0.1).init({"w": 1.0})
