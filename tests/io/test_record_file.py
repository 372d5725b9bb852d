# SPDX-License-Identifier: Apache-2.0
"""Records in files: what comes back is what was saved, and bad files are refused."""

import collections
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import treetap as tt
from meshes import mesh_of
from treetap._io.record_descriptions import DTYPES
from treetap._io.record_file import ABOUT, load_record, save_record
from treetap._observe.records import Record, Site


def bits(value):
    """An array as what can be compared exactly."""
    if isinstance(value, jax.Array) and jnp.issubdtype(
        value.dtype, jax.dtypes.prng_key
    ):
        return str(jax.random.key_impl(value)), np.asarray(jax.random.key_data(value))
    return type(value), np.asarray(value)


def assert_same(found, wanted):
    assert [site.text for site in found] == [site.text for site in wanted]
    for one, other in zip(found, wanted, strict=True):
        fields = ("path", "name", "index", "kind", "how", "wraps", "module")
        assert [getattr(one, f) for f in fields] == [getattr(other, f) for f in fields]
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        (kind, left), (other, right) = bits(a), bits(b)
        assert kind == other
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        assert left.tobytes() == right.tobytes()


def round_trip(record, tmp_path):
    save_record(tmp_path / "run.safetensors", record)
    return load_record(tmp_path / "run.safetensors")


class Net(tt.Module):
    def __init__(self):
        self.layers = tt.List([tt.Linear(3, 3, rngs=tt.Rngs(n)) for n in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        self.sow(tt.Intermediate, "sown", x)
        nested = {"b": x, "a": (x.astype(jnp.bfloat16), [x > 0, None, 3])}
        tt.tap(nested, "nested")
        tt.tap(jax.random.split(jax.random.key(1, impl="rbg"), 2), "keys")
        return jax.lax.scan(lambda x, _: (tt.tap(2 * x, "s"), None), x, length=2)[0]


@pytest.fixture(scope="module")
def record():
    loss = jax.grad(lambda model, x: model(x).sum(), allow_int=True)
    return tt.observe(loss, grads=True)(Net(), jnp.ones((2, 3)))[1]


def test_a_run_comes_back_as_it_was(record, tmp_path):
    assert any(site.grad is not None for site in record)
    assert_same(round_trip(record, tmp_path), record)


def test_other_programs_can_read_the_file(record, tmp_path):
    save_record(tmp_path / "run.safetensors", record, metadata={"model": "net"})
    tensors = load_file(tmp_path / "run.safetensors")
    first = record["layers/0:__call__"]
    np.testing.assert_array_equal(tensors["layers/0:__call__"], first.value)
    np.testing.assert_array_equal(tensors["layers/0:__call__@grad"], first.grad)
    assert tensors["nested.a.1.0"].dtype == bool


@pytest.mark.parametrize("name", DTYPES)
def test_every_type_of_numbers(name, tmp_path):
    raw = np.arange(12, dtype=np.uint8) % 2
    array = raw.reshape(3, 4).astype(DTYPES[name])
    assert_same(
        round_trip(Record((Site(array, name="x"),)), tmp_path),
        Record((Site(array, name="x"),)),
    )


def test_numbers_odd_values_and_empty_arrays(tmp_path):
    Pair = collections.namedtuple("Pair", ["left", "right"])
    values = [
        {1: np.zeros((0, 3)), "1": np.array(5), (2, "x"): np.ones(1)},
        (True, 7, -2.5, 1 + 2j, float("inf"), ()),
        np.array([np.nan, -0.0, np.inf], np.float32),
        Pair(np.arange(3), [None]),
    ]
    sites = [Site(value, name=f"v{n}") for n, value in enumerate(values)]
    found = round_trip(Record(tuple(sites)), tmp_path)
    kinds = [bool, int, float, complex, float, tuple]
    assert [type(leaf) for leaf in found[1].value] == kinds
    assert found[1].value == values[1]
    assert list(found[0].value) == [1, "1", (2, "x")]
    assert found[3].value._fields == ("left", "right")
    assert type(found[3].value).__name__ == "Pair"
    np.testing.assert_array_equal(found[2].value, values[2])
    assert np.signbit(found[2].value[1])


def test_sites_whose_names_read_alike_stay_apart(tmp_path):
    one = Site(np.zeros(1), path=("a", 1), name="x")
    other = Site(np.ones(1), path=("a", "1"), name="x")
    odd = Site(np.full(1, 2.0), name="__metadata__")
    assert_same(
        round_trip(Record((one, other, odd)), tmp_path), Record((one, other, odd))
    )


class Own(tt.Intermediate):
    pass


def test_a_kind_that_is_not_known_becomes_its_base(tmp_path):
    class Passing(Own):
        pass

    record = Record((Site(np.ones(1), name="x", kind=Passing),))
    assert round_trip(record, tmp_path)[0].kind is Passing
    file = tmp_path / "run.safetensors"
    edit(file, lambda about: about["sites"][0]["kind"].__setitem__(0, "elsewhere.Kind"))
    assert load_record(file)[0].kind is Own
    edit(file, lambda about: about["sites"][0].__setitem__("kind", ["elsewhere.Kind"]))
    assert load_record(file)[0].kind is None


def test_arrays_of_64_bits_keep_them(tmp_path):
    with jax.enable_x64(True):
        value = jnp.asarray(np.array([1e300, 1 / 3]))
        record = Record((Site(value, name="x"),))
        assert_same(round_trip(record, tmp_path), record)
    found = load_record(tmp_path / "run.safetensors")[0].value
    assert isinstance(found, np.ndarray)
    np.testing.assert_array_equal(found, np.array([1e300, 1 / 3]))


def test_sharded_arrays_are_brought_together(tmp_path):
    mesh = mesh_of((4, 2), ("a", "b"))
    spec = jax.sharding.PartitionSpec("a", "b")
    value = jax.device_put(
        np.arange(32.0).reshape(8, 4), jax.sharding.NamedSharding(mesh, spec)
    )
    found = round_trip(Record((Site(value, name="x"),)), tmp_path)
    np.testing.assert_array_equal(found[0].value, value)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    file = tmp_path / "run.safetensors"
    save_record(file, Record((Site(np.zeros(2), name="x"),)))
    before = file.read_bytes()
    bad = Record((Site(np.ones(2), name="x"), Site(object(), name="y")))
    with pytest.raises(tt.CaptureError, match=r"save_record: y holds a object"):
        save_record(file, bad)
    assert file.read_bytes() == before
    save_record(file, Record((Site(np.ones(2), name="x"),)))
    assert [path.name for path in tmp_path.iterdir()] == ["run.safetensors"]


# Refusals.


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (jax.ShapeDtypeStruct((2,), jnp.float32), "is abstract"),
        ("text", "holds a str"),
        (np.array(["a"]), "holds <U1"),
        (2**70, "too large for 64 bits"),
        ({object(): np.ones(1)}, "is at a key <object"),
        (tt.Param(jnp.ones(1)), "holds a Param"),
    ],
)
def test_what_a_file_cannot_hold_is_refused(value, message, tmp_path):
    with pytest.raises(tt.CaptureError, match=f"save_record: x.*{message}"):
        save_record(tmp_path / "x.safetensors", Record((Site(value, name="x"),)))
    assert list(tmp_path.iterdir()) == []


