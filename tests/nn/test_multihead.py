# SPDX-License-Identifier: Apache-2.0
"""MultiHeadAttention: its projections, options and errors, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from formulas import (
    array,
    close,
    compiled,
    counts_of,
    drawing,
    made,
    multihead,
    numbers,
    placed,
    projected,
    ran,
    raw,
    weighed,
    weights_of,
)
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import treetap as tt
from meshes import mesh_of

P = PartitionSpec
X = (2, 5, 4)


def attention(*args, **options):
    return made(tt.MultiHeadAttention, *(args or (2, 4)), **options)


@pytest.mark.parametrize(
    ("args", "options", "shape"),
    [
        ((2, 4), {}, X),
        ((2, 4, 6, 3), {}, X),
        ((4, 4, 8), {"num_kv_heads": 2}, X),
        ((2, 4), {"normalize_qk": True}, X),
        ((2, 4), {"use_bias": False}, X),
        ((2, 4), {}, (5, 4)),
        ((2, 4), {}, (2, 3, 5, 4)),
    ],
    ids=str,
)
def test_attention_to_itself(args, options, shape):
    layer = attention(*args, **options)
    close(ran(layer, array(*shape)), multihead(layer, numbers(*shape)))


def test_sizes_that_are_left_out_are_those_of_the_inputs():
    layer = attention(2, 4)
    found = (layer.qkv_features, layer.out_features, layer.in_kv_features)
    assert (*found, layer.num_kv_heads, layer.head_dim) == (4, 4, 4, 2, 2)
    layer = attention(4, 3, 8, 5, 2, 6)
    assert layer.query.kernel.shape == (3, 4, 2)
    assert layer.key.kernel.shape == layer.value.kernel.shape == (6, 2, 2)
    assert layer.out.kernel.shape == (4, 2, 5)
    assert layer.query.bias.shape == (4, 2)


def test_attention_to_others():
    layer = attention(2, 4, in_kv_features=3)
    q, k, v = X, (2, 7, 3), (2, 7, 3)
    found = ran(layer, array(*q), array(*k), array(*v, seed=1))
    close(found, multihead(layer, numbers(*q), numbers(*k), numbers(*v, seed=1)))
    found = ran(layer, array(*q), array(*k))
    close(found, multihead(layer, numbers(*q), numbers(*k)))


def test_masks_and_positions():
    layer = attention()
    mask = np.arange(25).reshape(5, 5) % 3 != 1
    close(ran(layer, array(*X), mask=mask), multihead(layer, numbers(*X), mask=mask))
    expected = multihead(layer, numbers(*X), mask=mask, causal=True)
    close(ran(layer, array(*X), mask=mask, is_causal=True), expected)


def test_initializers_of_the_last_projection():
    ones, zeros = jax.nn.initializers.ones, jax.nn.initializers.zeros
    layer = attention(kernel_init=ones, bias_init=ones)
    assert layer.out.kernel[...].all()
    assert layer.out.bias[...].all()
    own = {"out_kernel_init": zeros, "out_bias_init": zeros}
    layer = attention(kernel_init=ones, bias_init=ones, **own)
    assert not layer.out.kernel[...].any()
    assert not layer.out.bias[...].any()
    assert layer.value.kernel[...].all()


def test_what_computes_the_attention_can_be_replaced():
    seen = []

    def instead(query, key, value, **options):
        seen.append(options)
        return 2 * value

    options = {"attention_fn": instead, "dtype": jnp.float32, "precision": "highest"}
    layer = attention(deterministic=True, dropout_rate=0.5, **options)
    expected = 2 * projected(layer.value, numbers(*X))
    expected = np.einsum("...hd,hdo->...o", expected, raw(layer.out.kernel))
    found = layer(array(*X), is_causal=True, sow_weights=True)
    close(found, expected + raw(layer.out.bias))
    assert seen == [
        {
            "mask": None,
            "dropout_rng": None,
            "dropout_rate": 0.5,
            "broadcast_dropout": True,
            "deterministic": True,
            "dtype": jnp.float32,
            "precision": "highest",
            "module": layer,
            "is_causal": True,
        }
    ]


def plain_dot_general(lhs, rhs, dimension_numbers, precision=None):
    return 2 * lax.dot_general(lhs, rhs, dimension_numbers, precision=precision)


def test_operations_of_the_user_need_not_know_newer_options():
    layer = attention(out_dot_general=plain_dot_general)
    expected = 2 * multihead(layer, numbers(*X)) - raw(layer.out.bias)
    close(ran(layer, array(*X)), expected)
    layer = attention(qkv_dot_general=plain_dot_general)
    assert layer.query.dot_general is layer.key.dot_general is plain_dot_general
    assert layer.out.dot_general is None
    layer = attention(
        qkv_dot_general_cls=lambda: plain_dot_general,
        out_dot_general_cls=lambda: plain_dot_general,
        use_bias=False,
    )
    x = numbers(*X)
    weights = weights_of(2 * projected(layer.query, x), 2 * projected(layer.key, x))
    inner = weighed(weights, 2 * projected(layer.value, x))
    expected = 2 * np.einsum("...hd,hdo->...o", inner, raw(layer.out.kernel))
    close(ran(layer, array(*X)), expected)


def test_a_fused_implementation_can_be_asked_for():
    layer = attention(implementation="xla")
    close(
        ran(layer, array(*X), is_causal=True),
        multihead(layer, numbers(*X), causal=True),
    )


def test_weights_are_sown_if_asked_for():
    layer = attention()

    def run(layer, x):
        return layer(x, sow_weights=True)

    found, sown = tt.capture(run, tt.Intermediate)(layer, array(*X))
    close(found, multihead(layer, numbers(*X)))
    query, key = (projected(p, numbers(*X)) for p in (layer.query, layer.key))
    close(sown["attention_weights"][0], weights_of(query, key))


# Dropout.


class Spy:
    """Stands for attention, and keeps what dropping is told."""

    def __init__(self):
        self.told = []

    def __call__(self, query, key, value, *, dropout_rng, deterministic, **options):
        rate, together = options["dropout_rate"], options["broadcast_dropout"]
        if not deterministic:
            assert (rate, together) == (0.25, False)
            dropout_rng = tuple(jax.random.key_data(dropout_rng).tolist())
        self.told.append(dropout_rng)
        return value


def nth_key(key, *counts):
    for count in counts:
        key = jax.random.fold_in(key, count)
    return tuple(jax.random.key_data(key).tolist())


def test_weights_are_dropped_by_a_stream_of_its_own():
    spy, rngs = Spy(), tt.Rngs(params=0, dropout=3)
    options = {"dropout_rate": 0.25, "broadcast_dropout": False, "attention_fn": spy}
    layer = attention(deterministic=False, rngs=rngs, **options)
    x = array(*X)
    layer(x)
    layer(x)
    layer(x, deterministic=True)
    tt.view(layer, deterministic=True)(x)
    key = jax.random.key(3)
    assert spy.told == [nth_key(key, 0, 0), nth_key(key, 0, 1), None, None]
    assert counts_of(layer) == {("rngs", "count"): 2}


def test_a_call_may_bring_streams_a_stream_or_a_key():
    spy, rngs = Spy(), tt.Rngs(dropout=3)
    options = {"dropout_rate": 0.25, "broadcast_dropout": False, "attention_fn": spy}
    layer = attention(keep_rngs=False, deterministic=True, **options)
    assert layer.rngs is None
    x, key = array(*X), jax.random.key(3)
    for given in (key, rngs, rngs.dropout):
        layer(x, deterministic=False, rngs=given)
    assert spy.told == [nth_key(key), nth_key(key, 0), nth_key(key, 1)]


def test_a_stream_is_kept_only_where_weights_are_dropped():
    rngs = tt.Rngs(params=0, dropout=3)
    assert attention(rngs=rngs).rngs is None
    assert attention(rngs=rngs, dropout_rate=0.5, keep_rngs=False).rngs is None
    assert int(rngs.dropout.count[...]) == 0
    assert attention(rngs=rngs, dropout_rate=0.5).rngs.tag == "dropout"


# Errors.


@pytest.mark.parametrize(
    ("args", "options", "words"),
    [
        ((3, 4), {}, "num_heads=3 must divide qkv_features=4"),
        ((0, 4), {}, "num_heads=0 must divide"),
        ((4, 8), {"num_kv_heads": 3}, "num_kv_heads=3 must divide num_heads=4"),
        ((4, 8), {"num_kv_heads": 0}, "num_kv_heads=0 must divide"),
        ((2, -4), {}, "`in_features` must be a non-negative integer, got -4"),
        ((2, 4, -4), {}, "`qkv_features` must be a non-negative integer"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(args, options, words):
    rngs = tt.Rngs(0)
    with pytest.raises(tt.StructureError, match=f"^MultiHeadAttention: {words}"):
        tt.MultiHeadAttention(*args, **options, rngs=rngs)
    assert int(rngs.default.count[...]) == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("out_features", -1),
        ("in_kv_features", -1),
        ("out_features", 2.5),
        ("dropout_rate", 1.5),
        ("dropout_rate", -0.5),
    ],
)
def test_other_arguments_that_do_not_fit_are_refused(name, value):
    rngs = tt.Rngs(0)
    with pytest.raises(tt.StructureError, match=f"^MultiHeadAttention: .*{name}"):
        tt.MultiHeadAttention(2, 4, **{name: value}, kernel_init=drawing(), rngs=rngs)
    assert int(rngs.default.count[...]) == 0


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (
            ((2, 5, 3),),
            r"`inputs_q` must be \[batch..., length, 4\], got float32\[2,5,3\]",
        ),
        (((4,),), r"`inputs_q` must be .* got float32\[4\]"),
        ((X, (2, 7, 3)), r"`inputs_k` must be .* got float32\[2,7,3\]"),
        ((X, X, (2, 5, 6)), r"`inputs_v` must be .* got float32\[2,5,6\]"),
        ((X, None, X), "`inputs_v` is given without `inputs_k`"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(shapes, words):
    layer = placed(attention())
    message = f"MultiHeadAttention at blocks/1/up: {words}"
    with pytest.raises(tt.StructureError, match=message):
        layer(*(None if shape is None else array(*shape) for shape in shapes))


@pytest.mark.parametrize(
    ("shapes", "mask"),
    [((X, (2, 7, 4), (2, 6, 4)), None), ((X, (3, 5, 4)), None), ((X,), (3, 5))],
    ids=["lengths", "batch", "mask"],
)
def test_what_attention_refuses_says_where_the_layer_is(shapes, mask):
    layer = placed(attention())
    mask = None if mask is None else jnp.ones(mask, bool)
    with pytest.raises(tt.StructureError, match="MultiHeadAttention at blocks/1/up"):
        layer(*(array(*shape) for shape in shapes), mask=mask)


def test_what_attention_refuses_draws_no_key():
    layer = attention(dropout_rate=0.5, deterministic=False)
    with pytest.raises(tt.StructureError, match="`mask` must broadcast"):
        layer(array(*X), mask=jnp.ones((3, 5), bool))
    assert counts_of(layer) == {("rngs", "count"): 0}


def test_results_are_sharded_as_asked():
    expected = np.asarray(ran(attention(4, 8), array(2, 5, 8)))
    with jax.set_mesh(mesh_of((2, 4), ("data", "model"), AxisType.Explicit)):
        layer, spec = attention(4, 8), P("data", None, "model")
        seen = []
        inner = layer.attention_fn

        def spied(query, *args, **options):
            seen.append(jax.typeof(query).sharding.spec)
            return inner(query, *args, **options)

        layer.attention_fn = spied
        x = jax.device_put(array(2, 5, 8), P("data"))
        heads = P("data", None, "model", None)
        options = {"out_sharding": spec, "qkv_sharding": heads}
        outputs = compiled(lambda x: layer(x, **options))(x)
        assert jax.typeof(outputs).sharding.spec == spec
        assert seen == [heads]
        close(outputs, expected)


def two_heads(**options):
    return made(tt.MultiHeadAttention, 2, 4, **options)


def test_attention_can_be_called_as_it_is_made():
    layer = two_heads()
    assert (layer.decode, layer.deterministic) == (None, None)
    close(ran(layer, array(*X)), multihead(layer, numbers(*X)))


def test_what_a_layer_goes_without_can_be_given_later():
    layer = two_heads(dropout_rate=0.5, keep_rngs=False, deterministic=False)
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
