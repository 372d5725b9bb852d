# SPDX-License-Identifier: Apache-2.0
"""Inputs and weights: from files, drawn, and refused."""

import pickle
import re
import struct
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest
import targets
from command_line import loaded, named, refused
from safetensors.numpy import save_file

import treetap as tt
from treetap._cli.inputs import drawn, read

VALUES = np.asarray(targets.numbers())


def last_of(*args):
    """The figures of the last site, the model's result."""
    return loaded("inspect", *args)["sites"][-1]["value"]


EXPECTED = last_of(named("with_inputs"))


@pytest.mark.parametrize("name", ["arg0", "arr_0", "x"])
def test_npz(name, tmp_path):
    np.savez(tmp_path / "in.npz", **{name: VALUES})
    assert last_of(named("alone"), "--inputs", tmp_path / "in.npz") == EXPECTED


@pytest.mark.parametrize("name", ["arg0", "x"])
def test_safetensors(name, tmp_path):
    save_file({name: VALUES}, tmp_path / "in.safetensors")
    assert last_of(named("alone"), "--inputs", tmp_path / "in.safetensors") == EXPECTED


def test_inputs_take_the_place_of_the_factorys(tmp_path):
    np.savez(tmp_path / "in.npz", VALUES[:1])
    found = loaded("inspect", named("with_loss"), "--inputs", tmp_path / "in.npz")
    assert found["sites"][-1]["type"] == "float32[1,4]"


def test_positions_are_by_number(tmp_path):
    names = {f"arg{n}": np.full(1, n, np.float32) for n in reversed(range(11))}
    np.savez(tmp_path / "in.npz", **names)
    target = tmp_path / "eleven.py"
    target.write_text(
        "import treetap as tt\n\n\ndef model(*args):\n    return None\n\n\n"
        "def case():\n    return lambda *args: [tt.tap(x, 'x') for x in args]\n"
    )
    found = loaded("inspect", f"{target}:case", "--inputs", tmp_path / "in.npz")
    assert [site["value"]["mean"] for site in found["sites"]] == list(range(11))


@pytest.mark.parametrize("name", ["arg00", "arg٣", "arg" + "9" * 5000])
def test_only_plain_numbers_are_positions(name, tmp_path):
    save_file({"arg0": VALUES, name: VALUES}, tmp_path / "in.safetensors")
    args, kwargs = read(str(tmp_path / "in.safetensors"))
    assert len(args) == 1
    assert list(kwargs) == [name]


def test_columns_may_come_first(tmp_path):
    np.savez(tmp_path / "in.npz", np.asfortranarray(VALUES))
    np.testing.assert_array_equal(read(str(tmp_path / "in.npz")).args[0], VALUES)


def test_bytes_may_be_in_the_other_order(tmp_path):
    np.savez(tmp_path / "in.npz", VALUES.astype(">f4"))
    np.testing.assert_array_equal(read(str(tmp_path / "in.npz")).args[0], VALUES)


def test_numbers_too_large_for_float32_are_infinite(tmp_path):
    np.savez(tmp_path / "in.npz", np.array([1e300]))
    assert np.isposinf(read(str(tmp_path / "in.npz")).args[0]).all()


def test_sixty_four_bits_become_thirty_two(tmp_path):
    np.savez(tmp_path / "in.npz", VALUES.astype(np.float64))
    found = loaded("inspect", named("alone"), "--inputs", tmp_path / "in.npz")
    assert found["sites"][-1]["type"] == "float32[3,4]"


def broken_zip(path):
    np.savez(path, np.zeros((64, 64), np.float32))
    data = bytearray(path.read_bytes())
    data[200:8000] = b"\xff" * 7800
    path.write_bytes(data)


def npy(shape="(2,)", data=bytes(8)):
    """An array as numpy writes it, of two numbers, whatever shape it claims."""
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + data


