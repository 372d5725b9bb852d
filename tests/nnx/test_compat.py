# SPDX-License-Identifier: Apache-2.0
"""compat: graph mode and graph updates, whatever the settings say."""

import functools

import jax.numpy as jnp
import pytest

import treetap as tt
from treetap import compat

# Every name that NNX's compat has, but for `get_abstract_model`.
NAMES = """
    backup_keys cached_partial checkify clone cond custom_vjp eval_shape flatten
    fori_loop fork_rngs grad graphdef iter_children iter_graph iter_modules jit jvp pmap
    recursive_map remat reseed scan shard_map split split_rngs state switch
    value_and_grad view view_info vjp vmap while_loop
"""


@pytest.mark.parametrize("name", sorted(set(NAMES.split())))
def test_every_name_is_there(name):
    assert callable(getattr(compat, name))


class Tied(tt.Module):
    def __init__(self):
        self.a = tt.Param(jnp.ones(2))
        self.b = self.a
        self.rngs = tt.Rngs(0)
        self.again = self.rngs


LOOKS = {
    "split": lambda f, m, **mode: f(m, **mode),
    "state": lambda f, m, **mode: f(m, **mode),
    "clone": lambda f, m, **mode: f(m, **mode),
    "graphdef": lambda f, m, **mode: f(m, **mode),
    "flatten": lambda f, m, **mode: f(m, **mode),
    "iter_graph": lambda f, m, **mode: list(f(m, **mode)),
    "iter_modules": lambda f, m, **mode: list(f(m, **mode)),
    "recursive_map": lambda f, m, **mode: f(lambda path, x: x, m, **mode),
    "view": lambda f, m, **mode: f(m, **mode),
    "view_info": lambda f, m, **mode: f(m, **mode),
    "reseed": lambda f, m, **mode: f(m, default=1, **mode),
    "backup_keys": lambda f, m, **mode: f(m, **mode),
}


@pytest.mark.parametrize("name", LOOKS)
def test_functions_keep_shared_references_and_a_keyword_wins(name):
    f = getattr(compat, name)
    with tt.set_graph_mode(False):
        LOOKS[name](f, Tied())
    with pytest.raises(tt.AliasError):
        LOOKS[name](f, Tied(), graph=False)


def grow(m):
    m.note = "new"
    return jnp.sum(m.a[...])


CALLS = {
    "jit": lambda f, m: f(grow)(m),
    "remat": lambda f, m: f(grow)(m),
    "grad": lambda f, m: f(grow)(m),
    "value_and_grad": lambda f, m: f(grow)(m),
    "checkify": lambda f, m: f(grow)(m),
    "vjp": lambda f, m: f(grow, m),
    "jvp": lambda f, m: f(grow, (m,), (compat.clone(m),)),
    "vmap": lambda f, m: f(grow, in_axes=None, axis_size=2)(m),
    "cond": lambda f, m: f(True, grow, grow, m),
    "switch": lambda f, m: f(0, [grow, grow], m),
    "scan": lambda f, m: f(lambda m, x: (grow(m), x)[1], in_axes=(None, 0), out_axes=0)(
        m, jnp.arange(2.0)
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_transforms_carry_structure_out_whatever_the_settings(name):
    model = Tied()
    with tt.set_graph_mode(False), tt.set_graph_updates(False):
        CALLS[name](getattr(compat, name), model)
    assert model.note == "new"
    assert model.b is model.a


def test_a_keyword_still_chooses_another_mode():
    with pytest.raises(tt.AliasError):
        compat.jit(grow, graph=False)(Tied())
    model = Tied()
    compat.jit(grow, graph_updates=False, on_structure_change="ignore")(model)
    assert not hasattr(model, "note")


def test_transforms_with_options_are_decorators():
    @compat.jit(static_argnames="power")
    @compat.grad(argnums=1)
    def f(m, x, power=2):
        grow(m)
        return x**power

    model = Tied()
    assert float(f(model, 3.0)) == 6.0
    assert model.note == "new"


@pytest.mark.parametrize("name", ["while_loop", "fori_loop"])
def test_loops_take_repeated_objects(name):
    def double(pair):
        pair[0].a[...] = pair[1].b * 2
        return pair

    loops = {
        "while_loop": lambda pair: compat.while_loop(
            lambda pair: pair[0].a[0] < 8, double, pair
        ),
        "fori_loop": lambda pair: compat.fori_loop(
            0, 3, lambda i, pair: double(pair), pair
        ),
    }
    model = Tied()
    one, two = loops[name]((model, model))
    assert one is model
    assert two is model
    assert model.a[...].tolist() == [8.0, 8.0]


def test_streams_are_split_and_forked_in_place():
    rngs = tt.Rngs(0)
    backups = compat.split_rngs(rngs, splits=3)
    assert rngs.default.key.shape == (3,)
    assert len(list(backups)) == 1
    compat.fork_rngs(tt.Rngs(1))
    shape = functools.partial(tt.split_rngs, splits=2)(tt.Rngs(0)).default.key.shape
    assert shape == (2,)
