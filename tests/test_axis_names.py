# SPDX-License-Identifier: Apache-2.0
"""transform_metadata: axis names follow a mapped axis in and out."""

import jax
import jax.numpy as jnp
import pytest

import treetap as tt


def named(names, shape=(3, 2)):
    return tt.Param(jnp.ones(shape), out_sharding=names, eager_sharding=False)


def test_names_lose_the_axis_inside_and_regain_it_outside():
    seen = []

    @tt.vmap
    @tt.transform_metadata(partition="layers")
    def run(v):
        seen.append(v.out_sharding)
        v[...] = v * 2
        return v.sum()

    variable = named(("layers", "model"))
    run(variable)
    assert seen == [("model",)]
    assert variable.out_sharding == ("layers", "model")
    assert variable[0, 0] == 2.0


@pytest.mark.parametrize(("axis", "expected"), [(0, ("l", "a")), (1, ("a", "l"))])
def test_new_variables_gain_the_axis(axis, expected):
    @tt.vmap(in_axes=0, out_axes=axis)
    @tt.transform_metadata(out_axes=axis, partition="l")
    def make(x):
        return tt.Param(jnp.ones(2) * x, out_sharding=("a",), eager_sharding=False)

    assert make(jnp.arange(3.0)).out_sharding == expected


def test_short_names_are_padded():
    @jax.vmap
    @tt.transform_metadata(partition="l", in_axes=0, out_axes=2)
    def make(x):
        return tt.Param(jnp.ones(2) * x, out_sharding=(), eager_sharding=False)

    assert make(jnp.arange(3.0)).out_sharding == (None, None, "l")


def test_a_wrong_name_is_refused_and_nothing_changed():
    good, bad = named(("layers", "m")), named(("other", "m"))
    run = tt.transform_metadata(lambda a, b: None, partition="layers")
    message = "expected 'layers' at axis 0 of out_sharding .*found 'other'"
    with pytest.raises(tt.MetadataError, match=message):
        run(good, bad)
    assert good.out_sharding == ("layers", "m")


def test_variables_without_names_and_axes_none_are_left_alone():
    plain, fixed = tt.Param(jnp.ones(3)), named(("a", "b"))

    @tt.transform_metadata(in_axes=(0, None), partition="l")
    def run(plain, fixed):
        return fixed.out_sharding

    assert run(plain, fixed) == ("a", "b")
    assert not plain.has_metadata("out_sharding")


def test_hooks_are_called_once_each():
    calls = []

    class Watched(tt.Param):
        def add_axis(self, axis_index, axis_name):
            calls.append(("add", axis_index, axis_name))

        def remove_axis(self, axis_index, axis_name):
            calls.append(("remove", axis_index, axis_name))

    tt.transform_metadata(lambda v: None, partition="l")(Watched(jnp.ones(3)))
    assert calls == [("remove", 0, "l"), ("add", 0, "l")]
