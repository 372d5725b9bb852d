# SPDX-License-Identifier: Apache-2.0
"""Static values: equal if and only if they are the same; changes in place are seen."""

import collections
import copy
import dataclasses
import enum
import functools
import itertools
import math
import pickle
import threading
import types
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treetap as tt
from treetap._core import static_values
from treetap._core.static_values import FunctionHolder, Snapshot, Statics, exact


@dataclasses.dataclass
class Config:
    rate: typing.Any = 0.1
    sizes: list = dataclasses.field(default_factory=lambda: [1, 2])


@dataclasses.dataclass(frozen=True)
class Frozen:
    rate: typing.Any = 0.1
    inner: typing.Any = None


@dataclasses.dataclass(slots=True)
class Slotted:
    rate: typing.Any = 0.1


class HalfEmpty:
    __slots__ = ("a", "b")

    def __init__(self):
        self.a = None


class Pair(typing.NamedTuple):
    first: typing.Any
    second: typing.Any = None


class Plain:
    def __init__(self, **attributes):
        vars(self).update(attributes)


class Other(Plain):
    pass


class Mode(enum.Enum):
    FAST = 1
    SLOW = 2


class Level(enum.IntEnum):
    LOW = 1


class Size(enum.IntEnum):
    SMALL = 1


class Text(enum.StrEnum):
    FLOAT = "float32"


class SaysItself:
    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, SaysItself) and self.value == other.value

    def __hash__(self):
        return hash(self.value)


class Lazy:
    def __init__(self):
        self.n = 3

    @functools.cached_property
    def square(self):
        return self.n**2


MAKERS = {
    "number": lambda x: x,
    "tuple": lambda x: (1, (x,)),
    "named tuple": lambda x: Pair(x),
    "list": lambda x: [x],
    "dict": lambda x: {"a": {"b": x}},
    "key": lambda x: {x: 1},
    "set": lambda x: {x},
    "frozenset": lambda x: frozenset({(x,)}),
    "dataclass": lambda x: Config(x),
    "frozen": lambda x: Frozen(x),
    "frozen with a list": lambda x: Frozen(1, [x]),
    "slots": lambda x: Slotted(x),
    "object": lambda x: Plain(a=[Plain(b=x)]),
    "namespace": lambda x: types.SimpleNamespace(a=x),
    "deque": lambda x: collections.deque([x]),
    "ordered": lambda x: collections.OrderedDict(a=x),
    "proxy": lambda x: types.MappingProxyType({"a": x}),
    "partial": lambda x: functools.partial(math.pow, x),
    "slice": lambda x: slice(x, None),
    "objects in an array": lambda x: np.array([x, None], object),
    "dict of a class": lambda x: collections.defaultdict(list, a=x),
    "list with attributes": lambda x: _noted(Named([1]), x),
}


class Named(list):
    note: object = None


def _noted(value, x):
    value.note = x
    return value


def same(one, two):
    first, second = Statics((one,)), Statics((two,))
    assert (first == second) is (second == first) is not (first != second)
    if first == second:
        assert hash(first) == hash(second)
    (a, kinds), (b, other_kinds) = exact((one,)), exact((two,))
    assert ((a, kinds) == (b, other_kinds)) is (first == second)
    return first == second


# Equal across types, as Python sees them.
NAMES = ("float32", Text.FLOAT, np.dtype("float32"), np.float32, jnp.float32)
LEVELS = (1, Level.LOW, Size.SMALL)


@pytest.mark.parametrize("name", MAKERS)
def test_names_that_are_equal_are_not_the_same_at_any_depth(name):
    make = MAKERS[name]
    for values in (NAMES, LEVELS):
        for one, two in itertools.product(values, values):
            assert same(make(one), make(two)) is (one is two), (one, two)


NUMBERS = (1, True, 1.0, 1 + 0j, np.int32(1), np.float32(1), 0.0, -0.0, 0, None, "1")


@pytest.mark.parametrize("name", MAKERS)
def test_numbers_that_are_equal_are_not_the_same_at_any_depth(name):
    make = MAKERS[name]
    for one, two in itertools.product(NUMBERS, NUMBERS):
        if name == "objects in an array" and isinstance(one, np.generic):
            continue  # numpy itself makes plain numbers of these
        assert same(make(one), make(two)) is (one is two), (one, two)


