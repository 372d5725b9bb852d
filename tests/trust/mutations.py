# SPDX-License-Identifier: Apache-2.0
"""Mutations: small damage to files, with knowledge of how they are built.

Blind bytes stop at the first checksum. So a header is changed as JSON and written with
the length it then has, a line of a journal with its checksum, a zip member by member.
Each function takes bytes and a `random.Random`, and gives other bytes.
"""

import io
import json
import struct
import warnings
import zipfile
import zlib

import numpy as np

NUMBERS = [
    0,
    -1,
    1,
    2,
    3,
    7,
    8,
    63,
    64,
    65,
    255,
    256,
    65536,
    10**6,
    2**31 - 1,
    2**31,
    2**32,
    2**40,
    2**53 + 1,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
    2**64,
    10**30,
    -(2**63),
    0.5,
    -0.0,
    1e308,
    1e-320,
    float("nan"),
    float("inf"),
    True,
    False,
]
TEXTS = [
    "",
    ".",
    "..",
    "../outside.txt",
    "/etc/passwd",
    "a/b",
    "a\\b",
    "c:x",
    "\0",
    "\ud800",
    "\udc80",
    "é",
    "ﬁ",
    "\U0001d41d\U0001d41e\U0001d41f",
    "²",
    "٣",
    "a²",
    "\x1b[2J",
    "\n",
    "'",
    '"',
    "__metadata__",
    "__call__",
    "__class__",
    "_x",
    "class",
    "A",
    "0",
    "-1",
    "1e5",
    "{i}",
    "{{",
    "}",
    "{",
    "{a²}",
    "{rest...}",
    "*",
    "**",
    "?",
    "[",
    "[a-",
    "[!]",
    "(",
    ")",
    "->",
    "a->a",
    "(a b)->a b",
    "NCHW->NHWC",
    "#",
    "#1",
    "#²",
    ":",
    "@",
    "@grad",
    "@value",
    "=",
    ",",
    "/",
    "a" * 300,
    "x/" * 200,
    "9" * 5000,
    "float32",
    "bfloat16",
    "int4",
    "object",
    "U8",
    "F4",
    "F64",
    "BOOL",
    "C64",
    "fry",
    "threefry2x32",
    "rbg",
    "int",
    "float",
    "complex",
    "scan",
    "while",
    "model.safetensors.index.json",
    "a.safetensors",
    "b.safetensors",
    "a.pt",
    "sharding_indexed",
    "zstd",
    "gzip",
    "blosc",
    "transpose",
    "crc32c",
    "bytes",
]
KEYS = """
    leaf list tuple dict named fields plain key python dtype shape data_offsets tensor
    host rows metadata axis weight_map sites columns leaves text chunk processes name
    path index how wraps module kind value grad
""".split()
DEEP, MANY_DIGITS = "@deep@", "@digits@"  # what `json` itself would not write


def _odd(random):
    """A value that few expect."""
    return random.choice(
        [
            lambda: random.choice(NUMBERS),
            lambda: random.choice(TEXTS),
            lambda: random.choice(KEYS),
            lambda: None,
            list,
            dict,
            lambda: DEEP,
            lambda: MANY_DIGITS,
            lambda: [random.choice(NUMBERS) for _ in range(random.randrange(5))],
            lambda: {random.choice(KEYS): random.choice(NUMBERS)},
            lambda: [random.choice(TEXTS), random.choice(NUMBERS)],
            lambda: [1] * random.choice([2, 33, 65, 300]),
            lambda: [random.choice(NUMBERS), 0],
        ]
    )()


def _places(value, found, depth=0):
    """All containers in a value, with the keys of their items."""
    if depth < 50 and isinstance(value, dict | list):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        for key in keys:
            found.append((value, key))
            _places(value[key], found, depth + 1)
    return found


def _other_text(text, random):
    at = random.randrange(len(text) + 1)
    return random.choice(
        [
            lambda: text[:at] + random.choice(TEXTS) + text[at:],
            lambda: text[:at] + text[at + 1 :],
            lambda: text[:at] + random.choice("*?[]{}()/:#=.->@0 ") + text[at:],
            lambda: text * random.choice([2, 3, 50]) if len(text) < 1000 else "",
        ]
    )()


