# SPDX-License-Identifier: Apache-2.0
"""Kinds of Variables, and the registry of collection names."""

import jax
import pytest

import treetap as tt
from treetap import nnx
from treetap._core.variables import kinds

NAMES = {
    "params": tt.Param,
    "batch_stats": tt.BatchStat,
    "cache": tt.Cache,
    "intermediates": tt.Intermediate,
    "perturbations": tt.Perturbation,
}


@pytest.fixture(autouse=True)
def registry_restored():
    """No test leaves a name behind."""
    before = dict(kinds._by_name)
    yield
    kinds._by_name.clear()
    kinds._by_name.update(before)


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (tt.Param, tt.Variable),
        (tt.BatchStat, tt.Variable),
        (tt.Cache, tt.Variable),
        (tt.Intermediate, tt.Variable),
        (tt.Perturbation, tt.Intermediate),
        (tt.RngState, tt.Variable),
        (tt.RngKey, tt.RngState),
        (tt.RngCount, tt.RngState),
    ],
)
def test_a_kind_derives_from_its_base_and_is_a_tree_of_its_own(kind, base):
    assert kind.__bases__[0] is base
    mapped = jax.tree.map(lambda x: x + 1, kind(1))
    assert type(mapped) is kind
    assert jax.tree.structure(kind(1)) != jax.tree.structure(base(1))


@pytest.mark.parametrize("name", NAMES)
def test_the_registry_maps_names_to_kinds_and_back(name):
    assert kinds.kind_of_name(name) is NAMES[name]
    assert kinds.name_of_kind(NAMES[name]) == name


def test_an_unknown_name_is_refused():
    with pytest.raises(
        tt.MetadataError,
        match=r"registered as 'odd'; known are .*'params'.*`register_variable_name`",
    ):
        kinds.kind_of_name("odd")


def test_an_unknown_name_can_make_a_kind():
    kind = kinds.kind_of_name("odd", base=tt.Param, allow_register=True)
    assert kind.__name__ == "odd"
    assert issubclass(kind, tt.Param)
    assert kind(1.0)[...] == 1
    assert kinds.kind_of_name("odd") is kind


def test_an_unregistered_kind_is_refused():
    class Odd(tt.Variable):
        pass

    with pytest.raises(
        tt.MetadataError, match=r"kind Odd is not .* `register_variable_name`"
    ):
        kinds.name_of_kind(Odd)


def test_an_unregistered_kind_can_be_registered_under_its_own_name():
    class Odd(tt.Variable):
        pass

    assert kinds.name_of_kind(Odd, allow_register=True) == "Odd"
    assert kinds.kind_of_name("Odd") is Odd


def test_a_taken_name_needs_overwrite():
    class Odd(tt.Variable):
        pass

    with pytest.raises(
        tt.MetadataError, match=r"'params' is taken by Param\. .*`overwrite=True`"
    ):
        kinds.register_kind("params", Odd)
    assert kinds.kind_of_name("params") is tt.Param
    kinds.register_kind("params", Odd, overwrite=True)
    assert kinds.kind_of_name("params") is Odd


def test_registering_can_be_a_decorator():
    @kinds.register_kind("odds")
    class Odd(tt.Variable):
        pass

    assert kinds.kind_of_name("odds") is Odd


def test_the_public_names_say_nothing():
    class Odd(tt.Variable):
        pass

    assert nnx.variable_type_from_name("params") is tt.Param
    assert nnx.variable_name_from_type(tt.Param) == "params"
    assert nnx.register_variable_name("odds", Odd) is Odd
