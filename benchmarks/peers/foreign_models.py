# SPDX-License-Identifier: Apache-2.0
"""Models of four libraries, each with its outputs captured by the library's own means.

A `Case` has a function as a user of the library would call it, and for each module call
what the library itself says its result is: `capture_intermediates` of Linen,
`intercept_methods` of Haiku, and calls by hand for Equinox and Penzai.
"""

import typing

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
from penzai import pz


class Case(typing.NamedTuple):
    """A model.

    Attributes:
        name: What it is.
        fn: The function that is called.
        args: Its arguments.
        calls: For each call of a module: its name, the path of the site that is
            expected, and the arrays that it returned.
    """

    name: str
    fn: typing.Callable
    args: tuple
    calls: list


X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        hidden = nn.relu(nn.Dense(8)(nn.LayerNorm()(x)))
        return x + nn.Dropout(0.5, deterministic=True)(nn.Dense(4)(hidden))


class LinenNet(nn.Module):
    def setup(self):
        self.blocks = [LinenBlock(), LinenBlock()]
        self.attention = nn.MultiHeadDotProductAttention(2)
        self.shared = nn.Dense(4)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        x = self.attention(x[None], x[None])[0]
        return self.scaled(self.shared(self.shared(x)))

    def scaled(self, x):
        return 2 * x


class LinenScanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            lambda block, x, _: (block(x), None),
            variable_axes={"params": 0, "intermediates": 0},
            split_rngs={"params": True},
            length=3,
        )
        return layers(nn.remat(LinenBlock)(name="block"), x, None)[0]


def linen_calls(root, intermediates, inner=""):
    found = []
    for path, value in jax.tree_util.tree_flatten_with_path(intermediates)[0]:
        keys = [str(getattr(key, "key", getattr(key, "idx", ""))) for key in path]
        method = keys.index("__call__")
        module = "/".join(keys[:method])
        site = "/".join([root, *([inner] if inner and module else []), *keys[:method]])
        found.append((module or root, site, [value]))
    return found


def linen():
    net = LinenNet()
    params = net.init(jax.random.key(0), X)
    _, state = net.apply(params, X, capture_intermediates=True)
    calls = linen_calls("LinenNet", state["intermediates"])
    return Case("linen", net.apply, (params, X), calls)


def linen_scanned():
    net = LinenScanned()
    params = net.init(jax.random.key(0), X)
    _, state = net.apply(params, X, capture_intermediates=True)
    calls = linen_calls("LinenScanned", state["intermediates"], "block.<lambda>")
    return Case("linen, scan of remat", net.apply, (params, X), calls)


class HaikuBlock(hk.Module):
    def __init__(self, name=None):
        super().__init__(name=name)
        self.shared = hk.Linear(4, name="shared")

    def __call__(self, x):
        return x + jax.nn.relu(self.shared(self.shared(x)))


def haiku_net(x):
    for _ in range(2):
        x = HaikuBlock()(x)
    x = hk.Sequential([hk.Linear(4), jax.nn.relu])(x)
    x = hk.MultiHeadAttention(2, 2, w_init_scale=1.0, model_size=4)(x, x, x)
    return hk.BatchNorm(True, True, 0.9)(x, True)


def haiku():
    net = hk.transform_with_state(haiku_net)
    params, state = net.init(jax.random.key(0), X)
    calls, around = [], []

    def note(fn, args, kwargs, context):
        if context.method_name != "__call__":
            return fn(*args, **kwargs)
        around.append(context.module.name)  # scopes are nested as calls are
        out = fn(*args, **kwargs)
        calls.append((context.module.module_name, "/".join(around), [out]))
        around.pop()
        return out

    with hk.intercept_methods(note):
        net.apply(params, state, None, X)
    return Case("haiku", net.apply, (params, state, None, X), calls)


class EquinoxNet(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __call__(self, x):
        x = self.attention(x, x, x)
        return jax.vmap(self.mlp)(jax.vmap(self.norm)(x))


def equinox():
    keys = jax.random.split(jax.random.key(0))
    net = EquinoxNet(
        eqx.nn.MultiheadAttention(2, 4, key=keys[0]),
        eqx.nn.LayerNorm(4),
        eqx.nn.MLP(4, 4, 8, 1, key=keys[1]),
    )
    attention, mlp = net.attention, net.mlp
    linear = "eqx.nn.Linear"
    calls = []
    for name in ("query_proj", "key_proj", "value_proj"):
        value = jax.vmap(getattr(attention, name))(X)
        site = f"eqx.nn.MultiheadAttention/vmap({linear})"
        calls.append((f"attention.{name}", site, [value]))
    x = attention(X, X, X)
    calls.append(("attention.output_proj", site, [x]))
    calls.append(("attention", "eqx.nn.MultiheadAttention", [x]))
    x = jax.vmap(net.norm)(x)
    calls.append(("norm", "vmap(eqx.nn.LayerNorm)", [x]))
    hidden = jax.vmap(mlp.layers[0])(x)
    calls.append(("mlp.layers[0]", f"vmap(eqx.nn.MLP)/{linear}", [hidden]))
    out = jax.vmap(mlp.layers[1])(jax.nn.relu(hidden))
    calls.append(("mlp.layers[1]", f"vmap(eqx.nn.MLP)/{linear}", [out]))
    calls.append(("mlp", "vmap(eqx.nn.MLP)", [out]))
    calls.append(("the module itself", "", [out]))
    return Case("equinox", net, (X,), calls)


def penzai():
    axes = {"features": 4}

    def affine(name):
        return pz.nn.Affine.from_config(
            name, jax.random.key(len(name)), input_axes=axes, output_axes=axes
        )

    norm = pz.nn.LayerNorm.from_config("norm", jax.random.key(0), across_axes=axes)
    relu = pz.nn.Elementwise(jax.nn.relu)
    delta = pz.nn.Sequential([norm, affine("delta"), relu])
    net = pz.nn.Sequential([pz.nn.Residual(delta), pz.nn.Identity(), affine("last")])

    def as_arrays(value):
        return [value.unwrap(*sorted(value.named_shape))]

    def fn(net, x):
        return as_arrays(net(pz.nx.wrap(x).tag("batch", "features")))[0]

    calls = []
    start = x = pz.nx.wrap(X).tag("batch", "features")
    for n, layer in enumerate(delta.sublayers):
        x = layer(x)
        calls.append((f"residual delta[{n}]", f"0/{n}", as_arrays(x)))
    calls.append(("residual", "0", as_arrays(start + x)))
    x = start + x
    calls.append(("identity", "1", as_arrays(x)))
    last = net.sublayers[2]
    for n, layer in enumerate(last.sublayers):
        x = layer(x)
        calls.append((f"affine[{n}]", f"2/{n}", as_arrays(x)))
    calls.append(("affine", "2", as_arrays(x)))
    calls.append(("the model itself", "", as_arrays(x)))
    return Case("penzai", fn, (net, X), calls)


CASES = (linen, linen_scanned, haiku, equinox, penzai)
