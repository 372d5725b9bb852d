# SPDX-License-Identifier: Apache-2.0
"""Random changes between calls: what a transform keeps of a call is never stale.

A model has an attribute of every kind. Something of it is changed, a transformed
function is called, and so on. The function says all there is of the model in numbers.
Each call must give what the plain function gives, run anew on a copy of the model, and
must leave the model as that leaves the copy.
"""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import treetap as tt


@dataclasses.dataclass
class Config:
    rate: object = 0.5
    sizes: list = dataclasses.field(default_factory=lambda: [1, 2])
    table: dict = dataclasses.field(default_factory=lambda: {"a": 1})
    weights: np.ndarray = dataclasses.field(default_factory=lambda: np.array([0.5, 2]))


class Inner(tt.Module):
    factor = 2.0

    def __init__(self, size=2):
        self.w = tt.Param(jnp.ones(size))
        self.name = "inner"


class Tripled(Inner):
    factor = 3.0


class Model(tt.Module):
    def __init__(self, ref):
        self.inner = Inner()
        self.blocks = tt.List([Inner(), Inner()])
        self.table = tt.Dict(a=Inner())
        self.config = Config()
        self.number = 1
        self.flags = (1, (0.0, "a"))
        self.plain = jnp.ones(2)
        self.items = tt.data([jnp.ones(()), tt.Param(jnp.ones(()))])
        self.stack = tt.Variable([jnp.ones(())])
        self.noted = tt.Param(jnp.ones(()), note=[1])
        self.calls = tt.Variable(jnp.zeros((), jnp.int32))
        self.ref = tt.Variable(jnp.ones(()), ref=ref)


def text_number(value):
    """A number that tells values apart which `==` takes for the same."""
    return float(sum(n * ord(c) for n, c in enumerate(repr(value), 1)) % 9973)


def run(model, x=1.0):
    """All there is of a model, in numbers; and it writes."""
    model.calls[...] += 1
    model.stack[0] = model.stack[0] + 1
    objects = [("inner", model.inner), *enumerate(model.blocks), *model.table.items()]
    found = [jnp.sum(o.w[...]) * o.factor * len(o.name) for _, o in objects]
    statics = (model.config, model.number, model.flags, model.noted.note)
    found += [text_number(statics), text_number([key for key, _ in objects])]
    found += [jnp.sum(model.plain), model.noted[...], model.calls[...], model.ref[...]]
    found += [sum(jax.tree.leaves(model.stack.get_value()))]
    found += [jnp.sum(tt.as_pure(item)) for item in model.items]
    return jnp.stack([x * jnp.asarray(one, jnp.float32) for one in found])


def set_item(model, n):
    model.items[n % len(model.items)] = jnp.full((), n + 2.0)


def new_class(model, n):
    model.inner.__class__ = (Inner, Tripled)[n % 2]


def swap(model, n):
    model.blocks[0], model.inner = model.inner, model.blocks[0]


def doubled(state):
    return jax.tree.map(lambda x: 2 * x, state)


