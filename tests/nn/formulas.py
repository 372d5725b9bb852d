# SPDX-License-Identifier: Apache-2.0
"""What tests of layers share: numbers to compute with, and places in a model.

Formulas of the tests are in numpy and float64; `close` compares a layer with them.
Initializers here come from numpy as well: they differ from call to call, and compile
nothing.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import treetap as tt
from meshes import mesh_of

# Arguments that end like those of initializers and are none.
NO_INITIALIZERS = ("carry_init", "negative_slope_init")


def numbers(*shape, seed=0):
    """Numbers between -1 and 1, the same for the same shape and seed."""
    return np.random.default_rng([seed, *shape]).uniform(-1, 1, shape)


def array(*shape, seed=0, dtype=jnp.float32):
    """The same numbers, for a layer."""
    return jnp.asarray(numbers(*shape, seed=seed), dtype)


def drawing(seed=7):
    """An initializer; every call gives other numbers, whatever the key."""
    source = np.random.default_rng(seed)

    def init(key, shape, dtype=jnp.float32):
        return jnp.asarray(source.uniform(-1, 1, shape), dtype)

    return init


def made(cls, *args, **options):
    """A layer with initializers from numpy, where the options do not say others."""
    names = inspect.signature(cls.__init__).parameters
    for name in names:
        if name.endswith(("_init", "_initializer")) and name not in NO_INITIALIZERS:
            options.setdefault(name, drawing())
    if cls is tt.LoRALinear:
        options.setdefault("kernel_init", drawing())
    if "rngs" in names and cls not in (tt.RNN, tt.Bidirectional):
        options.setdefault("rngs", tt.Rngs(0))
    return cls(*args, **options)


def compiled(fn):
    """The function, compiled in a hurry."""
    return jax.jit(fn, compiler_options={"xla_backend_optimization_level": 0})


def ran(layer, *args, **options):
    """What a call gives, compiled in a hurry; what the layer writes is kept."""
    graphdef, state = tt.split(layer)

    def pure(state, args):
        copy = tt.merge(graphdef, state)
        return copy(*args, **options), tt.state(copy)

    outputs, state = compiled(pure)(state, args)
    tt.update(layer, state)
    return outputs


def raw(variable):
    """What a Variable holds, for a formula."""
    return np.asarray(variable.get_value().astype(jnp.float32), np.float64)


def close(found, expected, tolerance=2e-5):
    """Asserts that an array has the shape and the numbers of a formula."""
    found = np.asarray(found)
    found = found.astype(np.complex128 if np.iscomplexobj(found) else np.float64)
    assert found.shape == np.shape(expected)
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def moments_of(x, axes, mask=None):
    """The mean and the variance over axes, of the elements that count."""
    where = True if mask is None else np.broadcast_to(mask, x.shape)
    mean = np.mean(x, axis=axes, keepdims=True, where=where)
    return mean, np.mean(np.abs(x - mean) ** 2, axis=axes, keepdims=True, where=where)


def weights_of(query, key, bias=None, mask=None, causal=False):
    """Weights of keys for each query: `[batch..., heads, queries, keys]`."""
    key = np.repeat(key, query.shape[-2] // key.shape[-2], axis=-2)
    logits = np.einsum("...qhd,...khd->...hqk", query, key) / np.sqrt(query.shape[-1])
    logits = logits if bias is None else logits + bias
    if causal:
        seen = np.tril(np.ones(logits.shape[-2:], bool))
        mask = seen if mask is None else np.logical_and(mask, seen)
    if mask is not None:
        logits = np.where(mask, logits, -1e30)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def weighed(weights, value):
    """The values, weighed: `[batch..., queries, heads, depth]`."""
    value = np.repeat(value, weights.shape[-3] // value.shape[-2], axis=-2)
    return np.einsum("...hqk,...khd->...qhd", weights, value)


def projected(projection, x):
    """The heads that a projection makes of its inputs."""
    y = np.einsum("...i,ihd->...hd", x, raw(projection.kernel))
    return y if projection.bias is None else y + raw(projection.bias)


def layer_normalized(norm, x):
    """What a LayerNorm without a bias makes of its inputs."""
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(var + 1e-6) * raw(norm.scale)


def multihead(layer, q, k=None, v=None, *, kept=1.0, **options):
    """All steps of attention with heads; options as for `weights_of`."""
    k = q if k is None else k
    v = k if v is None else v
    query, key, value = (
        projected(projection, x)
        for projection, x in ((layer.query, q), (layer.key, k), (layer.value, v))
    )
    if layer.query_ln is not None:
        query, key = (
            layer_normalized(layer.query_ln, query),
            layer_normalized(layer.key_ln, key),
        )
    x = weighed(weights_of(query, key, **options) * kept, value)
    y = np.einsum("...hd,hdo->...o", x, raw(layer.out.kernel))
    return y if layer.out.bias is None else y + raw(layer.out.bias)


def over_devices(fn, x):
    """Runs a function of each row on a device of its own, along the axis `rows`."""
    mesh = mesh_of((x.shape[0],), ("rows",))
    spec = PartitionSpec("rows")
    run = lambda x: jax.tree.map(lambda y: y[None], fn(x[0]))
    options = {"in_specs": spec, "out_specs": spec, "check_vma": False}
    return jax.jit(jax.shard_map(run, mesh=mesh, **options))(x)


class Block(tt.Module):
    def __init__(self, up):
        self.up = up


class Model(tt.Module):
    """A model with a layer at `blocks/1/up`."""

    def __init__(self, layer):
        self.blocks = tt.List([Block(tt.data(None)), Block(layer)])

    def __call__(self, *args, **kwargs):
        return self.blocks[1].up(*args, **kwargs)


def placed(layer):
    """The layer, where errors are to say it is: `blocks/1/up`."""
    return Model(layer).blocks[1].up


def counts_of(tree):
    """How often each random stream has been drawn from."""
    state = tt.to_flat_state(tt.state(tree, tt.RngCount, graph=True))
    return {path: int(count.get_value()) for path, count in state}


def values_of(tree):
    """All that a layer holds, to see whether anything has changed."""
    state = tt.to_flat_state(tt.state(tree, tt.Not(tt.RngState), graph=True))
    values = {path: np.asarray(variable.get_value()) for path, variable in state}
    return {path: value.tobytes() for path, value in values.items()} | counts_of(tree)