def mutated_json(value, random):
    """A value as JSON has it, with one or some items changed in place."""
    for _ in range(random.choice([1, 1, 1, 2, 4])):
        places = _places(value, [])
        if not places:
            return _odd(random)
        held, key = random.choice(places)
        item, how = held[key], random.randrange(10)
        if how == 0:
            del held[key]
        elif how == 1 and isinstance(held, dict):
            held[random.choice(TEXTS + KEYS)] = held.pop(key)
        elif how == 1:
            held.insert(key, json.loads(json.dumps(item)))
        elif how in (2, 3) and type(item) in (int, float):
            change = random.choice([-1, 1, item, -item, 2**31, 2**62])
            held[key] = item + change
        elif how in (2, 3, 4) and isinstance(item, str):
            held[key] = _other_text(item, random)
        elif how in (4, 5):
            held[key] = json.loads(json.dumps(random.choice(places)[0]))
        elif how == 6 and isinstance(held, dict):
            held[random.choice(KEYS)] = _odd(random)
        else:
            held[key] = _odd(random)
    return value


def written_json(value, random):
    """JSON as bytes; sometimes with a name twice, or something very deep."""
    text = json.dumps(value, separators=(",", ":"))
    depth = random.choice([3, 70, 200, 900, 5000])
    text = text.replace(f'"{DEEP}"', "[" * depth + "]" * depth)
    text = text.replace(f'"{MANY_DIGITS}"', "9" * 5000)
    if random.random() < 0.05 and '":' in text:
        at = random.choice([n for n in range(len(text)) if text.startswith('":', n)])
        start = text.rfind('"', 0, at)
        text = f"{text[:start]}{text[start : at + 2]}0,{text[start:]}"
    return text.encode()


def json_text(data, random):
    """A text of JSON, changed."""
    try:
        return written_json(mutated_json(json.loads(data), random), random)
    except (ValueError, RecursionError):  # no JSON, or too deep
        return raw_bytes(data, random)


