# SPDX-License-Identifier: Apache-2.0
"""map and call: functions applied to the leaves, and to the object, of a split."""

import jax
import jax.numpy as jnp
import pytest

import treetap as tt
from stand_ins import PATHS, Net

both_modes = pytest.mark.parametrize("graph", [False, True], ids=["tree", "graph"])


def tied():
    net = Net()
    net.layers[0] = net.first
    return net


@both_modes
def test_map_replaces_every_leaf(graph):
    net = Net()
    seen = []

    def zeroed(path, leaf):
        seen.append(path)
        return jax.tree.map(jnp.zeros_like, leaf[...] if path != ("scale",) else leaf)

    mapped = tt.map(zeroed, net, graph=graph)
    assert tuple(seen) == PATHS
    assert type(mapped.first.w) is tt.Param
    assert mapped.first.w[0, 0] == 0
    assert net.first.w[0, 0] == 1
    assert mapped.first.dout == 3


@both_modes
def test_map_may_make_variables_of_another_kind(graph):
    def cached(path, leaf):
        return tt.Cache(leaf[...]) if isinstance(leaf, tt.Param) else leaf

    net = Net()
    mapped = tt.map(cached, net, graph=graph)
    assert (type(mapped.first.w), type(net.first.w)) == (tt.Cache, tt.Param)
    assert mapped.first.w[...] is net.first.w[...]
    state = tt.map(cached, tt.state(net, tt.Param), graph=graph)
    kinds = {type(leaf) for leaf in tt.to_flat_state(state).leaves}
    assert kinds == {tt.Cache}


def test_map_can_leave_values_bare_and_keeps_sharing():
    doubled = tt.map(lambda p, x: x * 2, [tt.Param(2)], recreate_variables=False)
    assert doubled == [4]
    mapped = tt.map(lambda path, leaf: leaf.copy(), tied(), graph=True)
    assert mapped.layers[0] is mapped.first
    assert tt.map(lambda path, leaf: leaf + 1, 1) == 2


@both_modes
def test_call_runs_a_method_functionally(graph):
    net = Net()
    parts = tt.split(net, graph=graph)
    (out, (graphdef, state)) = tt.call(parts)(jnp.ones(2))
    assert out.shape == (3,)
    assert graphdef == parts[0]
    assert state.calls[...] == 1
    part, _ = tt.call(parts).layers[0](jnp.ones(3))
    assert part.shape == (3,)
    assert type(graphdef) is tt.nnx.GraphDef  # `apply` comes with NNX's namespace
    same, _ = graphdef.apply(state).first(jnp.ones(2))
    assert same.shape == (3,)
    with pytest.raises(AttributeError, match="__len__"):
        tt.call(parts).__len__


class Tied(tt.Module):
    def __init__(self):
        self.a = self.b = tt.Param(1.0)

    def add(self, x):
        self.a[...] += x
        return self.b[...]


@pytest.mark.parametrize("mode", [False, True])
def test_apply_works_in_the_mode_of_its_graphdef(mode):
    graphdef, state = tt.split(Tied(), graph=True)
    with tt.set_graph_mode(mode):
        result, (after, changed) = graphdef.apply(state).add(2.0)
        assert tt.call((graphdef, changed)).add(1.0)[0] == 4.0
    assert result == 3.0
    assert after == graphdef
    merged = tt.merge(after, changed)
    assert merged.a is merged.b
