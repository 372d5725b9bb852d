# SPDX-License-Identifier: Apache-2.0
"""Writers: append the Records of many batches to a folder.

The numbers are written first, then one line of a journal. When `append` returns both
are on the disk, and what has no line does not count. So a program may be killed at any
moment, and every batch that it was told of is there.
"""

import contextlib
import itertools
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather, sync_global_devices

from treetap._core.errors import CaptureError, StructureError, WeightsError
from treetap._io.file_paths import refuse_no_path
from treetap._io.record_descriptions import Leaf, described
from treetap._io.store.arrays import (
    column_for,
    created,
    opened,
    tensorstore_for,
    written,
)
from treetap._io.store.axes import EXAMPLES, Axes, Axis
from treetap._io.store.contents import Contents, journal_file, read_contents
from treetap._io.store.journals import AGAIN, Journal
from treetap._observe.records import Record


class StoreWriter:
    """Appends the Records of many batches to a folder, safe against being killed.

    Needs tensorstore: `pip install treetap[store]`. All Records are of the same sites,
    shapes and types, but for the number of rows. With several processes each opens the
    same folder, and writes the shards that it has.

    Args:
        path: The folder; made if there is none, continued if it is a store.
        axis: The axis along which batches are joined: a number, None for a new axis, or
            a mapping from selectors to these. By default the first axis of the value
            itself: that of the examples, behind those that `scan` and `shard_map` put
            in front. Values without such an axis get a new one.
        compression: A level of zstd, 1 to 22; 0 for none.

    Examples:
        >>> import tempfile, jax.numpy as jnp, treetap as tt
        >>> run = tt.observe(lambda x: tt.tap(x + 1, "a"))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with tt.StoreWriter(f"{folder}/runs") as writer:
        ...         for step in range(3):
        ...             _, record = run(jnp.full((2, 4), step))
        ...             number = writer.append(record, {"step": step})
        ...     store = tt.Store(f"{folder}/runs")
        ...     len(store), store["a"].shape, store["a"][2:5, 0].tolist()
        (3, (6, 4), [2, 2, 3])
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        axis: Axis = EXAMPLES,
        compression: int = 0,
    ):
        name = "StoreWriter"
        refuse_no_path(path, name)
        self._ts = tensorstore_for(name)
        self._folder = pathlib.Path(os.path.abspath(path))
        self._axis = Axes(axis, name)
        if type(compression) is not int or not 0 <= compression <= 22:
            raise ValueError(
                f"{name}: `compression` is 0 to 22, and is {compression!r}."
            )
        self._compression = compression
        self._pending: list[Any] = []  # futures; after an interrupt, still at work
        self._process, processes = jax.process_index(), jax.process_count()
        if self._process == 0:
            _refuse_place(self._folder, name)
            self._folder.mkdir(exist_ok=True)
        self._meet("folder")
        file = journal_file(self._folder, self._process)
        self._journal = Journal(file, processes, name)
        try:
            self._meet("journals")
            self._contents = read_contents(self._folder, name)
            known = self._contents
            self._meet("read")  # all have looked before one cuts
            self._journal.cut(known.lines)
            self._arrays = self._opened(name)
            _fsync(self._folder)
        except BaseException:
            self._journal.close()
            raise

    def _opened(self, name: str) -> list[Any]:
        """The arrays, as they are now."""
        return [
            opened(self._ts, column, column.folder(self._folder, number), name)
            for number, column in enumerate(self._contents.columns)
        ]

    def _agree(self, futures: Sequence[Any], what: str) -> None:
        """Waits; what fails in one process fails in all."""
        problem: OSError | None = None
        try:
            _wait(futures, what)
        except OSError as error:
            problem = error
        if jax.process_count() > 1:
            failed = process_allgather(np.asarray(problem is not None))
            if problem is None and failed.any():
                where = np.flatnonzero(failed).tolist()
                problem = OSError(f"{what}: writing failed in processes {where}.")
        if problem is not None:
            raise problem

    def _begun(self, futures: Iterable[Any]) -> list[Any]:
        """Takes note of what is begun."""
        start = len(self._pending)
        self._pending.extend(futures)
        return self._pending[start:]

    def _settle(self) -> None:
        """Waits for what a batch that was interrupted has left at work.

        It would write where the next one does.
        """
        for future in self._pending:
            with contextlib.suppress(ValueError, OSError):  # told when it failed
                future.result()
        self._pending.clear()

    def _meet(self, what: str) -> None:
        if jax.process_count() > 1:
            sync_global_devices(f"StoreWriter {what} {self._folder}")

    def __len__(self) -> int:
        return len(self._contents.batches)

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the folder; all that was appended is there already."""
        self._settle()
        self._journal.close()

    def append(self, record: Record, metadata: Mapping[str, Any] | None = None) -> int:
        """Appends a batch; when this returns it is on the disk.

        Args:
            record: What `observe` gave; of the sites, shapes and types of the others.
            metadata: What else is to be known of the batch; as JSON.

        Returns:
            The number of the batch.
        """
        name = "StoreWriter.append"
        if not self._journal.is_open:
            raise ValueError(f"{name}: the writer is closed.")
        told = _as_json(metadata, name)
        sites, leaves = described(record, name)
        contents = self._contents
        self._settle()
        self._catch_up()  # if an interrupt came in between
        if contents.begun is None:
            self._begin(record, sites, leaves, name)
        _refuse_others(contents, sites, leaves, name)
        columns, starts = contents.columns, contents.ends
        rows = [column.rows_of(leaf.value) for column, leaf in zip(columns, leaves)]
        for leaf in leaves:
            if isinstance(leaf.value, jax.Array):
                leaf.value.copy_to_host_async()
        self._grow([start + count for start, count in zip(starts, rows)])
        futures = itertools.chain.from_iterable(
            written(array, column, leaf.value, start)
            for array, column, leaf, start in zip(self._arrays, columns, leaves, starts)
        )
        what = f"{name}: a batch for {self._folder} was not kept"
        self._agree(self._begun(futures), what)
        self._journal.write({"rows": rows, "metadata": told})
        self._pending.clear()
        self._meet("told")
        self._catch_up()
        return len(self) - 1

    def _catch_up(self) -> None:
        """Takes note of what the journal says."""
        self._contents.take(self._journal.entries_after(self._contents.lines))

    def _begin(
        self, record: Record, sites: list[Any], leaves: list[Leaf], name: str
    ) -> None:
        """Makes the arrays that the first Record needs."""
        if not leaves:
            raise CaptureError(f"{name}: the Record has no values.")
        axes = self._axis.all_for(record, leaves, name)
        columns = [
            column_for(leaf.text, leaf.value, axis, leaf.value.dtype.name)
            for leaf, axis in zip(leaves, axes)
        ]
        folders = [column.folder(self._folder, n) for n, column in enumerate(columns)]
        data = self._folder / "data"
        if data.is_symlink():
            raise WeightsError(f"{name}: {data} is a link that leads elsewhere.")
        if self._process == 0:
            if data.exists():  # of a program that was killed here
                shutil.rmtree(data)
            pairs = zip(columns, folders)
            futures = (created(self._ts, c, f, self._compression) for c, f in pairs)
            what = f"{name}: the store {self._folder} was not begun"
            _wait(self._begun(futures), what)
        self._meet("begun")
        about = [column._asdict() for column in columns]
        self._journal.write({"sites": sites, "columns": about})
        self._catch_up()
        self._arrays = self._opened(name)

    def _grow(self, ends: Sequence[int]) -> None:
        """Makes room for rows, or takes back what a batch that failed had made."""
        if self._process == 0:
            futures = (
                array.resize(
                    exclusive_max=[end, *array.shape[1:]],
                    resize_metadata_only=True,
                )
                for array, end in zip(self._arrays, ends)
            )
            what = f"StoreWriter.append: a batch for {self._folder} was not kept"
            self._arrays = _wait(self._begun(futures), what)
        self._meet("grown")
        if self._process:
            self._arrays = self._opened("StoreWriter.append")