def zipped(path, members, method=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", method) as opened:
        for name, data in members.items():
            opened.writestr(name, data)


def sharing(path):
    """Each member says that it is large."""
    zipped(path, {"x.npy": npy()})
    data = bytearray(path.read_bytes())
    for mark, place in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        start = data.index(mark) + place
        data[start : start + 4] = struct.pack("<I", 2**31)
    path.write_bytes(data)


def encrypted(path):
    zipped(path, {"x.npy": npy()})
    data = bytearray(path.read_bytes())
    for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(mark) + place] |= 1
    path.write_bytes(data)


WRONG = {
    "a pickle": (
        "in.npz",
        lambda path: path.write_bytes(pickle.dumps([1])),
        "is not what `numpy.savez` writes",
    ),
    "a pickle inside": (
        "in.npz",
        lambda path: np.savez(path, x=np.array([{}], dtype=object)),
        "'x' in .* is no array of numbers, .*allow_pickle",
    ),
    "broken": ("in.npz", broken_zip, "broken"),
    "a strange type": (
        "in.npz",
        lambda path: np.savez(path, x=np.array(["a"])),
        "has the type <U1, which JAX does not have",
    ),
    "a span of time": (
        "in.npz",
        lambda path: np.savez(path, x=np.array([3], "m8[s]")),
        "has the type timedelta64.*, which JAX does not have",
    ),
    "more than 64 bits": (
        "in.npz",
        lambda path: np.savez(path, x=np.zeros(2, np.clongdouble)),
        "has the type complex256, which JAX does not have",
    ),
    "too large": (
        "in.npz",
        lambda path: np.savez(path, x=np.array([2**40])),
        "integers that int32 does not hold",
    ),
    "a gap": (
        "in.npz",
        lambda path: np.savez(path, arg0=VALUES, arg2=VALUES),
        "has arg0, arg2; inputs by position are arg0, arg1",
    ),
    "two ways": (
        "in.npz",
        lambda path: np.savez(path, arg0=VALUES, arr_1=VALUES),
        "has arg0, arr_1",
    ),
    "another suffix": (
        "in.pkl",
        lambda path: path.write_bytes(pickle.dumps([1])),
        "is neither .npz nor .safetensors",
    ),
    "no safetensors": (
        "in.safetensors",
        lambda path: path.write_bytes(b"nonsense"),
        "in.safetensors",
    ),
    "not there": ("in.npz", lambda path: None, "there is no file"),
    "a shape that lies": (
        "in.npz",
        lambda path: zipped(path, {"x.npy": npy(shape="(1099511627776,)")}),
        "is no array of numbers, or broken",
    ),
    "a header of nonsense": (
        "in.npz",
        lambda path: zipped(path, {"x.npy": npy(shape="(((")}),
        "broken",
    ),
    "a negative shape": (
        "in.npz",
        lambda path: zipped(path, {"x.npy": npy(shape="(-1,)")}),
        "broken",
    ),
    "rows and rows of nothing": (
        "in.npz",
        lambda path: zipped(path, {"x.npy": npy("(32768, 32768, 0)", data=b"")}),
        "broken: .*the shape",
    ),
    "data cut short": (
        "in.npz",
        lambda path: zipped(path, {"x.npy": npy(shape="(3,)")}),
        "expected 12 bytes got 8",
    ),
    "no array": (
        "in.npz",
        lambda path: zipped(path, {"x.npy": b"hello"}),
        "'x' in .* is no array of numbers",
    ),
    "a name twice": (
        "in.npz",
        lambda path: zipped(path, {"x.npy": npy(), "x": npy()}),
        "has 'x' twice",
    ),
    "members that share data": (
        "in.npz",
        lambda path: sharing(path),
        "it cannot hold the .* bytes that it says",
    ),
    "a password": ("in.npz", lambda path: encrypted(path), "broken: .*encrypted"),
    "a newer version": (
        "in.npz",
        lambda path: zipped(path, {"x.npy": b"\x93NUMPY\x04\x00" + npy()[8:]}),
        "is no array of numbers",
    ),
    "wrong names": (
        "in.npz",
        lambda path: np.savez(path, y=VALUES),
        "the inputs do not fit",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_files_that_are_refused(case, tmp_path):
    name, write, text = WRONG[case]
    write(tmp_path / name)
    message = refused("inspect", named("alone"), "--inputs", tmp_path / name)
    assert re.search(text, message), message


def test_drawn_inputs():
    texts = ["float32[2,3]", "int32[50]<7", "mask=bool[4]", "bf16[3]"]
    args, kwargs = drawn(texts, 0)
    assert [(x.dtype.name, x.shape) for x in args] == [
        ("float32", (2, 3)),
        ("int32", (50,)),
        ("bfloat16", (3,)),
    ]
    assert set(np.unique(args[1])) <= set(range(7))
    assert args[1].max() > 1
    assert kwargs["mask"].dtype == bool
    assert (drawn(texts[:2], 0).args[0] == drawn(texts[:2], 0).args[0]).all()
    assert (drawn(texts[:2], 1).args[0] != drawn(texts[:2], 0).args[0]).any()
    assert set(np.unique(drawn(["int8[99]"], 0).args[0])) == {0, 1}
    assert drawn(["float8_e4m3fn[2]", "float32[]"], 0).args[1].shape == ()


def test_an_integer_input_reaches_an_embedding():
    found = loaded("sites", named("gpt2"), "--shape", "i32[3,8]<20")
    assert found["sites"][-1]["type"] == "float32[3,8,20]"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("8,128", "is not understood"),
        ("float32(8)", "is not understood"),
        ("float32[-1]", "is not understood"),
        ("float32[3,,4]", "lacks a size"),
        ("float32[3 4]", "lacks a size"),
        ("float32[" + "9" * 5000 + "]", "lacks a size"),
        ("int32[2]<" + "9" * 5000, "is not understood"),
        ("float33[2]", "there is no type 'float33'"),
        ("timedelta64[2]", "JAX has no type 'timedelta64'"),
        ("str[2]", "JAX has no type 'str'"),
        ("float64[2]", "JAX has no float64 unless JAX_ENABLE_X64=1"),
        ("float32[2]<5", "`<` is for integers"),
        ("int8[2]<500", "no int8 is from 0 to below 500"),
        ("int32[2]<0", "no int32 is from 0 to below 0"),
    ],
)
def test_shapes_that_are_refused(text, told):
    assert told in refused("inspect", named("alone"), "--shape", text)


