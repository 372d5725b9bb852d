# SPDX-License-Identifier: Apache-2.0
"""What loops carry: plain arrays of objects, and Variables that change places."""

import jax
import jax.numpy as jnp
import pytest

import treetap as tt
from modes import ALL_MODES, SIMPLE_MODES, UPDATES
from treetap import nnx


class Point(tt.Pytree):
    def __init__(self):
        self.at = tt.data(jnp.array(1.0))
        self.steps = tt.Variable(jnp.array(0.0))


class Pair(tt.Module):
    def __init__(self):
        self.x = tt.Param(jnp.array(2.0))
        self.y = tt.Param(jnp.array(3.0))


class Pairs(tt.Module):
    def __init__(self):
        self.a, self.b = Pair(), Pair()
        self.b.x[...] = 5.0


def by_scan(body, value, mode):
    out, _ = tt.scan(lambda v, t: (body(v), t), **mode)(value, jnp.arange(3.0))
    return out


def by_fori(body, value, mode):
    return tt.fori_loop(0, 3, lambda i, v: body(v), value, **mode)


def by_while(body, value, mode):
    pair = (value, jnp.array(0))
    step = lambda pair: (body(pair[0]), pair[1] + 1)
    return tt.while_loop(lambda pair: pair[1] < 3, step, pair, **mode)[0]


LOOPS = pytest.mark.parametrize("loop", [by_scan, by_fori, by_while])
MOVING = pytest.mark.parametrize("loop", [by_scan, by_fori])


def move(point):
    point.at = point.at + 1
    point.steps[...] += 1
    return point


@LOOPS
@ALL_MODES
def test_an_array_that_a_step_replaces_is_carried(loop, mode):
    point = Point()
    out = loop(move, point, mode)
    assert (float(out.at), float(out.steps)) == (4.0, 3.0)
    assert out.steps is point.steps
    assert (out is point) == (mode is UPDATES)
    assert float(point.at) == (4.0 if mode is UPDATES else 1.0)


@LOOPS
@SIMPLE_MODES
def test_arrays_in_a_list_of_the_carry_are_carried(loop, mode):
    class Held(tt.Pytree):
        def __init__(self):
            self.items = tt.data([jnp.array(0.0), jnp.array(1.0)])

    def step(held):
        held.items[0] = held.items[0] + 1
        return held

    assert [float(x) for x in loop(step, Held(), mode).items] == [3.0, 1.0]


@LOOPS
@SIMPLE_MODES
def test_a_step_may_not_replace_a_variable(loop, mode):
    def step(pair):
        pair.x = tt.Param(pair.x + 1)
        return pair

    message = "x was replaced"
    with pytest.raises(tt.StructureError, match=message):
        loop(step, Pair(), mode)
    options = {**mode, "on_structure_change": "ignore"}
    with pytest.raises(tt.StructureError, match="identity must be preserved"):
        loop(step, Pair(), options)


@LOOPS
@SIMPLE_MODES
def test_a_step_may_not_remove_what_it_carries(loop, mode):
    def step(pair):
        del pair.y
        return pair

    options = {**mode, "on_structure_change": "ignore"}
    with pytest.raises(tt.StructureError, match="the carry changed its structure"):
        loop(step, Pair(), options)


@pytest.mark.parametrize("change", ["replace", "swap"])
def test_while_refuses_variables_in_other_places_with_graph_updates(change):
    def step(pair):
        if change == "replace":
            pair.x = tt.Param(pair.x + 1)
        else:
            pair.x, pair.y = pair.y, pair.x
        return pair

    pair = Pair()
    with pytest.raises(tt.StructureError, match="identity must be preserved"):
        by_while(step, pair, UPDATES)
    assert (float(pair.x), float(pair.y)) == (2.0, 3.0)


@MOVING
def test_with_graph_updates_a_step_may_make_a_variable_anew(loop):
    def step(pair):
        pair.x = tt.Param(pair.x + 1)
        return pair

    pair = Pair()
    x = pair.x
    assert loop(step, pair, UPDATES) is pair
    assert pair.x is not x
    assert (float(pair.x), float(x)) == (5.0, 2.0)


@MOVING
def test_with_graph_updates_a_step_may_swap_variables(loop):
    def step(pair):
        pair.x, pair.y = pair.y, pair.x
        return pair

    pair = Pair()
    x, y = pair.x, pair.y
    assert loop(step, pair, UPDATES) is pair
    assert pair.x is y
    assert pair.y is x
    assert (float(pair.x), float(pair.y)) == (3.0, 2.0)


@MOVING
def test_with_graph_updates_a_step_may_swap_and_replace_objects(loop):
    def swap(pairs):
        pairs.a, pairs.b = pairs.b, pairs.a
        return pairs

    def renew(pairs):
        new = Pair()
        new.x[...] = pairs.a.x + 1
        pairs.a = new
        return pairs

    pairs = Pairs()
    a, b = pairs.a, pairs.b
    assert loop(swap, pairs, UPDATES) is pairs
    assert pairs.a is b
    assert (float(pairs.a.x), float(pairs.b.x)) == (5.0, 2.0)
    pairs = Pairs()
    a = pairs.a
    loop(renew, pairs, UPDATES)
    assert pairs.a is not a
    assert (float(pairs.a.x), float(a.x)) == (5.0, 2.0)


@MOVING
def test_with_graph_updates_a_state_may_be_made_anew(loop):
    pair = Pair()
    grown = loop(lambda s: jax.tree.map(lambda x: x + 1, s), tt.state(pair), UPDATES)
    assert (float(grown["x"]), float(grown["y"])) == (5.0, 6.0)
    assert (float(pair.x), float(pair.y)) == (2.0, 3.0)


@MOVING
def test_what_was_made_outside_may_not_be_carried_in(loop):
    other = tt.Param(jnp.array(9.0))

    def step(pair):
        pair.x = other
        return pair

    with pytest.raises(tt.StructureError, match="different trace level"):
        loop(step, Pair(), UPDATES)


def test_a_replaced_variable_keeps_its_metadata():
    def step(pair):
        pair.x = tt.Param(pair.x + 1, note=1)
        return pair

    with pytest.raises(tt.StructureError, match="the carry changed its structure"):
        by_fori(step, Pair(), UPDATES)


def test_streams_of_random_keys_that_are_not_mapped_over_are_the_same_in_each_step():
    def draw(rngs, x):
        return jax.random.uniform(rngs())

    rngs = nnx.Rngs(0)
    drawn = nnx.scan(draw, in_axes=(None, 0), out_axes=0)(rngs, jnp.arange(3.0))
    assert len(set(drawn.tolist())) == 1
    assert int(rngs.default.count) == 0
    drawn = tt.scan(draw, in_axes=(None, 0), out_axes=0)(rngs, jnp.arange(3.0))
    assert len(set(drawn.tolist())) == 3
    assert int(rngs.default.count) == 3


def test_a_stream_that_a_filter_carries_goes_on():
    def draw(rngs, n):
        return n + 1, jax.random.uniform(rngs())

    rngs = nnx.Rngs(0)
    axes = nnx.StateAxes({nnx.RngCount: nnx.Carry, ...: None})
    loop = nnx.scan(draw, in_axes=(axes, nnx.Carry), length=3)
    assert len(set(loop(rngs, 0)[1].tolist())) == 3
    assert int(rngs.default.count) == 3
