# SPDX-License-Identifier: Apache-2.0
"""Transforms that number arguments find them by name, and where they have defaults."""

import jax
import jax.numpy as jnp
import pytest

import treetap as tt
from treetap import nnx


def loss(model, x, factor=3.0):
    return (model.w[...] * x * factor).sum()


def model():
    return nnx.Dict(w=nnx.Param(jnp.array(2.0)))


def product(a, b=2.0, c=3.0):
    return a * b * c


def test_gradients_of_arguments_passed_by_name():
    grads = nnx.grad(loss)(x=5.0, model=model())
    assert float(grads["w"][...]) == 15.0
    value, grad = nnx.value_and_grad(loss, argnums=1)(model(), factor=1.0, x=5.0)
    assert (float(value), float(grad)) == (10.0, 2.0)
    both = nnx.grad(loss, argnums=(nnx.DiffState(0, nnx.Param), 1))
    of_model, of_x = both(x=5.0, model=model())
    assert (float(of_model["w"][...]), float(of_x)) == (15.0, 6.0)


def test_gradients_of_defaults():
    assert float(nnx.grad(product, argnums=1)(5.0)) == 15.0
    found = nnx.grad(product, argnums=(0, 2))(5.0, c=4.0)
    assert list(map(float, found)) == [8.0, 10.0]


def test_negative_numbers_count_from_the_last_parameter():
    assert float(nnx.grad(product, argnums=-1)(5.0)) == 10.0
    assert float(nnx.grad(product, argnums=-2)(5.0, b=1.0)) == 15.0


def test_what_only_goes_by_name_does():
    def named(a, *, b, **rest):
        return a * b * rest["c"]

    assert float(nnx.grad(named)(5.0, b=2.0, c=3.0)) == 6.0


def test_in_tree_mode_only_arguments_by_position_are_numbered():
    with pytest.raises(tt.StructureError, match="0 positional arguments were given"):
        tt.grad(product)(a=5.0)
    assert float(tt.grad(product, argnums=-1)(5.0)) == 6.0


@pytest.mark.parametrize("given", [{}, {"c": jnp.ones(3)}])
def test_defaults_have_axes(given):
    axis = 0 if given else None
    mapped = nnx.vmap(product, in_axes=(0, None, axis))
    expected = product(jnp.arange(3.0), **given)
    assert mapped(jnp.arange(3.0), **given).tolist() == expected.tolist()
    total, _ = nnx.scan(
        lambda carry, x, y=2.0: (carry + x * y, None), in_axes=(nnx.Carry, 0, None)
    )(0.0, jnp.arange(3.0))
    assert float(total) == 6.0


@pytest.mark.parametrize("space", [tt, nnx])
def test_a_rule_has_a_tangent_for_defaults(space):
    @space.custom_vjp
    def scaled(x, y=2.0):
        return x * y

    def bwd(kept, g):
        g = g[1] if isinstance(g, tuple) else g
        return 10.0 * g, 20.0 * g

    scaled.defvjp(lambda x, y: (x * y, None), bwd)
    assert float(scaled(3.0)) == 6.0
    assert float(jax.grad(lambda x: scaled(x))(3.0)) == 10.0
    assert float(jax.grad(lambda x: scaled(y=x, x=1.0))(3.0)) == 20.0
