# SPDX-License-Identifier: Apache-2.0
"""Writers: append the Records of many batches to a folder.

The numbers are written first, then one line of a journal, and what has no line does not
count. When `append` returns both are on the disk; with a buffer, when `flush` or
`close` does. So a program may be killed at any moment: every batch of which this was
told is on disk, complete, and those after it are there in their order or not at all.
"""

import contextlib
import itertools
import json
import operator
import os
import pathlib
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather, sync_global_devices

from treetap._capture.selectors import site_text
from treetap._core.errors import CaptureError, StructureError, WeightsError
from treetap._core.wording import typed
from treetap._io.files import require_path, to_disk
from treetap._io.record_descriptions import Leaf, described
from treetap._io.store.arrays import (
    column_for,
    created,
    opened_all,
    require_tensorstore,
    resized,
    written,
)
from treetap._io.store.axes import EXAMPLES, Axis, axes_of, axis_rules
from treetap._io.store.backlog import Backlog
from treetap._io.store.contents import (
    Column,
    journal_file,
    read_contents,
    row_shape,
)
from treetap._io.store.journals import AGAIN, Journal
from treetap._observe.records import Record, Site

APPEND = "StoreWriter.append"  # for messages
Told = Mapping[str, Any] | None


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
        buffer: How many bytes may be on their way to the disk when `append` returns, or
            0: none, so what was appended is on the disk. With more, a thread writes
            them, many batches at once; they are on the disk after `flush` or `close`,
            whose errors, and those of `append`, may be of earlier batches. With several
            processes `append` waits for the disk in any case.

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
        buffer: int = 0,
    ):
        name = "StoreWriter"
        self._folder = pathlib.Path(os.path.abspath(require_path(path, name)))
        require_tensorstore(name)
        self._axes = axis_rules(axis, name)
        if type(compression) is not int or not 0 <= compression <= 22:
            raise ValueError(
                f"{name}: `compression` is 0 to 22, and is {compression!r}."
            )
        if type(buffer) is not int or buffer < 0:
            raise ValueError(f"{name}: `buffer` is bytes from 0, and is {buffer!r}.")
        self._compression = compression
        self._pending: list[Any] = []  # futures of unfinished work of tensorstore
        self._is_first = jax.process_index() == 0
        if self._is_first:
            _refuse_place(self._folder, name)
            self._folder.mkdir(exist_ok=True)
        self._meet("folder")
        file = journal_file(self._folder, jax.process_index())
        self._journal = Journal(file, jax.process_count(), name)
        try:
            self._meet("journals")
            self._contents = read_contents(self._folder, name)
            self._meet("read")  # all have looked before one cuts
            self._journal.cut(self._contents.lines)
            self._arrays = opened_all(self._contents, self._folder, name)
            if sys.platform != "win32":  # where folders cannot be
                to_disk(self._folder)
                to_disk(self._folder.parent)
        except BaseException:
            self._journal.close()
            raise
        done, is_alone = len(self._contents.batches), jax.process_count() == 1
        made = Backlog(self._write, done, buffer) if buffer and is_alone else None
        self._backlog = made

    def _finish(self, futures: Iterable[Any]) -> list[Any]:
        """Waits for futures and returns their results.

        If work fails in one process, all raise. All futures are put into `_pending`
        before the first is waited for. If an interrupt comes or one of them fails, the
        others go on writing, to rows that the next batch is going to use. So the next
        `append` waits for them first, in `_settle`.
        """
        what = f"{APPEND}: a batch for {self._folder} was not kept"
        self._pending.extend(futures)
        found: list[Any] = []
        problem: OSError | None = None
        try:
            found = [future.result() for future in self._pending]
        except (ValueError, OSError) as error:
            told = str(error).partition(" [tensorstore_spec=")[0]
            problem = OSError(f"{what}: {told}. {AGAIN}")
            problem.__cause__ = error
        if jax.process_count() > 1:
            failed = process_allgather(np.asarray(problem is not None))
            if problem is None and failed.any():
                where = np.flatnonzero(failed).tolist()
                problem = OSError(f"{what}: writing failed in processes {where}.")
        if problem is not None:
            raise problem
        self._pending.clear()
        return found

    def _settle(self) -> None:
        """Waits for unfinished work of a batch that failed or was interrupted."""
        for future in self._pending:
            with contextlib.suppress(ValueError, OSError):  # was raised before
                future.result()
        self._pending.clear()

    def _meet(self, what: str) -> None:
        """Waits until all processes are here."""
        if jax.process_count() > 1:
            sync_global_devices(f"StoreWriter {what} {self._folder}")

    def __len__(self) -> int:
        backlog = self._backlog
        return len(self._contents.batches if backlog is None else backlog)

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def flush(self) -> None:
        """Waits until all that was appended is on the disk."""
        if self._backlog is not None:
            self._backlog.flush()

    def close(self) -> None:
        """Waits until all that was appended is on the disk; lets go of the folder."""
        if not self._journal.is_open:
            return
        try:
            self.flush()
        finally:
            self._settle()
            self._catch_up()
            if self._is_first:  # arrays have room for more; if it stays, no harm
                self._pending.extend(map(resized, self._arrays, self._contents.ends))
                self._settle()
            self._journal.close()

    def append(
        self, record: Record, metadata: Told = None, *, labels: Any = None
    ) -> int:
        """Appends a batch; without a buffer it is on the disk when this returns.

        Args:
            record: What `observe` gave; of the sites, shapes and types of the others.
            metadata: What else is to be known of the batch; as JSON.
            labels: Arrays to keep beside the Record's values, as one more site
                `labels`: the tokens, say, or the classes, of which each row has one.

        Returns:
            The number of the batch.
        """
        if not self._journal.is_open:
            raise ValueError(f"{APPEND}: the writer is closed.")
        told = _as_json(metadata)
        if labels is not None and isinstance(record, Record):
            record = Record((*record, Site(labels, name="labels")))
        sites, leaves = described(record, APPEND)
        contents = self._contents
        if not contents.columns:
            self._settle()
            self._catch_up()  # if an interrupt came in between
        if not contents.columns:
            self._begin(record, sites, leaves)
        _refuse_other_sites(contents.sites, sites)
        values = [leaf.value for leaf in leaves]
        for column, leaf in zip(contents.columns, leaves):
            _refuse_other_rows(column, leaf)
            if isinstance(leaf.value, jax.Array):
                leaf.value.copy_to_host_async()
        if self._backlog is None:
            self._write([(values, told)])
            return len(self) - 1
        # The program may change its arrays before the thread comes to them.
        values = [x if isinstance(x, jax.Array) else np.array(x) for x in values]
        return self._backlog.put((values, told), sum(x.nbytes for x in values))

    def _write(self, batches: list[tuple[list[Any], dict[str, Any]]]) -> None:
        """Writes batches, each its values and what was told of it."""
        self._settle()
        self._catch_up()  # if an interrupt came in between
        columns, starts = self._contents.columns, self._contents.ends
        counts = [[*map(Column.rows_of, columns, values)] for values, _ in batches]
        self._grow([start + sum(rows) for start, *rows in zip(starts, *counts)])
        parts = zip(*(values for values, _ in batches))  # by column
        futures = map(written, self._arrays, columns, parts, starts)
        self._finish(itertools.chain.from_iterable(futures))
        lines = zip(counts, batches)
        self._journal.write([{"rows": n, "metadata": b[1]} for n, b in lines])
        self._meet("told")
        self._catch_up()

    def _catch_up(self) -> None:
        """Reads the lines of the journal that are not in the contents yet."""
        self._contents.take(self._journal.entries_after(self._contents.lines))

    def _begin(self, record: Record, sites: list[Any], leaves: list[Leaf]) -> None:
        """Makes the arrays that the first Record needs."""
        if not leaves:
            raise CaptureError(f"{APPEND}: the Record has no values.")
        axes = axes_of(self._axes, record, leaves, APPEND)
        is_joined = itertools.repeat(self._backlog is not None)
        columns = [*map(column_for, leaves, axes, is_joined)]
        data = self._folder / "data"
        if data.is_symlink():
            raise WeightsError(f"{APPEND}: {data} is a link that leads elsewhere.")
        if self._is_first and data.exists():  # of a program that was killed here
            shutil.rmtree(data)
        folders = (each.folder(self._folder, n) for n, each in enumerate(columns))
        futures = map(created, columns, folders, itertools.repeat(self._compression))
        self._finish(futures if self._is_first else ())
        about = [column._asdict() for column in columns]
        self._journal.write([{"sites": sites, "columns": about}])
        self._catch_up()
        self._arrays = opened_all(self._contents, self._folder, APPEND)

    def _grow(self, ends: Sequence[int]) -> None:
        """Makes room for so many rows, and as many again; `close` takes back the rest.

        With several processes the first decides, and the others look what it did.
        """
        sizes = [array.shape[0] for array in self._arrays]
        if jax.process_count() == 1 and all(map(operator.ge, sizes, ends)):
            return
        rooms = [n if n >= end else max(end, 2 * n) for n, end in zip(sizes, ends)]
        futures = map(resized, self._arrays, rooms) if self._is_first else ()
        self._arrays = self._finish(futures)
        if not self._is_first:
            self._arrays = opened_all(self._contents, self._folder, APPEND)


