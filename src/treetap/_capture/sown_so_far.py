# SPDX-License-Identifier: Apache-2.0
"""What Modules have sown so far, while a capture is open: `module.__captures__`.

A capture notes what `sow` and `perturb` are called with, by the Module that calls
them, and what methods return, if it takes their outputs.
Nothing is kept on the Module: the notes are the capture's and end with it, and those of
a Module that JAX rebuilt inside a traced function end with that Module. So no traced
value outlives its trace. For the same reason nothing is noted of a Module that belongs
to another trace than the present one. What was noted is put together when it is read.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp

from treetap._capture.listening import append
from treetap._core.scopes import scoped
from treetap._core.trace_level import is_foreign
from treetap._core.variables.metadata import PLAIN
from treetap._core.variables.variable import make

# By the name of a value: how it is put together, and what it was called with.
Names = dict[str, tuple[Any, list[Any]]]


class Notes:
    """What one capture has noted.

    Args:
        kinds: The kinds of Variable that it collects.
        outputs: The kind that it takes the outputs of methods as, if it does.
    """

    def __init__(self, kinds: Sequence[type], outputs: type | None):
        self.kinds = kinds
        self.outputs = outputs
        self._held: dict[int, tuple[weakref.ref[Any], dict[Any, Names]]] = {}

    def add(self, module: Any, kind: Any, name: str, how: Any, value: Any) -> None:
        """Notes a value, if it is of a kind that is collected."""
        if kind in self.kinds and not is_foreign(module._pytree__trace):
            self.of(module)[kind].setdefault(name, (how, []))[1].append(value)

    def forget(self) -> None:
        """Lets go of what was noted, which refers back to the notes."""
        self._held.clear()

    def of(self, module: Any) -> dict[Any, Names]:
        """What was noted of a Module, by kind."""
        key = id(module)
        if key not in self._held:
            known = weakref.ref(module, lambda _: self._held.pop(key, None))
            self._held[key] = known, {kind: {} for kind in self.kinds}
        return self._held[key][1]


_open: ContextVar[tuple[Notes, ...]] = ContextVar("sown_so_far", default=())


@contextmanager
def taking_notes(kinds: Sequence[type], outputs: type | None) -> Iterator[None]:
    """Notes what is sown and returned in a block; the arguments are as for `Notes`."""
    notes = Notes(kinds, outputs)
    try:
        with scoped(_open, (*_open.get(), notes)):
            yield
    finally:
        notes.forget()


def note(module: Any, kind: type, name: str, how: Any, value: Any) -> None:
    """Notes a value.

    Args:
        module: Who sows or perturbs it.
        kind: The kind of Variable.
        name: What it is called.
        how: How `sow` collects values, with what to begin; None for `perturb`.
        value: What is sown; for `perturb` the value before and after.
    """
    for notes in _open.get():
        notes.add(module, kind, name, how, value)


def note_output(module: Any, name: str, value: Any) -> None:
    """Notes what a method returned."""
    for notes in _open.get():
        notes.add(module, notes.outputs, name, (append, tuple), value)


def sown_so_far(module: Any) -> tuple[Any, ...]:
    """One Variable for each kind that the innermost capture collects."""
    if not _open.get():
        raise AttributeError("__captures__")
    found = _open.get()[-1].of(module)
    return tuple(
        make(kind, {name: _together(*noted) for name, noted in names.items()}, PLAIN)
        for kind, names in found.items()
    )


def _together(how: Any, values: list[Any]) -> Any:
    if how is None:
        before, after = values[0]
        return jax.tree.map(jnp.subtract, after, before)
    reduce_fn, init_fn = how
    total = init_fn()
    for value in values:
        total = reduce_fn(total, value)
    return total
