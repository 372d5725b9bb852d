# SPDX-License-Identifier: Apache-2.0
"""custom_vjp: a function with its own reverse rule."""

import jax
import jax.numpy as jnp
import pytest

import treetap as tt


class Model(tt.Module):
    def __init__(self, x=1.0, y=2.0):
        self.x = tt.Param(jnp.array(x))
        self.y = tt.Param(jnp.array(y))
        self.calls = tt.Variable(jnp.array(0))


def make(scale=1.0, **options):
    @tt.custom_vjp(**options)
    def f(m):
        m.calls[...] += 1
        return jnp.sin(m.x[...]) * m.y[...]

    def fwd(m):
        return f(m), (jnp.cos(m.x[...]), jnp.sin(m.x[...]), m)

    def bwd(residual, g):
        cos, sin, m = residual
        tangent = tt.clone(m)
        tangent.x[...] = scale * g * cos * m.y[...]
        tangent.y[...] = scale * g * sin
        return (tangent,)

    f.defvjp(fwd, bwd)
    return f


@pytest.mark.parametrize("graph", [False, True])
def test_the_worked_numbers(graph):
    model = Model()
    grads = tt.grad(make(graph=graph), graph=graph)(model)
    assert jnp.allclose(grads.x[...], 2 * jnp.cos(1.0))
    assert jnp.allclose(grads.y[...], jnp.sin(1.0))
    assert model.calls[...] == 1


def test_the_rule_is_the_one_given():
    grads = tt.jit(tt.grad(make(scale=10.0)))(Model())
    assert jnp.allclose(grads.x[...], 20 * jnp.cos(1.0))


def test_calling_it_plainly_writes_once():
    model = Model()
    assert jnp.allclose(make()(m=model), 2 * jnp.sin(1.0))
    assert model.calls[...] == 1


def test_nondiff_arguments_may_hold_variables_and_functions():
    @tt.custom_vjp(nondiff_argnums=(0, 1))
    def f(fn, counter, x):
        counter[...] += 1
        return fn(x)

    f.defvjp(
        lambda fn, counter, x: (f(fn, counter, x), x),
        lambda fn, counter, x, g: (g * 5,),
    )
    counter = tt.Variable(jnp.array(0))

    def loss(counter, x):
        return f(jnp.sin, counter, x)

    assert tt.grad(loss, argnums=1)(counter, 1.0) == 5.0
    assert counter[...] == 1
    assert jax.grad(lambda x: f(jnp.sin, tt.Variable(jnp.array(0)), x))(1.0) == 5.0


def test_updates_reach_the_rule_that_asks_for_them():
    seen = []

    @tt.custom_vjp
    def f(m):
        m.x[...] = m.x * 3
        return m.y[...] * 1.0

    def bwd(residual, g, *, updates_g):
        seen.append((type(updates_g[0].x), updates_g[0].y))
        tangent = Model()
        tangent.x[...] = updates_g[0].x * 3
        tangent.y[...] = g
        return (tangent,)

    f.defvjp(lambda m: (f(m), None), bwd)

    def loss(m):
        return f(m) + m.x * 2

    grads = tt.grad(loss)(Model())
    assert seen == [(tt.Param, None)]
    assert grads.x[...] == 6.0


def test_a_lost_gradient_is_refused():
    @tt.custom_vjp
    def f(m):
        m.x[...] = m.x * 3
        return m.y[...] * 1.0

    f.defvjp(lambda m: (f(m), None), lambda residual, g: (Model(),))
    with pytest.raises(tt.StructureError, match="a differentiable Param is changed"):
        f(Model())


def test_mistakes_are_named():
    f = tt.custom_vjp(lambda x: x * 2)
    with pytest.raises(tt.StructureError, match=r"defvjp\(fwd, bwd\)"):
        f(1.0)
    f.defvjp(lambda x: x, lambda r, g: (g,))
    with pytest.raises(tt.StructureError, match="`fwd` must return a pair"):
        f(1.0)
    f.defvjp(lambda x: (x * 2, None), lambda r, g: (g, g))
    with pytest.raises(tt.StructureError, match="2 tangents for 1 differentiable"):
        tt.grad(f)(1.0)
    with pytest.raises(NotImplementedError, match="symbolic_zeros"):
        f.defvjp(None, None, symbolic_zeros=True)


def test_it_binds_as_a_method():
    class Doubling(tt.Module):
        def __init__(self):
            self.w = tt.Param(jnp.array(3.0))

        @tt.custom_vjp
        def run(self, x):
            return self.w * x

    Doubling.run.defvjp(
        lambda m, x: (m.w * x, (m, x)),
        lambda residual, g: (tt.clone(residual[0]), g * 100),
    )
    module = Doubling()
    assert module.run(2.0) == 6.0
    assert tt.grad(lambda m, x: m.run(x), argnums=1)(module, 2.0) == 100.0
