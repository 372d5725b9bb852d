# SPDX-License-Identifier: Apache-2.0
"""Operators and protocols: a Variable in an expression is its value."""

import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treetap as tt
from treetap._core.variables.operators import ValueOperators

ARITHMETIC = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.floordiv,
    operator.mod,
    operator.pow,
    divmod,
]
BITWISE = [
    operator.lshift,
    operator.rshift,
    operator.and_,
    operator.xor,
    operator.or_,
]
ORDER = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]
IN_PLACE = {
    "+=": operator.iadd,
    "-=": operator.isub,
    "*=": operator.imul,
    "@=": operator.imatmul,
    "/=": operator.itruediv,
    "//=": operator.ifloordiv,
    "%=": operator.imod,
    "**=": operator.ipow,
    "<<=": operator.ilshift,
    ">>=": operator.irshift,
    "&=": operator.iand,
    "^=": operator.ixor,
    "|=": operator.ior,
}

VALUES = {
    "jax": jnp.asarray([5.0, 3.0]),
    "numpy": np.asarray([4.0, 2.0]),
    "int": 3,
    "float": 2.5,
    "numpy scalar": np.float32(1.5),
}


def assert_same(found, expected):
    """The same type, dtype and numbers."""
    if isinstance(expected, tuple):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
        return
    assert type(found) is type(expected)
    assert getattr(found, "dtype", None) == getattr(expected, "dtype", None)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("right", VALUES)
@pytest.mark.parametrize("left", VALUES)
@pytest.mark.parametrize("apply", ARITHMETIC + ORDER, ids=lambda f: f.__name__)
def test_arithmetic_and_order_are_those_of_the_values(apply, left, right):
    x, y = VALUES[left], VALUES[right]
    expected = apply(x, y)
    assert_same(apply(tt.Param(x), tt.Param(y)), expected)
    assert_same(apply(tt.Param(x), y), expected)
    assert_same(apply(x, tt.Param(y)), expected)


@pytest.mark.parametrize("apply", BITWISE, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("x", "y"),
    [
        (6, 3),
        (jnp.asarray([6, 5]), 3),
        (jnp.asarray([6, 5]), jnp.asarray([1, 2])),
        (np.asarray([6, 5]), np.asarray([1, 2])),
    ],
)
def test_bitwise_operators_are_those_of_the_values(apply, x, y):
    for left, right in ((x, y), (y, x)):
        expected = apply(left, right)
        assert_same(apply(tt.Param(left), right), expected)
        assert_same(apply(tt.Param(left), tt.Param(right)), expected)


@pytest.mark.parametrize("apply", BITWISE, ids=lambda f: f.__name__)
def test_bitwise_operators_are_reflected(apply):
    assert_same(apply(6, tt.Param(3)), apply(6, 3))
    ones = jnp.asarray([1, 2])
    assert_same(apply(6, tt.Param(ones)), apply(6, ones))
    assert_same(apply(ones, tt.Param(ones)), apply(ones, ones))


def test_matrix_products_work_from_both_sides():
    a, b = jnp.arange(4.0).reshape(2, 2), jnp.arange(6.0).reshape(2, 3)
    for found in (tt.Param(a) @ b, a @ tt.Param(b), tt.Param(a) @ tt.Param(b)):
        assert_same(found, a @ b)


@pytest.mark.parametrize(
    "apply", [operator.add, operator.mul, operator.matmul, operator.lt, operator.eq]
)
def test_numpy_on_the_left_works_under_a_trace(apply):
    x, y = np.ones((2, 2), np.float32), jnp.full((2, 2), 3.0)
    found = jax.jit(lambda v: apply(x, v))(tt.Param(y))
    assert_same(found, apply(x, y))


def test_a_numpy_scalar_on_the_left_works_under_a_trace():
    found = jax.jit(lambda v: np.float32(2) * v)(tt.Param(jnp.ones(2)))
    assert found.tolist() == [2, 2]


def test_results_are_never_variables():
    variable = tt.Param(jnp.ones(2))
    for found in (variable + variable, -variable, variable == 1, abs(variable)):
        assert isinstance(found, jax.Array)


