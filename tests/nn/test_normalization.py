# SPDX-License-Identifier: Apache-2.0
"""BatchNorm, LayerNorm and RMSNorm, and the moments they take, by definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from formulas import (
    array,
    close,
    compiled,
    made,
    moments_of,
    numbers,
    over_devices,
    placed,
    ran,
    raw,
    values_of,
)
from jax.sharding import AxisType, PartitionSpec

import treetap as tt
from meshes import mesh_of
from treetap._nn.normalization import checked_mask, wide

P = PartitionSpec
X = (2, 5, 3)
MASK = np.arange(30).reshape(X) % 4 != 0


def normalized(layer, x, axes, features, mask=None):
    """The inputs minus their mean, over their deviation, times scale, plus bias."""
    shape = [n if i in features else 1 for i, n in enumerate(x.shape)]
    if isinstance(layer, tt.RMSNorm):
        mean = 0
        where = True if mask is None else np.broadcast_to(mask, x.shape)
        var = np.mean(np.abs(x) ** 2, axis=axes, keepdims=True, where=where)
    else:
        mean, var = moments_of(x, axes, mask)
    y = (x - mean) / np.sqrt(var + layer.epsilon)
    if layer.scale is not None:
        y = y * raw(layer.scale).reshape(shape)
    bias = getattr(layer, "bias", None)
    return y if bias is None else y + raw(bias).reshape(shape)


# LayerNorm and RMSNorm.

BOTH = pytest.mark.parametrize("cls", [tt.LayerNorm, tt.RMSNorm])


@BOTH
@pytest.mark.parametrize(
    ("axes", "features", "count"),
    [
        (-1, -1, 3),
        ((1, 2), -1, 3),
        ((0, 1), (-1,), 3),
        (-1, 1, 5),
        ((1, 2), (1, 2), 15),
        ((-1, -2), (-1, 1), 15),
        ([0, 2], 1, 5),
    ],
)
def test_moments_over_some_axes_and_scales_for_others(cls, axes, features, count):
    layer = made(cls, count, reduction_axes=axes, feature_axes=features)
    over = tuple(a % 3 for a in ([axes] if isinstance(axes, int) else axes))
    of = [a % 3 for a in ([features] if isinstance(features, int) else features)]
    close(ran(layer, array(*X)), normalized(layer, numbers(*X), over, of))


@BOTH
def test_axes_may_be_numbers_of_numpy(cls):
    layer = made(cls, 3, reduction_axes=np.int64(-1), feature_axes=np.int64(-1))
    close(layer(array(*X)), normalized(layer, numbers(*X), (2,), [2]))


@BOTH
def test_inputs_of_one_axis(cls):
    layer = made(cls, 3)
    close(ran(layer, array(3)), normalized(layer, numbers(3), (0,), [0]))


@BOTH
@pytest.mark.parametrize(
    "options",
    [
        {"use_scale": False},
        {"use_bias": False},
        {"epsilon": 0.5},
        {"use_fast_variance": False},
    ],
    ids=str,
)
def test_each_option(cls, options):
    if cls is tt.RMSNorm and "use_bias" in options:
        options = {"use_scale": False, "epsilon": 0.5}
    layer = made(cls, 3, **options)
    assert (layer.scale is None) == (not layer.use_scale)
    close(layer(array(*X)), normalized(layer, numbers(*X), (2,), [2]))


@BOTH
def test_a_mask_says_which_elements_count(cls):
    layer = made(cls, 3, reduction_axes=(1, 2))
    for mask in (MASK, MASK[:1], MASK[:, :, :1], MASK[0], MASK[0, 0]):
        expected = normalized(layer, numbers(*X), (1, 2), [2], mask)
        close(layer(array(*X), mask=jnp.asarray(mask)), expected)


@BOTH
def test_moments_over_an_axis_of_a_mapping(cls):
    layer = made(cls, 3, axis_name="rows")
    x = numbers(4, *X)
    found = jax.vmap(layer, axis_name="rows")(array(4, *X))
    close(found, normalized(layer, x, (0, 3), [3]))


@BOTH
def test_moments_over_groups_of_an_axis_of_a_mapping(cls):
    groups = [[0, 3], [1, 2]]
    layer = made(cls, 3, axis_name="rows", axis_index_groups=groups)
    x = numbers(4, *X)
    found = np.asarray(over_devices(layer, array(4, *X)))
    for group in groups:
        close(found[group], normalized(layer, x[group], (0, 3), [3]))


def test_the_slow_variance_over_an_axis_of_a_mapping():
    layer = made(tt.LayerNorm, 3, axis_name="rows", use_fast_variance=False)
    found = jax.vmap(layer, axis_name="rows")(array(4, *X))
    close(found, normalized(layer, numbers(4, *X), (0, 3), [3]))


def test_the_slow_variance_is_right_far_from_zero_and_the_fast_one_is_finite():
    x = np.asarray(3000 + numbers(*X) / 8, np.float32)
    slow = made(tt.LayerNorm, 3, use_fast_variance=False)
    expected = normalized(slow, np.asarray(x, np.float64), (2,), [2])
    close(slow(jnp.asarray(x)), expected, 0.02)
    fast = made(tt.LayerNorm, 3)(jnp.asarray(x))
    assert np.isfinite(fast).all()
    assert not np.allclose(fast, expected, atol=0.02)


@BOTH
def test_moments_are_wide_and_results_in_the_dtype_asked_for(cls):
    x = np.asarray(array(*X, dtype=jnp.bfloat16), np.float64) + 100
    layer = made(cls, 3, dtype=jnp.bfloat16)
    found = ran(layer, jnp.asarray(x, jnp.bfloat16))
    assert found.dtype == jnp.bfloat16
    expected = normalized(layer, np.asarray(x.astype(jnp.bfloat16), float), (2,), [2])
    close(found.astype(jnp.float32), expected, 0.01)


@BOTH
def test_complex_inputs(cls):
    layer = made(cls, 3)
    x = numbers(*X) + 1j * numbers(*X, seed=1)
    found = ran(layer, jnp.asarray(x, jnp.complex64))
    assert found.dtype == jnp.complex64
    close(found, normalized(layer, x, (2,), [2]))


@BOTH
@pytest.mark.parametrize(
    ("options", "shape", "words"),
    [
        ({}, (2, 5), r"expected 3 features on axis -1, got float32\[2,5\]"),
        ({}, (), "rank 0"),
        ({"reduction_axes": 2}, (2, 3), r"the axes \(2,\) .* rank 2"),
        ({"reduction_axes": (1, -1)}, (2, 3), r"the axes \(1, -1\) .* rank 2"),
        ({"feature_axes": (0, 1)}, (2, 3), r"3 features on axis \(0, 1\)"),
    ],
    ids=str,
)
def test_inputs_that_do_not_fit_are_refused(cls, options, shape, words):
    layer = placed(made(cls, 3, **options))
    message = rf"{cls.__name__} at blocks/1/up: .*{words}"
    with pytest.raises(tt.StructureError, match=message):
        layer(array(*shape))


@pytest.mark.parametrize("cls", [tt.LayerNorm, tt.RMSNorm, tt.BatchNorm])
@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (np.ones(X, np.float32), r"boolean.* got float32\[2,5,3\]"),
        (np.ones(X, np.int32), r"boolean.* got int32"),
        (np.ones((2, 4, 3), bool), r"broadcast .*\(2, 5, 3\), got bool\[2,4,3\]"),
        (np.ones((1, *X), bool), r"got bool\[1,2,5,3\]"),
    ],
    ids=["float", "int", "shape", "rank"],
)
def test_masks_that_do_not_fit_are_refused(cls, mask, words):
    layer = placed(made(cls, 3))
    before = values_of(layer)
    message = rf"{cls.__name__} at blocks/1/up: `mask` .*{words}"
    with pytest.raises(tt.StructureError, match=message):
        layer(array(*X), mask=mask)
    assert values_of(layer) == before


# BatchNorm.


def test_a_batch_is_normalised_and_remembered():
    layer = made(tt.BatchNorm, 3, momentum=0.75)
    x = numbers(*X)
    mean, var = moments_of(x, (0, 1))
    close(layer(array(*X)), normalized(layer, x, (0, 1), [2]))
    close(layer.mean[...], 0.25 * mean.ravel())
    close(layer.var[...], 0.75 + 0.25 * var.ravel())
    layer(array(*X))
    close(layer.mean[...], (0.75 * 0.25 + 0.25) * mean.ravel())


def test_what_is_remembered_is_used_to_evaluate_and_stays():
    layer = made(tt.BatchNorm, 3)
    layer.mean[...], layer.var[...] = array(3), 1 + array(3) ** 2
    before = values_of(layer)
    x, mean = numbers(*X), raw(layer.mean)
    expected = (x - mean) / np.sqrt(raw(layer.var) + 1e-5) * raw(layer.scale)
    expected = expected + raw(layer.bias)
    close(layer(array(*X), use_running_average=True), expected)
    close(layer(array(*X), True, mask=jnp.asarray(MASK)), expected)
    close(tt.view(layer, use_running_average=True)(array(*X)), expected)
    assert values_of(layer) == before
    assert not layer.use_running_average


def test_the_call_beats_the_layer():
    layer = made(tt.BatchNorm, 3, use_running_average=True)
    before = values_of(layer)
    layer(array(*X))
    assert values_of(layer) == before
    layer(array(*X), use_running_average=False)
    assert values_of(layer) != before


def test_evaluating_and_training_a_model():
    layer = made(tt.BatchNorm, 3)
    layer.eval()
    assert layer.use_running_average
    layer.train()
    assert not layer.use_running_average


@pytest.mark.parametrize("axis", [0, 1, -2])
def test_features_on_another_axis(axis):
    layer = made(tt.BatchNorm, X[axis], axis=axis)
    others = tuple(i for i in range(3) if i != axis % 3)
    close(ran(layer, array(*X)), normalized(layer, numbers(*X), others, [axis % 3]))
    mean, _ = moments_of(numbers(*X), others)
    close(layer.mean[...], 0.01 * mean.ravel())


@pytest.mark.parametrize(
    "options",
    [{"use_scale": False}, {"use_bias": False}, {"epsilon": 0.5, "momentum": 0.0}],
    ids=str,
)
def test_each_option_of_batch_norm(options):
    layer = made(tt.BatchNorm, 3, **options)
    close(layer(array(*X)), normalized(layer, numbers(*X), (0, 1), [2]))
    assert (layer.bias is None) == (not layer.use_bias)


def test_a_mask_of_the_batch_counts_for_what_is_remembered_too():
    layer = made(tt.BatchNorm, 3, use_fast_variance=False)
    x = numbers(*X)
    expected = normalized(layer, x, (0, 1), [2], MASK)
    close(layer(array(*X), mask=jnp.asarray(MASK)), expected)
    mean, var = moments_of(x, (0, 1), MASK)
    close(layer.mean[...], 0.01 * mean.ravel())
    close(layer.var[...], 0.99 + 0.01 * var.ravel())


@pytest.mark.parametrize("groups", [[[0, 1, 2, 3]], [[0, 3], [1, 2]]])
@pytest.mark.parametrize("is_fast", [True, False])
def test_moments_of_a_batch_over_an_axis_of_a_mapping(groups, is_fast):
    given = groups if len(groups) > 1 else None
    options = {"axis_index_groups": given, "use_fast_variance": is_fast}
    layer = made(tt.BatchNorm, 3, axis_name="rows", **options)

    def run(x):
        copy = tt.clone(layer)
        return copy(x), copy.mean[...], copy.var[...]

    each = over_devices if given else jax.vmap(run, axis_name="rows")
    args = (run, array(4, *X)) if given else (array(4, *X),)
    x = numbers(4, *X)
    found, mean, var = map(np.asarray, each(*args))
    for group in groups:
        here, spread = moments_of(x[group], (0, 1, 2))
        close(found[group], normalized(layer, x[group], (0, 1, 2), [3]))
        close(mean[group], np.tile(0.01 * here.ravel(), (len(group), 1)))
        close(var[group], np.tile(0.99 + 0.01 * spread.ravel(), (len(group), 1)))


def test_remembering_has_no_gradient_and_the_batch_has():
    layer = made(tt.BatchNorm, 3)

    def remembered(x):
        copy = tt.clone(layer)
        copy(x)
        return jnp.sum(copy.mean[...] + copy.var[...])

    found = compiled(jax.grad(remembered))(array(*X))
    np.testing.assert_array_equal(found, np.zeros(X))
    outputs = lambda x: jnp.sum(tt.clone(layer)(x) ** 3)
    grads = compiled(jax.grad(outputs))(array(*X))
    close(grads.sum((0, 1)), np.zeros(3), 1e-4)
    assert np.abs(grads).max() > 0.01


def test_statistics_stay_wide():
    layer = made(tt.BatchNorm, 3, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    assert type(layer.mean) is type(layer.var) is tt.BatchStat
    layer(array(*X, dtype=jnp.bfloat16))
    assert (layer.mean.dtype, layer.var.dtype) == (jnp.float32, jnp.float32)
    assert layer.scale.dtype == jnp.bfloat16


def test_a_batch_norm_that_knows_no_mode_says_so():
    layer = placed(made(tt.BatchNorm, 3, use_running_average=None))
    before = values_of(layer)
    message = r"BatchNorm at blocks/1/up: `use_running_average` .* nor to the call"
    with pytest.raises(tt.StructureError, match=message):
        layer(array(*X))
    assert values_of(layer) == before


@pytest.mark.parametrize(
    ("axis", "shape"), [(-1, (2, 5)), (-1, ()), (3, X), (-4, X), (1, (2, 5, 3))]
)
def test_batches_that_do_not_fit_are_refused_and_change_nothing(axis, shape):
    layer = placed(made(tt.BatchNorm, 3, axis=axis))
    before = values_of(layer)
    message = rf"BatchNorm at blocks/1/up: expected .* 3 features on axis {axis}, got"
    with pytest.raises(tt.StructureError, match=message):
        layer(array(*shape))
    assert values_of(layer) == before


def test_an_axis_of_no_mapping_changes_nothing():
    layer = made(tt.BatchNorm, 3, axis_name="rows")
    before = values_of(layer)
    with pytest.raises(NameError, match="rows"):
        layer(array(*X))
    assert values_of(layer) == before


def test_a_sharded_batch_keeps_its_sharding():
    with jax.set_mesh(mesh_of((2,), ("data",), AxisType.Explicit)):
        layer = made(tt.BatchNorm, 3)
        outputs = layer(jax.device_put(array(*X), P("data")))
        assert jax.typeof(outputs).sharding.spec == P("data", None, None)
        close(outputs, normalized(layer, numbers(*X), (0, 1), [2]))


# Moments.


def test_moments_of_an_array():
    x = array(*X)
    for is_fast in (True, False):
        layer = made(tt.LayerNorm, 3, use_fast_variance=is_fast)
        mean, var = layer._moments(x, [0, 1], None)
        expected = moments_of(numbers(*X), (0, 1))
        close(mean, expected[0])
        close(var, expected[1])
        no_mean, square = made(tt.RMSNorm, 3)._moments(x, (2,), None)
        assert no_mean is None
        close(square, (numbers(*X) ** 2).mean(2, keepdims=True))


def test_the_fast_variance_is_never_negative():
    x = jnp.full((3, 4), 1000.1)
    _, var = made(tt.LayerNorm, 4)._moments(x, (1,), None)
    assert (np.asarray(var) >= 0).all()


def test_arrays_are_widened():
    assert wide(jnp.ones(2, jnp.bfloat16)).dtype == jnp.float32
    assert wide(jnp.ones(2, jnp.int32)).dtype == jnp.float32
    assert wide(jnp.ones(2, jnp.complex64)).dtype == jnp.complex64


def test_masks_are_broadcast_to_the_inputs():
    assert checked_mask(None, None, X) is None
    found = checked_mask(None, np.array([True, False, True]), X)
    np.testing.assert_array_equal(found, np.broadcast_to([True, False, True], X))


def test_statistics_are_not_rounded_before_they_are_used():
    layer = made(tt.BatchNorm, 3, dtype=jnp.bfloat16, momentum=0.0)
    x = jnp.asarray(100.3 + numbers(64, 3), jnp.float32)
    trained = layer(x)
    exact = np.asarray(x, np.float64)
    mean, var = moments_of(exact, (0,))
    expected = (exact - mean) / np.sqrt(var + 1e-5) * raw(layer.scale) + raw(layer.bias)
    for found in (trained, layer(x, use_running_average=True)):
        assert found.dtype == jnp.bfloat16
        close(found.astype(jnp.float32), expected, 0.02)


@pytest.mark.parametrize(
    ("cls", "options", "expected"),
    [
        (tt.BatchNorm, {}, [(2, 3), (3,), (3,), (3,), (3,)]),
        (tt.BatchNorm, {"use_bias": False}, [(2, 3), (3,), (3,), (3,), None]),
        (tt.LayerNorm, {"use_scale": False}, [(2, 3), None, (3,)]),
        (tt.RMSNorm, {}, [(2, 3), (3,)]),
    ],
)
def test_what_a_replaced_promotion_is_called_with(cls, options, expected):
    shapes = []

    def half(values, *, dtype=None):
        shapes.append([None if x is None else x.shape for x in values])
        return tuple(None if x is None else x.astype(jnp.float16) for x in values)

    layer = made(cls, 3, promote_dtype=half, **options)
    assert layer(array(2, 3)).dtype == jnp.float16
    assert shapes == [expected]
