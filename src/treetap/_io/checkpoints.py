# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: any tree of Modules and arrays, saved and restored with Orbax.

What is written is what NNX programs write when they save `nnx.state(...)`: nested names
as texts, and the array of a Variable under `value`. So the two read each other's
checkpoints. Orbax's own account of a checkpoint is compared with the target first, and
arrays are read only when everything fits.
"""

import contextlib
import glob
import os
import pathlib
import shutil
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import sync_global_devices
from jax.sharding import SingleDeviceSharding
from jax.tree_util import tree_flatten_with_path

from treetap._core.errors import WeightsError
from treetap._core.paths import plain_key
from treetap._core.trees.split import merge
from treetap._core.trees.state import flat_items, nested
from treetap._core.variables.values import is_key, is_ref, without_ref
from treetap._core.variables.variable import Variable
from treetap._io.files import needing, not_written, refusing, require_path
from treetap._io.targets import (
    NUMBERS,
    is_held,
    no_value,
    parts_of,
    section,
    sharding_of,
)

T = TypeVar("T")
Names = tuple[str, ...]

WAITS, WAIT = 40, 0.05  # how often, and how long, for threads that write on
TREE_FILE = "_METADATA"  # a folder with this file is a checkpoint of a tree


class _Leaf(NamedTuple):
    """One array or number of a tree, and the names it has in a checkpoint."""

    holder: Any  # the Variable it stands in, or itself
    raw: Any
    names: Names
    pure: Names  # without the level `value`

    @property
    def text(self) -> str:
        """Its path, for messages."""
        return "/".join(self.pure)


class _Tree:
    """A tree taken apart into leaves, of which it can be made again.

    JAX flattens the values that stand in the tree, a Variable with a level `value`. It
    is not given the State itself, whose keys it may not be able to sort.
    """

    def __init__(self, tree: Any, name: str):
        self._graphdef, state = parts_of(tree, name)
        self._items = list(flat_items(state.raw_mapping))
        holders = [holder for _, holder in self._items]
        pairs, self._structure = tree_flatten_with_path(holders, is_leaf=is_ref)
        self.leaves = [self._leaf(keys[0].idx, keys[1:], raw) for keys, raw in pairs]

    def _leaf(self, number: int, keys: Any, raw: Any) -> _Leaf:
        path, holder = self._items[number]
        start, level = tuple(map(str, path)), int(isinstance(holder, Variable))
        names = start + _names_of(keys)
        return _Leaf(holder, raw, names, start + _names_of(keys[level:]))

    def rebuilt(self, values: Iterable[Any]) -> Any:
        """The same tree, with other values."""
        paths = (path for path, _ in self._items)
        holders = self._structure.unflatten(values)
        return merge(self._graphdef, nested(zip(paths, holders)))


def _names_of(keys: Any) -> Names:
    return tuple(str(plain_key(key)) for key in keys)


def _orbax(name: str) -> ModuleType:
    with needing("Orbax", "orbax", name):
        import orbax.checkpoint
    return orbax.checkpoint


def _checkpointer(ocp: ModuleType) -> Any:
    return ocp.Checkpointer(ocp.StandardCheckpointHandler())


def _place_of(path: Any, name: str) -> pathlib.Path | str:
    """A folder of this machine; or a text, of remote storage."""
    text = os.fspath(require_path(path, name))
    return text if "://" in text else pathlib.Path(os.path.abspath(text))


# Saving.


def save_checkpoint(
    path: str | os.PathLike[str], tree: Any, *, overwrite: bool = False
) -> None:
    """Saves a model, an optimizer, or any tree of them and arrays, as a folder.

    Needs Orbax: `pip install treetap[orbax]`. Arrays on many devices, and of many
    processes, are written as they lie. The folder is complete or not there. A program
    of NNX can restore it as the State of the same model.

    Args:
        path: The folder to make.
        tree: What to save; not a bare Variable or array.
        overwrite: Replace a checkpoint that is there, once the new one is complete;
            with several processes, or on remote storage, it goes first.

    Examples:
        >>> import tempfile, jax.numpy as jnp, treetap as tt
        >>> model = {"w": tt.Param(jnp.ones(2)), "step": 3}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tt.save_checkpoint(f"{folder}/last", model)
        ...     restored = tt.restore_checkpoint(f"{folder}/last", model)
        >>> restored["step"], restored["w"].shape
        (3, (2,))
    """
    name = "save_checkpoint"
    place = _place_of(path, name)
    ocp = _orbax(name)
    values: dict[Names, Any] = {}
    problems: list[str] = []
    flat: dict[str, str] = {}  # Orbax's own names
    for leaf in _Tree(tree, name).leaves:
        joined = ".".join(leaf.names)
        if joined in flat:
            problems.append(f"{leaf.text} and {flat[joined]} would both be {joined!r}")
        flat[joined] = leaf.text
        if reason := no_value(leaf.raw):
            problems.append(f"{leaf.text} {reason}")
        values[leaf.names] = without_ref(leaf.raw)
    if problems or not values:
        raise WeightsError(
            f"{name}: nothing was written to {os.fspath(path)}"
            + ("." if problems else ": there is nothing to save.")
            + section("what cannot be saved", problems)
        )
    args = ocp.args.StandardSave(nested(values.items()))
    if isinstance(place, pathlib.Path) and os.path.lexists(place):
        _refuse_place(place, overwrite, name)
    if isinstance(place, str) or jax.process_count() > 1:
        # Orbax writes beside the folder, under one name that all processes agree on.
        sync_global_devices(f"{name} {place}")  # all have looked before one removes it
        with _checkpointer(ocp) as checkpointer:
            checkpointer.save(place, args=args, force=overwrite)
        return
    try:
        with _replacing(place) as beside, _checkpointer(ocp) as checkpointer:
            checkpointer.save(beside, args=args)
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) and "os_error_code" not in str(error):
            raise  # not an error of tensorstore about files
        raise not_written(place, error, name) from error


def _refuse_place(place: pathlib.Path, overwrite: bool, name: str) -> None:
    """Refuses to replace what is there, unless that is asked for, and it is ours."""
    if not overwrite:
        raise FileExistsError(
            f"{name}: {place} is there already. Choose another folder, or say "
            "`overwrite=True`."
        )
    is_ours = place.is_dir() and not place.is_symlink()
    if not is_ours or (any(place.iterdir()) and not (place / TREE_FILE).is_file()):
        raise FileExistsError(
            f"{name}: {place} is not a checkpoint, so it is not replaced."
        )


@contextlib.contextmanager
def _replacing(place: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder to write beside another, which it replaces at the end."""
    mark = f".{place.name}.{uuid.uuid4().hex}"
    beside, old = place.with_name(f"{mark}.new"), place.with_name(f"{mark}.old")
    others = {*threading.enumerate()}
    try:
        yield beside
        if place.exists():
            place.rename(old)
        beside.rename(place)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        if place.exists():  # the old one still, or the new one already
            shutil.rmtree(old, ignore_errors=True)
        elif old.exists():
            old.rename(place)
        _remove(place.parent, f"{mark}.new*", others)  # and Orbax's unfinished one
        raise


