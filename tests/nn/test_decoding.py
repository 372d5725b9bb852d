# SPDX-License-Identifier: Apache-2.0
"""Decoding with MultiHeadAttention: steps, caches, and the end of a cache."""

import jax.numpy as jnp
import numpy as np
import pytest
from formulas import (
    Model,
    array,
    close,
    layer_normalized,
    made,
    multihead,
    numbers,
    placed,
    projected,
    values_of,
)
from jax.experimental import checkify

import treetap as tt

X = (2, 5, 4)


def attention(*args, **options):
    return made(tt.MultiHeadAttention, *(args or (2, 4)), **options)


def decoded(layer, x):
    steps = [layer(x[..., i : i + 1, :]) for i in range(x.shape[-2])]
    return np.concatenate(steps, -2)


@pytest.mark.parametrize(
    ("args", "options", "shape"),
    [
        ((2, 4), {}, X),
        ((4, 4, 8), {"num_kv_heads": 2, "normalize_qk": True}, X),
        ((2, 4), {}, (5, 4)),
        ((2, 4), {}, (2, 3, 5, 4)),
    ],
    ids=str,
)
def test_steps_give_what_the_whole_gives(args, options, shape):
    layer = attention(*args, **options)
    layer.init_cache(shape)
    run = tt.jit(lambda layer, x: layer(x, decode=True))
    found = decoded(lambda x: run(layer, x), array(*shape))
    close(found, multihead(layer, numbers(*shape), causal=True))
    assert int(layer.cache_index[...]) == 5
    heads = (layer.num_kv_heads, layer.head_dim)
    assert layer.cached_key.shape == layer.cached_value.shape == (*shape[:-1], *heads)
    key = projected(layer.key, numbers(*shape))
    if layer.key_ln is not None:
        key = layer_normalized(layer.key_ln, key)
    close(layer.cached_key[...], key)
    close(layer.cached_value[...], projected(layer.value, numbers(*shape)))


def test_steps_with_a_mask():
    layer = attention()
    layer.init_cache(X)
    seen = np.array([True, False, True, True, True])
    run = tt.jit(lambda layer, x: layer(x, decode=True, mask=seen))
    found = decoded(lambda x: run(layer, x), array(*X))
    expected = multihead(layer, numbers(*X), mask=seen[None], causal=True)
    close(found[:, 2:], expected[:, 2:])


def test_a_view_has_a_cache_of_its_own():
    layer = attention(dropout_rate=0.5)
    decoder = tt.view(
        layer, decode=True, deterministic=True, batch_size=2, max_length=5
    )
    assert (decoder.decode, layer.decode, layer.cached_key) == (True, None, None)
    assert decoder.cached_key.shape == (2, 5, 2, 2)
    close(decoded(decoder, array(*X)), multihead(layer, numbers(*X), causal=True))
    several = tt.view(layer, decode=True, batch_size=(2, 3), max_length=5)
    assert several.cached_key.shape == (2, 3, 5, 2, 2)
    again = tt.view(decoder, batch_size=2, max_length=5)
    assert int(again.cache_index[...]) == 0
    assert int(decoder.cache_index[...]) == 5


def test_a_view_of_a_model_makes_the_caches_of_all_layers():
    model = tt.Sequential(attention(), attention())
    decoder = tt.view(model, decode=True, batch_size=2, max_length=5)
    assert [layer.cached_key.shape for layer in decoder.layers] == [(2, 5, 2, 2)] * 2


def test_the_dtype_of_the_cache():
    layer = attention()
    layer.init_cache(X, jnp.bfloat16)
    assert (layer.cached_key.dtype, layer.cache_index.dtype) == (
        jnp.bfloat16,
        jnp.int32,
    )
    assert all(
        type(v) is tt.Cache
        for v in (layer.cached_key, layer.cached_value, layer.cache_index)
    )
    layer(array(2, 1, 4), decode=True)
    assert layer.cached_key.dtype == jnp.bfloat16
    half = tt.view(attention(dtype=jnp.float16), batch_size=2, max_length=3)
    assert half.cached_key.dtype == jnp.float16


def full():
    """A layer with a cache of two positions, both in use."""
    layer = placed(attention(decode=True))
    layer.init_cache((2, 2, 4))
    layer.cached_key[...] = array(2, 2, 2, 2)
    layer.cached_value[...] = array(2, 2, 2, 2, seed=1)
    layer.cache_index[...] = jnp.int32(2)
    return layer


