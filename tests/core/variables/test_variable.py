# SPDX-License-Identifier: Apache-2.0
"""Variables: making, reading, writing, metadata, copies and trace levels."""

import contextlib
import copy
import pickle
import subprocess
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import GetAttrKey

import treetap as tt

PLAIN = {"hijax": False, "ref": False, "eager_sharding": True}


class Doubled(tt.Variable):
    """Stores half of what it shows."""

    def get_value(self, **options):
        return super().get_value(**options) * 2

    def set_value(self, value, **options):
        super().set_value(value / 2, **options)


class Made(tt.Variable):
    """Adds one to the value it is made from."""

    def create_value(self, value):
        return value + 1


class Unit(tt.Variable):
    """A kind with a class attribute and a property that can be set."""

    unit = "m"

    @property
    def first(self):
        return self[0]

    @first.setter
    def first(self, value):
        self[0] = value


def plus_one(x):
    return x + 1


# Making.


@pytest.mark.parametrize(
    "value",
    [
        jnp.ones(2),
        np.ones(2),
        3,
        2.5,
        "text",
        None,
        (1, 2),
        jax.ShapeDtypeStruct((2,), jnp.float32),
        plus_one,
        tt.Param(1.0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_value_is_stored_as_it_is(value):
    assert tt.Variable(value).get_raw_value() is value
    assert tt.Variable(value=value).get_value() is value


def test_a_container_given_stays_the_callers():
    given = {"a": [jnp.ones(2)]}
    variable = tt.Variable(given)
    given["a"].append(1)
    given["b"] = 2
    assert list(variable) == ["a"]
    assert len(variable["a"]) == 1


@pytest.mark.parametrize("wrap", [lambda r: r, lambda r: {"deep": [r]}])
def test_a_bare_ref_is_refused(wrap):
    with pytest.raises(tt.StructureError, match=r"Param: .*jax\.Ref.*`ref=True`"):
        tt.Param(wrap(jax.new_ref(jnp.ones(2))))


def test_a_mark_is_no_value():
    with pytest.raises(tt.MetadataError, match=r"the value is data\(1\).*itself"):
        tt.Param(tt.data(1))


def test_hijax_is_refused_and_false_is_accepted():
    with pytest.raises(tt.MetadataError, match=r"Param: hijax .* Leave `hijax` out"):
        tt.Param(1.0, hijax=True)
    assert tt.Param(1.0, hijax=False).get_metadata() == PLAIN


def test_every_variable_has_the_required_metadata():
    assert tt.Param(jnp.ones(2)).get_metadata() == PLAIN
    assert tt.Param(1.0, a=1, ref=False).get_metadata() == {**PLAIN, "a": 1}
    assert tt.Param(1.0, eager_sharding=False).eager_sharding is False


def test_the_setting_decides_eager_sharding():
    with tt.use_eager_sharding(False):
        assert tt.Param(jnp.ones(2)).eager_sharding is False


def test_generics_can_be_subscripted_and_called():
    variable = tt.Param[jax.Array](jnp.ones(2))
    assert type(variable) is tt.Param
    assert tt.Variable[int](3)[...] == 3


def test_a_kind_has_no_instance_attributes_but_may_have_class_ones():
    variable = Unit(jnp.ones(2))
    assert variable.unit == "m"
    assert "__slots__" in vars(Unit)
    assert not hasattr(variable, "__dict__")


# Reading and writing.


def test_reading_an_array_gives_the_same_object():
    array = jnp.arange(3.0)
    variable = tt.Param(array)
    assert variable[...] is array
    assert variable.get_value() is array
    assert variable[1] == 1
    assert variable.get_value(index=slice(1, None)).tolist() == [1, 2]


def test_a_fitting_array_is_stored_itself():
    variable = tt.Param(jnp.zeros(3))
    new = jnp.ones(3)
    variable[...] = new
    assert variable[...] is new


@pytest.mark.parametrize("new", [2, 2.0, np.full(3, 2), jnp.full(3, 2), [2, 2, 2]])
def test_a_write_through_dots_keeps_shape_and_dtype(new):
    variable = tt.Param(jnp.zeros(3, jnp.bfloat16))
    variable[...] = jnp.asarray(new)
    assert variable[...].dtype == jnp.bfloat16
    assert variable[...].tolist() == [2, 2, 2]


def test_a_write_of_another_shape_through_dots_fails():
    variable = tt.Param(jnp.zeros(3))
    with pytest.raises(ValueError, match="broadcast"):
        variable[...] = jnp.ones(4)
    assert variable[...].tolist() == [0, 0, 0]


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_a_write_through_dots_keeps_the_sharding():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    variable = tt.Param(jax.device_put(jnp.zeros(4), sharding))
    variable[...] = jnp.ones(4)
    assert variable[...].sharding == sharding
    assert variable[...].tolist() == [1, 1, 1, 1]


def test_an_item_of_an_array_is_set_in_a_copy():
    array = jnp.zeros(3)
    variable = tt.Param(array)
    variable[1] = 5
    assert variable[...].tolist() == [0, 5, 0]
    assert array.tolist() == [0, 0, 0]


def test_set_value_may_change_shape_and_structure():
    variable = tt.Param(jnp.zeros(3))
    variable.set_value(jnp.ones((2, 2)))
    assert variable.shape == (2, 2)
    variable.set_value({"a": 1})
    assert variable["a"] == 1


def test_python_numbers_are_read_and_written_through_dots():
    variable = tt.Variable(1)
    variable[...] += 2.5
    assert variable[...] == 3.5


def test_items_of_a_numpy_array_are_set_in_a_copy():
    array = np.zeros(3)
    variable = tt.Variable(array)
    variable[0] = 1
    variable[..., 1] = 2
    assert variable.get_value().tolist() == [1, 2, 0]
    variable[...] = 7
    assert variable.get_value().tolist() == [7, 7, 7]
    assert array.tolist() == [0, 0, 0]


def test_items_of_a_dict_are_read_set_and_deleted():
    variable = tt.Variable({"a": 1})
    before = variable.get_raw_value()
    variable["b"] = 2
    assert variable.get_value() == {"a": 1, "b": 2}
    del variable["a"]
    assert variable[...] == {"b": 2}
    assert list(variable.keys()) == ["b"]
    assert before == {"a": 1}


def test_editing_a_container_that_was_read_does_not_edit_the_variable():
    variable = tt.Variable({"a": [1]})
    variable.get_value()["a"].append(2)
    variable[...]["b"] = 3
    assert variable.get_value() == {"a": [1]}


def test_lists_have_items():
    variable = tt.Variable([1, 2, 3])
    variable[0] = 5
    del variable[1]
    assert variable[...] == [5, 3]


def test_a_variable_written_into_another_gives_its_value():
    variable = tt.Param(jnp.zeros(2))
    variable[...] = tt.Param(jnp.ones(2))
    assert variable.get_raw_value().tolist() == [1, 1]
    variable.set_value(tt.Variable(3))
    assert variable.get_raw_value() == 3


def test_a_key_is_replaced_through_dots():
    variable = tt.RngKey(jax.random.key(0))
    variable[...] = jax.random.key(1)
    assert variable[...] == jax.random.key(1)


def test_an_abstract_value_is_filled_by_one_that_fits():
    variable = tt.Param(jax.ShapeDtypeStruct((2,), jnp.float32))
    assert variable.shape == (2,)
    for wrong in (jnp.ones(3), jnp.ones(2, jnp.int32)):
        with pytest.raises(tt.StructureError, match=r"float32\[2\].*`set_value`"):
            variable[...] = wrong
    variable[...] = jnp.ones(2)
    assert variable[...].tolist() == [1, 1]


def test_get_and_set_value_can_be_overridden():
    variable = Doubled(jnp.asarray(3.0))
    assert variable[...] == 6
    assert variable + 1 == 7
    assert jnp.sum(variable) == 6
    variable[...] = 10.0
    assert variable.get_raw_value() == 5
    assert variable.copy().get_raw_value() == 5


def test_create_value_can_be_overridden_and_runs_once():
    assert Made(1)[...] == 2
    assert Made(jnp.asarray(1.0))[...] == 2
    assert Made(1).copy()[...] == 2
    assert jax.tree.map(lambda x: x, Made(1))[...] == 2


def test_raw_access_passes_overrides():
    variable = Doubled(1.0)
    variable.set_raw_value(7.0)
    assert variable.get_raw_value() == 7


@pytest.mark.parametrize("name", ["value", "raw_value"])
def test_the_deprecated_properties_work_with_a_warning(name):
    variable = tt.nnx.Param(1.0)  # they come with NNX's namespace
    with pytest.warns(DeprecationWarning, match=f"Variable.{name}.*deprecated; use"):
        assert getattr(variable, name) == 1
    with pytest.warns(DeprecationWarning, match=f"Variable.{name} = x.*deprecated"):
        setattr(variable, name, 2.0)
    assert variable[...] == 2


# Attributes.


def test_attributes_come_from_metadata_then_from_the_value():
    variable = tt.Param(jnp.ones((2, 3)), role="kernel")
    assert variable.role == "kernel"
    assert variable.dtype == jnp.float32
    assert variable.T.shape == (3, 2)
    assert variable.at[0, 0].set(5.0)[0, 0] == 5


def test_an_unknown_attribute_names_kind_and_value():
    with pytest.raises(AttributeError, match=r"Param: no metadata .*float.*'nothing'"):
        tt.Param(1.0).nothing


def test_attributes_cannot_be_set_or_deleted():
    variable = tt.Param(1.0, role="a")
    with pytest.raises(AttributeError, match=r"Param: .*v\.set_metadata\(role=\.\.\."):
        variable.role = "b"
    with pytest.raises(AttributeError, match=r"Param: .*v\.del_metadata\('role'\)"):
        del variable.role
    with pytest.raises(AttributeError, match="cannot be set"):
        variable._box = (2,)
    assert variable.role == "a"


def test_a_property_with_a_setter_may_be_set():
    variable = Unit(jnp.zeros(2))
    variable.first = 4
    assert variable.first == 4
    with pytest.raises(AttributeError):
        variable.shape = (3,)


# As a pytree.


def test_the_one_child_has_the_key_value():
    variable = tt.Param({"w": 1.0})
    ((path, leaf),) = jax.tree_util.tree_leaves_with_path(variable)
    assert path[0] == GetAttrKey("value")
    assert leaf == 1


def test_mapping_keeps_kind_and_metadata():
    mapped = jax.tree.map(plus_one, tt.BatchStat(1.0, tag="a"))
    assert type(mapped) is tt.BatchStat
    assert (mapped[...], mapped.tag) == (2.0, "a")


def test_metadata_are_part_of_the_structure():
    one, two = (tt.Param(1.0, tag=tag) for tag in "ab")
    assert jax.tree.structure(one) != jax.tree.structure(two)
    assert jax.tree.structure(one) == jax.tree.structure(tt.Param(2.0, tag="a"))


# Copies.


def test_a_copy_shares_arrays_and_changes_what_is_asked():
    variable = tt.Param(jnp.ones(2), a=1, b=1)
    same = variable.copy()
    assert same is not variable
    assert same[...] is variable[...]
    assert same.get_metadata() == variable.get_metadata()
    other = variable.copy(3.0, b=2)
    assert (other[...], other.a, other.b) == (3.0, 1, 2)
    assert variable.replace(tt.Param(4.0))[...] == 4
    assert variable.b == 1


def test_a_copy_of_a_container_is_its_own():
    variable = tt.Variable({"a": 1})
    assert variable.copy().get_raw_value() is not variable.get_raw_value()


def test_a_copy_cannot_be_hijax():
    with pytest.raises(tt.MetadataError, match="hijax"):
        tt.Param(1.0).copy(hijax=True)


def test_copy_from_takes_value_and_metadata_of_the_same_kind():
    target = tt.Param(1.0, a=1)
    target.copy_from(tt.Param(2.0, b=2))
    assert target[...] == 2
    assert target.get_metadata(exclude_required=True) == {"b": 2}
    with pytest.raises(
        tt.StructureError, match=r"BatchStat into a Param\. Use `update_from_state`"
    ):
        target.copy_from(tt.BatchStat(3.0))
    assert target[...] == 2


def test_update_from_state_crosses_kinds_and_keeps_flags():
    target = tt.Param(jnp.ones(2), ref=True)
    target.update_from_state(tt.BatchStat(jnp.zeros(2), tag="a"))
    assert target[...].tolist() == [0, 0]
    assert (target.ref, target.tag) == (True, "a")
    assert isinstance(target.get_raw_value(), jax.Ref)
    plain = tt.Param(jnp.ones(2))
    plain.update_from_state(target)
    assert isinstance(plain.get_raw_value(), jax.Array)
    assert plain.ref is False


def test_from_metadata_passes_the_constructor():
    made = Made.from_metadata(1, {"tag": "a"})
    assert (made[...], made.tag) == (1, "a")
    assert made.get_metadata() == {**PLAIN, "tag": "a"}


@pytest.mark.parametrize("ref", [False, True])
@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda v: pickle.loads(pickle.dumps(v))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_duplicates_are_variables_of_their_own(duplicate, ref):
    variable = tt.Param(jnp.ones(2), ref=ref, tags=["a"])
    same = duplicate(variable)
    assert type(same) is tt.Param
    assert same.get_metadata() == variable.get_metadata()
    same[...] = jnp.zeros(2)
    assert same[...].tolist() == [0, 0]
    assert variable[...].tolist() == [1, 1]


def test_a_deep_copy_copies_values_and_metadata():
    variable = tt.Variable({"a": [1]}, tags=["x"])
    same = copy.deepcopy([variable, variable])
    assert same[0] is same[1]
    assert same[0].tags is not variable.tags
    assert same[0].get_raw_value() is not variable.get_raw_value()
    assert same[0].get_value() == {"a": [1]}


def test_a_pickled_variable_can_be_written_where_it_is_loaded():
    data = pickle.dumps(tt.Param(jnp.ones(2)))

    @jax.jit
    def inside():
        loaded = pickle.loads(data)
        loaded[...] = loaded * 2
        return loaded

    assert inside()[...].tolist() == [2, 2]


def test_weak_references_work():
    variable = tt.Param(1.0)
    reference = weakref.ref(variable)
    assert reference() is variable
    del variable
    assert reference() is None


def test_twins_have_their_own_box():
    variable = tt.Param(1.0, tag="a")
    twin = tt.clone(variable)
    twin[...] = 2.0
    assert (variable[...], twin[...], twin.tag) == (1.0, 2.0, "a")


# Display.


def test_repr_shows_size_value_and_metadata():
    assert repr(tt.Param(jnp.ones(2), tag="a")) == (
        "Param( # 2 (8 B)\n  value=Array([1., 1.], dtype=float32),\n  tag='a'\n)"
    )


def test_repr_without_arrays_has_no_size():
    assert repr(tt.Variable(3)) == "Variable(\n  value=3\n)"


def test_repr_shows_flags_that_are_not_the_default():
    shown = repr(tt.Param(jnp.ones(500), eager_sharding=False))
    assert shown.startswith("Param( # 500 (2.0 KB)\n")
    assert "eager_sharding=False" in shown
    assert "hijax" not in shown


def test_one_of_many_keys_is_replaced():
    keys = jax.random.split(jax.random.key(0), 3)
    variable, new = tt.Variable(keys), jax.random.key(7)
    variable[1] = new
    assert (variable[...] == keys).tolist() == [True, False, True]
    assert variable[1] == new


def test_lists_inside_tuples_are_the_variables_own():
    given = (1.0, [2.0])
    variable = tt.Variable(given)
    given[1].append(3.0)
    assert variable[...] == (1.0, [2.0])


def test_deepcopy_of_a_variable_is_a_variable():
    v = tt.Param(jnp.arange(3.0), role="kernel")
    twin = copy.deepcopy(v)
    assert type(twin) is tt.Param
    assert twin.role == "kernel"
    twin[0] = 5.0
    assert v[0] == 0.0
    assert twin[0] == 5.0


def test_deepcopy_keeps_a_shared_variable_shared():
    v = tt.Param(jnp.ones(2))
    first, second = copy.deepcopy([v, v])
    assert first is second
    assert first is not v


def test_item_writes_are_checked_across_traces():
    by_name = tt.Variable({"a": jnp.ones(2)})
    by_place = tt.Variable([jnp.ones(2)])

    def write(v, key):
        @jax.jit
        def traced(x):
            v[key] = x
            return x

        return traced

    message = "Cannot mutate Variable from a different trace level.*as an argument"
    for v, key in ((by_name, "a"), (by_place, 0), (by_name, "new")):
        with pytest.raises(tt.TraceContextError, match=message):
            write(v, key)(jnp.zeros(2))
    assert by_name.get_value().keys() == {"a"}
    assert by_name["a"].tolist() == [1.0, 1.0]
    assert by_place[0].tolist() == [1.0, 1.0]


def test_item_deletion_is_checked_across_traces():
    v = tt.Variable({"a": jnp.ones(2)})

    @jax.jit
    def traced(x):
        del v["a"]
        return x

    with pytest.raises(tt.TraceContextError, match="Cannot mutate Variable"):
        traced(1.0)
    assert "a" in v


def has_tracer(value):
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value))


def test_a_write_two_levels_deep_leaks_no_tracer():
    v = tt.Variable({"a": {"b": jnp.ones(2)}})

    @jax.jit
    def traced(x):
        v["a"]["b"] = x
        return x

    with contextlib.suppress(tt.TraceContextError):
        traced(jnp.zeros(2))
    assert not has_tracer(v.get_raw_value())


def test_a_method_of_the_container_leaks_no_tracer():
    v = tt.Variable([jnp.ones(2)])

    @jax.jit
    def traced(x):
        v.append(x)
        return x

    with contextlib.suppress(tt.TraceContextError, AttributeError):
        traced(jnp.zeros(2))
    assert not has_tracer(v.get_raw_value())


def test_writing_items_leaves_the_callers_object_alone():
    array, items, names = np.zeros(2), [1, 2], {"a": 1}
    for held, key in ((array, 0), (items, 0), (names, "a")):
        v = tt.Variable(held)
        v[key] = 9
        assert v[key] == 9
    assert array.tolist() == [0.0, 0.0]
    assert items == [1, 2]
    assert names == {"a": 1}


def test_set_value_and_deletion_leave_the_callers_object_alone():
    names = {"a": 1, "b": 2}
    v = tt.Variable({})
    v.set_value(names)
    v["a"] = 9
    del v["b"]
    assert names == {"a": 1, "b": 2}
    assert v.get_value() == {"a": 9}


def test_a_nested_write_leaves_the_callers_object_alone():
    names = {"a": {"b": 1}}
    v = tt.Variable({})
    v.set_value(names)
    v["a"]["b"] = 9
    assert names == {"a": {"b": 1}}


def test_the_caller_cannot_change_a_container_behind_the_variable():
    names = {"a": [1]}
    v = tt.Variable(names)
    names["a"].append(2)
    names["b"] = 3
    assert v.get_value() == {"a": [1]}


@pytest.mark.parametrize("value", [2.0, 2, True, "text", None])
def test_python_values_are_read_and_set_with_ellipsis(value):
    v = tt.Param(value)
    assert v[...] is value
    v[...] = 3.0
    assert v[...] == 3.0


def test_set_raw_value_passes_overrides_but_not_the_trace_check():
    class Doubled(tt.Variable):
        def set_value(self, value, **kwargs):
            super().set_value(2 * value, **kwargs)

    v = Doubled(1.0)
    v.set_value(3.0)
    assert v.get_raw_value() == 6.0
    v.set_raw_value(3.0)
    assert v.get_raw_value() == 3.0

    @jax.jit
    def traced(x):
        v.set_raw_value(x)
        return x

    with pytest.raises(tt.TraceContextError, match="Cannot mutate Doubled"):
        traced(1.0)
    assert v.get_raw_value() == 3.0


def test_the_older_spelling_of_a_value_is_answered_with_the_present_one():
    """It comes with `treetap.nnx`, so this is a process that has not imported that."""
    program = (
        "import treetap as tt\n"
        "for name in ('value', 'raw_value'):\n"
        "    try:\n"
        "        getattr(tt.Param(1.0), name)\n"
        "    except AttributeError as error:\n"
        "        print(error)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.count("Read and write the value with `v[...]`.") == 2
