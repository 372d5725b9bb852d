# SPDX-License-Identifier: Apache-2.0
"""Known defects of NNX's Variables, objects and containers, each shown absent here.

The number in a test's name is the defect's number in the project's list.
"""

import contextlib
import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treetap as tt


class Affine(tt.Module):
    def __init__(self, size=2):
        self.w = tt.Param(jnp.ones(size))
        self.b = tt.Param(jnp.zeros(size))


class Free(tt.Module):
    """A Module whose attributes the tests give it."""


# Variables.


def test_d01_deepcopy_of_a_variable_is_a_variable():
    v = tt.Param(jnp.arange(3.0), role="kernel")
    twin = copy.deepcopy(v)
    assert type(twin) is tt.Param
    assert twin.role == "kernel"
    twin[0] = 5.0
    assert v[0] == 0.0
    assert twin[0] == 5.0


def test_d01_deepcopy_keeps_a_shared_variable_shared():
    v = tt.Param(jnp.ones(2))
    first, second = copy.deepcopy([v, v])
    assert first is second
    assert first is not v


@pytest.mark.parametrize("value", [np.array([1.0, 3.0]), jnp.array([1.0, 3.0])])
def test_d02_comparisons_are_those_of_the_value(value):
    v, w = tt.Param(value), tt.Param(jnp.array([1.0, 2.0]))
    assert (v != w).tolist() == [False, True]
    assert (v == w).tolist() == [True, False]
    assert (v > 2.0).tolist() == [False, True]
    assert (v >= w).tolist() == [True, True]
    assert (np.full(2, 2.0) > v).tolist() == [True, False]
    assert (v < w).tolist() == [False, False]
    assert (v <= w).tolist() == [True, False]


def test_d02_divmod_works_from_both_sides():
    assert divmod(tt.Param(7), 2) == (3, 1)
    assert divmod(7, tt.Param(2)) == (3, 1)
    quotient, rest = divmod(tt.Param(jnp.array([7, 9])), 4)
    assert quotient.tolist() == [1, 2]
    assert rest.tolist() == [3, 1]


@pytest.mark.parametrize("value", [1.239, np.float32(1.239), jnp.float32(1.239)])
def test_d02_format_specs_reach_the_value(value):
    assert f"{tt.Param(value):.2f}" == "1.24"


def test_d03_a_scalar_variable_is_true_as_its_value_is():
    for zero in (0, 0.0, False, jnp.float32(0.0), np.int32(0)):
        assert not tt.Param(zero)
    for one in (1, 2.5, True, jnp.float32(1.0), np.int32(1)):
        assert tt.Param(one)


def test_d03_a_variable_with_items_is_true():
    assert tt.Param(jnp.zeros(1))
    assert not tt.Param(jnp.zeros(0))
    assert not tt.Param({})


@pytest.mark.parametrize("index", [np.array([0, 2]), jnp.array([0, 2])])
@pytest.mark.parametrize("array", [jnp.zeros(3), np.zeros(3)])
def test_d04_any_array_can_be_an_index(array, index):
    v = tt.Param(array)
    v[index] = 5.0
    assert v[...].tolist() == [5.0, 0.0, 5.0]
    v[index] = np.array([1.0, 2.0])
    assert v[...].tolist() == [1.0, 0.0, 2.0]


def test_d05_item_writes_are_checked_across_traces():
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


def test_d05_item_deletion_is_checked_across_traces():
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


def test_d05_a_write_two_levels_deep_leaks_no_tracer():
    v = tt.Variable({"a": {"b": jnp.ones(2)}})

    @jax.jit
    def traced(x):
        v["a"]["b"] = x
        return x

    with contextlib.suppress(tt.TraceContextError):
        traced(jnp.zeros(2))
    assert not has_tracer(v.get_raw_value())


def test_d05_a_method_of_the_container_leaks_no_tracer():
    v = tt.Variable([jnp.ones(2)])

    @jax.jit
    def traced(x):
        v.append(x)
        return x

    with contextlib.suppress(tt.TraceContextError, AttributeError):
        traced(jnp.zeros(2))
    assert not has_tracer(v.get_raw_value())


def test_d06_writing_items_leaves_the_callers_object_alone():
    array, items, names = np.zeros(2), [1, 2], {"a": 1}
    for held, key in ((array, 0), (items, 0), (names, "a")):
        v = tt.Variable(held)
        v[key] = 9
        assert v[key] == 9
    assert array.tolist() == [0.0, 0.0]
    assert items == [1, 2]
    assert names == {"a": 1}


def test_d06_set_value_and_deletion_leave_the_callers_object_alone():
    names = {"a": 1, "b": 2}
    v = tt.Variable({})
    v.set_value(names)
    v["a"] = 9
    del v["b"]
    assert names == {"a": 1, "b": 2}
    assert v.get_value() == {"a": 9}


