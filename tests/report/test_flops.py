# SPDX-License-Identifier: Apache-2.0
"""FLOPs of calls: XLA's count, with the iterations of loops."""

import jax
import jax.numpy as jnp
import pytest

import treetap as tt
from treetap._report import flops as counting
from treetap._report.calls import recorded
from treetap._report.flops import Flops

X = jnp.ones((4, 3))
ONE = 2 * 4 * 3 * 3  # a product of X with a square matrix
LOOP = 4  # at most, for the counter of a loop


class Dense(tt.Module):
    def __init__(self):
        self.w = tt.Param(jnp.ones((3, 3)))

    def __call__(self, x):
        return x @ self.w


class Run(tt.Module):
    def __init__(self, fn, **parts):
        self.fn = fn
        for name, part in parts.items():
            setattr(self, name, part)

    def __call__(self, *args):
        return self.fn(self, *args)


def note_of(model, *args):
    return recorded(model, "__call__", args, {}, "test")[0].note


def forward(fn, *args):
    return Flops().forward(note_of(Run(fn, w=tt.Param(jnp.ones((3, 3)))), *args))


def test_a_product_and_its_derivatives_are_counted():
    note = note_of(Dense(), X)
    assert Flops().forward(note) == ONE
    assert Flops().backward(note) == 3 * ONE


def test_derivatives_are_by_variables_and_arguments_of_inexact_results():
    layer = tt.Linear(3, 3, rngs=tt.Rngs(0))
    note = note_of(layer, X)
    assert Flops().forward(note) == ONE + 12
    assert Flops().backward(note) == 3 * ONE + 12 + 9  # the bias, and its derivative

    def with_integers(m, x):
        return m.a(x), jnp.argmax(x), "text"

    noted = note_of(Run(with_integers, a=Dense()), X)
    assert Flops().backward(noted) == 3 * ONE


@pytest.mark.parametrize(
    ("length", "unroll"), [(1, 1), (5, 1), (6, 2), (7, 3), (5, 5), (4, True)]
)
def test_iterations_of_a_scan_are_counted(length, unroll):
    def run(m, x):
        def step(x, _):
            return x @ m.w[...], None

        return jax.lax.scan(step, x, length=length, unroll=unroll)[0]

    assert 0 <= forward(run, X) - length * ONE <= LOOP


def test_scans_in_scans_multiply():
    def inner(m, x):
        return jax.lax.fori_loop(0, 3, lambda i, x: x @ m.w[...], x)

    def run(m, x):
        x = jax.jit(
            lambda x: jax.lax.scan(lambda x, _: (inner(m, x), None), x, None, 5)
        )
        return x(X)[0] @ m.w[...]

    assert 0 <= forward(run, X) - 16 * ONE <= 6 * LOOP


def test_a_stack_in_a_scan_counts_as_its_layers_do():
    def looped(m, x):
        for layer in m.layers:
            x = layer(x)
        return x

    def scanned(m, x):
        return jax.lax.scan(lambda x, layer: (layer(x), None), x, m.layers)[0]

    layers = tt.List([Dense() for _ in range(6)])
    stack = jax.tree.map(lambda *xs: jnp.stack(xs), *layers)
    one = note_of(Run(looped, layers=layers), X)
    other = note_of(Run(scanned, layers=stack), X)
    assert Flops().forward(one) == 6 * ONE
    assert 0 <= Flops().forward(other) - 6 * ONE <= LOOP
    assert Flops().backward(one) == 18 * ONE
    assert 0 <= Flops().backward(other) - 18 * ONE <= 2 * LOOP + 6 * 9


def test_what_variables_come_to_hold_is_counted():
    def run(m, x):
        m.w[...] = m.w[...] + 1.0
        return x

    assert forward(run, X) == 9


def test_nothing_to_compute_is_zero():
    assert forward(lambda m, x: x, X) == 0
    assert forward(lambda m, x: None, X) == 0


def test_keys_do_not_count_below_zero():
    stream = tt.Rngs(0)
    model = Run(lambda m, x: (x, m.rngs.default.key[...]), rngs=stream)
    assert Flops().forward(note_of(model, X)) == 0


def test_sowing_is_quiet_here_too():
    def run(m, x):
        m.sow(tt.Intermediate, "x", x)
        return m.perturb("y", x) @ m.w[...]

    assert forward(run, X) == ONE


def test_a_method_that_cannot_be_lowered_alone_has_none():
    class Mean(tt.Module):
        def __call__(self, x):
            return jax.lax.pmean(x, "rows")

    def run(m, x):
        return jax.vmap(m.mean, axis_name="rows")(x)

    calls = recorded(Run(run, mean=Mean()), "__call__", (X,), {}, "test")
    found = [Flops().forward(call.note) for call in calls]
    assert found[0] > 0
    assert found[1] is None


def test_a_device_without_an_analysis_has_none(monkeypatch):
    lowered = type(jax.jit(lambda x: x).lower(1.0))
    monkeypatch.setattr(lowered, "cost_analysis", lambda self: None)
    assert Flops().forward(note_of(Dense(), X)) is None


@pytest.mark.parametrize("error", [NotImplementedError, jax.errors.JaxRuntimeError])
def test_a_device_that_refuses_to_count_has_none(error, monkeypatch):
    def refuse(self):
        raise error("UNIMPLEMENTED: not on this device")

    lowered = type(jax.jit(lambda x: x).lower(1.0))
    monkeypatch.setattr(lowered, "cost_analysis", refuse)
    assert Flops().forward(note_of(Dense(), X)) is None


def test_equal_calls_are_lowered_once(monkeypatch):
    times = []
    counted = counting._counted
    monkeypatch.setattr(
        counting, "_counted", lambda *given: times.append(1) or counted(*given)
    )
    counter = Flops()
    notes = [note_of(Dense(), X), note_of(Dense(), X + 1), note_of(Dense(), X[:1])]
    assert [counter.forward(note) for note in notes] == [ONE, ONE, ONE // 4]
    assert len(times) == 2


def test_static_arguments_that_cannot_be_hashed_will_do():
    class Odd:
        __hash__ = None

    def run(m, x, odd):
        return x @ m.w[...]

    assert forward(run, X, Odd()) == ONE


@pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="only CPUs have an analysis of such programs"
)
def test_shardings_as_types_are_respected():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    x = jax.device_put(X, sharding)
    with jax.set_mesh(mesh):
        under_mesh = Flops().forward(note_of(Dense(), x))
    # XLA takes one off for each constraint.
    assert ONE - 2 <= under_mesh <= ONE
    assert Flops().forward(note_of(Dense(), x)) == ONE
