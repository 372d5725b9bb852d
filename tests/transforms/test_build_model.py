# SPDX-License-Identifier: Apache-2.0
"""build: by plan comes the very model that Python makes line by line."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec
from zoo import rows, streams

import treetap as tt
from meshes import mesh_of
from treetap._core.bounded_cache import BoundedCache
from treetap._transforms import build_model

KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)


def mostly(first, then):
    """For slow tests: one kind of mesh at every change, both in `make test-all`."""
    later = pytest.param(then, marks=pytest.mark.long)
    return pytest.mark.parametrize("kind", [first, later], ids=str)


COMPILED = "/jax/core/compile/backend_compile_duration"
_compiled = [0]


def _count(event, _, **__):
    _compiled[0] += event == COMPILED


jax.monitoring.register_event_duration_secs_listener(_count)


def as_numpy(leaf):
    is_key = jnp.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def assert_same(found, wanted):
    """Structure, metadata, types, weak types, shardings and bits are the same."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert type(one) is type(two)
        np.testing.assert_array_equal(as_numpy(one), as_numpy(two), strict=True)
        if isinstance(one, jax.Array):
            assert jax.typeof(one) == jax.typeof(two)
            assert one.sharding == two.sharding


def check(make, *args, seeds=None, **kwargs):
    """Makes a model both ways, each with streams of its own, and compares all."""
    both = [tt.Rngs(**(seeds or {"default": 0})) for _ in range(2)]
    built = tt.build(make, *args, rngs=both[0], **kwargs)
    made = make(*args, rngs=both[1], **kwargs)
    assert_same((built, both[0]), (made, both[1]))
    return built


class Block(tt.Module):
    def __init__(self, width, *, rngs):
        self.norm = tt.LayerNorm(width, rngs=rngs)
        self.attention = tt.MultiHeadAttention(2, width, dropout_rate=0.1, rngs=rngs)
        self.mlp = tt.Sequential(
            tt.Linear(width, 4 * width, rngs=rngs),
            tt.gelu,
            tt.Linear(4 * width, width, rngs=rngs),
        )


class Model(tt.Module):
    def __init__(self, layers, width=8, *, rngs):
        self.table = tt.Embed(7, width, rngs=rngs)
        self.blocks = tt.List([Block(width, rngs=rngs) for _ in range(layers)])


def holding(initializer, shape, dtype=jnp.float32):
    return lambda *, rngs: tt.Param(initializer(rngs.params(), shape, dtype))


# Bits.


def test_the_same_model_as_line_by_line():
    model = check(Model, 2, seeds={"params": 0, "dropout": 1})
    assert model.blocks[0].mlp.layers[1] is tt.gelu
    assert model.blocks[0].norm.scale[...].shape == (8,)


@rows(quick=["linear", "conv", "batch_norm", "attention_decode", "rnn_lstm", "lora"])
def test_every_layer_is_the_same(entry):
    both = streams(), streams()
    assert_same(
        (tt.build(entry.factory, both[0]), both[0]), (entry.factory(both[1]), both[1])
    )


INITIALIZERS = {
    "constant": tt.initializers.constant(0.1),
    "normal": tt.initializers.normal(0.02),
    "uniform": tt.initializers.uniform(0.3),
    "truncated_normal": tt.initializers.truncated_normal(0.02),
    "variance_scaling": tt.initializers.variance_scaling(2.0, "fan_avg", "uniform"),
    "zeros": tt.initializers.zeros,
    "ones": tt.initializers.ones,
}
for _name in ("glorot", "he", "kaiming", "lecun", "xavier"):
    for _shape in ("normal", "uniform"):
        INITIALIZERS[f"{_name}_{_shape}"] = getattr(
            tt.initializers, f"{_name}_{_shape}"
        )()
for _name in ("orthogonal", "delta_orthogonal"):
    INITIALIZERS[_name] = getattr(tt.initializers, _name)()


QUICK = ("normal", "he_uniform", "lecun_normal", "orthogonal", "zeros")
NAMED = [
    pytest.param(name, marks=[] if name in QUICK else [pytest.mark.long])
    for name in INITIALIZERS
]


