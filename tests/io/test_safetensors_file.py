# SPDX-License-Identifier: Apache-2.0
"""Safetensors files, good, broken and hostile."""

import contextlib
import json
import os
import pathlib
import resource
import time
import tracemalloc

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from treetap import WeightsError
from treetap._io.safetensors_file import (
    DIAGNOSED,
    DTYPES,
    stored_tensors,
    write_tensors,
)

ONE = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


def file_of(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    return size.to_bytes(8, "little") + text + data


def read(path):
    return {
        name: np.array(stored.view("test"))
        for name, stored in stored_tensors(path, "test").items()
    }


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "model.safetensors"

    def write(content):
        path.write_bytes(content)
        return path

    return write


def test_values_shapes_and_dtypes_are_those_of_the_library(tmp_path):
    path = tmp_path / "a.safetensors"
    arrays = {
        "a": np.arange(6.0).reshape(2, 3),
        "b.c": np.arange(5, dtype=np.uint8),
        "scalar": np.array(3, np.int64),
        "empty": np.zeros((0, 3), np.float16),
        "bool": np.array([True, False]),
    }
    save_file(arrays, path, {"a": "text"})
    found = read(path)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("code", sorted(DTYPES))
def test_every_dtype_comes_back_bit_for_bit(tmp_path, code):
    path = tmp_path / "a.safetensors"
    dtype = DTYPES[code]
    array = np.arange(6).astype(dtype).reshape(2, 3)
    write_tensors(path, {"x": array}, {}, "test")
    stored = stored_tensors(path, "test")["x"]
    assert (stored.code, stored.dtype, stored.shape) == (code, dtype, (2, 3))
    assert stored.view("test").tobytes() == array.tobytes()


def test_tensors_may_start_at_any_byte(written):
    header = {
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
    }
    values = np.array([1.5, -2.0], np.float32)
    found = read(written(file_of(header, b"abc" + values.tobytes())))
    np.testing.assert_array_equal(found["b"], values)


def other(**changes):
    return {"a": {**ONE, **changes}}


BROKEN = {
    "empty file": (b"", "too small"),
    "a few bytes": (b"123", "too small"),
    "cut in the header": (file_of({"a": ONE})[:30], "header length"),
    "cut in the data": (file_of({"a": ONE}, b"123"), "tensor 'a'"),
    "bytes left over": (file_of({"a": ONE}, b"12345"), "not fully covered"),
    "a long header": (file_of({"a": ONE}, length=10**6), "header length"),
    "a huge header": (file_of({"a": ONE}, length=2**63), "too large"),
    "no JSON": (file_of(b"hello"), "JSON"),
    "not UTF-8": (file_of(b'{"\xff": 1}'), "UTF-8"),
    "a list": (file_of(b"[]"), "sequence"),
    "deep lists": (file_of(b'{"a":' + b"[" * 10**5 + b"]" * 10**5 + b"}"), "JSON"),
    "digits": (file_of(b'{"a":' + b"1" * 10**5 + b"}"), "JSON"),
    "not an object": (file_of({"a": 3}), "tensor 'a' is described as 3"),
    "no dtype": (file_of({"a": {"shape": [1], "data_offsets": [0, 4]}}), "tensor 'a'"),
    "dtype unknown": (file_of(other(dtype="F99"), b"1234"), "tensor 'a'.*`F99`"),
    "dtype no text": (file_of(other(dtype=[]), b"1234"), "tensor 'a'"),
    "negative shape": (file_of(other(shape=[-1]), b"1234"), r"tensor 'a'.*\[-1\]"),
    "float shape": (file_of(other(shape=[1.0]), b"1234"), r"tensor 'a'.*\[1.0\]"),
    "huge shape": (file_of(other(shape=[2**62] * 4), b"1234"), "tensor 'a'"),
    "larger shape": (file_of(other(shape=[2**64]), b"1234"), "tensor 'a'"),
    "wrong size": (file_of(other(shape=[2]), b"1234"), r"tensor 'a'.*\[2\]"),
    "wrong size of less than a byte": (
        file_of(other(dtype="F4", shape=[3]), b"1234"),
        "tensor 'a'.*'F4'",
    ),
    "reversed": (file_of(other(data_offsets=[4, 0]), b"1234"), "tensor 'a'"),
    "beyond the end": (
        file_of(other(data_offsets=[0, 400], shape=[100]), b"1234"),
        r"tensor 'a'.*\[0, 400\]",
    ),
    "three offsets": (file_of(other(data_offsets=[0, 2, 4]), b"1234"), "tensor 'a'"),
    "overlap": (
        file_of({"a": ONE, "b": {**ONE, "data_offsets": [2, 6]}}, b"123456"),
        "offset for tensor `b`",
    ),
    "same place": (file_of({"a": ONE, "b": ONE}, b"1234"), "offset for tensor `[ab]`"),
    "gap": (
        file_of({"a": ONE, "b": {**ONE, "data_offsets": [8, 12]}}, bytes(12)),
        "offset for tensor `b`",
    ),
    "name twice": (
        file_of(b'{"a":%b,"a":%b}' % ((json.dumps(ONE).encode(),) * 2), b"1234"),
        "'a' twice",
    ),
    "metadata": (
        file_of({"__metadata__": {"x": 1}, "a": ONE}, b"1234"),
        "expected a string",
    ),
    "zip": (b"PK\x03\x04" + bytes(100), "zip archive"),
    "pickle": (b"\x80\x04\x95" + bytes(100), "a pickle"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_refused_with_file_and_reason(written, case):
    content, reason = BROKEN[case]
    path = written(content)
    with pytest.raises(WeightsError, match=reason) as caught:
        stored_tensors(path, "load_weights")
    assert str(caught.value).startswith(f"load_weights: {path} is broken: ")


def test_names_from_a_file_are_shown_safely(written):
    name = "\x1b[2J\n" + "x" * 10_000
    path = written(file_of({name: {**ONE, "shape": [2]}}, b"1234"))
    with pytest.raises(WeightsError) as caught:
        stored_tensors(path, "load_weights")
    assert "\x1b" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "shape",
    [[2**64 - 1, 0], [0, 2**40, 2**40], [0, *[1] * 64], [2**15, 2**15, 0]],
    ids=str,
)
def test_shapes_that_no_array_can_have_are_refused(written, shape):
    content = file_of({"a": {**ONE, "shape": shape, "data_offsets": [0, 0]}})
    with pytest.raises(WeightsError, match=r"'a' has the shape .* no array can have"):
        stored_tensors(written(content), "load_weights")


def test_hostile_headers_cost_neither_time_nor_memory(written):
    path = written(file_of(other(shape=[2**40, 2**40]), b"1234"))
    many = b'{"a":[' + b"[]," * 3_000_000 + b"[]]}"
    start = time.monotonic()
    tracemalloc.start()
    try:
        for content in (path.read_bytes(), file_of(many), file_of(b"{}", length=2**60)):
            with pytest.raises(WeightsError):
                stored_tensors(written(content), "load_weights")
        big = written(file_of(b"{}", length=150_000_001))
        os.truncate(big, 200_000_000)
        with pytest.raises(WeightsError, match="too large"):
            stored_tensors(big, "load_weights")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.monotonic() - start < 10
    assert peak < 50_000_000


def test_what_is_said_of_a_long_header_is_printable(written):
    header = json.dumps({"a": {**ONE, "dtype": "F\x7f32"}}, ensure_ascii=False)
    content = file_of(header.encode() + b" " * DIAGNOSED, b"1234")
    with pytest.raises(WeightsError, match="unknown variant `F\ufffd32`"):
        stored_tensors(written(content), "load_weights")


@hypothesis.given(st.data())
def test_damaged_files_are_read_or_refused_and_nothing_else(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damaged") / "a.safetensors"
    save_file({"a": np.arange(4.0), "b": np.ones((2, 2), np.int8)}, path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(content[: data.draw(st.integers(0, len(content)))]))
    with contextlib.suppress(WeightsError):
        read(path)


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".pkl", ".ckpt"])
def test_pickles_are_never_opened(tmp_path, suffix):
    with pytest.raises(WeightsError, match=r"not opened.*safetensors\.torch"):
        stored_tensors(tmp_path / f"model{suffix}", "load_weights")


@pytest.mark.parametrize("suffix", [".npz", ".h5", ".gguf", ".msgpack"])
def test_other_formats_are_refused(tmp_path, suffix):
    with pytest.raises(WeightsError, match=r"safetensors\.numpy"):
        stored_tensors(tmp_path / f"model{suffix}", "load_weights")


def test_no_file_and_no_regular_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file"):
        stored_tensors(tmp_path / "no.safetensors", "load_weights")
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(WeightsError, match="not a regular file"):
        stored_tensors(tmp_path / "pipe.safetensors", "load_weights")


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"a": np.arange(1000.0)}, path)
    stored = stored_tensors(path, "test")["a"]
    os.truncate(path, 200)
    with pytest.raises(WeightsError, match="changed while it was read"):
        stored.view("test")


