# SPDX-License-Identifier: Apache-2.0
"""Stores: batches appended, read by site, by batch and shuffled; refusals."""

import builtins
import gc
import json
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from kept_records import assert_same, record_of

import treetap as tt
from meshes import mesh_of
from treetap._io.record_descriptions import DTYPES
from treetap._io.store import arrays, writers
from treetap._io.store.stores import Store
from treetap._io.store.writers import StoreWriter
from treetap._observe.records import Record, Site


def record_with(value, name="x", **about):
    return Record((Site(value, name=name, **about),))


def filled(folder, count=4, **options):
    with StoreWriter(folder, **options) as writer:
        for number in range(count):
            assert writer.append(record_of(number), {"number": number}) == number
    return Store(folder)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return filled(tmp_path_factory.mktemp("stores") / "runs", 12)


# Reading.


def test_batches_are_records_as_they_were(store):
    assert len(store) == 12
    for number, record in enumerate(store):
        assert_same(record, record_of(number))
    assert_same(store.batch(-1), record_of(11))
    assert [each["number"] for each in store.metadata] == list(range(12))
    with pytest.raises(IndexError, match="no batch 12; there are 12"):
        store.batch(12)


def rows_of(count=12):
    return np.concatenate([record_of(n)[0].value for n in range(count)])


@pytest.mark.parametrize(
    "index",
    [
        0,
        -1,
        slice(None),
        slice(3, 17),
        slice(-4, None),
        slice(None, None, 3),
        slice(None, None, -1),
        slice(9, 2),
        slice(0, 10_000),
        [4, 0, -1, 4],
        np.array([2, 3]),
        [],
        ...,
        (3, 2),
        (slice(2, 5), 7, slice(1, -2)),
        (..., 3),
        ([1, 5], slice(0, 2)),
        (2, -1, -1),
    ],
    ids=str,
)
def test_rows_are_indexed_as_by_numpy(store, index):
    found, wanted = store["blocks/0:__call__"][index], rows_of()[index]
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted, strict=True)


def test_rows_are_chosen_by_a_mask(store):
    mask = np.arange(len(rows_of())) % 3 == 0
    np.testing.assert_array_equal(store["blocks/0:__call__"][mask], rows_of()[mask])


@pytest.mark.parametrize(
    "index",
    [1000, -1000, 1.5, "a", (0, 40), (0, 0, 0, 0), (..., ...), (0, slice(0, 9, 2))],
)
def test_wrong_indices_are_refused(store, index):
    with pytest.raises(IndexError, match="StoredArray"):
        store["blocks/0:__call__"][index]


def test_an_array_tells_what_it_is(store):
    array = store["blocks/0:__call__"]
    rows = rows_of()
    assert (array.shape, array.dtype, array.ndim) == (rows.shape, rows.dtype, 3)
    assert (len(array), array.nbytes) == (len(rows), rows.nbytes)
    np.testing.assert_array_equal(np.asarray(array), rows)
    with pytest.raises(ValueError, match="are copied"):
        np.array(array, copy=False)
    assert repr(array) == "StoredArray('blocks/0:__call__', float32[33, 40, 30])"
    assert repr(store).startswith("Store: 12 batches, ")
    assert "loss  float64[12]" in repr(store)


def test_examples_come_first_and_scalars_get_an_axis(store):
    rows = len(rows_of())
    assert store["../../a/b:s"].shape == (rows, 4, 2)
    assert store["loss"].shape == store["loss@count"].shape == (12,)
    np.testing.assert_array_equal(store["loss"][:], np.arange(12.0))
    assert store.names[0] == "blocks/0:__call__"
    assert "loss" in store
    assert "other" not in store


def test_an_unknown_site_is_told_with_those_near(store):
    with pytest.raises(tt.CaptureError, match=r"no 'blocks/1:__call__'.*blocks/0:__"):
        store["blocks/1:__call__"]


