# SPDX-License-Identifier: Apache-2.0
"""LoRA and LoRALinear: low-rank maps alone, beside a module, beside a Linear."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from formulas import array, close, compiled, drawing, made, numbers, placed, raw
from jax.sharding import AxisType, PartitionSpec

import treetap as tt
from meshes import mesh_of

P = PartitionSpec
X = (2, 3)


def low_rank(layer, x):
    return x @ raw(layer.lora_a) @ raw(layer.lora_b)


def test_a_map_of_low_rank():
    layer = made(tt.LoRA, 3, 2, 4)
    assert (layer.lora_a.shape, layer.lora_b.shape) == ((3, 2), (2, 4))
    assert layer.base_module is None
    close(layer(array(*X)), low_rank(layer, numbers(*X)))


def test_a_module_beside_gets_the_inputs_and_options_of_the_call():
    class Base(tt.Module):
        def __call__(self, x, times=1):
            return times * jnp.ones((2, 4)) * x[0, 0]

    layer = made(tt.LoRA, 3, 2, 4, base_module=Base())
    expected = low_rank(layer, numbers(*X)) + 3 * numbers(*X)[0, 0]
    close(layer(array(*X), times=3), expected)


def test_a_function_may_stand_for_the_module_beside():
    layer = made(tt.LoRA, 3, 2, 3, base_module=jnp.sin)
    close(layer(array(*X)), low_rank(layer, numbers(*X)) + np.sin(numbers(*X)))


def test_parameters_of_the_module_beside_are_part_of_the_layer():
    layer = made(tt.LoRA, 3, 2, 4, base_module=made(tt.Linear, 3, 4))
    kinds = {path: type(v) for path, v in tt.to_flat_state(tt.state(layer))}
    assert kinds == {
        ("base_module", "bias"): tt.Param,
        ("base_module", "kernel"): tt.Param,
        ("lora_a",): tt.LoRAParam,
        ("lora_b",): tt.LoRAParam,
    }


def test_an_adapter_begins_by_changing_nothing():
    options = {"kernel_init": drawing(), "lora_rank": 2, "rngs": tt.Rngs(0)}
    layer = tt.LoRALinear(3, 4, **options)
    assert not layer.lora.lora_b[...].any()
    assert layer.lora.lora_a[...].all()
    close(layer(array(*X)), numbers(*X) @ raw(layer.kernel))


def test_the_kind_of_the_parameters():
    class Adapter(tt.Param):
        pass

    layer = made(tt.LoRA, 3, 2, 4, lora_param_type=Adapter)
    assert type(layer.lora_a) is type(layer.lora_b) is Adapter
    assert issubclass(tt.LoRAParam, tt.Param)
    layer = made(tt.LoRALinear, 3, 4, lora_rank=2, lora_param_type=Adapter)
    assert type(layer.lora.lora_a) is Adapter
    assert type(layer.kernel) is tt.Param


def test_a_linear_map_with_an_adapter_is_the_sum_of_both():
    layer = made(tt.LoRALinear, 3, 4, lora_rank=2)
    assert isinstance(layer, tt.Linear)
    x = numbers(*X)
    expected = x @ raw(layer.kernel) + raw(layer.bias) + low_rank(layer.lora, x)
    close(layer(array(*X)), expected)


def test_both_maps_have_dtypes_of_their_own():
    options = {"lora_rank": 2, "dtype": jnp.float16, "param_dtype": jnp.bfloat16}
    layer = made(tt.LoRALinear, 3, 4, lora_param_dtype=jnp.float16, **options)
    assert (layer.kernel.dtype, layer.lora.lora_a.dtype) == (jnp.bfloat16, jnp.float16)
    assert (layer.dtype, layer.lora.dtype) == (jnp.float16, None)
    layer = made(tt.LoRALinear, 3, 4, lora_rank=2, lora_dtype=jnp.bfloat16)
    assert layer.lora.dtype == jnp.bfloat16
    assert layer.lora(array(*X)).dtype == jnp.bfloat16
    assert layer(array(*X)).dtype == jnp.float32


def test_gradients_of_the_adapter_alone():
    layer = made(tt.LoRALinear, 3, 4, lora_rank=2)
    graphdef, adapter, rest = tt.split(layer, tt.LoRAParam, ...)

    def loss(adapter):
        return jnp.sum(tt.merge(graphdef, adapter, rest)(array(*X)))

    grads = jax.grad(loss)(adapter)
    x = numbers(*X)
    expected = np.outer(x.sum(0), raw(layer.lora.lora_b).sum(1))
    close(grads["lora"]["lora_a"][...], expected)
    assert len(jax.tree.leaves(grads)) == 2


@pytest.mark.parametrize("shape", [(2, 5), ()])
def test_other_features_are_refused(shape):
    layer = placed(made(tt.LoRA, 3, 2, 4))
    message = r"LoRA at blocks/1/up: expected inputs with 3 features .* got float32"
    with pytest.raises(tt.StructureError, match=message):
        layer(array(*shape))
    layer = placed(made(tt.LoRALinear, 3, 4, lora_rank=2))
    with pytest.raises(tt.StructureError, match=r"LoRALinear at blocks/1/up: expected"):
        layer(array(*shape))


def test_what_cannot_be_called_is_refused_beside():
    rngs = tt.Rngs(0)
    message = r"^LoRA: `base_module` must be callable, got int"
    with pytest.raises(tt.StructureError, match=message):
        tt.LoRA(3, 2, 4, base_module=3, rngs=rngs)
    assert int(rngs.default.count[...]) == 0


def test_a_wrong_rank_is_refused_before_anything_is_drawn():
    rngs = tt.Rngs(0)
    with pytest.raises(tt.StructureError, match=r"^LoRALinear: `lora_rank`"):
        tt.LoRALinear(3, 4, lora_rank=-2, rngs=rngs)
    assert int(rngs.default.count[...]) == 0


def test_results_are_sharded_as_asked():
    expected = np.asarray(made(tt.LoRALinear, 4, 8, lora_rank=2)(array(2, 4)))
    with jax.set_mesh(mesh_of((2, 4), ("data", "model"), AxisType.Explicit)):
        layer = made(tt.LoRALinear, 4, 8, lora_rank=2)
        x = jax.device_put(array(2, 4), P("data"))
        spec = P("data", "model")
        outputs = compiled(lambda x: layer(x, out_sharding=spec))(x)
        assert jax.typeof(outputs).sharding.spec == P("data", "model")
        close(outputs, expected)