# Several files.


def sharded(folder, index=None):
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"a": np.ones(2)}, folder / "model-1.safetensors")
    save_file({"b": np.zeros(3)}, folder / "model-2.safetensors")
    places = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": index or places}))
    return path


def test_an_index_and_its_folder(tmp_path):
    path = sharded(tmp_path)
    for place in (path, tmp_path, str(tmp_path)):
        found = read(place)
        assert list(found) == ["a", "b"]
        assert found["b"].shape == (3,)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "..", "", "a\\b", "sub/x.safetensors"]
)
def test_an_index_cannot_lead_out_of_its_folder(tmp_path, name):
    path = sharded(tmp_path / "model", {"a": name})
    save_file({"a": np.ones(2)}, tmp_path / "x.safetensors")
    with pytest.raises(WeightsError, match="only names of files in the same folder"):
        stored_tensors(path, "load_weights")


def test_links_out_of_the_folder_are_refused_but_those_of_the_hub_cache(tmp_path):
    secret = tmp_path / "secret.safetensors"
    save_file({"a": np.ones(2)}, secret)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(secret)
    with pytest.raises(WeightsError, match="leads out of its folder"):
        stored_tensors(folder, "load_weights")
    assert list(stored_tensors(folder / "model.safetensors", "x")) == ["a"]  # by name
    blobs = tmp_path / "models--me" / "blobs"
    snapshot = tmp_path / "models--me" / "snapshots" / "123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "456").write_bytes(secret.read_bytes())
    (snapshot / "model.safetensors").symlink_to("../../blobs/456")
    assert list(stored_tensors(snapshot, "load_weights")) == ["a"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "no readable JSON"),
        ("[]", "is a list"),
        ('{"weight_map": []}', "no `weight_map`"),
        ('{"weight_map": {"a": 3}}', "no `weight_map`"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "'a' twice"),
        ('{"weight_map": {"z": "model-1.safetensors"}}', "'z' in model-1.safetensors"),
    ],
)
def test_a_broken_index(tmp_path, text, reason):
    path = sharded(tmp_path)
    path.write_text(text)
    with pytest.raises(WeightsError) as caught:
        stored_tensors(path, "load_weights")
    assert reason in str(caught.value)


