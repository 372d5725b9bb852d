# SPDX-License-Identifier: Apache-2.0
"""observe(..., verify=True): what it compares, what it finds, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treetap as tt
from treetap._capture.calls import Call
from treetap._capture.session import Session
from verified_programs import PROGRAMS, ROWS, counted, looped, loss


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if number % 3 else ())
        for number, name in enumerate(PROGRAMS)
    ],
)
def test_what_is_right_is_stamped(name):
    fn, args, options = PROGRAMS[name]
    out, record = tt.observe(fn, verify=True, **options)(*args)
    assert record.verified
    assert len(record)
    assert not tt.observe(fn, **options)(*args)[1].verified
    jax.tree.map(np.testing.assert_array_equal, out, tt.observe(fn)(*args)[0])


class Counting(tt.Module):
    def __init__(self):
        self.count, self.w = tt.BatchStat(jnp.array(0.0)), tt.Param(jnp.array(2.0))

    def __call__(self, x):
        self.count[...] += 1
        self.sow(tt.Intermediate, "sown", x * self.count)
        return x * self.w


def test_the_slow_run_changes_nothing():
    model = Counting()
    grad = tt.jit(tt.grad(lambda model, x: model(x) * model(x)))
    _, record = tt.observe(grad, grads=True, verify=True)(model, jnp.array(3.0))
    assert model.count[...] == 2
    assert [float(site.value) for site in record.select("sown")] == [3.0, 6.0]


def test_donated_arguments_are_there_for_both_runs():
    fn = jax.jit(lambda x: tt.tap(x * 2, "h") + jax.jit(jnp.sin, donate_argnums=0)(x))
    assert tt.observe(fn, verify=True)(jnp.ones(3))[1].verified


@pytest.mark.parametrize("name", ["plain", "vmap of grad of scan", "vmap of cond"])
def test_a_wrong_value_is_named(name, monkeypatch):
    fill = Call.fill

    def wrongly(self, found):
        fill(self, found)
        self.values = [value + 0.01 * jnp.max(value) for value in self.values]

    monkeypatch.setattr(Call, "fill", wrongly)
    fn, args, options = PROGRAMS[name]
    first = tt.observe(fn, **options)(*args)[1][0].text
    with pytest.raises(tt.CaptureError, match=rf"'{first}' has a value that differs"):
        tt.observe(fn, verify=True, **options)(*args)


def test_a_wrong_gradient_is_named(monkeypatch):
    monkeypatch.setattr(Call, "fill_gradient", lambda self, spot, found: None)
    fn, args, options = PROGRAMS["grad of vmap of scan"]
    with pytest.raises(tt.CaptureError, match=r"'c' has a gradient that differs at \["):
        tt.observe(fn, verify=True, **options)(*args)


def test_rows_of_a_branch_with_a_rule_are_not_judged():
    ruled = jax.custom_jvp(lambda x: tt.tap(jnp.sin(x), "r"))

    @ruled.defjvp
    def _(primals, tangents):
        return tt.tap(jnp.sin(primals[0]), "r"), jnp.cos(primals[0]) * tangents[0]

    def fn(w, x):
        rows = jax.vmap(lambda x: jax.lax.cond(x > 0, ruled, lambda x: x, w * x))
        return rows(x).sum()

    x = jnp.array([-0.3, 0.5])
    assert tt.observe(fn, verify=True)(1.0, x)[1].verified
    with pytest.raises(
        tt.CaptureError, match="cannot tell in which rows 'r' was taken"
    ):
        tt.observe(jax.grad(fn), verify=True)(1.0, x)


def test_branches_that_are_taken_twice_are_told_apart():
    first, second = lambda x: tt.tap(x * 2, "a"), lambda x: tt.tap(x + 1, "b")

    def fn(x, y):
        either = lambda x: jax.lax.cond(x > 0, first, second, x)
        return either(x) + either(y)

    x = jnp.array([1.0, -1.0, 1.0])
    _, record = tt.observe(jax.vmap(fn), verify=True)(x, -x)
    assert [site.text for site in record] == ["b", "a", "b#1", "a#1"]


def test_of_a_gradient_in_a_while_the_last_turn_counts():
    def fn(x):
        grad = jax.grad(lambda x: tt.tap(x * x, "g") ** 2)
        return jax.lax.while_loop(lambda c: c < 100, lambda c: c + grad(c), x)

    _, record = tt.observe(fn, grads=True, verify=True)(1.0)
    assert float(record["g"].grad) == 50.0


def test_a_missing_site_is_named(monkeypatch):
    is_heard = Session.is_heard
    deaf = lambda self, label: label.name != "y" and is_heard(self, label)
    monkeypatch.setattr(Session, "is_heard", deaf)
    message = r"heard \['c'\]; run in a slow way the call tells \['c', 'y'\]"
    with pytest.raises(tt.CaptureError, match=message):
        tt.observe(looped, verify=True)(2.0, ROWS[0])


def test_nothing_is_left_of_a_call_that_is_refused(monkeypatch):
    monkeypatch.setattr(Call, "fill_gradient", lambda self, spot, found: None)
    model = Counting()
    grad = tt.grad(lambda model, x: tt.tap(model(x), "h") ** 2)
    with pytest.raises(tt.CaptureError, match="verification failed"):
        tt.observe(grad, grads=True, verify=True)(model, jnp.array(3.0))
    assert model.count[...] == 0


def sharded(x):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    fn = jax.shard_map(
        lambda x: tt.tap(x * 2, "s"),
        mesh=mesh,
        in_specs=jax.P("d"),
        out_specs=jax.P("d"),
    )
    return fn(x)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: jax.jit(tt.observe(loss, verify=True))(1.0, 2.0),
            "its arguments are being traced. Observe outside `jit`",
        ),
        (
            lambda: tt.observe(sharded, verify=True)(jnp.ones(4)),
            "cannot run 'shard_map' in its slow way",
        ),
        (
            lambda: tt.observe(
                lambda x: jax.jvp(lambda y: tt.tap(y * 2, "q"), (x,), (1.0,)),
                grads=True,
                verify=True,
            )(1.0),
            "the function differentiates forward, too",
        ),
        (
            lambda: tt.observe(
                jax.grad(jax.grad(lambda x: tt.tap(x**3, "q") ** 2)),
                grads=True,
                verify=True,
            )(1.0),
            "'q' has higher ones",
        ),
        (
            lambda: tt.observe(counted, verify=True, reduce=[tt.AbsMax()])(1.0),
            "cannot compare the statistics of 'w'",
        ),
    ],
)
def test_what_cannot_be_verified_is_refused(call, message):
    with pytest.raises(tt.CaptureError, match=message):
        call()


def test_branches_that_are_one_function_are_told_apart():
    branch = lambda x: tt.tap(jnp.sin(x), "v")
    fn = lambda x: jax.lax.switch(x.astype(int), [branch, branch], x)
    _, record = tt.observe(fn, verify=True)(jnp.ones(()))
    assert [bool(site.taken) for site in record] == [False, True]
    rows = jnp.array([0.0, 1.0])
    with pytest.raises(tt.CaptureError, match="apart that are one function"):
        tt.observe(jax.vmap(fn), verify=True)(rows)


def test_rows_that_fit_two_mappings_are_not_judged():
    def fn(x, y):
        turn = lambda c: tt.tap((c[0] * 2, c[1] + y), "w")
        return jax.lax.while_loop(lambda c: c[0] < 10, turn, (x, y))

    mapped = jax.vmap(jax.vmap(fn, (0, None)), (None, 0))
    starts = jnp.array([1.0, 4.0])
    message = r"cannot tell which mappings the rows .* that ends for \(2,\) rows"
    with pytest.raises(tt.CaptureError, match=message):
        tt.observe(mapped, verify=True)(starts, jnp.arange(2.0))
    assert tt.observe(mapped, verify=True)(starts, jnp.arange(3.0))[1].verified


@pytest.mark.parametrize("grads", [False, True])
def test_an_error_of_the_function_is_its_own(grads):
    model = Counting()

    def fn(model, x):
        model.count[...] += 1
        raise TypeError("no such thing")

    with pytest.raises(TypeError, match=r"^no such thing"):
        tt.observe(fn, verify=True, grads=grads)(model, 1.0)
    assert model.count[...] == 0


@pytest.mark.parametrize("tapped", [True, False])
@pytest.mark.parametrize("held", ["cond", "scan", "custom_vjp"])
def test_what_is_the_same_in_all_iterations_is_verified(held, tapped):
    def tapping(x):
        value = tt.tap(jnp.sin(x), "v")
        return value if tapped else x

    ruled = jax.custom_vjp(tapping)
    ruled.defvjp(lambda x: (ruled(x), None), lambda _, cotangent: (cotangent,))
    add = lambda c, x: (c + tapping(x), None)
    inside = {
        "cond": lambda x: jax.lax.cond(x > -9, tapping, lambda x: x, x),
        "scan": lambda x: jax.lax.scan(lambda c, _: add(c, x), 0.0, length=2)[0],
        "custom_vjp": ruled,
    }[held]

    def fn(x):
        same = jax.lax.stop_gradient(x)
        return jax.lax.scan(lambda c, _: (c * inside(same), None), x, length=3)[0]

    for program in (jax.grad(fn), jax.jit(jax.grad(jax.checkpoint(fn)))):
        _, record = tt.observe(program, verify=True)(0.5)
        assert record.verified
