# SPDX-License-Identifier: Apache-2.0
"""State and FlatState, and the functions over nested mappings."""

import pickle
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import DictKey, SequenceKey

import treetap as tt
from treetap._core.trees import state as _states


def example():
    return tt.State({"b": {1: tt.Param(2.0), 0: tt.BatchStat(3.0)}, "a": tt.Param(1.0)})


# State.


def test_a_state_is_made_from_mappings_and_pairs():
    assert dict(tt.State({"a": 1})) == {"a": 1}
    assert dict(tt.State([("a", 1)])) == {"a": 1}
    assert dict(tt.State()) == {}
    assert dict(tt.State(MappingProxyType({"a": 1}))) == {"a": 1}


def test_the_top_level_is_copied_and_the_rest_shared():
    inner = {"b": 1}
    given = {"a": inner}
    state = tt.State(given)
    state["c"] = 2
    state["a"]["b"] = 5
    assert given == {"a": {"b": 5}}
    assert tt.State(state).raw_mapping is not state.raw_mapping


def test_items_and_attributes_are_the_same():
    state = tt.State({"a": {"b": 1}})
    assert state.a.b == state["a"]["b"] == 1
    state.a.c = 2
    state["d"] = 3
    state.e = 4
    assert state.raw_mapping == {"a": {"b": 1, "c": 2}, "d": 3, "e": 4}
    del state.d
    del state["e"]
    del state.a.b
    assert state.raw_mapping == {"a": {"c": 2}}


def test_a_nested_state_is_a_view_that_writes_through():
    state = tt.State({"a": {"b": 1}})
    view = state.a
    assert type(view) is tt.State
    view["b"] = 2
    assert state["a"]["b"] == 2
    assert state.a.raw_mapping is view.raw_mapping


def test_an_assigned_state_is_stored_as_a_dict():
    state, inner = tt.State(), tt.State({"b": 1})
    state["a"] = inner
    assert type(state.raw_mapping["a"]) is dict
    inner["b"] = 2
    assert state.a.b == 2


def test_a_state_is_a_mapping():
    state = tt.State({"a": 1, "b": 2})
    assert len(state) == 2
    assert list(state) == ["a", "b"]
    assert "a" in state
    assert "c" not in state
    assert list(state.items()) == [("a", 1), ("b", 2)]
    assert state.pop("a") == 1
    assert state.get("a", 7) == 7


def test_missing_entries_are_named():
    state = tt.State({"a": 1, 0: 2})
    with pytest.raises(AttributeError, match=r"State has no entry 'b'; it has \[0, 'a"):
        state.b
    with pytest.raises(AttributeError, match="State has no entry 'b'"):
        del state.b
    with pytest.raises(KeyError):
        state["b"]
    with pytest.raises(AttributeError, match="State has no entry '_mapping'"):
        object.__new__(tt.State)._mapping


def test_states_are_united():
    one, two = tt.State({"a": {"x": 1}, "b": 1}), tt.State({"a": {"y": 2}, "b": 2})
    assert (one | two).raw_mapping == {"a": {"x": 1, "y": 2}, "b": 2}
    assert (one | tt.State()) is one


def test_a_state_is_not_hashable():
    with pytest.raises(TypeError, match="unhashable"):
        hash(tt.State())


def test_a_pickled_state_is_equal():
    state = example()
    same = pickle.loads(pickle.dumps(state))
    assert same == state
    assert same.a is not state.a


def test_repr_shows_the_content():
    assert repr(tt.State({"a": {"b": 1}})) == "State({\n  'a': {'b': 1}\n})"


# Equality.


