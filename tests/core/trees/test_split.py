# SPDX-License-Identifier: Apache-2.0
"""split, merge and their kin, in tree mode and in graph mode."""

import pickle
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

import treetap as tt
from stand_ins import PATHS, Linear, Net, bent


class Loose(tt.Module, pytree=False):
    def __init__(self):
        self.w = tt.Param(1.0)


class Pair(NamedTuple):
    left: tt.Variable
    right: tt.Variable


both_modes = pytest.mark.parametrize("graph", [False, True], ids=["tree", "graph"])


def tied():
    net = Net()
    net.layers[0] = net.first
    return net


def cyclic():
    net = Net()
    net.layers.append(net)
    return net


# split and merge.


@both_modes
def test_split_gives_graphdef_and_state_with_the_same_variables(graph):
    net = Net()
    graphdef, state = tt.split(net, graph=graph)
    assert isinstance(graphdef, tt.GraphDef)
    assert (graphdef.graph, graphdef.num_leaves) == (graph, 6)
    assert tt.to_flat_state(state).paths == PATHS
    assert state.first.w is net.first.w
    assert state.scale is net.scale


@both_modes
def test_split_sends_each_leaf_to_the_first_filter(graph):
    _, params, arrays, rest = tt.split(Net(), tt.Param, jax.Array, ..., graph=graph)
    assert len(tt.to_flat_state(params)) == 4
    assert list(arrays) == ["scale"]
    assert list(rest) == ["calls"]
    _, _, empty = tt.split({"a": tt.Param(1.0)}, tt.Param, ..., graph=graph)
    assert empty == tt.State({})


def test_split_wants_every_leaf_taken():
    with pytest.raises(tt.FilterError, match=r"split: Non-exh.*calls \(Variable\), "):
        tt.split(Net(), tt.Param)
    with pytest.raises(tt.FilterError, match="can only be used as the last filters"):
        tt.split(Net(), ..., tt.Param)
    with pytest.raises(tt.FilterError, match=r"remainder: \(root\) \(Param\)"):
        tt.split(tt.Param(1.0), tt.BatchStat)


@both_modes
@pytest.mark.parametrize("filters", [(), (tt.Param, ...)])
def test_merge_builds_new_objects_around_the_variables(graph, filters):
    net = Net()
    merged = tt.merge(*tt.split(net, *filters, graph=graph))
    assert type(merged) is Net
    assert merged is not net
    assert merged.first is not net.first
    assert merged.first.w is net.first.w
    assert merged.layers[1] is bent
    assert merged.first.dout == 3
    assert merged(jnp.ones(2)).shape == (3,)
    assert tt.graphdef(merged, graph=graph) == tt.graphdef(net, graph=graph)


@pytest.mark.parametrize(
    "convert",
    [
        lambda state: state.raw_mapping,
        tt.to_flat_state,
        lambda state: tt.to_flat_state(state).leaves,
        lambda state: tuple(tt.to_flat_state(state).leaves),
    ],
    ids=["nested dicts", "FlatState", "list", "tuple"],
)
@both_modes
def test_merge_takes_other_forms_of_state(graph, convert):
    net = Net()
    graphdef, state = tt.split(net, graph=graph)
    merged = tt.merge(graphdef, convert(state))
    assert tt.state(merged, graph=graph) == state
    assert merged.layers[0].w is net.layers[0].w


def test_merge_takes_several_forms_together():
    graphdef, params, rest = tt.split(Net(), tt.Param, ...)
    merged = tt.merge(graphdef, tt.to_flat_state(params), rest.raw_mapping)
    assert tt.to_flat_state(tt.state(merged)).paths == PATHS


def test_bare_values_become_variables_again():
    graphdef, _ = tt.split({"w": tt.BatchStat(1.0, tag="a")})
    merged = tt.merge(graphdef, {"w": 5.0})
    assert type(merged["w"]) is tt.BatchStat
    assert (merged["w"][...], merged["w"].tag) == (5.0, "a")
    assert tt.merge(graphdef, {"w": 5.0}, recreate_variables=False) == {"w": 5.0}


def test_a_bare_value_for_a_ref_variable_becomes_a_ref():
    graphdef, _ = tt.split({"w": tt.Param(jnp.ones(2), ref=True)})
    merged = tt.merge(graphdef, {"w": jnp.zeros(2)})
    assert isinstance(merged["w"].get_raw_value(), jax.Ref)


