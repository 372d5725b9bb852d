# SPDX-License-Identifier: Apache-2.0
"""Statistics under two nested transforms: the table of captures, squared."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treetap as tt
from capture_cases import PAIRED, SINGLES, Case
from capture_steps import OURS, PLAIN, TIMES, block_step, unchanged

NOTHING = Case(lambda ns, step: step, unchanged)
REDUCERS = [tt.Moments(), tt.AbsMax()]
LOOPS = ("while", "fori_traced")
ON_DEVICES = ("shard_map", "pmap")


@pytest.fixture(autouse=True)
def quiet_outside():
    """Outside a capture the blocks of the table store nothing."""
    tt.set_sow_outside_capture("ignore")
    yield
    tt.set_sow_outside_capture("store")


def kept_values(site):
    """The values of a site that really were: those of branches that were taken."""
    values = np.asarray(site.value)
    if site.taken is not None and not np.all(site.taken):
        values = values[np.asarray(site.taken)] if np.any(site.taken) else values[:0]
    return values.ravel()


def check(stats, values):
    moments = stats["moments"]
    assert moments.count == values.size
    if values.size:
        expected = values.mean(), values.var(), np.abs(values).max()
        found = moments.mean, moments.variance, stats["abs_max"]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def check_pair(outer, inner, ns, iterations):
    model, x = outer.inputs(inner)
    step = outer.wrap(ns, inner.wrap(ns, block_step))
    (out, _), full = tt.observe(step, "tapped", max_iterations=iterations)(model, x)
    (same, _), record = tt.observe(step, "tapped", reduce=REDUCERS)(model, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), out, same)
    check(record.total()["tapped"].stats, kept_values(full["tapped"]))
    assert record["tapped"].value is None
    if outer.differentiates or inner.differentiates:
        check_gradients(step, model, x)


def check_gradients(step, model, x):
    try:
        _, full = tt.observe(step, "tapped", grads=True)(model, x)
    except tt.CaptureError:
        with pytest.raises(tt.CaptureError):
            tt.observe(step, "tapped", grads=True, reduce=REDUCERS)(model, x)
        return
    _, record = tt.observe(step, "tapped", grads=True, reduce=REDUCERS)(model, x)
    values, stats = full["tapped"].grad, record.total()["tapped"].grad_stats
    if not isinstance(values, tuple):
        values, stats = (values,), (stats,)
    for value, found in zip(values, stats, strict=True):
        largest = np.abs(value).max()
        np.testing.assert_allclose(found["abs_max"], largest, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "name", [name for name in SINGLES if name != "while_no_iteration"]
)
def test_under_one_transform(name):
    check_pair(NOTHING, SINGLES[name], PLAIN, TIMES if name in LOOPS else 0)


def test_under_a_loop_without_iterations():
    case = SINGLES["while_no_iteration"]
    model, x = case.inputs(NOTHING)
    step = case.wrap(PLAIN, block_step)
    _, record = tt.observe(step, "tapped", reduce=REDUCERS)(model, x)
    assert record["tapped"].stats["moments"].count == 0


def is_refused(outer, inner):
    """What JAX cannot do, and loops of which a capture keeps no iterations."""
    if outer in ON_DEVICES and inner in ON_DEVICES:
        return True
    if PAIRED[outer].differentiates and PAIRED[inner].no_reverse:
        return True
    return outer in LOOPS or (inner in LOOPS and outer in ("scan_layers", "scan_time"))


PAIRS = [(a, b) for a in PAIRED for b in PAIRED if not is_refused(a, b)]


@pytest.mark.long
@pytest.mark.parametrize(("outer", "inner"), PAIRS)
def test_under_two_transforms(outer, inner):
    iterations = TIMES if inner in LOOPS else 0
    check_pair(PAIRED[outer], PAIRED[inner], PLAIN, iterations)


@pytest.mark.long
@pytest.mark.parametrize("inner", [name for name in PAIRED if not PAIRED[name].no_ours])
def test_under_our_transforms(inner):
    iterations = TIMES if inner in LOOPS else 0
    check_pair(PAIRED["jit"], PAIRED[inner], OURS, iterations)


@pytest.mark.long
@pytest.mark.parametrize("outer", LOOPS)
@pytest.mark.parametrize("inner", ["jit", "scan_time", "cond", "remat", "while"])
def test_inside_a_while_loop_all_iterations_count(outer, inner):
    case = PAIRED[inner]
    model, x = PAIRED[outer].inputs(case)
    step = PAIRED[outer].wrap(PLAIN, case.wrap(PLAIN, block_step))
    _, once = tt.observe(case.wrap(PLAIN, block_step), "tapped", reduce=REDUCERS)(
        model, x
    )
    _, record = tt.observe(step, "tapped", reduce=REDUCERS)(model, x)
    total = record.total()["tapped"].stats["moments"].count
    count = jnp.asarray(record["tapped"].count)
    assert total == TIMES * once.total()["tapped"].stats["moments"].count
    assert count.shape == ()