def test_statistics_are_refused(tmp_path):
    record = Record((Site(None, name="x", reduced=np.ones(1)),))
    with pytest.raises(tt.CaptureError, match=r"x has statistics \(`reduced`\)"):
        save_record(tmp_path / "x.safetensors", record)


def test_values_too_deep_are_refused(tmp_path):
    deep = np.ones(1)
    for _ in range(70):
        deep = [deep]
    with pytest.raises(tt.CaptureError, match="more than 64 levels"):
        save_record(tmp_path / "x.safetensors", Record((Site(deep, name="x"),)))


def test_a_record_is_wanted_not_its_model(tmp_path):
    with pytest.raises(TypeError, match="a Record is wanted, not a dict"):
        save_record(tmp_path / "x.safetensors", {"a": np.ones(1)})


def test_traced_and_deleted_values_are_refused(tmp_path):
    file = tmp_path / "x.safetensors"

    def save(x):
        save_record(file, Record((Site(x, name="x"),)))
        return x

    with pytest.raises(tt.CaptureError, match="is being traced"):
        jax.jit(save)(jnp.ones(1))
    value = jnp.ones(1)
    value.delete()
    with pytest.raises(tt.CaptureError, match="was donated or deleted"):
        save(value)


def test_metadata_are_texts_and_not_ours(tmp_path):
    record = Record((Site(np.ones(1), name="x"),))
    with pytest.raises(TypeError, match="maps texts to texts"):
        save_record(tmp_path / "x.safetensors", record, metadata={"step": 3})
    with pytest.raises(ValueError, match="not free"):
        save_record(tmp_path / "x.safetensors", record, metadata={ABOUT: "{}"})


