# SPDX-License-Identifier: Apache-2.0
"""Factories that the tests of the command line name: small models, good and bad."""

import functools
import importlib
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

import treetap as tt

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))


class Block(tt.Module):
    def __init__(self, size, rngs):
        self.up = tt.Linear(size, 2 * size, rngs=rngs)
        self.down = tt.Linear(2 * size, size, rngs=rngs)

    def __call__(self, x):
        return x + self.down(tt.tap(jax.nn.relu(self.up(x)), "hidden"))


class Net(tt.Module):
    def __init__(self, seed=0):
        rngs = tt.Rngs(seed)
        self.blocks = tt.List([Block(4, rngs) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def first(self, x):
        return self.blocks[0](x)


def numbers():
    return jnp.asarray(np.linspace(-1.0, 1.0, 12, dtype=np.float32).reshape(3, 4))


def loss_fn(model, x):
    return jnp.mean((model(x) - 1) ** 2)


def alone():
    return Net()


def with_inputs():
    return Net(), numbers()


def with_loss():
    return Net(), (numbers(),), loss_fn


def by_name():
    return Net(), {"x": numbers()}, loss_fn


def method():
    return Net().first, numbers()


def other():
    model = Net()
    bias = model.blocks[1].up.bias
    bias[...] = bias[...] + 0.5
    return model, numbers(), loss_fn


def with_nan():
    model = Net()
    kernel = model.blocks[1].up.kernel
    kernel[...] = kernel[...].at[0, 0].set(jnp.nan)
    return model, numbers(), loss_fn


def length(x):
    return jnp.sqrt(tt.tap(x**2, "squares").sum())


def bad_slope():
    return (lambda x: length(x)), jnp.zeros(3), lambda fn, x: fn(x)


def function():
    return length, numbers()


class Scanned(tt.Module):
    def __init__(self):
        blocks = [Block(4, tt.Rngs(n)) for n in range(3)]
        self.layers = jax.tree.map(lambda *xs: jnp.stack(xs), *blocks)
        kernel = self.layers.up.kernel
        kernel[...] = kernel[...].at[1, 0, 0].set(jnp.inf)

    def __call__(self, x):
        return jax.lax.scan(lambda x, layer: (layer(x), None), x, self.layers)[0]


def scanned():
    return Scanned(), numbers()


class Shared(tt.Module):
    def __init__(self):
        self.one = tt.Linear(4, 4, rngs=tt.Rngs(0))
        self.two = self.one

    def __call__(self, x):
        return self.two(self.one(x))


def shared():
    return Shared(), numbers()


class Flagged(tt.Module):
    def __init__(self):
        self.layer = tt.Linear(4, 4, rngs=tt.Rngs(0))

    def __call__(self, x, train, *, times=1):
        for _ in range(times):
            x = self.layer(x) if train else x
        return x


def flagged():
    return Flagged(), (numbers(), True)


def flagged_by_name():
    return Flagged(), {"x": numbers(), "train": True, "times": 2}


def looks():
    def fn(x):
        if x.sum() > 0:
            return x
        return tt.tap(2 * x, "doubled")

    return fn, -jnp.ones(3)


net = Net()


def chatty():
    print("hello from the factory")
    return Net(), numbers()


# What is wrong.


number = 3


def gives_a_list():
    return [1, 2]


def gives_four():
    return Net(), numbers(), loss_fn, 4


def gives_bad_inputs():
    return Net(), "x"


def gives_bad_keys():
    return Net(), {0: numbers()}


def gives_bad_loss():
    return Net(), numbers(), 3


def gives_two_losses():
    return Net(), numbers(), lambda model, x: (loss_fn(model, x), x)


class Mute(tt.Module):
    pass


def mute():
    return Mute()


def raises():
    raise RuntimeError("no luck today")


def leaves():
    sys.exit("bye")


def sleeps():
    import time

    print("asleep", file=sys.stderr, flush=True)
    time.sleep(60)


def integers():
    return (lambda x: x + 1), jnp.arange(3)


def no_gradient():
    return Net(), numbers(), lambda model, x: jnp.float32(1.0)


# The examples of this repository, small.


@functools.cache
def example(name):
    return importlib.import_module(name)


def ids(count=10, below=20):
    return jnp.asarray(np.arange(count).reshape(2, -1) % below, jnp.int32)


def chars():
    module = example("chars")
    config = module.Config(width=16, heads=2, layers=1, context=8, dropout=0.0)
    model = module.Writer(20, config, rngs=tt.Rngs(0))
    return model, ids(), lambda model, rows: module.loss_fn(model, rows)[0]


def spirals():
    module = example("spirals")
    rngs = tt.Rngs(params=0, data=1)
    model = module.Classifier([2, 8, 8, 1], rngs=rngs)
    return model, module.spirals(16, rngs)[0]


def gpt2():
    module = example("gpt2")
    sizes = {"vocabulary": 20, "positions": 8, "width": 16, "hidden": 32}
    config = module.Config(**sizes, layers=1, heads=2)
    return module.GPT2(config, rngs=tt.Rngs(0)), ids()


def llama():
    module = example("llama")
    sizes = {"vocabulary": 20, "positions": 8, "width": 16, "hidden": 32}
    heads = {"heads": 2, "kv_heads": 1, "head_size": 8}
    config = module.Config(**sizes, **heads, layers=3)
    return module.Llama(config, rngs=tt.Rngs(0)), ids()


def vit():
    module = example("vit")
    sizes = {"image": 8, "patch": 4, "width": 16, "hidden": 32, "labels": 5}
    config = module.Config(**sizes, layers=1, heads=2)
    images = jnp.asarray(np.linspace(0, 1, 2 * 8 * 8 * 3, dtype=np.float32))
    return module.ViT(config, rngs=tt.Rngs(0)), images.reshape(2, 8, 8, 3)