@pytest.mark.parametrize("name", NAMED)
def test_every_initializer_is_the_same(name):
    check(holding(INITIALIZERS[name], (3, 5, 7)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=str)
def test_other_dtypes_are_the_same(dtype):
    check(holding(tt.initializers.lecun_normal(), (33, 17), dtype))


@pytest.mark.usefixtures("fully_compiled")
def test_what_would_round_otherwise_in_one_program():
    def make(*, rngs):
        noise = rngs.normal((64, 65))
        return tt.Param(jnp.float32(1.3) + jnp.float32(0.37) * noise)

    check(make)
    fused = jax.jit(lambda: make(rngs=tt.Rngs(0))[...])()
    if jax.default_backend() == "cpu":  # the case tells something
        assert not np.array_equal(fused, make(rngs=tt.Rngs(0)))


def test_stacked_layers():
    def make(*, rngs):
        one = tt.vmap(lambda rngs: tt.LSTMCell(4, 5, rngs=rngs))
        return one(rngs.split(3))

    assert check(make).ii.kernel.shape == (3, 4, 5)


def test_keys_of_another_kind():
    key = jax.random.key(3, impl="rbg")
    check(tt.Linear, 3, 4, seeds={"default": key})


def test_weak_types_and_literals():
    def make(*, rngs):
        weak = jnp.full((2, 3), 2.0) * jnp.asarray(2.0)
        return tt.Dict(
            a=tt.Param(jnp.asarray(1.5)), b=tt.Param(weak), c=tt.Param(jnp.asarray(3))
        )

    check(make)


# What is not computed.


def test_numbers_and_numpy_arrays_stay_what_they_are():
    table = np.arange(6.0).reshape(2, 3)
    shared = jnp.arange(3.0)

    class Odd(tt.Module):
        def __init__(self, *, rngs):
            self.steps = tt.Variable(3)
            self.table = tt.Param(table)
            self.shared = tt.Param(shared)
            self.name, self.sizes = "odd", (1, 2)
            self.nothing = tt.Variable(None)
            self.many = tt.Variable({"a": 1.5, "b": jnp.ones(2)})

    model = check(Odd)
    assert model.steps.get_value() == 3
    assert type(model.steps.get_value()) is int
    assert model.table.get_value() is table
    assert model.shared.get_value() is shared
    assert (model.name, model.sizes) == ("odd", (1, 2))


def test_arrays_and_objects_of_the_arguments_are_the_same_objects():
    kernel, inner = jnp.ones((2, 3)), tt.Linear(2, 2, rngs=tt.Rngs(0))

    class Outer(tt.Module):
        def __init__(self, parts, kernel, rngs):
            self.inner, self.rngs = parts["inner"], rngs
            self.inner.extra = tt.Param(jnp.zeros(2))
            self.kernel = tt.Param(kernel)
            self.kernel.set_metadata(note="given")

    before, rngs = inner.kernel[...], tt.Rngs(0)
    model = tt.build(Outer, {"inner": inner}, kernel, rngs=rngs)
    assert model.inner is inner
    assert model.rngs is rngs
    assert inner.kernel[...] is before
    assert inner.extra.shape == (2,)
    assert model.kernel.get_value() is kernel
    assert model.kernel.note == "given"
    assert not kernel.is_deleted()


def test_the_order_of_items_is_that_of_the_arguments():
    items = {"b": tt.Param(jnp.ones(1)), "a": tt.Param(jnp.ones(2))}
    assert list(tt.build(tt.Dict, items)) == ["b", "a"]
    made = tt.build(tt.Dict, **items, c=[])
    assert list(made) == ["b", "a", "c"]
    assert made["a"] is items["a"]


def test_tied_variables_stay_tied():
    class Tied(tt.Module):
        def __init__(self, *, rngs):
            self.table = tt.Embed(3, 4, rngs=rngs)
            self.head = tt.data([self.table.embedding])
            array = rngs.normal((2,))
            self.one, self.two = tt.Param(array), tt.Param(array)

    model = tt.build(Tied, rngs=tt.Rngs(0))
    assert model.head[0] is model.table.embedding
    assert model.one.get_value() is model.two.get_value()
    model.one[...] = jnp.zeros(2)
    assert model.two[...].any()


def test_a_model_with_its_optimizer():
    def make(*, rngs):
        model = Model(1, rngs=rngs)
        return model, tt.Optimizer(model, optax.adam(1e-3), wrt=tt.Param)

    check(make)


def test_references():
    counter = tt.Variable(jnp.zeros(2), ref=True)

    def make(counter, rngs):
        counter[...] = counter[...] + 1.0
        return tt.Linear(2, 2, rngs=rngs)

    tt.build(make, counter, tt.Rngs(0))
    np.testing.assert_array_equal(counter[...], np.ones(2))


def test_effects_happen_once():
    seen = []

    def make(*, rngs):
        kernel = rngs.normal((2, 2))
        jax.debug.callback(lambda x: seen.append(("kernel", float(x))), kernel[0, 0])
        jax.debug.callback(lambda: seen.append(("done", 0.0)))
        return tt.Param(kernel)

    model = tt.build(make, rngs=tt.Rngs(0))
    jax.effects_barrier()
    assert sorted(seen) == [("done", 0.0), ("kernel", float(model[0, 0]))]


# Errors, and what they leave behind.


def test_a_failure_changes_nothing():
    rngs = tt.Rngs(0)

    def make(*, rngs):
        tt.Linear(2, 2, rngs=rngs)
        raise KeyError("no such part")

    with pytest.raises(KeyError, match="no such part"):
        tt.build(make, rngs=rngs)
    assert int(rngs.default.count[...]) == 0


def test_errors_of_the_model_are_its_own():
    with pytest.raises(tt.StructureError, match="Linear: `in_features`"):
        tt.build(tt.Linear, -1, 3, rngs=tt.Rngs(0))


def test_what_makes_nothing_is_refused():
    with pytest.raises(tt.StructureError, match="expected a class or a function"):
        tt.build(3)


def test_looking_at_numbers_is_refused_with_advice():
    def make(*, rngs):
        return tt.Linear(int(jnp.ones(()) + 1), 2, rngs=rngs)

    with pytest.raises(jax.errors.ConcretizationTypeError) as caught:
        tt.build(make, rngs=tt.Rngs(0))
    assert any("compute with numpy" in note for note in caught.value.__notes__)


def test_streams_that_are_no_argument_are_refused():
    rngs = tt.Rngs(0)
    with pytest.raises(tt.TraceContextError, match="as an argument"):
        tt.build(lambda: tt.Linear(2, 2, rngs=rngs))
    assert int(rngs.default.count[...]) == 0


def test_inside_a_transform_it_is_a_call():
    shape = tt.eval_shape(lambda: tt.build(tt.Linear, 2, 3, rngs=tt.Rngs(0)))
    assert shape.kernel.get_value() == jax.ShapeDtypeStruct((2, 3), jnp.float32)
    made = tt.jit(lambda rngs: tt.build(tt.Linear, 2, 3, rngs=rngs))(tt.Rngs(0))
    np.testing.assert_allclose(
        made.kernel[...], tt.Linear(2, 3, rngs=tt.Rngs(0)).kernel[...], rtol=1e-6
    )


# Compiling.


def compiled_by(layers, width):
    _compiled[0] = 0
    tt.build(Model, layers, width, rngs=tt.Rngs(0))
    return _compiled[0]


@pytest.mark.keeps_traces
def test_equal_blocks_are_compiled_once():
    assert compiled_by(1, 22) > 0
    assert compiled_by(3, 22) == 0
    assert compiled_by(3, 22) == 0


def test_programs_are_kept_within_bounds(monkeypatch):
    monkeypatch.setattr(build_model, "_programs", BoundedCache(2))
    check(tt.LinearGeneral, 3, (2, 2))
    assert len(build_model._programs) == 2


# Shards.

COLUMNS = {"kernel_metadata": {"out_sharding": (None, "model")}}


class Sharded(tt.Module):
    """Values that reach their shards in different ways."""

    def __init__(self, *, rngs):
        self.linear = tt.Linear(16, 64, rngs=rngs, **COLUMNS)
        three = {"out_sharding": ("data", "model", None)}
        self.heads = tt.LinearGeneral(16, (4, 16), kernel_metadata=three, rngs=rngs)
        self.plain = tt.Linear(4, 4, rngs=rngs)
        both = {"out_sharding": ("data", "model")}
        self.turned = tt.Param(rngs.normal((64, 32)).T * jnp.float32(0.3), **both)
        self.moved = tt.Param(rngs.normal((8, 64)) * 0.3 + 1.7, **both)
        self.narrow = tt.Param(rngs.normal((128, 12)), **both)
        self.square = tt.Param(
            tt.initializers.orthogonal()(rngs.params(), (8, 8), jnp.float32), **both
        )
        noise = rngs.normal((8, 64))
        self.unit = tt.Param(noise / jnp.linalg.norm(noise), **both)
        self.twice = tt.Param(noise, **both)
        self.rows = tt.Param(jnp.ones((8, 3)), out_sharding=("model",))


@mostly(AxisType.Explicit, AxisType.Auto)
def test_shards_are_the_same(kind):
    with jax.set_mesh(mesh_of((2, 4), ("data", "model"), kind)):
        build_model._programs.clear()
        model = check(Sharded)
    made = [each for each in build_model._programs if each.sharding is not None]
    assert len(made) == 12  # linear 2; heads, turned and moved 3 each; unit 1
    assert model.linear.kernel.sharding.spec == PartitionSpec(None, "model")
    assert model.linear.kernel.addressable_shards[0].data.shape == (16, 16)
    whole = tt.Linear(16, 64, rngs=tt.Rngs(0))
    np.testing.assert_array_equal(model.linear.kernel[...], whole.kernel[...])


@mostly(AxisType.Auto, AxisType.Explicit)
def test_shards_of_stacked_layers(kind):
    def make(*, rngs):
        @tt.vmap
        @tt.transform_metadata(partition=None)
        def layers(rngs):
            return tt.Linear(8, 64, rngs=rngs, **COLUMNS)

        return layers(rngs.split(3))

    with jax.set_mesh(mesh_of((4,), ("model",), kind)):
        build_model._programs.clear()
        built = check(make)
    assert built.kernel.addressable_shards[0].data.shape == (3, 8, 16)
    assert len(memory_of_programs()) == 2


def test_keys_whose_numbers_depend_on_the_shards_are_drawn_whole():
    seeds = {"default": jax.random.key(3, impl="rbg")}
    with jax.set_mesh(mesh_of((4,), ("model",))):
        check(tt.Linear, 8, 64, seeds=seeds, **COLUMNS)


def test_a_mesh_of_ones_own_is_enough():
    options = {"out_sharding": (None, "model"), "mesh": mesh_of((4,), ("model",))}
    check(tt.Linear, 8, 64, kernel_metadata=options)


def memory_of_programs():
    """The bytes a device holds in each of the programs that make shards."""
    sizes = []
    for program in build_model._programs:
        sharding = program.sharding
        if sharding is not None:
            with jax.set_mesh(sharding.mesh):
                specs = [
                    jax.ShapeDtypeStruct(
                        atom.aval.shape,
                        atom.aval.dtype,
                        sharding=sharding if atom.aval.ndim > 1 else None,
                    )
                    for atom in program.eqn.invars
                ]
                stats = program.run.lower(specs).compile().memory_analysis()
            sizes.append(stats.output_size_in_bytes + stats.temp_size_in_bytes)
    return sizes


@KINDS
def test_no_device_holds_the_whole(kind):
    build_model._programs.clear()
    with jax.set_mesh(mesh_of((8,), ("model",), kind)):
        model = tt.build(tt.Linear, 256, 512, rngs=tt.Rngs(0), **COLUMNS)
    sizes = memory_of_programs()
    assert len(sizes) == 2  # the draw, and its scale
    assert max(sizes) < model.kernel.nbytes


def test_the_way_back_through_a_reshape():
    back = build_model._before_reshape
    assert back([None, "m", None], (8, 4, 6), (8, 24)) == [None, "m"]
    assert back([None, None, "m"], (8, 4, 6), (8, 24)) == [None, None]
    assert back([None, "m"], (8, 24), (8, 4, 6)) == [None, "m", None]
    assert back(["m", None], (8, 24), (8, 1, 4, 6)) == ["m", None, None, None]


class Drawn(tt.Module):
    """A Param that a function makes of a key, sharded along its first axis."""

    def __init__(self, fn, *, rngs):
        self.w = tt.Param(fn(rngs.params()), out_sharding=("model",))


@KINDS
@pytest.mark.parametrize(
    "fn",
    [
        lambda key: jnp.broadcast_to(jax.random.normal(key, (64,)), (64, 64)),
        lambda key: jax.random.normal(key, (3, 64)).reshape(192),
    ],
    ids=["of another shape", "that does not divide"],
)
def test_operands_that_cannot_lie_as_the_result_does(fn, kind):
    with jax.set_mesh(mesh_of((2,), ("model",), kind)):
        model = check(Drawn, fn)
    assert model.w.sharding.spec[0] == "model"


def test_an_operation_that_says_where_its_result_lies_is_done_as_it_says():
    def fn(key):
        row, place = jax.random.normal(key, (64, 1)), PartitionSpec("model")
        return jnp.sin(jnp.broadcast_to(row, (64, 64), out_sharding=place))

    with jax.set_mesh(mesh_of((2,), ("model",), AxisType.Explicit)):
        check(Drawn, fn)