def _remove(folder: pathlib.Path, pattern: str, others: set[threading.Thread]) -> None:
    """Removes half-written folders.

    Orbax's threads, which started after the others, may go on writing for a moment, and
    make again a folder that was removed.
    """
    for _ in range(WAITS):
        is_writing = not others.issuperset(threading.enumerate())
        rests = [*folder.glob(pattern)]
        for rest in rests:
            shutil.rmtree(rest, ignore_errors=True)
        if not (rests or is_writing):
            return
        time.sleep(WAIT)


# Restoring.


def restore_checkpoint(path: str | os.PathLike[str], target: T) -> T:
    """Restores what `save_checkpoint`, or an NNX program, saved; returns a new object.

    Names, shapes and dtypes must be those of the target; all that differs is listed in
    one WeightsError. Arrays are placed as the target's are, whatever they were when
    they were saved: on another mesh, if the target is on one.

    Args:
        path: A checkpoint: the folder itself, not one of its parents.
        target: An object of the same structure, concrete or abstract (see
            `eval_shape`). It gives types, static attributes and shardings, and is not
            changed.
    """
    name = "restore_checkpoint"
    place = _place_of(path, name)
    ocp = _orbax(name)
    tree = _Tree(target, name)
    if isinstance(place, pathlib.Path) and not (place / TREE_FILE).is_file():
        _refuse_incomplete(place, name)
    with _checkpointer(ocp) as checkpointer:
        stored = getattr(checkpointer.metadata(place).item_metadata, "tree", None)
        if stored is None:
            raise WeightsError(
                f"{name}: {place} is broken: Orbax cannot tell what is in it."
            )
        pairs, structure = tree_flatten_with_path(stored)
        known = {_names_of(keys): about for keys, about in pairs}
        found = _matched(known, tree.leaves, place, name)
        requests = [_request(found[names], name) for names in known]
        args = ocp.args.StandardRestore(structure.unflatten(requests))
        with refusing(f"{name}: {place} is broken", ValueError, OSError):
            restored = checkpointer.restore(place, args=args)
    values = dict(zip(known, jax.tree.leaves(restored), strict=True))
    return tree.rebuilt(_finished(values[at], leaf, name) for at, leaf in found.items())


