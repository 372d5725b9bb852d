# SPDX-License-Identifier: Apache-2.0
"""The usual train step, in both modes, against the same step in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treetap as tt

both_modes = pytest.mark.parametrize("graph", [False, True], ids=["tree", "graph"])
RATE, MOMENTUM, KEEP = 0.1, 0.9, 0.8
X = jax.random.normal(jax.random.key(1), (8, 3))
Y = jax.random.normal(jax.random.key(2), (8, 2))


class Noise(tt.Module):
    """Dropout with a stream of its own."""

    def __init__(self, rngs):
        self.rngs = rngs.dropout.fork()
        self.deterministic = False

    def __call__(self, x):
        if self.deterministic:
            return x
        keep = jax.random.bernoulli(self.rngs(), KEEP, x.shape)
        return jnp.where(keep, x / KEEP, 0.0)


class Norm(tt.Module):
    """Subtracts the mean, of the batch or of its history."""

    def __init__(self, size):
        self.mean = tt.BatchStat(jnp.zeros(size))
        self.use_running_average = False

    def __call__(self, x):
        if self.use_running_average:
            return x - self.mean[None]
        mean = x.mean(0)
        self.mean[...] = MOMENTUM * self.mean + (1 - MOMENTUM) * mean
        return x - mean[None]


class Model(tt.Module):
    def __init__(self, rngs):
        self.w = tt.Param(jax.random.normal(rngs.params(), (3, 2)))
        self.b = tt.Param(jnp.zeros(2))
        self.norm = Norm(3)
        self.noise = Noise(rngs)

    def __call__(self, x):
        return self.noise(self.norm(x)) @ self.w + self.b[None]


def loss_of(model, x, y):
    return ((model(x) - y) ** 2).mean()


def reference(steps):
    """Params, mean and losses after some steps of plain JAX."""
    model = Model(tt.Rngs(0))
    params = {"w": model.w[...], "b": model.b[...]}
    mean = jnp.zeros(3)
    stream = model.noise.rngs
    key = stream.key[...]
    optimizer = optax.adam(RATE)
    state = optimizer.init(params)

    @jax.jit
    def step(params, mean, state, count):
        def loss(params):
            batch_mean = X.mean(0)
            kept = jax.random.bernoulli(jax.random.fold_in(key, count), KEEP, X.shape)
            x = jnp.where(kept, (X - batch_mean[None]) / KEEP, 0.0)
            return ((x @ params["w"] + params["b"][None] - Y) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(params)
        changes, state = optimizer.update(grads, state, params)
        mean = MOMENTUM * mean + (1 - MOMENTUM) * X.mean(0)
        return optax.apply_updates(params, changes), mean, state, value

    losses = []
    for count in range(steps):
        params, mean, state, value = step(params, mean, state, count)
        losses.append(float(value))
    return params, mean, losses


def compare(model, losses):
    params, mean, wanted = reference(len(losses))
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    np.testing.assert_allclose(model.w[...], params["w"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model.b[...], params["b"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model.norm.mean[...], mean, rtol=1e-5)
    assert int(model.noise.rngs.count) == len(losses)
    assert len(set(losses)) == len(losses)


@both_modes
def test_a_train_step_with_update(graph):
    model = Model(tt.Rngs(0))
    optimizer = optax.adam(RATE)
    state = tt.Variable(optimizer.init(tt.as_pure(tt.state(model, tt.Param))))
    traces = []

    @tt.jit(graph=graph)
    def step(model, state, x, y):
        traces.append(1)
        loss, grads = tt.value_and_grad(loss_of, graph=graph)(model, x, y)
        params = tt.as_pure(tt.state(model, tt.Param, graph=graph))
        grads = tt.as_pure(tt.state(grads, tt.Param, graph=graph))
        changes, state[...] = optimizer.update(grads, state.get_value(), params)
        tt.update(model, optax.apply_updates(params, changes))
        return loss

    losses = [float(step(model, state, X, Y)) for _ in range(3)]
    compare(model, losses)
    assert len(traces) == 1


@both_modes
def test_a_train_step_in_place(graph):
    model = Model(tt.Rngs(0))
    optimizer = optax.adam(RATE)
    variables = lambda model: {"w": model.w, "b": model.b}
    raw = lambda model: jax.tree.map(
        lambda v: v[...], variables(model), is_leaf=tt.is_variable
    )
    state = optimizer.init(raw(model))

    @tt.jit(graph=graph)
    def step(model, state, x, y):
        loss, grads = tt.value_and_grad(loss_of, graph=graph)(model, x, y)
        changes, state = optimizer.update(raw(grads), state, raw(model))
        for name, variable in variables(model).items():
            variable[...] += changes[name]
        return loss, state

    losses = []
    for _ in range(3):
        loss, state = step(model, state, X, Y)
        losses.append(float(loss))
    compare(model, losses)


@both_modes
def test_a_train_step_over_split_states(graph):
    model = Model(tt.Rngs(0))
    optimizer = optax.adam(RATE)
    graphdef, params, rest = tt.split(model, tt.Param, ..., graph=graph)
    state = optimizer.init(tt.as_pure(params))

    @tt.jit(graph=graph)
    def step(params, rest, state, x, y):
        def loss(params, rest):
            return loss_of(tt.merge(graphdef, params, rest, copy=False), x, y)

        value, grads = tt.value_and_grad(loss, graph=graph)(params, rest)
        old = tt.as_pure(params)
        changes, state = optimizer.update(tt.as_pure(grads), state, old)
        tt.update(params, optax.apply_updates(old, changes))
        return value, state

    losses = []
    for _ in range(3):
        loss, state = step(params, rest, state, X, Y)
        losses.append(float(loss))
    tt.update(model, params, rest)
    compare(model, losses)


@both_modes
def test_eval_and_train_inside_a_jitted_step_hold_for_that_call(graph):
    model = Model(tt.Rngs(0))
    model.norm.mean[...] = jnp.arange(3.0)

    @tt.jit(graph=graph)
    def evaluate(model, x):
        model.eval()
        return model(x)

    @tt.jit(graph=graph)
    def train(model, x):
        model.train()
        return model(x)

    wanted = (X - jnp.arange(3.0)[None]) @ model.w + model.b[None]
    np.testing.assert_allclose(evaluate(model, X), wanted, rtol=1e-5, atol=1e-6)
    assert int(model.noise.rngs.count) == 0
    assert model.norm.mean[...].tolist() == [0.0, 1.0, 2.0]
    assert not model.noise.deterministic  # the caller's mode is the caller's

    model.eval()
    train(model, X)
    assert int(model.noise.rngs.count) == 1
    assert model.norm.mean[...].tolist() != [0.0, 1.0, 2.0]
    assert model.noise.deterministic


@both_modes
def test_the_callers_mode_chooses_the_program(graph):
    model = Model(tt.Rngs(0))
    f = tt.jit(lambda model, x: model(x), graph=graph)
    noisy = f(model, X)
    model.eval()
    np.testing.assert_allclose(f(model, X), model(X), rtol=1e-5, atol=1e-6)
    assert float(jnp.abs(noisy - f(model, X)).max()) > 0.01
    assert int(model.noise.rngs.count) == 1