CHANGES = {
    "write": lambda m, n: m.inner.w.set_value(jnp.full(2, n + 1.0)),
    "write an item": lambda m, n: m.blocks[n % 2].w.__setitem__(n % 2, 5.0 + n),
    "reshape": lambda m, n: m.inner.w.set_value(jnp.ones(n + 1)),
    "write the ref": lambda m, n: m.ref.__setitem__(..., 3.0 + n),
    "replace a Variable": lambda m, n: setattr(m.inner, "w", tt.Param(jnp.ones(n + 1))),
    "another kind": lambda m, n: setattr(m.inner, "w", tt.Variable(jnp.ones(2) * n)),
    "replace a Module": lambda m, n: setattr(m, "inner", (Inner, Tripled)[n % 2]()),
    "swap": swap,
    "append a block": lambda m, n: m.blocks.append(Inner()),
    "drop a block": lambda m, n: len(m.blocks) > 2 and m.blocks.pop(),
    "new key": lambda m, n: setattr(m.table, "abc"[n % 3], Inner()),
    "number": lambda m, n: setattr(m, "number", (1, True, 1.0, np.float32(1))[n % 4]),
    "flags": lambda m, n: setattr(m, "flags", (1, ((0.0, -0.0, False, 0)[n % 4], "a"))),
    "name": lambda m, n: setattr(m.inner, "name", "inner" + "x" * n),
    "rate": lambda m, n: setattr(m.config, "rate", (1, True, 1.0, 0.5)[n % 4]),
    "sizes": lambda m, n: m.config.sizes.append(n),
    "config table": lambda m, n: m.config.table.update({"abc"[n % 3]: n}),
    "weights": lambda m, n: m.config.weights.__setitem__(n % 2, n),
    "config": lambda m, n: setattr(m, "config", Config(rate=n)),
    "plain": lambda m, n: setattr(m, "plain", jnp.full(n + 1, 2.0)),
    "append an item": lambda m, n: m.items.append(jnp.full((), float(n))),
    "set an item": set_item,
    "an item is a Param": lambda m, n: m.items.insert(
        0, tt.Param(jnp.full((), n + 0.5))
    ),
    "append to a value": lambda m, n: m.stack.append(jnp.full((), float(n))),
    "pop of a value": lambda m, n: m.stack.set_value([jnp.full((), float(n))]),
    "metadata": lambda m, n: m.noted.set_metadata(note=[n]),
    "metadata in place": lambda m, n: m.noted.note.append(n),
    "class": new_class,
    "behind": lambda m, n: vars(m).update(number=n),
    "past": lambda m, n: object.__setattr__(m, "number", n),
    "a Variable past": lambda m, n: object.__setattr__(
        m.inner, "w", tt.Param(jnp.ones(n + 1))
    ),
    "a config past": lambda m, n: object.__setattr__(m, "config", Config(rate=n)),
    "new attribute": lambda m, n: setattr(m, f"more{n % 2}", tt.Param(jnp.ones(n + 1))),
    "delete": lambda m, n: [delattr(m, x) for x in ("more0", "more1") if hasattr(m, x)],
    "update": lambda m, n: tt.update(m, doubled(tt.state(m, tt.Param))),
    "nothing": lambda m, n: None,
}


def scanned(fn, **mode):
    def step(model, x):
        return model, fn(model, x)

    step = tt.scan(step, in_axes=(tt.Carry, 0), out_axes=(tt.Carry, 0), **mode)
    return lambda model: step(model, jnp.ones(1))[1][0]


def differentiated(fn, **mode):
    def loss(x, model):
        return fn(model, x)[0], fn(model, x)

    step = tt.jit(tt.value_and_grad(loss, has_aux=True, **mode), **mode)
    return lambda model: step(jnp.ones(()), model)[0][1]


def packed(fn, **mode):
    return tt.jit(fn, pack=True, **mode)


def donating(fn, **mode):
    return tt.jit(fn, donate_argnums=0, **mode)


def on_devices(fn, **mode):
    step = tt.pmap(fn, in_axes=(None, 0), **mode)
    return lambda model: step(model, jnp.ones(1))[0]


def observing(fn, **mode):
    step = tt.jit(lambda model: tt.tap(fn(model), "out"), **mode)
    return lambda model: tt.observe(step)(model)[0]


# Each with how often the function runs.
WAYS = {
    "jit": (tt.jit, 1),
    "pack": (packed, 1),
    "donate": (donating, 1),
    "value_and_grad": (differentiated, 2),
    "scan": (scanned, 1),
    "pmap": (on_devices, 1),
    "observe": (observing, 1),
}
MODES = ({}, {"graph": True}, {"graph": True, "graph_updates": True})


def content(model):
    """What is in a model, for a comparison."""
    return jax.tree.map(np.asarray, jax.tree.leaves(tt.as_pure(tt.clone(model))))


QUICK = ("jit", "pack", "scan", "observe")
MANY = settings().max_examples
SOME = MANY if MANY > 100 else 8
MARKED = [
    pytest.param(name, marks=[] if name in QUICK else [pytest.mark.long])
    for name in WAYS
]


@pytest.mark.parametrize("name", MARKED)
@settings(suppress_health_check=list(HealthCheck), deadline=None, max_examples=SOME)
@given(st.data())
def test_calls_after_any_changes(name, data):
    make, times = WAYS[name]
    mode = data.draw(st.sampled_from(MODES))
    # `jax.pmap` of newer versions of JAX takes no Refs.
    fn, model = make(run, **mode), Model(ref=name != "pmap")
    steps = st.tuples(st.sampled_from(sorted(CHANGES)), st.integers(0, 3))
    for change, n in data.draw(st.lists(steps, min_size=1, max_size=6)):
        CHANGES[change](model, n)
        expected = copy.deepcopy(model)
        for _ in range(times):
            wanted = run(expected)
        np.testing.assert_allclose(fn(model), wanted, rtol=1e-6)
        assert jax.tree.structure(model) == jax.tree.structure(expected)
        for one, two in zip(content(model), content(expected), strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-6)
