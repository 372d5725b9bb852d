# SPDX-License-Identifier: Apache-2.0
"""How layers make their parameters, and how errors name them and what they got."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from formulas import Model, array, made, placed

import treetap as tt
from treetap._core.wording import typed
from treetap._nn.convolution import FixedArray
from treetap._nn.parameters import broadcastable, canonical_axes, mode_of_call, where


def linear():
    return made(tt.Linear, 3, 4)


PARAMETERIZED = {
    tt.Linear: (3, 4),
    tt.LinearGeneral: (3, 4),
    tt.Einsum: ("ab,bc->ac", (3, 4)),
    tt.Conv: (3, 4, 3),
    tt.ConvTranspose: (3, 4, 3),
    tt.Embed: (5, 3),
    tt.LoRA: (3, 2, 4),
    tt.BatchNorm: (3,),
    tt.LayerNorm: (3,),
    tt.RMSNorm: (3,),
    tt.GroupNorm: (6, 3),
    tt.InstanceNorm: (3,),
    tt.SpectralNorm: (linear(),),
    tt.WeightNorm: (linear(),),
    tt.MultiHeadAttention: (2, 4),
    tt.LSTMCell: (3, 4),
    tt.OptimizedLSTMCell: (3, 4),
    tt.GRUCell: (3, 4),
    tt.SimpleCell: (3, 4),
}
# They name a part of the layer instead of the layer.
NAMES_A_PART = (
    tt.MultiHeadAttention,
    tt.LSTMCell,
    tt.OptimizedLSTMCell,
    tt.GRUCell,
    tt.SimpleCell,
)


@pytest.mark.parametrize("cls", PARAMETERIZED, ids=lambda cls: cls.__name__)
def test_parameters_need_random_streams(cls):
    for rngs in (None, 0, tt.RngStream(0, tag="params"), jax.random.key(0)):
        with pytest.raises(
            TypeError, match=r": `rngs` must be an Rngs.*got "
        ) as caught:
            made(cls, *PARAMETERIZED[cls], rngs=rngs)
        if cls not in NAMES_A_PART:
            assert str(caught.value).startswith(f"{cls.__name__}: ")


@pytest.mark.parametrize("cls", NAMES_A_PART, ids=lambda cls: cls.__name__)
def test_layers_made_of_others_name_themselves_when_streams_are_missing(cls):
    with pytest.raises(TypeError, match=f"^{cls.__name__}: `rngs` must be"):
        made(cls, *PARAMETERIZED[cls], rngs=None)


def test_a_stream_that_is_missing_is_named():
    with pytest.raises(AttributeError, match="No RngStream named 'params'"):
        tt.Linear(3, 4, rngs=tt.Rngs(dropout=0))


@pytest.mark.parametrize("size", [-1, 2.0, True, None, "3"])
@pytest.mark.parametrize(
    ("cls", "args", "name"),
    [
        (tt.Linear, (3, ...), "out_features"),
        (tt.Linear, (..., 3), "in_features"),
        (tt.Conv, (..., 3, 1), "in_features"),
        (tt.ConvTranspose, (3, ..., 1), "out_features"),
        (tt.Embed, (..., 3), "num_embeddings"),
        (tt.LoRA, (3, ..., 4), "lora_rank"),
        (tt.BatchNorm, (...,), "num_features"),
        (tt.LayerNorm, (...,), "num_features"),
        (tt.GroupNorm, (...,), "num_features"),
        (tt.GRUCell, (3, ...), "hidden_features"),
        (tt.MultiHeadAttention, (..., 4), "num_heads"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_sizes_are_whole_numbers_and_not_negative(cls, args, name, size):
    rngs = tt.Rngs(0)
    args = [size if arg is ... else arg for arg in args]
    message = f"^{cls.__name__}: `{name}` must be a non-negative integer, got {size!r}"
    with pytest.raises(tt.StructureError, match=message):
        cls(*args, rngs=rngs)
    assert int(rngs.default.count[...]) == 0


def test_sizes_may_be_numbers_of_numpy():
    layer = made(tt.Linear, np.int64(3), np.int32(4))
    assert layer(array(2, 3)).shape == (2, 4)


@pytest.mark.parametrize(
    ("cls", "sizes"),
    [
        (tt.Linear, (3, 4)),
        (tt.LinearGeneral, (3, 4)),
        (tt.Conv, (3, 4, 2)),
        (tt.ConvTranspose, (3, 4, 2)),
        (tt.Embed, (5, 3)),
        (tt.LoRA, (3, 2, 4)),
        (tt.BatchNorm, (3,)),
        (tt.LayerNorm, (3,)),
        (tt.GroupNorm, (6, 3)),
        (tt.MultiHeadAttention, (2, 4)),
        (tt.GRUCell, (3, 4)),
        (tt.Dropout, (0.5,)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_numbers_of_numpy_are_part_of_the_structure(cls, sizes):
    plain = made(cls, *sizes)
    given = made(cls, *(np.asarray(size)[()] for size in sizes))
    assert jax.tree.structure(given) == jax.tree.structure(plain)


def test_an_initializer_of_the_wrong_shape_is_refused():
    for init in (lambda *_: jnp.ones(3), tt.with_metadata(lambda *_: jnp.ones(3), a=1)):
        with pytest.raises(
            tt.StructureError,
            match=r"Linear: the initializer of `kernel` .* float32\[3\].*\(3, 4\)",
        ):
            tt.Linear(3, 4, kernel_init=init, rngs=tt.Rngs(0))


def wrong(layer, x):
    with pytest.raises(tt.StructureError) as caught:
        layer(x)
    return str(caught.value).split(":")[0]


def test_errors_say_where_the_layer_is():
    bad = array(2, 5)
    assert wrong(linear(), bad) == "Linear"
    assert wrong(placed(linear()), bad) == "Linear at blocks/1/up"
    assert wrong(tt.Sequential(linear(), linear()), array(2, 3)) == "Linear at layers/1"
    assert wrong(tt.Dict(a=linear())["a"], bad) == "Linear at a"
    assert where(linear()) == "Linear"


def test_errors_say_it_inside_transforms_and_on_copies():
    model, bad = Model(linear()), array(2, 5)
    run = lambda model, x: model(x)
    total = lambda model, x: model(x).sum()
    for fn in (jax.jit(run), tt.jit(run), tt.remat(run), tt.grad(total)):
        assert wrong(lambda x, fn=fn: fn(model, x), bad) == "Linear at blocks/1/up"
    for copy in (tt.clone(model), tt.view(model), tt.merge(*tt.split(model))):
        assert wrong(copy, bad) == "Linear at blocks/1/up"


def test_arrays_in_the_words_of_an_error():
    assert typed(jnp.ones((2, 3), jnp.bfloat16)) == "bfloat16[2,3]"
    assert typed(np.ones(2, bool)) == "bool[2]"
    assert typed(None) == "NoneType[]"
    assert typed([1.0, 2.0]) == "list[2]"


def test_keys_in_the_words_of_an_error():
    assert typed(jax.random.key(0)).startswith("key<")


def test_axes_are_counted_from_the_front_in_the_order_given():
    assert canonical_axes(None, (-1, 0), 3) == (2, 0)
    assert canonical_axes(None, np.int64(-2), 3) == (1,)
    layer = placed(linear())
    for axes in ((3,), (-4,), (0, 0), (2, -1)):
        with pytest.raises(tt.StructureError, match=r"Linear at blocks/1/up: .*rank 3"):
            canonical_axes(layer, axes, 3)


def test_arrays_get_an_axis_for_each_of_a_shape():
    found = broadcastable("f", "mask", np.ones((1, 4)), "the inputs", (2, 3, 4))
    assert found.shape == (1, 1, 4)
    message = r"^f: `mask` must broadcast to the inputs of shape \(2,\), got float32"
    for bad in (jnp.ones(3), jnp.ones((1, 2))):
        with pytest.raises(tt.StructureError, match=message):
            broadcastable("f", "mask", bad, "the inputs", (2,))


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (tt.Dropout(0.5, deterministic=None), "deterministic"),
        (made(tt.BatchNorm, 3, use_running_average=None), "use_running_average"),
    ],
    ids=["dropout", "norm"],
)
def test_a_mode_is_that_of_the_call_or_else_of_the_layer(layer, name):
    assert mode_of_call(layer, name, True) is True
    assert mode_of_call(layer, name, False) is False
    message = f"{type(layer).__name__} at blocks/1/up: `{name}` is given neither"
    with pytest.raises(tt.StructureError, match=message):
        placed(layer)(array(2, 3))
    setattr(layer, name, False)
    assert mode_of_call(layer, name, None) is False
    assert mode_of_call(layer, name, True) is True


def test_arrays_that_are_part_of_a_structure_compare_by_value():
    one, same = (FixedArray(np.arange(4)) for _ in range(2))
    assert one == same
    assert hash(one) == hash(same)
    assert FixedArray(np.array([np.nan])) == FixedArray(np.array([np.nan]))
    for other in (np.arange(5), np.arange(4.0), np.arange(4)[::-1]):
        assert one != FixedArray(other)
    assert one != "array"
    with pytest.raises(ValueError, match="read-only"):
        one.array[0] = 1
    assert repr(one) == "FixedArray(int64[4])"


def one_per_element(key, shape, dtype):
    """An initializer without a scale for no elements, as JAX's were before 0.12."""
    return jnp.full(shape, 1 / math.prod(shape), dtype)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda r: tt.SpectralNorm(tt.Linear(3, 4, rngs=r), n_steps=1.5, rngs=r),
            "n_steps",
        ),
        (lambda r: tt.BatchNorm(3, axis=(0, 1), rngs=r), "`axis` must be the one axis"),
        (lambda r: tt.Dropout("a"), "`rate` must be a number from 0 to 1, got 'a'"),
        (lambda r: tt.Dropout(None), "`rate` must be a number from 0 to 1"),
        (lambda r: tt.Einsum("ab,bc->ac", (3, -4), rngs=r), "kernel_shape"),
        (
            lambda r: tt.Linear(0, 4, kernel_init=one_per_element, rngs=r),
            "Linear: the initializer of `kernel`",
        ),
        (lambda r: tt.RNN(tt.GRUCell(3, 4, rngs=r), unroll=0), "`unroll`"),
        (
            lambda r: tt.make_causal_mask(jnp.ones((2, 3)), extra_batch_dims=-1),
            "extra_batch_dims",
        ),
        (
            lambda r: tt.MultiHeadAttention(2, 4, implementation="foo", rngs=r)(
                jnp.ones((2, 5, 4))
            ),
            "`implementation` must be None, 'xla' or 'cudnn'",
        ),
        (
            lambda r: tt.LoRA(3, 2, 4, base_module=tt.Linear(3, 5, rngs=r), rngs=r)(
                jnp.ones((2, 3))
            ),
            "LoRA: `base_module` returned",
        ),
    ],
    ids="steps axis text none shape nothing unroll dims implementation base".split(),
)
def test_other_arguments_that_make_no_sense_are_refused(call, words):
    with pytest.raises(tt.StructureError, match=words):
        call(tt.Rngs(0))


def test_keys_are_keys():
    with pytest.raises(TypeError, match=r"Dropout: `rngs` must be .*float32\[2\]"):
        tt.Dropout(0.5)(jnp.ones(3), rngs=jnp.ones(2))


def test_an_rnn_that_begins_with_zeros_draws_nothing():
    rnn = tt.RNN(tt.GRUCell(3, 4, rngs=tt.Rngs(0)))
    found = jax.jit(lambda x: rnn(x))(jnp.ones((2, 5, 3)))
    assert found.shape == (2, 5, 4)
    assert int(rnn.rngs.count) == 0


def test_axes_keep_the_order_they_are_given_in():
    assert canonical_axes(None, (0, 1, -2), 10) == (0, 1, 8)
    assert canonical_axes(None, (-2, 1, 0), 10) == (8, 1, 0)