@pytest.mark.parametrize(
    ("apply", "value"),
    [
        (operator.neg, jnp.asarray([1.0, -2.0])),
        (operator.pos, jnp.asarray([1.0, -2.0])),
        (abs, jnp.asarray([1.0, -2.0])),
        (abs, -3),
        (operator.invert, 5),
        (operator.invert, jnp.asarray([True, False])),
        (complex, 2.5),
        (int, jnp.asarray(2.7)),
        (float, jnp.asarray(2)),
        (operator.index, jnp.asarray(3)),
        (math.trunc, -2.5),
        (math.floor, -2.5),
        (math.ceil, -2.5),
        (len, jnp.ones((3, 2))),
        (len, {"a": 1}),
        (list, [1, 2]),
        (sorted, {"b": 1, "a": 2}),
    ],
)
def test_unary_operators_and_conversions_are_those_of_the_value(apply, value):
    assert_same(apply(tt.Variable(value)), apply(value))


def test_rounding():
    assert round(tt.Variable(1.66)) == 2
    assert round(tt.Variable(1.66), 1) == 1.7
    assert_same(round(tt.Variable(jnp.asarray(1.66)), 1), round(jnp.asarray(1.66), 1))


def test_a_variable_can_be_an_index():
    assert [10, 20, 30][tt.Variable(1)] == 20
    assert list(range(tt.Variable(2))) == [0, 1]


@pytest.mark.parametrize("symbol", IN_PLACE)
def test_in_place_operators_are_refused(symbol):
    variable = tt.Param(jnp.ones((2, 2)))
    with pytest.raises(NotImplementedError) as caught:
        IN_PLACE[symbol](variable, variable)
    assert f"`v {symbol} x` would replace the Param" in str(caught.value)
    assert f"Write `v[...] {symbol} x`" in str(caught.value)


def test_in_place_operators_through_dots_change_the_variable():
    variable = tt.Param(jnp.ones(2))
    variable[...] += 2
    variable[...] *= variable
    assert variable[...].tolist() == [9, 9]


def test_variables_are_not_hashable():
    with pytest.raises(TypeError, match="unhashable"):
        hash(tt.Param(1.0))


def test_comparison_of_arrays_is_elementwise():
    variable = tt.Param(jnp.asarray([1.0, 2.0]))
    assert (variable == jnp.asarray([1.0, 5.0])).tolist() == [True, False]
    assert (variable != jnp.asarray([1.0, 5.0])).tolist() == [False, True]
    assert (variable < 2).tolist() == [True, False]
    assert (variable > 2).tolist() == [False, False]


def test_equality_with_something_else_is_false():
    assert tt.Variable(1) != "a"
    assert (tt.Variable("a") == 1) is False


@pytest.mark.parametrize(
    ("value", "truth"),
    [
        (0, False),
        (2.5, True),
        (None, False),
        (jnp.asarray(0.0), False),
        (jnp.asarray(3), True),
        (np.float32(0), False),
        (jnp.zeros(2), True),
        (jnp.zeros(0), False),
        ({}, False),
        ([0], True),
        ("", False),
    ],
)
def test_truth_is_that_of_a_scalar_or_of_having_items(value, truth):
    assert bool(tt.Variable(value)) is truth


def test_format_applies_the_spec_to_the_value():
    assert f"{tt.Variable(1.23456):.2f}" == "1.23"
    assert f"{tt.Param(jnp.asarray(2.0)):.1f}" == "2.0"
    assert f"{tt.Variable(3)}" == repr(tt.Variable(3))


def test_membership_looks_into_the_value():
    assert "a" in tt.Variable({"a": 1})
    assert "b" not in tt.Variable({"a": 1})
    assert 2 in tt.Variable([1, 2])
    assert tt.Variable(2) in tt.Variable([1, 2])
    assert 2.0 in tt.Param(jnp.asarray([1.0, 2.0]))


def test_iteration_goes_over_the_value():
    assert [float(x) for x in tt.Param(jnp.asarray([1.0, 2.0]))] == [1, 2]
    assert list(tt.Variable({"a": 1})) == ["a"]
    first, second = tt.Variable((1, 2))
    assert (first, second) == (1, 2)


def test_scalars_have_no_length():
    with pytest.raises(TypeError, match="len"):
        len(tt.Variable(1))


