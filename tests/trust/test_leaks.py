# SPDX-License-Identifier: Apache-2.0
"""Nothing of a trace outlives it: JAX's own check finds no leaked tracer.

`make test-leaks` has the check on in all tests. What JAX reports of itself is below.
"""

import concurrent.futures
import gc
import multiprocessing
import weakref

import jax
import jax.numpy as jnp
import pytest

import leaks
import treetap as tt
from meshes import mesh_of
from treetap import nnx


@pytest.fixture(autouse=True, scope="module")
def older_objects_let_go():
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_older_is_looked_at():
    """To name what keeps a tracer JAX goes through all objects that are not frozen."""
    gc.freeze()


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


@tt.custom_vjp
def counted(net, x):
    return net(x)


def counted_bwd(net, g, *, updates_g):
    return net, g


counted.defvjp(lambda net, x: (net(x), tt.clone(net)), counted_bwd)


@jax.custom_vjp
def own_rule(x):
    return tt.tap(x * 2, "double")


own_rule.defvjp(lambda x: (tt.tap(x * 2, "double"), x), lambda x, g: (g * 2,))


@jax.custom_jvp
def own_forward_rule(x):
    return tt.tap(x * 2, "double")


own_forward_rule.defjvp(
    lambda primals, tangents: (tt.tap(primals[0] * 2, "double"), tangents[0] * 2)
)


def with_rules(net, x):
    return (own_rule(net(x)) + own_forward_rule(x)).sum()


def activated(net, x):
    return jax.nn.relu(net(jax.nn.gelu(x)))


def with_context(net, x):
    with nnx.update_context("mine"):
        with nnx.split_context("mine") as ctx:
            parts = ctx.split(net)

        @jax.jit
        def inside(parts, x):
            with nnx.merge_context("mine", inner=True) as ctx:
                net = ctx.merge(*parts)
            out = net(x)
            with nnx.split_context("mine") as ctx:
                return out, ctx.split(net)

        out, parts = inside(parts, x)
        with nnx.merge_context("mine", inner=False) as ctx:
            ctx.merge(*parts)
    return out


def on_devices(net, x):
    return tt.pmap(lambda x, net: net(x), in_axes=(0, None))(x[None], net)


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
    "custom_vjp": lambda net: counted(net, X),
    "grad of custom_vjp": lambda net: tt.grad(lambda n: counted(n, X).sum())(net),
    "jit of custom_vjp": lambda net: tt.jit(tt.grad(lambda n: counted(n, X).sum()))(
        net
    ),
    "observe custom_vjp": lambda net: tt.observe(
        tt.grad(lambda n: counted(n, X).sum())
    )(net),
    "pmap": lambda net: on_devices(net, X),
    "jit of pmap": lambda net: tt.jit(on_devices)(net, X),
    "context": lambda net: with_context(net, X),
    "build": lambda net: tt.build(Net),
    "summary": lambda net: tt.tabulate(net, X),
    "sites": lambda net: tt.sites(net, X),
    "sites of rules": lambda net: tt.sites(tt.jit(activated), net, X),
    "observe": lambda net: tt.observe(net)(X),
    "observe jit": lambda net: tt.observe(tt.jit(loss))(net, X),
    "observe scan": lambda net: tt.observe(repeated)(net, X),
    "observe rules": lambda net: tt.observe(tt.jit(with_rules))(net, X),
    "observe rules gradients": lambda net: tt.observe(
        tt.jit(tt.grad(with_rules)), grads=True
    )(net, X),
    "edit rules": lambda net: tt.edit(
        tt.jit(with_rules), {"**:double": tt.edits.scale(2.0)}
    )(net, X),
    "blame rules": lambda net: tt.blame(tt.jit(with_rules))(net, X),
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


def test_a_program_with_a_rule_keeps_no_object():
    net = Net()
    derive = tt.jit(tt.grad(lambda net: counted(net, X).sum()))
    derive(net)
    died = weakref.ref(net)
    del net
    gc.collect()
    assert died() is None


# What JAX reports of itself: `leaks.OF_JAX` leaves it out of `make test-leaks`.


def looped(x):
    def step(held, _):
        jax.debug.callback(lambda _: None, held)
        return held * 2, None

    return jax.lax.scan(step, x, length=2)[0].sum()


def summed_over_shards(w):
    mesh = mesh_of((2,), ("data",))
    run = lambda w, x: jax.lax.psum(jnp.sum((w * x[0]) ** 2), "data")
    specs = {"in_specs": (jax.P(), jax.P("data")), "out_specs": jax.P()}
    return jax.shard_map(run, mesh=mesh, **specs)(w, X)


OF_JAX = {
    ".effect_handles": lambda: jax.grad(looped)(X),
    "weakref.finalize": lambda: jax.jit(jax.grad(summed_over_shards))(jnp.ones(3)),
}


def leak_of_jax(mark):
    with pytest.raises(Exception, match="Leaked") as caught, jax.checking_leaks():
        OF_JAX[mark]()
    return str(caught.value)


@pytest.mark.keeps_traces
@pytest.mark.parametrize("mark", leaks.OF_JAX)
def test_these_are_of_jax_itself(mark):
    """In a new process, which has few objects for JAX to go through."""
    spawning = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawning) as process:
        text = process.submit(leak_of_jax, mark).result()
    assert leaks.of_jax(text) == leaks.OF_JAX[mark]


def test_the_first_of_several_leaks_is_looked_at():
    later = TypeError("Leaked trace B")
    later.__context__ = ValueError("Leaked trace A")
    later.__context__.__context__ = KeyError("a")
    assert leaks.first_leak(later) == "Leaked trace A"
    assert leaks.first_leak(KeyError("a")) == "'a'"


def test_ours_beside_one_of_jax_is_not_left_out():
    ours = "<Tracer 1> is referred to by <dict 2>"
    jaxs = "<list 3> is referred to by <JaxprTrace 4>.effect_handles"
    assert leaks.of_jax(f"Leaked trace A.\n\n{jaxs}\n\n{ours}") is None
    assert leaks.of_jax(f"Leaked trace A.\n\n{jaxs}") is not None
    assert leaks.of_jax(jaxs) is None


@pytest.mark.keeps_traces
def test_a_leak_would_be_found():
    kept = []
    with pytest.raises(Exception, match="Leaked"), jax.checking_leaks():
        jax.jit(lambda x: kept.append(x + 1))(X)