def test_copies_are_the_same():
    for name, make in MAKERS.items():
        value = make(0.5)
        if name != "proxy":  # Python cannot copy it
            assert same(value, copy.deepcopy(value)), name
    assert same(math.nan, float("nan"))
    assert same(np.ones(3), np.ones(3))
    assert same(bytearray(b"a"), bytearray(b"a"))
    assert same(Mode.FAST, Mode.FAST)
    assert same(SaysItself(2), SaysItself(2))
    assert same(jax.P("a", None), jax.P("a", None))


MASKED = np.ma.array([1.0, 2.0], mask=[0, 1], fill_value=2.0)


def test_other_values_are_not_the_same():
    pairs = [
        ((1,), [1]),
        (complex(1, 0.0), complex(1, -0.0)),
        (collections.deque([1]), collections.deque([1], maxlen=2)),
        (MASKED, np.ma.array(MASKED.data, mask=[0, 0], fill_value=2.0)),
        (Pair(1), (1, None)),
        (Plain(a=1), Other(a=1)),
        (Plain(a=1), Plain(b=1)),
        (Config(), Plain(rate=0.1, sizes=[1, 2])),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),  # a function may loop over it
        (np.ones(3), np.ones(3, np.float32)),
        (np.ones(3), np.ones((3, 1))),
        (np.float32(1), np.float64(1)),
        (np.array(0.0), np.array(-0.0)),
        (bytearray(b"a"), b"a"),
        (Mode.FAST, Mode.SLOW),
        (SaysItself(1), SaysItself(2)),
        ([[1], 2], [[1, 2]]),
        (lambda: 1, lambda: 1),
    ]
    for one, two in pairs:
        assert not same(one, two), (one, two)


def test_what_has_no_value_to_compare_counts_by_identity():
    makers = [object, threading.Lock, lambda: jnp.ones(2), lambda: tt.Param(1.0)]
    makers += [lambda: iter([1]), lambda: types.ModuleType("a")]
    for make in makers:
        one, two = make(), make()
        assert same([one], [one])
        assert not same([one], [two])
    # A class of Python whose base has state that no attribute shows.
    hidden = type("Hidden", (itertools.count,), {})
    assert same(value := hidden(3), value)
    assert not same(hidden(3), hidden(4))


def test_a_value_with_very_many_parts_counts_by_identity(monkeypatch):
    monkeypatch.setattr(static_values, "MAX_PARTS", 10)
    assert same([1] * 9, [1] * 9)
    large = [[n] for n in range(20)]
    assert same(large, large)
    assert not same(large, copy.deepcopy(large))


def test_values_that_contain_themselves():
    one, two = [1], [1]
    one.append(one)
    two.append(two)
    assert same(one, two)
    two.append(3)
    assert not same(one, two)


def test_depth_is_no_limit():
    one, two = (), ()
    for _ in range(5_000):
        one, two = (one,), (two,)
    assert same(one, two)
    assert not same(one, (two,))


