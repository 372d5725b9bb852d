# SPDX-License-Identifier: Apache-2.0
"""Transforms on two sides: around a step that changes a model, and by hand.

Each case has `wrap`, a transform around a step that changes a model, and `pure`, JAX's
own around the same step written on a dictionary of arrays.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify as jax_checkify
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import treetap as tt
from modes import UPDATES
from treetap import compat

X = jnp.array([[0.5, -1.0], [2.0, 3.0]])


class Model(tt.Module):
    """Four Variables, two of them deep inside containers, and a static attribute."""

    def __init__(self):
        self.w = tt.Param(jnp.array([[1.0, 2.0], [3.0, 4.0]]))
        self.idle = tt.Variable(jnp.array([[5.0, 6.0], [7.0, 8.0]]))
        a = tt.Param(jnp.array([[0.1, 0.2], [0.3, 0.4]]))
        b = tt.Variable(jnp.array([[-1.0, -2.0], [-3.0, -4.0]]))
        self.parts = tt.List([tt.Dict(a=a, b=b)])
        self.size = 2


class Made(tt.Module):
    def __init__(self, v):
        self.v = tt.Param(v)


class Tied(Model):
    """A model that holds one of its Variables twice."""

    def __init__(self):
        super().__init__()
        self.tied = self.w


def variables(model):
    inner = model.parts[0]
    return {"w": model.w, "idle": model.idle, "a": inner.a, "b": inner.b}


def arrays(model):
    return {name: v.get_raw_value() for name, v in variables(model).items()}


# kinds of writes: the step, the same by hand, and the names it changes


def write_one(m, x):
    m.w[...] = m.w * 2 + x
    return m.w * x


def pure_one(v, x):
    v = v | {"w": v["w"] * 2 + x}
    return v, v["w"] * x


def write_all(m, x):
    m.w[...] += x
    m.idle[...] *= m.w[...]
    m.parts[0].a[...] -= x
    m.parts[0].b[...] = m.parts[0].a[...] + m.parts[0].b[...]
    return m.w * x


def pure_all(v, x):
    w, a = v["w"] + x, v["a"] - x
    return {"w": w, "idle": v["idle"] * w, "a": a, "b": a + v["b"]}, w * x


def write_none(m, x):
    return m.w * x


def pure_none(v, x):
    return v, v["w"] * x


def write_metadata(m, x):
    m.w.set_metadata(role="seen")
    return m.w * x


def write_new(m, x):
    m.w[...] += x
    return Made(m.w * x)


def pure_new(v, x):
    v = v | {"w": v["w"] + x}
    return v, {"v": v["w"] * x}


def write_nested(m, x):
    for part in m.parts:
        part.a[...] += x * part.b
    return m.w * x


def pure_nested(v, x):
    return v | {"a": v["a"] + x * v["b"]}, v["w"] * x


KINDS = {
    "one": (write_one, pure_one, {"w"}),
    "all": (write_all, pure_all, {"w", "idle", "a", "b"}),
    "none": (write_none, pure_none, set()),
    "metadata": (write_metadata, pure_none, {"w"}),
    "new": (write_new, pure_new, {"w"}),
    "nested": (write_nested, pure_nested, {"a"}),
}


# transforms: around a step, and around the same step by hand


def loss_of(step):
    def loss(m, x):
        out = step(m, x)
        return jnp.sum(m.w * m.w) + jnp.sum(m.parts[0].a * x), out

    return loss


def pure_loss_of(pure):
    def loss(v, x):
        v, out = pure(v, x)
        return jnp.sum(v["w"] * v["w"]) + jnp.sum(v["a"] * x), (v, out)

    return loss


# In the order of a model's leaves: all Variables, and those that are Params.
LEAVES, PARAMS = ("idle", "a", "b", "w"), ("a", "w")


def by_leaf(v, names):
    """Values in the order of a model's leaves."""
    return [v[name] for name in names]


def wrap_grad(step, mode):
    return lambda m: tt.grad(loss_of(step), has_aux=True, **mode)(m, X)


