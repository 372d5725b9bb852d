# SPDX-License-Identifier: Apache-2.0
"""Known defects of NNX's layers, each shown absent here.

The number in a test's name is the defect's number in the project's list.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from formulas import (
    array,
    close,
    compiled,
    drawing,
    made,
    moments_of,
    multihead,
    numbers,
    ran,
    raw,
    values_of,
    weighed,
    weights_of,
)
from jax import lax

import treetap as tt
from treetap._nn.parameters import canonical_axes

X = (2, 5, 4)


def attend(*arrays, **options):
    run = functools.partial(tt.dot_product_attention, **options)
    return compiled(run)(*arrays)


def attention(**options):
    return made(tt.MultiHeadAttention, 2, 4, **options)


def linear():
    return made(tt.Linear, 3, 4)


def gru(**options):
    return tt.RNN(made(tt.GRUCell, 3, 4), **options)


def test_D26_a_step_past_the_end_of_the_cache_is_refused():
    layer = attention(decode=True)
    layer.init_cache((2, 1, 4))
    layer(array(2, 1, 4))
    before = values_of(layer)
    with pytest.raises(tt.StructureError, match="the cache of 1 positions is full"):
        layer(array(2, 1, 4, seed=1))
    step = tt.jit(lambda layer, x: layer(x))
    assert np.isnan(step(layer, array(2, 1, 4, seed=1))).all()
    assert values_of(layer) == before


def test_D26b_a_view_that_decodes_has_a_cache():
    decoder = tt.view(attention(), decode=True, batch_size=2, max_length=3)
    assert decoder.cached_key.shape == decoder.cached_value.shape == (2, 3, 2, 2)
    assert int(decoder.cache_index[...]) == 0


def test_D27_attention_can_be_called_as_it_is_made():
    layer = attention()
    assert (layer.decode, layer.deterministic) == (None, None)
    close(ran(layer, array(*X)), multihead(layer, numbers(*X)))


def test_D28_values_of_another_depth():
    query, value = array(2, 5, 2, 4), array(2, 5, 2, 3)
    weights = weights_of(numbers(2, 5, 2, 4), numbers(2, 5, 2, 4))
    expected = weighed(weights, numbers(2, 5, 2, 3))
    close(attend(query, query, value), expected)


def test_D28_masks_broadcast_over_part_of_several_batch_axes():
    shape = (2, 3, 5, 2, 4)
    x, given = numbers(*shape), array(*shape)
    for over in ((2, 1, 1, 5, 5), (1, 3, 2, 1, 5)):
        mask = numbers(*over) > -0.5
        mask[..., 0] = True
        expected = weighed(weights_of(x, x, mask=mask), x)
        close(attend(given, given, given, mask=mask), expected)


def test_D28_precision_is_not_ignored():
    x = array(2, 5, 2, 4)
    run = lambda x: tt.dot_product_attention(x, x, x, precision="highest")
    assert str(jax.make_jaxpr(run)(x)).count("HIGHEST, Precision.HIGHEST") == 2


def test_D28_results_do_not_depend_on_which_options_are_set():
    x = array(2, 5, 2, 4, dtype=jnp.bfloat16)
    plain = jax.make_jaxpr(tt.dot_product_attention)(x, x, x)
    off = {"dropout_rate": 0.5, "deterministic": True}
    run = functools.partial(tt.dot_product_attention, **off)
    assert str(jax.make_jaxpr(run)(x, x, x)) == str(plain)
    layer = attention()
    plain = jax.make_jaxpr(layer)(array(*X))
    tt.set_sow_outside_capture("ignore")
    try:
        sown = jax.make_jaxpr(lambda x: layer(x, sow_weights=True))(array(*X))
    finally:
        tt.set_sow_outside_capture("store")
    assert str(sown) == str(plain)


@pytest.mark.parametrize("shape", [(2, 1, 1, 5), (1, 1, 5, 1), (1, 1), (5,)])
def test_D29_positions_and_masks_with_axes_of_one(shape):
    mask = numbers(*shape) > -0.9
    mask[..., :1] = True
    x = numbers(2, 5, 2, 4)
    given = array(2, 5, 2, 4)
    options = {"mask": mask, "dropout_rate": 0.5, "deterministic": True}
    found = attend(given, given, given, is_causal=True, **options)
    close(found, weighed(weights_of(x, x, mask=mask, causal=True), x))


def test_D30_the_carry_of_sequences_in_two_batch_axes():
    rnn = gru(return_carry=True)
    lengths = np.array([[1, 2, 3], [4, 5, 2]])
    carry, outputs = ran(rnn, array(2, 3, 5, 3), seq_lengths=lengths)
    assert carry.shape == (2, 3, 4)
    for at in np.ndindex(2, 3):
        close(carry[at], outputs[at][lengths[at] - 1])


def test_D31_groups_with_a_middle_axis_that_is_not_reduced():
    layer = made(tt.GroupNorm, 6, 2, reduction_axes=(1, 3), use_fast_variance=False)
    x = numbers(2, 4, 4, 6)
    expected = np.zeros(x.shape)
    for part in (slice(0, 3), slice(3, 6)):
        mean, var = moments_of(x[..., part], (1, 3))
        expected[..., part] = (x[..., part] - mean) / np.sqrt(var + 1e-6)
    expected = expected * raw(layer.scale) + raw(layer.bias)
    close(ran(layer, array(2, 4, 4, 6)), expected)


def test_D32_scales_of_weights_are_trained():
    layer = made(tt.WeightNorm, linear())
    flat = dict(tt.to_flat_state(tt.state(layer, tt.Param)))
    assert ("scales", ("kernel",)) in flat
    loss = tt.grad(lambda layer: jnp.sum(layer(array(2, 3)) ** 2))
    grads = compiled(lambda layer: loss(layer))(layer)
    assert (np.abs(grads.scales["kernel",][...]) > 1e-4).all()


def test_D32_scales_may_be_drawn():
    init = jax.nn.initializers.normal()
    layer = tt.WeightNorm(linear(), scale_init=init, rngs=tt.Rngs(0))
    assert len(set(raw(layer.scales["kernel",]).tolist())) == 4


def test_D33_axes_to_sum_over_in_any_order():
    layer = made(tt.LinearGeneral, (3, 2), 4, axis=(-1, 1))
    expected = np.einsum("ajbi,ijo->abo", numbers(6, 2, 5, 3), raw(layer.kernel))
    close(ran(layer, array(6, 2, 5, 3)), expected + raw(layer.bias))


def test_D44_statistics_are_not_rounded_before_they_are_used():
    layer = made(tt.BatchNorm, 3, dtype=jnp.bfloat16, momentum=0.0)
    x = jnp.asarray(100.3 + numbers(64, 3), jnp.float32)
    trained = layer(x)
    exact = np.asarray(x, np.float64)
    mean, var = moments_of(exact, (0,))
    expected = (exact - mean) / np.sqrt(var + 1e-5) * raw(layer.scale) + raw(layer.bias)
    for found in (trained, layer(x, use_running_average=True)):
        assert found.dtype == jnp.bfloat16
        close(found.astype(jnp.float32), expected, 0.02)


@pytest.mark.parametrize("cls", [tt.SpectralNorm, tt.WeightNorm])
def test_D45_the_weights_of_the_layer_stay(cls):
    layer = made(cls, linear())
    kernel, bias = raw(layer.layer_instance.kernel), raw(layer.layer_instance.bias)
    layer(array(2, 3))
    options = {"update_stats": False} if cls is tt.SpectralNorm else {}
    for _ in range(2):
        layer(array(2, 3), **options)
    np.testing.assert_array_equal(raw(layer.layer_instance.kernel), kernel)
    np.testing.assert_array_equal(raw(layer.layer_instance.bias), bias)


def test_D52_what_a_layer_goes_without_can_be_given_later():
    layer = attention(dropout_rate=0.5, keep_rngs=False, deterministic=False)
    assert layer.rngs is None
    layer.rngs = tt.RngStream(0, tag="dropout")
    tt.eval_shape(lambda layer, x: layer(x), layer, array(*X))
    layer.attention_fn = lambda query, key, value, **options: value
    layer(array(*X))
    assert int(layer.rngs.count[...]) == 1
    norm = made(tt.InstanceNorm, 4, use_scale=False, use_bias=False)
    assert (norm.scale, norm.bias) == (None, None)
    norm.scale, norm.bias = tt.Param(jnp.ones(4)), tt.Param(jnp.full(4, 2.0))
    close(ran(norm, array(*X)).mean(1), np.full((2, 4), 2.0))


def test_D53_a_stream_may_be_given_and_is_forked():
    for make in (gru, lambda **options: tt.Bidirectional(gru(), gru(), **options)):
        stream = tt.RngStream(3, tag="carry")
        layer = make(rngs=stream)
        assert layer.rngs is not stream
        assert layer.rngs.key[...] == jax.random.fold_in(jax.random.key(3), 0)
        assert int(stream.count[...]) == 1
        layer(array(2, 5, 3))
        assert int(stream.count[...]) == 1


@pytest.mark.parametrize(
    ("size", "strides", "dilation"), [(3, 1, 1), (2, 3, 1), (3, 2, 2)]
)
def test_D54_a_transposed_convolution_can_be_causal(size, strides, dilation):
    options = {"padding": "CAUSAL", "kernel_dilation": dilation}
    layer = made(tt.ConvTranspose, 2, 6, size, strides, **options)
    x = array(1, 5, 2)
    outputs = layer(x)
    assert outputs.shape == (1, 5 * strides, 6)
    changed = np.asarray(layer(x.at[:, 3].add(1.0)) != outputs).any((0, 2))
    assert not changed[: 3 * strides].any()
    assert changed[3 * strides]
    kernel = np.flip(raw(layer.kernel), 0)
    expected = np.zeros((5 * strides + 2 * size * dilation, 6))
    for i in range(5):
        for j in range(size):
            expected[i * strides + j * dilation] += numbers(1, 5, 2)[0, i] @ kernel[j]
    close(outputs[0], expected[: 5 * strides] + raw(layer.bias))


def test_D55_an_einsum_without_a_string_takes_that_of_the_call():
    layer = made(tt.Einsum, None, (3, 4))
    assert layer.einsum_str is None
    close(layer(array(2, 3), "ab,bc->ac"), numbers(2, 3) @ raw(layer.kernel))
    with pytest.raises(tt.StructureError, match=r"no einsum string. Give one"):
        layer(array(2, 3))


def test_D58_axes_keep_the_order_they_are_given_in():
    assert canonical_axes(None, (0, 1, -2), 10) == (0, 1, 8)
    assert canonical_axes(None, (-2, 1, 0), 10) == (8, 1, 0)


# Defect 63, sentence by sentence.


def test_D63_windows_strides_and_padding_of_pools_may_be_lists():
    x = array(1, 4, 4, 2)
    for pool in (tt.max_pool, tt.min_pool, tt.avg_pool):
        expected = pool(x, (2, 2), (2, 1), ((1, 0), (0, 1)))
        found = pool(x, [2, 2], [2, 1], [[1, 0], [0, 1]])
        np.testing.assert_array_equal(found, expected)


def test_D63_an_operation_need_not_know_about_shardings():
    def dot_general(lhs, rhs, dimension_numbers, precision=None):
        return lax.dot_general(lhs, rhs, dimension_numbers, precision=precision)

    def einsum(text, lhs, rhs, precision=None):
        return jnp.einsum(text, lhs, rhs, precision=precision)

    for layer in (
        made(tt.Linear, 3, 4, dot_general=dot_general),
        made(tt.LinearGeneral, 3, 4, dot_general=dot_general),
        made(tt.Einsum, "ab,bc->ac", (3, 4), (4,), einsum_op=einsum),
    ):
        expected = numbers(2, 3) @ raw(layer.kernel) + raw(layer.bias)
        close(ran(layer, array(2, 3)), expected)
    options = {"qkv_dot_general": dot_general, "out_dot_general": dot_general}
    layer = attention(**options)
    close(ran(layer, array(*X)), multihead(layer, numbers(*X)))


def test_D63_the_mask_of_a_convolution_is_no_leaf_and_averages_go_on():
    mask = np.tri(3, 12, dtype=bool).reshape(3, 2, 6)
    layer = made(tt.Conv, 2, 6, 3, mask=mask)
    assert {path for path, _ in tt.to_flat_state(tt.state(layer))} == {
        ("kernel",),
        ("bias",),
    }
    average, before = tt.EMA(layer, 0.5), raw(layer.kernel)
    layer.kernel[...] = layer.kernel[...] + 1.0
    average.update(layer)
    close(average.params["kernel"][...], before + 0.5)


def test_D63_groups_that_do_not_divide_are_a_value_error():
    with pytest.raises(ValueError, match="feature_group_count=2 must divide"):
        made(tt.Conv, 3, 4, 3, feature_group_count=2)


def test_D63_an_rnn_without_streams_is_made_of_parameters():
    rnn = gru(rngs=False)
    graphdef, parameters = tt.split(rnn, tt.Param)
    same = tt.merge(graphdef, parameters)
    close(same(array(2, 5, 3)), rnn(array(2, 5, 3)))


def test_D63_a_carry_of_zeros_needs_no_streams():
    rnn = gru(rngs=False)
    assert rnn.rngs is None
    assert jax.jit(lambda x: rnn(x))(array(2, 5, 3)).shape == (2, 5, 4)
    assert not rnn.cell.initialize_carry((2, 3)).any()


def test_D63_the_two_lstm_cells_do_not_exchange_parameters_and_say_so():
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


def test_D63_a_gru_has_the_bias_that_its_documentation_tells_of():
    cell = made(tt.GRUCell, 3, 4, bias_init=drawing())
    assert cell.dense_h.bias is None
    assert cell.dense_i.bias.shape == (12,)
    assert "the bias is on the side of the inputs" in inspect.getdoc(tt.GRUCell)