@pytest.mark.parametrize(
    "value",
    [
        1,
        "text",
        None,
        (1, 2),
        jnp.arange(3.0),
        jnp.asarray([jnp.nan, 1.0]),
        jnp.asarray([jnp.nan, 1.0], jnp.bfloat16),
        np.asarray([np.nan]),
        jax.random.key(0),
        jax.ShapeDtypeStruct((2,), jnp.float32),
        tt.Param(jnp.ones(2), tag="a"),
        tt.Param({"a": jnp.ones(2)}),
    ],
    ids=repr,
)
def test_states_with_equal_values_are_equal(value):
    other = jax.tree.map(lambda x: x.copy() if hasattr(x, "copy") else x, value)
    assert tt.State({"a": {"b": value}}) == tt.State({"a": {"b": other}})
    assert tt.State({"a": {"b": value}}) == {"a": {"b": other}}


@pytest.mark.parametrize(
    "other",
    [
        {"a": jnp.ones(3)},
        {"a": jnp.zeros(2)},
        {"a": jnp.ones(2, jnp.int32)},
        {"a": 1.0},
        {"b": jnp.ones(2)},
        {"a": {"b": jnp.ones(2)}},
        {"a": tt.Param(jnp.ones(2))},
        {"a": jax.random.key(0)},
        {"a": jnp.ones(2), "b": 1},
        {},
        [("a", 1)],
    ],
    ids=repr,
)
def test_states_with_other_values_are_not_equal(other):
    state = tt.State({"a": jnp.ones(2)})
    assert state != other
    assert not (tt.State(other) if isinstance(other, dict) else other) == state  # noqa: SIM201 - both ways


@pytest.mark.parametrize(
    "other",
    [tt.BatchStat(1.0), tt.Param(1.0, tag="a"), tt.Param(2.0), 1.0],
    ids=["kind", "metadata", "value", "bare"],
)
def test_kind_and_metadata_count(other):
    assert tt.State({"a": tt.Param(1.0)}) != tt.State({"a": other})
    assert tt.State({"a": tt.Param(1.0)}) == tt.State({"a": tt.Param(1.0)})


def test_keys_and_refs_are_compared():
    one, two = jax.random.key(0), jax.random.key(1)
    assert tt.State({"a": one}) != tt.State({"a": two})
    assert tt.State({"a": one}) != tt.State({"a": jax.random.key_data(one)})
    ref = jax.new_ref(jnp.ones(2))
    assert tt.State({"a": ref}) == tt.State({"a": ref})
    assert tt.State({"a": ref}) != tt.State({"a": jax.new_ref(jnp.ones(2))})


def test_abstract_values_are_compared_by_their_types():
    one, other = (jax.ShapeDtypeStruct((n,), jnp.float32) for n in (2, 3))
    again = jax.ShapeDtypeStruct((2,), jnp.float32)
    assert tt.State({"a": one}) == tt.State({"a": again})
    assert tt.State({"a": one}) != tt.State({"a": other})
    assert tt.State({"a": one}) != tt.State({"a": jnp.zeros(2)})


# As pytrees.


def test_a_state_is_a_pytree_with_sorted_keys():
    state = example()
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    assert paths[0][0] == DictKey("a")
    assert paths[1][:2] == (DictKey("b"), DictKey(0))
    doubled = jax.tree.map(lambda x: x * 2, state)
    assert type(doubled) is tt.State
    assert doubled.b[1][...] == 4
    assert type(doubled.b[1]) is tt.Param


def test_keys_of_several_types_can_be_flattened():
    state = tt.State({"a": 1, 0: 2, (1, 2): 3})
    assert jax.tree.leaves(state) == [2, 1, 3]
    assert tt.to_flat_state(state).paths == ((0,), ("a",), ((1, 2),))


def test_a_flat_state_is_a_pytree_with_positions():
    flat = tt.to_flat_state(example())
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(flat)]
    assert [path[0] for path in paths] == [SequenceKey(i) for i in range(3)]
    doubled = jax.tree.map(lambda x: x * 2, flat)
    assert doubled.paths == flat.paths
    assert [leaf[...] for leaf in doubled.leaves] == [2, 6, 4]


def test_states_pass_through_jit():
    doubled = jax.jit(lambda s: jax.tree.map(lambda x: x * 2, s))(example())
    assert doubled.a[...] == 2