def pure_grad(pure, v, names=LEAVES):
    grads, (v, out) = jax.grad(pure_loss_of(pure), has_aux=True)(v, X)
    return v, (by_leaf(grads, names), out)


def wrap_value_and_grad(step, mode):
    return lambda m: tt.value_and_grad(loss_of(step), has_aux=True, **mode)(m, X)


def pure_value_and_grad(pure, v, names=LEAVES):
    derive = jax.value_and_grad(pure_loss_of(pure), has_aux=True)
    (value, (v, out)), grads = derive(v, X)
    return v, ((value, out), by_leaf(grads, names))


def wrap_vjp(step, mode):
    def call(m):
        out, pull, aux = tt.vjp(loss_of(step), m, X, has_aux=True, **mode)
        return out, pull(jnp.array(2.0)), aux

    return call


def pure_vjp(pure, v, names=LEAVES):
    out, pull, (new, aux) = jax.vjp(pure_loss_of(pure), v, X, has_aux=True)
    grads, grad_x = pull(jnp.array(2.0))
    return new, (out, by_leaf(grads, names), grad_x, aux)


def wrap_jvp(step, mode):
    def call(m):
        ones = tt.clone(m, graph=mode["graph"])
        for variable in variables(ones).values():
            variable[...] = jnp.ones_like(variable[...])
        primals, tangents = (m, X), (ones, X)
        return tt.jvp(loss_of(step), primals, tangents, has_aux=True, **mode)

    return call


def pure_jvp(pure, v):
    tangents = (jax.tree.map(jnp.ones_like, v), X)
    out, tangent, (new, aux) = jax.jvp(
        pure_loss_of(pure), (v, X), tangents, has_aux=True
    )
    return new, (out, tangent, aux)


def two_devices():
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    return Mesh(np.array(jax.devices()[:2]), ("d",))


def wrap_shard_map(step, mode):
    specs = {"in_specs": (P("d"), P("d")), "out_specs": P("d")}
    mapped = tt.shard_map(step, mesh=two_devices(), **specs, **mode)
    return lambda m: mapped(m, X)


def pure_shard_map(pure, v):
    specs = {"in_specs": (P("d"), P("d")), "out_specs": (P("d"), P("d"))}
    return jax.shard_map(pure, mesh=two_devices(), **specs)(v, X)


def wrap_carried(step, mode):
    scanned = tt.scan(lambda m, x: (m, step(m, x)), **mode)

    def call(m):
        carried, out = scanned(m, jnp.stack([X, X + 1, -X]))
        assert carried.w is m.w
        assert carried.parts[0].b is m.parts[0].b
        assert (carried is m) == (mode is UPDATES)
        return out

    return call


def pure_carried(pure, v):
    return jax.lax.scan(pure, v, jnp.stack([X, X + 1, -X]))


def wrap_broadcast(step, mode):
    scanned = tt.scan(step, in_axes=(None, 0), out_axes=0, **mode)
    return lambda m: scanned(m, jnp.stack([X, X + 1, -X]))


def wrap_stacked(step, mode):
    scanned = tt.scan(step, in_axes=(0, 0), out_axes=0, **mode)
    return lambda m: scanned(m, X)


def wrap_while(step, mode):
    def body(carry):
        step(carry[1], X)
        return carry[0] + 1, carry[1]

    def call(m):
        start = (jnp.array(0), m)
        i, back = tt.while_loop(lambda c: c[0] < 3, body, start, **mode)
        assert back.w is m.w
        assert (back is m) == (mode is UPDATES)
        return i

    return call


def pure_while(pure, v):
    start = (jnp.array(0), v)
    i, v = jax.lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, pure(c[1], X)[0]), start
    )
    return v, i


def wrap_fori(step, mode):
    def body(i, m):
        step(m, X * i)
        return m

    def call(m):
        back = tt.fori_loop(1, 4, body, m, **mode)
        assert back.w is m.w

    return call


def pure_fori(pure, v):
    return jax.lax.fori_loop(1, 4, lambda i, v: pure(v, X * i)[0], v), None


def twice(step):
    def both(m, x):
        step(m, x)
        return step(m, -x)

    return both


def pure_twice(pure):
    return lambda v, x: pure(pure(v, x)[0], -x)


