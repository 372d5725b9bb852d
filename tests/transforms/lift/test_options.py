# SPDX-License-Identifier: Apache-2.0
"""Options that a transform does not have: an error, never silence."""

import jax.numpy as jnp
import pytest

import treetap as tt
from treetap import nnx

ONE = jnp.ones(())


def same(*args):
    return args[0]


CALLS = {
    "vmap": lambda ns, **options: ns.vmap(same, **options),
    "pmap": lambda ns, **options: ns.pmap(same, **options),
    "scan": lambda ns, **options: ns.scan(same, **options),
    "grad": lambda ns, **options: ns.grad(same, **options),
    "value_and_grad": lambda ns, **options: ns.value_and_grad(same, **options),
    "jit": lambda ns, **options: ns.jit(same, **options),
    "jit_partial": lambda ns, **options: ns.jit_partial(same, **options),
    "remat": lambda ns, **options: ns.remat(same, **options),
    "custom_vjp": lambda ns, **options: ns.custom_vjp(same, **options),
    "checkify": lambda ns, **options: ns.checkify(same, **options),
    "vjp": lambda ns, **options: ns.vjp(same, ONE, **options),
    "jvp": lambda ns, **options: ns.jvp(same, (ONE,), (ONE,), **options),
    "cond": lambda ns, **options: ns.cond(True, same, same, ONE, **options),
    "switch": lambda ns, **options: ns.switch(0, [same], ONE, **options),
    "while_loop": lambda ns, **options: ns.while_loop(jnp.any, same, ONE, **options),
    "fori_loop": lambda ns, **options: ns.fori_loop(
        0, 1, lambda i, x: x, ONE, **options
    ),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("ns", [tt, nnx], ids=["treetap", "nnx"])
def test_an_option_that_there_is_not_is_refused(name, ns):
    message = rf"{name}: there is no option 'nonsense'\. There are .*graph_updates"
    with pytest.raises(TypeError, match=message):
        CALLS[name](ns, nonsense=3)


@pytest.mark.parametrize(
    ("name", "given", "meant"),
    [
        ("vmap", "in_axis", "in_axes"),
        ("grad", "argnum", "argnums"),
        ("value_and_grad", "has_auxx", "has_aux"),
        ("jit", "static_argnum", "static_argnums"),
        ("cond", "graph_update", "graph_updates"),
    ],
)
def test_the_option_that_was_meant_is_named(name, given, meant):
    with pytest.raises(TypeError, match=f"'{given}'. Did you mean '{meant}'"):
        CALLS[name](tt, **{given: 1})


def test_a_decorator_refuses_it_too():
    with pytest.raises(TypeError, match="Did you mean 'in_axes'"):
        tt.vmap(in_axis=0)
