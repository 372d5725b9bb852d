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
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from treetap._core.errors import WeightsError
from treetap._core.wording import first_few, quoted, words_of
from treetap._io.files import not_written, refusing, require_path, written_whole

HEADER_LIMIT = 100_000_000  # bytes; the format's own
DIAGNOSED = 1_000_000  # a bad header longer than this is refused without details
WHOLE = "model.safetensors"  # the usual name of a model in one file
INDEX = ".safetensors.index.json"
MOST_AXES = 64  # of an array of numpy
MOST_EMPTY = 2**20  # rows of nothing
LARGEST = 16  # bytes of a number
LONGEST_NAME = 255  # bytes of the name of a file

DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    **{f"U{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"I{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"F{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
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


class Stored(NamedTuple):
    """What a header says of one tensor; `start` and `stop` count from the file's."""

    file: Path
    name: str
    code: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def text(self) -> str:
        """Its type, in the words of the format; not longer than a line."""
        axes = len(self.shape)
        return f"{self.code}{self.shape if axes <= 12 else f'({axes} axes)'}"

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """Its dtype; None when JAX has none of that kind."""
        return DTYPES.get(self.code)

    def view(self, name: str) -> np.ndarray:
        """Its values, mapped from the file: to be copied, never to be kept."""
        dtype = DTYPES[self.code]
        if self.start == self.stop:
            return np.empty(self.shape, dtype)
        with refusing(f"{name}: {self.file} was changed while it was read", ValueError):
            mapped = np.memmap(self.file, dtype, "r", self.start, self.shape)
        return mapped.view(np.ndarray)


Held = tuple[dict[str, Stored], dict[str, str]]  # tensors by name, and metadata


def stored_tensors(path: str | os.PathLike[str], name: str) -> dict[str, Stored]:
    """What a weights file holds, by name of tensor: see `tensors_and_texts`."""
    return tensors_and_texts(path, name)[0]


def tensors_and_texts(path: str | os.PathLike[str], name: str) -> Held:
    """What a weights file holds, by name of tensor, and the metadata in its header.

    Args:
        path: A safetensors file, an index of several, or a folder with either.
        name: The public function at work, for messages.
    """
    place = Path(require_path(path, name))
    if place.is_dir():
        place = _chosen(place, name)
    if place.name.endswith(".index.json"):
        return _indexed(place, name), {}
    return _of_file(place, name)


# One file.


def _of_file(file: Path, name: str) -> Held:
    refuse_other_formats(file, name)
    _size_of(file, name)
    header, data = _header_of(file, name)
    texts = header.pop("__metadata__", None) or {}
    found: dict[str, Stored] = {}
    for key, entry in header.items():
        shape, (start, stop) = tuple(entry["shape"]), entry["data_offsets"]
        if not is_shape(shape):
            raise WeightsError(
                f"{name}: {file} is broken: tensor {quoted(key)} has the shape "
                f"{entry['shape']!r:.60}, which no array can have."
            )
        found[key] = Stored(file, key, entry["dtype"], shape, data + start, data + stop)
    return found, texts


def is_shape(shape: Sequence[int]) -> bool:
    """Whether arrays have such shapes: (2**64 - 1, 0) is none.

    For an empty array JAX goes through all that comes before the axis of length 0, so
    that must not be much.
    """
    if len(shape) > MOST_AXES or any(length < 0 for length in shape):
        return False
    if 0 in shape and math.prod(itertools.takewhile(bool, shape)) > MOST_EMPTY:
        return False
    return math.prod(filter(None, shape)) * LARGEST < 2**63


def refuse_other_formats(file: Path, name: str) -> None:
    """Refuses a file whose name says that it is of another format."""
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


def _size_of(file: Path, name: str) -> int:
    """How many bytes a file has, which must be there, and regular."""
    try:
        found = file.stat()
    except FileNotFoundError:
        raise FileNotFoundError(f"{name}: there is no file {file}.") from None
    if not stat.S_ISREG(found.st_mode):  # a pipe would be waited for, for ever
        raise WeightsError(f"{name}: {file} is not a regular file.")
    return found.st_size


def _header_of(file: Path, name: str) -> tuple[dict[str, Any], int]:
    """The header of a file, and where the data begin.

    The safetensors library checks it: sizes, types, and that the tensors fill the data
    without gaps or overlaps. It allocates nothing else. It lets one of two entries with
    the same name win, so the text is read here once more.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np"):
            pass
    except SafetensorError as error:
        reason = words_of(error).removeprefix("Error while deserializing header: ")
        what = _diagnosis(file, reason.rstrip("."))
        raise WeightsError(f"{name}: {file} is broken: {what}.") from error
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        return json_object(opened.read(length), file, name), 8 + length


def _diagnosis(file: Path, reason: str) -> str:
    """Why the library refused a file; with the tensor's name, if it did not say it."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(32)
        length = int.from_bytes(start[:8], "little")
        opened.seek(8)
        text = opened.read(length) if length <= DIAGNOSED else b""
    for magic, what in _STARTS.items():
        if start.startswith(magic):
            return f"it looks like {what}"
    # Where the header is no object of JSON, the library's reason is all there is.
    with contextlib.suppress(AttributeError, ValueError, RecursionError):
        for key, entry in json.loads(text).items():
            if key != "__metadata__" and not _is_fit(entry, size - 8 - length):
                return f"tensor {quoted(key)} is described as {entry!a:.200}: {reason}"
    return reason


def _is_fit(entry: Any, size: int) -> bool:
    """Whether the description of a tensor agrees with itself and with the data."""
    try:
        code, shape = entry["dtype"], entry["shape"]
        start, stop = entry["data_offsets"]
        if not all(type(number) is int for number in (*shape, start, stop)):
            return False
        if not (is_shape(shape) and 0 <= start <= stop <= size):
            return False
        is_small = code.startswith(("F4", "F6"))  # as in F6_E2M3: six bits a number
        bits = int(code[1]) if is_small else 8 * DTYPES[code].itemsize
        return math.prod(shape) * bits == 8 * (stop - start)
    except (AttributeError, KeyError, TypeError, ValueError):
        return False


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, in which no name stands twice."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"it has {quoted(key)} twice")
        found[key] = value
    return found


def json_object(text: str | bytes, file: Any, name: str) -> dict[str, Any]:
    """An object from JSON, whatever the text is."""
    what = f"{name}: {file} is broken: it has no readable JSON"
    with refusing(what, ValueError, RecursionError):
        parsed = json.loads(text, object_pairs_hook=_unique)
        if not isinstance(parsed, dict):
            raise ValueError(f"it is a {type(parsed).__name__}, not an object")
    return parsed


# Several files.


def _chosen(folder: Path, name: str) -> Path:
    """The weights in a folder: a single file, or the index of several."""
    names = sorted(entry.name for entry in folder.iterdir())
    indexes = [each for each in names if each.endswith(INDEX)]
    files = [each for each in names if each.endswith(".safetensors")]
    found = [each for each in files if each == WHOLE] or indexes or files
    if len(found) > 1:
        raise WeightsError(
            f"{name}: {folder} has several weights: {first_few(found)}. "
            "Name one of them."
        )
    if found:
        return _inside(folder, found[0], folder, name)
    for each in names:
        refuse_other_formats(folder / each, name)
    told = first_few([*map(quoted, names)]) or "nothing"
    raise WeightsError(f"{name}: {folder} has no .safetensors file; it has {told}.")


def _inside(folder: Path, entry: str, told: Any, name: str) -> Path:
    """A file of a folder; a name or a link that leads out of it is refused."""
    plain = entry not in ("", ".", "..") and not set(entry) & set("/\\:")
    plain = plain and entry.isprintable() and len(entry.encode()) <= LONGEST_NAME
    if not plain:
        raise WeightsError(
            f"{name}: {told} names the file {quoted(entry)}; only names of files in "
            "the same folder are followed."
        )
    real = (folder / entry).resolve()
    homes = [folder.resolve()]
    if homes[0].parent.name == "snapshots":  # Hugging Face's cache links to its blobs
        homes.append(homes[0].parents[1] / "blobs")
    if real.parent not in homes:
        raise WeightsError(
            f"{name}: {folder / entry} is a link that leads out of its folder, to "
            f"{real}. Name that file itself, or copy it."
        )
    return folder / entry


def _indexed(index: Path, name: str) -> dict[str, Stored]:
    """The tensors of the files that an index names."""
    size = _size_of(index, name)
    if size > HEADER_LIMIT:
        raise WeightsError(
            f"{name}: {index} has {size:,} bytes, too many for an index."
        )
    places = json_object(index.read_bytes(), index, name).get("weight_map")
    if not isinstance(places, dict) or not all(
        isinstance(file, str) for file in places.values()
    ):
        raise WeightsError(
            f"{name}: {index} has no `weight_map` from names of tensors to files."
        )
    found: dict[str, Stored] = {}
    for file in sorted(set(places.values())):
        tensors, _ = _of_file(_inside(index.parent, file, index, name), name)
        for key, stored in tensors.items():
            if places.get(key, file) != file:
                continue  # the index says that another file counts
            if key in found:
                raise WeightsError(
                    f"{name}: {quoted(key)} is in {found[key].file.name} and in "
                    f"{file}, and {index} does not say which counts."
                )
            found[key] = stored
    lost = [f"{quoted(key)} in {places[key]}" for key in places if key not in found]
    if lost:
        raise WeightsError(
            f"{name}: {index} names {len(lost)} tensors that the files do not have: "
            f"{first_few(lost)}. The files belong to another index, or are incomplete."
        )
    return {key: found[key] for key in {**places, **found}}  # in the index's order


# Writing.


def new_file(path: Any, metadata: Mapping[str, str] | None, name: str) -> Path:
    """The file that is to be written; refused if it, or its metadata, cannot be."""
    file = Path(require_path(path, name))
    refuse_other_formats(file, name)
    items = (metadata or {}).items()
    if not all(isinstance(text, str) for item in items for text in item):
        raise TypeError(f"{name}: `metadata` maps texts to texts, and is {metadata!r}.")
    return file


def write_tensors(
    path: Path, tensors: dict[str, np.ndarray], metadata: dict[str, str], name: str
) -> None:
    """Writes a safetensors file, all or nothing."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    with written_whole(path, name) as beside:
        try:
            whole = {n: np.require(a, requirements="C") for n, a in tensors.items()}
            save_file(whole, beside, metadata)
        except SafetensorError as error:
            raise not_written(path, error, name) from error
        except UnicodeEncodeError as error:
            raise WeightsError(
                f"{name}: {path} could not be written: {error.object!r:.80} is no text "
                "that a file can hold."
            ) from error
