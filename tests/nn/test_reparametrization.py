# SPDX-License-Identifier: Apache-2.0
"""SpectralNorm against singular values, WeightNorm against lengths, of numpy."""

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
    numbers,
    placed,
    ran,
    raw,
    values_of,
)

import treetap as tt

X = (2, 3)


def linear():
    return made(tt.Linear, 3, 4)


def conv():
    return made(tt.Conv, 3, 4, 2)


def outputs(layer, kernel):
    return numbers(*X) @ kernel + raw(layer.bias)


# SpectralNorm.


def unit(x, epsilon):
    return x / np.sqrt((x**2).sum() + epsilon)


def iterated(matrix, u, steps, epsilon=1e-12):
    """The vector and the value after some steps of power iteration."""
    for _ in range(steps):
        v = unit(u @ matrix.T, epsilon)
        u = unit(v @ matrix, epsilon)
    return u, (v @ matrix @ u.T).item()


def stats_of(layer, name="kernel"):
    return raw(layer.batch_stats[name, "u"]), raw(layer.batch_stats[name, "sigma"])


@pytest.mark.parametrize(("steps", "epsilon"), [(1, 1e-12), (3, 1e-12), (2, 0.5)])
def test_steps_of_power_iteration(steps, epsilon):
    layer = made(tt.SpectralNorm, linear(), n_steps=steps, epsilon=epsilon)
    kernel = raw(layer.layer_instance.kernel)
    u, _ = stats_of(layer)
    assert u.shape == (1, 4)
    for _ in range(2):
        u, sigma = iterated(kernel, u, steps, epsilon)
        found = ran(layer, array(*X))
        close(found, outputs(layer.layer_instance, kernel / sigma), 1e-4)
        close(stats_of(layer)[0], u, 1e-4)
        close(stats_of(layer)[1], sigma, 1e-4)


@pytest.mark.parametrize("make", [linear, conv])
def test_many_steps_find_the_largest_singular_value(make):
    layer = made(tt.SpectralNorm, make(), n_steps=60)
    shape = X if make is linear else (2, 5, 3)
    layer(array(*shape))
    kernel = raw(layer.layer_instance.kernel)
    largest = np.linalg.svd(kernel.reshape(-1, 4), compute_uv=False)[0]
    close(stats_of(layer)[1], largest, 1e-4)
    assert stats_of(layer)[0].shape == (1, 4)


def test_the_layer_runs_with_weights_divided_and_keeps_its_own():
    inner = conv()
    before = values_of(inner)
    layer = made(tt.SpectralNorm, inner, n_steps=20)
    found = layer(array(2, 5, 3))
    divided = conv()
    divided.kernel[...] = (
        divided.kernel[...] / layer.batch_stats["kernel", "sigma"][...]
    )
    close(found, divided(array(2, 5, 3)), 1e-4)
    assert values_of(inner) == before


def test_statistics_stay_where_they_are_to_evaluate():
    layer = made(tt.SpectralNorm, linear())
    layer(array(*X))
    kept = values_of(layer)
    for run in (
        lambda: layer(array(*X), update_stats=False),
        lambda: tt.view(layer, use_running_average=True)(array(*X)),
        lambda: made(tt.SpectralNorm, linear(), update_stats=False)(array(*X)),
    ):
        run()
        assert values_of(layer) == kept
    layer(array(*X), update_stats=True)
    assert values_of(layer) != kept


def test_updating_is_an_attribute_that_train_and_eval_set():
    layer = made(tt.SpectralNorm, linear(), update_stats=False)
    assert layer.use_running_average
    before = values_of(layer)
    layer(array(*X))
    assert values_of(layer) == before
    layer.train()
    assert not layer.use_running_average
    layer(array(*X))
    assert values_of(layer) != before


class Pair(tt.Module):
    def __init__(self):
        self.first = linear()
        self.norm = made(tt.BatchNorm, 4)
        self.second = made(tt.Linear, 4, 2)

    def __call__(self, x, *, times=1):
        return times * self.second(self.norm(self.first(x)))


def test_every_matrix_of_a_layer_and_nothing_else():
    layer = made(tt.SpectralNorm, Pair())
    kernels = [("first", "kernel"), ("second", "kernel")]
    stats = {(*path, name) for path in kernels for name in ("u", "sigma")}
    assert set(layer.batch_stats) == stats
    assert all(type(stat) is tt.BatchStat for stat in layer.batch_stats.values())


def test_what_the_layer_writes_is_kept_and_options_reach_it():
    layer = made(tt.SpectralNorm, Pair())
    before = layer.layer_instance.norm.mean[...]
    once = ran(layer, array(*X), update_stats=False)
    assert (layer.layer_instance.norm.mean[...] != before).any()
    close(ran(layer, array(*X), update_stats=False, times=2), 2 * np.asarray(once))