# FlatState.


def test_a_flat_state_is_a_sequence_sorted_by_path():
    state = example()
    flat = tt.to_flat_state(state)
    assert flat.paths == (("a",), ("b", 0), ("b", 1))
    assert flat.leaves[0] is state.a
    assert flat[0] == (("a",), state.a)
    assert len(flat) == 3
    assert [path for path, _ in flat] == list(flat.paths)
    assert flat[1:].paths == flat.paths[1:]
    assert flat[-1][0] == ("b", 1)


def test_numbers_are_sorted_as_numbers():
    flat = tt.FlatState([((10,), 1), ((2,), 2), (("a",), 3)])
    assert flat.paths == ((2,), (10,), ("a",))
    unsorted = tt.FlatState([((10,), 1), ((2,), 2)], sort=False)
    assert unsorted.paths == ((10,), (2,))


def test_a_flat_state_splits_filters_and_merges():
    flat = tt.to_flat_state(example())
    params, rest = flat.split(tt.Param, ...)
    assert params.paths == (("a",), ("b", 1))
    assert rest.paths == (("b", 0),)
    assert flat.filter(tt.BatchStat).paths == (("b", 0),)
    assert tt.FlatState.merge(rest, params).paths == flat.paths
    assert tt.FlatState.merge(flat, [(("a",), 9)])[0] == (("a",), 9)
    with pytest.raises(tt.FilterError, match=r"FlatState\.split: Non-exh.*b/0"):
        flat.split(tt.Param)


def test_a_flat_state_becomes_nested_and_prints():
    state = example()
    flat = tt.to_flat_state(state)
    assert flat.to_nested_state() == state
    assert repr(tt.FlatState([(("a", 0), 1)])) == ("FlatState([\n  (('a', 0), 1)\n])")
    assert pickle.loads(pickle.dumps(flat)).paths == flat.paths


# Functions.


def test_nested_states_come_from_mappings_pairs_and_flat_states():
    pairs = [(("a", "b"), 1), (("c",), 2)]
    for flat in (pairs, dict(pairs), tt.FlatState(pairs)):
        assert tt.from_flat_state(flat) == {"a": {"b": 1}, "c": 2}
    assert type(tt.from_flat_state(pairs)) is tt.State
    assert type(tt.from_flat_state(pairs, cls=dict)) is dict


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([((), 1)], "cannot hold a value at its root"),
        ([(("a",), 1), (("a", "b"), 2)], "a is a value and also the start of a/b"),
        ([(("a", "b"), 1), (("a",), 2)], "a is a value and also the start of other"),
    ],
)
def test_paths_that_contradict_are_refused(pairs, message):
    with pytest.raises(tt.StructureError, match=message):
        tt.from_flat_state(pairs)


def test_a_pure_dict_holds_values():
    assert tt.to_pure_dict(example()) == {"a": 1.0, "b": {0: 3.0, 1: 2.0}}
    kinds = tt.to_pure_dict(example(), lambda leaf: type(leaf).__name__)
    assert kinds == {"a": "Param", "b": {0: "BatchStat", 1: "Param"}}


def test_a_pure_dict_is_written_into_a_state():
    state = example()
    before = state.a
    tt.replace_by_pure_dict(state, {"a": 7.0, "b": {"1": 8.0}})
    assert tt.to_pure_dict(state) == {"a": 7.0, "b": {0: 3.0, 1: 8.0}}
    assert type(state.a) is tt.Param
    assert before[...] == 1


def test_a_pure_dict_is_written_by_a_function():
    state = tt.State({"a": 1})
    tt.replace_by_pure_dict(state, {"a": 2}, lambda old, new: (old, new))
    assert state.a == (1, 2)


def test_an_unknown_name_in_a_pure_dict_changes_nothing():
    state = example()
    with pytest.raises(
        tt.StructureError,
        match=r"replace_by_pure_dict: b/7 is not in the State; at b it has \[0, 1\]",
    ):
        tt.replace_by_pure_dict(state, {"a": 9.0, "b": {7: 1.0}})
    assert state == example()


