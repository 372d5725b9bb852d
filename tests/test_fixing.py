# SPDX-License-Identifier: Apache-2.0
"""jit_partial: a compiled function whose first arguments are fixed."""

import jax
import jax.numpy as jnp
import pytest

import treetap as tt


class Counter(tt.Module):
    def __init__(self):
        self.n = tt.Variable(jnp.array(0))
        self.scale = tt.Param(jnp.array(2.0))
        self.kind = "plain"


def step(counter, x):
    counter.n[...] += 1
    return counter.scale * x


def test_values_go_in_and_come_back():
    counter = Counter()
    run = tt.jit_partial(step, counter)
    assert run(3.0) == 6.0
    counter.scale[...] = 5.0
    assert run(x=3.0) == 15.0
    assert counter.n[...] == 2


def test_the_structure_is_frozen():
    counter = Counter()
    run = tt.jit_partial(lambda counter: len(counter.kind), counter)
    counter.kind = "another"
    assert run() == 5
    counter.scale = tt.Param(jnp.array(7.0))
    assert tt.jit_partial(step, counter)(1.0) == 7.0


def test_calling_again_does_not_trace_again():
    traces = []

    def count(counter, x):
        traces.append(1)
        return step(counter, x)

    counter = Counter()
    run = tt.jit_partial(count, counter)
    run(1.0)
    counter.scale[...] = 3.0
    run(2.0)
    assert traces == [1]


def test_variables_among_the_other_arguments_are_refused():
    run = tt.jit_partial(step, Counter())
    message = "Found Variable in non-partial arguments: the Param at args/0"
    with pytest.raises(tt.StructureError, match=message):
        run(tt.Param(1.0))


def test_duplicates_are_refused_when_it_is_made():
    variable = tt.Param(jnp.array(1.0))
    with pytest.raises(tt.AliasError, match="jit_partial: Duplicate Param"):
        tt.jit_partial(lambda a, b: None, variable, variable)
    run = tt.jit_partial(lambda a, b: a + b, variable, variable, graph=True)
    assert run() == 2.0


def test_stages_keep_updating():
    counter = Counter()
    run = tt.jit_partial(step, counter)
    assert run.eval_shape(1.0).shape == ()
    traced = run.trace(1.0)
    compiled = run.lower(1.0).compile()
    assert "stablehlo" in traced.lower().as_text()
    assert compiled(3.0) == 6.0
    assert compiled(3.0) == 6.0
    assert counter.n[...] == 2


def test_donation_leaves_live_buffers():
    counter = Counter()
    run = tt.jit_partial(lambda counter, x: x, counter, donate_argnums=0)
    run(1.0)
    run(1.0)
    assert counter.scale[...] == 2.0


def test_graph_updates_are_refused():
    with pytest.raises(ValueError, match=r"jit_partial: the structure .* is frozen"):
        tt.jit_partial(step, Counter(), graph=True, graph_updates=True)


def test_functions_of_jax_itself_can_be_compiled():
    assert tt.jit(jax.lax.add)(1.0, 2.0) == 3.0
