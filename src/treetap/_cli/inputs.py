# SPDX-License-Identifier: Apache-2.0
"""Inputs: arrays for a call, from a file or drawn at random, and weights.

Files are `.npz` or `.safetensors`; pickles are never read. `float32[8,128]` stands for
an array that is drawn, with the same numbers for the same seed.
"""

import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from treetap._cli.failures import Failure
from treetap._cli.targets import Case, Inputs
from treetap._core.wording import quoted
from treetap._io.record_descriptions import DTYPES
from treetap._io.safetensors_file import is_shape, stored_tensors
from treetap._io.weights import load_weights
from treetap._report.table import long_type

_SPEC = re.compile(
    r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<dtype>[a-z]+\d*(?:_\w+)?)"
    r"\[(?P<sizes>[\d,\s]*)\](?:<(?P<below>\d{1,20}))?"
)
_POSITION = re.compile(r"(arg|arr_)(0|[1-9][0-9]{0,8})")
DENSEST = 1032  # bytes that one byte of a zip file can stand for
FORM = "'float32[8,128]', 'int32[8,128]<50' (from 0 to 49) or 'mask=bool[8,128]'"


class Spec(NamedTuple):
    """An array to draw.

    Attributes:
        name: Of the argument; empty if it is given by position.
        array: Its shape and type of numbers.
        below: What integers are less than.
    """

    name: str
    array: jax.ShapeDtypeStruct
    below: int


def spec_of(text: str) -> Spec:
    """Reads how an array is written, such as `int32[8,128]<50`."""
    found = _SPEC.fullmatch(text.strip())
    if found is None:
        raise Failure(f"--shape {text!r} is not understood. It is written {FORM}.")
    name = long_type(found["dtype"])
    try:
        dtype = jnp.dtype(name)
    except TypeError as error:
        message = f"--shape {text!r}: there is no type {found['dtype']!r}."
        raise Failure(message) from error
    if dtype.name not in DTYPES:
        raise Failure(f"--shape {text!r}: JAX has no type {found['dtype']!r}.")
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise Failure(
            f"--shape {text!r}: JAX has no {name} unless JAX_ENABLE_X64=1 is set."
        )
    sizes = [part.strip() for part in found["sizes"].split(",")]
    if sizes[-1] == "":
        sizes.pop()
    if not all(re.fullmatch(r"\d{1,18}", size) for size in sizes):
        raise Failure(
            f"--shape {text!r} lacks a size, or has one that is none. It is written "
            f"{FORM}."
        )
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    if found["below"] is not None and not is_integer:
        raise Failure(f"--shape {text!r}: `<` is for integers.")
    below = 2 if found["below"] is None else int(found["below"])
    if is_integer and not 1 <= below <= int(jnp.iinfo(dtype).max):
        raise Failure(f"--shape {text!r}: no {name} is from 0 to below {below}.")
    array = jax.ShapeDtypeStruct(tuple(map(int, sizes)), dtype)
    return Spec(found["name"] or "", array, below)


def _drawn(spec: Spec, key: jax.Array) -> jax.Array:
    shape, dtype = spec.array.shape, spec.array.dtype
    if jnp.issubdtype(dtype, jnp.bool_):
        return jax.random.bernoulli(key, 0.5, shape)
    if jnp.issubdtype(dtype, jnp.integer):
        return jax.random.randint(key, shape, 0, spec.below, dtype)
    if dtype.itemsize < 2:  # JAX draws no numbers of 8 bits
        return jax.random.normal(key, shape).astype(dtype)
    return jax.random.normal(key, shape, dtype)


def drawn(texts: Sequence[str], seed: int, *, abstract: bool = False) -> Inputs:
    """Arrays as they are written, drawn from a seed, or only their shapes."""
    specs = [spec_of(text) for text in texts]
    keys = jax.random.split(jax.random.key(seed), len(specs))
    args: list[Any] = []
    named: dict[str, Any] = {}
    for spec, key in zip(specs, keys):
        if spec.name in named:
            raise Failure(f"--shape has two inputs called {spec.name!r}.")
        array = spec.array if abstract else _drawn(spec, key)
        if spec.name:
            named[spec.name] = array
        else:
            args.append(array)
    return Inputs(tuple(args), named)


