# SPDX-License-Identifier: Apache-2.0
"""Packed calls: the same numbers as unpacked ones, whatever is done between them."""

import copy
import functools
import gc
import pickle
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import treetap as tt
from meshes import mesh_of
from treetap._core.variables import packed_values
from treetap._core.variables.variable import own_box, pack_of
from treetap._transforms.lift import call_cache


class Layer(tt.Module):
    def __init__(self, size=3):
        self.w = tt.Param(jnp.full((size, 2), 1.0))
        self.b = tt.Param(jnp.zeros(2))


class Model(tt.Module):
    """Small and large Variables of many kinds."""

    def __init__(self):
        self.layers = tt.List([Layer(n + 1) for n in range(4)])
        self.large = tt.Param(jnp.ones((64, 64)))
        self.flags = tt.Variable(jnp.array([True, False]))
        self.other = tt.Variable(jnp.array([False, True]))
        self.half = tt.Variable(jnp.ones(3, jnp.bfloat16))
        self.halves = tt.Variable(jnp.ones((), jnp.bfloat16))
        self.number = tt.Variable(2.5)
        self.weak = tt.Variable(jnp.asarray(1.5))
        self.key = tt.RngKey(jax.random.key(7))
        self.host = tt.Variable(np.ones(2, np.float32))
        self.count = tt.Variable(jnp.zeros((), jnp.int32))
        self.total = tt.Variable(jnp.zeros((), jnp.int32))
        self.empty = tt.Variable(jnp.zeros((0, 3)))


def step(model, x):
    for layer in model.layers:
        layer.w[...] += x
        layer.b[...] -= 1
    model.flags[...] = ~model.flags[...]
    model.half[...] = model.half[...] * 2
    model.count[...] += 1
    model.large[...] += x
    key, use = jax.random.split(model.key[...])
    model.key[...] = key
    return jax.random.normal(use) + model.layers[0].w.sum() + model.number[...]


def values_of(model):
    return [
        jax.random.key_data(x)
        if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
        else x
        for x in jax.tree.leaves(model)
    ]


def assert_equal(one, two):
    for left, right in zip(values_of(one), values_of(two), strict=True):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))
        assert jnp.result_type(left) == jnp.result_type(right)
        assert type(left) is type(right)
        assert getattr(left, "weak_type", None) == getattr(right, "weak_type", None)


def is_packed(variable):
    return pack_of(variable) is not None and own_box(variable) is None


def pair(**options):
    plain, packed = (tt.jit(step, pack=pack, **options) for pack in (False, True))
    return plain, packed, Model(), Model()


def called(times, plain, packed, one, two):
    for number in range(times):
        left, right = plain(one, float(number)), packed(two, float(number))
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("options", [{}, {"donate_argnums": 0}], ids=["", "donated"])
def test_packed_calls_give_the_same_numbers(options):
    plain, packed, one, two = pair(**options)
    called(6, plain, packed, one, two)
    assert is_packed(two.layers[0].w)
    assert is_packed(two.flags)
    assert not is_packed(two.large)
    assert not is_packed(two.key)
    assert_equal(one, two)


def test_values_are_current_whenever_they_are_read():
    plain, packed, one, two = pair()
    for number in range(6):
        called(1, plain, packed, one, two)
        if number % 2:
            assert int(two.count) == int(one.count) == number + 1
            assert two.layers[2].w[0, 0] == one.layers[2].w[0, 0]
        if number == 3:
            assert_equal(one, two)
        assert_equal(tt.clone(one), tt.clone(two)) if number == 4 else None
    assert_equal(one, two)


def test_a_value_that_was_read_stays_what_it_was():
    _, packed, _, model = pair(donate_argnums=0)
    for _ in range(3):
        packed(model, 1.0)
    before = model.layers[0].w[...]
    kept = np.asarray(before)
    packed(model, 1.0)
    np.testing.assert_array_equal(before, kept)


