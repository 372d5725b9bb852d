# SPDX-License-Identifier: Apache-2.0
"""Distances between arrays: what they are, at the edges too."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from treetap._compare import tolerances
from treetap._compare.tolerances import coarser, measure

BF16 = np.dtype(jnp.bfloat16)
sides = arrays.arrays(
    np.float32,
    st.shared(arrays.array_shapes(max_dims=3, max_side=6), key="shape"),
    elements=st.floats(-1e6, 1e6, width=32),
)


@given(sides, sides)
def test_distances_are_what_they_are_called(a, b):
    found = measure(a, b)
    x, y = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    assert found.max_abs == np.abs(x - y).max()
    assert found.unequal == (x != y).sum()
    assert found.size == x.size
    norms = np.linalg.norm(x), np.linalg.norm(y)
    if norms[1]:
        wanted = np.linalg.norm(x - y) / norms[1]
        assert found.relative == pytest.approx(wanted, rel=1e-12)
        assert found.peak == np.abs(x - y).max() / np.abs(y).max()
    if all(norms):
        wanted = float(x @ y / norms[0] / norms[1])
        assert found.cosine == pytest.approx(wanted, abs=1e-12)
    assert measure(a, a)[:4] == (0, 0, 0, 1)
    assert measure(b, a).ulp == found.ulp


def test_pieces_make_no_difference(monkeypatch):
    random = np.random.default_rng(0)
    a, b = random.normal(size=(2, 7, 11))
    whole = measure(a, b)
    monkeypatch.setattr(tolerances, "PIECE", 5)
    for x, y in ((a, b), (np.asfortranarray(a), b), (a[::-1][::-1], b.T.copy().T)):
        found = measure(x, y)
        assert found.relative == pytest.approx(whole.relative, rel=1e-13)
        assert (found.max_abs, found.ulp, found.unequal) == (
            whole.max_abs,
            whole.ulp,
            whole.unequal,
        )


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, BF16])
def test_steps_count_numbers_of_the_type(dtype):
    one = np.ones(3, dtype)
    eps = jnp.finfo(dtype).eps
    assert measure(one, one).ulp == 0
    next_one = (one.astype(np.float64) + float(eps)).astype(dtype)
    assert measure(next_one, one).ulp == 1
    assert measure(-next_one, one).ulp == 2 * measure(one, 0 * one).ulp + 1
    assert measure(np.zeros(1, dtype), -np.zeros(1, dtype)).ulp == 0
    tiny = np.asarray(jnp.finfo(dtype).smallest_subnormal, dtype).reshape(1)
    assert measure(tiny, -tiny).ulp == 2


def test_steps_are_those_of_the_coarser_type():
    a = np.array([1.001], np.float32)
    assert measure(a, a.astype(BF16)).ulp == 0
    assert measure(np.array([1.01], np.float32), np.ones(1, BF16)).ulp == 1
    assert coarser(np.float32, BF16) == coarser(BF16, np.float32) == BF16
    assert coarser(np.float16, BF16) == BF16
    assert coarser(np.int32, np.float64) == np.float64
    assert coarser(np.int32, np.int8) == np.int32


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float8_e3m4"])
def test_small_floats_have_steps(name):
    dtype = np.dtype(getattr(jnp, name))
    a = np.array([1.0, 2.0], np.float32).astype(dtype)
    b = np.array([1.0, 2.0 + 2 * float(jnp.finfo(dtype).eps)], np.float32)
    assert measure(a, b.astype(dtype)).ulp == 1


def test_not_finite_is_equal_only_to_the_same():
    nan, inf = np.nan, np.inf
    a = np.array([1.0, nan, inf, -inf])
    assert measure(a, a)[:4] == (0, 0, 0, 1)
    for other in ([1, nan, inf, inf], [1, 2, inf, -inf], [nan, nan, inf, -inf]):
        found = measure(a, np.array(other))
        assert (found.max_abs, found.relative, found.peak) == (inf, inf, inf)
        assert math.isnan(found.cosine)
        assert found.ulp == inf
        assert found.unequal == 1
    close = measure(a, np.array([1.5, nan, inf, -inf]))
    assert close.max_abs == 0.5


def test_zeros_and_nothing():
    zero, one = np.zeros(2), np.ones(2)
    assert measure(zero, zero)[:4] == (0, 0, 0, 1)
    assert measure(one, zero).relative == math.inf
    assert measure(one, zero).cosine == 0
    assert measure(zero, one).relative == 1
    empty = np.zeros((0, 3))
    assert measure(empty, empty)[:4] == (0, 0, 0, 1)


@pytest.mark.parametrize("size", [1e300, 1e-300, 1.0])
def test_squares_neither_overflow_nor_vanish(size):
    a, b = np.array([3.0, 4.0]) * size, np.array([3.0, 5.0]) * size
    found = measure(a, b)
    assert found.relative == pytest.approx(1 / math.sqrt(34))
    assert found.cosine == pytest.approx(29 / (5 * math.sqrt(34)))


def test_integers_and_flags_are_equal_or_not():
    big = np.array([2**62], np.int64)
    found = measure(big, big + 1)  # the same in float64
    assert (found.unequal, found.max_abs, found.ulp) == (1, 1, None)
    assert found.peak > 0
    flags = measure(np.array([True, False]), np.array([True, True]))
    assert (flags.unequal, flags.max_abs) == (1, 1)


def test_complex_numbers():
    a, b = np.array([3 + 4j, 1j], np.complex64), np.array([3 + 4j, 1], np.complex64)
    found = measure(a, b)
    assert found.relative == pytest.approx(math.sqrt(2 / 26))
    assert found.ulp is not None
    real = measure(np.array([1.0, 2.0]), np.array([1, 2 + 1j]))
    assert real.max_abs == 1


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.complex64])
def test_nans_that_signal_are_nans(dtype):
    bits = np.array([0x7D00] * 4, np.uint16) if dtype == np.float16 else None
    if bits is None:
        bits = np.array([0x7FA00000] * 4, np.uint32)
    array = bits.view(dtype)
    assert measure(array, array).unequal == 0