@pytest.mark.parametrize("name", ["\udc80", "a" * 300, "\x1b[2J", "a\n"])
def test_an_index_with_names_that_no_file_has(tmp_path, name):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(WeightsError, match="only names of files") as caught:
        stored_tensors(index, "load_weights")
    assert str(caught.value).isprintable()


def test_an_index_whose_file_is_lost(tmp_path):
    path = sharded(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-2\.safetensors"):
        stored_tensors(path, "load_weights")


def test_tensors_that_the_index_forgot_count_unless_two_files_have_them(tmp_path):
    path = sharded(tmp_path, {"b": "model-2.safetensors", "a": "model-1.safetensors"})
    save_file({"b": np.zeros(3), "extra": np.ones(1)}, tmp_path / "model-2.safetensors")
    assert set(stored_tensors(path, "load_weights")) == {"a", "b", "extra"}
    save_file({"a": np.zeros(3), "extra": np.ones(1)}, tmp_path / "model-1.safetensors")
    with pytest.raises(WeightsError, match="does not say which counts"):
        stored_tensors(path, "load_weights")


def test_a_folder_with_one_file_with_several_and_with_none(tmp_path):
    with pytest.raises(WeightsError, match=r"no \.safetensors file"):
        stored_tensors(tmp_path, "load_weights")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(WeightsError, match="may be a pickle"):
        stored_tensors(tmp_path, "load_weights")
    save_file({"a": np.ones(1)}, tmp_path / "one.safetensors")
    assert list(stored_tensors(tmp_path, "load_weights")) == ["a"]
    save_file({"b": np.ones(1)}, tmp_path / "two.safetensors")
    with pytest.raises(WeightsError, match="several weights"):
        stored_tensors(tmp_path, "load_weights")
    save_file({"c": np.ones(1)}, tmp_path / "model.safetensors")
    assert list(stored_tensors(tmp_path, "load_weights")) == ["c"]


# Writing.


def names_in(folder):
    return sorted(each.name for each in pathlib.Path(folder).iterdir())


def test_a_file_is_replaced_and_keeps_its_mode(tmp_path):
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"a": np.ones(2)}, {"x": "y"}, "test")
    path.chmod(0o640)
    write_tensors(path, {"b": np.ones(3, jnp.bfloat16)}, {}, "test")
    assert list(load_file(path)) == ["b"]
    assert path.stat().st_mode & 0o777 == 0o640
    assert names_in(tmp_path) == ["a.safetensors"]


def test_a_disk_that_is_full_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"a": np.ones(2)}, {}, "save_weights")
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"written|File too large"):
            write_tensors(path, {"a": np.ones(100_000)}, {}, "save_weights")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert names_in(tmp_path) == ["a.safetensors"]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_an_interrupted_write_leaves_nothing_behind(tmp_path, monkeypatch, failing):
    path = tmp_path / "a.safetensors"

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, failing, interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_tensors(path, {"a": np.ones(2)}, {}, "save_weights")
    assert names_in(tmp_path) == []


def test_a_name_that_is_no_text_cannot_be_written(tmp_path):
    with pytest.raises(WeightsError, match="no text that a file can hold"):
        write_tensors(tmp_path / "a", {"\udc80": np.ones(2)}, {}, "save_weights")
    assert names_in(tmp_path) == []


def test_places_that_cannot_be_written(tmp_path):
    with pytest.raises(IsADirectoryError, match="is a folder"):
        write_tensors(tmp_path, {"a": np.ones(2)}, {}, "save_weights")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        write_tensors(tmp_path / "no" / "a", {"a": np.ones(2)}, {}, "save_weights")


def test_an_index_that_is_too_long_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("treetap._io.safetensors_file.HEADER_LIMIT", 8)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {}}')
    with pytest.raises(WeightsError, match="has 18 bytes, too many for an index"):
        stored_tensors(index, "test")