def test_shuffled_rows_come_once_in_an_epoch(store):
    text = "blocks/0:__call__"
    batches = list(store.shuffled(text, 8, seed=1, buffer=3))
    assert [len(rows) for rows in batches] == [8, 8, 8, 8, 1]
    found = np.concatenate(batches)
    assert not np.array_equal(found, rows_of())
    order = np.lexsort(found[:, 0].T[:2])
    wanted = rows_of()
    np.testing.assert_array_equal(found[order], wanted[np.lexsort(wanted[:, 0].T[:2])])
    again = np.concatenate(list(store.shuffled(text, 8, seed=1, buffer=3)))
    np.testing.assert_array_equal(again, found)
    other = np.concatenate(list(store.shuffled(text, 8, seed=2, buffer=3)))
    assert not np.array_equal(other, found)
    full = list(store.shuffled(text, 8, epochs=2, drop_last=True))
    assert [len(rows) for rows in full] == [8] * 8
    assert not np.array_equal(full[0], full[4])


def test_shuffled_rows_of_several_sites_belong_together(store):
    texts = ["blocks/0:__call__", "blocks/0:pair.0"]
    places = {row.tobytes(): n for n, row in enumerate(rows_of())}
    other = store[texts[1]][:]
    for wide, pair in store.shuffled(texts, 5):
        for one, two in zip(wide, pair, strict=True):
            np.testing.assert_array_equal(other[places[one.tobytes()]], two)


def test_shuffled_refuses_what_does_not_fit(store):
    with pytest.raises(tt.StructureError, match="not the same number of rows"):
        store.shuffled(["blocks/0:__call__", "loss"], 4)
    with pytest.raises(ValueError, match="at least 1"):
        store.shuffled("loss", 0)
    with pytest.raises(tt.CaptureError, match="there is no"):
        store.shuffled("los", 4)


# Writing.


@pytest.mark.parametrize("name", DTYPES)
def test_every_type_of_numbers(name, tmp_path):
    values = [
        (np.arange(n, n + 6, dtype=np.uint8) % 2).reshape(2, 3).astype(DTYPES[name])
        for n in range(2)
    ]
    with StoreWriter(tmp_path / "runs") as writer:
        for value in values:
            writer.append(record_with(value))
    store = Store(tmp_path / "runs")
    assert store["x"].dtype == DTYPES[name]
    found = store["x"][:]
    assert found.tobytes() == np.concatenate(values).tobytes()
    assert_same(store.batch(1), record_with(values[1]))


def test_keys_and_python_numbers_come_back(tmp_path):
    with StoreWriter(tmp_path / "runs") as writer:
        for n in range(2):
            keys = jax.random.split(jax.random.key(n), 3)
            writer.append(record_with({"keys": keys, "step": n, "rate": 0.5 * n}))
    found = Store(tmp_path / "runs").batch(1)["x"].value
    assert (found["step"], found["rate"]) == (1, 0.5)
    assert type(found["step"]) is int
    wanted = jax.random.split(jax.random.key(1), 3)
    assert found["keys"].dtype == wanted.dtype
    assert (found["keys"] == wanted).all()


def test_zeros_are_kept_and_lost_data_are_no_zeros(tmp_path):
    filled_with = record_with(np.zeros((4, 3), np.float32))
    with StoreWriter(tmp_path / "runs") as writer:
        writer.append(filled_with)
        writer.append(filled_with)
    assert_same(Store(tmp_path / "runs").batch(1), filled_with)
    chunks = sorted(p for p in (tmp_path / "runs/data").rglob("c/*/*") if p.is_file())
    assert len(chunks) == 2
    chunks[1].unlink()
    store = Store(tmp_path / "runs")
    assert_same(store.batch(0), filled_with)
    with pytest.raises(tt.WeightsError, match="x are broken or missing"):
        store.batch(1)


def test_a_changed_byte_is_found(tmp_path):
    filled(tmp_path / "runs", 1)
    (chunk,) = (tmp_path / "runs/data").glob("0000-*/c/0/0/0")
    data = bytearray(chunk.read_bytes())
    data[100] ^= 1
    chunk.write_bytes(data)
    with pytest.raises(tt.WeightsError, match="blocks/0:__call__ are broken"):
        Store(tmp_path / "runs").batch(0)


