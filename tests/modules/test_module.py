# SPDX-License-Identifier: Apache-2.0
"""The surface of Modules: setting attributes, iteration."""

from contextlib import nullcontext

import jax.numpy as jnp
import pytest

import treetap as tt
from stand_ins import Model, Noise, modes_of
from treetap import nnx


class Dropout(tt.Module):
    def __init__(self, rate=0.5):
        self.rate = rate
        self.deterministic = False


class Norm(tt.Module):
    def __init__(self):
        self.use_running_average = False
        self.mean = tt.BatchStat(jnp.zeros(2))


class Block(tt.Module):
    def __init__(self):
        self.norm = Norm()
        self.drop = Dropout()
        self.sub = tt.Dict(two=Dropout(), one=Norm())
        self.items = tt.data([Dropout(), {"k": Norm()}])


def modes(block):
    return [
        getattr(module, "deterministic", getattr(module, "use_running_average", None))
        for _, module in tt.iter_modules(block)
        if not isinstance(module, Block | tt.Dict)
    ]


def test_iter_modules_visits_children_before_parents():
    paths = [path for path, _ in tt.iter_modules(Block())]
    assert paths == [
        ("drop",),
        ("items", 0),
        ("items", 1, "k"),
        ("norm",),
        ("sub", "one"),
        ("sub", "two"),
        ("sub",),
        (),
    ]


def test_iter_modules_takes_any_tree():
    pairs = list(tt.iter_modules([Dropout(), {"a": (Norm(),)}]))
    assert [path for path, _ in pairs] == [(0,), (1, "a", 0)]
    assert list(tt.iter_modules(tt.Param(1.0))) == []


def test_iter_modules_and_sharing():
    block = Block()
    block.again = block.norm
    with pytest.raises(
        tt.AliasError, match=r"iter_modules: .*again/mean and norm/mean"
    ):
        tt.iter_modules(block)
    paths = [path for path, _ in tt.iter_modules(block, graph=True)]
    assert ("again",) in paths
    assert ("norm",) not in paths


def test_leafless_modules_may_stand_at_several_places():
    drop = Dropout()
    pairs = list(tt.iter_modules(tt.List([drop, drop])))
    assert [path for path, _ in pairs] == [(0,), (1,), ()]


def test_train_and_eval_set_both_modes_everywhere():
    block = Block()
    block.eval()
    assert modes(block) == [True] * 6
    block.train()
    assert modes(block) == [False] * 6
    assert block.eval(rate=0.1) is None
    assert block.sub.two.rate == 0.1


def test_train_reaches_shared_and_cyclic_modules():
    block = Block()
    block.again = block.norm
    block.me = block
    block.eval()
    assert block.again.use_running_average


def test_set_attributes_takes_filters():
    block = Block()
    block.set_attributes(tt.PathContains("sub"), deterministic=True)
    assert block.sub.two.deterministic
    assert not block.drop.deterministic
    block.set_attributes(Dropout, lambda path, value: False, rate=0.9)
    assert block.drop.rate == 0.9


def test_set_attributes_names_what_it_did_not_find():
    block = Block()
    message = r"following attributes: \['other', 'unknown'\]"
    with pytest.raises(tt.StructureError, match=message):
        block.set_attributes(unknown=1, other=2, deterministic=True)
    assert not block.drop.deterministic
    block.set_attributes(raise_if_not_found=False, unknown=1)
    with pytest.raises(tt.StructureError):
        block.set_attributes(Norm, rate=0.1)


def test_set_attributes_follows_attribute_rules_before_it_changes_anything():
    block = Block()
    with pytest.raises(tt.AttributeStatusError, match=r"Dropout\.rate: cannot assign"):
        block.set_attributes(deterministic=True, rate=jnp.ones(2))
    assert modes(block) == [False] * 6


@pytest.mark.parametrize("how", ["argument", "setting"])
def test_tree_mode_that_is_asked_for_refuses_what_is_no_tree(how):
    shared = Block()
    shared.again = shared.sub
    hidden = tt.Dict(inside=nnx.Object())
    by = {"graph": False} if how == "argument" else {}
    setting = tt.set_graph_mode(False) if how == "setting" else nullcontext()
    with setting:
        with pytest.raises(tt.AliasError, match="set_attributes: Duplicate"):
            shared.set_attributes(deterministic=True, **by)
        with pytest.raises(tt.StructureError, match="pytree=False"):
            hidden.set_attributes(deterministic=True, **by)
        with pytest.raises(tt.StructureError, match="iter_children: Object is"):
            tt.iter_children(hidden.inside, **by)
    assert not shared.drop.deterministic
    shared.set_attributes(deterministic=True)
    assert shared.drop.deterministic
    assert list(nnx.iter_children(hidden.inside)) == []


def test_iter_children_yields_modules_only():
    class Holder(tt.Module):
        def __init__(self):
            self.block = Dropout()
            self.rngs = tt.Rngs(0)
            self.w = tt.Param(1.0)
            self.items = tt.data([Dropout()])

    assert [key for key, _ in tt.iter_children(Holder())] == ["block"]
    assert [key for key, _ in tt.iter_children(tt.List([Dropout()]))] == [0]
    with pytest.raises(tt.StructureError, match="iter_children: expected a Module"):
        tt.iter_children([Dropout()])


@pytest.mark.parametrize(
    "function", [tt.iter_children, nnx.iter_children, nnx.iter_module_children]
)
def test_only_modules_are_module_children(function):
    noise = Noise(tt.Rngs(0))
    assert isinstance(noise.rngs, tt.RngStream)
    assert list(function(noise)) == []
    model = Model()
    assert [key for key, _ in function(model)] == ["noise", "norm"]
    assert dict(function(model))["norm"] is model.norm


@pytest.mark.parametrize(("name", "value"), [("train", False), ("eval", True)])
def test_in_train_and_eval_the_value_given_wins(name, value):
    model = Model()
    getattr(model, name)(deterministic=not value)
    assert modes_of(model)[:2] == (not value, value)
    getattr(model, name)()
    getattr(model, name)(rate=0.1, unknown=1)
    assert modes_of(model) == (value, value, 0.1)
