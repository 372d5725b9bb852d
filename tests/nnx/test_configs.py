# SPDX-License-Identifier: Apache-2.0
"""Configs of any kind as attributes of Modules, through everything done with these."""

import argparse
import collections
import copy
import dataclasses
import enum
import functools
import pickle
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from treetap import nnx

X = jnp.ones((2, 4))


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Inner:
    sizes: list[int]
    act: Any = np.tanh


@dataclasses.dataclass
class Config:
    inner: Inner
    layers: list[Any]
    dtype: Any = jnp.bfloat16
    color: Color = Color.RED
    table: Any = None
    more: dict[str, Any] = dataclasses.field(default_factory=lambda: {"a": [1]})


@dataclasses.dataclass(frozen=True)
class Frozen:
    inner: Inner
    layers: list[Any]
    table: Any = None


class Dotted(dict[str, Any]):
    """A dict with its items as attributes, as ml_collections has."""

    __setattr__ = dict.__setitem__  # pyright: ignore[reportAssignmentType]

    def __getattr__(self, name):
        if name in self:
            return self[name]
        raise AttributeError(name)


class Checked:
    """Compares by its fields, and has no hash, as pydantic's models."""

    def __init__(self, **fields):
        self.__dict__.update(fields)

    def __eq__(self, other):
        return type(self) is type(other) and self.__dict__ == other.__dict__

    __hash__ = None


class Secretive:
    """Can be neither compared nor copied."""

    def __eq__(self, other):
        raise RuntimeError("not comparable")

    __hash__ = object.__hash__

    def __deepcopy__(self, memo):
        raise TypeError("not copied")


def double(x):
    return 2 * x


CONFIGS = {
    "dataclass": lambda: Config(Inner([4]), [1, [2]]),
    "with an array": lambda: Config(Inner([4]), [double], table=np.ones(3)),
    "with a jax array": lambda: Config(Inner([4]), [1], table=jnp.ones(3)),
    "frozen": lambda: Frozen(Inner([4]), [1, [2]]),
    "frozen with an array": lambda: Frozen(Inner([4]), [double], np.ones(3)),
    "namespace": lambda: argparse.Namespace(n=3, inner=Inner([4]), table=np.ones(2)),
    "simple namespace": lambda: types.SimpleNamespace(n=3, layers=[1, 2]),
    "dotted": lambda: Dotted(n=3, inner=Dotted(layers=[1])),
    "checked": lambda: Checked(n=3, layers=[1]),
    "dict": lambda: {"n": 3, "dtype": np.float32, "layers": [1, {"a": double}]},
    "ordered": lambda: collections.OrderedDict(a=[1]),
    "partial": lambda: functools.partial(jnp.sum, axis=[0]),
    "set": lambda: {1, 2},
    "secretive": Secretive,
}
each_config = pytest.mark.parametrize("make", CONFIGS.values(), ids=CONFIGS)


class Block(nnx.Module):
    def __init__(self, config, key):
        self.config = config
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(key))

    def __call__(self, x):
        return jnp.tanh(self.linear(x))


def loss(block, x):
    return (block(x) ** 2).sum()


@each_config
def test_a_model_with_a_config_is_split_copied_and_printed(make):
    block = Block(make(), 0)
    expected = block(X)
    merged = nnx.merge(*nnx.split(block))
    assert merged.config is block.config
    copies = [merged, nnx.clone(block), copy.copy(block), nnx.view(block)]
    if not isinstance(block.config, Secretive):
        copies += [copy.deepcopy(block), pickle.loads(pickle.dumps(block))]
    for each in (*copies, jax.tree.map(lambda leaf: leaf, block)):
        assert type(each.config) is type(block.config)
        assert (each(X) == expected).all()
    assert nnx.graphdef(block) == nnx.graphdef(merged)
    hash(nnx.graphdef(block))
    nnx.update(block, nnx.state(merged))
    assert "linear" in repr(block)


@each_config
def test_a_model_with_a_config_goes_through_transforms(make):
    block, traced = Block(make(), 0), []

    def call(block, x):
        traced.append(block)
        return block(x)

    run = nnx.jit(call)
    for each in (block, block, nnx.clone(block)):
        np.testing.assert_allclose(run(each, X), block(X), rtol=1e-6)
    assert len(traced) == 1
    assert jax.jit(call)(block, X).shape == X.shape
    assert nnx.remat(call)(block, X).shape == X.shape
    assert nnx.vmap(call, in_axes=(None, 0))(block, X).shape == X.shape
    assert nnx.cond(True, call, call, block, X).shape == X.shape
    assert nnx.grad(loss)(block, X).linear.kernel.shape == (4, 4)
    shape = nnx.eval_shape(lambda: Block(block.config, 0))
    assert shape.linear.kernel.shape == (4, 4)


@each_config
def test_blocks_that_share_a_config_are_stacked_and_scanned(make):
    config = make()
    keys = jax.random.split(jax.random.key(0), 3)
    stack = nnx.vmap(lambda key: Block(config, key))(keys)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def forward(x, block):
        return block(x)

    expected = X
    for key in keys:
        expected = Block(config, key)(expected)
    np.testing.assert_allclose(forward(X, stack), expected, rtol=1e-5)


def test_a_config_that_changed_is_seen_by_the_next_call():
    block = Block(Config(Inner([4]), [1]), 0)
    scale = nnx.jit(lambda block, x: x * block.config.layers[0])
    assert scale(block, 1.0) == 1
    block.config.layers[0] = 5
    assert scale(block, 1.0) == 5