def test_a_store_is_continued(tmp_path):
    filled(tmp_path / "runs", 3)
    with StoreWriter(tmp_path / "runs") as writer:
        assert len(writer) == 3
        for number in range(3, 6):
            assert writer.append(record_of(number)) == number
    store = Store(tmp_path / "runs")
    for number, record in enumerate(store):
        assert_same(record, record_of(number))
    assert len(store) == 6


def test_a_reader_sees_what_was_there_when_it_was_opened(tmp_path):
    with StoreWriter(tmp_path / "runs") as writer:
        assert len(Store(tmp_path / "runs")) == 0
        writer.append(record_of(0))
        early = Store(tmp_path / "runs")
        writer.append(record_of(1))
        assert (len(early), len(Store(tmp_path / "runs"))) == (1, 2)
        assert_same(early.batch(0), record_of(0))


@pytest.mark.parametrize("compression", [0, 3])
def test_compression_changes_only_the_size(compression, tmp_path):
    value = np.zeros((100, 100), np.float32)
    with StoreWriter(tmp_path / "runs", compression=compression) as writer:
        writer.append(record_with(value))
    size = sum(p.stat().st_size for p in (tmp_path / "runs").rglob("*") if p.is_file())
    assert (size < value.nbytes / 10) == bool(compression)
    np.testing.assert_array_equal(Store(tmp_path / "runs")["x"][:], value)


def test_axes_are_chosen_by_selector(tmp_path):
    sites = [Site(np.ones((2, 3)), path=(name,), name="x") for name in "abc"]
    with StoreWriter(tmp_path / "runs", axis={"a": 1, "b": None}) as writer:
        for _ in range(2):
            writer.append(Record(tuple(sites)))
    store = Store(tmp_path / "runs")
    shapes = {text: store[text].shape for text in store.names}
    assert shapes == {"a:x": (6, 2), "b:x": (2, 2, 3), "c:x": (4, 3)}
    assert_same(store.batch(1), Record(tuple(sites)))


# Shards.


@pytest.mark.parametrize("spec", [("a", None), ("a", "b"), (None, "b"), (None, None)])
def test_shards_are_written_apart_and_read_together(spec, tmp_path, monkeypatch):
    mesh = mesh_of((4, 2), ("a", "b"))
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    values = [np.arange(n, n + 32.0, dtype=np.float32).reshape(8, 4) for n in range(2)]
    written, real = [], arrays._write

    def write(array, column, data, *rest):
        written.append(data.shape)
        return real(array, column, data, *rest)

    monkeypatch.setattr(arrays, "_write", write)
    with StoreWriter(tmp_path / "runs") as writer:
        for value in values:
            writer.append(record_with(jax.device_put(value, sharding)))
    chunks = [p for p in (tmp_path / "runs/data").rglob("c/*/*") if p.is_file()]
    parts = (4 if spec[0] else 1) * (2 if spec[1] else 1)
    assert len(chunks) == 2 * parts
    assert written == [sharding.shard_shape((8, 4))] * 2 * parts
    store = Store(tmp_path / "runs")
    np.testing.assert_array_equal(store["x"][:], np.concatenate(values))


def test_batches_of_other_shardings_fit_too(tmp_path):
    mesh = mesh_of((4, 2), ("a", "b"))
    value = np.arange(32.0, dtype=np.float32).reshape(8, 4)
    specs = [("a", "b"), (None, "a"), ("b", None)]
    with StoreWriter(tmp_path / "runs") as writer:
        for spec in specs:
            sharding = NamedSharding(mesh, PartitionSpec(*spec))
            writer.append(record_with(jax.device_put(value, sharding)))
        writer.append(record_with(jnp.asarray(value)[:5]))
        writer.append(record_with(value))
    wanted = np.concatenate([value] * 3 + [value[:5], value])
    np.testing.assert_array_equal(Store(tmp_path / "runs")["x"][:], wanted)


