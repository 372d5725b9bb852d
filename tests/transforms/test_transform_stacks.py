# SPDX-License-Identifier: Apache-2.0
"""Random programs of writes under random stacks of transforms, against pure JAX."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import treetap as tt
from modes import ALL_MODES, NAMED

STEPS = jnp.array([0.25, -0.5, 1.0])
SHARE = 0.1237  # no sum of the values below comes near it


class Store(tt.Module):
    """Three Variables to work on and one that gradients are written to."""

    def __init__(self):
        start = jnp.arange(8.0).reshape(2, 2, 2) / 8
        self.parts = tt.List([tt.Param(start - 0.3 * i) for i in range(3)])
        self.slope = tt.Variable(jnp.zeros((2, 2, 2)))


def values_of(store):
    return [v.get_raw_value() for v in (*store.parts, store.slope)]


# one operation: its name, its target, its source, a number

operations = st.tuples(
    st.sampled_from(["mix", "scale", "assign", "swap"]),
    st.integers(0, 2),
    st.integers(0, 2),
    st.sampled_from([-0.5, 0.5, 0.75]),
)


def write(store, program):
    for name, target, source, number in program:
        one, two = store.parts[target], store.parts[source]
        if name == "mix":
            one[...] = (one + two) * number
        elif name == "scale":
            one[...] *= number
        elif name == "assign":
            one[...] = jnp.full_like(two[...], number)
        else:
            one[...], two[...] = two[...], one[...]


def compute(values, program):
    values = list(values)
    for name, target, source, number in program:
        one, two = values[target], values[source]
        if name == "mix":
            values[target] = (one + two) * number
        elif name == "scale":
            values[target] = one * number
        elif name == "assign":
            values[target] = jnp.full_like(two, number)
        else:
            values[target], values[source] = two, one
    return values


# one transform: around a function that changes a store, and around a pure one


def with_grad(step, mode):
    def call(store):
        def loss(store):
            step(store)
            return sum(jnp.sum(item[...] ** 2) for item in store.parts)

        grads = tt.grad(loss, **mode)(store)
        store.slope[...] = grads.parts[0][...]

    return call


def pure_grad(step):
    def loss(values):
        values = step(values)
        return sum(jnp.sum(item**2) for item in values[:3]), values

    def call(values):
        grads, values = jax.grad(loss, has_aux=True)(values)
        return [*values[:3], grads[0]]

    return call


def with_scan(step, mode):
    def one(store, x):
        step(store)
        store.parts[0][...] += x
        return store

    def call(store):
        axes = {"in_axes": (tt.Carry, 0), "out_axes": tt.Carry}
        tt.scan(one, **axes, **mode)(store, STEPS)

    return call


def with_broadcast_scan(step, mode):
    def one(store, x):
        step(store)
        store.parts[0][...] += x
        return x

    scanned = tt.scan(one, in_axes=(None, 0), out_axes=0, **mode)
    return lambda store: scanned(store, STEPS)


def pure_scan(step):
    def one(values, x):
        first, *rest = step(values)
        return [first + x, *rest], None

    return lambda values: jax.lax.scan(one, values, STEPS)[0]


def with_cond(step, mode):
    def call(store):
        holds = jnp.sum(store.parts[1][...]) > SHARE
        other = lambda store: write(store, [("scale", 2, 2, 0.5)])
        tt.cond(holds, step, other, store, **mode)

    return call


def pure_cond(step):
    other = lambda values: compute(values, [("scale", 2, 2, 0.5)])

    def call(values):
        return jax.lax.cond(jnp.sum(values[1]) > SHARE, step, other, values)

    return call


TRANSFORMS = {
    "jit": (lambda step, mode: tt.jit(step, **mode), jax.jit),
    "remat": (lambda step, mode: tt.remat(step, **mode), jax.checkpoint),
    "vmap": (lambda step, mode: tt.vmap(step, **mode), jax.vmap),
    "grad": (with_grad, pure_grad),
    "scan": (with_scan, pure_scan),
    "broadcast scan": (with_broadcast_scan, pure_scan),
    "cond": (with_cond, pure_cond),
}
TARGETS = {"grad": {3}, "scan": {0}, "broadcast scan": {0}, "cond": {2}}


def nothing_returned(step):
    def call(store):
        step(store)

    return call


def touched(program, stack):
    """Numbers of the Variables that may hold another array afterwards."""
    found = set().union(*(TARGETS.get(name, set()) for name in stack))
    for name, target, source, _ in program:
        found |= {target, source} if name == "swap" else {target}
    return found


def check(program, stack, mode):
    step, pure = (lambda s: write(s, program)), (lambda v: compute(v, program))
    for name in stack:
        around, pure_around = TRANSFORMS[name]
        step, pure = nothing_returned(around(step, mode)), pure_around(pure)
    store = Store()
    before = values_of(store)
    expected = pure(before)
    step(store)
    for number, (found, value) in enumerate(zip(values_of(store), expected)):
        np.testing.assert_allclose(found, value, rtol=1e-4, atol=1e-5)
        if number not in touched(program, stack):
            assert found is before[number]


MODES = list(NAMED.values())
stacks = st.lists(st.sampled_from(sorted(TRANSFORMS)), min_size=1, max_size=3)


@hypothesis.given(st.lists(operations, max_size=4), stacks, st.sampled_from(MODES))
def test_a_stack_of_transforms_computes_what_pure_jax_does(program, stack, mode):
    check(program, stack, mode)


@pytest.mark.long
@ALL_MODES
@pytest.mark.parametrize("inner", TRANSFORMS)
@pytest.mark.parametrize("outer", TRANSFORMS)
def test_every_pair_of_transforms_computes_what_pure_jax_does(outer, inner, mode):
    program = [("mix", 0, 1, 0.5), ("swap", 1, 2, 0.5), ("scale", 0, 0, 0.75)]
    check(program, [inner, outer], mode)
