# SPDX-License-Identifier: Apache-2.0
"""Known defects of NNX's Module surface, each shown absent here.

The number in a test's name is the defect's number in the project's list.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import treetap as tt
from treetap import nnx


class Noise(tt.Module):
    """A stand-in for Dropout: a mode, a rate, a stream."""

    def __init__(self, rngs=None):
        self.rate = 0.5
        self.deterministic = False
        self.rngs = tt.data(None if rngs is None else rngs.dropout.fork())

    def set_view(self, deterministic: bool | None = None):
        if deterministic is not None:
            self.deterministic = deterministic


class Norm(tt.Module):
    """A stand-in for BatchNorm."""

    def __init__(self):
        self.use_running_average = False
        self.mean = tt.BatchStat(jnp.zeros(2))


class Model(tt.Module):
    def __init__(self):
        self.noise = Noise()
        self.norm = Norm()

    @property
    def size(self):
        return 2


def modes(model):
    return model.noise.deterministic, model.norm.use_running_average, model.noise.rate


# view_info.


def info(set_view):
    Described = type(tt.Module)("Described", (tt.Module,), {"set_view": set_view})
    Described.__qualname__ = "Described"
    return tt.view_info(Described())


def test_m01_an_undocumented_parameter_is_shown_without_text():
    def set_view(self, a: int = 1, b: str = "x"):
        """Sets modes.

        Args:
          a: The first.
        """

    assert info(set_view) == (
        "Described:\n  a: int = 1\n    The first.\n  b: str = 'x'"
    )


def test_m02_a_docstring_without_args_shows_the_parameters():
    def set_view(self, a: int = 1, *, b=None, c):
        """Sets modes."""

    assert info(set_view) == "Described:\n  a: int = 1\n  b = None\n  c"


def test_m03_a_type_after_the_name_is_understood():
    def set_view(self, a: int = 1, b: int = 2):
        """Sets modes.

        Args:
          a (int): The first.
          b (int, optional): The second.
        """

    assert info(set_view) == (
        "Described:\n  a: int = 1\n    The first.\n  b: int = 2\n    The second."
    )


def test_m04_any_indentation_of_entries_is_understood():
    def set_view(self, a: int = 1, b: int = 2):
        """Sets modes.

        Args:
            a: The first.
            b: The second.
        """

    assert info(set_view) == (
        "Described:\n  a: int = 1\n    The first.\n  b: int = 2\n    The second."
    )


def test_m05_catch_all_parameters_are_left_out():
    def set_view(self, a: int = 1, *args, **rest):
        """Sets modes.

        Args:
          a: The first.
          **rest: Not for us.
        """

    assert info(set_view) == "Described:\n  a: int = 1\n    The first."


@pytest.mark.parametrize("header", ["Raises", "Returns", "Yields", "Example", "Note"])
def test_m06_a_description_ends_at_any_section(header):
    def set_view(self, a: int = 1):
        pass

    set_view.__doc__ = (
        "Sets modes.\n\nArgs:\n  a: The first,\n    which is long.\n\n"
        f"{header}:\n  ValueError: Never.\n"
    )
    assert info(set_view) == (
        "Described:\n  a: int = 1\n    The first,\n    which is long."
    )


# view.


class CatchAll(tt.Module):
    def __init__(self):
        self.mode = None

    def set_view(self, mode=None, **kwargs):
        self.mode = mode
        self.rest = tt.static(sorted(kwargs))


def test_m07_a_catch_all_does_not_hide_a_typo():
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


def test_m07_a_catch_all_tells_what_it_used_by_what_it_returns():
    class Selective(tt.Module):
        def set_view(self, **kwargs):
            self.cache = kwargs.pop("cache", None)
            return kwargs

    assert tt.view(Selective(), cache=3).cache == 3
    with pytest.raises(tt.StructureError, match=r"nnx.view: \['cash', 'other'\]"):
        tt.view(Selective(), cache=3, other=1, cash=2)
    assert tt.view(Selective(), cash=2, raise_if_not_found=False).cache is None


# Setting attributes: all or nothing.


def test_m08_set_attributes_checks_before_it_changes():
    model = Model()
    message = r"following attributes: \['unknown', 'zeal'\]. Nothing was set"
    with pytest.raises(tt.StructureError, match="set_attributes: .*" + message):
        model.set_attributes(deterministic=True, unknown=1, zeal=2)
    with pytest.raises(tt.StructureError, match="with_attributes: .*" + message):
        tt.with_attributes(model, deterministic=True, unknown=1, zeal=2)
    assert modes(model) == (False, False, 0.5)
    model.set_attributes(deterministic=True, unknown=1, raise_if_not_found=False)
    assert modes(model) == (True, False, 0.5)
    assert not hasattr(model, "unknown")


REFUSED = {
    "data on a static attribute": {"rate": jnp.ones(2)},
    "a list of data": {"rate": [jnp.ones(2)]},
    "data marked as static": {"rate": tt.static(jnp.ones(2))},
    "a mark in a list": {"rate": [tt.data(1)]},
    "a property without a setter": {"size": 3},
}


@pytest.mark.parametrize("why", REFUSED)
def test_m08_a_refused_value_leaves_everything_as_it_was(why):
    model = Model()
    with pytest.raises((ValueError, AttributeError), match=r"rate|size"):
        model.set_attributes(
            deterministic=True, use_running_average=True, **REFUSED[why]
        )
    assert modes(model) == (False, False, 0.5)


def test_m08_a_class_annotation_is_checked_before_anything_is_set():
    class Sized(Noise):
        width = tt.static(3)

    model = Sized()
    with pytest.raises(tt.AttributeStatusError, match=r"Sized\.width: cannot assign"):
        model.set_attributes(deterministic=True, width=jnp.ones(2))
    assert model.deterministic is False


def test_m08_a_filter_that_finds_nobody_is_an_error():
    model = Model()
    with pytest.raises(tt.StructureError, match=r"\['deterministic'\]"):
        model.set_attributes(Norm, deterministic=True)
    assert modes(model) == (False, False, 0.5)


# Iteration, sharing, cycles.


@pytest.mark.parametrize(
    "function", [tt.iter_children, nnx.iter_children, nnx.iter_module_children]
)
def test_m09_only_modules_are_module_children(function):
    noise = Noise(tt.Rngs(0))
    assert isinstance(noise.rngs, tt.RngStream)
    assert list(function(noise)) == []
    model = Model()
    assert [key for key, _ in function(model)] == ["noise", "norm"]
    assert dict(function(model))["norm"] is model.norm


class Pair(tt.Module):
    def __init__(self, shared):
        self.a = shared
        self.b = tt.List([shared])


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("how", [tt.view, tt.with_attributes])
def test_m10_a_shared_module_without_leaves_stays_shared(how, graph):
    model = Pair(Noise())
    new = how(model, deterministic=True, graph=graph)
    assert new.a is new.b[0]
    assert new.a.deterministic is True
    assert new.a is not model.a
    assert model.a.deterministic is False


@pytest.mark.parametrize("how", [tt.view, tt.with_attributes])
def test_m10_a_shared_module_with_leaves_is_refused_in_tree_mode(how):
    model = Pair(Noise(tt.Rngs(0)))
    message = f"{how.__name__}: Duplicate .* found at paths a.* and b/0.*graph=True"
    with pytest.raises(tt.AliasError, match=message):
        how(model, deterministic=True)
    new = how(model, deterministic=True, graph=True)
    assert new.a is new.b[0]
    assert new.a.rngs.key is model.a.rngs.key


@pytest.mark.parametrize(("name", "value"), [("train", False), ("eval", True)])
def test_m11_train_and_eval_say_what_they_set_themselves(name, value):
    model = Model()
    before = modes(model)
    message = f"{name}: deterministic is what `{name}` itself sets, to {value}.*set_att"
    with pytest.raises(TypeError, match=message):
        getattr(model, name)(deterministic=not value, rate=0.1)
    assert modes(model) == before
    getattr(model, name)(rate=0.1, unknown=1)
    assert modes(model) == (value, value, 0.1)


def test_m12_a_module_in_itself_is_a_cycle_error():
    model = Model()
    model.s = model
    message = r"Cycle detected: the Model found at paths \(root\) and s contains itself"
    for _ in range(3):
        with pytest.raises(tt.CycleError, match="iter_modules: " + message):
            list(tt.iter_modules(model, graph=False))
    assert [path for path, _ in tt.iter_modules(model, graph=True)] == [
        ("noise",),
        ("norm",),
        (),
    ]
    assert len(list(tt.iter_modules(Model()))) == 3


def test_m12_an_indirect_cycle_is_a_cycle_error_too():
    model = Model()
    model.parts = tt.data({"deep": [Noise()]})
    model.parts["deep"][0].back = model
    with pytest.raises(tt.CycleError, match=r"paths \(root\) and parts/deep/0/back"):
        list(tt.iter_modules(model))
    model.eval()
    assert model.parts["deep"][0].deterministic is True


# Marks: `data(x)` and `static(x)` are for assignment, and gone after it.


def test_a_mark_never_stays_on_a_value():
    @dataclasses.dataclass
    class Pair(tt.Module):
        first: object
        second: object = tt.data(default=None)

    assert Pair(tt.data([1])).first == [1]
    assert Pair(1).second is None
    assert list(tt.List([tt.data(1)])) == [1]
    assert tt.Dict(a=tt.data(1))["a"] == 1
    model = Norm()
    vars(model)["a"] = tt.data(1)
    tt.check_pytree(model)
    assert model.a == 1
    assert len(jax.tree.leaves(model)) == 2


@pytest.mark.parametrize("mark", [tt.data, tt.static])
def test_a_mark_inside_a_container_is_refused(mark):
    model = Norm()
    with pytest.raises(tt.AttributeStatusError, match=r"Norm\.x: .* inside a list"):
        model.x = [mark(1)]
    with pytest.raises(tt.AttributeStatusError, match=r"Norm\.x: `data` or `static`"):
        model.x = tt.data([mark(1)])
    assert not hasattr(model, "x")


def test_a_mark_does_not_end_up_inside_a_variable():
    try:
        v = tt.Param(tt.data(1))
    except (TypeError, ValueError):
        return
    assert v[...] == 1
