# SPDX-License-Identifier: Apache-2.0
"""TrainState: a model in parts takes steps, also under plain `jax.jit`."""

import jax
import jax.numpy as jnp
import optax
import pytest

from treetap import nnx


class WithCounts(nnx.TrainState):
    counts: nnx.State


def made():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    return WithCounts.create(graphdef, params=params, tx=optax.sgd(0.5), counts=rest)


@jax.jit
def step(state, x):
    def loss(params):
        out, _ = state.apply(params, "counts")(x)
        return jnp.sum(out)

    return state.apply_gradients(jax.grad(loss)(state.params), counts=state.counts)


def test_steps_change_parameters_and_count():
    first = made()
    state = step(step(first, jnp.ones((1, 2))), jnp.ones((1, 2)))
    assert type(state) is WithCounts
    assert int(state.step) == 2
    moved = first.params.kernel[...] - state.params.kernel[...]
    assert moved.tolist() == [[1.0], [1.0]]
    assert int(first.step) == 0


def test_it_begins_at_the_step_it_is_told():
    state = made()
    later = nnx.TrainState[nnx.Linear].create(
        state.graphdef, params=state.params, tx=state.tx, step=5
    )
    assert (int(later.step), int(later.replace(step=7).step)) == (5, 7)
    out, (graphdef, _) = later.apply("params")(jnp.ones((1, 2)))
    assert out.shape == (1, 1)
    assert graphdef == state.graphdef


def test_fields_that_it_has_not_are_refused():
    state = made()
    with pytest.raises(TypeError, match="extra"):
        nnx.TrainState.create(state.graphdef, params=state.params, tx=state.tx, extra=1)