def test_what_a_scan_stacked_is_joined_along_the_examples(tmp_path):
    def run(x):
        return jax.lax.scan(lambda x, _: (tt.tap(2 * x, "s"), None), x, length=3)[0]

    with StoreWriter(tmp_path / "runs") as writer:
        for n in range(2):
            _, record = tt.observe(jax.jit(run))(jnp.full((5, 2), 1.0 + n))
            writer.append(record)
    store = Store(tmp_path / "runs")
    assert store["s"].shape == (10, 3, 2)
    assert_same(store.batch(1), record)


def test_rows_of_a_mapping_are_examples_and_may_be_of_any_number(tmp_path):
    def run(x):
        return jax.lax.scan(lambda x, _: (tt.tap(2 * x, "s"), None), x, length=3)[0]

    records = [tt.observe(jax.vmap(run))(jnp.ones((n, 2)))[1] for n in (5, 4, 3)]
    for record in records:
        with StoreWriter(tmp_path / "runs") as writer:  # begun anew each time
            writer.append(record)
    store = Store(tmp_path / "runs")
    assert store["s"].shape == (12, 3, 2)
    for number, record in enumerate(records):
        found = store.batch(number)
        assert_same(found, record)
        assert [axis.size for axis in found["s"].axes] == [5 - number, 3]


# Refusals.


def refused(writer, record, message):
    before = len(writer)
    with pytest.raises(tt.StructureError, match=message):
        writer.append(record)
    assert len(writer) == before


def test_records_of_other_sites_shapes_and_types_are_refused(tmp_path):
    with StoreWriter(tmp_path / "runs") as writer:
        value = np.ones((2, 3), np.float32)
        writer.append(record_with(value))
        refused(writer, record_with(value, name="y"), "has x, and the Record has y")
        two = Record((*record_with(value), *record_with(value, name="y")))
        refused(writer, two, "has nothing more, and the Record has y")
        refused(writer, Record(()), "has x, and the Record has nothing more")
        refused(
            writer,
            record_with(value[:, :2]),
            r"x is float32\[2,2\], and the store has float32\[rows,3\]",
        )
        refused(writer, record_with(value.astype(np.float16)), r"x is float16\[2,3\]")
        refused(writer, record_with(value[0]), r"x is float32\[3\]")
        refused(writer, record_with((value,)), "has x with another value")
        refused(writer, record_with(value, grad=value), "has x with another grad")
        writer.append(record_with(value[:1], module="another"))
    np.testing.assert_array_equal(Store(tmp_path / "runs")["x"][:], np.ones((3, 3)))


def test_bad_arguments_are_refused(tmp_path):
    with pytest.raises(TypeError, match=r"`axis` is a number from 0.*'a'"):
        StoreWriter(tmp_path / "runs", axis={"x": "a"})
    with pytest.raises(ValueError, match="`compression` is 0 to 22"):
        StoreWriter(tmp_path / "runs", compression=99)
    with (
        StoreWriter(tmp_path / "a", axis={"y": 1}) as writer,
        pytest.raises(tt.CaptureError, match="matches none of 1 sites"),
    ):
        writer.append(record_with(np.ones(2)))
    with StoreWriter(tmp_path / "b", axis=1) as writer:
        with pytest.raises(tt.StructureError, match=r"shape \(2,\), so no axis 1"):
            writer.append(record_with(np.ones(2)))
        with pytest.raises(tt.CaptureError, match="has no values"):
            writer.append(Record(()))
        with pytest.raises(TypeError, match="what JSON has"):
            writer.append(record_with(np.ones((2, 2))), {"x": object()})
        with pytest.raises(TypeError, match="what JSON has"):
            writer.append(record_with(np.ones((2, 2))), {"x": float("nan")})
        with pytest.raises(TypeError, match="a Record is wanted"):
            writer.append({"x": np.ones(2)})
    with pytest.raises(ValueError, match="the writer is closed"):
        writer.append(record_with(np.ones((2, 2))))
    assert len(Store(tmp_path / "b")) == 0


