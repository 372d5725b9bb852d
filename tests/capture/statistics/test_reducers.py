# SPDX-License-Identifier: Apache-2.0
"""Statistics: of what each reducer measures, and of how parts are put together."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import treetap as tt
from treetap._capture.statistics.measures import figures_of
from treetap._capture.statistics.reduced import Placed, measured

REDUCERS = (
    tt.Moments(),
    tt.AbsMax(),
    tt.Histogram(bins=8, limits=(-2.0, 2.0)),
    tt.TopK(3),
    tt.DeadUnits(threshold=0.1),
    tt.Norm(),
    tt.NonFinite(),
    tt.AllFinite(),
)


def stats_of(value, *reducers):
    named = tuple((one.name, one) for one in reducers or REDUCERS)
    return measured(named, Placed(jnp.asarray(value))).stats


def whole(value, *reducers):
    named = tuple((one.name, one) for one in reducers or REDUCERS)
    return measured(named, Placed(jnp.asarray(value)))


SAMPLE = np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32)


def test_each_reducer_measures_what_its_name_says():
    stats = stats_of(SAMPLE)
    np.testing.assert_allclose(stats["moments"].mean, SAMPLE.mean(), rtol=1e-6)
    np.testing.assert_allclose(stats["moments"].variance, SAMPLE.var(), rtol=1e-6)
    np.testing.assert_allclose(stats["moments"].std, SAMPLE.std(), rtol=1e-6)
    assert stats["moments"].count == 30
    assert stats["abs_max"] == np.abs(SAMPLE).max()
    np.testing.assert_allclose(stats["norm"], np.linalg.norm(SAMPLE), rtol=1e-6)
    inside = np.clip(SAMPLE, -1.99, 1.99)
    counts, edges = np.histogram(inside, bins=8, range=(-2, 2))
    assert stats["histogram"].counts.tolist() == counts.tolist()
    assert stats["histogram"].edges.tolist() == edges.tolist()
    order = np.argsort(-np.abs(SAMPLE).ravel())[:3]
    assert stats["top_k"].values.tolist() == SAMPLE.ravel()[order].tolist()
    rows, columns = np.unravel_index(order, SAMPLE.shape)
    assert stats["top_k"].indices.tolist() == np.stack([rows, columns], 1).tolist()
    assert stats["dead_units"].dead.tolist() == [False] * 6
    assert stats["all_finite"]
    assert stats["nonfinite"] == (0, 0, 0, 30)


BAD = np.array([[1.0, np.nan, 3.0], [np.inf, -np.inf, -2.0]], np.float32)


def test_numbers_that_are_not_finite_are_counted_and_left_out():
    stats = stats_of(BAD)
    finite = BAD[np.isfinite(BAD)]
    assert stats["moments"].count == 3
    assert stats["moments"].nonfinite == 3
    np.testing.assert_allclose(stats["moments"].mean, finite.mean(), rtol=1e-6)
    np.testing.assert_allclose(stats["moments"].variance, finite.var(), rtol=1e-6)
    assert stats["abs_max"] == 3.0
    np.testing.assert_allclose(stats["norm"], np.linalg.norm(finite), rtol=1e-6)
    assert stats["top_k"].values.tolist() == [3.0, -2.0, 1.0]
    assert stats["nonfinite"] == (1, 1, 1, 6)
    assert not stats["all_finite"]
    assert stats["histogram"].counts.sum() == 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "uint32", "bool"])
def test_narrow_types_are_measured_in_float32(dtype):
    value = jnp.asarray([[0, 1, 1], [1, 0, 1]]).astype(dtype)
    stats = stats_of(value)
    assert stats["moments"].mean.dtype == jnp.float32
    np.testing.assert_allclose(stats["moments"].mean, 4 / 6, rtol=1e-6)
    assert stats["abs_max"] == 1
    assert stats["norm"] == 2
    assert stats["nonfinite"] == (0, 0, 0, 6)
    assert stats["all_finite"]


def test_many_bfloat16_numbers_lose_nothing_to_their_sum():
    value = jnp.full((100, 100), 0.1, jnp.bfloat16)
    exact = float(np.float32(value[0, 0]))
    moments = stats_of(value)["moments"]
    np.testing.assert_allclose(moments.mean, exact, rtol=1e-5)
    assert moments.variance < 1e-9


def test_complex_numbers_stand_for_their_magnitudes():
    stats = stats_of(jnp.array([3 + 4j, 0]))
    assert stats["abs_max"] == 5
    assert stats["norm"] == 5
    assert stats["moments"].mean == 2.5


def test_float64_stays_float64():
    with jax.enable_x64(True):
        moments = stats_of(jnp.array([1.0, 1.0 + 1e-12]))["moments"]
        assert moments.mean.dtype == jnp.float64
        np.testing.assert_allclose(moments.variance, 2.5e-25, rtol=1e-3)


def test_a_scalar_has_statistics():
    stats = stats_of(-2.0)
    assert stats["top_k"].values.tolist() == [-2.0, 0.0, 0.0]
    assert stats["top_k"].indices.tolist() == [[0], [-1], [-1]]
    assert not stats["dead_units"].dead
    assert stats["moments"].variance == 0


def test_an_array_without_elements_counts_for_nothing():
    nothing = whole(np.zeros((0, 6), np.float32))
    assert not nothing.seen
    assert nothing.stats["moments"].count == 0
    both = nothing.merge(whole(SAMPLE))
    assert both.stats["abs_max"] == np.abs(SAMPLE).max()
    assert both.stats["top_k"].values[0] == stats_of(SAMPLE)["top_k"].values[0]


def test_variance_of_numbers_far_from_zero_is_right():
    far = (1e4 + SAMPLE).astype(np.float32)
    parts = [whole(row) for row in far]
    moments = parts[0]
    for part in parts[1:]:
        moments = moments.merge(part)
    np.testing.assert_allclose(
        moments.stats["moments"].variance, far.astype(np.float64).var(), rtol=1e-3
    )


@pytest.mark.parametrize("scale", [1e-35, 1e-30, 1e30, 3e37])
def test_norms_neither_overflow_nor_vanish(scale):
    value = np.float32(scale) * SAMPLE
    expected = np.linalg.norm(value.astype(np.float64))
    np.testing.assert_allclose(stats_of(value)["norm"], expected, rtol=1e-5)
    both = whole(value[:2]).merge(whole(value[2:]))
    np.testing.assert_allclose(both.stats["norm"], expected, rtol=1e-5)


LARGE = {
    "equal": np.full(4, 3e38, np.float32),
    "largest": np.full(7, np.finfo(np.float32).max),
    "opposite": np.array([3e38, -3e38, 3e38, -3e38], np.float32),
    "uneven": np.array([-3e38, 3e38, 3e38, 3e38], np.float32),
    "squares": np.array([1e30, 2e30, -5e30], np.float32),
    "bfloat16": jnp.full(4, 3e38, jnp.bfloat16),
    "float16": jnp.array([65504, 65504, -65504, 65504], jnp.float16),
    "tiny": np.array([1e-30, 3e-30, 5e-30], np.float32),
}


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("cuts", [[], [1], [2, 3], [3]], ids=str)
def test_moments_of_numbers_near_the_ends_of_their_type(name, cuts):
    value = LARGE[name]
    kept = tt.Moments(), tt.Norm()
    parts = [whole(part, *kept) for part in jnp.split(jnp.asarray(value), cuts)]
    wide = np.asarray(value, np.float64)
    for order in (parts, parts[::-1]):
        both = functools.reduce(type(parts[0]).merge, order)
        moments, figures = both.stats["moments"], figures_of(both)
        away = 1e-6 * np.abs(wide).max()
        np.testing.assert_allclose(moments.mean, wide.mean(), rtol=1e-5, atol=away)
        assert figures.mean == pytest.approx(wide.mean(), rel=1e-5, abs=away)
        # A length, so it can be told where its square cannot.
        assert figures.std == pytest.approx(wide.std(), rel=1e-5)
        assert figures.norm == pytest.approx(np.linalg.norm(wide), rel=1e-5)
        if wide.std() == 0:
            assert moments.mean == wide[0]
            assert moments.variance == 0
        elif 1e-15 < wide.std() < 1e15:
            np.testing.assert_allclose(moments.variance, wide.var(), rtol=1e-5)
        assert moments.count == value.size
        assert not np.isnan(moments.variance)


def test_one_number_far_off_is_not_lost_among_many():
    values = jnp.full(1, 1e8), jnp.zeros(2**20)
    far, many = (whole(value, tt.Moments()) for value in values)
    for _ in range(8):  # doubles
        many = many.merge(many)
    total = many.stats["moments"].count + 1
    for both in (far.merge(many), many.merge(far)):
        found = both.stats["moments"].variance
        np.testing.assert_allclose(found, 1e16 / total, rtol=1e-3)


def test_magnitudes_are_in_bins_that_double():
    found = stats_of([0.0, 0.3, -0.6, 5.0], tt.Histogram(bins=8))["histogram"]
    assert found.edges.tolist() == [2.0**n for n in range(-6, 3)]
    assert found.counts.tolist() == [1, 0, 0, 0, 1, 1, 0, 1]


def test_a_unit_is_dead_if_it_never_fires():
    value = [[0.0, 0.05, 1.0], [0.0, -0.05, 0.0]]
    found = stats_of(value, tt.DeadUnits(threshold=0.1))["dead_units"]
    assert found.dead.tolist() == [True, True, False]
    np.testing.assert_allclose(found.fraction, 2 / 3, rtol=1e-6)
    found = stats_of(value, tt.DeadUnits(axis=0))["dead_units"]
    assert found.dead.tolist() == [False, False]


def test_equal_magnitudes_are_in_order_of_place():
    found = stats_of([2.0, -2.0, 2.0, 1.0], tt.TopK(3))["top_k"]
    assert found.values.tolist() == [2.0, -2.0, 2.0]
    assert found.indices.tolist() == [[0], [1], [2]]


def test_counts_go_beyond_32_bits():
    held = whole(SAMPLE, tt.NonFinite())
    for _ in range(40):  # doubles
        held = held.merge(held)
    assert held.stats["nonfinite"].total == 30 * 2.0**40


# Merging.


def assert_close(first, second):
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(0, 99))
def test_parts_merged_in_any_grouping_are_the_whole(sizes, seed):
    rng = np.random.default_rng(seed)
    value = rng.normal(size=(sum(sizes), 6)).astype(np.float32)
    value[rng.random(value.shape) < 0.1] = np.nan
    parts = np.split(value, np.cumsum(sizes)[:-1])
    reducers = [one for one in REDUCERS if not isinstance(one, tt.TopK)]
    from_left = whole(parts[0], *reducers)
    for part in parts[1:]:
        from_left = from_left.merge(whole(part, *reducers))
    from_right = whole(parts[-1], *reducers)
    for part in parts[-2::-1]:
        from_right = whole(part, *reducers).merge(from_right)
    expected = stats_of(value, *reducers)
    assert_close(from_left.stats, expected)
    assert_close(from_right.stats, expected)


def test_the_largest_of_parts_are_the_largest():
    parts = [whole(part, tt.TopK(4)) for part in (SAMPLE[:2], SAMPLE[2:])]
    both = parts[0].merge(parts[1]).stats["top_k"]
    expected = stats_of(SAMPLE, tt.TopK(4))["top_k"]
    assert both.values.tolist() == expected.values.tolist()


def test_statistics_of_different_sorts_are_not_merged():
    with pytest.raises(tt.CaptureError, match="different sorts or shapes"):
        whole(SAMPLE, tt.Norm()).merge(whole(SAMPLE, tt.AbsMax()))
    with pytest.raises(tt.CaptureError, match="different sorts or shapes"):
        whole(SAMPLE).merge(whole(SAMPLE[:, :3]))


# What is refused.


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: tt.Histogram(bins=0), "0 bins"),
        (lambda: tt.Histogram(limits=(1.0, 1.0)), "not in order"),
        (lambda: tt.TopK(0), "k is 0"),
        (lambda: tt.Reducer(1, jnp.add), "'measure' is 1"),
        (lambda: tt.observe(jnp.sin, reduce=[tt.Moments]), "no reducer"),
        (lambda: tt.observe(jnp.sin, reduce="moments"), "no reducer"),
        (lambda: tt.observe(jnp.sin, reduce=[tt.TopK(1), tt.TopK(2)]), "two reducers"),
    ],
)
def test_what_makes_no_sense_is_refused(make, says):
    with pytest.raises(tt.CaptureError, match=says):
        make()


def test_a_merge_that_changes_the_type_of_a_state_is_refused():
    wrong = tt.Reducer(lambda x: x.sum(), lambda a, b: (a, b), name="wrong")
    held = whole(SAMPLE, wrong)
    with pytest.raises(tt.CaptureError, match="The reducer 'wrong'"):
        held.merge(held)
