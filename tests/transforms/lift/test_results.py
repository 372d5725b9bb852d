# SPDX-License-Identifier: Apache-2.0
"""Results of transforms that share parts, or lie along different axes."""

import jax
import jax.numpy as jnp
import pytest

import treetap as tt
from modes import ALL_MODES, GRAPH_MODES, SIMPLE_MODES
from treetap import compat, nnx


class Pair(tt.Module):
    def __init__(self, x):
        self.a = tt.Param(x * 1.0)
        self.b = tt.BatchStat(x * 2.0)
        self.plain = tt.data(x * 3.0)
        self.kind = "pair"


def tied(x):
    pair = Pair(x)
    pair.again = pair.a
    return {"one": pair, "two": [pair, pair.b], "x": x}


@GRAPH_MODES
@pytest.mark.parametrize("name", ["jit", "remat", "checkify", "vmap", "scan"])
def test_parts_of_a_result_that_are_one_stay_one(name, mode):
    transforms = {
        "jit": lambda f: tt.jit(f, **mode),
        "remat": lambda f: tt.remat(f, **mode),
        "checkify": lambda f: lambda x: tt.checkify(f, **mode)(x)[1],
        "vmap": lambda f: tt.vmap(f, **mode),
        "scan": lambda f: tt.scan(f, in_axes=0, out_axes=0, **mode),
    }
    found = transforms[name](tied)(jnp.arange(2.0))
    assert found["two"][0] is found["one"]
    assert found["two"][1] is found["one"].b
    assert found["one"].again is found["one"].a
    assert found["one"].b[...].tolist() == [0.0, 2.0]
    assert found["one"].plain.tolist() == [0.0, 3.0]
    assert found["x"].tolist() == [0.0, 1.0]


@GRAPH_MODES
def test_a_result_may_hold_itself(mode):
    def make(x):
        pair = Pair(x)
        pair.me = pair
        return pair

    found = tt.vmap(make, out_axes=0, **mode)(jnp.arange(2.0))
    assert found.me is found
    assert found.a[...].tolist() == [0.0, 1.0]


@ALL_MODES
def test_other_things_in_a_result_keep_their_kind(mode):
    f = tt.jit(lambda x: (None, {"pair": Pair(x)}, [x, ()]), **mode)
    nothing, held, rest = f(jnp.array(1.0))
    assert nothing is None
    assert (type(held["pair"]), held["pair"].kind) == (Pair, "pair")
    assert rest[1] == ()
    assert float(rest[0]) == 1.0


@SIMPLE_MODES
@pytest.mark.parametrize("transform", [tt.vmap, tt.scan])
def test_a_prefix_object_gives_each_variable_of_a_result_its_axis(transform, mode):
    make = lambda x: tt.Dict(a=tt.Param(x), b=tt.BatchStat(x))
    rules = {nnx.Param: 1, ...: 0}
    axes = tt.prefix(make(jnp.zeros(2)), rules, graph=mode["graph"])
    f = transform(make, in_axes=0, out_axes=(axes), **mode)
    made = f(jnp.zeros((3, 2)))
    assert (made.a.shape, made.b.shape) == ((2, 3), (3, 2))


@pytest.mark.parametrize("transform", [compat.vmap, compat.scan])
def test_a_filter_gives_each_leaf_of_a_result_its_axis(transform):
    def make(x):
        return Pair(x), {"again": Pair(x + 1)}, x

    axes = nnx.StateAxes({nnx.Param: 1, ...: 0})
    f = transform(make, in_axes=0, out_axes=(axes, {"again": axes}, 1))
    one, two, x = f(jnp.arange(6.0).reshape(3, 2))
    assert (one.a.shape, one.b.shape, one.plain.shape) == ((2, 3), (3, 2), (3, 2))
    assert two["again"].a[...].tolist() == [[1.0, 3.0, 5.0], [2.0, 4.0, 6.0]]
    assert x.shape == (2, 3)


def test_a_part_shared_in_a_result_must_have_one_axis():
    def make(x):
        v = tt.Param(x)
        return tt.Dict(v=v), tt.Dict(v=v)

    same = nnx.StateAxes({nnx.Param: 1, ...: 0})
    x = jnp.zeros((3, 2))
    one, two = compat.vmap(make, out_axes=(same, 1))(x)
    assert one.v is two.v
    assert one.v.shape == (2, 3)
    with pytest.raises(ValueError, match="Inconsistent aliasing"):
        compat.vmap(make, out_axes=(same, 0))(x)