def read(path: str) -> Inputs:
    """The arrays of a file: `arg0`, `arg1` and so on by position, others by name."""
    file = Path(path)
    if not file.is_file():
        raise Failure(f"--inputs: there is no file {path}.")
    if file.suffix == ".npz":
        arrays = dict(_in_npz(file))
    elif file.suffix == ".safetensors":
        stored = stored_tensors(file, "--inputs")
        arrays = {name: each.view("--inputs") for name, each in stored.items()}
    else:
        raise Failure(
            f"--inputs: {path} is neither .npz nor .safetensors. Save arrays with "
            "`numpy.savez('inputs.npz', arg0=x, mask=mask)`."
        )
    return _by_position({n: _on_device(n, a, path) for n, a in arrays.items()}, path)


def _in_npz(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    try:
        archive = zipfile.ZipFile(file)
    except Exception as error:  # of the many that broken archives lead to
        raise Failure(
            f"--inputs: {file} is not what `numpy.savez` writes, though it is called "
            ".npz. If it is a pickle, it is not read: that can run any program."
        ) from error
    seen: set[str] = set()
    with archive:
        total = sum(about.file_size for about in archive.infolist())
        if total > DENSEST * file.stat().st_size:  # members that share their data
            raise Failure(
                f"--inputs: {file} is broken: it cannot hold the {total:,} bytes that "
                "it says it does."
            )
        for about in archive.infolist():
            name = about.filename.removesuffix(".npy")
            if name in seen:
                raise Failure(f"--inputs: {file} has {quoted(name)} twice.")
            seen.add(name)
            yield name, _member(archive, about, f"{quoted(name)} in {file}")


def _member(archive: zipfile.ZipFile, about: zipfile.ZipInfo, where: str) -> np.ndarray:
    """An array; what it claims to be beyond its data is never filled with anything."""
    try:
        with archive.open(about) as member, warnings.catch_warnings(action="ignore"):
            array = np.lib.format.read_array(member, allow_pickle=False)
            if member.read(1):
                raise ValueError("there is more than the array")
        if not is_shape(array.shape):
            raise ValueError(f"the shape {array.shape!r:.60}")
    except Exception as error:  # of the many that broken members lead to
        raise Failure(
            f"--inputs: {where} is no array of numbers, or broken: {str(error)!r:.200}."
        ) from error
    return array


def _on_device(name: str, array: np.ndarray, path: str) -> jax.Array:
    """An array as JAX has it: of 32 bits unless 64 are allowed."""
    if array.dtype.name not in DTYPES:
        raise Failure(
            f"--inputs: {name!r} in {path} has the type {array.dtype}, which JAX does "
            "not have. Types such as bfloat16 are kept by .safetensors."
        )
    # some files have the bytes of a number in the other order
    dtype = jax.dtypes.canonicalize_dtype(array.dtype.newbyteorder("="))
    with np.errstate(over="ignore", invalid="ignore"):  # what is too large is inf
        made = array.astype(dtype)
    if jnp.issubdtype(dtype, jnp.integer) and (made != array).any():
        raise Failure(
            f"--inputs: {name!r} in {path} has integers that {dtype} does not hold. "
            "Set JAX_ENABLE_X64=1."
        )
    return jnp.asarray(made)


def _by_position(arrays: Mapping[str, Any], path: str) -> Inputs:
    found = {name: _POSITION.fullmatch(name) for name in arrays}
    placed = {int(m[2]): name for name, m in found.items() if m is not None}
    kinds = {m[1] for m in found.values() if m is not None}
    if len(kinds) > 1 or sorted(placed) != list(range(len(placed))):
        names = ", ".join(name for name, m in found.items() if m is not None)
        raise Failure(
            f"--inputs: {path} has {names}; inputs by position are arg0, arg1, … "
            "without a gap."
        )
    args = tuple(arrays[placed[n]] for n in range(len(placed)))
    return Inputs(args, {name: arrays[name] for name, m in found.items() if m is None})


def load_into(case: Case, path: str, *, cast: bool) -> None:
    """Reads the weights of a case's model from a file."""
    if case.owner is None:
        raise Failure(f"--weights: {case.name} is a function, and holds no weights.")
    load_weights(path, case.owner, cast=cast)
