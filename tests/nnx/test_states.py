# SPDX-License-Identifier: Apache-2.0
"""`nnx.update` and `nnx.merge_state`: they take more than those of treetap."""

import jax
import jax.numpy as jnp
import pytest

import treetap as tt
from treetap import nnx


class Net(nnx.Module):
    def __init__(self):
        self.up = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        self.plain = jnp.ones(2)
        self.items = nnx.data({"a": jnp.zeros(2)})
        self.size = 3


def test_a_model_is_cast_by_an_update():
    net = Net()
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(net))
    with pytest.raises(tt.StructureError, match="dtype bfloat16, expected float32"):
        tt.update(net, half)
    nnx.update(net, half)
    assert net.up.kernel.dtype == net.plain.dtype == jnp.bfloat16
    assert net.items["a"].dtype == jnp.bfloat16


def test_shapes_may_change():
    net = Net()
    nnx.update(net, {"up": {"kernel": nnx.Param(jnp.ones((5, 3)))}})
    assert net.up.kernel.shape == (5, 3)
    nnx.update(net, {"up": {"kernel": jnp.ones((4, 3))}}, {"plain": jnp.ones(7)})
    assert (net.up.kernel.shape, net.plain.shape) == ((4, 3), (7,))


def test_variables_may_be_new_and_statics_set():
    net = Net()
    nnx.update(net, {"up": {"seen": nnx.Intermediate(1.0)}, "size": 4})
    assert (net.up.seen[...], net.size) == (1.0, 4)
    taken = nnx.pop(net, nnx.Intermediate)
    assert not hasattr(net.up, "seen")
    nnx.update(net, taken)
    assert net.up.seen[...] == 1.0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"up": {"kernle": jnp.ones(3)}}, "unexpected up/kernle"),
        ({"side": {"kernel": nnx.Param(1.0)}}, "unexpected side"),
        ({"size": jnp.ones(3)}, "size is static"),
        ({"up": 3.0}, "up: a float where a Linear stands"),
        ({"items": {"b": jnp.ones(3)}}, "unexpected items/b"),
    ],
    ids=str,
)
def test_what_is_nowhere_is_refused_here_too(wrong, words):
    net = Net()
    before = nnx.state(nnx.clone(net))
    with pytest.raises(tt.StructureError, match=f"nothing was changed.\n.*{words}"):
        nnx.update(net, {"plain": jnp.zeros(2)}, wrong)
    assert nnx.state(net) == before


def test_nothing_is_set_from_another_trace():
    net = Net()
    for state in ({"size": 4}, {"up": {"seen": nnx.Cache(1.0)}}):
        with pytest.raises(tt.TraceContextError):
            jax.jit(lambda state=state: nnx.update(net, state))()


def test_the_later_of_two_values_wins():
    first = nnx.state(Net(), nnx.Param)
    second = jax.tree.map(lambda x: x + 1, first)
    with pytest.raises(tt.StructureError, match="two States have a value at"):
        tt.merge_state(first, second)
    assert nnx.merge_state(first, second) == second
    assert nnx.merge_state(first) is first
    parts = nnx.split_state(first, nnx.PathContains("bias"), ...)
    assert nnx.merge_state(*parts, cls=dict) == first
    with pytest.raises(tt.StructureError, match="a path can be only one of them"):
        nnx.merge_state({"a": 1}, {"a": {"b": 1}})