def test_one_writer_at_a_time(tmp_path):
    with (
        StoreWriter(tmp_path / "runs"),
        pytest.raises(BlockingIOError, match="another writer has"),
    ):
        StoreWriter(tmp_path / "runs")
    StoreWriter(tmp_path / "runs").close()


def test_a_forgotten_writer_keeps_nobody_out(tmp_path):
    writer = StoreWriter(tmp_path / "runs")
    writer.append(record_of(0))
    del writer
    gc.collect()
    with StoreWriter(tmp_path / "runs") as writer:
        assert writer.append(record_of(1)) == 1


def test_foreign_folders_are_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("words")
    with pytest.raises(FileExistsError, match=r"not a store.*thesis\.txt"):
        StoreWriter(tmp_path / "mine")
    assert os.listdir(tmp_path / "mine") == ["thesis.txt"]
    with pytest.raises(FileExistsError, match="is a file"):
        StoreWriter(tmp_path / "mine/thesis.txt")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        StoreWriter(tmp_path / "a/b")
    with pytest.raises(FileNotFoundError, match="there is no store"):
        Store(tmp_path / "none")
    for place in ("mine", "mine/thesis.txt"):
        with pytest.raises(tt.WeightsError, match="is no store"):
            Store(tmp_path / place)


@pytest.mark.parametrize("text", [b"hello", b"hello\n", b"00000000 {}\n", b"{}"])
def test_a_journal_that_is_not_ours_is_refused_and_kept(text, tmp_path):
    file = tmp_path / "journal-0.jsonl"
    file.write_bytes(text)
    for kind in (Store, StoreWriter):
        with pytest.raises(tt.WeightsError, match="is not the journal of a store"):
            kind(tmp_path)
    assert file.read_bytes() == text


def test_a_torn_last_line_is_passed_over_and_cut_off(tmp_path):
    filled(tmp_path / "runs", 2)
    file = tmp_path / "runs/journal-0.jsonl"
    whole = file.read_bytes()
    ends = [n + 1 for n, byte in enumerate(whole) if byte == ord("\n")]
    for length in range(0, len(whole), 11):
        file.write_bytes(whole[:length])
        count = max(0, sum(end <= length for end in ends) - 2)
        assert len(Store(tmp_path / "runs")) == count
    file.write_bytes(whole[:-3])
    with StoreWriter(tmp_path / "runs") as writer:
        assert writer.append(record_of(1)) == 1
    store = Store(tmp_path / "runs")
    assert_same(store.batch(1), record_of(1))


def test_a_broken_line_before_the_end_is_refused(tmp_path):
    filled(tmp_path / "runs", 2)
    file = tmp_path / "runs/journal-0.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b"rows", b"cows")
    file.write_bytes(b"".join(lines))
    for kind in (Store, StoreWriter):
        with pytest.raises(tt.WeightsError, match="is broken at line 3"):
            kind(tmp_path / "runs")


def rewrite(file, number, change):
    """Changes one line of a journal, with a checksum that fits."""
    from treetap._io.store.journals import _line, read_journal

    entries = [line.entry for line in read_journal(file, "test")]
    change(entries[number])
    file.write_bytes(b"".join(map(_line, entries)))


