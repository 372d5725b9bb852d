# SPDX-License-Identifier: Apache-2.0
"""RoPE against complex rotations in numpy, and attention with it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from formulas import array, close, made, numbers, placed

import treetap as tt

X = (2, 5, 8)
HEADS = (2, 5, 3, 8)


def turned(x, positions=None, theta=10000.0):
    """Feature i is the real part, feature i + half the imaginary one."""
    half = x.shape[-1] // 2
    positions = np.arange(x.shape[-2]) if positions is None else np.asarray(positions)
    angles = positions[..., None] * theta ** -(np.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([z.real, z.imag], -1)


def heads_turned(x, positions=None):
    return np.stack([turned(x[..., i, :], positions) for i in range(x.shape[-2])], -2)


@pytest.mark.parametrize("cached", [{}, {"embedding_size": 8, "max_seq_len": 7}])
@pytest.mark.parametrize("positions", [None, [3, 4, 0, 90, 2], [[1] * 5, [2.5] * 5]])
@pytest.mark.parametrize("theta", [10000.0, 20.0])
def test_features_are_turned_by_their_position(cached, positions, theta):
    given = None if positions is None else jnp.asarray(positions)
    found = tt.RoPE(theta, **cached)(array(*X), given)
    close(found, turned(numbers(*X), positions, theta), 1e-4)


def test_more_positions_than_are_kept_are_computed():
    rope = tt.RoPE(embedding_size=8, max_seq_len=2)
    assert rope.cached_cos.shape == rope.cached_sin.shape == (2, 4)
    assert not isinstance(rope.cached_cos, tt.Param)
    close(rope(array(*X)), turned(numbers(*X)))
    assert tt.RoPE().cached_cos is None


def test_any_axes_ahead_and_any_dtype():
    for shape in ((5, 8), (3, 2, 5, 8)):
        close(tt.RoPE()(array(*shape)), turned(numbers(*shape)))
    assert tt.RoPE()(array(*X).astype(jnp.bfloat16)).dtype == jnp.float32
    assert tt.RoPE()(jnp.ones((2, 4), jnp.int32)).dtype == jnp.float32


@pytest.mark.parametrize("positions", [None, [4, 5, 6, 7, 9], [[1, 2, 3, 4, 5]] * 2])
def test_attention_turns_each_head(positions):
    q, k, v = (array(*HEADS, seed=seed) for seed in range(3))
    given = None if positions is None else jnp.asarray(positions)
    found = tt.dot_product_attention_with_rope(
        q, k, v, rope=tt.RoPE(), input_positions=given, is_causal=True
    )
    q, k = (heads_turned(np.asarray(x), positions) for x in (q, k))
    close(found, tt.dot_product_attention(q, k, v, is_causal=True), 1e-4)


def test_positions_may_differ_by_head():
    q, k, v = (array(*HEADS, seed=seed) for seed in range(3))
    positions = np.arange(15).reshape(5, 3)
    found = tt.dot_product_attention_with_rope(
        q, k, v, rope=tt.RoPE(), input_positions=jnp.asarray(positions)
    )
    q, k = (
        np.stack([turned(np.asarray(x)[:, :, i], positions[:, i]) for i in range(3)], 2)
        for x in (q, k)
    )
    close(found, tt.dot_product_attention(q, k, v), 1e-4)


def test_keys_that_serve_several_queries_are_turned_as_well():
    q, k, v = array(2, 5, 4, 8), array(2, 5, 2, 8), array(2, 5, 2, 8)
    positions = np.arange(5) + 3
    found = tt.dot_product_attention_with_rope(
        q, k, v, rope=tt.RoPE(), input_positions=positions
    )
    q, k = (heads_turned(np.asarray(x), positions) for x in (q, k))
    close(found, tt.dot_product_attention(q, k, v), 1e-4)


def test_a_rope_of_ones_own_is_called_head_by_head():
    shapes = []

    def rope(x, positions):
        shapes.append((x.shape, positions))
        return 2 * x

    q, k = array(*HEADS), array(2, 6, 3, 8)
    found = tt.dot_product_attention_with_rope(q, k, k, rope=rope)
    close(found, tt.dot_product_attention(2 * q, 2 * k, k))
    assert shapes == [((2, 5, 8), None), ((2, 6, 8), None)]


def with_rope(**options):
    rope = tt.RoPE(embedding_size=4, max_seq_len=16)
    attend = functools.partial(tt.dot_product_attention_with_rope, rope=rope)
    return made(tt.MultiHeadAttention, 2, 8, attention_fn=attend, **options)


def test_only_distances_count():
    layer, x = with_rope(), array(*X)
    close(layer(x, input_positions=jnp.arange(5) + 7), layer(x), 1e-4)
    assert not np.allclose(layer(x, input_positions=jnp.arange(5) * 2), layer(x))


@pytest.mark.parametrize("given", [False, True])
def test_steps_of_decoding_give_what_the_whole_gives(given):
    layer, x = with_rope(), array(*X)
    expected = layer(x, is_causal=True)
    layer.init_cache((2, 9, 8))
    run = tt.jit(functools.partial(layer.__class__.__call__, decode=True))
    for i in range(5):
        options = {"input_positions": jnp.full((2, 1), i)} if given else {}
        close(run(layer, x[:, i : i + 1], **options), expected[:, i : i + 1], 1e-4)


def test_positions_reach_a_function_of_ones_own_only_if_given():
    seen = []

    def attend(query, key, value, **options):
        seen.append(options.get("input_positions", "nothing"))
        return query

    layer = made(tt.MultiHeadAttention, 2, 8, attention_fn=attend)
    layer(array(*X))
    layer(array(*X), input_positions="here")
    layer.init_cache((2, 9, 8))
    layer(array(2, 1, 8), decode=True)
    assert seen == ["nothing", "here", "nothing"]


def test_a_layer_with_rope_is_a_tree_that_can_be_trained():
    layer = with_rope()
    grads = jax.grad(lambda layer: layer(array(*X)).sum())(layer)
    assert jax.tree.structure(grads) == jax.tree.structure(layer)
    assert tt.graphdef(tt.RoPE()) == tt.graphdef(tt.RoPE())


# Errors.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"embedding_size": 8}, "give both `embedding_size` and `max_seq_len`"),
        ({"max_seq_len": 8}, "give both"),
        ({"embedding_size": 7, "max_seq_len": 8}, "positive and even, got 7"),
        ({"embedding_size": 0, "max_seq_len": 8}, "positive and even, got 0"),
    ],
    ids=str,
)
def test_tables_that_cannot_be_made_are_refused(options, words):
    with pytest.raises(tt.StructureError, match=f"^RoPE: .*{words}"):
        tt.RoPE(**options)


@pytest.mark.parametrize(
    ("shape", "positions", "words"),
    [
        ((8,), None, r"expected \[..., length, features\], got float32\[8\]"),
        ((5, 6), None, r"expected 8 features, got float32\[5,6\]"),
        (X, [0, 1, 2], r"`input_positions` must .* \(2, 5\), got int32\[3\]"),
        (X, 3, r"`input_positions` must .* got int32\[\]"),
        (X, [[1] * 5] * 3, r"`input_positions` must .* got int32\[3,5\]"),
    ],
    ids=str,
)
def test_inputs_that_do_not_fit_are_refused(shape, positions, words):
    rope = placed(tt.RoPE(embedding_size=8, max_seq_len=9))
    given = None if positions is None else jnp.asarray(positions)
    with pytest.raises(tt.StructureError, match=f"RoPE at blocks/1/up: .*{words}"):
        rope(array(*shape), given)


def test_features_are_pairs():
    with pytest.raises(tt.StructureError, match=r"RoPE: .* even, got 7"):
        tt.RoPE()(array(5, 7))
