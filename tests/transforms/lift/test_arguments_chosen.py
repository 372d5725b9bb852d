# SPDX-License-Identifier: Apache-2.0
"""Arguments chosen by number and by name: what is not there is refused."""

import functools

import jax.numpy as jnp
import pytest

import treetap as tt


def add(x, y, *, scale=1):
    return scale * (x + y)


@pytest.mark.parametrize(
    ("option", "said"), [("static", "static"), ("donate", "donated")]
)
def test_arguments_that_are_not_there_are_refused(option, said):
    def choose(by, given):
        return tt.jit(add, **{f"{option}_{by}": given})

    with pytest.raises(ValueError, match=f"jit: {said} arguments: there is") as failure:
        choose("argnames", ("x", "z"))
    found = str(failure.value)
    assert found.endswith("no argument 'z'. The function takes x, y, scale.")
    with pytest.raises(ValueError, match=r"no argument number 2\. .* has 2 positional"):
        choose("argnums", 2)
    with pytest.raises(ValueError, match=r"no argument number -3\."):
        choose("argnums", -3)


def test_functions_that_take_anything_take_any_name_and_number():
    def total(*args, **kwargs):
        return sum(args) + sum(kwargs.values())

    step = tt.jit(total, static_argnames="shift", static_argnums=1)
    assert step(jnp.ones(()), 2, shift=3) == 6.0


@pytest.mark.parametrize("is_by_name", [False, True])
def test_statics_that_cannot_be_hashed_are_refused(is_by_name):
    step = tt.jit(add, static_argnames="y")
    with pytest.raises(ValueError, match=r"jit: static arguments: .* is a list, which"):
        step(jnp.ones(2), y=[1]) if is_by_name else step(jnp.ones(2), [1])


@pytest.mark.parametrize("how", [tt.remat, tt.make_jaxpr])
def test_every_transform_says_its_name(how):
    name = how.__name__
    with pytest.raises(ValueError, match=f"{name}: static arguments: there is no"):
        functools.partial(how, add, static_argnums=5)()
