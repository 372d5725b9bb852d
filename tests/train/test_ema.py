# SPDX-License-Identifier: Apache-2.0
"""Moving averages: what is tracked, how it moves, and what is refused."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import treetap as tt
from meshes import mesh_of
from modes import ALL_MODES, GRAPH

DECAY = 0.75


class Model(tt.Module):
    def __init__(self):
        self.w = tt.Param(jnp.array([1.0, 2.0]), role="weight")
        self.inner = tt.Dict(b=tt.Param(jnp.array(3.0)))
        self.mean = tt.BatchStat(jnp.array([5.0, 6.0]))
        self.calls = tt.Variable(jnp.array(7))
        self.rngs = tt.Rngs(0)
        self.mask = jnp.array([True, False])
        self.name = "model"


def moved(model, by=4.0):
    model.w[...] += by
    model.inner.b[...] += by
    model.mean[...] += by
    model.calls[...] += 1
    model.rngs()
    return model


def test_what_is_averaged_by_default():
    model = Model()
    ema = tt.EMA(model, DECAY)
    assert tt.to_flat_state(ema.params).paths == (("inner", "b"), ("mean",), ("w",))
    assert type(ema.params.mean) is tt.BatchStat
    assert ema.params.w.role == "weight"
    assert ema.params.w is not model.w
    pointers = {v[...].unsafe_buffer_pointer() for v in (ema.params.w, model.w)}
    assert len(pointers) == 2
    assert tt.to_flat_state(tt.state(ema)).paths[0] == ("params", "inner", "b")
    assert ema.decay == DECAY
    assert ema.only is ...


def test_random_state_is_left_out_whatever_it_holds_and_whoever_asks_for_it():
    model = {"w": tt.Param(jnp.ones(1)), "r": tt.RngState(jnp.ones(1))}
    for only in (..., tt.Variable, [tt.Param, tt.RngState]):
        assert list(tt.EMA(model, 0.5, only=only).params) == ["w"]


def test_updates_move_the_averages_in_place():
    model = Model()
    ema = tt.EMA(model, DECAY)
    variable = ema.params.w
    ema.update(moved(model))
    assert ema.params.w is variable
    assert variable[...].tolist() == [2.0, 3.0]
    ema.update(model)
    assert variable[...].tolist() == [2.75, 3.75]
    assert float(ema.params.inner.b) == pytest.approx(3.0 + 1.75)
    assert ema.params.mean[...].tolist() == [6.75, 7.75]
    assert model.w[...].tolist() == [5.0, 6.0]


@pytest.mark.parametrize(("decay", "wanted"), [(0.0, 5.0), (1.0, 1.0), (1, 1.0)])
def test_the_ends_of_decay(decay, wanted):
    model = Model()
    ema = tt.EMA(model, decay)
    ema.update(moved(model))
    assert float(ema.params.w[0]) == wanted


def test_the_averaged_model_has_the_averages_and_the_rest_of_the_model():
    model = Model()
    ema = tt.EMA(model, DECAY, only=tt.Param)
    ema.update(moved(model))
    averaged = ema.apply_to(model)
    assert type(averaged) is Model
    assert averaged is not model
    assert averaged.w is ema.params.w
    assert averaged.inner.b is ema.params.inner.b
    assert averaged.mean is model.mean
    assert averaged.calls is model.calls
    assert averaged.rngs.default.key is model.rngs.default.key
    assert averaged.mask is model.mask
    assert averaged.name == "model"
    assert model.w is not ema.params.w
    assert tt.graphdef(averaged) == tt.graphdef(model)
    averaged.rngs()
    assert int(model.rngs.default.count) == 2


@ALL_MODES
def test_averages_inside_transforms(mode):
    model = Model()
    ema = tt.EMA(model, DECAY)
    traces = []

    @tt.jit(**mode)
    def step(model, ema):
        traces.append(1)
        moved(model, 1.0)
        ema.update(model)
        return ema.apply_to(model).w.sum()

    found = [float(step(model, ema)) for _ in range(3)]
    average, value, wanted = np.array([1.0, 2.0]), np.array([1.0, 2.0]), []
    for _ in range(3):
        value = value + 1.0
        average = DECAY * average + (1 - DECAY) * value
        wanted.append(average.sum())
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    np.testing.assert_allclose(ema.params.w[...], average, rtol=1e-6)
    assert len(traces) == 1
    assert int(model.calls) == 10


def test_averages_in_a_scan():
    model = tt.Dict(w=tt.Param(jnp.array(0.0)))
    ema = tt.EMA(model, 0.5)

    def step(x, model, ema):
        model.w[...] = x
        ema.update(model)
        return ema.params.w[...]

    xs = jnp.array([2.0, 4.0])
    out = tt.scan(step, in_axes=(0, None, None), out_axes=0)(xs, model, ema)
    assert out.tolist() == [1.0, 2.5]
    assert float(ema.params.w) == 2.5


def test_a_state_can_be_averaged_and_given():
    model = Model()
    ema = tt.EMA(tt.state(model, tt.Param), DECAY)
    moved(model)
    ema.update(tt.state(model, tt.Param))
    ema.update(tt.to_pure_dict(tt.state(model, tt.Param)))
    assert ema.params.w[...].tolist() == [2.75, 3.75]
    applied = ema.apply_to(tt.state(model, tt.Param))
    assert type(applied) is tt.State
    assert applied.w is ema.params.w


def test_low_precision_is_averaged_in_float32_and_kept():
    old, new = jax.random.normal(jax.random.key(0), (2, 64), jnp.bfloat16)
    model = {"w": tt.Param(old)}
    ema = tt.EMA(model, 0.9)
    model["w"][...] = new
    ema.update(model)
    wide = 0.9 * old.astype(jnp.float32) + (1 - 0.9) * new.astype(jnp.float32)
    assert ema.params.w.dtype == jnp.bfloat16
    assert ema.params.w[...].tolist() == wide.astype(jnp.bfloat16).tolist()
    narrow = (0.9 * old + (1 - 0.9) * new).astype(jnp.bfloat16)
    assert ema.params.w[...].tolist() != narrow.tolist()  # it does make a difference
    tiny = {"w": tt.Param(jnp.ones(2, jnp.float8_e4m3fn))}
    ema = tt.EMA(tiny, 0.5)
    ema.update(tiny)
    assert ema.params.w.dtype == jnp.float8_e4m3fn


def test_a_wider_average_of_a_narrow_model():
    model = {"w": tt.Param(jnp.array([1.0], jnp.bfloat16))}
    start = {"w": tt.Param(jnp.array([1.0], jnp.float32))}
    ema = tt.EMA(start, 0.999)
    model["w"][...] = jnp.array([2.0], jnp.bfloat16)
    ema.update(model)
    assert ema.params.w.dtype == jnp.float32
    assert float(ema.params.w[0]) == pytest.approx(1.001)
    assert ema.apply_to(model)["w"] is ema.params.w


def test_complex_numbers_containers_and_refs():
    model = {
        "c": tt.Param(jnp.array([1j, 2.0])),
        "d": tt.Param({"x": jnp.zeros(2)}),
        "number": tt.Param(1.0),
        "ref": tt.Param(jnp.zeros(2), ref=True),
    }
    ema = tt.EMA(model, 0.5)
    model["c"][...] = jnp.array([3j, 2.0])
    model["d"]["x"] = jnp.ones(2)
    model["number"][...] = 2.0
    model["ref"][...] = jnp.ones(2)
    ema.update(model)
    assert ema.params.c[...].tolist() == [2j, 2.0]
    assert ema.params.d["x"].tolist() == [0.5, 0.5]
    assert float(ema.params.number) == 1.5
    assert ema.params.ref[...].tolist() == [0.5, 0.5]
    assert model["ref"][...].tolist() == [1.0, 1.0]


def test_shared_variables_in_graph_mode():
    shared = tt.Param(jnp.array(1.0))
    model = tt.Dict(a=shared, b=shared)
    with pytest.raises(tt.AliasError, match="a and b"):
        tt.EMA(model, 0.5)
    ema = tt.EMA(model, 0.5, graph=True)
    shared[...] = 3.0
    tt.jit(lambda model, ema: ema.update(model), **GRAPH)(model, ema)
    averaged = ema.apply_to(model)
    assert averaged.a is averaged.b is ema.params.a
    assert float(averaged.a) == 2.0


def test_averages_are_sharded_as_the_model():
    mesh = mesh_of((8,), ("data",))
    with jax.set_mesh(mesh):
        model = {"w": tt.Param(jnp.zeros((8, 2)), out_sharding=("data", None))}
        ema = tt.EMA(model, 0.5)
        ema.update(model)
    assert ema.params.w.out_sharding == ("data", None)
    wanted = NamedSharding(mesh, PartitionSpec("data"))
    assert ema.params.w[...].sharding.is_equivalent_to(wanted, 2)


def test_an_abstract_model_has_abstract_averages():
    ema = tt.EMA(tt.eval_shape(lambda: {"w": tt.Param(jnp.zeros(2))}), 0.5)
    assert isinstance(ema.params.w.get_raw_value(), jax.ShapeDtypeStruct)


COPIES = {
    "pickle": lambda ema: pickle.loads(pickle.dumps(ema)),
    "clone": tt.clone,
    "deepcopy": copy.deepcopy,
    "split": lambda ema: tt.merge(*tt.split(ema), copy=True),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_go_on_on_their_own(name):
    model = Model()
    ema = tt.EMA(model, DECAY, only=tt.Not(tt.BatchStat))
    other = COPIES[name](ema)
    assert tt.graphdef(other) == tt.graphdef(ema)
    other.update(moved(model))
    assert other.params.w[...].tolist() == [2.0, 3.0]
    assert ema.params.w[...].tolist() == [1.0, 2.0]
    tt.update(ema, tt.state(other))
    assert ema.params.w[...].tolist() == [2.0, 3.0]


def test_averages_made_alike_have_equal_descriptions():
    make = lambda decay: tt.EMA(Model(), decay, only=lambda path, leaf: "w" in path)
    assert tt.graphdef(make(0.5)) == tt.graphdef(make(0.5))
    assert tt.graphdef(make(0.5)) != tt.graphdef(make(0.6))


# What is refused.


@pytest.mark.parametrize("decay", [-0.1, 1.5, float("nan"), float("inf")])
def test_decay_is_between_zero_and_one(decay):
    with pytest.raises(ValueError, match="from 0 to 1"):
        tt.EMA(Model(), decay)


def test_decay_is_no_traced_value():
    with pytest.raises(ValueError, match="from 0 to 1"):
        jax.jit(lambda decay: tt.EMA({"w": tt.Param(1.0)}, decay))(0.5)


def test_bare_arrays_are_named():
    with pytest.raises(TypeError, match=r"EMA: a/0 is a ArrayImpl; only Variables"):
        tt.EMA({"a": [jnp.ones(2)]}, 0.5)
    ema = tt.EMA({"w": tt.Param(jnp.ones(2))}, 0.5)
    with pytest.raises(TypeError, match=r"EMA\.apply_to: w is a ArrayImpl"):
        ema.apply_to({"w": jnp.ones(2)})


def with_param(**more):
    return {"w": tt.Param(jnp.ones(2)), "n": tt.Variable(jnp.array(0)), **more}


OTHERS = {
    "missing": ({"n": tt.Variable(jnp.array(0))}, "missing w"),
    "unexpected": (with_param(v=tt.Param(jnp.ones(1))), "unexpected v"),
    "shape": (with_param(w=tt.Param(jnp.ones(3))), r"w: shape \(3,\), expected \(2,\)"),
    "kind": (with_param(w=tt.Cache(jnp.ones(2))), "w: a Cache, expected a Param"),
    "integers": (with_param(w=tt.Param(jnp.array([1, 2]))), "w: dtype int32, expected"),
    "complex": (with_param(w=tt.Param(1j * jnp.ones(2))), "w: dtype complex64"),
    "container": (
        with_param(w=tt.Param([jnp.ones(2)])),
        "w: a list, expected",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_that_does_not_fit_is_named_and_nothing_changes(name):
    model, match = OTHERS[name]
    ema = tt.EMA(with_param(), 0.5)
    before = ema.params.w[...]
    for call in (ema.update, ema.apply_to):
        with pytest.raises(tt.StructureError, match=match):
            call(model)
    assert ema.params.w[...] is before


def test_nothing_changes_when_only_the_last_does_not_fit():
    ema = tt.EMA({"a": tt.Param(jnp.ones(1)), "b": tt.Param(jnp.ones(1))}, 0.5)
    with pytest.raises(tt.StructureError, match="b: shape"):
        ema.update({"a": tt.Param(jnp.zeros(1)), "b": tt.Param(jnp.zeros(2))})
    assert float(ema.params.a[0]) == 1.0


def test_averages_are_not_changed_from_another_trace():
    model = Model()
    ema = tt.EMA(model, 0.5)
    with pytest.raises(tt.TraceContextError, match="trace level"):
        tt.jit(lambda model: ema.update(model))(model)
    assert ema.params.w[...].tolist() == [1.0, 2.0]


class DroppingModel(tt.Module):
    def __init__(self):
        self.w = tt.Param(jnp.array([1.0, 2.0]))
        self.calls = tt.Variable(jnp.array(0))
        self.noise = tt.Rngs(0).noise.fork()

    def __call__(self, x):
        self.calls[...] += 1
        return (self.w * x * self.noise.bernoulli(0.5, (2,))).sum()


@ALL_MODES
def test_a_model_with_random_state_is_averaged_by_default(mode):
    model = DroppingModel()
    ema = tt.EMA(model, 0.5)

    @tt.jit(**mode)
    def step(model, ema):
        model(jnp.ones(2))
        model.w[...] += 2.0
        ema.update(model)

    step(model, ema)
    averaged = ema.apply_to(model)
    assert ema.params.w[...].tolist() == [2.0, 3.0]
    assert list(ema.params) == ["w"]
    assert averaged.noise.count is model.noise.count
    assert averaged.calls is model.calls
    assert int(model.calls) == 1
