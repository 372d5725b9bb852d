# SPDX-License-Identifier: Apache-2.0
"""jit: donation, compiled stages, and options that name arguments."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import treetap as tt
from modes import ALL_MODES
from treetap import nnx


class Model(tt.Module):
    def __init__(self, w=3.0):
        self.w = tt.Param(jnp.array(w))
        self.calls = tt.Variable(jnp.array(0))
        self.kind = "plain"

    def square(self):
        return self.w * self.w


def square(model):
    return model.w * model.w


def count(model):
    model.calls[...] += 1


def one_device_mesh():
    return jax.make_mesh((1,), ("a",), (jax.sharding.AxisType.Auto,))


@ALL_MODES
@pytest.mark.parametrize("option", [{"donate_argnames": "m"}, {"donate_argnums": 0}])
@pytest.mark.parametrize("by_name", [False, True])
def test_donated_variables_hold_live_buffers(mode, option, by_name):
    def double(m, x):
        return m.w * x

    model = Model()
    f = tt.jit(double, **mode, **option)
    out = f(m=model, x=2.0) if by_name else f(model, 2.0)
    assert (float(out), float(model.w), int(model.calls)) == (6.0, 3.0, 0)


@ALL_MODES
def test_donated_variables_that_change_are_written(mode):
    model = Model()
    given = model.calls[...]
    f = tt.jit(count, donate_argnames="model", **mode)
    f(model=model)
    f(model)
    assert given.is_deleted()
    assert (int(model.calls), float(model.w)) == (2, 3.0)


@ALL_MODES
def test_a_compiled_stage_tells_its_arguments(mode):
    compiled = tt.jit(square, **mode).lower(Model()).compile()
    leaves = jax.tree.leaves(compiled.args_info)
    assert {leaf.shape for leaf in leaves} == {()}
    assert len(leaves) == 2


@ALL_MODES
def test_shardings_and_specifications_may_be_lists(mode):
    mesh = one_device_mesh()
    spec, x = PartitionSpec("a"), jnp.arange(2.0)
    whole = NamedSharding(mesh, spec)
    f = tt.jit(lambda a, b: a + b, in_shardings=[whole, whole], **mode)
    assert f(x, x).tolist() == [0.0, 2.0]
    g = tt.shard_map(
        lambda a, b: a + b,
        mesh=mesh,
        in_specs=[spec, spec],
        out_specs=spec,
        **mode,
    )
    assert g(x, x).tolist() == [0.0, 2.0]


@ALL_MODES
def test_the_first_argument_may_be_static_beside_shardings(mode):
    sharding = NamedSharding(one_device_mesh(), PartitionSpec("a"))
    f = tt.jit(
        lambda power, x: x**power,
        in_shardings=(sharding,),
        static_argnums=0,
        **mode,
    )
    assert f(2, jnp.arange(2.0) + 1).tolist() == [1.0, 4.0]


@ALL_MODES
def test_a_compiled_stage_refuses_arguments_it_was_not_compiled_for(mode):
    def scaled(v):
        return v[...] * v.get_metadata("factor")

    lowered = tt.jit(scaled, **mode).lower(tt.Param(1.0, factor=2))
    compiled = lowered.compile()
    assert float(compiled(tt.Param(3.0, factor=2))) == 6.0
    for other in (tt.Param(3.0, factor=5), tt.BatchStat(3.0, factor=2)):
        with pytest.raises((TypeError, ValueError)):
            compiled(other)


@ALL_MODES
def test_a_compiled_stage_refuses_another_static_argument(mode):
    f = tt.jit(lambda x, n: x * n, static_argnums=1, **mode)
    compiled = f.lower(1.0, 2).compile()
    with pytest.raises((TypeError, ValueError)):
        compiled(1.0, 5)


def test_an_unknown_option_is_refused_when_the_function_is_made():
    with pytest.raises(
        TypeError, match=r"option 'donate'. Did you mean 'donate_argnums'"
    ):
        tt.jit(lambda x: x, donate=0)


def test_eval_shape_gives_what_the_function_left_alone_as_shapes_too():
    model = tt.Dict(w=tt.Param(jnp.ones(3)), b=tt.Param(jnp.zeros(2)))

    def written(model):
        model.w[...] += 1
        return model

    shapes = tt.jit(written, graph=True, graph_updates=True).eval_shape(model)
    values = [v.get_raw_value() for _, v in tt.to_flat_state(tt.state(shapes))]
    assert [(type(x), x.shape) for x in values] == [
        (jax.ShapeDtypeStruct, (2,)),
        (jax.ShapeDtypeStruct, (3,)),
    ]
    assert model.w[...].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("wrap", [nnx.jit, nnx.remat], ids=["jit", "remat"])
def test_a_ref_that_is_returned_is_the_one_that_was_given(wrap):
    one, two = jax.new_ref(jnp.array(1.0)), jax.new_ref(jnp.array(5.0))

    @wrap
    def grow(one, two, x):
        one[...] += x
        return {"b": two, "a": (one, x * 2)}

    for _ in range(2):
        out = grow(one, two, jnp.array(3.0))
        assert out["b"] is two
        assert out["a"][0] is one
        assert float(out["a"][1]) == 6.0
    assert float(one[...]) == 7.0


def test_a_ref_in_an_object_is_returned_as_it_is():
    held = tt.Dict(ref=jax.new_ref(jnp.array(1.0)))
    assert nnx.jit(lambda held: held.ref)(held) is held.ref
