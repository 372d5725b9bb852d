# SPDX-License-Identifier: Apache-2.0
"""Safetensors files: what is in them, one tensor at a time, and writing them whole.

A file may come from anybody, so it is taken apart with care: headers are checked before
anything is allocated, only files of this one format are opened, and an index of several
files may name files of its own folder only. `stored_tensors` gives what the headers
say; `Stored.view` maps a tensor's bytes when it is asked to. `write_tensors` replaces
a file in one step, or leaves it alone.
"""

import contextlib
import itertools
import json
import math
import os
import pathlib
import shutil
import stat
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import jax.numpy as jnp
import numpy as np

from treetap._core.errors import WeightsError
from treetap._core.wording import quoted, words_of

HEADER_LIMIT = 100_000_000  # bytes; the format's own
DIAGNOSED = 1_000_000  # a bad header longer than this is refused without details
INDEX = ".safetensors.index.json"
MOST_AXES = 64  # of an array of numpy
MOST_EMPTY = 2**20  # rows of nothing
LARGEST = 16  # bytes of a number
LONGEST_NAME = 255  # bytes of the name of a file

DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
    "BF16": np.dtype(jnp.bfloat16),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
    "F8_E8M0": np.dtype(jnp.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(jnp.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(jnp.float8_e5m2fnuz),
}
WRITABLE = frozenset(DTYPES.values())

_PICKLES = frozenset({".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth"})
_OTHERS = frozenset({".gguf", ".h5", ".hdf5", ".msgpack", ".npy", ".npz", ".onnx"})
_PICKLE = "a pickle, which can run any program when it is read"
_STARTS = {
    b"PK\x03\x04": "a zip archive, as PyTorch and numpy write them",
    **{b"\x80" + bytes([protocol]): _PICKLE for protocol in range(2, 6)},
    b"\x89HDF": "an HDF5 file",
    b"GGUF": "a GGUF file",
    b"version https://git-lfs": "a Git LFS pointer: run `git lfs pull`",
}


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape from a file, not longer than a line."""
    return str(shape) if len(shape) <= 12 else f"({len(shape)} axes)"


class Stored(NamedTuple):
    """What a header says of one tensor; `start` and `stop` count from the file's."""

    file: pathlib.Path
    name: str
    code: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def text(self) -> str:
        """Its type, in the words of the format."""
        return f"{self.code}{shape_text(self.shape)}"

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """Its dtype; None when JAX has none of that kind."""
        return DTYPES.get(self.code)

    def view(self, name: str) -> np.ndarray:
        """Its values, mapped from the file: to be copied, never to be kept."""
        dtype = DTYPES[self.code]
        if self.start == self.stop:
            return np.empty(self.shape, dtype)
        size = (self.stop - self.start,)
        try:
            mapped = np.memmap(self.file, np.uint8, "r", offset=self.start, shape=size)
        except ValueError as error:
            raise WeightsError(
                f"{name}: {self.file} was changed while it was read."
            ) from error
        return mapped.view(np.ndarray).view(dtype).reshape(self.shape)


def stored_tensors(path: str | os.PathLike[str], name: str) -> dict[str, Stored]:
    """What a weights file holds, by name of tensor.

    Args:
        path: A safetensors file, an index of several, or a folder with either.
        name: The public function at work, for messages.
    """
    place = pathlib.Path(path)
    if place.is_dir():
        place = _chosen(place, name)
    if place.name.endswith(".index.json"):
        return _indexed(place, name)
    return _of_file(place, name)


# One file.


def _of_file(file: pathlib.Path, name: str) -> dict[str, Stored]:
    refuse_other_formats(file, name)
    size = _size_of(file, name)
    length = _header_length(file, size, name)
    _validate(file, size, length, name)
    with file.open("rb") as opened:
        opened.seek(8)
        header = _parsed(opened.read(length), file, name)
    header.pop("__metadata__", None)
    _refuse_shapes(header, file, name)
    data = 8 + length
    return {
        key: Stored(
            file,
            key,
            entry["dtype"],
            tuple(entry["shape"]),
            data + entry["data_offsets"][0],
            data + entry["data_offsets"][1],
        )
        for key, entry in header.items()
    }


def _refuse_shapes(header: Mapping[str, Any], file: pathlib.Path, name: str) -> None:
    for key, entry in header.items():
        shape = entry["shape"]
        if not is_shape(shape):
            raise WeightsError(
                f"{name}: {file} is broken: tensor {quoted(key)} has the shape "
                f"{shape!r:.60}, which no array can have."
            )


def is_shape(shape: Sequence[int]) -> bool:
    """Whether arrays have such shapes: (2**64 - 1, 0) is none.

    For an empty array JAX goes through all that comes before the axis of length 0, so
    that must not be much.
    """
    if len(shape) > MOST_AXES or any(length < 0 for length in shape):
        return False
    before = itertools.takewhile(bool, shape)
    if 0 in shape and math.prod(before) > MOST_EMPTY:
        return False
    return math.prod(filter(None, shape)) * LARGEST < 2**63


def refuse_other_formats(file: pathlib.Path, name: str) -> None:
    suffix = file.suffix.lower()
    if suffix in _PICKLES:
        raise WeightsError(
            f"{name}: {file} may be a pickle, which can run any program when it is "
            "read, so it is not opened. Convert it where you trust it: "
            "`safetensors.torch.save_file(torch.load(path, weights_only=True), "
            "'model.safetensors')`."
        )
    if suffix in _OTHERS:
        raise WeightsError(
            f"{name}: {file} is not a safetensors file. Read it with the library that "
            "wrote it and save its arrays with `safetensors.numpy.save_file`."
        )


def _size_of(file: pathlib.Path, name: str) -> int:
    try:
        found = file.stat()
    except FileNotFoundError:
        raise FileNotFoundError(f"{name}: there is no file {file}.") from None
    if not stat.S_ISREG(found.st_mode):  # a pipe would be waited for, for ever
        raise WeightsError(f"{name}: {file} is not a regular file.")
    return found.st_size


def _header_length(file: pathlib.Path, size: int, name: str) -> int:
    with file.open("rb") as opened:
        start = opened.read(32)
    length = int.from_bytes(start[:8], "little")
    if size >= 8 and length <= min(size - 8, HEADER_LIMIT):
        return length
    looks = [what for magic, what in _STARTS.items() if start.startswith(magic)]
    if looks:
        why = f"it looks like {looks[0]}"
    elif size < 8:
        why = f"it has {size} bytes, and a header alone needs 8"
    elif length > size - 8:
        why = f"its header should have {length:,} bytes, but {size - 8:,} follow"
    else:
        why = f"its header has {length:,} bytes, more than the {HEADER_LIMIT:,} allowed"
    raise WeightsError(
        f"{name}: {file} is no safetensors file, or was cut short: {why}."
    )


def _validate(file: pathlib.Path, size: int, length: int, name: str) -> None:
    """Lets the safetensors library look at the header; it allocates nothing else."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np"):
            return
    except SafetensorError as error:
        reason = words_of(error).removeprefix("Error while deserializing header: ")
        if length <= DIAGNOSED:
            with file.open("rb") as opened:
                opened.seek(8)
                header = _parsed(opened.read(length), file, name)
            reason = next(_faults(header, size - 8 - length), reason)
        raise WeightsError(f"{name}: {file} is broken: {reason}.") from error


def _parsed(text: bytes, file: pathlib.Path, name: str) -> dict[str, Any]:
    """A JSON object from bytes, in which no name stands twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            twice = next(k for k, _ in pairs if k in seen or seen.add(k))
            raise WeightsError(
                f"{name}: {file} is broken: it has {quoted(twice)} twice."
            )
        return found

    try:
        parsed = json.loads(text, object_pairs_hook=unique)
    except WeightsError:
        raise
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError as error:  # of UTF-8, of JSON, or of numbers with many digits
        reason = str(error)
    else:
        if isinstance(parsed, dict):
            return parsed
        reason = f"it is a {type(parsed).__name__}, not an object"
    raise WeightsError(
        f"{name}: {file} is broken: it has no readable JSON header: {reason}."
    )


def _faults(header: dict[str, Any], size: int) -> Iterator[str]:
    """What is wrong with a header that the library refused, tensor by tensor."""
    ends: list[tuple[int, int, str]] = []
    for key, entry in header.items():
        if key == "__metadata__":
            continue
        fault, span = _fault_of(entry, size)
        if fault:
            yield f"tensor {quoted(key)} {fault}"
        else:
            ends.append((*span, key))
    reached = 0
    for start, stop, key in sorted(ends):
        if start != reached:
            how = "overlaps another" if start < reached else "leaves a gap before it"
            yield f"tensor {quoted(key)} {how}: it starts at {start}, not {reached}"
        reached = stop
    if reached != size:
        yield f"the tensors end at byte {reached:,} of the data, which has {size:,}"


def _fault_of(entry: Any, size: int) -> tuple[str, tuple[int, int]]:
    """What is wrong with the entry of one tensor, and where its bytes are."""
    if not isinstance(entry, dict):
        return "is not described by an object", (0, 0)
    code, shape = entry.get("dtype"), entry.get("shape")
    span = entry.get("data_offsets")
    if not _are_sizes(shape):
        return f"has no good shape: {shape!r:.60}", (0, 0)
    if not _are_sizes(span) or len(span) != 2:
        return f"has no good data_offsets: {span!r:.60}", (0, 0)
    if not isinstance(code, str) or not _is_code(code):
        return f"has an unknown dtype: {code!r:.60}", (0, 0)
    start, stop = span
    if not start <= stop <= size:
        return f"lies at bytes {start} to {stop} of {size}", (0, 0)
    if code in DTYPES:
        count, room = DTYPES[code].itemsize, stop - start
        for length in sorted(shape):  # a zero first: then nothing overflows
            count *= length
            if count == 0 or count > room:
                break
        if count != room:
            told = f"{code}{shape_text(tuple(shape))}"
            return f"is said to be {told}, but has {room} bytes", (0, 0)
    return "", (start, stop)


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        type(size) is int and 0 <= size < 2**63 for size in value
    )


