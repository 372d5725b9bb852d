# SPDX-License-Identifier: Apache-2.0
"""Laws that hold for every model, over random trees and graphs."""

import copy
import pickle

import jax
import pytest
from hypothesis import assume, given

import treetap as tt
from strategies import all_variables, describe, filters, graphs, modules


def edges(model):
    return describe(model, {})


@given(modules, filters)
def test_merge_inverts_split(model, chosen):
    before = edges(model)
    again = tt.merge(*tt.split(model, *chosen))
    assert edges(again) == before
    assert again is not model


@given(graphs(), filters)
def test_merge_inverts_split_in_graph_mode(model, chosen):
    before = edges(model)
    again = tt.merge(*tt.split(model, *chosen, graph=True))
    assert edges(again) == before
    assert edges(model) == before


@given(modules, filters)
def test_split_is_a_partition(model, chosen):
    _, *states = tt.split(model, *chosen)
    whole = dict(tt.to_flat_state(tt.state(model)))
    parts = [dict(tt.to_flat_state(state)) for state in states]
    assert sum(map(len, parts)) == len(whole)
    united = {path: value for part in parts for path, value in part.items()}
    assert united.keys() == whole.keys()
    assert all(united[path] is whole[path] for path in whole)


@given(modules, filters)
def test_filtered_states_are_the_groups_of_split(model, chosen):
    _, *groups = tt.split(model, *chosen)
    states = tt.state(model, *chosen)
    states = states if isinstance(states, tuple) else (states,)
    assert list(states) == groups


@given(graphs())
def test_update_with_the_own_state_changes_nothing(model):
    before = edges(model)
    tt.update(model, tt.state(model, graph=True))
    assert edges(model) == before


@given(modules)
def test_update_with_a_copy_of_the_state_restores_it(model):
    before = edges(model)
    saved = tt.state(tt.clone(model))
    for variable in all_variables(model):
        raw = variable.get_raw_value()
        variable.set_value(raw + 1)
    tt.update(model, saved)
    assert edges(model) == before


@given(modules)
def test_update_takes_pure_dicts(model):
    before = edges(model)
    tt.update(model, tt.to_pure_dict(tt.state(model)))
    assert edges(model) == before


@given(graphs())
def test_clone_is_equal_and_shares_no_variable(model):
    copied = tt.clone(model, graph=True)
    assert edges(copied) == edges(model)
    own = set(map(id, all_variables(model)))
    assert own.isdisjoint(map(id, all_variables(copied)))


@given(graphs())
def test_clone_without_variables_shares_them_all(model):
    copied = tt.clone(model, variables=False, graph=True)
    assert edges(copied) == edges(model)
    assert set(map(id, all_variables(copied))) == set(map(id, all_variables(model)))


@given(modules)
def test_jax_flattening_round_trips(model):
    leaves, structure = jax.tree.flatten(model)
    again = jax.tree.unflatten(structure, leaves)
    assert edges(again) == edges(model)
    assert jax.tree.structure(again) == structure


@given(modules)
def test_jax_paths_follow_the_state(model):
    shown = [
        "/".join(
            str(getattr(k, "name", getattr(k, "idx", getattr(k, "key", k))))
            for k in path
        )
        for path, _ in jax.tree_util.tree_leaves_with_path(model)
    ]
    flat = tt.to_flat_state(tt.state(model))
    expected = [
        "/".join(map(str, path)) + ("/value" if isinstance(leaf, tt.Variable) else "")
        for path, leaf in flat
    ]
    assert sorted(shown) == sorted(expected)


@given(graphs())
def test_graph_mode_keeps_every_alias(model):
    duplicates = tt.find_duplicates(model, only=[tt.Variable, tt.Pytree])
    for copied in (
        tt.merge(*tt.split(model, graph=True)),
        tt.clone(model, graph=True),
        tt.view(model, graph=True),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
    ):
        found = tt.find_duplicates(copied, only=[tt.Variable, tt.Pytree])
        assert sorted(map(str, found)) == sorted(map(str, duplicates))