def test_d06_a_nested_write_leaves_the_callers_object_alone():
    names = {"a": {"b": 1}}
    v = tt.Variable({})
    v.set_value(names)
    v["a"]["b"] = 9
    assert names == {"a": {"b": 1}}


def test_d06_the_caller_cannot_change_a_container_behind_the_variable():
    names = {"a": [1]}
    v = tt.Variable(names)
    names["a"].append(2)
    names["b"] = 3
    assert v.get_value() == {"a": [1]}


@pytest.mark.parametrize("value", [2.0, 2, True, "text", None])
def test_d07_python_values_are_read_and_set_with_ellipsis(value):
    v = tt.Param(value)
    assert v[...] is value
    v[...] = 3.0
    assert v[...] == 3.0


def test_d08_metadata_do_not_hide_attributes_of_the_array():
    v = tt.Param(jnp.ones((2, 3)), dtype="mine", T="mine")
    assert v.dtype == jnp.float32
    assert v.T.shape == (3, 2)
    assert v.get_metadata("dtype") == "mine"
    assert v.get_metadata("T") == "mine"


@pytest.mark.parametrize("name", ["copy", "shape", "get_value", "replace"])
def test_d08_metadata_that_could_not_be_read_are_refused(name):
    message = f"Param: '{name}' cannot be the name of metadata.*Choose another name"
    with pytest.raises(tt.MetadataError, match=message):
        tt.Param(1.0, **{name: 1})
    v = tt.Param(1.0)
    with pytest.raises(tt.MetadataError, match=message):
        v.set_metadata(name, 1)
    assert v.get_metadata(exclude_required=True) == {}


def test_d09_mixed_arithmetic_is_that_of_the_values():
    assert tt.Param(1) + 2.0 == 3.0
    assert 2.0 + tt.Param(1) == 3.0
    assert tt.Param(1) * tt.Param(2.5) == 2.5
    assert 2 ** tt.Param(0.5) == 2**0.5
    assert (tt.Param(1) + jnp.ones(2)).tolist() == [2.0, 2.0]
    assert (np.ones(2) - tt.Param(1)).tolist() == [0.0, 0.0]
    with pytest.raises(TypeError, match="unsupported operand"):
        tt.Param(1) + "text"


def test_d50_with_vars_says_that_mutable_is_not_supported():
    model = Affine()
    with pytest.raises(tt.MetadataError, match=r"with_vars: `mutable`.*`ref=True`"):
        tt.with_vars(model, mutable=True)
    assert model.w.get_metadata("ref") is False


def test_d62_eager_sharding_is_fixed_in_every_form():
    v = tt.Param(jnp.ones(2), role="kernel")
    before = v.get_metadata()
    message = "'eager_sharding' of a Param is fixed when it is made.*v.copy"
    for change in (
        lambda: v.set_metadata(eager_sharding=False),
        lambda: v.set_metadata("eager_sharding", False),
        lambda: v.set_metadata({"role": "bias", "eager_sharding": False}),
    ):
        with pytest.raises(tt.MetadataError, match=message):
            change()
    with pytest.raises(tt.MetadataError, match="'eager_sharding' of a Param is requ"):
        v.del_metadata("eager_sharding")
    with pytest.raises(tt.MetadataError, match="eager_sharding are fixed"):
        tt.set_metadata({"v": v}, role="bias", eager_sharding=False)
    assert v.get_metadata() == before


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


# Objects and containers.

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


@pytest.mark.parametrize("how", ROUND_TRIPS)
def test_d11_items_and_attributes_keep_their_order(how):
    items = tt.Dict(b=tt.Param(1.0), a=tt.Param(2.0), d="static", c=tt.Param(3.0))
    again = ROUND_TRIPS[how](items)
    assert list(again) == ["b", "a", "d", "c"]
    model = Free()
    model.z, model.m, model.a = tt.Param(1.0), "static", tt.Param(2.0)
    assert list(vars(ROUND_TRIPS[how](model))) == ["z", "m", "a"]


def test_d11_order_under_jit_is_not_that_of_an_earlier_call():
    @jax.jit
    def chain(parts, x):
        for name in parts:
            x = 2 * x if name == "double" else x + 1
        return x

    one = jnp.ones(())
    assert chain(tt.Dict(double=one, add=one), 1.0) == 3.0
    assert chain(tt.Dict(add=one, double=one), 1.0) == 4.0


def test_d11_a_dict_inside_a_variable_keeps_its_order():
    assert list(tt.Variable({"b": 1, "a": 2}).get_value()) == ["b", "a"]