def test_a_file_of_weights_is_no_record(tmp_path):
    save_file({"w": np.ones(2, np.float32)}, tmp_path / "w.safetensors")
    with pytest.raises(tt.WeightsError, match=r"not from `save_record`; it holds w"):
        load_record(tmp_path / "w.safetensors")
    with pytest.raises(FileNotFoundError, match="load_record: there is no file"):
        load_record(tmp_path / "none.safetensors")
    save_file({}, tmp_path / "w.safetensors")
    for place in (tmp_path / "w.safetensors", tmp_path):
        with pytest.raises(tt.WeightsError, match="it holds no tensors"):
            load_record(place)


MANY_DIGITS = "@digits@"  # which `json` would not write
BOLD_DEF = "\U0001d41d\U0001d41e\U0001d41f"  # which Python reads as `def`


def edit(file: pathlib.Path, change):
    """Changes what a file says of its Record."""
    from safetensors import safe_open

    with safe_open(file, framework="np") as opened:
        about = json.loads(opened.metadata()[ABOUT])
    changed = change(about)
    text = json.dumps(about if changed is None else changed)
    text = text.replace(f'"{MANY_DIGITS}"', "9" * 5000)
    save_file(load_file(file), file, {ABOUT: text})


def site(about):
    return about["sites"][0]


@pytest.mark.parametrize(
    "change",
    [
        lambda about: [],
        lambda about: {**about, "version": 99},
        lambda about: {**about, "leaves": 3},
        lambda about: {**about, "leaves": []},
        lambda about: {**about, "leaves": [{"tensor": "other"}]},
        lambda about: {**about, "leaves": [{"tensor": "x", "dtype": "int4"}]},
        lambda about: {**about, "sites": {}},
        lambda about: {**about, "sites": [3]},
        lambda about: site(about).update(name=3),
        lambda about: site(about).update(index="0"),
        lambda about: site(about).update(wraps=[1]),
        lambda about: site(about).update(path=[["a"]]),
        lambda about: site(about).update(path=[{"plain": "a"}]),
        lambda about: site(about).update(value={"leaf": 7}),
        lambda about: site(about).update(value={"leaf": True}),
        lambda about: site(about).update(value={"leaf": 0, "key": "os.system"}),
        lambda about: site(about).update(value={"leaf": 0, "python": "eval"}),
        lambda about: site(about).update(value={"leaf": 0, "python": "int"}),
        lambda about: site(about).update(value={"set": [{"leaf": 0}]}),
        lambda about: site(about).update(value={"dict": [[1]]}),
        lambda about: site(about).update(value={"named": "a b", "fields": []}),
        lambda about: site(about).update(
            value={"named": "A", "fields": [["class", None]]}
        ),
        lambda about: site(about).update(
            value={"named": "A", "fields": [["_x", None]]}
        ),
        lambda about: site(about).update(value=nested(100)),
        lambda about: site(about).update(index=MANY_DIGITS),
        lambda about: site(about).update(value=named_like("ﬁ")),
        lambda about: site(about).update(value=named_like(BOLD_DEF)),
        lambda about: site(about).update(value={"dict": [["a", None], ["a", None]]}),
        lambda about: {**about, "leaves": [{"tensor": "x"}, {"tensor": "x"}]},
    ],
)
def test_descriptions_that_are_not_ours_are_refused(change, tmp_path):
    file = tmp_path / "x.safetensors"
    save_record(file, Record((Site(np.ones(2, np.float32), name="x"),)))
    edit(file, change)
    with pytest.raises(tt.WeightsError, match=r"load_record: .*is broken"):
        load_record(file)


@pytest.mark.parametrize("kind", ["bool", "int", "float", "complex"])
def test_numbers_of_another_kind_are_refused(kind, tmp_path):
    file = tmp_path / "x.safetensors"
    for other in (True, 3, float("nan"), 2 + 1j):
        save_record(file, Record((Site(other, name="x"),)))
        edit(file, lambda about: site(about)["value"].update(python=kind))
        if type(other).__name__ == kind:
            assert type(load_record(file)[0].value) is type(other)
        else:
            with pytest.raises(tt.WeightsError, match="no Python number"):
                load_record(file)


