# SPDX-License-Identifier: Apache-2.0
"""Inputs: arrays for a call, from a file or drawn at random, and weights.

Files are `.npz` or `.safetensors`; pickles are never read. `float32[8,128]` stands for
an array that is drawn, with the same numbers for the same seed.
"""

import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from treetap._attributes import Node
from treetap._cli.failures import Failure
from treetap._cli.targets import Case, Inputs
from treetap._files.tensors import stored_tensors
from treetap._files.weights import load_weights

_SHORT = {"f": "float", "bf": "bfloat", "i": "int", "u": "uint", "c": "complex"}
_SPEC = re.compile(
    r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<dtype>[a-z]+\d*(?:_\w+)?)"
    r"\[(?P<sizes>[\d,\s]*)\](?:<(?P<below>\d+))?"
)
_POSITION = re.compile(r"(arg|arr_)(\d+)")
FORM = "'float32[8,128]', 'int32[8,128]<50' (from 0 to 49) or 'mask=bool[8,128]'"


class Spec(NamedTuple):
    """An array to draw.

    Attributes:
        name: Of the argument; empty if it is given by position.
        shape: Its shape.
        dtype: Its type of numbers.
        below: What integers are less than.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    below: int


def spec_of(text: str) -> Spec:
    """Reads how an array is written, such as `int32[8,128]<50`."""
    found = _SPEC.fullmatch(text.strip())
    if found is None:
        raise Failure(f"--shape {text!r} is not understood. It is written {FORM}.")
    short = re.fullmatch(r"([a-z]+?)(\d+)", found["dtype"])
    name = found["dtype"]
    if short and short[1] in _SHORT:
        name = _SHORT[short[1]] + short[2]
    try:
        dtype = jnp.dtype(name)
    except TypeError as error:
        raise Failure(f"--shape {text!r}: there is no type {found['dtype']!r}.") from (
            error
        )
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise Failure(
            f"--shape {text!r}: JAX has no {name} unless JAX_ENABLE_X64=1 is set."
        )
    sizes = [part.strip() for part in found["sizes"].split(",")]
    if sizes[-1] == "":
        sizes.pop()
    if "" in sizes:
        raise Failure(f"--shape {text!r} lacks a size. It is written {FORM}.")
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    if found["below"] is not None and not is_integer:
        raise Failure(f"--shape {text!r}: `<` is for integers.")
    below = 2 if found["below"] is None else int(found["below"])
    if is_integer and not 1 <= below <= int(jnp.iinfo(dtype).max):
        raise Failure(f"--shape {text!r}: no {name} is from 0 to below {below}.")
    return Spec(found["name"] or "", tuple(map(int, sizes)), dtype, below)


def _drawn(spec: Spec, key: jax.Array) -> jax.Array:
    if jnp.issubdtype(spec.dtype, jnp.bool_):
        return jax.random.bernoulli(key, 0.5, spec.shape)
    if jnp.issubdtype(spec.dtype, jnp.integer):
        return jax.random.randint(key, spec.shape, 0, spec.below, spec.dtype)
    if spec.dtype.itemsize < 2:  # of 8 bits, for which nothing is drawn
        return jax.random.normal(key, spec.shape).astype(spec.dtype)
    return jax.random.normal(key, spec.shape, spec.dtype)


def drawn(texts: Sequence[str], seed: int, *, abstract: bool = False) -> Inputs:
    """Arrays as they are written, drawn from a seed, or only their shapes."""
    specs = [spec_of(text) for text in texts]
    keys = jax.random.split(jax.random.key(seed), len(specs))
    arrays = [
        jax.ShapeDtypeStruct(spec.shape, spec.dtype) if abstract else _drawn(spec, key)
        for spec, key in zip(specs, keys)
    ]
    return _arranged([(s.name, array) for s, array in zip(specs, arrays)], "--shape")


def _arranged(pairs: Sequence[tuple[str, Any]], where: str) -> Inputs:
    named: dict[str, Any] = {}
    for name, value in pairs:
        if name in named:
            raise Failure(f"{where} has two inputs called {name!r}.")
        if name:
            named[name] = value
    return Inputs(tuple(value for name, value in pairs if not name), named)


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
    if not zipfile.is_zipfile(file):
        raise Failure(
            f"--inputs: {file} is not what `numpy.savez` writes, though it is called "
            ".npz. If it is a pickle, it is not read: that can run any program."
        )
    try:
        with np.load(file, allow_pickle=False) as opened:
            for name in opened.files:
                yield name, _member(opened, name, file)
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
        raise Failure(f"--inputs: {file} is broken: {error}.") from error


def _member(opened: Mapping[str, Any], name: str, file: Path) -> np.ndarray:
    try:
        found = opened[name]
    except ValueError as error:
        if "pickle" not in str(error).lower():
            raise Failure(f"--inputs: {name!r} in {file}: {error}.") from error
        raise Failure(
            f"--inputs: {name!r} in {file} is a pickle, which can run any program when "
            "it is read. Save an array of numbers."
        ) from error
    if not isinstance(found, np.ndarray):
        raise Failure(f"--inputs: {name!r} in {file} is no array.")
    return found


def _on_device(name: str, array: np.ndarray, path: str) -> jax.Array:
    """An array as JAX has it: of 32 bits unless 64 are allowed."""
    is_known = jnp.issubdtype(array.dtype, jnp.number) or array.dtype == bool
    if not is_known:
        raise Failure(
            f"--inputs: {name!r} in {path} has the type {array.dtype}, which JAX does "
            "not have. Types such as bfloat16 are kept by .safetensors."
        )
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
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
    named = {name: arrays[name] for name, m in found.items() if m is None}
    return Inputs(args, named)


def inputs_for(
    case: Case, file: str | None, shapes: Sequence[str], seed: int, *, abstract: bool
) -> Inputs:
    """What a case is called with: as told, or what it brought along."""
    if file is not None and shapes:
        raise Failure("--inputs and --shape both say what the inputs are. Give one.")
    if file is not None:
        return read(file)
    if shapes:
        return drawn(shapes, seed, abstract=abstract)
    return case.inputs or Inputs()


def load_into(case: Case, path: str, *, cast: bool) -> None:
    """Reads the weights of a case's model from a file."""
    owner = getattr(case.call, "__self__", case.call)
    if not isinstance(owner, Node):
        raise Failure(f"--weights: {case.name} is a function, and holds no weights.")
    load_weights(path, owner, cast=cast)