def _is_code(code: str) -> bool:
    return code in DTYPES or code.startswith(("F4", "F6"))


# Several files.


def _chosen(folder: pathlib.Path, name: str) -> pathlib.Path:
    """The weights in a folder: a single file, or the index of several."""
    names = sorted(entry.name for entry in folder.iterdir())
    indexes = [each for each in names if each.endswith(INDEX)]
    files = [each for each in names if each.endswith(".safetensors")]
    if "model.safetensors" in files:
        return _inside(folder, "model.safetensors", folder, name)
    for found in (indexes, files):
        if len(found) == 1:
            return _inside(folder, found[0], folder, name)
        if found:
            raise WeightsError(
                f"{name}: {folder} has several weights: {', '.join(found[:8])}. "
                "Name one of them."
            )
    others = [n for n in names if pathlib.Path(n).suffix in _PICKLES | _OTHERS]
    if others:
        refuse_other_formats(folder / others[0], name)
    raise WeightsError(
        f"{name}: {folder} has no .safetensors file; it has {names[:8]}."
    )


def _inside(
    folder: pathlib.Path, entry: str, told: pathlib.Path, name: str
) -> pathlib.Path:
    """A file of a folder; a name or a link that leads out of it is refused."""
    plain = entry not in ("", ".", "..") and not set(entry) & set("/\\:")
    plain = plain and entry.isprintable() and len(entry.encode()) <= LONGEST_NAME
    if not plain:
        raise WeightsError(
            f"{name}: {told} names the file {quoted(entry)}; only names of files in "
            "the same folder are followed."
        )
    home = folder.resolve()
    real = (folder / entry).resolve()
    homes = [home]
    if home.parent.name == "snapshots":  # Hugging Face's cache links to its blobs
        homes.append(home.parent.parent / "blobs")
    if real.parent not in homes:
        raise WeightsError(
            f"{name}: {folder / entry} is a link that leads out of its folder, to "
            f"{real}. Name that file itself, or copy it."
        )
    return folder / entry


