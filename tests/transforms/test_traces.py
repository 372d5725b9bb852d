# SPDX-License-Identifier: Apache-2.0
"""How often functions are traced: nested transforms do not multiply it."""

import jax
import jax.numpy as jnp
import pytest

import treetap as tt
from modes import ALL_MODES

DEPTH = 6

pytestmark = pytest.mark.keeps_traces


class Model(tt.Module):
    def __init__(self):
        self.calls = tt.Variable(jnp.zeros((), jnp.int32))
        self.w = tt.Param(jnp.ones(()))


def other(model, x):
    return x


def in_cond(f, mode):
    return lambda model, x: tt.cond(x > 0, f, other, model, x, **mode)


def in_switch(f, mode):
    return lambda model, x: tt.switch(2, (other, f, f), model, x, **mode)


def in_while(f, mode):
    def body(carry):
        n, model, x = carry
        return n + 1, model, f(model, x)

    def run(model, x):
        start = (0, model, x)
        return tt.while_loop(lambda carry: carry[0] < 1, body, start, **mode)[2]

    return run


def in_fori(f, mode):
    def body(i, carry):
        return carry[0], f(*carry)

    return lambda model, x: tt.fori_loop(0, 1, body, (model, x), **mode)[1]


def in_scan(f, mode):
    def body(carry, _):
        return (carry[0], f(*carry)), 0.0

    step = tt.scan(body, in_axes=(tt.Carry, 0), out_axes=(tt.Carry, 0), **mode)
    return lambda model, x: step((model, x), jnp.zeros(1))[0][1]


def in_rule(f, mode):
    made = tt.custom_vjp(f, **mode)

    def fwd(model, x):
        return f(model, x), x

    def bwd(x, cotangent):
        return None, cotangent * jnp.cos(x)

    def bwd_updates(x, cotangents):
        return None, cotangents[1] * jnp.cos(x)

    made.defvjp(fwd, bwd_updates if mode.get("graph_updates") else bwd)
    return made


WAYS = [in_cond, in_switch, in_while, in_fori, in_scan, in_rule]


@ALL_MODES
@pytest.mark.parametrize("way", WAYS)
def test_the_innermost_function_is_traced_once_a_level_more_at_most(way, mode):
    traces = []

    def innermost(model, x):
        traces.append(1)
        model.calls[...] += 1
        return jnp.sin(x) * model.w[...]

    f = innermost
    for _ in range(DEPTH):
        f = way(f, mode)
    for listening in (False, True):
        model = Model()
        run = tt.observe(f) if listening else f
        before = len(traces)
        run(model, jnp.ones(()))
        assert len(traces) - before <= 1 + DEPTH
        assert int(model.calls[...]) == 1


@pytest.mark.parametrize("form", [jax.jit, jax.grad, lambda f: jax.jit(jax.grad(f))])
def test_rules_of_arrays_made_inside_one_another_are_traced_as_by_jax(form):
    traces = []

    def nested(depth):
        if not depth:
            return lambda x: traces.append(1) or x * 2.0

        @tt.custom_vjp
        def made(x):
            return nested(depth - 1)(x)

        made.defvjp(lambda x: (nested(depth - 1)(x), None), lambda _, g: (g,))
        return made

    form(nested(DEPTH))(1.0)
    assert len(traces) == 1


def test_a_branch_that_stands_twice_is_traced_once():
    traces = []

    def counted(model, x):
        traces.append(1)
        return x

    tt.switch(1, (counted, other, counted), Model(), jnp.ones(()))
    assert len(traces) == 1


def test_branches_that_change_structure_are_traced_once():
    traces = []

    def make(model, x):
        traces.append(1)
        model.made = tt.Param(x)
        return x

    def make_otherwise(model, x):
        traces.append(1)
        model.made = tt.Param(2 * x)
        return x

    model = Model()
    updates = {"graph": True, "graph_updates": True}
    tt.cond(False, make, make_otherwise, model, jnp.ones(()), **updates)
    assert float(model.made[...]) == 2.0
    assert len(traces) == 2


def test_one_branch_may_leave_alone_what_another_changes():
    def replace(model, x):
        model.w, model.more = tt.Param(x), model.w
        return x

    def leave(model, x):
        model.more = model.w
        return x

    updates = {"graph": True, "graph_updates": True}
    for choice in (True, False):
        model = Model()
        with pytest.raises(TypeError, match="in different ways"):
            tt.cond(choice, replace, leave, model, jnp.ones(()), **updates)
        model.plain = jnp.zeros(2)

        def change(model, x):
            model.plain = model.plain + x
            return x

        tt.cond(choice, change, other, model, jnp.ones(()), **updates)
        assert float(model.plain[0]) == float(choice)


def test_branches_that_leave_other_metadata_are_refused():
    def annotate(model, x):
        model.w.set_metadata(note=1)
        return x

    for branches in ((annotate, other), (other, annotate)):
        model = Model()
        with pytest.raises(TypeError, match="the Param at operands/0/w with different"):
            tt.cond(True, *branches, model, jnp.ones(()))
        assert "note" not in model.w.get_metadata()
    model = Model()
    tt.cond(True, annotate, annotate, model, jnp.ones(()))
    assert model.w.note == 1


def test_gradients_go_through_branches_that_write():
    def step(model, x):
        model.calls[...] += 1
        return model.w[...] * x**2

    def loss(model, x):
        return tt.cond(x > 0, step, other, model, x)

    for x, wanted in ((3.0, (9.0, 6.0)), (-3.0, (0.0, 1.0))):
        model = Model()
        grads = tt.grad(loss, argnums=(0, 1))(model, jnp.array(x))
        assert (float(grads[0].w[...]), float(grads[1])) == wanted
        assert int(model.calls[...]) == int(x > 0)
        out = jax.jit(jax.vmap(lambda x: loss(Model(), x)))(jnp.array([x, -x]))
        assert sorted(out.tolist()) == [-3.0, 9.0]


@ALL_MODES
@pytest.mark.parametrize("form", ["call", "grad", "jit of grad", "grad of jit"])
def test_rules_with_models_made_anew_inside_one_another_are_traced_a_few_times(
    form, mode
):
    traces = []

    def innermost(model, x):
        traces.append(1)
        model.calls[...] += 1
        return x * 2.0

    def nested(depth):
        if not depth:
            return innermost
        made = tt.custom_vjp(lambda m, x: nested(depth - 1)(m, x), **mode)

        def bwd(x, g):
            return None, g[1] if mode.get("graph_updates") else g

        made.defvjp(lambda m, x: (nested(depth - 1)(m, x), x), bwd)
        return made

    def run(model, x):
        return nested(DEPTH)(model, x)

    derive = lambda f: tt.grad(f, argnums=1, **mode)
    forms = {
        "call": run,
        "grad": derive(run),
        "jit of grad": tt.jit(derive(run), **mode),
        "grad of jit": derive(tt.jit(run, **mode)),
    }
    model = Model()
    forms[form](model, jnp.ones(()))
    assert len(traces) <= 2 * DEPTH + 1
    assert int(model.calls[...]) == 1
