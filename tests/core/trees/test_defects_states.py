# SPDX-License-Identifier: Apache-2.0
"""Known defects of NNX's States, filters and graph functions, each shown absent here.

The number in a test's name is the defect's number in the project's list.
"""

import contextlib
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treetap as tt
from treetap import nnx


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


# State and filters.


def test_d10_states_compare_by_structure_kinds_and_numbers():
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


@pytest.mark.parametrize("wrong", [3, 1.5, object(), [tt.Param, 3]])
def test_d15_an_invalid_filter_is_a_type_error_that_lists_the_valid_ones(wrong):
    model = nested_model()
    message = "Invalid filter .* of type .*a tag .str., `...`, a bool"
    for call in (tt.split, tt.state, tt.pop, tt.filter_state, tt.split_state):
        argument = tt.state(model) if call.__name__.endswith("_state") else model
        with pytest.raises(TypeError, match=message):
            call(argument, wrong)
    assert len(jax.tree.leaves(model)) == 3


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


# Splitting and merging.


def test_d16_merge_names_what_is_missing_and_what_is_unexpected():
    graphdef = tt.graphdef(nested_model())
    with pytest.raises(tt.StructureError) as error:
        tt.merge(graphdef, {"x": 1, "y": 2, "z": 3})
    for line in ("missing a", "missing b/c", "missing b/d"):
        assert f"- {line}\n" in str(error.value)
    for name in "xyz":
        assert f"- unexpected {name}\n" in str(error.value)
    assert "Pass the State(s) that `split` gave" in str(error.value)


def test_d16_merge_refuses_another_kind_of_variable():
    graphdef, state = tt.split(nested_model())
    state.b.d = tt.Param(jnp.zeros(3))
    with pytest.raises(tt.StructureError, match="b/d is a Param, expected a BatchStat"):
        tt.merge(graphdef, state)


def test_d16_merge_counts_when_something_is_left_out():
    graphdef, params, _ = tt.split(nested_model(), tt.Param, ...)
    message = r"Incorrect number of leaves: 2, expected 3\.\n  - missing b/d"
    with pytest.raises(tt.StructureError, match=message):
        tt.merge(graphdef, params)


@pytest.mark.parametrize(
    "function", [tt.split, tt.state, tt.clone, tt.graphdef, tt.view, tt.iter_modules]
)
def test_d17_a_shared_module_of_raw_arrays_is_noticed(function):
    inner = Free(x=jnp.ones(2))
    model = Free(first=inner, second=Free(again=inner))
    message = "Duplicate Free found at paths first and second/again: .*graph=True"
    with pytest.raises(tt.AliasError, match=message):
        function(model)


def test_d17_graph_mode_keeps_it_shared():
    inner = Free(x=jnp.ones(2))
    model = tt.merge(*tt.split(Free(first=inner, second=inner), graph=True))
    assert model.first is model.second


def test_d18_both_modes_give_the_same_state():
    model = Free(
        numbers=tt.data([1, 2.5, {"k": True}]),
        text=tt.data({"t": "text", "none": None}),
        one=tt.data(1),
        w=tt.Param(jnp.ones(2)),
    )
    tree, graph = tt.state(model, graph=False), tt.state(model, graph=True)
    assert tt.to_flat_state(tree).paths == tt.to_flat_state(graph).paths
    assert tree == graph
    assert ("numbers", 0) in tt.to_flat_state(tree).paths


def test_d19_flatten_gives_variables_in_both_modes_with_and_without_paths():
    model = nested_model()
    for graph in (False, True):
        _, with_paths = tt.flatten(model, graph=graph)
        _, without = tt.flatten(model, with_paths=False, graph=graph)
        for leaves in (with_paths.leaves, without):
            assert leaves[0] is model.a
            assert leaves[1] is model.b.c
            assert leaves[2] is model.b.d


@BOTH_MODES
def test_d20_the_state_of_a_bare_leaf_is_the_leaf(graph):
    v, x = tt.Param(jnp.ones(2)), jnp.ones(2)
    assert tt.state(v, graph=graph) is v
    assert tt.state(x, graph=graph) is x
    params, rest = tt.state(v, tt.Param, ..., graph=graph)
    assert params is v
    assert rest == {}