CHANGES = {
    "list": ([1], lambda x: x.append(1)),
    "list item": ([1], lambda x: x.__setitem__(0, True)),
    "inner list": ([[1]], lambda x: x[0].append(2)),
    "dict": ({"a": 1}, lambda x: x.update(a=1.0)),
    "renamed key": ({"a": 1}, lambda x: x.update(b=x.pop("a"))),
    "set": ({1}, lambda x: x.add(2)),
    "deque": (collections.deque([1]), lambda x: x.append(2)),
    "dataclass": (Config(), lambda x: setattr(x, "rate", 0.2)),
    "slot that had no value": (HalfEmpty(), lambda x: setattr(x, "b", 1)),
    "slot that had None": (HalfEmpty(), lambda x: delattr(x, "a")),
    "in a dataclass": (Config(), lambda x: x.sizes.append(2)),
    "new attribute": (Config(), lambda x: setattr(x, "more", 1)),
    "frozen": (Frozen(), lambda x: object.__setattr__(x, "rate", 2)),
    "in a tuple of a frozen": (Frozen(1, ([1],)), lambda x: x.inner[0].append(1)),
    "slots": (Slotted(), lambda x: setattr(x, "rate", 1)),
    "object": (Plain(a=1), lambda x: setattr(x, "a", True)),
    "vars": (Plain(a=1), lambda x: setattr(x, "__dict__", {"a": 2})),
    "class": (Plain(a=1), lambda x: setattr(x, "__class__", Other)),
    "deleted": (Plain(a=1), lambda x: delattr(x, "a")),
    "numpy": (np.zeros(3), lambda x: x.__setitem__(1, -0.0)),
    "bytearray": (bytearray(b"a"), lambda x: x.append(1)),
    "objects in an array": (np.array([[1]], object), lambda x: x.fill(2)),
    "the object in an array": (np.array([1], object), lambda x: x.__setitem__(0, 2)),
    "mask of an array": (
        np.ma.array([1.0, 2.0], mask=[0, 1]),
        lambda x: x.mask.fill(0),
    ),
    "partial attribute": (functools.partial(len), lambda x: setattr(x, "a", 2)),
    "partial": (functools.partial(len, a=1), lambda x: x.keywords.update(a=2)),
    "inside a frozenset": (Frozen(frozenset({1}), [1]), lambda x: x.inner.clear()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_in_place_is_seen_and_the_value_is_known_as_it_was(name):
    value, change = CHANGES[name]
    value = copy.deepcopy(value)
    held = Statics((value,))
    before = copy.deepcopy(value)
    assert held.can_change
    assert held.snapshot.watch.holds()
    assert held.as_described()[0] is value
    change(value)
    assert not held.snapshot.watch.holds()
    assert held == Statics((before,))
    assert held != Statics((value,))
    assert same(held.as_described()[0], before)
    assert held.as_described()[0] is not held.as_described()[0]


def test_what_cannot_change_is_not_watched():
    values = [1, "a", (1, ("b",)), frozenset({1}), Pair(1), Mode.FAST, len, Plain, None]
    values += [jnp.float32, np.dtype(int), np.float32(1), object(), jnp.ones(2)]
    for value in [*values, tuple(values), SaysItself(3), jax.P("a")]:
        assert not Statics((value,)).can_change, value


def test_a_cached_property_is_no_change():
    value = Lazy()
    held = Statics((value,))
    assert value.square == 9
    assert held == Statics((value,)) == Statics((Lazy(),))


def test_what_cannot_be_copied_is_refused_when_its_past_is_asked_for():
    class Stubborn(Plain):
        def __deepcopy__(self, memo):
            raise TypeError("not this one")

    value = Stubborn(a=1)
    held = Statics((value,))
    assert held.as_described()[0] is value
    value.a = 2
    with pytest.raises(tt.StructureError, match=r"changed in place.*not this one"):
        held.as_described()


def test_functions_in_a_holder_are_opened():
    class Holder(FunctionHolder):
        __slots__ = ()

        def __init__(self, value):
            self.value = value

    def make(rate):
        return lambda: rate

    assert Snapshot(Holder(make(1))).key == Snapshot(Holder(make(1))).key
    assert Snapshot(Holder(make(1))).key != Snapshot(Holder(make(True))).key
    assert Snapshot(make(1)).key != Snapshot(make(1)).key
    assert not Snapshot(Holder(make(1))).watch
    schedule = [1]
    snapshot = Snapshot(Holder(make(schedule)))
    schedule.append(2)
    assert not snapshot.watch.holds()
    rate = 1
    snapshot = Snapshot(Holder(lambda: rate))
    assert snapshot.watch.holds()
    rate = 2  # the cell of the closure is still in use here
    assert not snapshot.watch.holds()
    with pytest.raises(tt.StructureError, match="cannot be copied"):
        snapshot.as_it_was()

    def counter():
        count = 0

        def step():
            nonlocal count
            count += 1
            return count

        return step

    step = counter()
    snapshot = Snapshot(Holder(step))
    step()
    assert not snapshot.watch.holds()


def test_statics_are_pickled_by_their_values():
    held = Statics(([1], {"a": 0.0}))
    again = pickle.loads(pickle.dumps(held))
    assert again == held
    assert tuple(again) == tuple(held)
    assert held != ([1], {"a": 0.0}) != held  # a tuple that is not described
