# SPDX-License-Identifier: Apache-2.0
"""Rows: which programs fit their values, what all patches give, and what they weigh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from treetap._observe.sweep.flat import flattened
from treetap._observe.sweep.points import Unsuited, point
from treetap._observe.sweep.rows import Patched, check_points, run_once, weigh

X = jnp.array([0.3, -0.7, 1.1])
CLEAN = {(0, ()): X * 2, (1, ()): X + 1}


def in_a_row(x):
    x = point(jnp.sin(x), 0)
    return [jnp.sum(point(x * x, 1) * jnp.cos(x))]


def flat_of(fn):
    return flattened(fn, [jax.typeof(X)])


def test_points_and_their_values_go_together():
    check_points(flat_of(in_a_row), CLEAN)
    check_points(flat_of(lambda x: [x.sum()]), CLEAN)  # where no patch comes


@pytest.mark.parametrize(
    ("clean", "message"),
    [
        ({(0, ()): X}, "the value of a site is of another type"),
        (CLEAN | {(1, ()): X[:2]}, "the value of a site is of another type"),
        (CLEAN | {(0, ()): jnp.arange(3)}, "the value of a site is of another type"),
    ],
)
def test_values_that_do_not_fit_are_refused(clean, message):
    with pytest.raises(Unsuited, match=message):
        check_points(flat_of(in_a_row), clean)


def test_a_site_that_is_there_twice_is_refused():
    with pytest.raises(Unsuited, match="a site is in the program more than once"):
        check_points(flat_of(lambda x: in_a_row(in_a_row(x)[0] + x)), CLEAN)


def by_hand(patch, place):
    """The result with a patch at a place, or at all."""

    def put(x, number):
        at = jnp.arange(3) == place if place is not None else True
        return jnp.where(at, CLEAN[number, ()], x) if patch == number else x

    x = put(jnp.sin(X), 0)
    return jnp.sum(put(x * x, 1) * jnp.cos(x))


@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize("chosen", [[0, 1], [1]])
def test_all_patches_at_once_are_those_of_each(axis, chosen):
    flat = flat_of(in_a_row)
    patched = Patched(
        flat, run_once(flat, [X]), CLEAN, axis, [(number, ()) for number in chosen]
    )
    places = range(3) if axis == 0 else [None]
    found = patched.results(jnp.arange(len(places)))
    wanted = [[by_hand(number, place) for place in places] for number in chosen]
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_a_result_that_no_patch_comes_to_is_as_it_was():
    flat = flat_of(lambda x: [x.sum()])
    patched = Patched(flat, run_once(flat, [X]), CLEAN, None, [*CLEAN])
    np.testing.assert_allclose(
        patched.results(jnp.arange(1)), jnp.full((2, 1), X.sum())
    )


def sorted_twice(x):
    return jax.lax.sort(jax.lax.sort(x))


def test_a_row_weighs_what_comes_after_its_point():
    before = weigh(flat_of(lambda x: [jnp.sum(point(sorted_twice(x), 0))]))
    after = weigh(flat_of(lambda x: [jnp.sum(sorted_twice(point(x, 0)))]))
    assert before.fixed == after.fixed == 3 * 12 + 4
    assert before.rows.max() < after.rows.max() == 24
    assert after.peak(4) - after.peak(2) == 1.5 * 2 * 24
    assert after.peak(4, 0.5) == after.peak(2)


def test_what_is_computed_with_its_neighbours_weighs_nothing():
    apart = weigh(flat_of(lambda x: [jnp.sum(sorted_twice(x))]))
    together = weigh(flat_of(lambda x: [jnp.sum(jnp.sin(jnp.cos(x)))]))
    assert (apart.fixed, together.fixed) == (2 * 12 + 4, 4)