def test_merge_with_copy_gives_variables_of_their_own():
    net = Net()
    merged = tt.merge(*tt.split(net), copy=True)
    merged.first.w[...] = jnp.zeros((2, 3))
    assert net.first.w[0, 0] == 1


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda s: s.first.__delitem__("w"), "missing first/w"),
        (lambda s: s.first.__setitem__("v", tt.Param(1)), "unexpected first/v"),
        (
            lambda s: s.__setitem__("scale", tt.Param(1)),
            "scale is a Param where a plain value belongs",
        ),
        (
            lambda s: s.__setitem__("scale", {"x": 1}),
            "scale is a mapping where a plain value belongs",
        ),
        (
            lambda s: s.__setitem__("first", 3.0),
            "first is a float where a mapping belongs",
        ),
        (lambda s: s.__delitem__("scale"), "missing scale"),
    ],
)
@both_modes
def test_merge_names_what_does_not_fit(graph, change, problem):
    graphdef, state = tt.split(Net(), graph=graph)
    change(state)
    with pytest.raises(tt.StructureError) as caught:
        tt.merge(graphdef, state)
    message = str(caught.value)
    assert message.startswith("merge: the state does not fit the GraphDef.")
    assert f"  - {problem}\n" in message
    assert message.endswith("Pass the State(s) that `split` gave with this GraphDef, "
                            "all of them.")  # fmt: skip


def test_merge_counts_leaves_and_cuts_a_long_list():
    graphdef, _ = tt.split({i: tt.Param(i) for i in range(20)})
    with pytest.raises(tt.StructureError) as caught:
        tt.merge(graphdef, {})
    message = str(caught.value)
    assert "Incorrect number of leaves: 0, expected 20." in message
    assert "missing 11\n  - and 8 more\n" in message


@pytest.mark.parametrize("count", [5, 7])
def test_merge_of_a_list_wants_the_right_number(count):
    graphdef, _ = tt.split(Net())
    with pytest.raises(
        tt.StructureError,
        match=f"merge: Incorrect number of leaves: {count}, expected 6",
    ):
        tt.merge(graphdef, [0.0] * count)


def test_merge_wants_a_graphdef_and_a_state():
    graphdef, state = tt.split(Net())
    with pytest.raises(
        TypeError, match=r"merge\(\) missing 1 required positional argument: 'state'"
    ):
        tt.merge(graphdef)
    with pytest.raises(TypeError, match=r"expected a GraphDef .* first, got State"):
        tt.merge(state, graphdef)
    with pytest.raises(tt.StructureError, match="merge: only mappings can be given"):
        tt.merge(graphdef, state, [1.0])


@both_modes
@pytest.mark.parametrize("root", [tt.Param(1.0), jnp.ones(2), 3.0])
def test_a_leaf_may_be_the_root(graph, root):
    graphdef, state = tt.split(root, graph=graph)
    assert state is root
    merged = tt.merge(graphdef, state)
    assert type(merged) is type(root)
    assert tt.state(root, graph=graph) is root
    _, first, second = tt.split(root, tt.Cache, ..., graph=graph)
    assert first == {}
    assert second is root
    assert tt.merge(graphdef, first, second) is merged
    assert tt.state(root, tt.Cache, ..., graph=graph)[1] is root


def test_empty_states_of_an_empty_object_merge():
    graphdef, one, two = tt.split({"a": []}, tt.Param, ...)
    assert tt.merge(graphdef, one, two) == {"a": []}


@both_modes
def test_containers_keep_their_types(graph):
    tree = {"z": Pair(tt.Param(1), tt.Param(2)), "a": (None, [tt.Param(3)])}
    merged = tt.merge(*tt.split(tree, graph=graph))
    assert merged["z"].right[...] == 2
    assert merged["a"][0] is None
    assert tt.to_flat_state(tt.state(tree, graph=graph)).paths == (
        ("a", 1, 0),
        ("z", "left"),
        ("z", "right"),
    )


# Sharing.


@pytest.mark.parametrize(
    "function", [tt.split, tt.state, tt.graphdef, tt.unpack, tt.flatten]
)
def test_tree_mode_refuses_sharing_and_cycles(function):
    name = function.__name__
    with pytest.raises(
        tt.AliasError,
        match=rf"{name}: Duplicate Param found at paths first/b and layers/0/b: .*"
        rf"does not support shared references.*`treetap.clone`.*`{name}\(\.\.\., gra",
    ):
        function(tied())
    with pytest.raises(tt.CycleError, match=r"Cycle detected.*found at paths \(root\)"):
        function(cyclic())
    with pytest.raises(tt.StructureError, match=r"pytree=False.*Found at path a/0"):
        function({"a": [Loose()]})


def test_tree_mode_names_a_shared_variable_and_a_shared_ref():
    shared = tt.Param(1.0)
    with pytest.raises(tt.AliasError, match="Duplicate Param found at paths a and b/0"):
        tt.split({"a": shared, "b": [shared]})
    ref = jax.new_ref(jnp.ones(2))
    with pytest.raises(tt.AliasError, match="found at paths a and b"):
        tt.split({"a": ref, "b": ref})