@given(graphs())
def test_tree_mode_refuses_exactly_what_is_shared(model):
    shared = tt.find_duplicates(model, only=[tt.Variable, tt.Pytree])
    meaningful = [
        paths for paths in shared if _leaf_count(model, paths[0]) or _is_cyclic(paths)
    ]
    for function in (tt.split, tt.state, tt.clone, tt.graphdef, tt.iter_modules):
        if meaningful:
            with pytest.raises(tt.AliasError, match="found at paths"):
                function(model)
        else:
            function(model)


def _reach(model, path):
    for key in path:
        if isinstance(model, tt.List | dict | list | tuple):
            model = model[key]
        else:
            model = getattr(model, key)
    return model


def _leaf_count(model, path):
    graphdef = tt.graphdef(_reach(model, path), graph=True)
    return graphdef.num_leaves


def _is_cyclic(paths):
    return any(
        long[: len(short)] == short
        for short in paths
        for long in paths
        if long != short
    )


@given(modules)
def test_graphdefs_of_equal_models_are_equal_and_hash_alike(model):
    one, two = tt.graphdef(model), tt.graphdef(tt.clone(model))
    assert one == two
    assert hash(one) == hash(two)
    assert one != tt.graphdef(model, graph=True)


@given(modules)
def test_flatten_and_unflatten_are_inverse(model):
    graphdef, flat = tt.flatten(model)
    assert edges(tt.unflatten(graphdef, flat)) == edges(model)
    graphdef, leaves = tt.flatten(model, with_paths=False)
    assert edges(tt.unflatten(graphdef, leaves)) == edges(model)


@given(modules, filters)
def test_pop_and_the_rest_make_the_whole(model, chosen):
    # plain sequences keep their length; refused by pop
    parts = [part for _, part in tt.iter_graph(model)]
    assume(not any(isinstance(part, list | tuple) for part in parts))
    whole = dict(tt.to_flat_state(tt.state(model)))
    # positions move when an item of a List goes
    assume(not any(isinstance(key, int) for path in whole for key in path))
    popped = dict(tt.to_flat_state(tt.pop(model, chosen[0])))
    rest = dict(tt.to_flat_state(tt.state(model)))
    assert popped.keys().isdisjoint(rest)
    assert {**popped, **rest}.keys() == whole.keys()


@given(graphs())
def test_a_failing_update_changes_nothing(model):
    before = edges(model)
    state = tt.state(
        tt.map(lambda path, leaf: _changed(leaf), model, graph=True), graph=True
    )
    state["no_such_name_anywhere"] = 1
    with pytest.raises(tt.StructureError, match="nothing was changed"):
        tt.update(model, state)
    assert edges(model) == before


def _changed(leaf):
    if isinstance(leaf, tt.Variable):
        return leaf.replace(leaf.get_raw_value() + 1)
    return leaf + 1


@given(graphs())
def test_a_failing_merge_names_what_is_wrong(model):
    graphdef, state = tt.split(model, graph=True)
    before = edges(model)
    flat = list(tt.to_flat_state(state))
    assume(flat)
    (path, _), *kept = flat
    with pytest.raises(tt.StructureError, match="missing " + "/".join(map(str, path))):
        tt.merge(graphdef, tt.from_flat_state(kept))
    assert edges(model) == before


@given(modules)
def test_recursive_map_with_identity_is_a_copy(model):
    copied = tt.recursive_map(lambda path, value: value, model)
    assert edges(copied) == edges(model)
    assert copied is not model


@given(modules)
def test_repr_shows_every_model(model):
    assert repr(model).startswith(type(model).__name__)


@given(modules)
def test_jit_traces_once_for_equal_structures(model):
    traces = []

    @jax.jit
    def run(model):
        traces.append(1)
        return model

    again = run(run(model))
    assert len(traces) == 1 or _has_numbers(model)
    assert jax.tree.structure(again) == jax.tree.structure(model)


def _has_numbers(model):
    """Python numbers become arrays on the way, which is another trace."""
    return any(not isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(model))
