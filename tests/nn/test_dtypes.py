# SPDX-License-Identifier: Apache-2.0
"""promote_dtype, and the dtypes that layers compute in and keep parameters in."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from formulas import array, made

import treetap as tt

BF16, F16, F32, C64 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.complex64


def promoted(*dtypes, **options):
    values = tuple(None if d is None else jnp.ones(2, d) for d in dtypes)
    found = tt.promote_dtype(values, **options)
    return [None if value is None else value.dtype for value in found]


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ((F32, BF16), F32),
        ((BF16, BF16), BF16),
        ((BF16, F16), F32),
        ((jnp.int32, jnp.int8), F32),
        ((jnp.bool_,), F32),
        ((jnp.int32, F16), F16),
        ((C64, F32), C64),
        ((F16, None, BF16), F32),
    ],
)
def test_values_are_promoted_as_jax_does_and_at_least_to_floats(dtypes, expected):
    wanted = [None if dtype is None else jnp.dtype(expected) for dtype in dtypes]
    assert promoted(*dtypes) == wanted


def test_a_dtype_that_is_given_is_used():
    assert promoted(F32, None, jnp.int32, dtype=BF16) == [BF16, None, BF16]


def test_whole_numbers_may_stay_so():
    assert promoted(jnp.int8, jnp.int32, inexact=False) == [jnp.int32] * 2
    assert promoted(F32, dtype=jnp.int32, inexact=False) == [jnp.int32]


def test_a_dtype_that_is_no_float_is_refused():
    with pytest.raises(ValueError, match=r"promote_dtype: .* int32\. .*inexact=False"):
        tt.promote_dtype((jnp.ones(2),), dtype=jnp.int32)


def test_weak_types_do_not_widen():
    (found, number) = tt.promote_dtype((jnp.ones(2, BF16), 2.0))
    assert (found.dtype, number.dtype) == (BF16, BF16)


def test_numpy_arrays_and_numbers_are_taken():
    found = tt.promote_dtype((np.ones(2, np.float32), np.int32(3)))
    assert [value.dtype for value in found] == [F32, F32]
    assert all(isinstance(value, jax.Array) for value in found)


def test_lists_are_taken_as_in_nnx():
    layer = made(tt.Linear, 3, 4)
    np.testing.assert_array_equal(layer([1.0, 2.0, 3.0]), layer(jnp.array([1.0, 2, 3])))


X, ROWS, GRID = (2, 3), (2, 3, 4), (2, 5, 3)
CASES = {
    tt.Linear: ((3, 4), X),
    tt.LinearGeneral: ((3, 4), X),
    tt.Einsum: (("ab,bc->ac", (3, 4), (4,)), X),
    tt.Conv: ((3, 4, 2), GRID),
    tt.ConvTranspose: ((3, 4, 2), GRID),
    tt.LoRA: ((3, 2, 4), X),
    tt.LayerNorm: ((3,), X),
    tt.RMSNorm: ((3,), X),
    tt.GroupNorm: ((3, 3), GRID),
    tt.InstanceNorm: ((3,), GRID),
    tt.MultiHeadAttention: ((2, 4), ROWS),
}


@pytest.mark.parametrize("cls", CASES, ids=lambda cls: cls.__name__)
def test_layers_compute_in_the_dtype_given_or_in_the_promoted_one(cls):
    args, shape = CASES[cls]

    def dtype_of(inputs, **options):
        layer = made(cls, *args, **options)
        parameters = jax.tree.leaves(tt.state(layer, tt.Param))
        wanted = options.get("param_dtype", F32)
        assert {leaf.dtype for leaf in parameters} == {jnp.dtype(wanted)}
        x = jax.ShapeDtypeStruct(shape, inputs)
        return jax.eval_shape(layer, x).dtype

    assert dtype_of(F32) == F32
    assert dtype_of(BF16) == F32
    assert dtype_of(BF16, param_dtype=BF16) == BF16
    assert dtype_of(F32, dtype=BF16) == BF16
    assert dtype_of(jnp.int32) == F32


PREFERRED = {
    tt.Linear: ((3, 4), X),
    tt.LinearGeneral: ((3, 4), X),
    tt.Einsum: (("ab,bc->ac", (3, 4)), X),
    tt.Conv: ((3, 4, 2), GRID),
    tt.ConvTranspose: ((3, 4, 2), GRID),
}


@pytest.mark.parametrize("cls", PREFERRED, ids=lambda cls: cls.__name__)
def test_the_preferred_dtype_of_sums_is_handed_on(cls):
    args, shape = PREFERRED[cls]
    x = jax.ShapeDtypeStruct(shape, BF16)
    types = {"dtype": BF16, "preferred_element_type": F32}
    if cls is not tt.Einsum:
        types["use_bias"] = False
    assert jax.eval_shape(made(cls, *args, **types), x).dtype == F32
    types["preferred_element_type"] = None
    assert jax.eval_shape(made(cls, *args, **types), x).dtype == BF16


class Promotion:
    """A replacement that keeps what it was called with, and doubles what it casts."""

    def __init__(self):
        self.calls = []

    def __call__(self, values, /, **options):
        self.calls.append(options)
        cast = tt.promote_dtype(values, **options)
        return tuple(None if value is None else 2 * value for value in cast)


REPLACED = {
    **{cls: case for cls, case in PREFERRED.items() if cls is not tt.Linear},
    tt.LoRA: ((3, 2, 4), X),
    tt.PReLU: ((), X),
}
NORMS = {
    tt.BatchNorm: ((3,), X),
    tt.LayerNorm: ((3,), X),
    tt.RMSNorm: ((3,), X),
    tt.GroupNorm: ((3, 3), GRID),
    tt.InstanceNorm: ((3,), GRID),
}
CELLS = {
    tt.LSTMCell: 8,
    tt.OptimizedLSTMCell: 2,
    tt.GRUCell: 2,
    tt.SimpleCell: 2,
}


def test_what_a_replacement_of_promote_dtype_returns_is_used():
    layer = made(tt.Linear, 3, 4, promote_dtype=Promotion())
    x, kernel, bias = array(*X), layer.kernel[...], layer.bias[...]
    np.testing.assert_allclose(layer(x), 4 * x @ kernel + 2 * bias[None], rtol=1e-6)


def check_replaced(cls, args, shape):
    replaced = Promotion()
    layer = made(cls, *args, dtype=F16, promote_dtype=replaced)
    tt.eval_shape(lambda layer, x: layer(x), layer, array(*shape))
    assert replaced.calls == [{"dtype": F16}]


@pytest.mark.parametrize("cls", REPLACED, ids=lambda cls: cls.__name__)
def test_a_replacement_of_promote_dtype_is_used(cls):
    check_replaced(cls, *REPLACED[cls])


@pytest.mark.parametrize("cls", NORMS, ids=lambda cls: cls.__name__)
def test_layers_that_normalise_use_a_replacement_as_in_nnx(cls):
    check_replaced(cls, *NORMS[cls])


@pytest.mark.parametrize("cls", CELLS, ids=lambda cls: cls.__name__)
def test_cells_hand_the_replacement_to_their_maps(cls):
    replaced = Promotion()
    cell = made(cls, 3, 4, promote_dtype=replaced)
    jax.eval_shape(cell, cell.initialize_carry(X), array(*X))
    assert len(replaced.calls) == CELLS[cls]


def test_tables_use_a_replacement_that_leaves_whole_numbers():
    replaced = Promotion()
    table = made(tt.Embed, 5, 3, promote_dtype=replaced)
    np.testing.assert_array_equal(table(jnp.array([1])), 2 * table.embedding[1:2])
    table.attend(array(*X))
    assert [options.get("inexact", True) for options in replaced.calls] == [False, True]


def test_attention_hands_replacements_to_its_projections():
    for name, times in (("qkv_promote_dtype", 3), ("out_promote_dtype", 1)):
        replaced = Promotion()
        layer = made(tt.MultiHeadAttention, 2, 4, **{name: replaced})
        jax.eval_shape(layer, array(*ROWS))
        assert len(replaced.calls) == times
    replaced = Promotion()
    query = array(2, 3, 2, 4)
    attend = functools.partial(tt.dot_product_attention, promote_dtype=replaced)
    jax.eval_shape(attend, query, query, query)
    assert len(replaced.calls) == 1


def test_adapters_have_a_replacement_of_their_own():
    base, own = Promotion(), Promotion()
    options = {"promote_dtype": base, "lora_promote_dtype": own, "lora_rank": 2}
    jax.eval_shape(made(tt.LoRALinear, 3, 4, **options), array(*X))
    assert (len(base.calls), len(own.calls)) == (1, 1)
