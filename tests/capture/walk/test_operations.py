# SPDX-License-Identifier: Apache-2.0
"""Loops that keep their iterations, branches that know their rows, paths kept."""

import jax
import jax.numpy as jnp
import pytest

import treetap as tt

X = jnp.array([0.5, 1.0, 2.0, 3.0])


def doubled_until(limit):
    def loop(x):
        return jax.lax.while_loop(lambda c: c < limit, lambda c: tt.tap(c, "c") * 2, x)

    return loop


@pytest.mark.parametrize("jitted", [False, True])
def test_a_while_loop_may_keep_its_first_iterations(jitted):
    loop = doubled_until(9.0)
    fn = jax.jit(loop) if jitted else loop
    out, record = tt.observe(fn, max_iterations=5)(2.0)
    assert out == 16.0
    assert record["c"].value.tolist() == [2, 4, 8, 0, 0]
    assert record["c"].count == 3


def test_iterations_beyond_the_maximum_are_left_out():
    _, record = tt.observe(doubled_until(100.0), max_iterations=2)(1.0)
    assert record["c"].value.tolist() == [1, 2]
    assert record["c"].count == 7


def test_a_mapped_while_loop_keeps_iterations_row_by_row():
    mapped = jax.vmap(doubled_until(9.0))
    out, record = tt.observe(mapped, max_iterations=4)(X)
    assert out.tolist() == jax.vmap(doubled_until(9.0))(X).tolist()
    rows = [[0.5, 1, 2, 4], [1, 2, 4, 8], [2, 4, 8, 0], [3, 6, 0, 0]]
    assert record["c"].value.tolist() == rows
    assert record["c"].count.tolist() == [5, 4, 3, 2]


def branched(x):
    twice = lambda x: tt.tap(x * 2, "twice")
    thrice = lambda x: tt.tap(x * 3, "thrice")
    return tt.cond(x > 1.5, twice, thrice, x)


def test_a_mapped_branch_of_ours_knows_which_rows_took_it():
    out, record = tt.observe(jax.vmap(branched))(X)
    assert out.tolist() == [1.5, 3, 4, 6]
    assert record["twice"].taken.tolist() == [False, False, True, True]
    assert record["thrice"].taken.tolist() == [True, True, False, False]


def test_a_mapped_switch_of_ours_knows_which_rows_took_a_branch():
    def fn(x):
        branches = [
            lambda x: tt.tap(x, "low"),
            lambda x: -x,
            lambda x: tt.tap(x, "high"),
        ]
        return tt.switch(x.astype(int), branches, x)

    _, record = tt.observe(jax.vmap(fn))(X)
    assert record["low"].taken.tolist() == [True, False, False, False]
    assert record["high"].taken.tolist() == [False, False, True, True]


@pytest.mark.parametrize(("x", "name"), [(1.0, "thrice"), (2.0, "twice")])
def test_a_branch_that_is_not_mapped_is_taken_or_not(x, name):
    for fn in (branched, jax.jit(branched)):
        _, record = tt.observe(fn)(jnp.array(x))
        assert {site.text for site in record if site.taken} == {name}


def test_gradients_in_a_mapped_branch_are_those_of_the_rows_that_took_it():
    loss = lambda x: jax.vmap(branched)(x).sum()
    _, record = tt.observe(jax.grad(loss), grads=True)(X)
    assert record["twice"].grad.tolist() == [0, 0, 1, 1]
    assert record["thrice"].grad.tolist() == [1, 1, 0, 0]


class Layer(tt.Module):
    def __init__(self):
        self.w = tt.Param(jnp.array(2.0))

    def __call__(self, x):
        return self.w * x


class Net(tt.Module):
    """Hands a child alone to a transform."""

    def __init__(self, wrap):
        self.layers = tt.List([Layer(), Layer()])
        self.wrap = wrap

    def __call__(self, x):
        return self.wrap(lambda layer, x: layer(x))(self.layers[1], x)


WRAPS = {
    "remat": tt.remat,
    "vmap": lambda f: tt.vmap(f, in_axes=(None, 0)),
    "vjp": lambda f: lambda *args: tt.vjp(f, *args)[0],
    "checkify": lambda f: lambda *args: tt.checkify(f)(*args)[1],
    "cond": lambda f: lambda *args: tt.cond(True, f, lambda layer, x: x, *args),
}


@pytest.mark.parametrize("name", WRAPS)
def test_a_child_that_goes_alone_through_our_transforms_keeps_its_path(name):
    _, record = tt.observe(Net(WRAPS[name]))(X)
    assert record[0].text == "layers/1:__call__"
    assert record[0].value.tolist() == (2 * X).tolist()


def test_a_child_that_goes_alone_through_jit_is_called_by_its_class():
    _, record = tt.observe(Net(tt.jit))(X)
    assert record[0].text == "Layer:__call__"


def test_several_values_under_nested_remat_have_gradients_of_their_own():
    def fn(x):
        return tt.tap(jnp.sin(tt.tap(2 * x, "inner")), "outer") ** 2

    twice = jax.checkpoint(jax.checkpoint(fn))
    _, record = tt.observe(jax.grad(twice), grads=True)(0.5)
    outer = 2 * jnp.sin(1.0)
    assert jnp.allclose(record["outer"].grad, outer)
    assert jnp.allclose(record["inner"].grad, outer * jnp.cos(1.0))
