# SPDX-License-Identifier: Apache-2.0
"""The usual train step, in all modes, against the same step in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treetap as tt
from modes import ALL_MODES, SIMPLE_MODES
from treetap import nnx

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


@ALL_MODES
def test_a_train_step_with_update(mode):
    model = Model(tt.Rngs(0))
    optimizer = optax.adam(RATE)
    state = tt.Variable(optimizer.init(tt.as_pure(tt.state(model, tt.Param))))
    traces = []

    @tt.jit(**mode)
    def step(model, state, x, y):
        traces.append(1)
        loss, grads = tt.value_and_grad(loss_of, **mode)(model, x, y)
        params = tt.as_pure(tt.state(model, tt.Param, graph=mode["graph"]))
        grads = tt.as_pure(tt.state(grads, tt.Param, graph=mode["graph"]))
        changes, state[...] = optimizer.update(grads, state.get_value(), params)
        tt.update(model, optax.apply_updates(params, changes))
        return loss

    losses = [float(step(model, state, X, Y)) for _ in range(3)]
    compare(model, losses)
    assert len(traces) == 1


@ALL_MODES
def test_a_train_step_in_place(mode):
    model = Model(tt.Rngs(0))
    optimizer = optax.adam(RATE)
    variables = lambda model: {"w": model.w, "b": model.b}
    raw = lambda model: jax.tree.map(
        lambda v: v[...], variables(model), is_leaf=tt.is_variable
    )
    state = optimizer.init(raw(model))

    @tt.jit(**mode)
    def step(model, state, x, y):
        loss, grads = tt.value_and_grad(loss_of, **mode)(model, x, y)
        changes, state = optimizer.update(raw(grads), state, raw(model))
        for name, variable in variables(model).items():
            variable[...] += changes[name]
        return loss, state

    losses = []
    for _ in range(3):
        loss, state = step(model, state, X, Y)
        losses.append(float(loss))
    compare(model, losses)


@ALL_MODES
def test_a_train_step_over_split_states(mode):
    model = Model(tt.Rngs(0))
    optimizer = optax.adam(RATE)
    graphdef, params, rest = tt.split(model, tt.Param, ..., graph=mode["graph"])
    state = optimizer.init(tt.as_pure(params))

    @tt.jit(**mode)
    def step(params, rest, state, x, y):
        def loss(params, rest):
            return loss_of(tt.merge(graphdef, params, rest, copy=False), x, y)

        value, grads = tt.value_and_grad(loss, **mode)(params, rest)
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


@SIMPLE_MODES
def test_eval_and_train_inside_a_jitted_step_hold_for_that_call(mode):
    model = Model(tt.Rngs(0))
    model.norm.mean[...] = jnp.arange(3.0)

    @tt.jit(**mode)
    def evaluate(model, x):
        model.eval()
        return model(x)

    @tt.jit(**mode)
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


@ALL_MODES
def test_the_callers_mode_chooses_the_program(mode):
    model = Model(tt.Rngs(0))
    f = tt.jit(lambda model, x: model(x), **mode)
    noisy = f(model, X)
    model.eval()
    np.testing.assert_allclose(f(model, X), model(X), rtol=1e-5, atol=1e-6)
    assert float(jnp.abs(noisy - f(model, X)).max()) > 0.01
    assert int(model.noise.rngs.count) == 1


# With graph updates, and through `treetap.nnx`, whose defaults they are.


def nnx_step(optimizer):
    """The step as an NNX program has it."""

    @nnx.jit
    def step(model, state, x, y):
        loss, grads = nnx.value_and_grad(loss_of)(model, x, y)
        assert type(grads) is nnx.State
        params = nnx.as_pure(nnx.state(model, nnx.Param))
        changes, state[...] = optimizer.update(
            nnx.as_pure(grads), state.get_value(), params
        )
        nnx.update(model, optax.apply_updates(params, changes))
        return loss

    return step


def test_a_train_step_of_nnx():
    model, optimizer = Model(nnx.Rngs(0)), optax.adam(RATE)
    state = nnx.Variable(optimizer.init(nnx.as_pure(nnx.state(model, nnx.Param))))
    objects = [model.w, model.norm, model.noise.rngs]
    step = nnx_step(optimizer)
    losses = [float(step(model, state, X, Y)) for _ in range(3)]
    compare(model, losses)
    assert [model.w, model.norm, model.noise.rngs] == objects


class Optimizer(tt.Module):
    """Keeps the state of an optimiser, and makes it when it is first used."""

    def __init__(self, rule):
        self.rule = rule
        self.state = tt.data(None)

    def update(self, model, grads):
        params = nnx.as_pure(nnx.state(model, nnx.Param))
        if self.state is None:
            self.state = tt.Variable(self.rule.init(params))
        grads = nnx.as_pure(nnx.state(grads, nnx.Param))
        changes, self.state[...] = self.rule.update(
            grads, self.state.get_value(), params
        )
        nnx.update(model, optax.apply_updates(params, changes))


def test_an_optimizer_may_make_its_state_inside_the_first_step():
    traces = []

    @nnx.jit
    def step(model, optimizer, x, y):
        traces.append(1)
        loss, grads = nnx.value_and_grad(loss_of)(model, x, y)
        optimizer.update(model, grads)
        return loss

    model, optimizer = Model(nnx.Rngs(0)), Optimizer(optax.adam(RATE))
    losses = [float(step(model, optimizer, X, Y)) for _ in range(3)]
    compare(model, losses)
    assert type(optimizer.state) is tt.Variable
    assert len(traces) == 2  # without and with the state


@ALL_MODES
@pytest.mark.parametrize("namespace", [tt, nnx], ids=["treetap", "nnx"])
def test_a_train_step_with_an_optimizer_as_an_object(namespace, mode):
    model, optimizer = Model(tt.Rngs(0)), Optimizer(optax.adam(RATE))
    params = nnx.as_pure(nnx.state(model, nnx.Param))
    optimizer.state = tt.Variable(optimizer.rule.init(params))

    @namespace.jit(**mode)
    def step(model, optimizer, x, y):
        loss, grads = namespace.value_and_grad(loss_of, **mode)(model, x, y)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, X, Y)) for _ in range(3)]
    compare(model, losses)


@ALL_MODES
def test_the_loss_may_return_more_beside_its_value(mode):
    @tt.jit(**mode)
    def step(model, x, y):
        def loss(model):
            out = model(x)
            return ((out - y) ** 2).mean(), {"out": out, "made": tt.Param(out.sum())}

        (value, aux), grads = tt.value_and_grad(loss, has_aux=True, **mode)(model)
        model.w[...] -= RATE * grads.w
        model.b[...] -= RATE * grads.b
        return value, aux

    model = Model(tt.Rngs(0))
    values = []
    for _ in range(3):
        value, aux = step(model, X, Y)
        values.append(float(value))
    assert aux["out"].shape == (8, 2)
    assert float(aux["made"]) == pytest.approx(float(aux["out"].sum()), rel=1e-5)
    assert int(model.noise.rngs.count) == 3
    assert values[2] < values[0]


def test_with_graph_updates_eval_and_train_inside_a_step_stay():
    traces = []

    @nnx.jit
    def evaluate(model, x):
        traces.append(model.noise.deterministic)
        model.eval()
        return model(x)

    model = Model(nnx.Rngs(0))
    noise = model.noise
    first = evaluate(model, X)
    assert model.noise is noise
    assert model.noise.deterministic
    assert model.norm.use_running_average
    assert int(model.noise.rngs.count) == 0
    np.testing.assert_array_equal(evaluate(model, X), first)
    evaluate(model, X)
    assert traces == [False, True]
    nnx.jit(lambda model: model.train())(model)
    assert not model.noise.deterministic


def test_a_step_of_nnx_in_a_scan():
    def step(model, batch):
        x, y = batch
        loss, grads = nnx.value_and_grad(loss_of)(model, x, y)
        model.w[...] -= RATE * grads["w"]
        model.b[...] -= RATE * grads["b"]
        return model, loss

    looped, scanned = Model(nnx.Rngs(0)), Model(nnx.Rngs(0))
    losses = [float(step(looped, (X, Y))[1]) for _ in range(3)]
    batches = (jnp.stack([X] * 3), jnp.stack([Y] * 3))
    back, found = nnx.scan(step)(scanned, batches)
    assert back is scanned
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    np.testing.assert_allclose(scanned.w[...], looped.w[...], rtol=1e-5)
    np.testing.assert_allclose(scanned.norm.mean[...], looped.norm.mean[...], rtol=1e-5)
    assert int(scanned.noise.rngs.count) == 3
