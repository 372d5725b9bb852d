# SPDX-License-Identifier: Apache-2.0
"""edit: every program with an edit is the program with the edit written into it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.meshes import mesh_of

import treetap as tt
from treetap import edits

X = jnp.array([0.3, -0.7, 1.1])
V = jnp.array([0.2, 0.4, -0.5])


def bend(h, p):
    return jnp.tanh(h) * p + h**2


# Each edit, and the same as a function.
KINDS = {
    "zero": (edits.zero(), jnp.zeros_like),
    "replace": (edits.replace(V), lambda h: V),
    "add": (edits.add(V), lambda h: h + V),
    "scale": (edits.scale(V), lambda h: h * V),
    "mean": (edits.mean(0), lambda h: jnp.full(h.shape, jnp.mean(h))),
    "apply": (edits.apply(bend, 2.0), lambda h: bend(h, 2.0)),
    "where": (
        edits.zero().where(V > 0),
        lambda h: jnp.where(V > 0, 0.0, h),
    ),
}


def plain(mark):
    return lambda x: jnp.sum(jnp.sin(mark(x * 2)) * x)


def jitted(mark):
    inner = jax.jit(lambda x: jnp.sin(mark(x * 2)) * x)
    return jax.jit(lambda x: jnp.sum(inner(x) ** 2))


def scanned(mark):
    def step(carry, w):
        return jnp.sin(mark(carry * w)) + carry, jnp.sum(carry)

    def fn(x):
        out, sums = jax.lax.scan(step, x, jnp.array([1.0, 2.0, 3.0, 0.5]))
        return jnp.sum(out) + jnp.sum(sums)

    return fn


def mapped(mark):
    def one(x, w):
        return jnp.sin(mark(x * w)) * x

    def fn(x):
        rows = jax.vmap(one, (None, 0))(x, jnp.array([1.0, 2.0]))
        return jnp.sum(rows**2)

    return fn


def mapped_scan(mark):
    def one(x, w):
        step = lambda c, k: (jnp.sin(mark(c * k)) + w, None)  # noqa: E731 - short
        return jax.lax.scan(step, x, jnp.array([1.0, 2.0, 3.0]))[0]

    return lambda x: jnp.sum(jax.vmap(one, (None, 0))(x, jnp.array([1.0, 2.0])))


def rematted(mark):
    @jax.checkpoint
    def inner(x):
        return jnp.sin(mark(jnp.cos(x) * 2)) * x

    return lambda x: jnp.sum(inner(inner(x)) ** 2)


def rematted_scan(mark):
    return jax.checkpoint(scanned(mark))


def scanned_remat(mark):
    @jax.checkpoint
    def step(carry, w):
        return jnp.sin(mark(carry * w)) + carry, None

    def fn(x):
        return jnp.sum(jax.lax.scan(step, x, jnp.array([1.0, 2.0, 3.0]))[0])

    return jax.jit(fn)


def branched(mark):
    def fn(x):
        yes = lambda x: jnp.sin(mark(x * 3))  # noqa: E731 - short
        return jnp.sum(jax.lax.cond(x[0] > 0, yes, jnp.cos, x) * x)

    return fn


def counted(mark):
    def fn(x):
        step = lambda n, x: jnp.sin(mark(x * 2))  # noqa: E731 - short
        return jnp.sum(jax.lax.fori_loop(0, 3, step, x))

    return fn


def twice(mark):
    return lambda x: jnp.sum(mark(jnp.sin(mark(x))) * x)


def sharded(mark):
    spec = jax.P("a")

    def local(x):
        return jnp.sin(mark(x * 2)) * jax.lax.psum(x, "a")

    def fn(x):
        run = jax.shard_map(
            local, mesh=mesh_of(a=2), in_specs=(spec,), out_specs=spec
        )
        return jnp.sum(run(jnp.concatenate([x, 2 * x])))

    return jax.jit(fn)


PROGRAMS = [
    *(plain, jitted, scanned, mapped, mapped_scan, rematted, rematted_scan),
    *(scanned_remat, branched, counted, twice, sharded),
]

WAYS = {
    "value": (lambda f: f, False),
    "inside": (jax.grad, False),
    "outside": (jax.grad, True),
    "jitted": (lambda f: jax.jit(jax.grad(f)), False),
    "forward": (lambda f: lambda x: jax.jvp(f, (x,), (x + 1,))[1], False),
    "hessian": (jax.hessian, False),
    "twice": (lambda f: jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2)), False),
}


def tapped(h):
    return tt.tap(h, "h")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_an_edited_program_is_the_one_with_the_edit_written_in(program, way):
    transform, is_outside = WAYS[way]
    names = ["replace", "apply"] if way in {"hessian", "twice"} else KINDS
    for name in names:
        change, by_hand = KINDS[name]
        expected = transform(program(by_hand))(X)
        if is_outside:
            found = transform(tt.edit(program(tapped), {"h": change}))(X)
        else:
            found = tt.edit(transform(program(tapped)), {"h": change})(X)
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-5, err_msg=name)
