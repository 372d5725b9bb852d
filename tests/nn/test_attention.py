# SPDX-License-Identifier: Apache-2.0
"""dot_product_attention against a softmax in numpy, and the masks made for it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from formulas import array, close, compiled, made, numbers, weighed, weights_of

import treetap as tt

attend = tt.dot_product_attention


def three(*batch, heads=4, kv_heads=4, depth=3, value_depth=3, queries=5, keys=7):
    """Shapes of query, key and value."""
    return (
        (*batch, queries, heads, depth),
        (*batch, keys, kv_heads, depth),
        (*batch, keys, kv_heads, value_depth),
    )


def arrays_of(shapes, dtype=jnp.float32):
    return [array(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]


def run(shapes, **options):
    return compiled(functools.partial(attend, **options))(*arrays_of(shapes))


def formula(shapes, bias=None, mask=None, causal=False, kept=1.0):
    query, key, value = (numbers(*shape, seed=i) for i, shape in enumerate(shapes))
    return weighed(weights_of(query, key, bias, mask, causal) * kept, value)


ONE = three(2)
SHAPES = {
    "one batch axis": ONE,
    "none": three(),
    "two": three(2, 3),
    "grouped heads": three(2, kv_heads=2),
    "one head of keys": three(2, kv_heads=1),
    "values of another depth": three(2, value_depth=6),
    "grouped, of another depth": three(2, kv_heads=2, value_depth=2),
}


@pytest.mark.parametrize("name", SHAPES)
def test_values_are_weighed_by_a_softmax(name):
    shapes = SHAPES[name]
    close(run(shapes), formula(shapes))


def masks(*shape):
    mask = numbers(*shape, seed=9) > -0.4
    mask[..., 0] = True
    return mask


BROADCAST = [
    (three(2), (2, 4, 5, 7)),
    (three(2), (2, 1, 5, 7)),
    (three(2), (5, 7)),
    (three(2), (7,)),
    (three(2, 3), (2, 1, 1, 5, 7)),
    (three(2, 3), (1, 3, 4, 1, 7)),
    (three(2, 3), (3, 1, 5, 7)),
    (three(2, kv_heads=2), (2, 4, 1, 7)),
]


@pytest.mark.parametrize(("shapes", "shape"), BROADCAST)
def test_masks_and_biases_broadcast_over_part_of_the_axes(shapes, shape):
    mask, bias = masks(*shape), numbers(*shape, seed=8)
    both = {"mask": mask, "bias": jnp.asarray(bias, jnp.float32)}
    close(run(shapes, **both), formula(shapes, bias, mask))


def test_masks_biases_and_positions_alone_and_together():
    shape = (2, 1, 1, 7)
    mask, bias = masks(*shape), numbers(*shape, seed=8)
    given = jnp.asarray(bias, jnp.float32)
    close(run(ONE, mask=mask), formula(ONE, mask=mask))
    close(run(ONE, bias=given), formula(ONE, bias))
    found = run(ONE, mask=mask, bias=given, is_causal=True)
    close(found, formula(ONE, bias, mask, causal=True))


def test_a_query_sees_no_key_after_its_position():
    for shapes in (three(2), three(queries=7, keys=5, kv_heads=2)):
        close(run(shapes, is_causal=True), formula(shapes, causal=True))


def test_masks_may_be_of_any_dtype():
    mask = masks(5, 7)
    for dtype in (np.float32, np.int32):
        found = run(ONE, mask=mask.astype(dtype))
        close(found, formula(ONE, mask=mask))


def test_a_query_that_sees_nothing_takes_the_mean():
    found = run(ONE, mask=np.zeros((5, 7), bool))
    mean = numbers(*ONE[2], seed=2).mean(1, keepdims=True)
    close(found, np.broadcast_to(mean, found.shape))


@pytest.mark.parametrize(
    ("together", "shapes"), [(True, three(2)), (False, three(2, kv_heads=2))]
)
def test_weights_are_dropped(together, shapes):
    key = jax.random.key(3)
    shape = (1, 1, 5, 7) if together else (2, 4, 5, 7)
    options = {"dropout_rate": 0.25, "broadcast_dropout": together}

    def both(key, arrays):
        kept = jax.random.bernoulli(key, 0.75, shape)
        return kept, attend(*arrays, dropout_rng=key, **options)

    kept, found = compiled(both)(key, arrays_of(shapes))
    close(found, formula(shapes, kept=np.asarray(kept) / 0.75))


def test_no_key_is_needed_where_nothing_is_dropped():
    close(run(ONE, dropout_rate=0.5, deterministic=True), formula(ONE))
    close(run(ONE, dropout_rate=0.0), formula(ONE))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_dtype_of_results(dtype):
    found = run(ONE, dtype=dtype)
    assert found.dtype == dtype
    close(found.astype(jnp.float32), formula(ONE), 0.02)
    query, key, value = arrays_of(ONE, dtype)
    options = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}
    dropping = functools.partial(attend, **options)
    assert jax.eval_shape(attend, query, key, value).dtype == dtype
    assert jax.eval_shape(dropping, query, key, value).dtype == dtype
    value = value.astype(jnp.float32)
    assert jax.eval_shape(attend, query, key, value).dtype == jnp.float32


def test_the_softmax_is_wide():
    query, key = arrays_of(ONE[:2], jnp.bfloat16)
    found = jax.make_jaxpr(attend)(query, key, key)
    exponents = [eqn for eqn in found.eqns if eqn.primitive.name == "exp"]
    assert [eqn.invars[0].aval.dtype for eqn in exponents] == [jnp.float32]


def test_precision_reaches_both_products():
    arrays = arrays_of(ONE)
    text = str(jax.make_jaxpr(lambda *a: attend(*a, precision="highest"))(*arrays))
    assert text.count("Precision.HIGHEST, Precision.HIGHEST") == 2
    with jax.default_matmul_precision("default"):
        assert "HIGHEST" not in str(jax.make_jaxpr(attend)(*arrays))


class Sower(tt.Module):
    def __call__(self, *arrays):
        return attend(*arrays, module=self)


def test_a_module_sows_the_weights():
    found, sown = tt.capture(Sower(), tt.Intermediate)(*arrays_of(ONE))
    close(found, formula(ONE))
    query, key = (numbers(*s, seed=i) for i, s in enumerate(ONE[:2]))
    close(sown["attention_weights"][0], weights_of(query, key))


def test_weights_are_a_tap_where_no_module_sows_them():
    arrays = arrays_of(ONE)
    _, record = tt.observe(attend, "**:attention_weights")(*arrays)
    query, key = (numbers(*s, seed=i) for i, s in enumerate(ONE[:2]))
    close(record[0].value, weights_of(query, key))
    assert "tap" not in str(jax.make_jaxpr(attend)(*arrays))


# Fused.


@pytest.mark.parametrize(
    ("shapes", "shape"),
    [
        (three(2), (2, 1, 5, 7)),
        (three(2, 3), (2, 1, 1, 5, 7)),
        (three(kv_heads=2), (7,)),
    ],
)
def test_the_implementation_of_jax_gives_the_same(shapes, shape):
    mask, bias = masks(*shape), numbers(*shape, seed=8)
    options = {"mask": mask, "bias": jnp.asarray(bias, jnp.float32)}
    found = run(shapes, implementation="xla", **options)
    close(found, formula(shapes, bias, mask))


def test_the_implementation_of_jax_sees_no_key_after_the_position():
    close(run(ONE, implementation="xla", is_causal=True), formula(ONE, causal=True))


@pytest.mark.parametrize(
    ("shapes", "options", "words"),
    [
        (ONE, {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}, "drop weights"),
        (ONE, {"precision": "highest"}, "compute in a `precision`"),
        (ONE, {"module": Sower()}, "show its weights"),
        (three(2, value_depth=6), {}, "values of another depth"),
    ],
)
def test_what_a_fused_implementation_lacks_is_said(shapes, options, words):
    message = f"implementation='xla' cannot .*{words}.* Leave `implementation` out"
    with pytest.raises(tt.StructureError, match=message):
        run(shapes, implementation="xla", **options)


# Errors.


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (((2, 5, 4, 3), (7, 4, 3), (2, 7, 4, 3)), "same rank"),
        (((5, 3), (7, 3), (7, 3)), "same rank, at least 3"),
        (((2, 5, 4, 3), (3, 7, 4, 3), (3, 7, 4, 3)), "batch dims"),
        (((2, 5, 4, 3), (2, 7, 4, 3), (2, 6, 4, 3)), "lengths must match"),
        (((2, 5, 4, 3), (2, 7, 4, 2), (2, 7, 4, 3)), "depths must match"),
        (((2, 5, 4, 3), (2, 7, 2, 3), (2, 7, 4, 3)), "heads must match"),
        (((2, 5, 4, 3), (2, 7, 3, 3), (2, 7, 3, 3)), "must be a multiple"),
        (((2, 5, 4, 3), (2, 7, 0, 3), (2, 7, 0, 3)), "must be a multiple"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arrays_that_do_not_fit_are_refused(shapes, words):
    message = rf"^dot_product_attention: .*{words}.*; got query float32\["
    with pytest.raises(tt.StructureError, match=message):
        run(shapes)


@pytest.mark.parametrize("name", ["mask", "bias"])
@pytest.mark.parametrize("shape", [(3, 7), (5, 6), (1, 2, 4, 5, 7), (3, 1, 5, 7)])
def test_masks_and_biases_that_do_not_fit_are_refused(name, shape):
    size = ",".join(map(str, shape))
    message = rf"`{name}` must broadcast to .*\(2, 4, 5, 7\), got float32\[{size}\]"
    with pytest.raises(tt.StructureError, match=message):
        run(ONE, **{name: array(*shape)})


def test_dropping_needs_a_key():
    with pytest.raises(
        tt.StructureError, match=r"no `dropout_rng`.* `deterministic=True`"
    ):
        run(ONE, dropout_rate=0.5)


def test_dropping_everything_leaves_nothing():
    options = {"dropout_rate": 1.0, "dropout_rng": jax.random.key(0)}
    found = attend(*arrays_of(ONE), **options)
    np.testing.assert_array_equal(found, np.zeros(found.shape))


@pytest.mark.parametrize("rate", [-0.5, 1.5])
def test_a_rate_is_a_share(rate):
    with pytest.raises(tt.StructureError, match="dropout_rate"):
        run(ONE, dropout_rate=rate, dropout_rng=jax.random.key(0))


# Masks.


def test_a_mask_from_something_about_each_query_and_key():
    query, key = np.array([[1, 2, 0], [3, 1, 1]]), np.array([[1, 0], [2, 2]])
    found = tt.make_attention_mask(jnp.asarray(query), jnp.asarray(key))
    expected = query[:, None, :, None] * key[:, None, None, :]
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == jnp.float32
    same = tt.make_attention_mask(
        jnp.asarray(query),
        jnp.asarray(key),
        jnp.equal,
        extra_batch_dims=2,
        dtype=bool,
    )
    assert same.shape == (1, 1, 2, 1, 3, 2)
    wanted = query[:, None, :, None] == key[:, None, None, :]
    np.testing.assert_array_equal(same[0, 0], wanted)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_a_mask_by_which_each_position_sees_those_before(batch):
    found = tt.make_causal_mask(jnp.ones((*batch, 4)), extra_batch_dims=1, dtype=bool)
    expected = np.broadcast_to(np.tril(np.ones((4, 4), bool)), (1, *batch, 1, 4, 4))
    np.testing.assert_array_equal(found, expected)
    assert tt.make_causal_mask(jnp.ones((*batch, 4))).dtype == jnp.float32


def test_masks_are_combined():
    one, two = masks(3, 4), masks(1, 4)
    found = tt.combine_masks(jnp.asarray(one), None, jnp.asarray(two), dtype=bool)
    np.testing.assert_array_equal(found, one & two)
    numbers_too = tt.combine_masks(2.0 * one, two)
    assert numbers_too.dtype == jnp.float32
    np.testing.assert_array_equal(numbers_too, (one & two).astype(np.float32))
    assert tt.combine_masks(None, None) is None
    assert tt.combine_masks() is None


def test_masks_of_other_rank_are_not_combined():
    message = r"^combine_masks: .* same rank: bool\[3,4\], float32\[1,3,4\]"
    with pytest.raises(tt.StructureError, match=message):
        tt.combine_masks(masks(3, 4), jnp.ones((1, 3, 4)))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: tt.combine_masks(masks(3, 4), masks(2, 4)), "combine_masks"),
        (
            lambda: tt.make_attention_mask(array(2, 3), array(3, 4)),
            "make_attention_mask",
        ),
        (lambda: tt.make_attention_mask(array(2, 3), array(4)), "make_attention_mask"),
        (lambda: tt.make_attention_mask(array(), array()), "make_attention_mask"),
        (lambda: tt.make_causal_mask(array()), "make_causal_mask"),
    ],
)
def test_arrays_that_make_no_mask_are_refused(make, name):
    with pytest.raises(ValueError, match=f"^{name}: "):
        make()


X = (2, 5, 4)


def attended(*arrays, **options):
    run = functools.partial(tt.dot_product_attention, **options)
    return compiled(run)(*arrays)


def attention(**options):
    return made(tt.MultiHeadAttention, 2, 4, **options)


def test_values_of_another_depth():
    query, value = array(2, 5, 2, 4), array(2, 5, 2, 3)
    weights = weights_of(numbers(2, 5, 2, 4), numbers(2, 5, 2, 4))
    expected = weighed(weights, numbers(2, 5, 2, 3))
    close(attended(query, query, value), expected)


def test_masks_broadcast_over_part_of_several_batch_axes():
    shape = (2, 3, 5, 2, 4)
    x, given = numbers(*shape), array(*shape)
    for over in ((2, 1, 1, 5, 5), (1, 3, 2, 1, 5)):
        mask = numbers(*over) > -0.5
        mask[..., 0] = True
        expected = weighed(weights_of(x, x, mask=mask), x)
        close(attended(given, given, given, mask=mask), expected)


def test_precision_is_not_ignored():
    x = array(2, 5, 2, 4)
    run = lambda x: tt.dot_product_attention(x, x, x, precision="highest")
    assert str(jax.make_jaxpr(run)(x)).count("HIGHEST, Precision.HIGHEST") == 2


def test_results_do_not_depend_on_which_options_are_set():
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
def test_positions_and_masks_with_axes_of_one(shape):
    mask = numbers(*shape) > -0.9
    mask[..., :1] = True
    x = numbers(2, 5, 2, 4)
    given = array(2, 5, 2, 4)
    options = {"mask": mask, "dropout_rate": 0.5, "deterministic": True}
    found = attended(given, given, given, is_causal=True, **options)
    close(found, weighed(weights_of(x, x, mask=mask, causal=True), x))