def _refuse_place(folder: pathlib.Path, name: str) -> None:
    """Refuses a folder that is not a store, before anything is put into it."""
    if not folder.parent.is_dir():
        raise FileNotFoundError(f"{name}: there is no folder {folder.parent}.")
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{name}: {folder} is a file; a store is a folder.")
    held = sorted(os.listdir(folder)) if folder.exists() else []
    if held and journal_file(folder, 0).name not in held:
        raise FileExistsError(
            f"{name}: {folder} is not a store, and not empty: it has {held[:5]}."
        )


def _as_json(metadata: Any) -> dict[str, Any]:
    told = {} if metadata is None else metadata
    try:
        if not isinstance(told, Mapping):
            raise TypeError(f"it is a {type(told).__name__}")
        return json.loads(json.dumps(dict(told), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{APPEND}: `metadata` is a mapping of what JSON has: {error}."
        ) from error


_OTHER = "Records of one kind belong in one store; begin another for these."


def _refuse_other_sites(known: list[Any], sites: list[Any]) -> None:
    """Refuses a Record of other sites than those in the store."""
    for old, new in itertools.zip_longest(known, sites):
        if difference := _difference(old, new):
            raise StructureError(
                f"{APPEND}: the store has {_text_of(old)}, and the Record has "
                f"{_text_of(new)}{difference}. {_OTHER}"
            )


def _difference(old: Any, new: Any) -> str:
    """The fields in which two sites differ; the class of the Module does not count."""
    if _text_of(old) != _text_of(new):
        return " in its place"
    fields = {key: None for key in (*old, *new) if old.get(key) != new.get(key)}
    fields.pop("module", None)
    return f" with another {' and '.join(fields)}" if fields else ""


def _text_of(about: Any) -> str:
    if about is None:
        return "nothing more"
    return site_text(about["path"], about["name"], about["index"])


def _refuse_other_rows(column: Column, leaf: Leaf) -> None:
    """Refuses a value of another type, or with rows of another shape."""
    shape, axis = np.shape(leaf.value), column.axis
    is_same = leaf.value.dtype.name == column.dtype
    is_same &= axis is None or axis < len(shape)
    if not is_same or row_shape(shape, axis) != column.shape:
        wanted = list(map(str, column.shape))
        if axis is not None:
            wanted.insert(axis, "rows")
        raise StructureError(
            f"{APPEND}: {leaf.text} is {typed(leaf.value)}, and the store has "
            f"{column.dtype}[{','.join(wanted)}]. {_OTHER}"
        )
