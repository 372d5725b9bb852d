# SPDX-License-Identifier: Apache-2.0
"""view, with_attributes and view_info."""

import jax.numpy as jnp
import pytest

import treetap as tt


class Norm(tt.Module):
    def __init__(self):
        self.scale = tt.Param(jnp.ones(2))
        self.frozen = False

    def set_view(self, frozen: bool | None = None):
        """Sets the mode.

        Args:
          frozen: whether statistics stay
            as they are.
        """
        if frozen is not None:
            self.frozen = frozen


class Drop(tt.Module):
    def __init__(self):
        self.quiet = False
        self.table = jnp.zeros(3)

    def set_view(self, quiet=None, level: int = 3, **rest):
        self.quiet = quiet if quiet is not None else self.quiet
        return rest


class Net(tt.Module):
    def __init__(self):
        self.norm = Norm()
        self.drops = tt.List([Drop(), Drop()])


def test_a_view_shares_variables_and_arrays_but_not_objects():
    net = Net()
    copied = tt.view(net)
    assert copied is not net
    assert copied.norm is not net.norm
    assert copied.norm.scale is net.norm.scale
    assert copied.drops[0].table is net.drops[0].table
    net.norm.scale[...] = 5.0
    assert copied.norm.scale[0] == 5.0


def test_a_view_sets_modes_on_the_copy_only():
    net = Net()
    copied = tt.view(net, frozen=True, quiet=True)
    assert copied.norm.frozen
    assert [drop.quiet for drop in copied.drops] == [True, True]
    assert not net.norm.frozen
    assert not net.drops[0].quiet


def test_a_view_takes_a_filter():
    copied = tt.view(Net(), only=tt.PathContains(1), quiet=True)
    assert [drop.quiet for drop in copied.drops] == [False, True]


def test_unused_keys_are_named():
    with pytest.raises(
        tt.StructureError, match=r"Unused keys found in nnx.view: \['x'\]"
    ):
        tt.view(Net(), frozen=True, x=1)
    assert tt.view(Net(), raise_if_not_found=False, x=1)


def test_a_catch_all_uses_what_it_does_not_return():
    class Takes(tt.Module):
        def set_view(self, **kwargs):
            return {key: kwargs[key] for key in kwargs if key != "mine"}

    class Silent(tt.Module):
        def set_view(self, named=None, **kwargs):
            pass

    tt.view(Takes(), mine=1)
    tt.view(Silent(), named=1)
    for module in (Takes(), Silent()):
        with pytest.raises(tt.StructureError, match=r"\['other'\]"):
            tt.view(module, other=1)


def test_views_of_shared_modules():
    net = Net()
    net.again = net.norm
    with pytest.raises(tt.AliasError, match="view: Duplicate"):
        tt.view(net)
    copied = tt.view(net, frozen=True, graph=True)
    assert copied.again is copied.norm
    assert copied.again.frozen


def test_leafless_modules_stay_shared_in_a_view():
    class Act(tt.Module):
        def __init__(self):
            self.on = False

    act = Act()
    copied = tt.with_attributes(tt.List([act, act]), on=True)
    assert copied[0] is copied[1]
    assert copied[0].on
    assert not act.on


def test_with_attributes_sets_on_a_copy():
    net = Net()
    copied = tt.with_attributes(net, quiet=True, frozen=True)
    assert copied.norm.frozen
    assert not net.norm.frozen
    assert copied.norm.scale is net.norm.scale
    message = r"with_attributes: Could not find .*: \['unknown'\]"
    with pytest.raises(tt.StructureError, match=message):
        tt.with_attributes(net, unknown=1)
    only = tt.with_attributes(net, only=Norm, frozen=True)
    assert only.norm.frozen
    tt.with_attributes(net, unknown=1, raise_if_not_found=False)


def test_cyclic_graphs_are_refused_in_tree_mode():
    net = Net()
    net.me = net
    for function in (tt.view, tt.with_attributes):
        with pytest.raises(tt.CycleError, match="Cycle detected"):
            function(net)
    assert tt.view(net, graph=True).me.norm.scale is net.norm.scale


def test_view_info_lists_each_class_once():
    assert tt.view_info(Net()) == "\n".join(
        [
            "Drop:",
            "  set_view(self, quiet=None, level: int = 3, **rest)",
            "Norm:",
            "  frozen: bool | None = None",
            "    whether statistics stay",
            "    as they are.",
        ]
    )
    assert tt.view_info(Net(), only=Norm).startswith("Norm:")
    assert tt.view_info(tt.Dict()) == ""


def test_view_works_on_pytrees_that_are_no_modules():
    class Stream(tt.Pytree):
        def __init__(self):
            self.on = False

        def set_view(self, on=None):
            self.on = on

    assert tt.view(tt.Dict(s=Stream()), on=True).s.on


def test_streams_inside_are_neither_drawn_from_nor_in_the_way():
    model = tt.Dict(rngs=tt.Rngs(0))
    tt.view(model)
    assert model.rngs.default.count[...] == 0
    assert tt.view_info(model) == ""
