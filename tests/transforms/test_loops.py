# SPDX-License-Identifier: Apache-2.0
"""while_loop and fori_loop: what they carry, and what they refuse."""

import jax
import jax.numpy as jnp
import pytest

import treetap as tt
from modes import ALL_MODES, GRAPH_MODES


def add_to_first(pair):
    pair[0][...] += 1
    return pair


def test_loops_refuse_duplicates():
    v = tt.Param(jnp.array(1.0))
    with pytest.raises(ValueError, match=r"Duplicate Param(.|\n)*fori_loop"):
        tt.fori_loop(0, 3, lambda i, pair: add_to_first(pair), (v, v))
    with pytest.raises(ValueError, match=r"Duplicate Param(.|\n)*while_loop"):
        tt.while_loop(lambda pair: pair[0] < 4, add_to_first, (v, v))
    assert float(v) == 1.0


@GRAPH_MODES
def test_loops_handle_duplicates_in_graph_mode(mode):
    v = tt.Param(jnp.array(1.0))
    one, two = tt.fori_loop(0, 3, lambda i, p: add_to_first(p), (v, v), **mode)
    assert one is v
    assert two is v
    assert float(v) == 4.0
    tt.while_loop(lambda pair: pair[1] < 7, add_to_first, (v, v), **mode)
    assert float(v) == 7.0


LOOPS = {
    "scan None": lambda mark, v, mode: tt.scan(
        lambda v, x: mark(v), in_axes=(None, 0), out_axes=0, **mode
    )(v, jnp.arange(3.0)),
    "scan Carry": lambda mark, v, mode: tt.scan(lambda v, x: (v, mark(v)), **mode)(
        v, jnp.arange(3.0)
    ),
    "fori_loop": lambda mark, v, mode: tt.fori_loop(
        0, 3, lambda i, v: (mark(v), v)[1], v, **mode
    ),
    "while_loop": lambda mark, v, mode: tt.while_loop(
        lambda v: v < 3, lambda v: (mark(v), v)[1], v, **mode
    ),
}


@ALL_MODES
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_does_not_silently_drop_changed_metadata(mode, name):
    def mark(v):
        v.set_metadata(foo=1)
        v[...] += 1
        return v[...] * 2

    v = tt.Variable(jnp.array(0.0))
    try:
        LOOPS[name](mark, v, mode)
        wanted = (1, 3.0)
    except (TypeError, ValueError):  # refused: nothing has changed
        wanted = (None, 0.0)
    assert (v.get_metadata("foo", None), float(v)) == wanted


@ALL_MODES
def test_a_while_condition_may_not_change_variables(mode):
    v = tt.Variable(jnp.array(0))

    def holds(v):
        v[...] += 1
        return v < 3

    with pytest.raises(ValueError, match=r"while_loop(.|\n)*condition"):
        tt.while_loop(holds, lambda v: v, v, **mode)
    assert int(v) == 0


@ALL_MODES
def test_a_loop_traces_its_step_once(mode):
    v, calls = tt.Variable(jnp.array(0.0)), []

    def step(v):
        calls.append(1)
        v[...] += 1
        return v

    tt.fori_loop(0, 5, lambda i, v: step(v), v, **mode)
    tt.while_loop(lambda v: v < 9, step, v, **mode)
    assert (len(calls), float(v)) == (2, 9.0)


@ALL_MODES
@pytest.mark.parametrize("count", [0, 3])
def test_loops_write_what_changed_without_jit_too(mode, count):
    v = tt.Variable(jnp.array(0.0))

    def step(i, pair):
        pair[0][...] += i
        return pair[0], pair[1] + 1

    with jax.disable_jit():
        same, number = tt.fori_loop(0, count, step, (v, 0), **mode)
        tt.while_loop(lambda w: w < count, lambda w: step(1, (w, 0))[0], v, **mode)
    assert same is v
    assert (float(v), int(number)) == (float(count), count)