def test_tree_mode_refuses_a_shared_object_of_plain_arrays():
    class Table(tt.Module):
        def __init__(self):
            self.rows = jnp.ones(2)

    table = Table()
    with pytest.raises(tt.AliasError, match="Duplicate Table found at paths 0 and 1"):
        tt.split([table, table])
    merged = tt.merge(*tt.split([table, table], graph=True))
    assert merged[0] is merged[1]


def test_graph_mode_keeps_sharing():
    net = tied()
    graphdef, state = tt.split(net, graph=True)
    assert graphdef.num_leaves == 4
    assert "layers" not in state
    for given in (state, tt.to_flat_state(state).leaves):
        merged = tt.merge(graphdef, given)
        assert merged.layers[0] is merged.first
        assert merged.first.w is net.first.w


def test_graph_mode_keeps_cycles():
    merged = tt.merge(*tt.split(cyclic(), graph=True))
    assert merged.layers[2] is merged


def test_graph_mode_keeps_shared_variables_and_refs():
    shared, ref = tt.Param(1.0), jax.new_ref(jnp.ones(2))
    merged = tt.merge(*tt.split([shared, shared, ref, ref], graph=True))
    assert merged[0] is merged[1]
    assert merged[2] is merged[3]


def test_graph_mode_takes_objects_that_are_no_pytrees():
    merged = tt.merge(*tt.split([Loose()], graph=True))
    assert type(merged[0]) is Loose
    assert merged[0].w[...] == 1


def test_a_state_for_something_shared_is_unexpected():
    shared = tt.Param(1.0)
    graphdef, state = tt.split([shared, shared], graph=True)
    state[1] = tt.Param(2.0)
    with pytest.raises(tt.StructureError, match="unexpected 1"):
        tt.merge(graphdef, state)


def test_an_object_without_leaves_may_stand_twice_in_a_tree():
    class Empty(tt.Module):
        def __init__(self):
            self.n = 1

    empty = Empty()
    merged = tt.merge(*tt.split([empty, empty]))
    assert [type(node) for node in merged] == [Empty, Empty]


# state, unpack, flatten.


@both_modes
def test_state_drops_what_no_filter_takes(graph):
    net = Net()
    assert tt.variables is tt.state
    params, stats = tt.state(net, tt.Param, tt.BatchStat, graph=graph)
    assert len(tt.to_flat_state(params)) == 4
    assert stats == {}
    assert tt.state(net, tt.Param, graph=graph).first.w is net.first.w


@both_modes
def test_unpacked_states_carry_their_graphdef(graph):
    net = Net()
    params, rest = tt.unpack(net, tt.Param, ..., graph=graph)
    assert isinstance(params, tt.GraphState)
    merged = tt.merge(params, rest)
    assert merged.first.w is net.first.w
    assert tt.merge(tt.unpack(net, graph=graph)).calls is net.calls


def test_a_graph_state_is_a_mapping_and_a_pytree():
    packed = tt.unpack(Net())
    assert packed.first.w.shape == (2, 3)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(packed)]
    same = [path for path, _ in jax.tree_util.tree_leaves_with_path(tt.state(Net()))]
    assert paths == same
    doubled = jax.jit(lambda s: jax.tree.map(lambda x: x * 2, s))(packed)
    assert tt.merge(doubled).first.w[0, 0] == 2
    assert tt.merge(pickle.loads(pickle.dumps(packed))).first.dout == 3


def test_graph_states_must_belong_together():
    with pytest.raises(tt.StructureError, match="Expected GraphState object, got Stat"):
        tt.merge(tt.unpack(Net()), tt.state(Net()))
    with pytest.raises(tt.StructureError, match="GraphDef must be the same"):
        tt.merge(tt.unpack(Net()), tt.unpack(Linear()))


def test_a_bare_variable_cannot_be_unpacked():
    with pytest.raises(TypeError, match=r"unpack: a bare Param has no names.*`split`"):
        tt.unpack(tt.Param(1.0))


@both_modes
def test_flatten_and_unflatten_are_inverse(graph):
    net = Net()
    graphdef, flat = tt.flatten(net, graph=graph)
    assert flat.paths == PATHS
    _, leaves = tt.flatten(net, with_paths=False, graph=graph)
    assert [a is b for a, b in zip(leaves, flat.leaves, strict=True)] == [True] * 6
    for given in (flat, leaves, iter(leaves), tt.state(net, graph=graph)):
        assert tt.unflatten(graphdef, given).first.w is net.first.w
    bare = tt.unflatten(graphdef, [1.0] * 6, recreate_variables=False)
    assert bare.first.w == 1.0


