# SPDX-License-Identifier: Apache-2.0
"""Recurrent cells against their equations in numpy, and how a carry begins."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cell_formulas import FORMULAS
from formulas import array, close, drawing, made, numbers, placed, raw, values_of

import treetap as tt

X, H = (2, 3), (2, 4)
CELLS = list(FORMULAS)
EACH = pytest.mark.parametrize("cls", CELLS, ids=lambda cls: cls.__name__)
PAIRS = (tt.LSTMCell, tt.OptimizedLSTMCell)


def carry_of(cls, form=array):
    one, two = form(*H, seed=1), form(*H, seed=2)
    return (one, two) if cls in PAIRS else one


def check_step(cls, shape=X, **options):
    cell = made(cls, 3, 4, **options)
    carry, outputs = cell(carry_of(cls), array(*shape))
    expected, last = FORMULAS[cls](cell, carry_of(cls, numbers), numbers(*shape))
    jax.tree.map(close, carry, expected)
    close(outputs, last)


@EACH
def test_a_step(cls):
    check_step(cls)


@EACH
def test_activations_can_be_replaced(cls):
    options = {} if cls is tt.SimpleCell else {"gate_fn": jnp.cos}
    check_step(cls, activation_fn=jnp.sin, **options)


def test_a_carry_may_be_added():
    check_step(tt.SimpleCell, residual=True)


@EACH
def test_a_step_of_one_sequence(cls):
    cell = made(cls, 3, 4)
    carry = jax.tree.map(lambda h: h[0], carry_of(cls))
    _, outputs = cell(carry, array(*X)[0])
    _, whole = cell(carry_of(cls), array(*X))
    close(outputs, whole[0])


def test_shapes_of_parameters_and_where_the_bias_is():
    lstm = made(tt.LSTMCell, 3, 4)
    for gate in (lstm.ii, lstm.if_, lstm.ig, lstm.io):
        assert (gate.kernel.shape, gate.bias) == ((3, 4), None)
    for gate in (lstm.hi, lstm.hf, lstm.hg, lstm.ho):
        assert (gate.kernel.shape, gate.bias.shape) == ((4, 4), (4,))
    fast = made(tt.OptimizedLSTMCell, 3, 4)
    assert (fast.dense_i.kernel.shape, fast.dense_i.bias) == ((3, 16), None)
    assert (fast.dense_h.kernel.shape, fast.dense_h.bias.shape) == ((4, 16), (16,))
    gru = made(tt.GRUCell, 3, 4)
    assert (gru.dense_i.kernel.shape, gru.dense_i.bias.shape) == ((3, 12), (12,))
    assert (gru.dense_h.kernel.shape, gru.dense_h.bias) == ((4, 12), None)
    plain = made(tt.SimpleCell, 3, 4)
    assert (plain.dense_i.kernel.shape, plain.dense_i.bias.shape) == ((3, 4), (4,))
    assert (plain.dense_h.kernel.shape, plain.dense_h.bias) == ((4, 4), None)


def test_initializers_of_each_side():
    ones, zeros = jax.nn.initializers.ones, jax.nn.initializers.zeros
    for cls in CELLS:
        options = {"recurrent_kernel_init": zeros, "bias_init": zeros}
        cell = made(cls, 3, 4, kernel_init=ones, **options)
        state = tt.to_flat_state(tt.state(cell, tt.Param))
        for path, variable in state:
            of_inputs = path[0] in {"ii", "if_", "ig", "io", "dense_i"}
            wanted = of_inputs and path[1] == "kernel"
            assert (raw(variable) == wanted).all()


def test_a_recurrent_kernel_begins_orthogonal():
    options = {"kernel_init": drawing(), "rngs": tt.Rngs(0)}
    cell = tt.SimpleCell(3, 4, **options)
    kernel = raw(cell.dense_h.kernel)
    close(kernel @ kernel.T, np.eye(4))
    cell = tt.LSTMCell(3, 4, param_dtype=jnp.bfloat16, **options)
    kernel = raw(cell.hi.kernel)
    close(kernel @ kernel.T, np.eye(4), 0.02)


@pytest.mark.parametrize("cls", CELLS[1:], ids=lambda cls: cls.__name__)
def test_parameters_in_bfloat16_begin_orthogonal_too(cls):
    options = {"kernel_init": drawing(), "rngs": tt.Rngs(0)}
    cls(3, 4, param_dtype=jnp.bfloat16, **options)


@EACH
def test_dtypes_of_parameters_carry_and_outputs(cls):
    cell = made(cls, 3, 4, param_dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(tt.state(cell, tt.Param))} == {
        jnp.dtype(jnp.bfloat16)
    }
    carry = cell.initialize_carry(X)
    assert {part.dtype for part in jax.tree.leaves(carry)} == {jnp.dtype(jnp.bfloat16)}
    cell = made(cls, 3, 4, dtype=jnp.bfloat16)
    carry = jax.tree.map(lambda h: h.astype(jnp.bfloat16), carry_of(cls))
    _, outputs = jax.eval_shape(cell, carry, array(*X))
    assert outputs.dtype == jnp.bfloat16


def test_the_simple_cell_computes_in_float32_unless_told_otherwise():
    assert made(tt.SimpleCell, 3, 4).dtype == jnp.float32
    assert made(tt.GRUCell, 3, 4).dtype is None


# How a carry begins.


@EACH
def test_a_carry_begins_with_zeros_and_needs_no_streams(cls):
    cell = made(cls, 3, 4)
    assert cell.num_feature_axes == 1
    for shape in ((3,), X, (5, 2, 3)):
        carry = cell.initialize_carry(shape)
        assert isinstance(carry, tuple) == (cls in PAIRS)
        for part in jax.tree.leaves(carry):
            assert part.shape == (*shape[:-1], 4)
            assert not part.any()


@EACH
def test_a_carry_may_be_drawn(cls):
    cell = made(cls, 3, 4)
    init = jax.nn.initializers.normal()
    rngs = tt.Rngs(carry=3, default=4)
    parts = jax.tree.leaves(cell.initialize_carry(X, rngs, init))
    for i, part in enumerate(parts):
        key = jax.random.fold_in(jax.random.key(3), i)
        np.testing.assert_array_equal(part, init(key, H, jnp.float32))
    assert int(rngs.carry.count[...]) == len(parts)
    cell.initialize_carry(X, rngs.carry, init)
    assert int(rngs.carry.count[...]) == 2 * len(parts)


@EACH
def test_a_carry_that_is_drawn_needs_streams(cls):
    cell = placed(made(cls, 3, 4))
    message = rf"{cls.__name__} at blocks/1/up: .*`carry_init`, but no `rngs`"
    with pytest.raises(tt.StructureError, match=message):
        cell.initialize_carry(X, carry_init=jax.nn.initializers.normal())
    for rngs in (3, "carry"):
        with pytest.raises(TypeError, match=rf"{cls.__name__} at blocks/1/up: `rngs`"):
            cell.initialize_carry(X, rngs)


@EACH
def test_what_a_cell_kept_in_older_programs(cls):
    with pytest.warns(UserWarning, match=rf"`{cls.__name__}\(keep_rngs=True\)`"):
        cell = made(cls, 3, 4, keep_rngs=True, rngs=tt.Rngs(params=0, carry=3))
    assert cell.rngs.tag == "carry"
    ones = jax.nn.initializers.ones
    with pytest.warns(UserWarning, match=rf"`{cls.__name__}\(carry_init=...\)`"):
        cell = made(cls, 3, 4, carry_init=ones)
    assert cell.carry_init is ones
    assert all(
        (np.asarray(part) == 1).all()
        for part in jax.tree.leaves(cell.initialize_carry(X, tt.Rngs(0)))
    )


@EACH
def test_a_carry_broadcasts_over_the_batch(cls):
    cell = made(cls, 3, 4)
    one = jax.tree.map(lambda part: part[:1], carry_of(cls))
    whole = jax.tree.map(lambda part: jnp.broadcast_to(part, (2, 4)), one)
    for found, expected in zip(
        jax.tree.leaves(cell(one, array(2, 3))),
        jax.tree.leaves(cell(whole, array(2, 3))),
    ):
        close(found, expected)


def test_a_base_for_cells_of_the_user():
    base = tt.RNNCellBase()
    with pytest.raises(NotImplementedError, match="a property `num_feature_axes`"):
        base.num_feature_axes
    with pytest.raises(NotImplementedError, match="a method `initialize_carry"):
        base.initialize_carry(X)


# Errors.


@EACH
def test_inputs_that_do_not_fit_are_refused(cls):
    cell = placed(made(cls, 3, 4))
    before = values_of(cell)
    message = r"Linear at blocks/1/up/\w+: expected inputs with 3 features .*\[2,5\]"
    with pytest.raises(tt.StructureError, match=message):
        cell(carry_of(cls), array(2, 5))
    assert values_of(cell) == before


@EACH
def test_a_carry_of_other_features_is_refused(cls):
    cell = placed(made(cls, 3, 4))
    carry = jax.tree.map(lambda h: h[:, :3], carry_of(cls))
    message = (
        rf"{cls.__name__} at blocks/1/up: the carry must .*\(2, 4\), got .*\[2,3\]"
    )
    with pytest.raises(tt.StructureError, match=message):
        cell(carry, array(*X))


@pytest.mark.parametrize("cls", PAIRS, ids=lambda cls: cls.__name__)
def test_a_carry_that_is_no_pair_is_refused(cls):
    cell, one = placed(made(cls, 3, 4)), array(*H)
    for carry in (one, None, (one,), (one, one, one), {"c": one, "h": one}):
        message = rf"{cls.__name__} at blocks/1/up: .* must be a pair .*initialize_"
        with pytest.raises(tt.StructureError, match=message):
            cell(carry, array(*X))


@pytest.mark.parametrize("cls", CELLS[2:], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("form", [lambda h: (h, h), lambda h: (h, h, h)])
def test_a_carry_that_is_a_pair_is_refused(cls, form):
    cell = placed(made(cls, 3, 4))
    with pytest.raises(tt.StructureError, match=f"{cls.__name__} at blocks/1/up"):
        cell(form(array(*H)), array(*X))


@EACH
def test_a_carry_of_another_batch_is_refused(cls):
    cell = placed(made(cls, 3, 4))
    carry = jax.tree.map(lambda h: jnp.ones((3, 4)), carry_of(cls))
    with pytest.raises(tt.StructureError, match=f"{cls.__name__} at blocks/1/up"):
        cell(carry, array(*X))


def test_the_two_lstm_cells_do_not_exchange_parameters_and_say_so():
    plain, fast = (made(cls, 3, 4) for cls in (tt.LSTMCell, tt.OptimizedLSTMCell))
    assert "do not fit the other" in " ".join(inspect.getdoc(type(fast)).split())
    with pytest.raises(ValueError, match=r"dense_i|ii"):
        tt.update(fast, tt.state(plain, tt.Param))
    sides = {"dense_i": ("ii", "if_", "ig", "io"), "dense_h": ("hi", "hf", "hg", "ho")}
    for name, gates in sides.items():
        kernels = [getattr(plain, gate).kernel[...] for gate in gates]
        getattr(fast, name).kernel[...] = jnp.concatenate(kernels, -1)
    biases = [getattr(plain, gate).bias[...] for gate in sides["dense_h"]]
    fast.dense_h.bias[...] = jnp.concatenate(biases)
    carry = array(2, 4), array(2, 4, seed=1)
    jax.tree.map(close, plain(carry, array(2, 3)), fast(carry, array(2, 3)))


def test_a_gru_has_the_bias_that_its_documentation_tells_of():
    cell = made(tt.GRUCell, 3, 4, bias_init=drawing())
    assert cell.dense_h.bias is None
    assert cell.dense_i.bias.shape == (12,)
    assert "the bias is on the side of the inputs" in inspect.getdoc(tt.GRUCell)