def _refuse_incomplete(place: pathlib.Path, name: str) -> None:
    """Refuses what is no checkpoint of a tree; says what it is, if that is known."""
    if not place.exists():
        halves = sorted(place.parent.glob(f"{glob.escape(place.name)}.orbax-*"))
        hint = f" A save to it was not finished: {halves[0]}." if halves else ""
        raise FileNotFoundError(f"{name}: there is no checkpoint {place}.{hint}")
    if not place.is_dir():
        raise WeightsError(f"{name}: {place} is a file; a checkpoint is a folder.")
    inside = sorted(each.parent.name for each in place.glob(f"*/{TREE_FILE}"))
    hint = f" It holds some: {', '.join(inside[:8])}. Name one." if inside else ""
    raise WeightsError(
        f"{name}: {place} is not a checkpoint of a tree, or is incomplete: it has no "
        f"{TREE_FILE}.{hint}"
    )


def _matched(
    known: dict[Names, Any], leaves: list[_Leaf], place: Any, name: str
) -> dict[Names, _Leaf]:
    """The leaves of the target, by their names in a checkpoint; all must fit."""
    found: dict[Names, _Leaf] = {}
    missing: list[str] = []
    wrong: list[str] = []
    for leaf in leaves:
        names = leaf.names if leaf.names in known else leaf.pure
        if names not in known or names in found:  # each leaf is one of the target's
            missing.append(f"{leaf.text} ({type(leaf.holder).__name__})")
            continue
        found[names] = leaf
        if difference := _difference(leaf.raw, known[names]):
            wrong.append(f"{leaf.text} ({type(leaf.holder).__name__}): {difference}")
    extra = ["/".join(names) for names in known if names not in found]
    if missing or wrong or extra:
        raise WeightsError(
            f"{name}: {place} does not fit the target."
            + section("what the target has differently", wrong)
            + section("in the target only", missing)
            + section("in the checkpoint only", extra)
            + "\nGive a target of the structure that was saved."
        )
    return found


def _difference(raw: Any, about: Any) -> str:
    """How a stored value differs from the target's; empty when it does not."""
    shape, dtype = getattr(about, "shape", None), getattr(about, "dtype", None)
    if shape is None or dtype is None:
        return f"stored as {about!r:.80}"
    if not is_held(raw):
        return f"{raw.dtype} needs `jax_enable_x64`"
    kinds = {bool: "b", int: "iu", float: "f"}
    target, is_same = f"a {type(raw).__name__}", False
    if type(raw) in kinds:
        is_same = shape == () and np.dtype(dtype).kind in kinds[type(raw)]
    elif hasattr(raw, "shape") and hasattr(raw, "dtype"):
        wanted: Any = jax.ShapeDtypeStruct(raw.shape, raw.dtype)
        if is_key(raw):
            wanted = jax.eval_shape(jax.random.key_data, wanted)
        target = f"{raw.dtype}{raw.shape}"
        is_same = (tuple(shape), dtype) == (wanted.shape, wanted.dtype)
    if is_same:
        return ""
    return f"stored as {dtype}{tuple(shape)}, the target has {target}"


def _request(leaf: _Leaf, name: str) -> Any:
    """What Orbax is to make for a leaf: a number, or an array and its place."""
    raw = leaf.raw
    if type(raw) in NUMBERS:
        return raw
    sharding = sharding_of(raw, leaf.holder, f"{name}: {leaf.text}")
    if sharding is None and is_key(raw):
        sharding = SingleDeviceSharding(jax.local_devices()[0])
    if sharding is None:
        return np.broadcast_to(np.zeros((), raw.dtype), raw.shape)
    return jax.ShapeDtypeStruct(raw.shape, raw.dtype, sharding=sharding)


def _finished(value: Any, leaf: _Leaf, name: str) -> Any:
    """A restored value as the target's: a number, numpy's or JAX's array, or a Ref.

    It is committed to devices only if the target's is.
    """
    raw = leaf.raw
    if type(raw) in NUMBERS:
        return type(raw)(value)
    if isinstance(raw, np.ndarray | np.generic):
        return value
    if is_key(raw):
        if value.dtype != raw.dtype:
            raise WeightsError(
                f"{name}: {leaf.text} is stored as {value.dtype}, the target has "
                f"{raw.dtype}. Make its keys of the implementation that was saved."
            )
        if sharding_of(raw, leaf.holder, name) is None:
            data = jnp.asarray(np.asarray(jax.random.key_data(value)))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    elif isinstance(value, np.ndarray):
        value = jnp.asarray(value)
    return jax.new_ref(value) if is_ref(raw) else value