def wrap_cond(step, mode):
    return lambda m: tt.cond(X[0, 0] > 9, step, twice(step), m, X, **mode)


def pure_cond(pure, v):
    return jax.lax.cond(X[0, 0] > 9, pure, pure_twice(pure), v, X)


def wrap_switch(step, mode):
    branches = [twice(step), step, twice(step)]
    return lambda m: tt.switch(jnp.array(1), branches, m, X, **mode)


def pure_switch(pure, v):
    branches = [pure_twice(pure), pure, pure_twice(pure)]
    return jax.lax.switch(jnp.array(1), branches, v, X)


def wrap_checkify(step, mode):
    return lambda m: tt.checkify(step, **mode)(m, X)


def pure_checkify(pure, v):
    error, (v, out) = jax_checkify.checkify(pure)(v, X)
    return v, (error, out)


def wrap_pmap(step, mode):
    two_devices()
    mapped = tt.pmap(step, **mode)
    return lambda m: mapped(m, X)


def pure_pmap(pure, v):
    two_devices()
    return jax.pmap(pure)(v, X)


def wrap_custom_vjp(step, mode):
    def bwd(residual, g, *, updates_g=None):
        raise AssertionError("nothing is differentiated")

    ruled = tt.custom_vjp(step, **mode)
    ruled.defvjp(lambda m, x: (step(m, x), None), bwd)
    return lambda m: ruled(m, X)


def wrap_fixed(step, mode):
    if mode is UPDATES:
        jitted = tt.jit(step, **mode)
        return lambda m: compat.cached_partial(jitted, m)(X)
    return lambda m: tt.jit_partial(step, m, **mode)(X)


class Case(NamedTuple):
    """A transform on both sides.

    Attributes:
        wrap: From a step and a mode to a function of a model.
        pure: From a pure step and arrays to arrays and a result.
        skipped: Kinds of writes that it does not take.
        derives: Whether there are gradients in the result: `pure` then takes names.
    """

    wrap: Callable[..., Any]
    pure: Callable[..., Any]
    skipped: tuple[str, ...] = ()
    derives: bool = False

    def pure_in(self, mode):
        """`pure`, with the gradients that there are in a mode."""
        if self.derives and mode is UPDATES:
            return partial(self.pure, names=PARAMS)
        return self.pure


def simple(transform, pure_transform):
    def wrap(step, mode):
        wrapped = transform(step, **mode)
        return lambda m: wrapped(m, X)

    return Case(wrap, lambda pure, v: pure_transform(pure)(v, X))


CASES = {
    "jit": simple(tt.jit, jax.jit),
    "remat": simple(tt.remat, jax.checkpoint),
    "vmap": simple(tt.vmap, jax.vmap),
    "pmap": Case(wrap_pmap, pure_pmap),
    "grad": Case(wrap_grad, pure_grad, derives=True),
    "value_and_grad": Case(wrap_value_and_grad, pure_value_and_grad, derives=True),
    "vjp": Case(wrap_vjp, pure_vjp, derives=True),
    "jvp": Case(wrap_jvp, pure_jvp),
    "shard_map": Case(wrap_shard_map, pure_shard_map),
    "scan_carried": Case(wrap_carried, pure_carried, ("metadata",)),
    "scan_broadcast": Case(wrap_broadcast, pure_carried, ("metadata",)),
    "scan_stacked": Case(wrap_stacked, lambda pure, v: jax.vmap(pure)(v, X)),
    "while_loop": Case(wrap_while, pure_while, ("metadata", "new")),
    "fori_loop": Case(wrap_fori, pure_fori, ("metadata", "new")),
    "cond": Case(wrap_cond, pure_cond),
    "switch": Case(wrap_switch, pure_switch),
    "checkify": Case(wrap_checkify, pure_checkify),
    "custom_vjp": Case(wrap_custom_vjp, lambda pure, v: pure(v, X)),
    "partial": Case(wrap_fixed, lambda pure, v: pure(v, X), ("metadata",)),
}


def assert_same_leaves(found, expected):
    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    assert len(found) == len(expected)
    for one, two in zip(found, expected):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)