def test_d20_unpacking_a_bare_leaf_is_refused_with_the_remedy():
    with pytest.raises(TypeError, match=r"unpack: a bare Param has no names.*`split`"):
        tt.unpack(tt.Param(1.0))


def test_d21_pop_removes_every_reference_to_a_variable():
    shared = tt.Intermediate(1.0)
    model = Free(x=shared, y=Free(z=shared), w=tt.Param(2.0))
    taken = tt.pop(model, tt.Intermediate)
    assert taken.x is shared
    assert tt.to_flat_state(taken).paths == (("x",),)
    assert not hasattr(model, "x")
    assert not hasattr(model.y, "z")
    assert jax.tree.leaves(model) == [2.0]


def test_d21_pop_takes_only_the_plain_values_that_were_asked_for():
    model = Free(a=tt.data(1), b=tt.data(1))
    assert dict(tt.pop(model, tt.PathContains("a"))) == {"a": 1}
    assert model.b == 1


def test_d21_pop_returns_every_plain_value_it_removes():
    model = Free(a=tt.data(1), b=tt.data(1))
    assert dict(tt.pop(model, ...)) == {"a": 1, "b": 1}


def test_d22_pop_from_a_list_leaves_a_whole_list():
    items = tt.List([tt.Intermediate(1.0), tt.Param(2.0), tt.Intermediate(3.0)])
    kept = items[1]
    taken = tt.pop(items, tt.Intermediate)
    assert tt.to_flat_state(taken).paths == ((0,), (2,))
    assert list(map(id, items)) == [id(kept)]
    assert tt.to_flat_state(tt.state(items)).paths == ((0,),)


def test_d22_pop_from_a_plain_list_is_refused_before_anything_is_taken():
    model = Free(a=tt.Intermediate(1.0), b=tt.data([tt.Intermediate(2.0)]))
    message = r"pop: b/0 stands in a list.*Use `treetap.List`"
    with pytest.raises(tt.StructureError, match=message):
        tt.pop(model, tt.Intermediate)
    assert jax.tree.leaves(model) == [1.0, 2.0]


class Tied(tt.Module):
    def __init__(self):
        self.a = self.b = tt.Param(1.0)

    def add(self, x):
        self.a[...] += x
        return self.b[...]


@pytest.mark.parametrize("mode", [False, True])
def test_d23_apply_works_in_the_mode_of_its_graphdef(mode):
    graphdef, state = tt.split(Tied(), graph=True)
    with tt.set_graph_mode(mode):
        result, (after, changed) = graphdef.apply(state).add(2.0)
        assert tt.call((graphdef, changed)).add(1.0)[0] == 4.0
    assert result == 3.0
    assert after == graphdef
    merged = tt.merge(after, changed)
    assert merged.a is merged.b


WALKS = {
    "iter_graph": lambda node: list(tt.iter_graph(node, graph=False)),
    "iter_modules": lambda node: list(tt.iter_modules(node, graph=False)),
    "split": lambda node: tt.split(node, graph=False),
    "clone": lambda node: tt.clone(node, graph=False),
    "view": lambda node: tt.view(node, graph=False),
    "recursive_map": lambda node: tt.recursive_map(lambda p, v: v, node, graph=False),
}


@pytest.mark.parametrize("walk", WALKS)
def test_d42_an_object_in_itself_is_a_cycle_error(walk):
    node = Free()
    node.me = node
    outer = {"part": node}
    message = f"{walk}: Cycle detected: the Free found at paths part and part/me.*graph"
    for _ in range(3):  # and nothing is the worse for it
        with pytest.raises(tt.CycleError, match=message):
            WALKS[walk](outer)
    assert jax.tree.map(lambda x: x + 1, {"a": [1]}) == {"a": [2]}
    assert len(list(tt.iter_graph(node, graph=True))) == 1


def test_d42_an_object_in_itself_may_be_put_into_a_list():
    program = (
        "import jax, treetap as tt\n"
        "class Node(tt.Module): pass\n"
        "node = Node()\n"
        "node.me = node\n"
        "node.parts = tt.data([node])\n"
        "assert tt.clone(node, graph=True).parts[0].me is not node\n"
        "jax.numpy.ones(2, int)\n"
    )  # in a process of its own: a failure leaves JAX unusable
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-500:]


# Values in and out.


def holder():
    return Free(
        table=tt.Variable({"x": jnp.ones(2), "y": {"z": jnp.zeros(1)}}),
        w=tt.Param(jnp.ones(3)),
    )


