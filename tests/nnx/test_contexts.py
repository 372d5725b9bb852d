# SPDX-License-Identifier: Apache-2.0
"""Update contexts, and objects as pure trees: to_tree, from_tree, NodeStates."""

import pickle
import threading

import jax
import jax.numpy as jnp
import pytest

import treetap as tt
from treetap import nnx


class Part(tt.Module):
    def __init__(self, w=1.0):
        self.w = tt.Param(jnp.array(w))


class Model(tt.Module):
    def __init__(self):
        self.a = Part(1.0)
        self.b = Part(2.0)
        self.n = tt.BatchStat(jnp.array(0.0))


def own_jit(fn, traces):
    """A jit with graph updates, written with the contexts."""

    @jax.jit
    def inner(graphdef, state):
        traces.append(1)
        with nnx.merge_context("own", inner=True) as ctx:
            model = ctx.merge(graphdef, state)
        out = fn(model)
        with nnx.split_context("own") as ctx:
            return ctx.split(model), out

    @nnx.update_context("own")
    def call(model):
        with nnx.split_context("own") as ctx:
            graphdef, state = ctx.split(model)
        pure, out = inner(graphdef, state)
        with nnx.merge_context("own", inner=False) as ctx:
            assert ctx.merge(*pure) is model
        return out

    return call


def test_a_jit_of_ones_own_carries_structure_out_also_when_cached():
    def swap(model):
        model.a, model.b = model.b, model.a
        model.a.w[...] = model.a.w * 10
        return model.b.w + 1

    traces, model = [], Model()
    a, b, w = model.a, model.b, model.a.w
    call = own_jit(swap, traces)
    assert float(call(model)) == 2.0
    assert model.a is b
    assert model.b is a
    assert float(call(model)) == 21.0
    assert model.a is a
    assert model.a.w is w
    assert (float(a.w), float(b.w)) == (10.0, 20.0)
    assert traces == [1]


def test_new_and_shared_parts_come_out_of_a_context():
    def grow(model):
        model.c = Part(model.a.w * 3)
        model.same = model.c
        model.me = model
        del model.b

    traces, model = [], Model()
    own_jit(grow, traces)(model)
    assert model.c is model.same
    assert model.me is model
    assert float(model.c.w) == 3.0
    assert not hasattr(model, "b")


def test_other_objects_of_the_same_structure_use_the_same_program():
    def count(model):
        model.n[...] = model.n + 1

    traces, one, two = [], Model(), Model()
    call = own_jit(count, traces)
    for model in (one, two, one):
        call(model)
    assert (float(one.n), float(two.n)) == (2.0, 1.0)
    assert traces == [1]


def test_several_objects_are_split_in_one_numbering():
    model = Model()
    with nnx.split_context() as ctx:
        whole = ctx.split(model)
        part = ctx.split(model.a)
    assert len(jax.tree.leaves(part[1])) == 0
    with nnx.merge_context() as ctx:
        merged = ctx.merge(*whole)
        again = ctx.merge(*part)
    assert again is merged.a
    assert merged is not model


def test_a_context_splits_by_filters():
    model = Model()
    with nnx.split_context() as ctx:
        graphdef, params, rest = ctx.split(model, nnx.Param, ...)
    assert sorted(params) == ["a", "b"]
    assert list(rest) == ["n"]
    with nnx.merge_context() as ctx:
        merged = ctx.merge(graphdef, params, rest)
    assert float(merged.b.w) == 2.0


def test_a_context_is_found_by_its_tag():
    with nnx.update_context("outer") as outer, nnx.update_context("inner") as inner:
        assert nnx.current_update_context("outer") is outer
        assert nnx.current_update_context("inner") is inner
        with nnx.update_context("outer") as again:
            assert nnx.current_update_context("outer") is again
        assert nnx.current_update_context("outer") is outer
    with pytest.raises(ValueError, match=r"No update context is open for .*'outer'"):
        nnx.current_update_context("outer")


@pytest.mark.parametrize("context", [nnx.split_context, nnx.merge_context])
def test_a_tag_that_is_not_open_is_refused(context):
    with pytest.raises(ValueError, match="'absent'"), context("absent"):
        pass


def test_a_context_belongs_to_its_thread_and_ends_with_an_exception():
    found = []

    def look():
        try:
            nnx.current_update_context("mine")
        except ValueError as error:
            found.append(error)

    with nnx.update_context("mine"):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert len(found) == 1
    with pytest.raises(KeyError), nnx.update_context("mine"):
        raise KeyError
    look()
    assert len(found) == 2


def test_a_merge_that_does_not_fit_changes_nothing():
    model = Model()
    a = model.a
    with nnx.update_context("own"):
        with nnx.split_context("own") as ctx:
            pure = ctx.split(model)
        with nnx.merge_context("own") as ctx:
            inner = ctx.merge(*pure)
        inner.a, inner.b = inner.b, inner.a
        with nnx.split_context("own") as ctx:
            graphdef, state = ctx.split(inner)
        with (
            nnx.merge_context("own") as ctx,
            pytest.raises(ValueError, match="missing"),
        ):
            ctx.merge(graphdef, nnx.State({"n": state["n"]}))
    assert model.a is a


def test_objects_outside_are_split_in_one_block():
    one, two = Part(1.0), Part(2.0)
    with nnx.update_context("own"):
        with nnx.split_context("own") as ctx:
            assert len([ctx.split(one), ctx.split(two)]) == 2
        with (
            nnx.split_context("own") as ctx,
            pytest.raises(ValueError, match="'own' in another block"),
        ):
            ctx.split(two)


# Pure trees.


