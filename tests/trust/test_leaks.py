# SPDX-License-Identifier: Apache-2.0
"""Nothing of a trace outlives it: JAX's own check finds no leaked tracer.

JAX reports two things of its own, which are not here: effects in a scan that is
differentiated, and rules of `custom_vjp` that close over traced values.
"""

import jax
import jax.numpy as jnp
import pytest

import treetap as tt
from meshes import mesh_of


class Net(tt.Module):
    """Counts its calls, and marks what it gives."""

    def __init__(self):
        self.w = tt.Param(jnp.full((3, 3), 0.5))
        self.calls = tt.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1
        return tt.tap(x @ self.w[...], "h")


X = jnp.ones((2, 3))
SWEEP = {"in_axes": (tt.Carry, None), "out_axes": (tt.Carry, 0), "length": 3}
EDIT = {"**:h": tt.edits.scale(2.0)}


def loss(net, x):
    return (net(x) ** 2).sum()


def chosen(net, x):
    return tt.cond(x.sum() > 0, lambda net, x: net(x), lambda net, x: x, net, x)


def repeated(net, x):
    step = lambda x, net: (net(x), None)
    return tt.scan(step, **SWEEP)(x, net)[0]


def turned(net, x):
    return tt.fori_loop(0, 3, lambda i, held: (held[0], held[0](held[1])), (net, x))[1]


def in_shards(net, x):
    mesh = mesh_of((2,), ("data",))
    run = lambda w, x: tt.tap(x @ w, "h")
    spec = jax.P("data")
    return jax.shard_map(run, mesh=mesh, in_specs=(jax.P(), spec), out_specs=spec)(
        net.w[...], x
    )


CASES = {
    "jit": lambda net: tt.jit(loss)(net, X),
    "jit of grad": lambda net: tt.jit(tt.grad(loss))(net, X),
    "packed": lambda net: tt.jit(loss, pack=True)(net, X),
    "jit_partial": lambda net: tt.jit_partial(loss, net)(X),
    "grad": lambda net: tt.grad(loss)(net, X),
    "grad of remat": lambda net: tt.grad(tt.remat(loss))(net, X),
    "grad of scan": lambda net: tt.grad(lambda net: repeated(net, X).sum())(net),
    "vjp": lambda net: tt.vjp(loss, net, X)[1](1.0),
    "vmap": lambda net: tt.vmap(lambda x, net: net(x), in_axes=(0, None))(X, net),
    "scan": lambda net: repeated(net, X),
    "loop": lambda net: turned(net, X),
    "cond": lambda net: chosen(net, X),
    "cond with graph updates": lambda net: tt.cond(
        True, loss, lambda net, x: x.sum(), net, X, graph=True, graph_updates=True
    ),
    "checkify": lambda net: tt.checkify(loss)(net, X),
    "eval_shape": lambda net: tt.eval_shape(loss, net, X),
    "make_jaxpr": lambda net: tt.make_jaxpr(loss)(net, X),
    "build": lambda net: tt.build(Net),
    "summary": lambda net: tt.tabulate(net, X),
    "sites": lambda net: tt.sites(net, X),
    "observe": lambda net: tt.observe(net)(X),
    "observe jit": lambda net: tt.observe(tt.jit(loss))(net, X),
    "observe scan": lambda net: tt.observe(repeated)(net, X),
    "observe shards": lambda net: tt.observe(in_shards)(net, X),
    "observe gradients": lambda net: tt.observe(tt.grad(loss), grads=True)(net, X),
    "observe statistics": lambda net: tt.observe(loss, reduce=[tt.Moments()])(net, X),
    "capture": lambda net: tt.capture(loss, tt.Intermediate)(net, X),
    "edit": lambda net: tt.edit(tt.jit(loss), EDIT)(net, X),
    "edit grad": lambda net: tt.edit(tt.grad(loss), EDIT)(net, X),
    "grad of edit": lambda net: tt.grad(tt.edit(loss, EDIT))(net, X),
    "blame": lambda net: tt.blame(tt.grad(loss))(net, X),
    "guard": lambda net: tt.guard(loss)(net, X),
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_of_a_trace_outlives_it(name):
    net = Net()
    with jax.checking_leaks():
        CASES[name](net)


def test_a_leak_would_be_found():
    kept = []
    with pytest.raises(Exception, match="Leaked"), jax.checking_leaks():
        jax.jit(lambda x: kept.append(x + 1))(X)