@pytest.mark.parametrize("how", ["item", "raw", "update", "several", "all"])
def test_writes_between_calls_are_seen(how):
    plain, packed, one, two = pair()
    called(3, plain, packed, one, two)
    for model in (one, two):
        if how == "item":
            model.layers[1].b[0] = 7.0
        elif how == "raw":
            model.layers[1].b.set_raw_value(jnp.full(2, 8.0))
        elif how == "update":
            tt.update(model, {"layers": {2: {"b": jnp.full(2, 9.0)}}})
        elif how == "several":
            model.layers[0].w[...] = 3.0
            model.flags[...] = jnp.array([True, True])
            model.half[...] = 0.5
        else:
            tt.update(model, jax.tree.map(lambda x: x, tt.state(Model())))
    called(3, plain, packed, one, two)
    assert is_packed(two.layers[3].w)
    assert_equal(one, two)


@pytest.mark.parametrize(
    "value", [np.zeros((5, 2), np.float32), jnp.zeros((5, 2)), 3.0]
)
def test_values_of_another_sort_are_taken_as_they_are(value):
    plain, packed, one, two = pair()
    called(3, plain, packed, one, two)
    for model in (one, two):
        model.layers[1].b.set_raw_value(value)

    def fits(model, x):
        return model.layers[1].b[...] * x

    called(3, tt.jit(fits), tt.jit(fits, pack=True), one, two)
    called(1, tt.jit(fits), tt.jit(fits, pack=True), one, two)
    assert_equal(one, two)


def test_values_that_change_shape_inside_leave_the_pack():
    def grow(model):
        model.layers[0].b.set_value(jnp.concatenate([model.layers[0].b[...]] * 2))
        model.count[...] += 1

    one, two = Model(), Model()
    plain, packed = tt.jit(grow), tt.jit(grow, pack=True)
    for _ in range(5):
        plain(one), packed(two)
    assert two.layers[0].b.shape == (64,)
    assert_equal(one, two)


def test_metadata_changed_inside_goes_the_usual_way():
    def mark(model):
        model.count[...] += 1
        model.layers[0].w.set_metadata(seen=True)

    model, packed = Model(), tt.jit(mark, pack=True)
    for _ in range(4):
        packed(model)
    assert model.layers[0].w.get_metadata("seen")
    assert int(model.count) == 4


def test_programs_share_the_packs_of_a_model():
    traces = []

    def loss(model, x):
        traces.append("loss")
        return model.layers[0].w.sum() * x

    run, check = tt.jit(step, pack=True), tt.jit(loss, pack=True)
    model = Model()
    for _ in range(4):
        run(model, 1.0), check(model, 1.0)
    pack = pack_of(model.layers[0].w)
    for _ in range(3):
        run(model, 1.0), check(model, 1.0)
        assert is_packed(model.layers[0].w)
    assert pack_of(model.layers[0].w) is pack
    assert traces == ["loss", "loss"]  # once each way


def test_a_part_of_a_packed_model_can_be_packed_by_itself():
    def add(layer):
        layer.w[...] += 1
        layer.b[...] += 1

    one, two = Model(), Model()
    plain, packed, one_part, two_part = (
        tt.jit(step),
        tt.jit(step, pack=True),
        *(tt.jit(add, pack=pack) for pack in (False, True)),
    )
    for _ in range(4):
        called(3, plain, packed, one, two)
        for _ in range(3):
            one_part(one.layers[1]), two_part(two.layers[1])
    called(3, plain, packed, one, two)
    assert_equal(one, two)


def test_models_optimizers_and_streams_travel_together():
    def loss(model, x, rngs):
        return (model(x + 0.1 * rngs.normal(x.shape)) ** 2).sum()

    def train(model, *, optimizer, rngs, x):
        value, grads = tt.value_and_grad(loss)(model, x, rngs)
        optimizer.update(model, grads)
        return value

    def made():
        model = tt.Sequential(
            tt.Linear(3, 4, rngs=tt.Rngs(0)), tt.BatchNorm(4, rngs=tt.Rngs(1))
        )
        rule = optax.sgd(0.01, momentum=0.9)
        return model, tt.Optimizer(model, rule, wrt=tt.Param), tt.Rngs(2)

    results = []
    for pack in (False, True):
        run = tt.jit(train, pack=pack)
        model, optimizer, rngs = made()
        x = jnp.ones((2, 3))
        losses = [
            float(run(model, optimizer=optimizer, rngs=rngs, x=x * n)) for n in range(6)
        ]
        assert is_packed(model.layers[0].bias) is pack
        results.append((losses, tt.as_pure(tt.state((model, optimizer)))))
    # Another program: XLA may round otherwise.
    same = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
    jax.tree.map(same, results[0], results[1])