@pytest.mark.parametrize("node", [Affine(), tt.Dict(w=tt.Param(1.0))])
def test_d12_deleting_from_an_outer_object_under_jit_is_refused(node):
    @jax.jit
    def traced(x):
        del node.w
        return x

    name = type(node).__name__
    message = f"Cannot mutate '{name}' from different trace level.*as an argument"
    with pytest.raises(tt.TraceContextError, match=message):
        traced(1.0)
    assert isinstance(node.w, tt.Param)
    assert "w" in tt.state(node)


def test_d12_removing_items_of_an_outer_list_under_jit_is_refused():
    items = tt.List([tt.Param(1.0), tt.Param(2.0)])

    @jax.jit
    def traced(x):
        items.pop()
        return x

    with pytest.raises(tt.TraceContextError, match="Cannot mutate 'List'"):
        traced(1.0)
    assert len(items) == 2


def test_d13_pytree_false_is_inherited():
    class Opaque(tt.Module, pytree=False):
        pass

    class Inner(Opaque):
        def __init__(self):
            self.parts = [tt.Param(1.0)]  # allowed: nothing is checked

    assert len(jax.tree.leaves(Inner())) == 1  # the object itself
    with pytest.raises(tt.StructureError, match="Inner is declared with pytree=False"):
        tt.split(Inner())

    class Open(Opaque, pytree=True):
        def __init__(self):
            self.w = tt.Param(1.0)

    assert jax.tree.leaves(Open()) == [1.0]


def test_d14_numpy_scalars_are_data_and_do_not_retrace():
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


def test_d38_removing_from_a_list_moves_the_rest_up():
    for remove in (lambda items: items.pop(0), lambda items: items.__delitem__(0)):
        items = tt.List([tt.Param(1.0), tt.Param(2.0), tt.Param(3.0)])
        remove(items)
        assert jax.tree.leaves(items) == [2.0, 3.0]
        assert tt.to_flat_state(tt.split(items)[1]).paths == ((0,), (1,))
        assert [v[...] for v in items] == [2.0, 3.0]


def test_d39_inserting_moves_modules_and_functions_alike():
    first, last = Affine(), Affine()
    items = tt.List([first, jax.nn.relu])
    items.insert(0, last)
    assert list(items) == [last, first, jax.nn.relu]
    assert list(tt.state(items)) == [0, 1]
    items.insert(1, jax.nn.tanh)
    assert list(items) == [last, jax.nn.tanh, first, jax.nn.relu]
    assert list(tt.state(items)) == [0, 2]


def test_d39_a_refused_insertion_changes_nothing():
    items = tt.List([Affine(), jax.nn.relu])
    with pytest.raises(tt.AttributeStatusError, match=r"List\[0\]: Found data on"):
        items.insert(0, [jnp.ones(2)])
    assert len(items) == 2
    assert items[1] is jax.nn.relu


def test_d40_lists_are_equal_only_to_themselves_and_hash():
    first, second = tt.List([1]), tt.List([2])
    assert first != second
    assert first == first  # noqa: PLR0124 - the point
    assert first != tt.List([1])
    assert len({first, second, first}) == 2
    same = tt.Dict(a=1)
    assert same != tt.Dict(a=1)
    assert len({same, tt.Dict(a=1)}) == 2


def test_d41_keys_of_a_dict_do_not_hide_its_methods():
    d = tt.Dict(items=tt.Param(1.0), train=tt.Param(2.0), update=3)
    for again in (d, tt.clone(d), jax.tree.map(lambda leaf: leaf, d)):
        assert sorted(key for key, _ in again.items()) == ["items", "train", "update"]
        assert again["items"][...] == 1.0
        again.train()
        again.update(more=4)
        assert again["update"] == 3
        assert again["more"] == 4


def test_d41_methods_of_a_dict_are_not_its_items():
    d = tt.Dict()
    assert "update" not in d
    assert len(d) == 0
    with pytest.raises(KeyError, match="update"):
        d["update"]
    with pytest.raises(KeyError, match="update"):
        del d["update"]


class Norm(tt.Module):
    """A stand-in for a layer with an optional parameter."""

    def __init__(self, use_scale=False):
        self.scale = tt.data(tt.Param(jnp.ones(2)) if use_scale else None)


@pytest.mark.parametrize("how", ROUND_TRIPS)
def test_d52_an_optional_parameter_can_be_given_later(how):
    layer = ROUND_TRIPS[how](Norm())
    assert layer.scale is None
    assert jax.tree.leaves(layer) == []
    layer.scale = tt.Param(jnp.ones(2))
    assert len(jax.tree.leaves(layer)) == 1
    layer.scale = None
    assert jax.tree.structure(layer) == jax.tree.structure(Norm())


def test_d52_data_on_a_static_none_is_refused_with_the_remedy():
    layer = Free()
    layer.scale = None
    message = r"Free\.scale: cannot assign data of type Param.*`self.scale = data\(None"
    with pytest.raises(tt.AttributeStatusError, match=message):
        layer.scale = tt.Param(1.0)
    assert layer.scale is None
