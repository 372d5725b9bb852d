# SPDX-License-Identifier: Apache-2.0
"""Sixteen threads at once: training, capturing and editing, as one after the other.

Every thread trains a model of its own with functions that all share, and looks into one
model that all share. What it finds must be what it finds alone.
"""

import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treetap as tt
from treetap import edits

THREADS, STEPS = 16, 6
FEW = 2  # steps, of which the last is looked at


class Net(tt.Module):
    def __init__(self, *, rngs):
        self.inner = tt.Linear(3, 8, rngs=rngs)
        self.dropout = tt.Dropout(0.2, rngs=rngs)
        self.outer = tt.Linear(8, 1, rngs=rngs)
        self.calls = tt.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1
        return self.outer(self.dropout(tt.tap(jnp.tanh(self.inner(x)), "h")))


def loss(model, x):
    return jnp.mean((model(x) - x[:, :1]) ** 2)


def step(model, optimizer, x):
    value, grads = tt.value_and_grad(loss)(model, x)
    optimizer.update(model, grads)
    return value


STEPPING = {
    "jit": tt.jit(step),
    "donated": tt.jit(step, donate_argnums=(0, 1)),
    "packed": tt.jit(step, pack=True),
    "eager": step,
}
SHARED = tt.view(Net(rngs=tt.Rngs(99)), deterministic=True)


def look(x):
    """The shared model is only looked at; all looks are the same."""
    pure = lambda x: SHARED.outer(tt.tap(jnp.tanh(SHARED.inner(x)), "h"))
    out, record = tt.observe(jax.jit(pure))(x)
    grads = tt.edit(jax.grad(lambda x: pure(x).sum()), {"h": edits.scale(0.5)})(x)
    _, state = tt.capture(lambda x: SHARED.inner(x), tt.Intermediate)(x)
    return out, record["h"].value, grads, len(jax.tree.leaves(state))


def work(seed, how, steps, hold=lambda: None):
    """What one thread does: the losses, the parameters, and what it sees."""
    model = Net(rngs=tt.Rngs(seed))
    optimizer = tt.Optimizer(model, optax.adam(0.01), wrt=tt.Param)
    x = jax.random.normal(jax.random.key(seed), (5, 3))
    hold()
    found = []
    for number in range(steps):
        found.append(STEPPING[how](model, optimizer, x))
        if number % 4 == 1:
            watched = tt.observe(tt.value_and_grad(loss), grads=True)
            (value, _), record = watched(model, x)
            found += [value, record["h"].value, record["h"].grad]
            found += [look(x)]
    params = tt.state(model, tt.Param, tt.BatchStat)
    return [np.asarray(leaf) for leaf in jax.tree.leaves((found, params))]


CASES = [
    pytest.param("jit", FEW, id="jit"),
    *(pytest.param(how, STEPS, marks=pytest.mark.long) for how in STEPPING),
]


@pytest.mark.parametrize(("how", "steps"), CASES)
def test_threads_find_what_they_find_alone(how, steps):
    barrier = threading.Barrier(THREADS)
    found, failed = {}, []

    def run(seed):
        try:
            found[seed] = work(seed, how, steps, barrier.wait)
        except BaseException as error:
            barrier.abort()
            failed.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # as many turns as there can be
    try:
        threads = [threading.Thread(target=run, args=(n,)) for n in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failed == []
    for seed in range(THREADS):
        for one, two in zip(found[seed], work(seed, how, steps), strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)