def _indexed(index: pathlib.Path, name: str) -> dict[str, Stored]:
    """The tensors of the files that an index names."""
    size = _size_of(index, name)
    if size > HEADER_LIMIT:
        raise WeightsError(
            f"{name}: {index} has {size:,} bytes, too many for an index."
        )
    places = _parsed(index.read_bytes(), index, name).get("weight_map")
    if not isinstance(places, dict) or not all(
        isinstance(file, str) for file in places.values()
    ):
        raise WeightsError(
            f"{name}: {index} has no `weight_map` from names of tensors to files."
        )
    files = {
        file: _of_file(_inside(index.parent, file, index, name), name)
        for file in sorted(set(places.values()))
    }
    lost = [key for key, file in places.items() if key not in files[file]]
    if lost:
        shown = ", ".join(f"{quoted(key)} in {places[key]}" for key in lost[:8])
        more = f" and {len(lost) - 8} more" if len(lost) > 8 else ""
        raise WeightsError(
            f"{name}: {index} names {len(lost)} tensors that the files do not have: "
            f"{shown}{more}. The files belong to another index, or are incomplete."
        )
    found = {key: files[file][key] for key, file in places.items()}
    for file, tensors in files.items():
        for key, stored in tensors.items():
            known = found.setdefault(key, stored)
            if key not in places and known is not stored:
                raise WeightsError(
                    f"{name}: {quoted(key)} is in {known.file.name} and in {file}, and "
                    f"{index} does not say which counts."
                )
    return found


# Writing.


def write_tensors(
    path: pathlib.Path,
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, str],
    name: str,
) -> None:
    """Writes a file beside its final place and moves it there when it is complete."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    if path.is_dir():
        raise IsADirectoryError(f"{name}: {path} is a folder; name a file in it.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{name}: there is no folder {path.parent}.")
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        try:
            save_file(dict(tensors), beside, dict(metadata))
        except SafetensorError as error:
            raise OSError(
                f"{name}: {path} could not be written: {error}. What was there before "
                "is as it was; if the disk is full, make room, and save again."
            ) from error
        except UnicodeEncodeError as error:
            raise WeightsError(
                f"{name}: {path} could not be written: {error.object!r:.80} is no text "
                "that a file can hold."
            ) from error
        _to_disk(beside, os.O_RDWR)
        if path.exists():
            shutil.copymode(path, beside)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # not every system can do it for folders
        _to_disk(path.parent, os.O_RDONLY)


def _to_disk(path: pathlib.Path, mode: int) -> None:
    handle = os.open(path, mode)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
