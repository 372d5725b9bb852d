# SPDX-License-Identifier: Apache-2.0
"""Pooling against windows written out in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from formulas import array, close, numbers
from jax import lax

import treetap as tt


def windows(x, window, strides, padding, fill):
    """What each window holds: `[batch, places..., elements, features]`."""
    if padding == "SAME":
        padding = []
        for n, w, s in zip(x.shape[1:], window, strides):
            total = max((-(-n // s) - 1) * s + w - n, 0)
            padding.append((total // 2, total - total // 2))
    elif padding == "VALID":
        padding = [(0, 0)] * len(window)
    x = np.pad(x, [(0, 0), *padding, (0, 0)], constant_values=fill)
    sizes = [(n - w) // s + 1 for n, w, s in zip(x.shape[1:], window, strides)]
    out = np.zeros((x.shape[0], *sizes, int(np.prod(window)), x.shape[-1]))
    for at in np.ndindex(*sizes):
        here = tuple(slice(i * s, i * s + w) for i, s, w in zip(at, strides, window))
        seen = x[(slice(None), *here)]
        out[(slice(None), *at)] = seen.reshape(x.shape[0], -1, x.shape[-1])
    return out


CASES = [
    ((2,), None, "VALID", (2, 5, 3)),
    ((2,), (2,), "SAME", (2, 5, 3)),
    ((3,), (1,), [(2, 1)], (2, 5, 3)),
    ((2, 3), (2, 1), "SAME", (1, 5, 4, 2)),
    ((2, 2), (1, 2), ((0, 1), (1, 0)), (1, 5, 4, 2)),
]
WINDOWS = pytest.mark.parametrize(("window", "strides", "padding", "shape"), CASES)


@WINDOWS
def test_largest_and_smallest_and_mean_of_each_window(window, strides, padding, shape):
    x, steps = numbers(*shape), strides or (1,) * len(window)
    args = (array(*shape), window, strides, padding)
    seen = lambda fill: windows(x, window, steps, padding, fill)
    close(tt.max_pool(*args), seen(-np.inf).max(-2))
    close(tt.min_pool(*args), seen(np.inf).min(-2))
    close(tt.avg_pool(*args), seen(0).mean(-2))
    counted = seen(np.nan)
    expected = np.nanmean(counted, -2)
    close(tt.avg_pool(*args, count_include_pad=False), expected)


def test_any_reduction():
    found = tt.pool(array(2, 5, 3), 1.0, lax.mul, (2,), (2,), "VALID")
    close(found, windows(numbers(2, 5, 3), (2,), (2,), "VALID", 1).prod(-2))


@pytest.mark.parametrize("pool", [tt.max_pool, tt.min_pool, tt.avg_pool])
def test_any_number_of_batch_axes(pool):
    x = array(2, 3, 5, 2)
    outputs = np.asarray(pool(x, (2,), (2,), [(1, 0)]))
    assert outputs.shape == (2, 3, 3, 2)
    close(pool(x[0], (2,), (2,), [(1, 0)]), outputs[0])
    close(pool(x[0, 0], (2,), (2,), [(1, 0)]), outputs[0, 0])


def test_padding_is_counted_with_any_number_of_batch_axes():
    x = jnp.ones((2, 3, 5, 2))
    found = tt.avg_pool(x, (2,), (2,), [(1, 0)], count_include_pad=False)
    close(found, np.ones((2, 3, 3, 2)))
    close(tt.avg_pool(x[0, 0], (2,), (2,), [(1, 0)])[:, 0], [0.5, 1, 1])


def test_whole_numbers_have_an_end_instead_of_an_infinity():
    x = jnp.array([-4, -3, 1, 0], jnp.int8).reshape(1, 4, 1)
    largest = tt.max_pool(x, (2,), padding="SAME")
    assert largest.dtype == jnp.int8
    np.testing.assert_array_equal(largest[0, :, 0], [-3, 1, 1, 0])
    smallest = tt.min_pool(x, (2,), padding=[(1, 0)])
    np.testing.assert_array_equal(smallest[0, :, 0], [-4, -4, -3, 0])
    mean = tt.avg_pool(x, (2,), padding="SAME", count_include_pad=False)
    assert mean.dtype == jnp.float32
    np.testing.assert_array_equal(mean[0, :, 0], [-3.5, -1, 0.5, 0])


def test_floats_keep_their_dtype():
    x = array(1, 4, 1, dtype=jnp.bfloat16)
    for count in (True, False):
        found = tt.avg_pool(x, (2,), padding="SAME", count_include_pad=count)
        assert found.dtype == jnp.bfloat16
    assert tt.max_pool(x, (2,)).dtype == jnp.bfloat16


def test_truth_values():
    x = jnp.array([0, 0, 1, 1, 0], bool).reshape(1, 5, 1)
    found = tt.min_pool(x, (2,))[0, :, 0]
    np.testing.assert_array_equal(found, [False, False, True, False])


def test_the_largest_of_truth_values_as_in_nnx():
    x = jnp.array([0, 0, 1, 1, 0], bool).reshape(1, 5, 1)
    found = tt.max_pool(x, (2,))[0, :, 0]
    np.testing.assert_array_equal(found, [False, True, True, True])


def test_gradients_go_to_the_elements_that_were_chosen():
    x = jnp.array([1.0, 3.0, 2.0, 5.0]).reshape(1, 4, 1)
    grads = {
        pool: np.ravel(jax.grad(lambda x, p=pool: p(x, (2,), (2,)).sum())(x)).tolist()
        for pool in (tt.max_pool, tt.min_pool, tt.avg_pool)
    }
    assert grads[tt.max_pool] == [0, 1, 0, 1]
    assert grads[tt.min_pool] == [1, 0, 1, 0]
    assert grads[tt.avg_pool] == [0.5] * 4


def test_arrays_may_be_lists():
    assert tt.max_pool([[[1.0], [2.0]]], [2]).tolist() == [[[2.0]]]
    assert tt.avg_pool([[[1.0], [2.0]]], [2]).tolist() == [[[1.5]]]


def test_arrays_may_be_lists_where_padding_is_not_counted():
    found = tt.avg_pool([[[1.0], [2.0]]], [2], count_include_pad=False)
    assert found.tolist() == [[[1.5]]]


X = (1, 5, 5, 2)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((2,), "`window_shape` must be a sequence of positive integers"),
        (((0, 2),), r"`window_shape` .* got \(0, 2\)"),
        (((2, 2), 2), "`strides` must be a sequence of positive integers"),
        (((2, 2), (-1, 1)), r"`strides` .* got \(-1, 1\)"),
        (((2, 2), (2,)), r"window_shape=\(2, 2\) and strides=\(2,\) must be equally"),
        (((2,) * 4,), r"a window of \(2, 2, 2, 2\) .* got float32\[1,5,5,2\]"),
        (
            ((2, 2), None, [(1, 1)]),
            r"`padding` must be a name, or a pair for each of",
        ),
        (((2, 2), None, [1, 1]), r"`padding` .* got \[1, 1\]"),
        (((2, 2), None, [(1, 1, 1)] * 2), "`padding` must be a name, or a pair"),
    ],
)
def test_what_does_not_fit_is_refused(args, words):
    for pool in (tt.max_pool, tt.min_pool, tt.avg_pool):
        with pytest.raises(tt.StructureError, match=f"^pool: .*{words}"):
            pool(array(*X), *args)


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (((2, 2), None, "FULL"), "padding"),
        (((2, 2), None, 1), "padding"),
        (((2, 2), None, None), "padding"),
        (((2.5, 2),), "window_shape"),
        ((None,), "window_shape"),
        (("ab",), "window_shape"),
    ],
    ids=str,
)
def test_other_things_that_do_not_fit_are_refused(args, word):
    with pytest.raises(ValueError, match=f"^pool: .*`{word}`"):
        tt.max_pool(array(*X), *args)


@pytest.mark.parametrize("reduce_fn", [lax.add, lax.max])
def test_a_reduction_of_integers_does_not_begin_with_a_part_of_a_number(reduce_fn):
    x = jnp.arange(4).reshape(1, 4, 1)
    with pytest.raises(tt.StructureError, match=r"`init` is 2\.5, which int32 cannot"):
        tt.pool(x, 2.5, reduce_fn, (2,))
    found = tt.pool(x, 2.0, reduce_fn, (2,))
    np.testing.assert_array_equal(found, tt.pool(x, 2, reduce_fn, (2,)))


def test_windows_strides_and_padding_of_pools_may_be_lists():
    x = array(1, 4, 4, 2)
    for pool in (tt.max_pool, tt.min_pool, tt.avg_pool):
        expected = pool(x, (2, 2), (2, 1), ((1, 0), (0, 1)))
        found = pool(x, [2, 2], [2, 1], [[1, 0], [0, 1]])
        np.testing.assert_array_equal(found, expected)