def test_flatten_and_unflatten_agree_on_any_keys():
    tree = {2.0: tt.Param("two"), 10.0: tt.Param("ten"), (3,): 3, (20,): 20}
    tree = {"floats": {k: tree[k] for k in (2.0, 10.0)}, "rest": {(3,): 3, (20,): 20}}
    for with_paths in (True, False):
        graphdef, leaves = tt.flatten(tree, with_paths=with_paths)
        same = tt.unflatten(graphdef, leaves)
        assert same["floats"][2.0][...] == "two"
        assert same["rest"] == {(3,): 3, (20,): 20}


def test_unflatten_names_itself_in_errors():
    graphdef, flat = tt.flatten(Net())
    with pytest.raises(tt.StructureError, match="unflatten: Incorrect number of"):
        tt.unflatten(graphdef, [])
    with pytest.raises(tt.StructureError, match="unflatten: the state does not fit"):
        tt.unflatten(graphdef, flat[1:])


@both_modes
def test_a_bare_variable_can_be_flattened(graph):
    variable = tt.Param(1.0)
    graphdef, flat = tt.flatten(variable, graph=graph)
    assert flat.paths == ((),)
    assert tt.unflatten(graphdef, flat) is variable
    assert tt.unflatten(graphdef, [variable]) is variable


def test_is_variable():
    assert tt.is_variable(tt.Param(1.0))
    assert not tt.is_variable(1.0)


def test_a_flat_bare_variable_merges():
    variable = tt.Param(1.0)
    assert tt.merge(*tt.flatten(variable)) is variable


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


def test_merge_names_what_is_missing_and_what_is_unexpected():
    graphdef = tt.graphdef(nested_model())
    with pytest.raises(tt.StructureError) as error:
        tt.merge(graphdef, {"x": 1, "y": 2, "z": 3})
    for line in ("missing a", "missing b/c", "missing b/d"):
        assert f"- {line}\n" in str(error.value)
    for name in "xyz":
        assert f"- unexpected {name}\n" in str(error.value)
    assert "Pass the State(s) that `split` gave" in str(error.value)


@pytest.mark.parametrize("graph", [False, True])
def test_merge_takes_variables_of_another_kind(graph):
    graphdef, state = tt.split(nested_model(), graph=graph)
    state.b.d = tt.Cache(jnp.ones(3), note="new")
    model = tt.merge(graphdef, state)
    assert (type(model.b.d), model.b.d.note) == (tt.Cache, "new")
    again, caches, rest = tt.split(model, tt.Cache, ..., graph=graph)
    assert tt.to_flat_state(caches).paths == (("b", "d"),)
    assert type(tt.merge(again, rest, caches).b.d) is tt.Cache
    doubled = jax.jit(lambda model: jax.tree.map(lambda x: 2 * x, model))(model)
    assert (type(doubled.b.d), float(doubled.b.d[0])) == (tt.Cache, 2.0)
    assert again != graphdef


def test_merge_counts_when_something_is_left_out():
    graphdef, params, _ = tt.split(nested_model(), tt.Param, ...)
    message = r"Incorrect number of leaves: 2, expected 3\.\n  - missing b/d"
    with pytest.raises(tt.StructureError, match=message):
        tt.merge(graphdef, params)


@pytest.mark.parametrize(
    "function", [tt.split, tt.state, tt.clone, tt.graphdef, tt.view, tt.iter_modules]
)
def test_a_shared_module_of_raw_arrays_is_noticed(function):
    inner = Free(x=jnp.ones(2))
    model = Free(first=inner, second=Free(again=inner))
    message = "Duplicate Free found at paths first and second/again: .*graph=True"
    with pytest.raises(tt.AliasError, match=message):
        function(model)


def test_graph_mode_keeps_it_shared():
    inner = Free(x=jnp.ones(2))
    model = tt.merge(*tt.split(Free(first=inner, second=inner), graph=True))
    assert model.first is model.second


def test_both_modes_give_the_same_state():
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


def test_flatten_gives_variables_in_both_modes_with_and_without_paths():
    model = nested_model()
    for graph in (False, True):
        _, with_paths = tt.flatten(model, graph=graph)
        _, without = tt.flatten(model, with_paths=False, graph=graph)
        for leaves in (with_paths.leaves, without):
            assert leaves[0] is model.a
            assert leaves[1] is model.b.c
            assert leaves[2] is model.b.d


@BOTH_MODES
def test_the_state_of_a_bare_leaf_is_the_leaf(graph):
    v, x = tt.Param(jnp.ones(2)), jnp.ones(2)
    assert tt.state(v, graph=graph) is v
    assert tt.state(x, graph=graph) is x
    params, rest = tt.state(v, tt.Param, ..., graph=graph)
    assert params is v
    assert rest == {}


def test_unpacking_a_bare_leaf_is_refused_with_the_remedy():
    with pytest.raises(TypeError, match=r"unpack: a bare Param has no names.*`split`"):
        tt.unpack(tt.Param(1.0))