def test_a_value_in_the_place_of_a_level_is_refused():
    state = example()
    with pytest.raises(
        tt.StructureError,
        match=r"replace_by_pure_dict: b is a float, but .* a level there: \[0, 1\]",
    ):
        tt.replace_by_pure_dict(state, {"b": 3.0})
    assert state == example()


def test_a_pure_dict_reaches_into_a_state_in_a_state():
    state = tt.State({"a": tt.State({"w": tt.Param(1.0)})})
    tt.replace_by_pure_dict(state, {"a": {"w": 2.0}})
    assert isinstance(state.a["w"], tt.Param)
    assert state.a["w"][...] == 2


def test_keys_that_spell_numbers_are_restored():
    assert tt.restore_int_paths({"0": {"12": 1, "x": 2}, "y": 3, 4: 5}) == {
        0: {12: 1, "x": 2},
        "y": 3,
        4: 5,
    }


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: s.raw_mapping])
def test_states_are_split_and_filtered(wrap):
    state = wrap(example())
    assert tt.split_state(state, ...) == state
    params, stats = tt.split_state(state, tt.Param, tt.BatchStat)
    assert tt.to_flat_state(params).paths == (("a",), ("b", 1))
    assert tt.to_flat_state(stats).paths == (("b", 0),)
    assert tt.filter_state(state, tt.Cache) == {}
    assert len(tt.filter_state(state, tt.Cache, tt.Param)) == 2
    with pytest.raises(tt.FilterError, match=r"split_state: .*remainder: b/0 \(Batch"):
        tt.split_state(state, tt.Param)
    with pytest.raises(tt.FilterError, match="can only be used as the last"):
        tt.filter_state(state, ..., tt.Param)


def test_states_are_merged():
    one = tt.State({"a": {"x": 1}, "b": 1})
    assert tt.merge_state(one) is one
    merged = tt.merge_state(one, {"a": {"y": 2}}, {"c": 3})
    assert merged == {"a": {"x": 1, "y": 2}, "b": 1, "c": 3}
    with pytest.raises(tt.StructureError, match="two States have a value at a/x"):
        tt.merge_state(one, {"a": {"x": 2}})
    assert (one | tt.State({"b": 3})).b == 3
    assert type(tt.merge_state(one, {"c": 1}, cls=dict)) is dict


def test_states_that_contradict_cannot_be_merged():
    one, two = {"a": {"b": 1}}, {"a": {"b": {"c": 1}}}
    for pair in ((one, two), (two, one)):
        with pytest.raises(tt.StructureError, match="a/b is a value in one State"):
            tt.merge_state(*pair)


def test_a_state_is_mapped_with_paths():
    mapped = tt.map_state(lambda path, leaf: (path, leaf[...]), example())
    assert mapped.b[0] == (("b", 0), 3.0)
    assert tt.map_state(lambda path, leaf: leaf, {"a": {}, "b": 1}) == {"b": 1}


def test_the_difference_of_states_goes_by_paths():
    found = _states.diff_state(example(), {"b": {0: 7}})
    assert tt.to_flat_state(found).paths == (("a",), ("b", 1))


def test_only_digits_that_python_reads_are_numbers():
    pure = {"0": 1, "\u00b2": 2, "a": {"1": 3}}  # a superscript is a digit, too
    assert tt.restore_int_paths(pure) == {0: 1, "\u00b2": 2, "a": {1: 3}}
    state = tt.State({"\u00b2": tt.Param(1.0)})
    with pytest.raises(ValueError, match="--"):
        tt.replace_by_pure_dict(state, {"--": 2.0})
    tt.replace_by_pure_dict(state, {"\u00b2": 2.0})
    assert state["\u00b2"][...] == 2.0


class Free(tt.Module):
    """A Module whose attributes the tests give it."""

    def __init__(self, **attributes):
        for name, value in attributes.items():
            setattr(self, name, value)


