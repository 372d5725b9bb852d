# SPDX-License-Identifier: Apache-2.0
"""save_weights and load_weights: all of it fits, or nothing changes and all is told."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import treetap as tt
from meshes import mesh_of
from treetap import WeightsError


class Dense(tt.Module):
    def __init__(self, value, shape=(2, 3), dtype=jnp.float32):
        self.kernel = tt.Param(jnp.full(shape, value, dtype))
        self.bias = None


class Net(tt.Module):
    def __init__(self, value):
        self.layers = tt.List([Dense(value), Dense(value + 1)])
        self.mean = tt.BatchStat(jnp.full(3, value))
        self.table = jnp.arange(4.0) + value
        self.calls = tt.Variable(int(value))
        self.rate = tt.Variable(0.1 * value)
        self.rngs = tt.Rngs(int(value))
        self.cache = tt.Cache(jnp.full(1, value))
        self.nothing = tt.Param(None)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def told(caught):
    text = str(caught.value)
    assert "nothing was" in text
    return text


def test_a_model_comes_back_whole(path):
    model, other = Net(1.0), Net(5.0)
    kept = other.rngs.default.key[...], other.cache[...]
    tt.save_weights(path, model)
    report = tt.load_weights(path, other)
    assert report.loaded == tuple(
        "calls layers/0/kernel layers/1/kernel mean rate table".split()
    )
    assert (report.missing, report.unused) == ((), ())
    lasting = tt.Not((tt.RngState, tt.Cache))
    assert tt.state(other, lasting) == tt.state(model, lasting)
    assert other.calls[...] == 1
    assert type(other.calls[...]) is int
    assert other.rate[...] == 0.1
    assert (other.rngs.default.key[...], other.cache[...]) == kept


def test_the_file_is_as_other_tools_expect_it(path):
    tt.save_weights(path, Net(1.0), metadata={"made": "here"})
    found = load_file(path)
    assert found["layers.0.kernel"].shape == (2, 3)
    assert found["calls"].dtype == np.int64
    with safe_open(path, "np") as opened:
        assert opened.metadata() == {"format": "pt", "made": "here"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float16", "bool"])
def test_small_dtypes_come_back_bit_for_bit(path, dtype):
    value = jnp.asarray(np.array([0, 1, 0.5, 3]).astype(dtype))
    other = {"w": tt.Param(jnp.zeros(4, dtype))}
    tt.save_weights(path, {"w": tt.Param(value)})
    tt.load_weights(path, other)
    assert other["w"].dtype == value.dtype
    assert np.asarray(other["w"][...]).tobytes() == np.asarray(value).tobytes()


def gpt(numbers, layers=3):
    def param(*shape):
        return tt.Param(jnp.asarray(numbers.normal(size=shape), jnp.float32))

    attention = {key: {"kernel": param(layers, 4, 2, 2)} for key in "qkv"}
    return {
        "embed": {"embedding": param(7, 4)},
        "layers": {"attn": attention, "up": {"kernel": param(layers, 4, 8)}},
        "blocks": [{"scale": param(4)} for _ in range(2)],
        "head": {"kernel": param(4, 7)},
    }


def fused(index):
    source = tt.tensor("h.{i}.attn.weight").part(index, of=3, axis=1)
    return source.rearrange("d (h k) -> d h k").stack()


RULES = {
    "embed/embedding": "wte.weight",
    "layers/attn/q/kernel": fused(0),
    "layers/attn/k/kernel": fused(1),
    "layers/attn/v/kernel": fused(2),
    "layers/{name...}/kernel": tt.tensor("h.{i}.{name...}.weight").transpose().stack(),
    "blocks/{i}/scale": "ln.{i}.weight",
    "head/kernel": tt.tensor("lm_head.weight", "wte.weight").transpose(),
}


def test_rules_rename_transpose_split_and_stack(path):
    numbers = np.random.default_rng(0)
    files = {f"h.{i}.attn.weight": numbers.normal(size=(4, 12)) for i in range(3)}
    files |= {f"h.{i}.up.weight": numbers.normal(size=(8, 4)) for i in range(3)}
    files |= {f"ln.{i}.weight": numbers.normal(size=4) for i in range(2)}
    files["wte.weight"] = numbers.normal(size=(7, 4))
    files = {name: array.astype(np.float32) for name, array in files.items()}
    save_file(files, path)
    model = gpt(numbers)
    report = tt.load_weights(path, model, rules=RULES)
    assert len(report.loaded) == 8
    key = model["layers"]["attn"]["k"]["kernel"][...]
    np.testing.assert_array_equal(
        key[1], files["h.1.attn.weight"][:, 4:8].reshape(4, 2, 2)
    )
    up = model["layers"]["up"]["kernel"][...]
    np.testing.assert_array_equal(up[2], files["h.2.up.weight"].T)
    np.testing.assert_array_equal(model["head"]["kernel"][...], files["wte.weight"].T)
    tt.save_weights(path, model, rules=RULES)
    again = load_file(path)
    for name, array in files.items():
        np.testing.assert_array_equal(again[name], array)
    np.testing.assert_array_equal(again["lm_head.weight"], files["wte.weight"])


# What does not fit.


def test_everything_that_does_not_fit_is_told_at_once_and_nothing_changes(path):
    save_file(
        {
            "layers.0.kernal": np.ones((2, 3), np.float32),
            "layers.1.kernel": np.ones((3, 2), np.float32),
            "mean": np.ones(3, np.float16),
            "table": np.ones(4, np.int32),
            "calls": np.array(3, np.int64),
            "odd": np.ones(1, np.float32),
        },
        path,
    )
    model = Net(1.0)
    before = jax.tree.leaves(tt.state(tt.clone(model), tt.Not(tt.RngState)))
    with pytest.raises(WeightsError) as caught:
        tt.load_weights(path, model, rules={"lyers/{i}/kernel": "x.{i}"})
    text = told(caught)
    assert str(path) in text
    assert "Variables without a tensor (2)" in text
    assert "layers/0/kernel (Param): no tensor 'layers.0.kernel'" in text
    assert "did you mean 'layers.0.kernal'?" in text
    assert "rate (Variable): no tensor 'rate'" in text
    assert "what does not fit (3)" in text
    assert "'layers.1.kernel' is F32(3, 2), the model needs (2, 3)" in text
    assert "is it `.transpose()` of it?" in text
    assert "'mean' is F16(3,), the model needs float32; `cast=True` converts" in text
    assert "'table' is I32(4,), the model needs float32\n" in text
    assert "tensors that no Variable uses (2)" in text
    assert "'odd' F32(1,)" in text
    assert "rules that no Variable matched (1):\n    - lyers/{i}/kernel" in text
    after = jax.tree.leaves(tt.state(model, tt.Not(tt.RngState)))
    assert all(map(np.array_equal, before, after))


def test_long_lists_are_cut_and_counted(path):
    save_file({f"t{i}": np.ones(1, np.float32) for i in range(50)}, path)
    model = {f"v{i}": tt.Param(jnp.ones(1)) for i in range(30)}
    with pytest.raises(WeightsError) as caught:
        tt.load_weights(path, model)
    text = told(caught)
    assert "Variables without a tensor (30)" in text
    assert "and 10 more" in text
    assert "tensors that no Variable uses (50)" in text
    assert "and 30 more" in text
    assert len(text.splitlines()) < 60


def test_not_strict_loads_what_is_there_and_reports_the_rest(path):
    save_file({"a": np.full(2, 7, np.float32), "odd": np.ones(1)}, path)
    model = {"a": tt.Param(jnp.zeros(2)), "b": tt.Param(jnp.zeros(2))}
    report = tt.load_weights(path, model, strict=False)
    assert report == (("a",), ("b",), ("odd",))
    assert model["a"][...].tolist() == [7, 7]
    assert model["b"][...].tolist() == [0, 0]
    model["a"] = tt.Param(jnp.zeros(3))
    with pytest.raises(WeightsError) as caught:
        tt.load_weights(path, model, strict=False)
    assert "the model needs (3,)" in told(caught)
    assert "odd" not in told(caught)


def test_tensors_may_be_ignored_by_name(path):
    save_file({"a": np.ones(2, np.float32), "h.0.mask": np.ones(1)}, path)
    model = {"a": tt.Param(jnp.zeros(2))}
    for ignore in (["*.mask"], ["h.?.mask"], "h.*"):
        assert tt.load_weights(path, model, ignore=ignore).unused == ()
    with pytest.raises(WeightsError, match=r"h\.0\.mask"):
        tt.load_weights(path, model, ignore=["mask"])


def test_parts_that_nobody_wants_are_told(path):
    save_file({"qkv": np.arange(6, dtype=np.float32)}, path)
    model = {"q": tt.Param(jnp.zeros(2)), "v": tt.Param(jnp.zeros(2))}
    rules = {
        "q": tt.tensor("qkv").part(0, of=3),
        "v": tt.tensor("qkv").part(2, of=3),
    }
    with pytest.raises(WeightsError, match=r"qkv \(part 1 of 3\)"):
        tt.load_weights(path, model, rules=rules)
    tt.load_weights(path, model, rules=rules, ignore=["qkv"])
    assert model["v"][...].tolist() == [4, 5]
    model["k"] = tt.Param(jnp.zeros(2))
    rules["k"] = tt.tensor("qkv").part(1, of=3, axis=-1)  # the same axis
    assert tt.load_weights(path, model, rules=rules).unused == ()


def test_optional_tensors(path):
    save_file({"a": np.ones(2, np.float32)}, path)
    rules = {"b": tt.tensor("b").optional()}
    model = {"a": tt.Param(jnp.zeros(2)), "b": tt.Param(jnp.full(2, 5.0))}
    assert tt.load_weights(path, model, rules=rules).loaded == ("a",)
    assert model["b"][...].tolist() == [5, 5]
    blank = jax.ShapeDtypeStruct((2,), jnp.float32)  # has no value to keep
    with pytest.raises(WeightsError, match="no tensor 'b'"):
        tt.load_weights(path, {"a": model["a"], "b": tt.Param(blank)}, rules=rules)
    stacked = {"b": tt.tensor("b.{i}").stack().optional()}
    save_file({"a": np.ones(2, np.float32), "b.0": np.ones((), np.float32)}, path)
    with pytest.raises(WeightsError, match=r"no tensor 'b\.1'"):
        tt.load_weights(path, model, rules=stacked)


def test_a_layout_that_cannot_give_the_shape(path):
    save_file({"a": np.ones((2, 3), np.float32)}, path)
    model = {"a": tt.Param(jnp.zeros(2))}
    rules = {"a": tt.tensor("a").rearrange("x y -> y x")}
    with pytest.raises(WeightsError, match=r"a \(Param\) is \(2,\): .*gives 2 axes"):
        tt.load_weights(path, model, rules=rules)


def test_the_same_tensor_may_serve_several_variables(path):
    save_file({"w": np.arange(6, dtype=np.float32).reshape(2, 3)}, path)
    model = {"a": tt.Param(jnp.zeros((2, 3))), "b": tt.Param(jnp.zeros((3, 2)))}
    rules = {"a": "w", "b": tt.tensor("w").transpose()}
    tt.load_weights(path, model, rules=rules)
    np.testing.assert_array_equal(model["a"][...].T, model["b"][...])
    tt.save_weights(path, model, rules=rules)
    assert list(load_file(path)) == ["w"]
    model["b"][...] = jnp.zeros((3, 2))
    with pytest.raises(WeightsError, match="b and a would both be 'w', and differ"):
        tt.save_weights(path, model, rules=rules)


# Dtypes.


def test_floats_are_cast_when_asked(path):
    values = np.array([1.0, 1 / 3, -2.5, np.inf, np.nan], np.float32)
    save_file({"w": values}, path)
    model = {"w": tt.Param(jnp.zeros(5, jnp.bfloat16))}
    with pytest.raises(WeightsError, match="cast=True"):
        tt.load_weights(path, model)
    tt.load_weights(path, model, cast=True)
    rounded = np.asarray(model["w"][...], np.float32)
    np.testing.assert_array_equal(rounded, [1, 0.333984375, -2.5, np.inf, np.nan])
    tt.save_weights(path, model)
    wide = {"w": tt.Param(jnp.zeros(5))}
    tt.load_weights(path, wide, cast=True)
    np.testing.assert_array_equal(wide["w"][...], rounded)


def test_integers_are_cast_when_no_value_changes(path):
    model = {"n": tt.Variable(jnp.zeros(2, jnp.int32))}
    save_file({"n": np.array([-1, 2], np.int64)}, path)
    tt.load_weights(path, model, cast=True)
    assert model["n"][...].tolist() == [-1, 2]


def test_tensors_of_several_dtypes_are_cast_one_by_one(path):
    files = {"n.0": np.array([2**53 + 1]), "n.1": np.array([2**63 + 1], np.uint64)}
    save_file(files, path)
    model = {"n": tt.Variable(np.zeros((2, 1), np.uint64))}
    rules = {"n": tt.tensor("n.{i}").stack()}
    tt.load_weights(path, model, rules=rules, cast=True)
    assert model["n"][...].tolist() == [[2**53 + 1], [2**63 + 1]]


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (np.array([1, 2**40]), jnp.int32),
        (np.array([1, -1]), jnp.uint32),
        (np.array([1, 2**31], np.uint32), jnp.int32),
        (np.array([1, 70000], np.float32), jnp.float16),
        (np.array([1, 1e39]), jnp.float32),
        (np.array([1, 1000], np.float32), jnp.float8_e4m3fn),
        (np.array([1, -1], np.float16), jnp.float8_e8m0fnu),  # it has no negative ones
    ],
)
def test_a_cast_that_loses_a_number_is_refused(path, values, dtype):
    save_file({"a": np.ones(1, np.float32), "n": values}, path)
    model = {"a": tt.Param(jnp.zeros(1)), "n": tt.Variable(jnp.ones(2, dtype))}
    with pytest.raises(WeightsError, match="does not have") as caught:
        tt.load_weights(path, model, cast=True)
    assert "n (Variable)" in told(caught)
    assert model["a"][...].tolist() == [0]


@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.complex64])
def test_kinds_are_never_cast(path, dtype):
    save_file({"w": np.ones(2, dtype)}, path)
    with pytest.raises(WeightsError, match="the model needs float32\n"):
        tt.load_weights(path, {"w": tt.Param(jnp.zeros(2))}, cast=True)


def test_dtypes_that_jax_would_narrow_are_refused(path):
    save_file({"w": np.ones(2)}, path)
    blank = {"w": tt.Param(jax.ShapeDtypeStruct((2,), np.float64))}
    with pytest.raises(WeightsError, match="needs `jax_enable_x64`"):
        tt.load_weights(path, blank)
    held = {"w": tt.Variable(np.zeros(2))}  # numpy has no such limit
    tt.load_weights(path, held)
    assert isinstance(held["w"][...], np.ndarray)
    assert held["w"][...].tolist() == [1, 1]


def test_dtypes_that_jax_does_not_have(path):
    entry = b'{"w":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}'
    path.write_bytes(len(entry).to_bytes(8, "little") + entry + b"1")
    with pytest.raises(WeightsError, match=r"F4\(2,\), a dtype that JAX cannot read"):
        tt.load_weights(path, {"w": tt.Param(jnp.zeros(2))})
    assert tt.load_weights(path, {}, strict=False).unused == ("w",)


# Where values are put.


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_variables_keep_their_sharding(path, kind):
    mesh = mesh_of((4, 2), ("a", "b"), kind)
    sharding = NamedSharding(mesh, PartitionSpec("b", "a"))
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    save_file({"w": values, "plain": values[0]}, path)
    model = {
        "w": tt.Param(jax.device_put(jnp.zeros((8, 8)), sharding)),
        "plain": tt.Param(jnp.zeros(8)),
    }
    rules = {"w": tt.tensor("w").transpose()}
    tt.load_weights(path, model, rules=rules)
    assert model["w"][...].sharding == sharding
    np.testing.assert_array_equal(model["w"][...], values.T)
    assert not model["plain"][...].committed
    tt.save_weights(path, model, rules=rules)
    np.testing.assert_array_equal(load_file(path)["w"], values)


def test_abstract_models_become_concrete(path):
    tt.save_weights(path, {"layer": Dense(3.0)})
    model = tt.eval_shape(lambda: {"layer": Dense(0.0)})
    tt.load_weights(path, model)
    assert isinstance(model["layer"].kernel[...], jax.Array)
    assert model["layer"].kernel[0, 0] == 3.0


def test_abstract_models_are_placed_as_annotated(path):
    mesh = mesh_of((8,), ("a",))

    def make():
        return {"w": tt.Param(jnp.arange(8.0), out_sharding=("a",))}

    with jax.set_mesh(mesh):
        tt.save_weights(path, make())
        model = tt.eval_shape(make)
        tt.load_weights(path, model)
        assert model["w"][...].sharding == NamedSharding(mesh, PartitionSpec("a"))
        assert model["w"][...].tolist() == list(range(8))
        blank = tt.eval_shape(make)
    with pytest.raises(WeightsError, match=r"w \(Param\) belongs on .*set_mesh"):
        tt.load_weights(path, blank)
    struct = jax.ShapeDtypeStruct((8,), jnp.float32)
    free = {"w": tt.Param(struct, out_sharding=("a",), eager_sharding=False)}
    tt.load_weights(path, free)  # there is no mesh to be on
    assert not free["w"][...].committed


def test_values_do_not_hang_on_the_file(path):
    model = {"w": tt.Param(jnp.ones(10_000))}
    tt.save_weights(path, model)
    tt.load_weights(path, model)
    with path.open("r+b") as opened:
        opened.seek(-4000, 2)
        opened.write(b"\xff" * 4000)
    assert model["w"][...].tolist() == [1.0] * 10_000


def test_values_held_in_refs(path):
    tt.save_weights(path, {"w": tt.Param(jnp.arange(3.0), ref=True)})
    model = {"w": tt.Param(jnp.zeros(3), ref=True)}
    ref = model["w"].get_raw_value()
    tt.load_weights(path, model)
    assert ref[...].tolist() == [0, 1, 2]


def test_shared_variables_are_stored_once(path):
    shared = tt.Param(jnp.ones(2))
    tt.save_weights(path, {"a": shared, "b": shared})
    assert list(load_file(path)) == ["a"]
    other = tt.Param(jnp.zeros(2))
    tt.load_weights(path, {"a": other, "b": other})
    assert other[...].tolist() == [1, 1]


def test_donated_arrays_can_be_loaded_again(path):
    model = {"w": tt.Param(jnp.ones(2))}
    tt.save_weights(path, model)
    model["w"].get_raw_value().delete()
    tt.load_weights(path, model)
    assert model["w"][...].tolist() == [1, 1]


def test_separate_and_scanned_layers_exchange_files(path):
    class Block(tt.Module):
        def __init__(self, shape, start):
            values = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
            self.up = Dense(0.0)
            self.up.kernel = tt.Param(jnp.asarray(values + start))
            self.scale = tt.Param(jnp.asarray(values[..., 0] - start))

    separate = tt.List([Block((4, 8), 10 * i) for i in range(3)])
    scanned = Block((3, 4, 8), 100)
    rules = {"{name...}": tt.tensor("{i}.{name...}").stack()}
    tt.save_weights(path, separate)
    tt.load_weights(path, scanned, rules=rules)
    for i, block in enumerate(separate):
        np.testing.assert_array_equal(scanned.up.kernel[i], block.up.kernel[...])
        np.testing.assert_array_equal(scanned.scale[i], block.scale[...])
    blank = tt.List([Block((4, 8), 0) for _ in range(3)])
    tt.save_weights(path, scanned, rules=rules)
    tt.load_weights(path, blank)
    assert tt.state(blank) == tt.state(separate)


def test_rules_in_messages_are_printable(tmp_path):
    file, model = tmp_path / "w.safetensors", {"w": tt.Param(jnp.ones(2))}
    tt.save_weights(file, model)
    with pytest.raises(tt.WeightsError, match="no Variable matched") as told:
        tt.load_weights(file, {"v": tt.Param(jnp.ones(2))}, rules={"\ud800": "x"})
    assert str(told.value).isascii()
