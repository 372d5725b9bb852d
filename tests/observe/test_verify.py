# SPDX-License-Identifier: Apache-2.0
"""observe(..., verify=True): what it compares, what it finds, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treetap as tt
from treetap._capture.calls import Call
from treetap._capture.session import Session

ROWS = jnp.arange(12.0).reshape(3, 4)


def loss(w, x):
    return jnp.sum(tt.tap(jnp.sin(w * x), "h") ** 2)


def looped(w, x):
    def body(carry, each):
        return tt.tap(jnp.sin(carry * w + each), "c"), tt.tap(carry * 2, "y")

    carry, ys = jax.lax.scan(body, 0.5, x, reverse=True)
    return carry + ys.sum()


def branched(w, x):
    first = lambda: tt.tap(w * x, "a")
    return jax.lax.cond(x > 1, first, lambda: tt.tap(w + x, "b") * 2)


def loop_of_branches(w, x):
    step = lambda carry, each: (carry + branched(w, each), None)
    return jax.lax.scan(step, 0.0, x)[0]


def counted(x):
    return jax.lax.while_loop(lambda c: c < 10, lambda c: tt.tap(c * 2, "w"), x)


def branches_in_while(x):
    def body(c):
        return jax.lax.cond(c > 4, lambda: tt.tap(c * 2, "w"), lambda: c + 1)

    return jax.lax.while_loop(lambda c: c < 10, body, x)


def rows_in_turns(w, x):
    def body(carry, each):
        return jax.vmap(lambda c: tt.tap(jnp.sin(c * w + each), "in"))(carry), None

    return jax.lax.scan(body, jnp.ones(3), x)[0].sum()


def invariant(x):
    step = lambda c, _: (c * tt.tap(jnp.sin(x), "same"), None)
    return jax.lax.scan(step, 1.0, None, length=3)[0]


def mixed(w, x):
    def row(each):
        both = tt.tap({"a": w * 2, "b": each * w}, "t")
        return both["a"] * both["b"]

    return jax.vmap(row)(x).sum()


def branch_in_branch(x):
    def inner():
        return jax.lax.cond(x > 2, lambda: tt.tap(x, "i") * 2, lambda: x)

    return jax.lax.cond(x > 1, inner, lambda: tt.tap(x * 3, "o"))


@jax.custom_jvp
def ruled(x):
    return tt.tap(jnp.sin(x), "r")


@ruled.defjvp
def _(primals, tangents):
    return tt.tap(jnp.sin(primals[0]), "r"), 7.0 * tangents[0]


def by_rows(fn):
    return jax.vmap(fn, (None, 0))


def total(fn):
    return lambda w, x: by_rows(fn)(w, x).sum()


GRADS = {"grads": True}
PROGRAMS = {
    "plain": (loss, (2.0, ROWS), {}),
    "grad": (jax.grad(loss), (2.0, ROWS), GRADS),
    "jit of grad": (jax.jit(jax.grad(loss)), (2.0, ROWS), GRADS),
    "vmap": (by_rows(loss), (2.0, ROWS), {}),
    "vmap of grad": (by_rows(jax.grad(loss)), (2.0, ROWS), GRADS),
    "grad of vmap": (jax.grad(total(loss)), (2.0, ROWS), GRADS),
    "scan": (looped, (2.0, ROWS[0]), {}),
    "grad of scan": (jax.grad(looped), (2.0, ROWS[0]), GRADS),
    "grad of checkpoint": (jax.grad(jax.checkpoint(looped)), (2.0, ROWS[0]), GRADS),
    "vmap of grad of scan": (by_rows(jax.grad(looped)), (2.0, ROWS), GRADS),
    "grad of vmap of scan": (jax.grad(total(looped)), (2.0, ROWS), GRADS),
    "scan of vmap": (jax.grad(rows_in_turns), (2.0, ROWS[0]), GRADS),
    "vmap of scan of vmap": (by_rows(jax.grad(rows_in_turns)), (2.0, ROWS), GRADS),
    "cond": (branched, (2.0, 3.0), {}),
    "vmap of cond": (by_rows(branched), (2.0, ROWS[0]), {}),
    "grad of vmap of cond": (jax.grad(total(branched)), (2.0, ROWS[0]), GRADS),
    "vmap of grad of cond": (by_rows(jax.grad(branched)), (2.0, ROWS[0]), GRADS),
    "scan of cond": (jax.jit(jax.grad(loop_of_branches)), (2.0, ROWS[0]), GRADS),
    "vmap of scan of cond": (by_rows(jax.grad(loop_of_branches)), (2.0, ROWS), GRADS),
    "cond in cond": (jax.vmap(branch_in_branch), (ROWS[0],), {}),
    "while": (counted, (1.0,), {}),
    "iterations of a while": (counted, (1.0,), {"max_iterations": 6}),
    "vmap of while": (jax.vmap(counted), (jnp.array([1.0, 3.0, 20.0]),), {}),
    "cond in while": (jax.vmap(branches_in_while), (jnp.array([1.0, 3.0, 20.0]),), {}),
    "the same in all turns": (jax.grad(invariant), (1.0,), GRADS),
    "leaves mapped and not": (jax.grad(mixed), (2.0, ROWS[0]), GRADS),
    "a rule": (jax.jit(jax.grad(lambda x: ruled(x) * 2)), (1.0,), {}),
    "keys": (lambda k: jax.random.normal(tt.tap(k, "k")), (jax.random.key(0),), {}),
    "NaN": (lambda x: tt.tap(jnp.log(x), "l"), (jnp.array([-1.0, 0.0, 1.0]),), {}),
    "select": (jax.grad(looped), (2.0, ROWS[0]), {**GRADS, "select": "c"}),
    "statistics": (
        jax.grad(looped),
        (2.0, ROWS[0]),
        {**GRADS, "reduce": [tt.Moments(), tt.AbsMax()]},
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
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
