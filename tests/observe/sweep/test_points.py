# SPDX-License-Identifier: Apache-2.0
"""Points: identities that say where they are, under every transform but derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from treetap._observe.sweep.points import Unsuited, point

X = jnp.arange(6.0).reshape(2, 3)


def params_of(fn, *args):
    eqns = jax.make_jaxpr(fn)(*args).eqns
    return [eqn.params for eqn in eqns if eqn.primitive.name == "patch_point"]


def test_a_point_is_an_identity():
    for fn in (point, jax.jit(point, static_argnums=1)):
        np.testing.assert_array_equal(fn(X, 3), X)
    (params,) = params_of(lambda x: point(x, 3), X)
    assert (params["site"], params["mappings"], params["turns"]) == (3, 0, ())


@pytest.mark.parametrize("axis", [0, 1])
def test_a_mapping_is_an_axis_in_front(axis):
    mapped = jax.vmap(jax.vmap(lambda x: point(x, 0)), axis, axis)
    np.testing.assert_array_equal(mapped(X), X)
    (params,) = params_of(mapped, X)
    assert params["mappings"] == 2


@pytest.mark.parametrize("derived", [jax.grad, jax.jacfwd])
def test_a_derivative_of_a_point_is_refused(derived):
    with pytest.raises(Unsuited, match=r"^a site is differentiated"):
        derived(lambda x: point(x, 0) * 2)(1.0)
