# SPDX-License-Identifier: Apache-2.0
"""transform_metadata: axis names follow a mapped axis in and out."""

import functools

import jax
import jax.numpy as jnp
import pytest

import treetap as tt
from modes import SIMPLE_MODES
from treetap import compat, nnx


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


# As an argument of mapping transforms, with graph updates.

NAMES = {nnx.PARTITION_NAME: "layers"}


def test_vmap_moves_names_when_asked():
    seen = []

    @compat.vmap(transform_metadata=NAMES)
    def run(m):
        seen.append(m.w.out_sharding)
        m.w[...] = m.w * 2
        m.made = tt.Param(m.w[...], out_sharding=("model",), eager_sharding=False)
        return tt.Param(m.w[...], out_sharding=("model",), eager_sharding=False)

    model = tt.Dict(w=named(("layers", "model")))
    out = run(model)
    assert seen == [("model",)]
    for variable in (model.w, model.made, out):
        assert variable.out_sharding == ("layers", "model")
        assert variable.shape == (3, 2)
    assert model.w[0, 0] == 2.0


def test_names_follow_the_axis_of_each_kind():
    seen = []

    @compat.vmap(
        in_axes=(nnx.StateAxes({nnx.Param: 1, ...: None}),), transform_metadata=NAMES
    )
    def run(m):
        seen.append((m.w.out_sharding, m.n.out_sharding))
        return m.w * 1

    n = tt.BatchStat(jnp.ones(2), out_sharding=("model",), eager_sharding=False)
    model = tt.Dict(w=named(("model", "layers")), n=n)
    run(model)
    assert seen == [(("model",), ("model",))]
    assert model.w.out_sharding == ("model", "layers")
    assert n.out_sharding == ("model",)


def test_scan_moves_names_when_asked():
    seen = []

    @compat.scan(transform_metadata=NAMES)
    def run(total, m):
        seen.append(m.w.out_sharding)
        m.w[...] = m.w * 2
        return total + m.w.sum(), tt.Param(
            m.w[...], out_sharding=("model",), eager_sharding=False
        )

    model = tt.Dict(w=named(("layers", "model")))
    total, stacked = run(jnp.array(0.0), model)
    assert set(seen) == {("model",)}
    assert model.w.out_sharding == stacked.out_sharding == ("layers", "model")
    assert float(total) == 12.0


@pytest.mark.skipif(len(jax.devices()) < 3, reason="needs three devices")
def test_pmap_moves_names_when_asked():
    seen = []

    @compat.pmap(transform_metadata=NAMES)
    def run(m):
        seen.append(m.w.out_sharding)
        m.w[...] = m.w * 2

    model = tt.Dict(w=named(("layers", "model")))
    run(model)
    assert set(seen) == {("model",)}
    assert model.w.out_sharding == ("layers", "model")


def test_other_metadata_may_name_the_axis_too():
    seen = []

    @compat.vmap(transform_metadata={**NAMES, "roles": "stack"})
    def run(v):
        seen.append((v.out_sharding, v.get_metadata("roles")))

    v = named(("layers", "model"))
    v.set_metadata(roles=("stack", "inner"))
    run(v)
    assert seen == [(("model",), ("inner",))]
    assert v.out_sharding == ("layers", "model")
    assert v.get_metadata("roles") == ("stack", "inner")


def test_a_wrong_name_is_refused_by_the_mapping_too():
    variable = named(("other", "model"))
    mapped = compat.vmap(lambda v: None, transform_metadata=NAMES)
    with pytest.raises(ValueError, match=r"'layers' .*found 'other'"):
        mapped(variable)
    assert variable.out_sharding == ("other", "model")
    assert variable[0, 0] == 1.0


@SIMPLE_MODES
@pytest.mark.parametrize("transform", [tt.vmap, tt.scan, tt.pmap])
def test_the_argument_needs_graph_updates(transform, mode):
    with pytest.raises(ValueError, match="`transform_metadata=` needs graph updates"):
        transform(lambda v: v, transform_metadata=NAMES, **mode)


@SIMPLE_MODES
def test_transform_metadata_takes_a_prefix_for_each_variable(mode):
    mesh = jax.make_mesh((1,), ("layers",), (jax.sharding.AxisType.Auto,))
    make = lambda x: tt.Param(x, out_sharding=("layers",), mesh=mesh)
    model = tt.Dict(w=make(jnp.arange(2.0)), n=tt.Variable(jnp.array(0)))
    axes = tt.prefix(model, {tt.Param: 0, ...: None}, graph=mode["graph"])
    seen = []

    def step(model):
        seen.append(model.w.get_metadata("out_sharding"))
        model.w[...] *= 2
        return model.w * 1

    inner = tt.transform_metadata(
        step, in_axes=(axes,), out_axes=0, partition="layers", graph=mode["graph"]
    )
    out = tt.vmap(inner, in_axes=(axes,), **mode)(model)
    assert out.tolist() == [0.0, 2.0]
    assert seen[0] == ()
    assert model.w.get_metadata("out_sharding") == ("layers",)
    assert model.w[...].tolist() == [0.0, 2.0]


@SIMPLE_MODES
def test_transform_metadata_changes_nothing_when_it_refuses(mode):
    mesh = jax.make_mesh((1,), ("layers",), (jax.sharding.AxisType.Auto,))
    fits = tt.Param(jnp.zeros(2), out_sharding=("layers",), mesh=mesh)
    other = tt.Param(jnp.zeros(2), out_sharding=(None,), mesh=mesh)
    f = tt.transform_metadata(
        lambda a, b: None, partition="layers", graph=mode["graph"]
    )
    with pytest.raises(ValueError, match="layers"):
        f(fits, other)
    assert fits.get_metadata("out_sharding") == ("layers",)
    assert other.get_metadata("out_sharding") == (None,)


def test_after_an_error_variables_are_as_they_were():
    variable, other = named(("x", None), (2, 3)), tt.Variable(jnp.zeros(2))
    before = variable.get_metadata(), variable.get_value()

    @functools.partial(tt.transform_metadata, partition="x", in_axes=(0, None))
    def fails(variable, other):
        assert variable.out_sharding == (None,)
        variable.set_metadata(note=1)
        variable[...] *= 2
        other[...] += 1
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        fails(variable, other)
    assert variable.get_metadata() == before[0]
    assert variable.get_value() is before[1]
    assert other[...].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("namespace", [tt, nnx])
def test_an_argument_is_not_returned(namespace):
    variable = named(("x", None), (2, 3))
    same = namespace.transform_metadata(lambda v: {"again": v}, partition="x")
    text = "transform_metadata: Duplicate Param found at paths args/0 and out/again"
    with pytest.raises(tt.AliasError, match=text):
        same(variable)
    assert variable.out_sharding == ("x", None)


def test_a_new_variable_is_returned_once_in_tree_mode():
    def twice(x):
        new = tt.Param(x, out_sharding=(None,), eager_sharding=False)
        return new, new

    with pytest.raises(tt.AliasError, match="found at paths out/0 and out/1"):
        tt.transform_metadata(twice, partition="x")(jnp.ones(3))
    one, two = nnx.transform_metadata(twice, partition="x")(jnp.ones(3))
    assert one is two
    assert one.out_sharding == ("x", None)