def test_dtypes_of_statistics_and_weights():
    types = {"dtype": jnp.bfloat16, "param_dtype": jnp.float16}
    layer = made(tt.SpectralNorm, made(tt.Linear, 3, 4, use_bias=False), **types)
    assert {stat.dtype for stat in layer.batch_stats.values()} == {jnp.dtype("float16")}
    assert layer(array(*X, dtype=jnp.bfloat16)).dtype == jnp.bfloat16
    assert layer.batch_stats["kernel", "u"].dtype == jnp.float16
    assert layer.layer_instance.kernel.dtype == jnp.float32


def test_gradients_go_through_the_value_and_not_through_the_vectors():
    layer = made(tt.SpectralNorm, linear())
    kernel = raw(layer.layer_instance.kernel)
    v = unit(stats_of(layer)[0] @ kernel.T, 0)
    u = unit(v @ kernel, 0)
    sigma = (v @ kernel @ u.T).item()
    loss = lambda layer, x: jnp.sum(layer(x, update_stats=False))
    grads = compiled(lambda layer, x: tt.grad(loss)(layer, x))(layer, array(*X))
    ahead = np.outer(numbers(*X).sum(0), np.ones(4))
    expected = ahead / sigma - (ahead * kernel).sum() / sigma**2 * v.T @ u
    close(grads.layer_instance.kernel[...], expected, 1e-3)


def test_a_weight_of_zeros_stays_zeros():
    inner = made(tt.Linear, 3, 4, kernel_init=jax.nn.initializers.zeros)
    found = made(tt.SpectralNorm, inner)(array(*X))
    close(found, np.tile(raw(inner.bias), (2, 1)))


def test_weights_that_are_no_matrices_may_be_refused():
    layer = placed(made(tt.SpectralNorm, conv(), error_on_non_matrix=True))
    before = values_of(layer)
    message = r"SpectralNorm at blocks/1/up: kernel has the shape \(2, 3, 4\)"
    with pytest.raises(tt.StructureError, match=message):
        layer(array(2, 5, 3))
    assert values_of(layer) == before
    made(tt.SpectralNorm, linear(), error_on_non_matrix=True)(array(*X))


def test_an_error_of_the_layer_says_where_and_changes_nothing():
    for cls in (tt.SpectralNorm, tt.WeightNorm):
        layer = placed(made(cls, linear()))
        before = values_of(layer)
        message = "Linear at blocks/1/up/layer_instance: expected inputs with 3"
        with pytest.raises(tt.StructureError, match=message):
            layer(array(2, 5))
        assert values_of(layer) == before


@pytest.mark.parametrize("cls", [tt.SpectralNorm, tt.WeightNorm])
def test_what_is_wrapped_is_a_module_that_can_be_called(cls):
    class Silent(tt.Module):
        pass

    for wrong in (3, None, jnp.sin, Silent()):
        message = f"^{cls.__name__}: `layer_instance` must be a Module .* got "
        with pytest.raises(TypeError, match=message):
            made(cls, wrong)


def test_there_is_at_least_one_step():
    for steps in (0, -1):
        message = f"^SpectralNorm: `n_steps` must be a positive integer, got {steps}"
        with pytest.raises(tt.StructureError, match=message):
            made(tt.SpectralNorm, linear(), n_steps=steps)


# WeightNorm.


def normalized(kernel, features, epsilon=1e-12):
    over = tuple(i for i in range(kernel.ndim) if i not in features)
    return kernel / np.sqrt((kernel**2).sum(over, keepdims=True) + epsilon)


@pytest.mark.parametrize(
    ("features", "axes", "shape"),
    [(-1, (1,), (4,)), (0, (0,), (3,)), ((0, 1), (0, 1), (3, 4)), (None, (), ())],
)
def test_weights_of_length_one_times_a_scale(features, axes, shape):
    layer = made(tt.WeightNorm, linear(), feature_axes=features)
    inner, before = layer.layer_instance, values_of(layer)
    scale = raw(layer.scales["kernel",])
    assert scale.shape == shape
    over = [n if i in axes else 1 for i, n in enumerate((3, 4))]
    kernel = normalized(raw(inner.kernel), axes) * scale.reshape(over)
    close(layer(array(*X)), outputs(inner, kernel))
    assert values_of(layer) == before


def test_axes_may_come_in_any_order():
    layer = made(tt.WeightNorm, linear(), feature_axes=(1, 0), epsilon=0.5)
    scale = raw(layer.scales["kernel",])
    assert scale.shape == (4, 3)
    kernel = normalized(raw(layer.layer_instance.kernel), (0, 1), 0.5) * scale.T
    close(layer(array(*X)), outputs(layer.layer_instance, kernel))