def _wait(futures: Sequence[Any], what: str) -> list[Any]:
    try:
        return [future.result() for future in futures]
    except (ValueError, OSError) as error:
        told = str(error).partition(" [tensorstore_spec=")[0]
        raise OSError(f"{what}: {told}. {AGAIN}") from error


def _fsync(folder: pathlib.Path) -> None:
    if sys.platform == "win32":  # where folders cannot be
        return
    for place in (folder, folder.parent):
        handle = os.open(place, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _refuse_place(folder: pathlib.Path, name: str) -> None:
    if not folder.exists():
        if not folder.parent.is_dir():
            raise FileNotFoundError(f"{name}: there is no folder {folder.parent}.")
        return
    if not folder.is_dir():
        raise FileExistsError(f"{name}: {folder} is a file; a store is a folder.")
    held = sorted(os.listdir(folder))
    if held and journal_file(folder, 0).name not in held:
        raise FileExistsError(
            f"{name}: {folder} is not a store, and not empty: it has {held[:5]}."
        )


def _as_json(metadata: Any, name: str) -> dict[str, Any]:
    told = {} if metadata is None else metadata
    try:
        if not isinstance(told, Mapping):
            raise TypeError(f"it is a {type(told).__name__}")
        text = json.dumps(dict(told), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name}: `metadata` is a mapping of what JSON has: {error}."
        ) from error
    return json.loads(text)


def _refuse_others(
    known: Contents, sites: list[Any], leaves: list[Leaf], name: str
) -> None:
    """Refuses a Record of other sites, shapes or types than those in the store."""
    tail = "Records of one kind belong in one store; begin another for these."
    if not isinstance(known.sites, list):
        raise WeightsError(
            f"{name}: the journal is broken: its sites are {known.sites!r:.60}."
        )
    for old, new in itertools.zip_longest(known.sites, sites):
        if _unlike(old, new):
            raise StructureError(
                f"{name}: the store has {_site_text(old)}, and the Record has "
                f"{_site_text(new)}{_unlike(old, new)}. {tail}"
            )
    for column, leaf in zip(known.columns, leaves):
        found = (leaf.value.dtype.name, column.axis, np.shape(leaf.value))
        has_axis = column.axis is None or column.axis < len(found[2])
        if (
            found[0] != column.dtype
            or not has_axis
            or column.row_shape(leaf.value) != column.shape
        ):
            wanted = list(map(str, column.shape))
            if column.axis is not None:
                wanted.insert(column.axis, "rows")
            raise StructureError(
                f"{name}: {leaf.text} is {found[0]}[{','.join(map(str, found[2]))}], "
                f"and the store has {column.dtype}[{','.join(wanted)}]. {tail}"
            )


def _site_text(about: Any) -> str:
    if about is None:
        return "nothing more"
    try:
        path = "/".join(map(str, about["path"]))
        text = f"{path}:{about['name']}#{about['index']}"
    except (KeyError, TypeError) as error:
        raise WeightsError(
            f"StoreWriter.append: the journal is broken: a site is {about!r:.60}."
        ) from error
    return text.removesuffix("#0").lstrip(":")


def _unlike(old: Any, new: Any) -> str:
    """In what two sites differ; the class of a Module may be another."""
    if old is None or new is None or _site_text(old) != _site_text(new):
        return " in its place"
    fields = {key: None for key in (*old, *new) if old.get(key) != new.get(key)}
    fields.pop("module", None)
    return f" with another {' and '.join(fields)}" if fields else ""