@pytest.mark.parametrize(
    ("number", "change", "message"),
    [
        (0, lambda e: e.update(version=9), "another version"),
        (0, lambda e: e.update(processes="x"), "another version"),
        (1, lambda e: e.update(columns=3), "is broken"),
        (1, lambda e: e["columns"][0].update(dtype="object"), "is broken"),
        (1, lambda e: e["columns"][0].update(axis=9), "is broken"),
        (1, lambda e: e["columns"][0].update(dtype="int8"), "another store"),
        (1, lambda e: e["columns"][0].update(text="elsewhere"), "broken, missing, or"),
        (1, lambda e: e["columns"].pop(), "is broken"),
        (2, lambda e: e.update(rows=[-1]), "is broken"),
        (2, lambda e: e.pop("metadata"), "is broken"),
        (2, lambda e: e["rows"].__setitem__(0, 10_000), "rows, and 1000"),
        (2, lambda e: e.update(metadata=["abc"]), "is broken"),
        (2, lambda e: e["rows"].__setitem__(-1, 0), "other rows than one"),
        (2, lambda e: e["rows"].__setitem__(0, 2**70), "is broken"),
        (1, lambda e: e["columns"][0].update(chunk=[]), "is broken"),
        (1, lambda e: e["columns"][0].update(chunk=[0, 40, 30]), "is broken"),
        (1, lambda e: e["columns"][0].update(chunk=[2, 40, 30]), "another store"),
    ],
)
def test_journals_that_lie_are_refused(number, change, message, tmp_path):
    filled(tmp_path / "runs", 2)
    rewrite(tmp_path / "runs/journal-0.jsonl", number, change)
    for kind in (Store, StoreWriter):
        with pytest.raises(tt.WeightsError, match=message):
            kind(tmp_path / "runs")


def test_any_number_of_processes_may_be_told(tmp_path):
    filled(tmp_path / "runs", 1)
    file = tmp_path / "runs/journal-0.jsonl"
    rewrite(file, 0, lambda e: e.update(processes=10**15))
    assert len(Store(tmp_path / "runs")) == 0


def rewrite_array(folder, change):
    """Changes what the first array says of itself."""
    (file,) = (folder / "data").glob("0000-*/zarr.json")
    about = json.loads(file.read_text())
    change(about)
    file.write_text(json.dumps(about))


def test_a_broken_description_of_an_array_is_quoted_in_print(tmp_path):
    filled(tmp_path / "runs", 1)
    (file,) = (tmp_path / "runs" / "data").glob("0000-*/zarr.json")
    file.write_text(json.dumps([{"a\x7fb": "long " * 10_000}], ensure_ascii=False))
    said = "broken, missing, or of another store: .*a\ufffdb"
    with pytest.raises(tt.WeightsError, match=said) as caught:
        Store(tmp_path / "runs")[0]
    assert len(str(caught.value)) < 1_000


@pytest.mark.parametrize("packing", ["gzip", "sharding_indexed"])
def test_arrays_of_another_packing_are_refused(packing, tmp_path):
    filled(tmp_path / "runs", 1)
    gzip = {"name": "gzip", "configuration": {"level": 5}}
    inner = [{"name": "bytes", "configuration": {"endian": "little"}}]
    parts = {"chunk_shape": [1, 40, 30], "codecs": inner, "index_codecs": inner}
    codecs = {
        "gzip": [*inner, gzip],
        "sharding_indexed": [{"name": "sharding_indexed", "configuration": parts}],
    }
    rewrite_array(tmp_path / "runs", lambda e: e.update(codecs=codecs[packing]))
    with pytest.raises(tt.WeightsError, match="is of another store"):
        Store(tmp_path / "runs")


def test_what_no_memory_can_hold_is_refused_and_ends_no_program(tmp_path):
    filled(tmp_path / "runs", 1)
    rewrite_array(tmp_path / "runs", lambda e: e["shape"].__setitem__(0, 2**50))
    file = tmp_path / "runs/journal-0.jsonl"
    rewrite(file, 2, lambda e: e["rows"].__setitem__(0, 2**49))
    store = Store(tmp_path / "runs")
    with pytest.raises(MemoryError, match=r"StoredArray: .* Read fewer rows"):
        store.batch(0)
    with pytest.raises(MemoryError, match=r"StoredArray: .* Read fewer rows"):
        np.asarray(store["blocks/0:__call__"])
    long = [2**50, 40, 30]
    rewrite(file, 1, lambda e: e["columns"][0].update(chunk=long))

    def lengthen(about):
        about["chunk_grid"]["configuration"]["chunk_shape"] = long

    rewrite_array(tmp_path / "runs", lengthen)
    with pytest.raises(MemoryError, match="a chunk of blocks/0:__call__ has"):
        Store(tmp_path / "runs")