def raw_bytes(data, random):
    """Some bytes changed, taken out, or put in."""
    data = bytearray(data)
    for _ in range(random.choice([1, 1, 2, 4])):
        at = random.randrange(len(data) + 1)
        how = random.randrange(5)
        if how == 0:
            del data[at:]
        elif how == 1:
            del data[at : at + random.choice([1, 2, 8])]
        elif how == 2:
            data[at:at] = random.randbytes(random.choice([1, 2, 8]))
        elif how == 3:
            number = random.choice([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
            data[at : at + 8] = number.to_bytes(8, "little")
        elif at < len(data):
            data[at] = random.randrange(256)
    return bytes(data)


# Safetensors.

SIZES = {"U8": 1, "BOOL": 1, "F16": 2, "BF16": 2, "F32": 4, "I32": 4, "U32": 4}
SIZES |= {"F64": 8, "I64": 8, "C64": 8, "F8_E4M3": 1, "F8_E8M0": 1, "U64": 8}
SHAPES = [
    [],
    [0],
    [1],
    [3],
    [2, 3],
    [0, 3],
    [2**62, 0],
    [2**64 - 1, 0],
    [2**40, 0],
    [2**40, 2**40, 0],
    [2**15, 2**15, 0],
    [2**20, 0],
    [0, 2**31],
    [1] * 40,
    [1] * 65,
    [4, 0, 2],
    [10**5],
    [0, 1],
]


def tensors_file(tensors, metadata=None):
    """A safetensors file of `{name: (code, shape, data)}`, whatever these are."""
    header, data = {}, b""
    for name, (code, shape, part) in tensors.items():
        span = [len(data), len(data) + len(part)]
        header[name] = {"dtype": code, "shape": shape, "data_offsets": span}
        data += part
    if metadata is not None:
        header["__metadata__"] = metadata
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _good_tensor(random):
    code, shape = random.choice([*SIZES]), random.choice(SHAPES)
    count = SIZES[code] * int(np.prod(shape, dtype=object))
    fill = random.choice([b"\0", b"\1", b"\xff", b"\x7f\xf8", b"\x80\x7f"])
    return code, shape, (fill * count)[:count]


def _taken_apart(data):
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__", None)
    tensors = {}
    for name, about in header.items():
        start, stop = about["data_offsets"]
        part = data[8 + length + start : 8 + length + stop]
        tensors[name] = (about["dtype"], about["shape"], part)
    return tensors, metadata


def safetensors(data, random):
    """A safetensors file: another tensor in it, another header, other metadata."""
    how = random.randrange(6)
    try:
        tensors, metadata = _taken_apart(data)
    except (ValueError, KeyError, TypeError, AttributeError, struct.error):
        return raw_bytes(data, random)
    except RecursionError:
        return raw_bytes(data, random)
    texts = metadata if isinstance(metadata, dict) else {}
    if how == 0 or not tensors:
        return raw_bytes(data, random)
    if how == 1:
        length = struct.unpack("<Q", data[:8])[0]
        text = json_text(data[8 : 8 + length], random)
        return struct.pack("<Q", len(text)) + text + data[8 + length :]
    name = random.choice([*tensors])
    inner = [k for k, v in texts.items() if "treetap" in k and isinstance(v, str)]
    if how in (2, 3) and inner:
        key = random.choice(inner)
        text = json_text(texts[key].encode("utf-8", "replace"), random)
        texts[key] = text.decode("utf-8", "replace")
    elif how in (3, 4):
        tensors[name] = _good_tensor(random)
    else:
        new = random.choice(TEXTS) if random.random() < 0.5 else name
        new = _other_text(new, random)
        tensors[new.encode("utf-8", "replace").decode()] = tensors.pop(name)
    return tensors_file(tensors, metadata)


# Journals and chunks.


def journal(data, random):
    """The journal of a store, with checksums that fit."""
    if random.random() < 0.15:
        return raw_bytes(data, random)
    lines = [line.partition(b" ")[2] for line in data.splitlines()]
    if not lines:
        return raw_bytes(data, random)
    how, at = random.randrange(8), random.randrange(len(lines))
    if how == 0:
        lines.insert(random.randrange(len(lines) + 1), lines[at])
    elif how == 1:
        del lines[at]
    else:
        lines[at] = json_text(lines[at], random)
    return b"".join(b"%08x %s\n" % (zlib.crc32(line), line) for line in lines)


def _crc32c_table():
    table = []
    for number in range(256):
        for _ in range(8):
            number = number >> 1 ^ (0x82F63B78 if number & 1 else 0)
        table.append(number)
    return table


_TABLE = _crc32c_table()


def crc32c(data):
    found = 0xFFFFFFFF
    for byte in data:
        found = found >> 8 ^ _TABLE[(found ^ byte) & 0xFF]
    return found ^ 0xFFFFFFFF


def chunk(data, random):
    """A chunk of a store's array, with a checksum that mostly fits."""
    if random.random() < 0.2 or len(data) < 4:
        return raw_bytes(data, random)
    data = raw_bytes(data[:-4], random)
    return data + struct.pack("<I", crc32c(data))


# Zip files of arrays.


def _npy(random, data):
    """An array as numpy writes it, with another header."""
    descr = random.choice(
        [
            "'<f4'",
            "'|b1'",
            "'<i8'",
            "'|O'",
            "'<U4'",
            "'<f2'",
            "'<c16'",
            "'<M8[s]'",
            "[('a', '<f4')]",
            "'<V8'",
            "'|S0'",
            "'<f3'",
            "1",
            "'>f4'",
            "'<i4'",
        ]
    )
    shape = random.choice(
        [
            "(2,)",
            "()",
            "(0,)",
            f"({2**40},)",
            f"({2**62}, 0)",
            "(-1,)",
            "2",
            "(1,)*3",
            "(1.0,)",
            "(2,3)",
            "(" + "1," * 70 + ")",
            "(True,)",
            f"({2**34},)",
            f"({'9' * 4000},)",
        ]
    )
    order = random.choice(["False", "True", "0", "None"])
    text = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}"
    if random.random() < 0.2:
        text = random.choice(["", "{", "[" * 3000, "{'descr': '<f4'}", "'" * 9, "\0"])
    if random.random() < 0.2:
        text = _other_text(text, random)
    text = text.encode("latin1", "replace")
    version = random.choice([b"\1\0", b"\1\0", b"\2\0", b"\3\0", b"\4\0", b"\xff\xff"])
    form = "<H" if version == b"\1\0" else "<I"
    length = len(text) if random.random() < 0.9 else random.choice([0, 1, 2**15])
    return b"\x93NUMPY" + version + struct.pack(form, length % 65536) + text + data


def npz(data, random):
    """A zip file of arrays: other members, names, methods and headers."""
    if random.random() < 0.3:
        return raw_bytes(data, random)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as opened:
            members = [(n, opened.read(n)) for n in opened.namelist()[:20]]
    except Exception:
        return raw_bytes(data, random)
    made = io.BytesIO()
    how = random.randrange(5)
    if members:
        at = random.randrange(len(members))
        name, content = members[at]
        if how == 0:
            name = random.choice(
                [*TEXTS, "arg0.npy", "arg1.npy", "arg00.npy", "arg٣.npy", "arg0"]
            )
            name = name.encode("utf-8", "replace").decode()
        elif how == 1:
            content = raw_bytes(content, random)
        elif how == 2:
            content = b"\0" * random.choice([10**4, 10**6])
            content = _npy(random, content)
        else:
            content = _npy(random, content[128:] or b"\0" * 8)
        members[at] = (name, content)
    method = random.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
    method = random.choice([method, method, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    quiet = warnings.catch_warnings(action="ignore")  # of names that are there twice
    with quiet, zipfile.ZipFile(made, "w", method) as zipped:
        for name, content in members:
            about = zipfile.ZipInfo(name.replace("\0", "?") or "x")
            zipped.writestr(about, content, method)
    return made.getvalue()