def test_inputs_are_told_once(tmp_path):
    options = ["--shape", "f32[3,4]", "--inputs", "in.npz"]
    assert "Give one." in refused("inspect", named("alone"), *options)
    twice = ["--shape", "x=f32[3,4]"] * 2
    assert "two inputs called 'x'" in refused("inspect", named("alone"), *twice)


def test_weights(tmp_path):
    file = tmp_path / "net.safetensors"
    tt.save_weights(file, targets.other()[0])
    other = last_of(named("other"))
    assert other != EXPECTED
    assert last_of(named("with_inputs"), "--weights", file) == other


def test_weights_may_be_converted(tmp_path):
    file = tmp_path / "net.safetensors"
    model = targets.other()[0]
    up = model.blocks[0].up
    up.kernel = tt.Param(up.kernel[...].astype(jnp.bfloat16))
    tt.save_weights(file, model)
    target = [named("with_inputs"), "--weights", file]
    assert "blocks/0/up/kernel" in refused("inspect", *target)
    assert last_of(*target, "--cast")["mean"] != EXPECTED["mean"]


def test_weights_that_are_refused(tmp_path):
    file = tmp_path / "net.safetensors"
    target = named("with_inputs"), "--weights"
    assert "there is no file" in refused("inspect", *target, file)
    save_file({"strange": VALUES}, file)
    text = refused("inspect", *target, file)
    assert "strange" in text
    assert "blocks/0/up/kernel" in text
    pickled = tmp_path / "net.pt"
    pickled.write_bytes(pickle.dumps([1]))
    assert "may be a pickle" in refused("inspect", *target, pickled)
    text = refused("inspect", named("function"), "--weights", file)
    assert "is a function, and holds no weights" in text
