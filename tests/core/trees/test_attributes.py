# SPDX-License-Identifier: Apache-2.0
"""Data and static attributes: what decides, and what is refused."""

import copy
import dataclasses
import functools
import pickle
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treetap as tt


class Box(tt.Module):
    def __init__(self, value=0):
        self.value = value


def status(module):
    children, _ = jax.tree.flatten(module, is_leaf=lambda x: x is not module)
    return len(children) == 1


@pytest.mark.parametrize(
    "value",
    [
        jnp.zeros(2),
        np.zeros(2),
        np.float32(1),
        jax.random.key(0),
        tt.Param(1),
        Box(),
        tt.Rngs(0),
        jax.ShapeDtypeStruct((2,), jnp.float32),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_data_by_itself(value):
    expected = not isinstance(value, jax.ShapeDtypeStruct)
    assert tt.is_data(value) is expected
    assert status(Box(value)) is expected


@pytest.mark.parametrize(
    "value", [1, 1.0, "a", None, (1, 2), {"a": 1}, [], jax.nn.relu, np.dtype("int8")]
)
def test_what_is_static_by_itself(value):
    assert not tt.is_data(value)
    assert not status(Box(value))


def test_a_ref_is_data():
    assert tt.is_data(jax.new_ref(jnp.zeros(2)))


def test_register_data_type_takes_exact_types():
    @tt.register_data_type
    class Handle:
        pass

    class Derived(Handle):
        pass

    assert tt.is_data(Handle())
    assert not tt.is_data(Derived())


def test_data_marks_numbers_and_containers():
    box = Box(tt.data([jnp.zeros(2), 1]))
    assert status(box)
    assert len(jax.tree.leaves(box)) == 2


def test_static_marks_what_is_static_anyway():
    assert not status(Box(tt.static((1, 2))))


class Pair(NamedTuple):
    x: object
    y: object


@pytest.mark.parametrize(
    "value",
    [
        [jnp.zeros(2)],
        {"a": tt.Param(1)},
        (tt.Param(1),),
        Pair(1, Box()),
        tt.State({"a": tt.Param(1)}),
        jax.tree_util.Partial(jnp.add, jnp.zeros(2)),
        [{"deep": (np.zeros(1),)}],
    ],
    ids=lambda value: type(value).__name__,
)
def test_containers_with_data_are_refused_with_the_ways_out(value):
    name = type(value).__name__
    message = rf"Box\.value: Found data on value of type {name}.*data\(\.\.\.\)"
    with pytest.raises(tt.AttributeStatusError, match=message):
        Box(value)


def test_a_refused_assignment_changes_nothing():
    box = Box(1)
    with pytest.raises(tt.AttributeStatusError):
        box.other = [jnp.zeros(2)]
    assert vars(box) == {"value": 1}


def test_explicit_static_with_data_is_refused():
    with pytest.raises(
        tt.AttributeStatusError, match="Found data in value of type list"
    ):
        Box(tt.static([jnp.zeros(2)]))
    with pytest.raises(
        tt.AttributeStatusError, match="Found data in value of type Param"
    ):
        Box(tt.static(tt.Param(1)))


def test_data_onto_a_static_attribute_is_refused():
    box = Box(None)
    with pytest.raises(
        tt.AttributeStatusError, match=r"Box\.value.*static.*data\(None\)"
    ):
        box.value = tt.Param(1)
    assert box.value is None


def test_data_none_keeps_a_place_for_data():
    box = Box(tt.data(None))
    box.value = tt.Param(1)
    assert status(box)


def test_data_overrides_an_earlier_status():
    box = Box(1)
    box.value = tt.data(2)
    assert jax.tree.leaves(box) == [2]


def test_a_plain_value_onto_data_stays_data():
    box = Box(jnp.zeros(2))
    box.value = "text"
    assert jax.tree.leaves(box) == ["text"]


def test_deleting_forgets_the_status():
    box = Box(1)
    del box.value
    box.value = jnp.zeros(2)
    assert status(box)


def test_markers_inside_values_are_refused():
    with pytest.raises(tt.AttributeStatusError, match=r"`data\(...\)` or `static"):
        Box([tt.data(1)])
    with pytest.raises(tt.AttributeStatusError, match="inside data"):
        Box(tt.data([tt.static(1)]))


def test_opaque_objects_may_hide_arrays():
    box = Box(functools.partial(jnp.add, jnp.zeros(2)))
    assert jax.tree.leaves(box) == []


def test_lists_that_come_to_hold_data_are_found_after_init():
    class Late(tt.Module):
        def __init__(self):
            self.parts = []
            self.parts.append(jnp.zeros(2))

    with pytest.raises(tt.AttributeStatusError, match=r"Late\.parts: Found unexpected"):
        Late()


def test_check_pytree_finds_what_came_later():
    box = Box([])
    tt.check_pytree(box)
    box.value.append(jnp.zeros(2))
    with pytest.raises(tt.AttributeStatusError, match="Found unexpected data"):
        tt.check_pytree(box)
    with pytest.raises(
        TypeError, match="check_pytree: expected a Pytree object, got int"
    ):
        tt.check_pytree(3)


def test_attributes_past_setattr_are_classified_after_init():
    class Sneaky(tt.Module):
        def __init__(self):
            vars(self)["a"] = jnp.zeros(2)
            object.__setattr__(self, "b", 3)

    assert len(jax.tree.leaves(Sneaky())) == 1


def test_class_annotations_fix_the_status():
    class Annotated(tt.Module):
        parts: list = tt.data()
        shape: tuple = tt.static()

        def __init__(self, parts, shape):
            self.parts = parts
            self.shape = shape

    module = Annotated([jnp.zeros(2), 1], (2,))
    assert len(jax.tree.leaves(module)) == 2
    with pytest.raises(
        tt.AttributeStatusError, match=r"Annotated\.shape: cannot assign"
    ):
        Annotated([], jnp.zeros(2))


def test_values_in_a_class_body_are_defaults_with_a_status():
    class Defaulted(tt.Module):
        depth = tt.static(3)

        def __init__(self):
            self.depth = self.depth + 1

    assert Defaulted.depth == 3
    assert Defaulted().depth == 4


def test_dataclasses_work_with_both_decorators():
    @tt.dataclass
    class Ours(tt.Module):
        w: tt.Param
        parts: list = tt.data(default_factory=list)
        size: int = tt.static(default=2)

    @dataclasses.dataclass
    class Theirs(tt.Module):
        w: tt.Param
        parts: list = dataclasses.field(
            default_factory=list, metadata={"static": False}
        )

    for cls in (Ours, Theirs):
        module = cls(tt.Param(1.0), [jnp.zeros(2)])
        assert len(jax.tree.leaves(module)) == 2
        assert jax.tree.map(lambda x: x, module).w[...] == 1.0
    assert repr(Ours(tt.Param(1.0))).startswith("Ours(")
    assert tt.dataclass(kw_only=True)(type("Empty", (tt.Module,), {}))()


def test_frozen_dataclasses_are_modules():
    @tt.dataclass(frozen=True)
    class Frozen(tt.Module):
        w: tt.Param
        name: str = "x"

    module = Frozen(tt.Param(1.0))
    assert len(jax.tree.leaves(module)) == 1
    object.__setattr__(module, "w", tt.Param(jnp.ones(3)))
    assert jax.tree.leaves(module)[0].shape == (3,)
    module.w[...] = 2.0
    assert tt.merge(*tt.split(module)).name == "x"
    with pytest.raises(dataclasses.FrozenInstanceError):
        module.name = "y"


def test_options_and_value_together_are_refused():
    with pytest.raises(
        TypeError, match=r"data\(\): give either a value or the options"
    ):
        tt.data(1, default=2)
    with pytest.raises(tt.AttributeStatusError, match="may not contain 'static'"):
        tt.static(metadata={"static": True})


def test_a_status_that_is_no_bool_is_refused():
    with pytest.raises(
        tt.AttributeStatusError, match=r"Bad\.x: .*must be True or False"
    ):

        class Bad(tt.Module):
            x: int = dataclasses.field(metadata={"static": "yes"})


def test_a_subclass_may_not_contradict():
    class Base(tt.Module):
        x: list = tt.data()

    with pytest.raises(tt.AttributeStatusError, match=r"Sub\.x is annotated as static"):

        class Sub(Base):
            x: list = tt.static()

    class Silent(Base):
        pass

    module = Silent()
    module.x = [jnp.zeros(2)]
    assert len(jax.tree.leaves(module)) == 1


def test_has_data_lists_what_it_finds():
    array = jnp.zeros(2)
    assert tt.has_data([1, {"a": array}, "x"]) == [array]
    assert tt.has_data([1, 2]) == []


def test_markers_show_what_they_mark():
    assert repr(tt.data(1)) == "data(1)"
    assert repr(tt.static(1)) == "static(1)"


def test_a_static_attribute_may_become_a_number_of_numpy():
    box = Box(2)
    box.value = np.float32(3)
    assert box.value == 3
    assert jax.tree.leaves(box) == []
    with pytest.raises(tt.AttributeStatusError, match="cannot assign data of type nda"):
        box.value = np.zeros(2)
    assert box.value == 3


class Free(tt.Module):
    """A Module whose attributes the tests give it."""


ROUND_TRIPS = {
    "clone": tt.clone,
    "merge": lambda node: tt.merge(*tt.split(node)),
    "graph": lambda node: tt.merge(*tt.split(node, graph=True)),
    "tree": lambda node: jax.tree.map(lambda leaf: leaf, node),
    "jit": jax.jit(lambda node: node),
    "deepcopy": copy.deepcopy,
    "pickle": lambda node: pickle.loads(pickle.dumps(node)),
    "view": tt.view,
}


def test_numpy_scalars_are_data_and_do_not_retrace():
    traces = []

    @jax.jit
    def f(model):
        traces.append(None)
        return model.rate * 2

    for rate in (1.0, 2.0, 3.0):
        model = Free()
        model.rate = np.float32(rate)
        assert f(model) == 2 * rate
    assert tt.is_data(np.float32(1))
    assert len(traces) == 1


class Norm(tt.Module):
    """A stand-in for a layer with an optional parameter."""

    def __init__(self, use_scale=False):
        self.scale = tt.data(tt.Param(jnp.ones(2)) if use_scale else None)


@pytest.mark.parametrize("how", ROUND_TRIPS)
def test_an_optional_parameter_can_be_given_later(how):
    layer = ROUND_TRIPS[how](Norm())
    assert layer.scale is None
    assert jax.tree.leaves(layer) == []
    layer.scale = tt.Param(jnp.ones(2))
    assert len(jax.tree.leaves(layer)) == 1
    layer.scale = None
    assert jax.tree.structure(layer) == jax.tree.structure(Norm())


def test_data_on_a_static_none_is_refused_with_the_remedy():
    layer = Free()
    layer.scale = None
    message = r"Free\.scale: cannot assign data of type Param.*`self.scale = data\(None"
    with pytest.raises(tt.AttributeStatusError, match=message):
        layer.scale = tt.Param(1.0)
    assert layer.scale is None


class Averaging(tt.Module):
    """A stand-in for BatchNorm."""

    def __init__(self):
        self.use_running_average = False
        self.mean = tt.BatchStat(jnp.zeros(2))


class PairOfModules(tt.Module):
    def __init__(self, shared):
        self.a = shared
        self.b = tt.List([shared])


def test_a_mark_never_stays_on_a_value():
    @dataclasses.dataclass
    class PairOfModules(tt.Module):
        first: object
        second: object = tt.data(default=None)

    assert PairOfModules(tt.data([1])).first == [1]
    assert PairOfModules(1).second is None
    assert list(tt.List([tt.data(1)])) == [1]
    assert tt.Dict(a=tt.data(1))["a"] == 1
    model = Averaging()
    vars(model)["a"] = tt.data(1)
    tt.check_pytree(model)
    assert model.a == 1
    assert len(jax.tree.leaves(model)) == 2


@pytest.mark.parametrize("mark", [tt.data, tt.static])
def test_a_mark_inside_a_container_is_refused(mark):
    model = Averaging()
    with pytest.raises(
        tt.AttributeStatusError, match=r"Averaging\.x: .* inside a list"
    ):
        model.x = [mark(1)]
    with pytest.raises(
        tt.AttributeStatusError, match=r"Averaging\.x: `data` or `static`"
    ):
        model.x = tt.data([mark(1)])
    assert not hasattr(model, "x")


def test_a_mark_does_not_end_up_inside_a_variable():
    with pytest.raises(tt.MetadataError, match="`data` and `static` mark attributes"):
        tt.Param(tt.data(1))


def test_a_former_mark_in_an_annotation_may_be_a_text():
    with pytest.warns(DeprecationWarning) as caught:

        class Former(tt.Module):
            layers: "nnx.Data[list]"  # noqa: F821 - only read as a text
            sizes: "Static[tuple]"  # noqa: F821 - the same
            other: "int"

    texts = [str(warning.message) for warning in caught]
    assert "`layers: ... = data()`" in texts[0]
    assert "`sizes: ... = static()`" in texts[1]
    assert len(texts) == 2
    former = Former()
    former.layers, former.sizes, former.other = [jnp.ones(2)], (1,), 3
    assert len(jax.tree.leaves(former)) == 1
    with pytest.raises(tt.AttributeStatusError, match="a static attribute"):
        former.sizes = jnp.ones(2)
