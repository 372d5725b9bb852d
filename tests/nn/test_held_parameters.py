# SPDX-License-Identifier: Apache-2.0
"""What may stand in a parameter's place: arrays, objects of others, and shards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from formulas import array, close, made, placed

import treetap as tt


class Indexed:
    """An object that gives its array for `[...]`, and knows nothing else."""

    def __init__(self, values):
        self.values = values

    def __getitem__(self, index):
        return self.values[index]


class Readable:
    """An object that JAX can make an array of."""

    def __init__(self, values):
        self.values = values
        self.shape, self.ndim, self.dtype = values.shape, values.ndim, values.dtype

    def __jax_array__(self):
        return self.values


class Stored(tt.Module):
    """A Module in the place of a parameter."""

    def __init__(self, values):
        self.values = tt.Param(values / 2)

    def __getitem__(self, index):
        return self.values[index] * 2


class Doubled(tt.Param):
    def get_value(self, **options):
        return 2 * super().get_value(**options)


HELD = {
    "array": jnp.asarray,
    "numpy": np.asarray,
    "indexed": Indexed,
    "readable": Readable,
    "module": Stored,
    "inside a Variable": lambda values: tt.Param(Indexed(values)),
    "with a method of its own": lambda values: Doubled(values / 2),
}
LAYERS = [
    (tt.Linear, (3, 4), (2, 3)),
    (tt.LinearGeneral, ((3,), (4,)), (2, 3)),
    (tt.Einsum, ("ab,bc->ac", (3, 4), (4,)), (2, 3)),
    (tt.Conv, (3, 4, 2), (2, 5, 3)),
    (tt.ConvTranspose, (3, 4, 2), (2, 5, 3)),
    (tt.Embed, (5, 3), (2,)),
    (tt.LoRA, (3, 2, 4), (2, 3)),
    (tt.BatchNorm, (3,), (2, 3)),
    (tt.LayerNorm, (3,), (2, 3)),
    (tt.RMSNorm, (3,), (2, 3)),
    (tt.GroupNorm, (6, 3), (2, 6)),
    (tt.InstanceNorm, (3,), (2, 5, 3)),
    (tt.PReLU, (), (2, 3)),
]


@pytest.mark.parametrize("held", HELD.values(), ids=HELD)
@pytest.mark.parametrize(
    ("cls", "arguments", "shape"), LAYERS, ids=lambda x: getattr(x, "__name__", "")
)
def test_layers_compute_with_what_holds_an_array(cls, arguments, shape, held):
    layer = cls() if cls is tt.PReLU else made(cls, *arguments)
    x = jnp.arange(2) if cls is tt.Embed else array(*shape)
    expected = layer(x)
    for name, variable in list(vars(layer).items()):
        if isinstance(variable, tt.Param):
            value = variable[...]
            delattr(layer, name)
            setattr(layer, name, held(value))
    close(layer(x), expected)


def test_the_moments_to_evaluate_with_may_be_arrays():
    layer = made(tt.BatchNorm, 3, use_running_average=True)
    expected = layer(array(2, 3))
    del layer.mean, layer.var
    layer.mean, layer.var = jnp.zeros(3), Indexed(jnp.ones(3))
    close(layer(array(2, 3)), expected)


def shards(layer, **axes):
    """Two copies of a layer, with half of some parameters each."""
    halves = []
    for which in (0, 1):
        half = tt.clone(layer)
        for name, axis in axes.items():
            parts = jnp.split(getattr(layer, name)[...], 2, axis)
            setattr(half, name, tt.Param(parts[which]))
        if "bias" not in axes and which == 1:
            half.bias = None
        halves.append(half)
    return halves


SUMMED = [
    (tt.Linear, (4, 6), {"kernel": 0}, (3, 4), -1),
    (tt.LinearGeneral, ((4, 2), 6), {"axis": (-2, -1), "kernel": 0}, (3, 4, 2), 1),
    (tt.Einsum, ("ab,bc->ac", (4, 6), 6), {"kernel": 0}, (3, 4), -1),
    (tt.Conv, (4, 6, 3), {"kernel": 1}, (3, 5, 4), -1),
    (tt.ConvTranspose, (4, 6, 3), {"kernel": 1}, (3, 5, 4), -1),
]


@pytest.mark.parametrize(
    ("cls", "sizes", "options", "shape", "axis"),
    SUMMED,
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_layers_with_shards_of_their_kernel_add_up(cls, sizes, options, shape, axis):
    """Parallel by hand: each device sums over its part of the features."""
    options = dict(options)
    kernel = options.pop("kernel")
    layer, x = made(cls, *sizes, **options), array(*shape)
    halves = shards(layer, kernel=kernel)
    found = [half(part) for half, part in zip(halves, jnp.split(x, 2, axis))]
    close(sum(found), layer(x))
    half = placed(halves[0])
    with pytest.raises(tt.StructureError, match=r" at blocks/1/up: .*2"):
        half(x)


def test_layers_with_shards_of_their_features_stand_side_by_side():
    x = array(3, 4)
    layer = made(tt.Linear, 4, 6)
    halves = shards(layer, kernel=1, bias=0)
    close(jnp.concatenate([half(x) for half in halves], -1), layer(x))
    layer = made(tt.BatchNorm, 4)
    halves = shards(layer, scale=0, bias=0)
    for half in halves:
        half.mean, half.var = tt.BatchStat(jnp.zeros(2)), tt.BatchStat(jnp.ones(2))
    parts = [half(part) for half, part in zip(halves, jnp.split(x, 2, -1))]
    close(jnp.concatenate(parts, -1), layer(x))
    table = made(tt.Embed, 5, 4)
    halves = shards(table, embedding=1)
    rows = [half(jnp.arange(5)) for half in halves]
    close(jnp.concatenate(rows, -1), table(jnp.arange(5)))
    scores = [half.attend(part) for half, part in zip(halves, jnp.split(x, 2, -1))]
    close(sum(scores), table.attend(x))


def test_norms_without_parameters_take_any_number_of_features():
    for cls in (tt.LayerNorm, tt.RMSNorm):
        options = {"use_bias": False} if cls is tt.LayerNorm else {}
        layer = made(cls, 4, use_scale=False, **options)
        close(layer(array(3, 6)), made(cls, 6, use_scale=False, **options)(array(3, 6)))


def test_an_instance_of_one_element_is_its_own_mean():
    layer = made(tt.InstanceNorm, 3)
    close(layer(array(2, 3)), np.zeros((2, 3)) + np.asarray(layer.bias[...]))


def test_a_lora_with_a_shard_of_its_first_matrix():
    layer, x = made(tt.LoRA, 4, 2, 6), array(3, 4)
    halves = [tt.clone(layer), tt.clone(layer)]
    for half, part in zip(halves, jnp.split(layer.lora_a[...], 2)):
        half.lora_a = tt.LoRAParam(part)
    found = [half(part) for half, part in zip(halves, jnp.split(x, 2, -1))]
    close(sum(found), layer(x))


def test_a_kernel_may_be_no_variable_under_jit():
    layer = made(tt.Linear, 3, 4)
    expected = layer(array(2, 3))
    layer.kernel = layer.kernel[...]
    close(jax.jit(lambda layer, x: layer(x))(layer, array(2, 3)), expected)