def test_values_in_a_journal_that_lie_are_refused(tmp_path):
    filled(tmp_path / "runs", 1)
    file = tmp_path / "runs/journal-0.jsonl"
    rewrite(file, 1, lambda e: e["sites"][0].update(value={"leaf": 99}))
    with pytest.raises(tt.WeightsError, match="is broken: there is no leaf 99"):
        Store(tmp_path / "runs").batch(0)


@pytest.mark.parametrize("sites", [3, [3], [{}], [{"path": 3}], {"path": []}])
def test_a_store_whose_sites_are_broken_is_refused(sites, tmp_path):
    filled(tmp_path / "runs", 1)
    rewrite(tmp_path / "runs/journal-0.jsonl", 1, lambda e: e.update(sites=sites))
    for kind in (Store, StoreWriter):
        with pytest.raises(tt.WeightsError, match="is broken"):
            kind(tmp_path / "runs")


def test_names_never_lead_out_of_the_folder(tmp_path):
    names = ["../../x", "/etc/x", "a\0b", "..", "", "é" * 300, "c:\\x", "\ud800"]
    sites = [Site(np.ones(2), path=(name,), name=name) for name in names]
    with StoreWriter(tmp_path / "inner") as writer:
        writer.append(Record(tuple(sites)))
    assert os.listdir(tmp_path) == ["inner"]
    assert sorted(os.listdir(tmp_path / "inner")) == ["data", "journal-0.jsonl"]
    assert len(os.listdir(tmp_path / "inner/data")) == len(names)
    assert_same(Store(tmp_path / "inner").batch(0), Record(tuple(sites)))


def test_links_that_lead_out_are_not_followed(tmp_path):
    filled(tmp_path / "runs", 1)
    (tmp_path / "elsewhere").mkdir()
    shutil.move(tmp_path / "runs/data", tmp_path / "elsewhere/data")
    (tmp_path / "runs/data").symlink_to(tmp_path / "elsewhere/data")
    for kind in (Store, StoreWriter):
        with pytest.raises(tt.WeightsError, match="is a link that leads elsewhere"):
            kind(tmp_path / "runs")
    (tmp_path / "new").mkdir()
    (tmp_path / "new/journal-0.jsonl").symlink_to(tmp_path / "elsewhere/journal")
    with pytest.raises(OSError, match="cannot be opened for writing"):
        StoreWriter(tmp_path / "new")
    (tmp_path / "third").mkdir()
    with StoreWriter(tmp_path / "third") as writer:
        (tmp_path / "third/data").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(tt.WeightsError, match="is a link that leads elsewhere"):
            writer.append(record_of(0))
    assert os.listdir(tmp_path / "elsewhere") == ["data"]


def test_a_failed_write_keeps_nothing_and_the_next_one_works(tmp_path, monkeypatch):
    with StoreWriter(tmp_path / "runs") as writer:
        writer.append(record_of(0))
        real, calls = os.write, []

        def half(handle, data):
            calls.append(1)
            if len(calls) == 2:
                raise OSError(28, "no space left")
            return real(handle, bytes(data)[:20])

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", half)
            with pytest.raises(OSError, match="no space left"):
                writer.append(record_of(1))
        assert len(Store(tmp_path / "runs")) == len(writer) == 1
        assert writer.append(record_of(1)) == 1
    assert_same(Store(tmp_path / "runs").batch(1), record_of(1))


def test_an_interrupted_batch_comes_to_its_end_before_the_next(tmp_path, monkeypatch):
    waited = []

    class Slow:
        """A write that is still at work when the interrupt comes."""

        def result(self):
            waited.append(self)
            if len(waited) == 1:
                raise KeyboardInterrupt

    with StoreWriter(tmp_path / "runs") as writer:
        writer.append(record_of(0))
        with monkeypatch.context() as patch:
            patch.setattr(writers, "written", lambda *_: iter([Slow()]))
            with pytest.raises(KeyboardInterrupt):
                writer.append(record_of(1))
        assert len(waited) == 1
        assert writer.append(record_of(1)) == 1
        assert len(waited) > 3
    assert_same(Store(tmp_path / "runs").batch(1), record_of(1))