def test_keys_are_of_the_type_of_keys(tmp_path):
    file = tmp_path / "x.safetensors"
    save_record(file, Record((Site(np.array([1e300, 2.0]), name="x"),)))
    edit(file, lambda about: site(about)["value"].update(key="threefry2x32"))
    with pytest.raises(tt.WeightsError, match="float64, which is no random key"):
        load_record(file)
    save_record(file, Record((Site(jax.random.key(0), name="x"),)))
    edit(file, lambda about: site(about)["value"].update(key="my\ud800own"))
    with pytest.raises(tt.WeightsError, match=r"no random key: .*unrecognized") as told:
        load_record(file)
    assert str(told.value).isascii()


def test_names_in_messages_are_printable(tmp_path):
    save_file({"\x1b[2J": np.ones(2, np.float32)}, tmp_path / "w.safetensors")
    with pytest.raises(tt.WeightsError, match=r"it holds '\\x1b\[2J'"):
        load_record(tmp_path / "w.safetensors")


def nested(depth):
    node = {"leaf": 0}
    for _ in range(depth):
        node = {"list": [node]}
    return node


def named_like(field):
    return {"named": "A", "fields": [[field, {"leaf": 0}]]}


def test_a_description_that_is_no_json_is_refused(tmp_path):
    file = tmp_path / "x.safetensors"
    for text in ("{", "[" * 100_000):
        save_file({"x": np.ones(1)}, file, {ABOUT: text})
        with pytest.raises(tt.WeightsError, match=r"is broken"):
            load_record(file)


def test_every_shortened_file_is_refused(tmp_path):
    file = tmp_path / "x.safetensors"
    save_record(file, Record((Site(np.ones(2, np.float32), name="x"),)))
    data = file.read_bytes()
    for length in range(0, len(data), 7):
        file.write_bytes(data[:length])
        with pytest.raises(tt.WeightsError):
            load_record(file)


def mapped_run(rows):
    def fn(x):
        def step(carry, _):
            return carry, tt.tap({"x": carry * x, "c": jnp.arange(3.0)}, "v")["x"]

        return jax.lax.scan(step, 1.0, None, length=2)[1].sum()

    grad = jax.vmap(jax.grad(fn), axis_name="i")
    return tt.observe(grad, grads=True)(jnp.arange(float(rows)))[1]


def test_axes_come_back(tmp_path):
    record = mapped_run(4)
    save_record(tmp_path / "run.safetensors", record)
    loaded = load_record(tmp_path / "run.safetensors")
    assert jax.tree.structure(loaded) == jax.tree.structure(record)
    axes = loaded["v"].axes
    assert [(axis.kind, axis.size, axis.name) for axis in axes["x"]] == [
        ("vmap", 4, "i"),
        ("scan", 2, None),
    ]
    assert [axis.kind for axis in axes["c"]] == ["scan"]
    assert loaded["v"].figures.count == record["v"].figures.count
    assert loaded["v"].figures.norm == record["v"].figures.norm


BROKEN_AXES = {
    "no mapping": ([], "axes is"),
    "no levels": ({}, "levels"),
    "another number of arrays": ({"value": [[0, 1]]}, "axes of 1 arrays"),
    "more axes than the array": ({"value": [[0, 1, 0], [0, 1]]}, "3 first axes"),
    "two sizes": ({"value": [[0], [0, 1]]}, "has the sizes"),
    "a level that is not there": ({"value": [[2], [0, 1]]}, "3 levels|2 levels"),
    "no number": ({"value": [["x"], [0, 1]]}, "a level is 'x'"),
    "no name": ({"levels": [["vmap", 3], ["scan", None]]}, "a name is 3"),
    "axes of gradients": ({"grad": [[["vmap", None]] * 4]}, "4 first axes"),
}


@pytest.mark.parametrize("case", BROKEN_AXES)
def test_axes_that_a_file_cannot_mean_are_refused(case, tmp_path):
    said, message = BROKEN_AXES[case]
    file = tmp_path / "run.safetensors"
    save_record(file, mapped_run(4))

    def change(about):
        axes = site(about)["axes"]
        site(about)["axes"] = {**axes, **said} if said else said

    edit(file, change)
    with pytest.raises(tt.TreetapError, match=message):
        load_record(file)


def test_a_file_from_before_axes_has_values_and_no_axes():
    file = pathlib.Path(__file__).parents[1] / "data" / "earlier" / "record.safetensors"
    site = load_record(file)[0]
    assert site.value.shape == (2, 3)
    message = "Site.axes: the record of layers/0:__call__ was saved before axes were"
    with pytest.raises(tt.CaptureError, match=message):
        _ = site.axes
