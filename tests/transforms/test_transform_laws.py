# SPDX-License-Identifier: Apache-2.0
"""Every transform keeps one law: the pure program, then writes into the Variables."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify as jax_checkify

import treetap as tt
from modes import ALL_MODES, GRAPH_MODES, UPDATES
from transform_cases import (
    CASES,
    KINDS,
    Model,
    Tied,
    X,
    arrays,
    assert_same_leaves,
    pure_all,
    pure_nested,
    pure_one,
    variables,
    write_all,
    write_metadata,
    write_nested,
    write_one,
)

FIXED = [name for name, case in CASES.items() if "metadata" in case.skipped]
TABLE = [
    pytest.param(case, kind, id=f"{name}-{kind}")
    for name, case in CASES.items()
    for kind in KINDS
    if kind not in case.skipped
]
EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@ALL_MODES
@pytest.mark.parametrize(("case", "kind"), TABLE)
def test_the_result_and_the_writes_are_those_of_the_pure_program(case, kind, mode):
    step, pure, changed = KINDS[kind]
    model = Model()
    before, objects = arrays(model), variables(model)
    values, expected = case.pure_in(mode)(pure, before)
    assert_same_leaves(case.wrap(step, mode)(model), expected)
    for name, variable in variables(model).items():
        assert variable is objects[name]
        np.testing.assert_allclose(variable[...], values[name], rtol=1e-5)
        # With graph updates shard_map puts all of them where its specs say.
        is_placed = mode is UPDATES and case is CASES["shard_map"]
        if name not in changed and not is_placed:
            assert variable.get_raw_value() is before[name]
    assert model.w.get_metadata().get("role") == (
        "seen" if kind == "metadata" else None
    )


@ALL_MODES
@pytest.mark.parametrize("name", FIXED)
def test_changed_metadata_are_kept_or_refused_where_a_structure_is_fixed(name, mode):
    model = Model()
    try:
        CASES[name].wrap(write_metadata, mode)(model)
    except (TypeError, ValueError):
        assert "role" not in model.w.get_metadata()
    else:
        assert model.w.get_metadata()["role"] == "seen"


@GRAPH_MODES
@EVERY
def test_a_shared_variable_is_one_inside_and_outside_in_graph_mode(case, mode):
    def step(m, x):
        assert m.tied is m.w
        m.tied[...] = m.w * 2 + x
        return m.w * x

    model = Tied()
    values, _ = case.pure(pure_one, arrays(model))
    case.wrap(step, mode)(model)
    assert model.tied is model.w
    np.testing.assert_allclose(model.w[...], values["w"], rtol=1e-5)


@ALL_MODES
@EVERY
def test_an_exception_changes_nothing_and_the_function_stays_usable(case, mode):
    broken = [True]

    def step(m, x):
        out = write_all(m, x)
        m.w.set_metadata(role="broken")
        if broken:
            raise KeyError("inside")
        m.w.del_metadata("role")
        return out

    model = Model()
    before = arrays(model)
    wrapped = case.wrap(step, mode)
    with pytest.raises(KeyError, match="inside"):
        wrapped(model)
    assert all(arrays(model)[name] is before[name] for name in before)
    assert "role" not in model.w.get_metadata()
    broken.clear()
    wrapped(model)
    assert_same_leaves(arrays(model), case.pure(pure_all, before)[0])


@ALL_MODES
@EVERY
def test_structure_alone_decides_whether_jit_traces_again(case, mode):
    traces = []
    wrapped = case.wrap(write_all, mode)
    model, other = Model(), Model()
    wrapped(model)  # shards lie where they will stay, which is part of a type
    wrapped(other)

    @tt.jit(**mode)
    def program(m):
        traces.append(m.size)
        wrapped(m)

    program(model)
    program(model)
    model.w[...] = model.w + 1
    program(model)
    program(other)
    assert traces == [2]
    model.size = 3
    program(model)
    program(model)
    assert traces == [2, 3]


@ALL_MODES
@EVERY
def test_a_transform_under_jit_is_the_transform_alone(case, mode):
    alone, compiled = Model(), Model()
    expected = case.wrap(write_all, mode)(alone)
    found = tt.jit(case.wrap(write_all, mode), **mode)(compiled)
    assert_same_leaves(found, expected)
    assert_same_leaves(arrays(compiled), arrays(alone))


@ALL_MODES
@pytest.mark.parametrize("name", ["jit", "scan_carried", "scan_broadcast"])
def test_calling_again_with_equal_structure_does_not_trace_again(name, mode):
    traces = []

    def step(m, x):
        traces.append(m.size)
        return write_one(m, x)

    wrapped = CASES[name].wrap(step, mode)
    model, other = Model(), Model()
    wrapped(model)
    wrapped(model)
    wrapped(other)
    assert traces == [2]
    other.size = 3
    wrapped(other)
    assert traces == [2, 3]


@ALL_MODES
@pytest.mark.parametrize("taken", [0, 1])
def test_branches_may_change_different_variables(taken, mode):
    model = Model()
    before = arrays(model)
    values, _ = [pure_one, pure_nested][taken](before, X)
    branches = [write_one, write_nested]
    tt.switch(jnp.array(taken), branches, model, X, **mode)
    assert_same_leaves(arrays(model), values)
    assert model.idle.get_raw_value() is before["idle"]


@ALL_MODES
def test_a_check_that_fails_still_writes(mode):
    def step(m, x):
        out = write_one(m, x)
        jax_checkify.check(jnp.all(x > 9), "too small")
        return out

    model = Model()
    values, _ = pure_one(arrays(model), X)
    error, _ = tt.checkify(step, **mode)(model, X)
    assert "too small" in error.get()
    assert_same_leaves(arrays(model), values)


@ALL_MODES
def test_remat_under_grad_writes_once(mode):
    step = CASES["remat"].wrap(write_all, mode)
    model = Model()
    values, _ = pure_all(arrays(model), X)
    tt.grad(lambda m: jnp.sum(step(m)), **mode)(model)
    assert_same_leaves(arrays(model), values)
