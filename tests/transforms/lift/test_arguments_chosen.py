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
def test_statics_that_change_in_place_are_compared_by_value(is_by_name):
    traces = []

    @functools.partial(tt.jit, static_argnames="y")
    def step(x, y):
        traces.append(list(y))
        return x * sum(y)

    given = [1]
    for _ in range(3):
        for _ in range(2):
            out = step(2.0, y=given) if is_by_name else step(2.0, given)
            assert float(out) == 2.0 * sum(given)
        given.append(len(given))
    assert traces == [[1], [1, 1], [1, 1, 2]]
    step(2.0, y=[1, True])  # equal to [1, 1], and not the same
    assert traces[3:] == [[1, True]]


@pytest.mark.parametrize("how", [tt.remat, tt.make_jaxpr])
def test_every_transform_says_its_name(how):
    name = how.__name__
    with pytest.raises(ValueError, match=f"{name}: static arguments: there is no"):
        functools.partial(how, add, static_argnums=5)()
