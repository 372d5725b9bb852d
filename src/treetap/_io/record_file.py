# SPDX-License-Identifier: Apache-2.0
"""Records in files: one safetensors file holds all that one run gave.

Each array is a tensor under its site's name, which any program can read; what else a
Record knows is JSON in the file's metadata. `save_record` replaces a file in one step,
and `load_record` gives back the same sites, trees, types and bits.
"""

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treetap._core.errors import CaptureError, WeightsError
from treetap._core.wording import shown
from treetap._io.files import refusing
from treetap._io.record_descriptions import (
    DTYPES,
    Malformed,
    described,
    rebuilt,
    wanted,
)
from treetap._io.safetensors_file import (
    WRITABLE,
    Stored,
    json_object,
    new_file,
    tensors_and_texts,
    write_tensors,
)
from treetap._observe.records import Record

ABOUT = "treetap.record"
ORDER = "treetap.order"
VERSION = 1


def save_record(
    path: str | os.PathLike[str],
    record: Record,
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes a Record to a safetensors file, which is complete or not there.

    The value of the site `blocks/3:__call__` is the tensor of that name, its gradient
    `blocks/3:__call__@grad`, the first item of a tuple `blocks/3:__call__.0`. Arrays on
    several devices are brought together; a `StoreWriter` keeps them apart.

    Args:
        path: The file.
        record: What `observe` gave. Values are arrays, numbers, random keys, and
            tuples, lists and dicts of them.
        metadata: More texts for the file, such as the revision of the model.

    Examples:
        >>> import tempfile, jax.numpy as jnp, treetap as tt
        >>> _, record = tt.observe(lambda x: tt.tap(x + 1, "a"))(jnp.ones(2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tt.save_record(f"{folder}/run.safetensors", record)
        ...     tt.load_record(f"{folder}/run.safetensors")["a"].value
        Array([2., 2.], dtype=float32)
    """
    name = "save_record"
    file = new_file(path, metadata, name)
    texts = dict(metadata or {})
    if taken := sorted({ABOUT, ORDER} & texts.keys()):
        raise ValueError(f"{name}: `metadata` has {taken}, which are not free.")
    sites, leaves = described(record, name)
    tensors: dict[str, np.ndarray] = {}
    about: list[dict[str, Any]] = []
    for leaf in leaves:
        if isinstance(leaf.value, jax.Array) and not leaf.value.is_fully_addressable:
            raise CaptureError(
                f"{name}: {leaf.text} lies on devices of other processes. Each process "
                "keeps its own part with `StoreWriter`."
            )
        array = np.asarray(leaf.value)
        entry: dict[str, Any] = {"tensor": leaf.text}
        if not isinstance(leaf.value, jax.Array):
            entry["host"] = True
        if array.dtype not in WRITABLE:
            entry["dtype"] = array.dtype.name
            array = array[..., None].view(np.uint8)
        about.append(entry)
        tensors[leaf.text] = array
    told = {"version": VERSION, "sites": sites, "leaves": about}
    texts[ABOUT] = json.dumps(told, separators=(",", ":"))
    write_tensors(file, tensors, texts, name)


def load_record(path: str | os.PathLike[str]) -> Record:
    """Reads a Record that `save_record` wrote.

    Arrays are JAX's where they were, unless JAX as it is set up has no such type (64
    bits without `jax_enable_x64`): then they are numpy's, and no bit is lost. A kind of
    Variable that this program does not have is its nearest base.

    Args:
        path: The file.

    Examples:
        >>> import tempfile, jax.numpy as jnp, treetap as tt
        >>> _, record = tt.observe(lambda x: tt.tap((x, x > 1), "a"))(jnp.arange(3))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tt.save_record(f"{folder}/run.safetensors", record)
        ...     tt.load_record(f"{folder}/run.safetensors")
        Record: 1 sites, 15 B
        site  how  type               size  under
        a     tap  int32[3], bool[3]  15 B
    """
    name = "load_record"
    stored, texts = tensors_and_texts(path, name)
    if ABOUT not in texts:
        names = ", ".join(map(shown, sorted(stored)[:5])) or "no tensors"
        raise WeightsError(
            f"{name}: {path} is not from `save_record`; it holds {names}. `compare` "
            "and `safetensors.numpy.load_file` read files of any names."
        )
    return record_in(path, stored, texts[ABOUT], _placed, name)


def record_in(
    path: Any,
    stored: Mapping[str, Stored],
    text: str,
    made: Callable[..., Any],
    name: str,
) -> Record:
    """A Record from a file.

    Args:
        path: The file, for messages.
        stored: What its header says.
        text: What its metadata says of the Record.
        made: Makes a leaf of an array, from its place in the file and whether it was
            numpy's.
        name: The public function at work, for messages.
    """
    about = json_object(text, path, name)
    what = f"{name}: {path} is broken, or not a Record"
    with refusing(what, Malformed, RecursionError):
        if about.get("version") != VERSION:
            raise Malformed("it was written by another version of this library")
        entries = wanted(about.get("leaves"), list, "the list of leaves")
        keys = [wanted(entry, dict, "a leaf").get("tensor") for entry in entries]
        keys = [wanted(key, str, "the name of a tensor") for key in keys]
        if len(set(keys)) < len(keys):  # many of one would not fit in the memory
            raise Malformed("two of its leaves are the same tensor")
        arrays = (_array_of(entry, stored, name) for entry in entries)
        leaves = [made(a, bool(each.get("host"))) for a, each in zip(arrays, entries)]
        return rebuilt(about.get("sites"), leaves)


def _array_of(entry: Any, stored: Mapping[str, Stored], name: str) -> np.ndarray:
    """The array of a leaf, mapped from the file."""
    key = entry["tensor"]
    if key not in stored:
        raise Malformed(f"it has no tensor {entry!r:.80}")
    found = stored[key]
    if found.dtype is None:
        raise Malformed(f"tensor {key!r:.80} is {found.code}, which JAX does not have")
    array = found.view(name)
    if "dtype" in entry:
        dtype = DTYPES.get(str(entry["dtype"]))
        is_bytes = array.dtype == np.uint8
        if dtype is None or not is_bytes or array.shape[-1:] != (dtype.itemsize,):
            raise Malformed(f"tensor {key!r:.80} holds no {entry['dtype']!r:.60}")
        array = np.require(array, requirements="C").view(dtype)[..., 0]
    return array


def _placed(array: np.ndarray, host: bool) -> Any:
    array = np.array(array)  # the file may change, or go
    if host or jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        return array
    return jnp.asarray(array)