def nested_model():
    return Free(
        a=tt.Param(jnp.ones(2)),
        b=Free(c=tt.Param(jnp.zeros(3)), d=tt.BatchStat(jnp.zeros(3))),
    )


BOTH_MODES = pytest.mark.parametrize("graph", [False, True])


def test_states_compare_by_structure_kinds_and_numbers():
    first, second = tt.state(nested_model()), tt.state(nested_model())
    assert first == second
    assert (first != second) is False
    second.b.c[0] = 5.0
    assert first != second
    assert tt.State({"a": jnp.ones(2)}) == {"a": jnp.ones(2)}
    assert tt.State({"a": jnp.ones(2)}) != tt.State({"a": jnp.ones(3)})
    assert tt.State({"a": jnp.ones(2)}) != tt.State({"b": jnp.ones(2)})
    assert tt.State({"a": tt.Param(1.0)}) != tt.State({"a": tt.BatchStat(1.0)})
    assert tt.state(tt.Rngs(0)) == tt.state(tt.Rngs(0))
    assert tt.state(tt.Rngs(0)) != tt.state(tt.Rngs(1))


@pytest.mark.parametrize("mapping", [dict, tt.State])
def test_to_flat_state_takes_any_mapping(mapping):
    flat = tt.to_flat_state(mapping({"b": 1, "a": {"c": 2}}))
    assert flat.paths == (("a", "c"), ("b",))
    assert flat.leaves == [2, 1]


def test_numbers_and_names_may_stand_side_by_side_in_a_state():
    mixed = {"x": tt.Param(1.0), 10: tt.Param(2.0), 9: {"y": tt.Param(3.0)}}
    flat = tt.to_flat_state(mixed)
    assert flat.paths == ((9, "y"), (10,), ("x",))
    assert jax.tree.leaves(tt.State(mixed)) == [3.0, 2.0, 1.0]
    assert tt.from_flat_state(flat) == mixed


@BOTH_MODES
def test_numbers_and_names_may_stand_side_by_side_in_a_tree(graph):
    mixed = {"x": tt.Param(1.0), 10: tt.Param(2.0)}
    graphdef, state = tt.split(mixed, graph=graph)
    assert tt.merge(graphdef, state) == mixed


@BOTH_MODES
def test_numbers_and_names_may_stand_side_by_side_in_an_attribute(graph):
    model = Free(parts=tt.data({"x": tt.Param(1.0), 10: tt.Param(2.0)}))
    state = tt.state(model, graph=graph)
    assert tt.to_flat_state(state).paths == (("parts", 10), ("parts", "x"))


def holder():
    return Free(
        table=tt.Variable({"x": jnp.ones(2), "y": {"z": jnp.zeros(1)}}),
        w=tt.Param(jnp.ones(3)),
    )


def test_containers_in_variables_survive_as_pure():
    graphdef, state = tt.split(holder())
    again = tt.merge(graphdef, tt.as_pure(state))
    assert type(again.table) is tt.Variable
    assert tt.state(again) == state


def test_containers_in_variables_survive_to_pure_dict():
    model = holder()
    graphdef, state = tt.split(model)
    pure = tt.to_pure_dict(state)
    assert tt.state(tt.merge(graphdef, pure)) == state
    pure["table"]["x"] = jnp.full(2, 7.0)
    target = tt.state(holder())
    tt.replace_by_pure_dict(target, pure)
    assert target.table["x"].tolist() == [7.0, 7.0]
    assert target.table["y"]["z"].tolist() == [0.0]
    tt.update(model, pure)
    assert model.table["x"].tolist() == [7.0, 7.0]


def test_an_empty_container_survives_too():
    graphdef, *states = tt.split(
        Free(table=tt.Variable({}), w=tt.Param(1.0)), tt.Param, ...
    )
    again = tt.merge(graphdef, *map(tt.to_pure_dict, states))
    assert again.table.get_value() == {}