def test_a_smaller_batch_follows_one_that_failed(tmp_path, monkeypatch):
    few, many = (record_with(np.full((n, 3), n, np.float32)) for n in (1, 5))

    def fail(_):
        raise OSError(28, "no space left")

    with StoreWriter(tmp_path / "runs") as writer:
        writer.append(few)
        with monkeypatch.context() as patch:
            patch.setattr(writer._journal, "write", fail)
            with pytest.raises(OSError, match="no space left"):
                writer.append(many)
        assert writer.append(few) == 1
    with StoreWriter(tmp_path / "runs") as writer:
        assert writer.append(many) == 2
    store = Store(tmp_path / "runs")
    for number, wanted in enumerate((few, few, many)):
        assert_same(store.batch(number), wanted)


def test_a_batch_that_an_interrupt_hid_is_counted(tmp_path, monkeypatch):
    with StoreWriter(tmp_path / "runs") as writer:
        writer.append(record_of(0))

        real, calls = writer._catch_up, []

        def interrupted():
            calls.append(1)
            if len(calls) == 2:  # the batch is told, and not yet noted
                raise KeyboardInterrupt
            real()

        with monkeypatch.context() as patch:
            patch.setattr(writer, "_catch_up", interrupted)
            with pytest.raises(KeyboardInterrupt):
                writer.append(record_of(1))
        assert writer.append(record_of(2)) == 2
    store = Store(tmp_path / "runs")
    for number in range(3):
        assert_same(store.batch(number), record_of(number))


def test_other_counts_of_processes_are_refused(tmp_path):
    filled(tmp_path / "runs", 1)
    rewrite(tmp_path / "runs/journal-0.jsonl", 0, lambda e: e.update(processes=2))
    with pytest.raises(tt.WeightsError, match="by 2 processes, and these are 1"):
        StoreWriter(tmp_path / "runs")
    assert len(Store(tmp_path / "runs")) == 0  # the other has told nothing


def test_without_tensorstore_the_extra_is_named(tmp_path, monkeypatch):
    real = builtins.__import__

    def absent(name, *args, **kwargs):
        if name == "tensorstore":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    for kind in (Store, StoreWriter):
        with pytest.raises(ImportError, match=r"pip install treetap\[store\]"):
            kind(tmp_path / "runs")


def test_the_journal_is_lines_of_json(tmp_path):
    filled(tmp_path / "runs", 1)
    lines = (tmp_path / "runs/journal-0.jsonl").read_text().splitlines()
    header, sites, batch = (json.loads(line.split(" ", 1)[1]) for line in lines)
    assert header == {"format": "treetap store", "version": 1, "processes": 1}
    assert [site["name"] for site in sites["sites"]][:2] == ["__call__", "pair"]
    assert batch["metadata"] == {"number": 0}


def test_names_near_one_that_is_not_there_are_printable(tmp_path):
    record = tt.Record((tt.Site(np.ones((1, 2), np.float32), name="a\x1b[2J"),))
    with tt.StoreWriter(tmp_path / "runs") as writer:
        writer.append(record)
    with pytest.raises(tt.CaptureError, match="near it are") as told:
        tt.Store(tmp_path / "runs")["a\x1b"]
    assert str(told.value).isprintable()


EARLIER = pathlib.Path(__file__).parents[2] / "data" / "earlier"


def test_a_store_of_an_earlier_version_is_continued(tmp_path):
    shutil.copytree(EARLIER / "store", tmp_path / "runs")
    record = tt.load_record(EARLIER / "record.safetensors")
    assert {site.kind for site in record} == {tt.Intermediate}
    with StoreWriter(tmp_path / "runs") as writer:
        assert writer.append(record) == 2
    store = Store(tmp_path / "runs")
    assert_same(store.batch(2), store.batch(0))
    assert store.batch(2)[0].kind is tt.Intermediate
