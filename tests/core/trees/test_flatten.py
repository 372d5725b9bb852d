# SPDX-License-Identifier: Apache-2.0
"""GraphDef: equality, hash, text, pickling, and use as an argument of jit."""

import pickle

import jax
import jax.numpy as jnp
import pytest

import treetap as tt
from stand_ins import Model, Noise


class Linear(tt.Module):
    def __init__(self, dout=3, **metadata):
        self.w = tt.Param(jnp.ones((2, dout)), **metadata)
        self.dout = dout


class Other(Linear):
    pass


class Holder(tt.Module):
    def __init__(self, part, note=None):
        self.part = tt.data(part)
        self.note = note


def doubled(x):
    return x * 2


both_modes = pytest.mark.parametrize("graph", [False, True], ids=["tree", "graph"])


@both_modes
@pytest.mark.parametrize(
    "make",
    [
        Linear,
        lambda: Linear(tag="a"),
        lambda: Holder([Linear(), {"a": tt.Param(1.0)}], note=["unhashable"]),
        lambda: tt.List([Linear(), doubled]),
        lambda: tt.Param(1.0),
        lambda: [1, None, (2.0,)],
    ],
)
def test_equal_structures_have_equal_graphdefs_and_hashes(graph, make):
    one, two = tt.graphdef(make(), graph=graph), tt.graphdef(make(), graph=graph)
    assert one is not two
    assert one == two
    assert hash(one) == hash(two)
    same = pickle.loads(pickle.dumps(one))
    assert same == one
    assert hash(same) == hash(one)


@both_modes
@pytest.mark.parametrize(
    "other",
    [
        Other(),
        Linear(dout=4),
        Linear(tag="a"),
        Holder(Linear()),
        [Linear()],
        tt.Param(1.0),
    ],
)
def test_other_structures_have_other_graphdefs(graph, other):
    assert tt.graphdef(Linear(), graph=graph) != tt.graphdef(other, graph=graph)


def test_kinds_modes_sharing_and_values_are_told_apart():
    assert tt.graphdef([tt.Param(1)]) != tt.graphdef([tt.BatchStat(1)])
    assert tt.graphdef([1]) != tt.graphdef((1,))
    assert tt.graphdef(Linear()) != tt.graphdef(Linear(), graph=True)
    assert tt.graphdef(Linear()) != "something else"
    shared = tt.Param(1)
    alone = [tt.Param(1), tt.Param(1)]
    assert tt.graphdef([shared, shared], graph=True) != tt.graphdef(alone, graph=True)
    assert tt.graphdef([tt.Param(1)]) == tt.graphdef([tt.Param(jnp.ones(5))])


@both_modes
def test_the_order_of_assignment_does_not_count(graph):
    one, two = Holder(1), Holder(1)
    one.a, one.b = 1, tt.Param(2)
    two.b, two.a = tt.Param(2), 1
    assert tt.graphdef(one, graph=graph) == tt.graphdef(two, graph=graph)


@both_modes
def test_the_order_of_dict_keys_does_not_count(graph):
    one = tt.graphdef({"a": tt.Param(1), "b": tt.Param(2)}, graph=graph)
    two = tt.graphdef({"b": tt.Param(2), "a": tt.Param(1)}, graph=graph)
    assert one == two
    assert hash(one) == hash(two)


def test_a_change_of_metadata_is_seen():
    linear = Linear()
    before = tt.graphdef(linear)
    assert tt.graphdef(linear) == before
    linear.w.set_metadata(tag="a")
    assert tt.graphdef(linear) != before
    linear.w = tt.BatchStat(1.0)
    assert tt.graphdef(linear) != before
    linear.w = tt.Param(1.0)
    assert tt.graphdef(linear) == before


def test_a_graphdef_is_a_pytree_without_leaves():
    graphdef = tt.graphdef(Linear())
    assert jax.tree.leaves(graphdef) == []
    assert jax.tree.map(lambda x: x, [graphdef])[0] == graphdef


def test_text_shows_classes_statics_metadata_and_sharing():
    linear = Linear(tag="a")
    text = repr(tt.graphdef({"x": linear, "y": [linear], "z": 1.0}, graph=True))
    assert text == (
        "GraphDef(graph, 2 leaves\n"
        "  (root): dict\n"
        "    x: Linear(dout=3)\n"
        "      w: Param{'tag': 'a'}\n"
        "    y: list\n"
        "      0: the same as number 0\n"
        "    z: leaf\n"
        ")"
    )
    assert (
        repr(tt.graphdef(tt.Param(1))) == "GraphDef(tree, 1 leaves\n  (root): Param\n)"
    )


@both_modes
@pytest.mark.parametrize("how", [{}, {"static_argnums": 0}])
def test_a_jitted_function_of_a_split_object_is_traced_once(graph, how):
    traces = []

    def call(graphdef, state, x):
        traces.append(1)
        return x @ tt.merge(graphdef, state).part[0].w

    jitted = jax.jit(call, **how)
    for value in range(3):
        model = Holder([Linear()])
        model.part[0].w[...] = jnp.full((2, 3), float(value))
        out = jitted(*tt.split(model, graph=graph), jnp.ones((1, 2)))
        assert out[0, 0] == 2 * value
    assert len(traces) == 1
    jitted(*tt.split(Holder([Linear()], note="new"), graph=graph), jnp.ones((1, 2)))
    assert len(traces) == 2


def test_a_graphdef_made_inside_jit_comes_out():
    @jax.jit
    def make():
        return tt.split(Linear())

    merged = tt.merge(*make())
    merged.w[...] = jnp.zeros((2, 3))
    assert merged.w.shape == (2, 3)


def test_a_state_with_another_name_is_refused_by_both_names():
    graphdef, state = tt.split(Linear())
    first, *rest = tt.to_flat_state(state).paths
    wrong = {path[0]: state[path[0]] for path in rest} | {"other": state[first[0]]}
    message = rf"(?s)merge: the state does not fit.*missing {first[0]}.*unexpected oth"
    with pytest.raises(tt.StructureError, match=message):
        tt.merge(graphdef, wrong)


def test_a_variable_of_an_object_that_was_walked_before_may_not_be_elsewhere():
    inner = Linear()
    tt.split(inner)
    with pytest.raises(tt.AliasError, match="split: Duplicate Param found at paths "):
        tt.split({"a": inner.w, "b": inner})
    inner.w = tt.Param(jnp.zeros((2, 3)))
    assert tt.split({"b": inner})[1]["b"]["w"].sum() == 0


def test_a_module_in_itself_is_a_cycle_error():
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


def test_an_indirect_cycle_is_a_cycle_error_too():
    model = Model()
    model.parts = tt.data({"deep": [Noise()]})
    model.parts["deep"][0].back = model
    with pytest.raises(tt.CycleError, match=r"paths \(root\) and parts/deep/0/back"):
        list(tt.iter_modules(model))
    model.eval()
    assert model.parts["deep"][0].deterministic is True


def test_a_cycle_through_a_plain_list_is_a_cycle_from_wherever_it_is_met():
    held = Noise()
    around = [held]
    held.inside = tt.data(around)
    for name, look in [("split", tt.split), ("iter_graph", tt.iter_graph)]:
        with pytest.raises(tt.CycleError, match=rf"{name}: .*paths 0 and 0/inside/0 "):
            look(around)
