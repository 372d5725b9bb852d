# SPDX-License-Identifier: Apache-2.0
"""GroupNorm and InstanceNorm by definition: moments of groups, and of channels."""

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
)

import treetap as tt

pytestmark = pytest.mark.usefixtures("fully_compiled")

X = (2, 5, 4, 6)
MASK = np.arange(2 * 5 * 4 * 6).reshape(X) % 5 != 0


def with_parameters(layer, y):
    if layer.scale is not None:
        y = y * raw(layer.scale)
    return y if layer.bias is None else y + raw(layer.bias)


def grouped(layer, x, axes, mask=None):
    """Each group of features by itself, over the axes given as well."""
    out = np.zeros(x.shape)
    size = layer.group_size
    for group in range(layer.num_groups):
        part = slice(group * size, (group + 1) * size)
        here = None if mask is None else np.broadcast_to(mask, x.shape)[..., part]
        over = (*(axis for axis in axes if axis != x.ndim - 1), x.ndim - 1)
        mean, var = moments_of(x[..., part], over, here)
        out[..., part] = (x[..., part] - mean) / np.sqrt(var + layer.epsilon)
    return with_parameters(layer, out)


@pytest.mark.parametrize(
    ("groups", "size", "expected"),
    [(3, None, (3, 2)), (None, 3, (2, 3)), (1, None, (1, 6)), (6, None, (6, 1))],
)
def test_groups_by_number_or_by_size(groups, size, expected):
    layer = made(tt.GroupNorm, 6, groups, size)
    assert (layer.num_groups, layer.group_size) == expected
    assert layer.feature_axis == -1
    close(ran(layer, array(*X)), grouped(layer, numbers(*X), (1, 2, 3)))


def test_there_are_32_groups_unless_told_otherwise():
    layer = made(tt.GroupNorm, 64)
    assert (layer.num_groups, layer.group_size) == (32, 2)


@pytest.mark.parametrize(
    "axes", [(1, 2, 3), (1, 3), (2, -1), -1, (-1, 0), (0, 1, 2, 3), (1,)]
)
def test_moments_over_the_axes_given(axes):
    options = {"reduction_axes": axes, "use_fast_variance": False}
    layer = made(tt.GroupNorm, 6, 2, **options)
    given = (axes,) if isinstance(axes, int) else axes
    over = tuple(axis % 4 for axis in given)
    close(ran(layer, array(*X)), grouped(layer, numbers(*X), over))


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
@pytest.mark.parametrize("cls", [tt.GroupNorm, tt.InstanceNorm])
def test_each_option(cls, options):
    layer = made(
        cls, 6, **options, **({"num_groups": 3} if cls is tt.GroupNorm else {})
    )
    assert (layer.scale is None, layer.bias is None) == (
        not layer.use_scale,
        not layer.use_bias,
    )
    formula = grouped if cls is tt.GroupNorm else instances
    close(ran(layer, array(*X)), formula(layer, numbers(*X), (1, 2)))


def test_a_mask_says_which_elements_count():
    layer = made(tt.GroupNorm, 6, 3)
    for mask in (MASK, MASK[:, :, :, :1], MASK[:1, :1], MASK[0]):
        expected = grouped(layer, numbers(*X), (1, 2), mask)
        close(ran(layer, array(*X), mask=jnp.asarray(mask)), expected)


@pytest.mark.parametrize("cls", [tt.GroupNorm, tt.InstanceNorm])
def test_moments_over_an_axis_of_a_mapping(cls):
    own = {"num_groups": 3} if cls is tt.GroupNorm else {}
    layer = made(cls, 6, axis_name="rows", **own)
    formula = grouped if cls is tt.GroupNorm else instances
    x = numbers(4, *X)
    close(
        compiled(jax.vmap(layer, axis_name="rows"))(array(4, *X)),
        formula(layer, x, (0, 2, 3)),
    )
    groups = [[0, 3], [1, 2]]
    layer = made(cls, 6, axis_name="rows", axis_index_groups=groups, **own)
    found = np.asarray(over_devices(layer, array(4, *X)))
    for group in groups:
        close(found[group], formula(layer, x[group], (0, 2, 3)))


def test_features_alone_are_a_group_too():
    layer = made(tt.GroupNorm, 6, 3)
    close(ran(layer, array(2, 6)), grouped(layer, numbers(2, 6), ()))


# InstanceNorm.


def instances(layer, x, axes, mask=None):
    mean, var = moments_of(x, tuple(axes), mask)
    return with_parameters(layer, (x - mean) / np.sqrt(var + layer.epsilon))


def test_each_feature_of_each_element_by_itself():
    layer = made(tt.InstanceNorm, 6)
    close(ran(layer, array(*X)), instances(layer, numbers(*X), (1, 2)))


@pytest.mark.parametrize(
    ("features", "count", "axes"),
    [(1, 5, (2, 3)), ((2, 3), 24, (1,)), ((-1, 1), 30, (2,)), ([3], 6, (1, 2))],
)
def test_features_on_other_axes(features, count, axes):
    layer = made(tt.InstanceNorm, count, feature_axes=features)
    x = numbers(*X)
    mean, var = moments_of(x, axes)
    shape = [1 if i in (0, *axes) else n for i, n in enumerate(X)]
    expected = (x - mean) / np.sqrt(var + 1e-6) * raw(layer.scale).reshape(shape)
    close(ran(layer, array(*X)), expected + raw(layer.bias).reshape(shape))