def test_a_step_past_the_end_is_refused_and_changes_nothing():
    layer = full()
    before = values_of(layer)
    message = (
        r"MultiHeadAttention at blocks/1/up: the cache of 2 positions is full.*view"
    )
    with pytest.raises(tt.StructureError, match=message):
        layer(array(2, 1, 4))
    assert values_of(layer) == before


def step(layer, x):
    return layer(x)


def test_a_compiled_step_past_the_end_gives_nan_and_changes_nothing():
    layer = full()
    before = values_of(layer)
    run = tt.jit(step)
    assert np.isnan(run(layer, array(2, 1, 4))).all()
    assert values_of(layer) == before
    layer.init_cache((2, 2, 4))
    outputs = [run(layer, array(2, 1, 4, seed=i)) for i in range(2)]
    assert np.isfinite(outputs).all()
    assert int(layer.cache_index[...]) == 2


def test_a_checked_step_past_the_end_is_an_error():
    model = Model(full())
    before = values_of(model)
    for run in (tt.jit(tt.checkify(step)), tt.checkify(tt.jit(step))):
        error, _ = run(model, array(2, 1, 4))
        message = "MultiHeadAttention at blocks/1/up: the cache of 2 positions is full"
        with pytest.raises(checkify.JaxRuntimeError, match=message):
            error.throw()
        assert values_of(model) == before
    model.blocks[1].up.init_cache((2, 2, 4))
    error, outputs = run(model, array(2, 1, 4))
    assert error.get() is None
    assert np.isfinite(outputs).all()


# Errors.

STEPS = {
    "a length": ({}, {"x": (2, 2, 4)}, "one position at a time"),
    "a batch": ({}, {"x": (3, 1, 4)}, r"a batch of \(2,\)"),
    "a mask": ({}, {"mask": (2, 1, 1, 7)}, "`mask` must broadcast"),
    "a rank": ({}, {"mask": (1, 1, 2, 1, 1, 3)}, "`mask` must broadcast"),
    "no mode": ({"dropout_rate": 0.5}, {}, "`deterministic` is given neither"),
    "no streams": (
        {"dropout_rate": 0.5, "deterministic": False, "keep_rngs": False},
        {},
        "`deterministic` is False, but no `rngs` argument was provided",
    ),
    "no features": ({}, {"x": (2, 1, 3)}, "`inputs_q` must be"),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_that_do_not_fit_are_refused_and_change_nothing(name):
    options, given, words = STEPS[name]
    layer = placed(attention(decode=True, **options))
    layer.init_cache((2, 3, 4))
    before = values_of(layer)
    mask = jnp.ones(given["mask"], bool) if "mask" in given else None
    message = f"MultiHeadAttention at blocks/1/up: .*{words}"
    with pytest.raises(tt.StructureError, match=message):
        layer(array(*given.get("x", (2, 1, 4))), mask=mask)
    assert values_of(layer) == before


def test_decoding_needs_a_cache():
    message = "MultiHeadAttention at blocks/1/up: decoding needs a cache.*init_cache"
    with pytest.raises(tt.StructureError, match=message):
        placed(attention(decode=True))(array(2, 1, 4))


@pytest.mark.parametrize("given", [{"batch_size": 2}, {"max_length": 2}])
def test_a_cache_needs_both_sizes(given):
    (missing,) = {"batch_size", "max_length"} - given.keys()
    with pytest.raises(tt.StructureError, match=f"both sizes; `{missing}` is missing"):
        tt.view(attention(), decode=True, **given)


@pytest.mark.parametrize("shape", [(4,), (2, -1, 4), (2, 3, 7)])
def test_a_cache_of_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match=r"MultiHeadAttention.*input_shape"):
        attention().init_cache(shape)


def two_heads(**options):
    return made(tt.MultiHeadAttention, 2, 4, **options)


def test_a_step_past_the_end_of_the_cache_is_refused():
    layer = two_heads(decode=True)
    layer.init_cache((2, 1, 4))
    layer(array(2, 1, 4))
    before = values_of(layer)
    with pytest.raises(tt.StructureError, match="the cache of 1 positions is full"):
        layer(array(2, 1, 4, seed=1))
    step = tt.jit(lambda layer, x: layer(x))
    assert np.isnan(step(layer, array(2, 1, 4, seed=1))).all()
    assert values_of(layer) == before


def test_a_view_that_decodes_has_a_cache():
    decoder = tt.view(two_heads(), decode=True, batch_size=2, max_length=3)
    assert decoder.cached_key.shape == decoder.cached_value.shape == (2, 3, 2, 2)
    assert int(decoder.cache_index[...]) == 0