def test_an_input_in_a_result_must_keep_its_axis():
    model = tt.Dict(w=tt.Param(jnp.zeros((3, 2))))
    same = lambda m: m
    assert compat.vmap(same, in_axes=1, out_axes=1)(model) is model
    assert model.w.shape == (3, 2)
    with pytest.raises(ValueError, match="Inconsistent aliasing"):
        compat.vmap(same, in_axes=1, out_axes=0)(model)
    assert model.w.shape == (3, 2)


@ALL_MODES
def test_results_of_branches_may_be_new_objects(mode):
    make = lambda factor: lambda x: Pair(x * factor)
    f = jax.jit(lambda i, x: tt.switch(i, [make(1.0), make(10.0)], x, **mode))
    assert float(f(1, jnp.array(2.0)).b) == 40.0
    assert float(f(0, jnp.array(2.0)).b) == 4.0


@GRAPH_MODES
def test_the_derivative_of_a_result_that_is_packed(mode):
    def f(x):
        v = tt.Param(x * 2)
        return {"one": v, "two": v}

    out, slope = tt.jvp(f, (jnp.array(3.0),), (jnp.array(1.0),), **mode)
    assert out["one"] is out["two"]
    assert slope["one"] is slope["two"]
    assert (float(out["one"]), float(slope["one"])) == (6.0, 2.0)
    out, pull = tt.vjp(lambda x: tt.Param(x * 2), jnp.array(3.0), **mode)
    (found,) = pull(tt.Param(jnp.array(1.0)))
    assert (float(out), float(found)) == (6.0, 2.0)


@ALL_MODES
def test_the_cotangent_of_a_result_is_like_the_result(mode):
    model = tt.Dict(w=tt.Param(jnp.array(3.0)))
    make = lambda m: {"made": tt.Dict(v=tt.Param(m.w * 2))}
    out, pull = tt.vjp(make, model, **mode)
    assert float(out["made"].v) == 6.0
    (found,) = pull({"made": tt.Dict(v=tt.Param(jnp.array(5.0)))})
    assert float(found.w) == 10.0


@GRAPH_MODES
def test_the_cotangent_of_a_result_that_shares_parts(mode):
    def f(x):
        v = tt.Param(x * 2)
        return {"one": v, "two": v}

    _, pull = tt.vjp(f, jnp.array(3.0), **mode)
    cotangent = tt.Param(jnp.array(5.0))
    (found,) = pull({"one": cotangent, "two": cotangent})
    assert float(found) == 10.0


def test_a_cotangent_with_other_leaves_is_refused():
    _, pull = tt.vjp(tied, 1.0, graph=True)
    with pytest.raises(tt.StructureError, match="has 0 leaves, the part has 3"):
        pull({"one": tt.Dict(), "two": [tt.Dict(), tt.Dict()], "x": 1.0})


METADATA_CASES = {
    "jit": lambda f, v, mode: tt.jit(f, **mode)(v),
    "remat": lambda f, v, mode: tt.remat(f, **mode)(v),
    "grad": lambda f, v, mode: tt.grad(f, **mode)(v),
    "vmap": lambda f, v, mode: tt.vmap(f, in_axes=None, axis_size=2, **mode)(v),
    "cond": lambda f, v, mode: tt.cond(True, f, f, v, **mode),
    "checkify": lambda f, v, mode: tt.checkify(f, **mode)(v),
}


@ALL_MODES
@pytest.mark.parametrize("name", METADATA_CASES)
def test_changed_metadata_arrive(mode, name):
    def mark(v):
        v.set_metadata(foo=1)
        return v[...] * 2

    v = tt.Variable(jnp.array(2.0))
    METADATA_CASES[name](mark, v, mode)
    assert v.get_metadata("foo") == 1
    assert float(v) == 2.0


@ALL_MODES
@pytest.mark.parametrize("name", METADATA_CASES)
def test_a_python_number_nobody_changed_stays_one(mode, name):
    v = tt.Variable(2.0)
    METADATA_CASES[name](lambda v: v[...] * 3, v, mode)
    assert type(v.get_raw_value()) is float
    assert v.get_raw_value() == 2.0
