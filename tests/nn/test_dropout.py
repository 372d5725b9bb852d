# SPDX-License-Identifier: Apache-2.0
"""Dropout: which elements are dropped, from which keys, and when nothing happens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from formulas import array, close, counts_of, made, numbers, placed
from jax.sharding import AxisType, PartitionSpec

import treetap as tt
from meshes import mesh_of

P = PartitionSpec
X = (4, 6)


def dropped(key, rate, shape=X):
    """The inputs with what a key drops at zero, and the rest scaled up."""
    kept = np.asarray(jax.random.bernoulli(key, 1 - rate, shape))
    return np.where(np.broadcast_to(kept, X), numbers(*X) / (1 - rate), 0)


def test_elements_are_dropped_by_the_keys_of_a_stream_of_its_own():
    rngs = tt.Rngs(dropout=3)
    layer = tt.Dropout(0.25, rngs=rngs)
    assert int(rngs.dropout.count[...]) == 1
    own = jax.random.fold_in(jax.random.key(3), 0)
    for count in range(2):
        close(layer(array(*X)), dropped(jax.random.fold_in(own, count), 0.25))
    assert int(layer.rngs.count[...]) == 2
    assert int(rngs.dropout.count[...]) == 1


def test_the_rate_is_a_share_of_the_elements():
    for rate in (0.1, 0.7):
        layer = tt.Dropout(rate, rngs=tt.Rngs(0))
        outputs = np.asarray(layer(jnp.ones((100, 100))))
        assert (outputs == 0).mean() == pytest.approx(rate, abs=0.02)
        assert outputs.max() == pytest.approx(1 / (1 - rate), rel=1e-5)


def test_where_keys_come_from():
    other = tt.Dropout(0.5, rng_collection="noise", rngs=tt.Rngs(noise=3, dropout=4))
    same = tt.Dropout(0.5, rngs=tt.Rngs(3))
    stream = tt.Dropout(0.5, rngs=tt.Rngs(noise=3).noise)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(3), 0), 0)
    for layer in (other, same, stream):
        close(layer(array(*X)), dropped(key, 0.5))


def test_a_call_may_bring_streams_a_stream_or_a_key():
    layer = tt.Dropout(0.5, rng_collection="noise", rngs=tt.Rngs(7))
    rngs = tt.Rngs(noise=3, default=4)
    first, second = (jax.random.fold_in(jax.random.key(3), i) for i in range(2))
    close(layer(array(*X), rngs=rngs), dropped(first, 0.5))
    close(layer(array(*X), rngs=rngs.noise), dropped(second, 0.5))
    assert int(rngs.noise.count[...]) == 2
    assert int(layer.rngs.count[...]) == 0
    close(layer(array(*X), rngs=first), dropped(first, 0.5))
    old = jax.random.PRNGKey(3)
    close(layer(array(*X), rngs=old), dropped(old, 0.5))


@pytest.mark.parametrize(
    ("axes", "shape"),
    [((0,), (1, 6)), ([1], (4, 1)), ((-1,), (4, 1)), ((0, 1), (1, 1))],
)
def test_elements_are_dropped_together_along_axes(axes, shape):
    layer, key = tt.Dropout(0.5, broadcast_dims=axes), jax.random.key(3)
    close(layer(array(*X), rngs=key), dropped(key, 0.5, shape))
    assert isinstance(layer.broadcast_dims, tuple)


def test_nothing_happens_where_nothing_is_to_be_dropped():
    x = array(*X)
    layer = tt.Dropout(0.5, rngs=tt.Rngs(0))
    assert layer(x, deterministic=True) is x
    assert tt.view(layer, deterministic=True)(x) is x
    assert tt.Dropout(0.5, deterministic=True)(x) is x
    none = tt.Dropout(0.0, rngs=tt.Rngs(0))
    assert none(x) is x
    assert counts_of(layer) == counts_of(none) == {("rngs", "count"): 0}


def test_the_call_beats_the_layer():
    layer = tt.Dropout(0.5, deterministic=True, rngs=tt.Rngs(0))
    assert (np.asarray(layer(array(*X), deterministic=False)) == 0).any()
    layer.train()
    assert not layer.deterministic
    layer.eval()
    assert layer.deterministic


def test_everything_is_dropped_without_a_key():
    layer = tt.Dropout(1.0, rngs=tt.Rngs(0))
    outputs = layer(array(*X, dtype=jnp.bfloat16))
    assert outputs.dtype == jnp.bfloat16
    assert not outputs.any()
    assert counts_of(layer) == {("rngs", "count"): 0}
    assert not tt.Dropout(1.0)(array(*X)).any()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.complex64])
def test_inputs_keep_their_dtype(dtype):
    outputs = tt.Dropout(0.5)(array(*X).astype(dtype), rngs=jax.random.key(0))
    assert outputs.dtype == dtype


def test_infinities_that_are_dropped_are_gone():
    outputs = tt.Dropout(0.5)(jnp.full(20, jnp.inf), rngs=jax.random.key(0))
    assert set(np.asarray(outputs).tolist()) == {0.0, np.inf}


def test_gradients_are_those_of_what_is_kept():
    layer, key = tt.Dropout(0.5), jax.random.key(3)
    grads = jax.grad(lambda x: jnp.sum(layer(x, rngs=key)))(array(*X))
    kept = np.asarray(jax.random.bernoulli(key, 0.5, X))
    np.testing.assert_array_equal(grads, 2.0 * kept)


# Errors.


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan"), 50])
def test_a_rate_is_a_share(rate):
    rngs = tt.Rngs(0)
    with pytest.raises(
        tt.StructureError, match=r"^Dropout: `rate` .* from 0 to 1, got"
    ):
        tt.Dropout(rate, rngs=rngs)
    assert int(rngs.default.count[...]) == 0


@pytest.mark.parametrize("rngs", [0, "noise", jax.random.key(0)], ids=type)
def test_streams_of_another_kind_are_refused(rngs):
    message = "^Dropout: `rngs` must be an Rngs, an RngStream or None, got "
    with pytest.raises(TypeError, match=message):
        tt.Dropout(0.5, rngs=rngs)


def test_streams_of_another_kind_are_refused_in_a_call():
    layer = placed(tt.Dropout(0.5, rngs=tt.Rngs(0)))
    message = "Dropout at blocks/1/up: `rngs` must be an Rngs, an RngStream or a key"
    for rngs in (0, "noise", np.zeros(2, np.uint32)):
        with pytest.raises(TypeError, match=message):
            layer(array(*X), rngs=rngs)
    assert counts_of(layer) == {("rngs", "count"): 0}


def test_a_stream_that_is_missing_is_named():
    with pytest.raises(KeyError, match="No RngStream named 'noise'"):
        tt.Dropout(0.5, rng_collection="noise", rngs=tt.Rngs(params=0))


def test_a_layer_without_streams_or_mode_says_so():
    message = (
        "Dropout at blocks/1/up: `deterministic` is False, but no `rngs` argument was "
        "provided to Dropout"
    )
    with pytest.raises(tt.StructureError, match=message):
        placed(tt.Dropout(0.5))(array(*X))
    layer = placed(tt.Dropout(0.5, deterministic=None, rngs=tt.Rngs(0)))
    with pytest.raises(tt.StructureError, match="at blocks/1/up: `deterministic` is"):
        layer(array(*X))
    assert counts_of(layer) == {("rngs", "count"): 0}


def test_whole_numbers_are_refused():
    layer = placed(tt.Dropout(0.5, rngs=tt.Rngs(0)))
    message = r"Dropout at blocks/1/up: .* floating or complex; got int32\[3\]"
    with pytest.raises(tt.StructureError, match=message):
        layer(jnp.arange(3))


def test_whole_numbers_draw_no_key():
    layer = tt.Dropout(0.5, rngs=tt.Rngs(0))
    with pytest.raises(tt.StructureError):
        layer(jnp.arange(3))
    assert counts_of(layer) == {("rngs", "count"): 0}


def test_axes_that_the_inputs_do_not_have_are_refused():
    layer = placed(tt.Dropout(0.5, broadcast_dims=(2,), rngs=tt.Rngs(0)))
    with pytest.raises(tt.StructureError, match=r"Dropout at blocks/1/up: .*axes"):
        layer(array(*X))
    assert counts_of(layer) == {("rngs", "count"): 0}


@pytest.mark.parametrize(
    "axes",
    [
        (),
        (1,),
    ],
)
def test_sharded_inputs_keep_their_sharding(axes):
    with jax.set_mesh(mesh_of((2,), ("data",), AxisType.Explicit)):
        x = jax.device_put(array(*X), P("data"))
        key = jax.random.key(3)
        outputs = tt.Dropout(0.5, broadcast_dims=axes)(x, rngs=key)
        assert jax.typeof(outputs).sharding.spec == P("data", None)
        close(outputs, dropped(key, 0.5, (4, 1) if axes else X))


def gru(**options):
    return tt.RNN(made(tt.GRUCell, 3, 4), **options)


def test_a_stream_may_be_given_and_is_forked():
    for make in (gru, lambda **options: tt.Bidirectional(gru(), gru(), **options)):
        stream = tt.RngStream(3, tag="carry")
        layer = make(rngs=stream)
        assert layer.rngs is not stream
        assert layer.rngs.key[...] == jax.random.fold_in(jax.random.key(3), 0)
        assert int(stream.count[...]) == 1
        layer(array(2, 5, 3))
        assert int(stream.count[...]) == 1
