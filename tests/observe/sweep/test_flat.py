# SPDX-License-Identifier: Apache-2.0
"""Flat programs: all points stand in one list, and the results are the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treetap as tt
from treetap._capture.walk import jax_compat
from treetap._observe.sweep.flat import flattened
from treetap._observe.sweep.points import Unsuited, point
from treetap._observe.sweep.rows import points_of, run_once

X = jnp.array([0.3, -0.7, 1.1])
W = jnp.array([1.0, 2.0, 3.0])


def marked(x, number=0):
    return point(jnp.sin(x), number)


def in_calls(x):
    ruled = jax.custom_vjp(lambda x: marked(x))
    ruled.defvjp(lambda x: (ruled(x), None), lambda _, ct: (ct,))
    inner = jax.checkpoint(lambda x: marked(x, 1) * x)
    return jax.jit(lambda x: ruled(jax.jit(inner)(x)))(x)


def scanned(x, reverse=False):
    def step(carry, w):
        return marked(carry * w), carry.sum()

    return jax.lax.scan(step, x, W, reverse=reverse)


def backwards(x):
    return scanned(x, reverse=True)


def nested(x):
    outer = lambda carry, w: (scanned(carry * w)[0], None)
    return jax.lax.scan(outer, x, W[:2])[0]


def without_turns(x):
    carry, sums = jax.lax.scan(lambda c, w: (marked(c), c * w), x, W[:0])
    return carry, sums


def with_loops_of_no_point(x):
    y = jax.lax.fori_loop(0, 3, lambda _, c: jnp.cos(c), x)
    z = jax.lax.scan(lambda c, w: (c * w, None), y, W)[0]
    return marked(jax.lax.cond(z[0] > 0, jnp.tanh, jnp.exp, z))


TURNS = {
    in_calls: [(1, ()), (0, ())],
    scanned: [(0, (0,)), (0, (1,)), (0, (2,))],
    backwards: [(0, (2,)), (0, (1,)), (0, (0,))],
    nested: [(0, (a, b)) for a in range(2) for b in range(3)],
    without_turns: [],
    with_loops_of_no_point: [(0, ())],
}


@pytest.mark.parametrize("fn", TURNS)
def test_a_flat_program_gives_the_same(fn):
    flat = flattened(lambda x: jax.tree.leaves(fn(x)), [jax.typeof(X)])
    assert [patch for _, patch in points_of(flat)] == TURNS[fn]
    env = run_once(flat, [X])
    for found, wanted in zip(flat.results, jax.tree.leaves(fn(X)), strict=True):
        value = jax_compat.read(env, found)
        np.testing.assert_allclose(value, wanted, rtol=1e-6, atol=1e-6)


def test_what_nobody_reads_is_left_out():
    flat = flattened(lambda x: (jnp.cos(x), [jnp.sin(x)])[1], [jax.typeof(X)])
    assert [eqn.primitive.name for eqn in flat.eqns] == ["sin"]


def in_a_branch(x):
    return jax.lax.cond(x[0] > 0, marked, jnp.cos, x)


def in_a_while(x):
    return jax.lax.while_loop(lambda c: c[0] < 1, lambda c: marked(c) + 1, x)


def differentiated(x):
    return jax.grad(lambda x: marked(x).sum())(x)


UNSUITED = {
    in_a_branch: "a site is inside the operation 'cond'",
    in_a_while: "a site is inside the operation 'while'",
    differentiated: "a site is differentiated",
}


@pytest.mark.parametrize("fn", UNSUITED)
def test_what_cannot_be_written_out_is_told(fn):
    with pytest.raises(Unsuited, match=UNSUITED[fn]):
        flattened(lambda x: [fn(x)], [jax.typeof(X)])


def of_branch(x):
    yes = lambda x: tt.tap(jnp.sin(x), "h")
    return jax.lax.cond(x[0] > 0, yes, jnp.cos, x) * x


def of_gradient(x):
    return jax.grad(lambda x: jnp.sum(tt.tap(x * x, "h") ** 2))(x)


@pytest.mark.parametrize("fn", [of_branch, of_gradient])
def test_what_cannot_be_written_out_is_patched_as_a_whole(fn):
    _, clean = tt.observe(fn)(X)
    worse = X + 0.5
    found = tt.patch_grid(fn, clean, (worse,), "h", jnp.sum)
    changed = tt.edit(fn, {"h": clean["h"]})(worse)
    wanted = jnp.sum(changed) - jnp.sum(fn(worse))
    np.testing.assert_allclose(found.effects, wanted[None], rtol=1e-4, atol=1e-5)
