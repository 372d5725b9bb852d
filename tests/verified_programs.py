# SPDX-License-Identifier: Apache-2.0
"""Programs that `observe(..., verify=True)` can run, one for each way of JAX.

`programs()` makes all functions anew: nothing that JAX or treetap kept of one of them
is of use for the next.
"""

import runpy

import jax
import jax.numpy as jnp

import treetap as tt

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
        return jax.lax.cond(x < 3, lambda: tt.tap(x, "i") * 2, lambda: x)

    return jax.lax.cond(x > 1, inner, lambda: tt.tap(x * 3, "o"))


@jax.custom_jvp
def ruled(x):
    return tt.tap(jnp.sin(x), "r")


@ruled.defjvp
def _(primals, tangents):
    return tt.tap(jnp.sin(primals[0]), "r"), 7.0 * tangents[0]


def by_columns(x):
    return jax.vmap(lambda x: tt.tap(x, "h") * jnp.arange(3.0), 1, 1)(x)


def by_columns_of_cotangents(x):
    pulled = lambda x, ct: jax.vjp(lambda x: tt.tap(x * 2, "h"), x)[1](ct)
    return jax.vmap(pulled, (0, 1))(x, x)


def of_three_axes(w, x):
    def cell(a, b, c):
        both = tt.tap({"b": w * jnp.sin(b), "ac": w * a * c}, "t")
        return both["b"] * both["ac"]

    inner = jax.vmap(cell, (None, None, 0))
    middle = jax.vmap(inner, (None, 0, None))
    outer = jax.vmap(middle, (0, None, None))
    return outer(x[:2], x[:3], x).sum()


def _double(x, y):
    turn = lambda c: tt.tap((c[0] * 2, c[1] + y), "w")
    return jax.lax.while_loop(lambda c: c[0] < 10, turn, (x, y))


def counted_by_rows(x):
    """Only the rows of the inner mapping end one by one."""
    return jax.vmap(jax.vmap(_double, (0, None)), (None, 0))(x, jnp.arange(2.0))


def counted_by_outer_rows(x):
    """Only the rows of the outer mapping end one by one."""
    return jax.vmap(jax.vmap(_double, (None, 0)), (0, None))(x, jnp.arange(2.0))


def counted_by_all(x):
    """The rows of both mappings end one by one."""
    add = lambda x, y: jax.lax.while_loop(
        lambda c: c < 10, lambda c: tt.tap(c * 2 + y, "w"), x
    )
    return jax.vmap(jax.vmap(add, (0, None)), (None, 0))(x, jnp.arange(2.0))


def counted_loops(x):
    """Each turn of a `while` has a loop of its own."""
    step = lambda c, each: (tt.tap(c + each, "s"), None)
    turn = lambda c: jax.lax.scan(step, c, jnp.arange(1.0, 4.0))[0]
    return jax.lax.while_loop(lambda c: c < 10, turn, x)


def loop_in_branch(w, x):
    def turns():
        step = lambda carry, each: (tt.tap(jnp.sin(carry * w + each), "c"), None)
        return jax.lax.scan(step, x, jnp.arange(3.0))[0]

    return jax.lax.cond(x > 1, turns, lambda: tt.tap(w * x, "o"))


def switched(w, x):
    """All branches tap by one name; they share what they keep for the way back."""
    branches = [lambda n=n: tt.tap(jnp.sin(w * x * n), "h") * n for n in range(1, 4)]
    return jax.lax.switch(x.astype(int), branches)


def two_in_branch(w, x):
    both = lambda: tt.tap(w * x, "a") * tt.tap(jnp.sin(w * x), "b")
    return jax.lax.cond(x > 1, both, lambda: tt.tap(w + x, "c") * 2)


def loop_of_rows_of_loops(w, x):
    def row(c, d):
        inner = lambda c, each: (tt.tap(jnp.sin(c * w + each * d), "i"), None)
        return jax.lax.scan(inner, c, x[:3])[0]

    step = lambda carry, each: (jax.vmap(row, (0, None))(carry, each), None)
    return jax.lax.scan(step, jnp.arange(2.0), x)[0].sum()


def gradient_in_branch(w, x):
    first = lambda: jax.grad(lambda w: tt.tap(w * x, "a") ** 2)(w)
    other = lambda: jax.grad(lambda w: jnp.sin(tt.tap(w + x, "b")))(w)
    return jax.lax.cond(x > 1, first, other)


def handed_on(w, x):
    """A pullback goes through programs that do not call it."""
    _, pull = jax.vjp(jax.jit(lambda w: tt.tap(jnp.sin(w * x), "h") ** 2), w)
    zeros = lambda pull: jax.tree.map(jnp.zeros_like, pull)
    pull = jax.lax.cond(w > 1, lambda pull: pull, zeros, pull)
    return jax.jit(lambda pull, ct: pull(ct))(pull, jnp.ones(x.shape))


def pulled_later(w, x):
    """Forward and backward pass are two programs, and the ticket goes between them."""
    _, pull = jax.vjp(jax.jit(lambda w: tt.tap(jnp.sin(w * x), "h") ** 2), w)
    return jax.jit(lambda pull, ct: pull(ct))(pull, jnp.ones(x.shape))


