# SPDX-License-Identifier: Apache-2.0
"""Defects of NNX's training utilities that are not ours, by their number."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treetap as tt
from modes import ALL_MODES
from treetap.metrics import Average, Welford


class Model(tt.Module):
    def __init__(self):
        self.w = tt.Param(jnp.array([1.0, 2.0]))
        self.calls = tt.Variable(jnp.array(0))
        self.noise = tt.Rngs(0).noise.fork()

    def __call__(self, x):
        self.calls[...] += 1
        return (self.w * x * self.noise.bernoulli(0.5, (2,))).sum()


@pytest.mark.parametrize("make", [dict, tt.State], ids=["dict", "State"])
@ALL_MODES
def test_D34_gradients_may_be_plain_arrays_under_a_type_filter(make, mode):
    model = Model()
    optimizer = tt.Optimizer(model, optax.adam(0.1), wrt=tt.Param)

    @tt.jit(**mode)
    def step(model, optimizer):
        optimizer.update(model, make({"w": jnp.ones(2)}))

    step(model, optimizer)
    np.testing.assert_allclose(model.w[...], [0.9, 1.9], rtol=1e-5)
    with pytest.raises(tt.StructureError, match="missing w"):
        optimizer.update(model, make({}))


def test_D35_an_average_counts_the_broadcast_mask():
    average = Average()
    values = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    average.update(values=values, mask=jnp.array([[True], [False]]))
    assert int(average.count) == 2
    assert float(average.compute()) == 1.5


def test_D35_welford_honours_a_mask():
    welford = Welford()
    mask = jnp.array([True, True, False])
    welford.update(values=jnp.array([1.0, 3.0, 100.0]), mask=mask)
    found = welford.compute()
    assert float(found.mean) == 2.0
    assert float(found.standard_deviation) == 1.0


@ALL_MODES
def test_D49_a_model_with_random_state_is_averaged_by_default(mode):
    model = Model()
    ema = tt.EMA(model, 0.5)

    @tt.jit(**mode)
    def step(model, ema):
        model(jnp.ones(2))
        model.w[...] += 2.0
        ema.update(model)

    step(model, ema)
    averaged = ema.apply_to(model)
    assert ema.params.w[...].tolist() == [2.0, 3.0]
    assert list(ema.params) == ["w"]
    assert averaged.noise.count is model.noise.count
    assert averaged.calls is model.calls
    assert int(model.calls) == 1


def optimizer_with(rate):
    return tt.Optimizer(Model(), optax.adam(rate), wrt=lambda path, _: path == ("w",))


def test_D59_optimizers_with_equal_settings_have_equal_descriptions():
    first, second = optimizer_with(1e-3), optimizer_with(1e-3)
    for graph in (False, True):
        one, two = tt.graphdef(first, graph=graph), tt.graphdef(second, graph=graph)
        assert one == two
        assert hash(one) == hash(two)
        assert one != tt.graphdef(optimizer_with(1e-4), graph=graph)
    one, two = map(jax.tree.structure, (first, second))
    assert one == two
    assert one != jax.tree.structure(optimizer_with(1e-4))


@ALL_MODES
def test_D59_a_step_is_traced_once_for_optimizers_made_alike(mode):
    traces = []

    @tt.jit(**mode)
    def step(model, optimizer, rate):
        traces.append(1)
        optimizer.update(model, {"w": jnp.ones(2)})

    changes = []
    for rate in (1e-3, 1e-3, 1e-4, 1e-3):
        model, optimizer = Model(), optimizer_with(rate)
        step(model, optimizer, 1.0)
        changes.append(1.0 - float(model.w[0]))
    assert len(traces) == 2
    np.testing.assert_allclose(changes, [1e-3, 1e-3, 1e-4, 1e-3], rtol=1e-2)


def test_D59_plain_jit_traces_once_too():
    traces = []

    @jax.jit
    def step(model, optimizer):
        traces.append(1)
        optimizer.update(model, {"w": jnp.ones(2)})
        return model, optimizer

    for _ in range(2):
        _, optimizer = step(Model(), optimizer_with(1e-3))
    assert int(optimizer.step) == 1
    assert len(traces) == 1