def test_d56_containers_in_variables_survive_as_pure():
    graphdef, state = tt.split(holder())
    again = tt.merge(graphdef, tt.as_pure(state))
    assert type(again.table) is tt.Variable
    assert tt.state(again) == state


def test_d56_containers_in_variables_survive_to_pure_dict():
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


def test_d56_an_empty_container_survives_too():
    graphdef, *states = tt.split(
        Free(table=tt.Variable({}), w=tt.Param(1.0)), tt.Param, ...
    )
    again = tt.merge(graphdef, *map(tt.to_pure_dict, states))
    assert again.table.get_value() == {}


def numbers_of(model):
    return [leaf.tolist() for leaf in jax.tree.leaves(model)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"typo": 1.0}, r"unexpected b/typo: Free has \['c', 'd'\]"),
        ({"c": jnp.ones(4)}, r"b/c: shape \(4,\), expected \(3,\)"),
        ({"c": np.ones(3, np.int32)}, "b/c: dtype int32, expected float32"),
        ({"d": tt.Param(jnp.ones(3))}, "b/d is a Param, expected a BatchStat"),
        (jnp.ones(2), "b: a .* where a Free stands"),
    ],
)
def test_d57_update_refuses_what_does_not_fit_and_changes_nothing(wrong, message):
    model = nested_model()
    before = numbers_of(model)
    with pytest.raises(tt.StructureError, match="nothing was changed.\n.*" + message):
        tt.update(model, {"a": jnp.full(2, 9.0), "b": wrong})
    assert numbers_of(model) == before
    assert not hasattr(model.b, "typo")


@pytest.mark.parametrize("wrong", [[1.5, 2.5], (1, 2), ["x", "y"]])
def test_d57_a_list_does_not_take_the_place_of_an_array(wrong):
    model = Free(w=tt.Param(jnp.ones(2, jnp.int32)))
    with contextlib.suppress(tt.StructureError, TypeError):
        tt.update(model, {"w": wrong})
    assert isinstance(model.w.get_raw_value(), jax.Array)
    assert model.w.dtype == jnp.int32


@pytest.mark.parametrize("wrong", [1.5, "text", None])
def test_d57_a_python_value_does_not_change_the_dtype(wrong):
    model = Free(w=tt.Param(jnp.int32(1)))
    with contextlib.suppress(tt.StructureError, TypeError):
        tt.update(model, {"w": wrong})
    assert isinstance(model.w.get_raw_value(), jax.Array)
    assert model.w.dtype == jnp.int32


def test_d57_a_mapping_does_not_take_the_place_of_an_array():
    model = Free(w=tt.Param(jnp.ones(2)))
    with pytest.raises(tt.StructureError, match="w"):
        tt.update(model, {"w": {"kernel": jnp.ones(2)}})
    assert model.w.shape == (2,)


# Modes and threads.


def seen_in_a_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_a_mode_set_by_a_call_holds_in_every_thread():
    current = tt.set_graph_mode.current_value
    tt.set_graph_mode(True)
    assert seen_in_a_thread(current) is True
    assert len(tt.split(Tied())[1]) == 1
    assert seen_in_a_thread(lambda: len(tt.split(Tied())[1])) == 1


def test_a_mode_set_by_a_call_does_not_mask_a_later_call():
    current = tt.set_graph_mode.current_value
    tt.set_graph_mode(True)
    seen_in_a_thread(lambda: tt.set_graph_mode(False))
    assert current() is False
    assert nnx.set_graph_mode.current_value() is False


def test_a_mode_set_for_a_block_holds_in_its_thread_only():
    current = tt.set_graph_mode.current_value
    with tt.set_graph_mode(True):
        assert current() is True
        assert seen_in_a_thread(current) is False
        tt.set_graph_mode(True)
        with tt.set_graph_mode(False):
            assert current() is False
            assert seen_in_a_thread(current) is True
    assert current() is True


def test_blocks_begun_by_two_threads_at_once_leave_nothing_behind():
    first = tt.set_graph_mode(True)
    second = seen_in_a_thread(lambda: tt.set_graph_mode(True))
    for block in (first, second):  # both made before either is entered
        with block:
            assert tt.set_graph_mode.current_value() is True
    assert tt.set_graph_mode.current_value() is False