def test_errors_inside_leave_everything_as_it_was():
    def fails(model, flag):
        model.count[...] += 1
        if flag is None:
            raise ValueError("no")

    model = Model()
    packed = tt.jit(fails, pack=True)
    for _ in range(3):
        packed(model, 1.0)
    with pytest.raises(ValueError, match="no"):
        packed(model, None)
    packed(model, 1.0)
    assert int(model.count) == 4


def test_the_same_array_in_two_large_donated_variables_is_our_error():
    class Two(tt.Module):
        def __init__(self):
            self.small = tt.List([tt.Param(jnp.ones(2)) for _ in range(3)])
            self.a = tt.Param(jnp.ones((64, 64)))
            self.b = tt.Param(jnp.ones((64, 64)))

    def add(model):
        model.a[...] += 1
        model.b[...] += 1

    model = Two()
    packed = tt.jit(add, pack=True, donate_argnums=0)
    for _ in range(3):
        packed(model)
    model.a.set_raw_value(model.b[...])
    with pytest.raises(tt.StructureError, match="0/a and at args/0/b"):
        packed(model)


COPIES = {
    "clone": tt.clone,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "merge": lambda model: tt.merge(*tt.split(model)),
    "tree": lambda model: jax.tree.map(lambda x: x, model),
    "flatten": lambda model: jax.tree.unflatten(*jax.tree.flatten(model)[::-1]),
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_of_a_packed_model_are_models(how):
    plain, packed, one, two = pair()
    called(4, plain, packed, one, two)
    made = COPIES[how](two)
    assert_equal(one, made)
    called(2, plain, packed, one, two)
    called(4, plain, packed, COPIES[how](one), COPIES[how](two))
    assert_equal(one, two)


def test_packed_values_are_read_under_a_trace():
    _, packed, _, model = pair()
    for _ in range(3):
        packed(model, 1.0)
    assert is_packed(model.layers[0].w)
    out = jax.jit(lambda x: model.layers[0].w[...] * x)(2.0)
    assert isinstance(model.layers[0].w[...], jax.Array)
    assert not isinstance(model.layers[0].w[...], jax.core.Tracer)
    np.testing.assert_array_equal(out, model.layers[0].w[...] * 2)
    grads = tt.grad(lambda m: m.layers[0].w.sum(), argnums=0)(model)
    np.testing.assert_array_equal(jax.tree.leaves(grads.layers[0])[1], 1.0)


def test_packed_functions_called_inside_others():
    def outer(model, x):
        return packed(model, x) + packed(model, x)

    _, packed, one, two = pair()
    for _ in range(3):
        packed(two, 1.0)
        tt.jit(step)(one, 1.0)
    tt.jit(outer)(two, 1.0)
    for _ in range(2):
        tt.jit(step)(one, 1.0)
    assert_equal(one, two)


def test_observed_packed_functions():
    class Net(tt.Module):
        def __init__(self):
            self.parts = tt.List([Layer() for _ in range(3)])

        def __call__(self, x):
            return tt.tap(x @ self.parts[0].w, "h")

    model = Net()
    packed = tt.jit(Net.__call__, pack=True)
    x = jnp.ones((2, 3))
    for _ in range(3):
        packed(model, x)
    out, record = tt.observe(packed)(model, x)
    np.testing.assert_array_equal(record["Net:h"].value, out)
    packed(model, x)


def test_packs_die_with_their_models():
    def refs(model):
        found = [model.layers[0].w, pack_of(model.layers[0].w)]
        return list(map(weakref.ref, found))

    _, packed, _, model = pair()
    for _ in range(3):
        packed(model, 1.0)
    dead = refs(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert [ref() for ref in dead] == [None, None]
    finally:
        gc.enable()


def test_a_variable_outlives_its_model():
    _, packed, _, model = pair()
    for _ in range(3):
        packed(model, 1.0)
    variable = model.layers[0].w
    del model
    gc.collect()
    assert variable.sum() == 2 * (1 + 1 + 1 + 1)


def test_threads_read_while_another_calls():
    _, packed, _, model = pair()
    for _ in range(3):
        packed(model, 1.0)
    seen, over = [], threading.Event()

    def read():
        while not over.is_set():
            seen.append(int(model.count))

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for _ in range(300):
        packed(model, 1.0)
    over.set()
    for reader in readers:
        reader.join()
    assert int(model.count) == 303
    assert set(seen) <= set(range(3, 304))


def test_a_number_says_what_is_small():
    model = Model()
    packed = tt.jit(step, pack=10)
    for _ in range(3):
        packed(model, 1.0)
    assert is_packed(model.count)
    assert not is_packed(model.layers[3].w)


def test_none_is_as_if_it_were_not_given():
    assert tt.jit(step, pack=None)._make_packed is None


@pytest.mark.parametrize("pack", ["yes", -1, 1.5])
def test_other_sizes_are_refused(pack):
    with pytest.raises(TypeError, match=r"jit: `pack` is True, False or a number"):
        tt.jit(step, pack=pack)


def test_what_cannot_be_packed_is_tried_a_few_times_only():
    packed, model = tt.jit(step, pack=True), Model()
    for number in range(20):
        packed(model, 1.0)
        model.layers[0].b.set_raw_value(jnp.zeros((number % 2 + 1, 2)))
    (verified,) = packed._latest._verified
    assert verified.packed is False


def test_fixed_arguments_are_packed_too():
    one, two = Model(), Model()
    plain = tt.jit_partial(step, one)
    packed = tt.jit_partial(step, two, pack=True)
    for number in range(5):
        np.testing.assert_array_equal(plain(float(number)), packed(float(number)))
    assert is_packed(two.layers[0].w)
    assert_equal(one, two)


def test_compiled_stages_take_values_as_they_are():
    plain, packed, one, two = pair()
    called(3, plain, packed, one, two)
    stage = packed.lower(two, 1.0).compile()
    for _ in range(3):
        plain(one, 1.0), stage(two, 1.0)
    called(2, plain, packed, one, two)
    assert_equal(one, two)


def test_copies_on_all_devices_stay_on_all_devices():
    mesh = mesh_of((8,), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec())
    rows = NamedSharding(mesh, PartitionSpec("x"))

    class Sharded(tt.Module):
        def __init__(self):
            self.small = tt.List(
                [tt.Param(jax.device_put(jnp.ones(n + 1), sharding)) for n in range(4)]
            )
            self.split = tt.List(
                [tt.Param(jax.device_put(jnp.ones(16), rows)) for n in range(2)]
            )

    def add(model, x):
        for variable in [*model.small, *model.split]:
            variable[...] += x.sum()

    model = Sharded()
    packed = tt.jit(add, pack=True)
    x = jax.device_put(jnp.ones(16), rows)
    for _ in range(4):
        packed(model, x)
    assert is_packed(model.small[0])
    assert not is_packed(model.split[0])
    assert model.small[2][...].sharding.is_fully_replicated
    assert model.small[2][...].sharding.mesh == mesh
    np.testing.assert_array_equal(model.small[2][...], 1 + 16 * 4)
    np.testing.assert_array_equal(model.split[1][...], 1 + 16 * 4)


@pytest.mark.parametrize("graph", [False, True])
def test_modes(graph):
    one, two = Model(), Model()
    plain = tt.jit(step, graph=graph, graph_updates=graph)
    packed = tt.jit(step, pack=True, graph=graph, graph_updates=graph)
    called(5, plain, packed, one, two)
    assert_equal(one, two)


def test_the_default_size():
    assert tt.jit(step)._make_packed is None
    assert tt.jit(step, pack=True)._make_packed.keywords == {"limit": 4096}


class Row(tt.Module):
    """Variables of one sort, which share a buffer."""

    def __init__(self, size=2):
        shape, dtype = (size,), jnp.float32
        self.items = tt.List([tt.Param(jnp.full(shape, n, dtype)) for n in range(6)])


def bump(row, x):
    row.items[1][...] += x
    return row.items[1].sum()


def test_a_buffer_that_was_given_away_keeps_what_still_fits():
    def call(row, x):
        for item in row.items[2:] if x.shape[0] > 1 else ():
            item.set_value(jnp.concatenate([item[...], x]))
        return bump(row, x[0])

    packed, row = tt.jit(call, pack=True, donate_argnums=0), Row()
    for number in range(1, 4):
        assert float(packed(row, jnp.ones(1))) == 2 * (1 + number)
    assert is_packed(row.items[0])
    assert float(packed(row, jnp.ones(2))) == 10.0
    assert [item.shape for item in row.items] == [(2,)] * 2 + [(4,)] * 4
    assert [float(item[0]) for item in row.items] == [0.0, 5.0, 2.0, 3.0, 4.0, 5.0]


def test_a_result_that_is_shared_goes_the_usual_way():
    def call(row, x):
        bump(row, x[0])
        made = Row()
        return x if x.shape[0] == 1 else (made, made)

    packed, row = tt.jit(call, pack=True, graph=True), Row()
    for _ in range(3):
        packed(row, jnp.ones(1))
    one, two = packed(row, jnp.ones(2))
    assert one is two
    assert float(row.items[1][0]) == 5.0


def test_a_packed_model_is_called_under_a_trace_the_usual_way():
    call, row = tt.jit(lambda row, x: row.items[2].sum() + x, pack=True), Row()
    for _ in range(3):
        call(row, 1.0)
    assert is_packed(row.items[2])
    assert float(jax.jit(lambda x: call(row, x))(1.0)) == 5.0

    def inside(x):
        row = Row()
        row.items[2][...] = jnp.full(2, x)
        return [call(row, x) for _ in range(3)]

    assert jax.jit(inside)(3.0) == [9.0] * 3


def test_programs_for_packs_are_bounded_in_number(monkeypatch):
    monkeypatch.setattr(call_cache, "MAX_PACKED_PROGRAMS", 2)
    call, rows = tt.jit(bump, pack=True), [Row(size) for size in (1, 2, 3)]
    for number in range(1, 5):
        found = [float(call(row, 1.0)) for row in rows]
        assert found == [size * (1.0 + number) for size in (1, 2, 3)]
    programs = [
        len(cached.packed_programs)
        for calls in call._cached_calls.values()
        for cached in calls
    ]
    assert max(programs) <= 2


def test_a_pack_that_lost_members_to_another_is_made_anew():
    model = tt.List([Row(), Row()])
    whole = tt.jit(
        lambda model: model[0].items[1].sum() + bump(model[1], 1.0), pack=True
    )
    part = tt.jit(bump, pack=True)
    for number in range(1, 4):
        assert float(whole(model)) == 2 + 2 * (1 + number)
    for number in range(1, 4):
        assert float(part(model[0], 1.0)) == 2 * (1 + number)
    assert float(whole(model)) == 8 + 10


def test_arrays_of_an_explicit_mesh_travel_by_themselves():
    mesh, row = mesh_of((2,), ("i",), AxisType.Explicit), Row()
    for item in row.items:
        item[...] = jax.device_put(item[...], NamedSharding(mesh, PartitionSpec()))
    call = tt.jit(bump, pack=True)
    with jax.set_mesh(mesh):
        assert [float(call(row, 1.0)) for _ in range(4)] == [4.0, 6.0, 8.0, 10.0]
    assert not is_packed(row.items[0])


def test_an_interrupt_while_a_pack_is_made_leaves_no_half_of_one(monkeypatch):
    def interrupted(members):
        raise KeyboardInterrupt

    row, call = Row(2), tt.jit(bump, pack=True)
    with monkeypatch.context() as patch:
        patch.setattr(
            packed_values, "_count", interrupted
        )  # the last thing that is done
        with pytest.raises(KeyboardInterrupt):
            [call(row, 0.0) for _ in range(3)]
    assert pack_of(row.items[0]) is not None
    assert [float(call(row, 1.0)) for _ in range(3)] == [4.0, 6.0, 8.0]


@pytest.mark.parametrize("given", ["in_shardings", "out_shardings"])
@pytest.mark.parametrize("donated", [(), 0])
def test_packed_functions_may_be_told_where_things_lie(given, donated):
    everywhere = NamedSharding(mesh_of((1,), ("i",)), PartitionSpec())
    call = tt.jit(step, pack=True, donate_argnums=donated, **{given: everywhere})
    usual, model, plain = tt.jit(step), Model(), Model()
    for _ in range(4):
        assert call(model, 1.0) == usual(plain, 1.0)
    for one, two in zip(values_of(model), values_of(plain)):
        assert np.array_equal(one, two)