def two_pulled_later(w, x):
    _, first = jax.vjp(jax.jit(lambda w: tt.tap(jnp.sin(w * x), "h") ** 2), w)
    _, second = jax.vjp(jax.jit(lambda w: tt.tap(jnp.cos(w * x), "h") ** 3), w)
    both = lambda first, second, ct: (second(ct), first(ct))
    return jax.jit(both)(first, second, jnp.ones(x.shape))


def in_turn(w, x):
    """A tree, of which one leaf is the same in all turns, and none the same in size."""

    def step(carry, each):
        both = tt.tap({"a": carry * w, "b": w + each, "c": jnp.arange(2.0)}, "t")
        return both["a"] + jnp.sin(both["b"]) * both["c"].sum(), tt.tap(carry, "u")

    carry, ys = jax.lax.scan(step, 0.5, x)
    return carry + ys.sum()


def called_twice(w, x):
    again = jax.jit(lambda w, x: tt.tap(jnp.sin(w * x), "h"))
    return jnp.sum(again(w, again(w, x) * 3))


def nested_checkpoints(w, x):
    inner = jax.checkpoint(lambda w, x: tt.tap(jnp.sin(w * x), "h") ** 2)
    return jnp.sum(jax.checkpoint(lambda w, x: jnp.cos(inner(w, x)))(w, x))


@jax.custom_vjp
def ruled_backward(x):
    return tt.tap(jnp.sin(x), "r") * 2


def _ruled_forward(x):
    return tt.tap(jnp.sin(x), "r") * 2, x


ruled_backward.defvjp(_ruled_forward, lambda x, ct: (7.0 * ct * x,))


def loop_of_loops(w, x):
    def outer(carry, each):
        inner = lambda c, d: (tt.tap(jnp.sin(c * w + d), "i"), tt.tap(c * d, "y"))
        carry, ys = jax.lax.scan(inner, carry + each, x[:3], reverse=True)
        return carry, ys.sum()

    carry, ys = jax.lax.scan(outer, 0.5, x, unroll=2)
    return carry + ys.sum()


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
    "columns": (by_columns, (ROWS[:, :3],), {}),
    "columns of cotangents": (by_columns_of_cotangents, (ROWS[:, :3],), GRADS),
    "three mappings": (jax.grad(of_three_axes), (2.0, ROWS[0]), GRADS),
    "rows of one mapping": (counted_by_rows, (jnp.array([1.0, 3.0, 20.0]),), {}),
    "rows of the outer mapping": (
        counted_by_outer_rows,
        (jnp.array([1.0, 3.0, 20.0]),),
        {},
    ),
    "rows of two mappings": (counted_by_all, (jnp.array([1.0, 3.0, 20.0]),), {}),
    "iterations by rows": (
        counted_by_rows,
        (jnp.array([1.0, 3.0, 20.0]),),
        {"max_iterations": 5},
    ),
    "scan in while": (counted_loops, (1.0,), {}),
    "loop in a branch": (by_rows(jax.grad(loop_in_branch)), (2.0, ROWS[0]), GRADS),
    "switch": (jax.grad(total(switched)), (2.0, ROWS[0, :3]), GRADS),
    "vmap of grad of switch": (by_rows(jax.grad(switched)), (2.0, ROWS[0, :3]), GRADS),
    "pulled through others": (handed_on, (2.0, ROWS), GRADS),
    "grad in cond": (jax.jit(gradient_in_branch), (2.0, 0.5), GRADS),
    "pulled later": (pulled_later, (2.0, ROWS), GRADS),
    "two pulled later": (two_pulled_later, (2.0, ROWS), GRADS),
    "leaves in a loop": (jax.grad(in_turn), (2.0, ROWS[0]), GRADS),
    "leaves in a loop by rows": (by_rows(jax.grad(in_turn)), (2.0, ROWS), GRADS),
    "called twice": (jax.grad(called_twice), (2.0, ROWS), GRADS),
    "checkpoint in checkpoint": (jax.grad(nested_checkpoints), (2.0, ROWS), GRADS),
    "a rule backward": (jax.jit(jax.grad(ruled_backward)), (1.0,), {}),
    "loop of loops": (by_rows(jax.grad(loop_of_loops)), (2.0, ROWS), GRADS),
    "an array of a closure": (jax.jit(lambda x: tt.tap(x * ROWS, "h")), (2.0,), {}),
    "checkpoint in jit": (jax.jit(jax.checkpoint(loss)), (2.0, ROWS), {}),
    "rules in jit": (jax.jit(lambda x: ruled(x) * ruled_backward(x)), (1.0,), {}),
    "two in a branch": (two_in_branch, (2.0, 3.0), {}),
    "switch by a number": (jax.grad(switched), (2.0, jnp.array(1.0)), GRADS),
    "vmap of loops and vmap in turn": (
        by_rows(jax.grad(loop_of_rows_of_loops)),
        (2.0, ROWS),
        GRADS,
    ),
    "statistics of branches": (
        by_rows(branched),
        (2.0, ROWS[0]),
        {"reduce": [tt.Moments(), tt.AbsMax()]},
    ),
}


def programs():
    """The programs by name, of functions that nobody has seen."""
    return runpy.run_path(__file__)["PROGRAMS"]
