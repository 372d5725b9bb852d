# SPDX-License-Identifier: Apache-2.0
"""Steps of the table of captures: transforms around a block, and the same by hand.

A step is a function of a model and an array that gives an array of the same shape and
*extras*, which a transform only takes along: what a capture inside it heard. For each
transform there is one function around a step, and one around a function on arrays, with
Python's loops and branches for JAX's. All of them nest.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import treetap as tt
from meshes import devices_of

TIMES = 3
SHARDS = 2


class Block(tt.Module):
    """One value, `w * x`, marked in the four ways there are."""

    def __init__(self, w):
        self.w = tt.Param(w)

    def seen(self, h):
        return h

    def __call__(self, x):
        h = x * self.w
        self.sow(tt.Intermediate, "sown", h)
        h = self.perturb("moved", h)
        h = tt.tap(h, "tapped")
        return jnp.sin(self.seen(h))


def block_step(model, x):
    return model(x), ()


class Seen(NamedTuple):
    """What is known of the marked value, beside the result of the program.

    Attributes:
        out: The result.
        value: The marked value, with the axes and zeros that a record has.
        grads: Its gradients, the innermost differentiation first.
        taken: In a branch, whether it was taken.
        count: In a `while`, the number of iterations.
    """

    out: Any
    value: Any
    grads: tuple[Any, ...] = ()
    taken: Any = None
    count: Any = None


def block_by_hand(w, x, moved):
    h = w * x + moved
    return Seen(jnp.sin(h), h)


# The transforms: JAX's own, and ours. What differs is how `scan` is called.


def scan_of_jax(body, carry, xs, reverse=False):
    return lax.scan(body, carry, xs, reverse=reverse)


def scan_of_ours(body, carry, xs, reverse=False):
    return tt.scan(body, reverse=reverse)(carry, xs)


PLAIN = SimpleNamespace(
    name="jax",
    jit=jax.jit,
    vmap=jax.vmap,
    grad=jax.grad,
    value_and_grad=jax.value_and_grad,
    scan=scan_of_jax,
    remat=jax.checkpoint,
    cond=lax.cond,
    switch=lax.switch,
    while_loop=lax.while_loop,
    fori_loop=lax.fori_loop,
    custom_vjp=jax.custom_vjp,
    shard_map=jax.shard_map,
    pmap=jax.pmap,
)
OURS = SimpleNamespace(
    name="ours",
    jit=tt.jit,
    vmap=tt.vmap,
    grad=tt.grad,
    value_and_grad=tt.value_and_grad,
    scan=scan_of_ours,
    remat=tt.remat,
    cond=tt.cond,
    switch=tt.switch,
    while_loop=tt.while_loop,
    fori_loop=tt.fori_loop,
    custom_vjp=tt.custom_vjp,
    shard_map=tt.shard_map,
    pmap=tt.pmap,
)


def stacked(found):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *found)


def zeros_of(tree):
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)


def no_extras(step, model, x, *axes):
    """Zeros like the extras of a step; on shards they vary as the input does."""
    zero = 0 * jnp.sum(x)
    shapes = jax.eval_shape(step, model, x)[1]
    return jax.tree.map(lambda leaf: jnp.zeros((*axes, *leaf.shape)) + zero, shapes)


# jit, remat: the same program


def jit(ns, step):
    return ns.jit(step)


def remat(ns, step):
    return ns.remat(step)


def unchanged(inner):
    return inner


# vmap, pmap, shard_map: a loop over rows


def vmap_broadcast(ns, step):
    return ns.vmap(step, in_axes=(None, 0))


def vmap_mapped(ns, step):
    return ns.vmap(step)


def pmap(ns, step):
    devices = devices_of(SHARDS)
    return ns.pmap(step, in_axes=(None, 0), devices=devices)


def shard_map(ns, step):
    def local(model, x):
        # Else JAX adds up what a differentiation inside finds for the model.
        model = jax.tree.map(lambda leaf: lax.pcast(leaf, "shard", to="varying"), model)
        return jax.tree.map(lambda leaf: leaf[None], step(model, x[0]))

    mesh = Mesh(np.array(devices_of(SHARDS)), ("shard",))
    specs = {"in_specs": (P(), P("shard")), "out_specs": P("shard")}
    return ns.jit(ns.shard_map(local, mesh=mesh, **specs))  # bare it is very slow


def rows_of_x(inner):
    return lambda w, x, moved: stacked(
        [inner(w, x[n], moved[n]) for n in range(len(x))]
    )


def rows_of_both(inner):
    return lambda w, x, moved: stacked(
        [inner(w[n], x[n], moved[n]) for n in range(len(x))]
    )


# grad, value_and_grad: by model and input; the result has the shape of the input


def loss_of(step):
    def loss(model, x):
        y, extras = step(model, x)
        return jnp.sum(y), extras

    return loss


def grad(ns, step):
    def call(model, x):
        by_both = ns.grad(loss_of(step), argnums=(0, 1), has_aux=True)
        (by_model, by_x), extras = by_both(model, x)
        return by_x + jnp.sum(by_model.w[...]), extras

    return call


def value_and_grad(ns, step):
    def call(model, x):
        by_both = ns.value_and_grad(loss_of(step), argnums=(0, 1), has_aux=True)
        (value, extras), (by_model, by_x) = by_both(model, x)
        return by_x + jnp.sum(by_model.w[...]) + value, extras

    return call


def slopes(inner, w, x, moved):
    """Value and derivatives of the sum of the results, and what was seen."""

    def loss(w, x, moved):
        seen = inner(w, x, moved)
        return jnp.sum(seen.out), seen

    by_all = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
    (value, seen), (by_w, by_x, by_moved) = by_all(w, x, moved)
    return seen._replace(grads=(*seen.grads, by_moved)), value, by_x + jnp.sum(by_w)


def grad_by_hand(inner):
    def call(w, x, moved):
        seen, _, slope = slopes(inner, w, x, moved)
        return seen._replace(out=slope)

    return call


def value_and_grad_by_hand(inner):
    def call(w, x, moved):
        seen, value, slope = slopes(inner, w, x, moved)
        return seen._replace(out=slope + value)

    return call


# loops


def scan_layers(ns, step, reverse=False):
    def call(model, x):
        return ns.scan(lambda x, layer: step(layer, x), x, model, reverse=reverse)

    return call


def scan_time(ns, step, reverse=False):
    inputs = jnp.arange(1.0, TIMES + 1) / 4

    def call(model, x):
        def body(x, more):
            return step(model, x + more)

        return ns.scan(body, x, inputs, reverse=reverse)

    return call


def fori(ns, step):
    def call(model, x):
        heard = no_extras(step, model, x, TIMES)

        def body(n, carry):
            x, heard = carry
            y, extras = step(model, x)
            return y, jax.tree.map(lambda old, new: old.at[n].set(new), heard, extras)

        return ns.fori_loop(0, TIMES, body, (x, heard))

    return call


def fori_traced(ns, step):
    def call(model, x, times):
        heard = no_extras(step, model, x)
        return ns.fori_loop(
            0, times, lambda n, carry: step(model, carry[0]), (x, heard)
        )

    return lambda model, x: ns.jit(call)(model, x, TIMES)


def while_loop(ns, step, times=TIMES):
    def call(model, x):
        heard = no_extras(step, model, x)

        def body(carry):
            n, x, _ = carry
            return (n + 1, *step(model, x))

        return ns.while_loop(lambda carry: carry[0] < times, body, (0, x, heard))[1:]

    return call


def layers_by_hand(inner, reverse=False):
    def call(w, x, moved):
        found: list[Any] = [None] * TIMES
        for n in reversed(range(TIMES)) if reverse else range(TIMES):
            found[n] = inner(w[n], x, moved[n])
            x = found[n].out
        return stacked(found)._replace(out=x)

    return call


def time_by_hand(inner, reverse=False):
    def call(w, x, moved):
        found: list[Any] = [None] * TIMES
        for n in reversed(range(TIMES)) if reverse else range(TIMES):
            found[n] = inner(w, x + (n + 1) / 4, moved[n])
            x = found[n].out
        return stacked(found)._replace(out=x)

    return call


def fori_by_hand(inner):
    def call(w, x, moved):
        found = []
        for n in range(TIMES):
            found.append(inner(w, x, moved[n]))
            x = found[n].out
        return stacked(found)._replace(out=x)

    return call


def while_by_hand(inner, times=TIMES):
    """The last value: one perturbation is added in every iteration."""

    def call(w, x, moved):
        seen = zeros_of(inner(w, x, moved))
        for _ in range(times):
            seen = inner(w, x, moved)
            x = seen.out
        # How often a loop ran tells of the outermost one; inside, of the last time.
        return seen._replace(out=x, count=jnp.array(times))

    return call


# branches: one of them has the block


def cond(ns, step, taken=True):
    def call(model, x):
        heard = no_extras(step, model, x)
        branches = step, lambda model, x: (x * 2, heard)
        return ns.cond(jnp.array(taken), *branches, model, x)

    return call


def switch(ns, step, index=1):
    def call(model, x):
        heard = no_extras(step, model, x)

        def times(factor):
            return lambda model, x: (x * factor, heard)

        branches = times(2), step, times(3)
        return ns.switch(jnp.array(index), branches, model, x)

    return call


def branch_by_hand(inner, taken=True):
    def call(w, x, moved):
        seen = inner(w, x, moved)
        if not taken:
            seen = zeros_of(seen)._replace(out=x * 2)
        held = seen.taken if seen.taken is not None else jnp.ones((), bool)
        return seen._replace(taken=held & taken)

    return call


# custom rules: a derivative of ten by the input, of zero by the model


def custom_vjp(ns, step):
    @ns.custom_vjp
    def call(model, x):
        return step(model, x)

    def forward(model, x):
        return step(model, x), (model, x)

    def backward(kept, cotangents):
        return jax.tree.map(jnp.zeros_like, kept[0]), 10 * cotangents[0]

    call.defvjp(forward, backward)
    return call


def custom_jvp(ns, step):
    @jax.custom_jvp
    def call(model, x):
        return step(model, x)

    @call.defjvp
    def _(primals, tangents):
        y, extras = step(*primals)
        return (y, extras), (10 * tangents[1], zeros_of(extras))

    return call


def rule_by_hand(inner):
    def call(w, x, moved):
        seen = lax.stop_gradient(inner(w, x, moved))
        return seen._replace(out=seen.out + 10 * (x - lax.stop_gradient(x)))

    return call