def test_a_tree_keeps_what_is_shared():
    model = Model()
    pure = nnx.to_tree((model, 1, {"b": model, "part": model.a}))
    assert isinstance(pure[0], nnx.NodeStates)
    assert pure[1] == 1
    assert len(jax.tree.leaves(pure[2])) == 0
    first, one, held = nnx.from_tree(pure)
    assert held["b"] is first
    assert held["part"] is first.a
    assert one == 1
    assert first is not model
    assert float(first.b.w) == 2.0


def test_a_tree_passes_through_plain_jax():
    model = Model()

    @jax.jit
    def f(pure, x):
        model, other = nnx.from_tree(pure)
        assert model.a is other
        other.w[...] = other.w * x
        return nnx.to_tree((model, other))

    inner, part = nnx.from_tree(f(nnx.to_tree((model, model.a)), 5.0))
    assert inner.a is part
    assert (float(part.w), float(model.a.w)) == (5.0, 1.0)


def test_with_a_tag_a_tree_gives_the_objects_back():
    @jax.jit
    def f(pure):
        (model,) = nnx.from_tree(pure, ctxtag="own", is_inner=True)
        model.a, model.b = model.b, model.a
        return nnx.to_tree((model, Part(7.0)), ctxtag="own")

    model = Model()
    a = model.a
    for _ in range(2):
        with nnx.update_context("own"):
            out = f(nnx.to_tree((model,), ctxtag="own"))
            same, new = nnx.from_tree(out, ctxtag="own", is_inner=False)
        assert same is model
        assert float(new.w) == 7.0
    assert model.a is a


def split_by_kind(ctx, path, prefix, leaf):
    return nnx.NodeStates.from_split(*ctx.split(leaf, nnx.Param, ...), metadata=prefix)


def test_a_node_may_be_split_into_several_states():
    model = tt.Dict(w=tt.Param(jnp.arange(3.0)), n=tt.BatchStat(jnp.array(1.0)))
    pure = nnx.to_tree({"m": model}, split_fn=split_by_kind)
    assert len(pure["m"].states) == 2
    axes = {"m": nnx.NodeStates.from_prefixes([0, None])}

    def f(pure):
        model = nnx.from_tree(pure)["m"]
        return model.w * 2 + model.n

    assert jax.vmap(f, in_axes=(axes,))(pure).tolist() == [1.0, 3.0, 5.0]


def test_the_prefix_of_a_leaf_reaches_the_function_that_splits_it():
    one, two = Model(), Part()
    pure = nnx.to_tree((one, [two]), prefix=("p", "q"), split_fn=split_by_kind)
    assert (pure[0].metadata, pure[1][0].metadata) == ("p", "q")


def test_paths_and_other_leaves_reach_the_functions():
    seen = []

    def split(ctx, path, prefix, leaf):
        seen.append(path)
        return leaf

    nnx.to_tree({"a": [Part(), 3]}, split_fn=split)
    nnx.to_tree({"a": [Part(), 3]}, split_fn=split, map_non_graph_nodes=True)
    assert seen == [("a", 0), ("a", 0), ("a", 1)]
    merged = nnx.from_tree(
        [1, 2], merge_fn=lambda ctx, path, prefix, leaf: leaf * 10
    ) + nnx.from_tree(
        [1, 2],
        merge_fn=lambda ctx, path, prefix, leaf: leaf * 10,
        map_non_graph_nodes=True,
    )
    assert merged == [1, 2, 10, 20]


def test_a_shared_variable_must_have_one_prefix():
    part = Part()
    given = (tt.Dict(p=part), part)
    with pytest.raises(ValueError, match="Inconsistent aliasing"):
        nnx.to_tree(given, prefix=(0, 1))
    assert nnx.to_tree(given, prefix=(0, 0))
    assert nnx.to_tree(given, prefix=(0, 1), check_aliasing=False)


def test_node_states_hold_one_or_several_states():
    graphdef, state = nnx.split(Part())
    one = nnx.NodeStates.from_split(graphdef, state)
    assert one.state is state
    assert one.graphdef == graphdef
    two = nnx.NodeStates.from_states(state, state)
    assert two.states == (state, state)
    with pytest.raises(ValueError, match="2 states"):
        two.state


def test_definitions_that_know_their_origins_are_values():
    @nnx.update_context("values")
    def definition(model, grow):
        with nnx.split_context("values") as context:
            graphdef, state = context.split(model)
        with nnx.merge_context("values") as context:
            inside = context.merge(graphdef, state)
        inside.more = grow
        with nnx.split_context("values") as context:
            return context.split(inside)[0]

    model = Model()
    one, again, other = (definition(model, grow) for grow in (1, 1, 2))
    assert one == again
    assert hash(one) == hash(again)
    assert one != other
    assert one != nnx.split(model)[0]
    copied = pickle.loads(pickle.dumps(one))
    assert (copied, copied.origins) == (one, one.origins)


class Keyed:
    """A container whose keys are of no class of JAX's."""

    def __init__(self, item):
        self.item = item


jax.tree_util.register_pytree_with_keys(
    Keyed, lambda box: ((("inner", box.item),), None), lambda _, items: Keyed(*items)
)


def test_keys_of_any_class_are_parts_of_paths():
    paths = []

    def split(context, path, prefix, leaf):
        paths.append(path)
        return nnx.NodeStates.from_split(*context.split(leaf))

    tree = {"a": Keyed(tt.Param(1.0))}
    nnx.to_tree(tree, split_fn=split)
    assert paths == [("a", "inner")]
    assert [path for path, _ in tt.iter_graph(tree)] == [("a", "inner"), ("a",), ()]