def test_calling_calls_the_value():
    assert tt.Variable(lambda x, *, k: x + k)(1, k=2) == 3
    with pytest.raises(TypeError, match="not callable"):
        tt.Variable(1)()


def test_jax_and_numpy_functions_take_variables():
    variable = tt.Param(jnp.asarray([1.0, 4.0]))
    assert_same(jnp.sqrt(variable), jnp.asarray([1.0, 2.0]))
    assert_same(np.sqrt(variable), np.asarray([1.0, 2.0], np.float32))
    assert jnp.stack([variable, variable]).shape == (2, 2)
    assert jax.jit(lambda v: jnp.sum(v))(variable) == 5


def test_conversion_to_numpy_takes_dtype_and_copy():
    value = np.asarray([1.0, 2.0])
    variable = tt.Variable(value)
    assert np.asarray(variable) is value or np.shares_memory(
        np.asarray(variable), value
    )
    assert not np.shares_memory(np.array(variable, copy=True), value)
    assert np.asarray(variable, dtype=np.int32).dtype == np.int32
    with pytest.raises(ValueError, match="copy"):
        np.asarray(variable, dtype=np.int32, copy=False)


def test_a_variable_in_a_variable_computes():
    outer = tt.Variable(tt.Variable(2))
    assert outer + 1 == 3
    assert float(outer) == 2


def test_operators_need_a_value():
    with pytest.raises(NotImplementedError):
        ValueOperators() + 1


@pytest.mark.parametrize("value", [np.array([1.0, 3.0]), jnp.array([1.0, 3.0])])
def test_comparisons_are_those_of_the_value(value):
    v, w = tt.Param(value), tt.Param(jnp.array([1.0, 2.0]))
    assert (v != w).tolist() == [False, True]
    assert (v == w).tolist() == [True, False]
    assert (v > 2.0).tolist() == [False, True]
    assert (v >= w).tolist() == [True, True]
    assert (np.full(2, 2.0) > v).tolist() == [True, False]
    assert (v < w).tolist() == [False, False]
    assert (v <= w).tolist() == [True, False]


def test_divmod_works_from_both_sides():
    assert divmod(tt.Param(7), 2) == (3, 1)
    assert divmod(7, tt.Param(2)) == (3, 1)
    quotient, rest = divmod(tt.Param(jnp.array([7, 9])), 4)
    assert quotient.tolist() == [1, 2]
    assert rest.tolist() == [3, 1]


@pytest.mark.parametrize("value", [1.239, np.float32(1.239), jnp.float32(1.239)])
def test_format_specs_reach_the_value(value):
    assert f"{tt.Param(value):.2f}" == "1.24"


def test_a_scalar_variable_is_true_as_its_value_is():
    for zero in (0, 0.0, False, jnp.float32(0.0), np.int32(0)):
        assert not tt.Param(zero)
    for one in (1, 2.5, True, jnp.float32(1.0), np.int32(1)):
        assert tt.Param(one)


def test_a_variable_with_items_is_true():
    assert tt.Param(jnp.zeros(1))
    assert not tt.Param(jnp.zeros(0))
    assert not tt.Param({})


@pytest.mark.parametrize("index", [np.array([0, 2]), jnp.array([0, 2])])
@pytest.mark.parametrize("array", [jnp.zeros(3), np.zeros(3)])
def test_any_array_can_be_an_index(array, index):
    v = tt.Param(array)
    v[index] = 5.0
    assert v[...].tolist() == [5.0, 0.0, 5.0]
    v[index] = np.array([1.0, 2.0])
    assert v[...].tolist() == [1.0, 0.0, 2.0]


def test_mixed_arithmetic_is_that_of_the_values():
    assert tt.Param(1) + 2.0 == 3.0
    assert 2.0 + tt.Param(1) == 3.0
    assert tt.Param(1) * tt.Param(2.5) == 2.5
    assert 2 ** tt.Param(0.5) == 2**0.5
    assert (tt.Param(1) + jnp.ones(2)).tolist() == [2.0, 2.0]
    assert (np.ones(2) - tt.Param(1)).tolist() == [0.0, 0.0]
    with pytest.raises(TypeError, match="unsupported operand"):
        tt.Param(1) + "text"
