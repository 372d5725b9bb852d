# SPDX-License-Identifier: Apache-2.0
"""view, with_attributes and view_info."""

import jax.numpy as jnp
import pytest

import treetap as tt
from stand_ins import Averaging, Model, Noise, modes_of


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
    tt.view(Silent(), named=1, other=2)
    with pytest.raises(tt.StructureError, match=r"\['other'\]"):
        tt.view(Takes(), mine=1, other=1)


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


def info(set_view):
    Described = type(tt.Module)("Described", (tt.Module,), {"set_view": set_view})
    Described.__qualname__ = "Described"
    return tt.view_info(Described())


def test_an_undocumented_parameter_is_shown_without_text():
    def set_view(self, a: int = 1, b: str = "x"):
        """Sets modes.

        Args:
          a: The first.
        """

    assert info(set_view) == (
        "Described:\n  a: int = 1\n    The first.\n  b: str = 'x'"
    )


def test_a_docstring_without_args_shows_the_parameters():
    def set_view(self, a: int = 1, *, b=None, c):
        """Sets modes."""

    assert info(set_view) == "Described:\n  a: int = 1\n  b = None\n  c"


def test_a_type_after_the_name_is_understood():
    def set_view(self, a: int = 1, b: int = 2):
        """Sets modes.

        Args:
          a (int): The first.
          b (int, optional): The second.
        """

    assert info(set_view) == (
        "Described:\n  a: int = 1\n    The first.\n  b: int = 2\n    The second."
    )


def test_any_indentation_of_entries_is_understood():
    def set_view(self, a: int = 1, b: int = 2):
        """Sets modes.

        Args:
            a: The first.
            b: The second.
        """

    assert info(set_view) == (
        "Described:\n  a: int = 1\n    The first.\n  b: int = 2\n    The second."
    )


def test_catch_all_parameters_are_left_out():
    def set_view(self, a: int = 1, *args, **rest):
        """Sets modes.

        Args:
          a: The first.
          **rest: Not for us.
        """

    assert info(set_view) == "Described:\n  a: int = 1\n    The first."


@pytest.mark.parametrize("header", ["Raises", "Returns", "Yields", "Example", "Note"])
def test_a_description_ends_at_any_section(header):
    def set_view(self, a: int = 1):
        pass

    set_view.__doc__ = (
        "Sets modes.\n\nArgs:\n  a: The first,\n    which is long.\n\n"
        f"{header}:\n  ValueError: Never.\n"
    )
    assert info(set_view) == (
        "Described:\n  a: int = 1\n    The first,\n    which is long."
    )


class CatchAll(tt.Module):
    def __init__(self):
        self.mode = None

    def set_view(self, mode=None, **kwargs):
        self.mode = mode
        self.rest = tt.static(sorted(kwargs))
        return kwargs


def test_a_catch_all_that_returns_the_rest_does_not_hide_a_typo():
    model = {"noise": Noise(), "any": CatchAll()}
    message = r"Unused keys found in nnx.view: \['determinstic'\].*`view_info` lists"
    with pytest.raises(tt.StructureError, match=message):
        tt.view(model, determinstic=True, mode="m")
    new = tt.view(model, deterministic=True, mode="m")
    assert new["noise"].deterministic is True
    assert new["any"].mode == "m"
    assert new["any"].rest == ["deterministic"]
    assert model["noise"].deterministic is False
    assert model["any"].mode is None


def test_a_catch_all_tells_what_it_used_by_what_it_returns():
    class Selective(tt.Module):
        def set_view(self, **kwargs):
            self.cache = kwargs.pop("cache", None)
            return kwargs

    assert tt.view(Selective(), cache=3).cache == 3
    with pytest.raises(tt.StructureError, match=r"nnx.view: \['cash', 'other'\]"):
        tt.view(Selective(), cache=3, other=1, cash=2)
    assert tt.view(Selective(), cash=2, raise_if_not_found=False).cache is None


def test_set_attributes_checks_before_it_changes():
    model = Model()
    message = r"following attributes: \['unknown', 'zeal'\]. Nothing was set"
    with pytest.raises(tt.StructureError, match="set_attributes: .*" + message):
        model.set_attributes(deterministic=True, unknown=1, zeal=2)
    with pytest.raises(tt.StructureError, match="with_attributes: .*" + message):
        tt.with_attributes(model, deterministic=True, unknown=1, zeal=2)
    assert modes_of(model) == (False, False, 0.5)
    model.set_attributes(deterministic=True, unknown=1, raise_if_not_found=False)
    assert modes_of(model) == (True, False, 0.5)
    assert not hasattr(model, "unknown")


REFUSED = {
    "data on a static attribute": {"rate": jnp.ones(2)},
    "a list of data": {"rate": [jnp.ones(2)]},
    "data marked as static": {"rate": tt.static(jnp.ones(2))},
    "a mark in a list": {"rate": [tt.data(1)]},
    "a property without a setter": {"size": 3},
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_refused_value_leaves_everything_as_it_was(why):
    model = Model()
    with pytest.raises((ValueError, AttributeError), match=r"rate|size"):
        model.set_attributes(
            deterministic=True, use_running_average=True, **REFUSED[why]
        )
    assert modes_of(model) == (False, False, 0.5)


def test_a_class_annotation_is_checked_before_anything_is_set():
    class Sized(Noise):
        width = tt.static(3)

    model = Sized()
    with pytest.raises(tt.AttributeStatusError, match=r"Sized\.width: cannot assign"):
        model.set_attributes(deterministic=True, width=jnp.ones(2))
    assert model.deterministic is False


def test_a_filter_that_finds_nobody_is_an_error():
    model = Model()
    with pytest.raises(tt.StructureError, match=r"\['deterministic'\]"):
        model.set_attributes(Averaging, deterministic=True)
    assert modes_of(model) == (False, False, 0.5)


class Pair(tt.Module):
    def __init__(self, shared):
        self.a = shared
        self.b = tt.List([shared])


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("how", [tt.view, tt.with_attributes])
def test_a_shared_module_without_leaves_stays_shared(how, graph):
    model = Pair(Noise())
    new = how(model, deterministic=True, graph=graph)
    assert new.a is new.b[0]
    assert new.a.deterministic is True
    assert new.a is not model.a
    assert model.a.deterministic is False


@pytest.mark.parametrize("how", [tt.view, tt.with_attributes])
def test_a_shared_module_with_leaves_is_refused_in_tree_mode(how):
    model = Pair(Noise(tt.Rngs(0)))
    message = f"{how.__name__}: Duplicate .* found at paths a.* and b/0.*graph=True"
    with pytest.raises(tt.AliasError, match=message):
        how(model, deterministic=True)
    new = how(model, deterministic=True, graph=True)
    assert new.a is new.b[0]
    assert new.a.rngs.key is model.a.rngs.key