def test_a_mask_of_instances():
    layer = made(tt.InstanceNorm, 6)
    expected = instances(layer, numbers(*X), (1, 2), MASK)
    close(ran(layer, array(*X), mask=jnp.asarray(MASK)), expected)


# Errors.


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((6, 3, 2), r"either `num_groups` or `group_size`.*num_groups=3, group_size=2"),
        ((6, None), "either `num_groups` or `group_size`"),
        ((6, 4), "num_groups=4 does not divide num_features=6"),
        ((6, 0), "num_groups=0 does not divide"),
        ((6, -3), "num_groups=-3 does not divide"),
        ((6, None, 4), "group_size=4 does not divide num_features=6"),
        ((6,), "num_groups=32 does not divide"),
    ],
)
def test_groups_that_do_not_fit_are_refused(args, words):
    rngs = tt.Rngs(0)
    with pytest.raises(tt.StructureError, match=f"^GroupNorm: .*{words}"):
        tt.GroupNorm(*args, rngs=rngs)
    assert int(rngs.default.count[...]) == 0


def test_a_number_of_groups_is_whole():
    with pytest.raises(tt.StructureError, match=r"GroupNorm: .*num_groups"):
        made(tt.GroupNorm, 6, 3.0)


@pytest.mark.parametrize(
    ("options", "shape", "words"),
    [
        ({}, (2, 5), r"expected inputs with 6 features on axis -1, got float32\[2,5\]"),
        ({}, (6,), r"a batch axis before the features, got float32\[6\]"),
        ({"reduction_axes": 4}, X, r"the axes \(4,\) are not .* rank 4"),
        ({"reduction_axes": (1, 1)}, X, r"the axes \(1, 1\) are not different"),
    ],
)
def test_inputs_that_do_not_fit_groups_are_refused(options, shape, words):
    layer = placed(made(tt.GroupNorm, 6, 3, **options))
    message = rf"GroupNorm at blocks/1/up: .*{words}"
    with pytest.raises(tt.StructureError, match=message):
        layer(array(*shape))


@pytest.mark.parametrize(
    ("features", "shape", "words"),
    [
        (-1, (2, 3, 5), r"expected 6 features .* got float32\[2,3,5\]"),
        (0, (6, 3, 5), r"the first axis is the batch .* feature_axes=0 of float32"),
        (-3, (6, 3, 5), "the first axis is the batch"),
        (3, (2, 3, 6), r"the axes \(3,\) are not .* rank 3"),
    ],
)
def test_inputs_that_do_not_fit_instances_are_refused(features, shape, words):
    layer = placed(made(tt.InstanceNorm, 6, feature_axes=features))
    message = rf"InstanceNorm at blocks/1/up: .*{words}"
    with pytest.raises(tt.StructureError, match=message):
        layer(array(*shape))


@pytest.mark.parametrize("cls", [tt.GroupNorm, tt.InstanceNorm])
def test_masks_that_do_not_fit_are_refused(cls):
    layer = placed(made(cls, 6, **({"num_groups": 3} if cls is tt.GroupNorm else {})))
    for mask, words in (
        (np.ones(X, np.float32), "boolean.* got float32"),
        (np.ones((2, 4, 4, 6), bool), r"got bool\[2,4,4,6\]"),
    ):
        message = rf"{cls.__name__} at blocks/1/up: `mask` .*{words}"
        with pytest.raises(tt.StructureError, match=message):
            layer(array(*X), mask=mask)


def test_groups_with_a_middle_axis_that_is_not_reduced():
    layer = made(tt.GroupNorm, 6, 2, reduction_axes=(1, 3), use_fast_variance=False)
    x = numbers(2, 4, 4, 6)
    expected = np.zeros(x.shape)
    for part in (slice(0, 3), slice(3, 6)):
        mean, var = moments_of(x[..., part], (1, 3))
        expected[..., part] = (x[..., part] - mean) / np.sqrt(var + 1e-6)
    expected = expected * raw(layer.scale) + raw(layer.bias)
    close(ran(layer, array(2, 4, 4, 6)), expected)


def test_gradients_of_groups_are_those_of_moments_repeated_over_features():
    layer = made(tt.GroupNorm, 6, 3)
    x, parameters = array(*X), (layer.scale, layer.bias)

    def by_hand(x):
        parts = jnp.reshape(x, (*X[:-1], 3, 2))
        mean, square = (
            jnp.mean(p, (1, 2, 4), keepdims=True) for p in (parts, parts**2)
        )
        var = jnp.maximum(0.0, square - mean * mean)
        mean, var = (jnp.repeat(m[..., 0], 2, 3) for m in (mean, var))
        scale, bias = (jnp.reshape(p[...], (1, 1, 1, 6)) for p in parameters)
        return (x - mean) * (jax.lax.rsqrt(var + 1e-6) * scale) + bias

    def slopes(fn):
        return np.asarray(jax.jit(jax.grad(lambda x: jnp.sin(fn(x)).sum()))(x))

    np.testing.assert_array_equal(slopes(layer), slopes(by_hand))