def test_weights_without_a_scale():
    layer = made(tt.WeightNorm, linear(), use_scale=False, epsilon=0.25)
    assert layer.scales is None
    kernel = normalized(raw(layer.layer_instance.kernel), (1,), 0.25)
    close(layer(array(*X)), outputs(layer.layer_instance, kernel))


def test_kernels_of_more_axes():
    layer = made(tt.WeightNorm, conv(), scale_init=jax.nn.initializers.ones)
    plain = conv()
    kernel = normalized(raw(plain.kernel), (2,))
    plain.kernel[...] = jnp.asarray(kernel, jnp.float32)
    close(ran(layer, array(2, 5, 3)), plain(array(2, 5, 3)))


def test_a_filter_says_which_weights():
    inner = linear()
    layer = made(tt.WeightNorm, inner, variable_filter=tt.PathContains("bias"))
    assert set(layer.scales) == {("bias",)}
    bias = np.sign(raw(inner.bias)) * raw(layer.scales["bias",])
    close(ran(layer, array(*X)), numbers(*X) @ raw(inner.kernel) + bias)
    assert set(made(tt.WeightNorm, Pair()).scales) == {
        ("first", "kernel"),
        ("second", "kernel"),
    }


def test_scales_are_drawn_from_keys_of_their_own_and_leave_the_stream():
    rngs = tt.Rngs(0)
    keys = []

    def init(key, shape, dtype):
        keys.append(jax.random.key_data(key).tolist())
        return jnp.ones(shape, dtype)

    tt.WeightNorm(Pair(), scale_init=init, rngs=rngs)
    assert len({tuple(key) for key in keys}) == 2
    assert int(rngs.default.count[...]) == 0


def test_dtypes_of_scales_and_weights():
    types = {"dtype": jnp.bfloat16, "param_dtype": jnp.float16}
    layer = made(tt.WeightNorm, made(tt.Linear, 3, 4, use_bias=False), **types)
    assert layer.scales["kernel",].dtype == jnp.float16
    assert type(layer.scales["kernel",]) is tt.Param
    assert layer(array(*X, dtype=jnp.bfloat16)).dtype == jnp.bfloat16


def test_arguments_reach_the_layer():
    layer = made(tt.WeightNorm, Pair(), scale_init=drawing())
    once = ran(layer, array(*X))
    close(ran(layer, array(*X), times=2), 2 * np.asarray(once))


def test_axes_that_do_not_fit_are_refused():
    with pytest.raises(
        tt.StructureError, match=r"^WeightNorm: the axes \(2,\) .* rank 2"
    ):
        made(tt.WeightNorm, linear(), feature_axes=2)
    layer = placed(made(tt.WeightNorm, linear(), feature_axes=2, use_scale=False))
    with pytest.raises(tt.StructureError, match="WeightNorm at blocks/1/up: the axes"):
        layer(array(*X))


def test_a_scale_of_another_shape_is_refused():
    with pytest.raises(
        tt.StructureError, match=r"^WeightNorm: .*`scales`.*float32\[7\]"
    ):
        made(tt.WeightNorm, linear(), scale_init=lambda *_: jnp.ones(7))


def test_scales_of_weights_are_trained():
    layer = made(tt.WeightNorm, linear())
    flat = dict(tt.to_flat_state(tt.state(layer, tt.Param)))
    assert ("scales", ("kernel",)) in flat
    loss = tt.grad(lambda layer: jnp.sum(layer(array(2, 3)) ** 2))
    grads = compiled(lambda layer: loss(layer))(layer)
    assert (np.abs(grads.scales["kernel",][...]) > 1e-4).all()


def test_scales_may_be_drawn():
    init = jax.nn.initializers.normal()
    layer = tt.WeightNorm(linear(), scale_init=init, rngs=tt.Rngs(0))
    assert len(set(raw(layer.scales["kernel",]).tolist())) == 4


@pytest.mark.parametrize("cls", [tt.SpectralNorm, tt.WeightNorm])
def test_the_weights_of_the_layer_stay(cls):
    layer = made(cls, linear())
    kernel, bias = raw(layer.layer_instance.kernel), raw(layer.layer_instance.bias)
    layer(array(2, 3))
    options = {"update_stats": False} if cls is tt.SpectralNorm else {}
    for _ in range(2):
        layer(array(2, 3), **options)
    np.testing.assert_array_equal(raw(layer.layer_instance.kernel), kernel)
    np.testing.assert_array_equal(raw(layer.layer_instance.bias), bias)
