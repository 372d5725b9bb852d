# SPDX-License-Identifier: Apache-2.0
"""Settings with three scopes: a `with` block, the process, the default.

Calling a setting changes it for the whole process from now on. Used in a `with`
statement, or as a decorator, the change holds for that block or call only, and only in
the context (thread, task) that runs it:

    set_graph_mode(True)            # from now on, everywhere
    with set_graph_mode(True): ...  # here
    @set_graph_mode(True)           # while the function runs
    def f(): ...

`nnx_graph_mode`, `nnx_graph_updates` and `nnx_sow_capture_noop` may be preset in the
environment.
"""

import os
from collections.abc import Callable
from contextlib import ContextDecorator
from contextvars import ContextVar
from enum import IntEnum
from typing import Any, ClassVar, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_FLAGS = {
    **dict.fromkeys(("y", "yes", "t", "true", "on", "1"), True),
    **dict.fromkeys(("n", "no", "f", "false", "off", "0"), False),
}


def read_flag(variable: str) -> bool | None:
    """Reads a boolean from the environment; None when it is not set."""
    text = os.environ.get(variable)
    if text is not None and text.lower() not in _FLAGS:
        raise ValueError(
            f"The environment variable {variable} is {text!r}. "
            f"Use one of {', '.join(_FLAGS)}."
        )
    return None if text is None else _FLAGS[text.lower()]


_KEPT = 64  # process-wide values remembered, should the latest be taken back


class Setting(ContextDecorator):
    """One on/off setting; see the module's text. Subclasses name the setting."""

    default: ClassVar[bool]
    # Process-wide values, the latest last. One that turns out to belong to a block or a
    # decorator is taken out again, whatever was set in between.
    _process: ClassVar[list["Setting"]]
    _local: ClassVar[ContextVar[tuple[bool, ...]]]  # of the blocks around, inmost last

    def __init_subclass__(cls, *, key: str, default: bool = False, variable: str = ""):
        cls.default = default
        if not hasattr(cls, "_local"):  # a variant shares its parent's scopes
            cls._local = ContextVar(key, default=())
            cls._process = []
            if variable and (preset := read_flag(variable)) is not None:
                cls(preset)

    def __init__(self, value: bool):
        if not isinstance(value, bool):
            raise TypeError(
                f"{type(self).__name__}: expected True or False, got {value!r}."
            )
        self._value = value
        self._process.append(self)
        del self._process[:-_KEPT]

    @classmethod
    def current_value(cls) -> bool:
        """The value in force: the innermost block's, the process's, or the default."""
        value = cls.value_that_is_set()
        return cls.default if value is None else value

    @classmethod
    def value_that_is_set(cls) -> bool | None:
        """The value of the innermost block or the process; None where none is set."""
        blocks = cls._local.get()
        if blocks:
            return blocks[-1]
        return cls._process[-1]._value if cls._process else None

    def _take_back(self) -> None:
        """Undoes the process-wide change that calling the setting made."""
        self._process[:] = [entry for entry in self._process if entry is not self]

    def __enter__(self) -> None:
        self._take_back()
        self._local.set((*self._local.get(), self._value))

    def __exit__(self, *exception: object) -> None:
        self._local.set(self._local.get()[:-1])

    def __call__(self, fn: F) -> F:
        """Decorates `fn` so that the setting holds while it runs."""
        self._take_back()
        return super().__call__(fn)


class set_graph_mode(Setting, key="nnx_graph_mode", variable="NNX_GRAPH_MODE"):
    """Sets whether functions keep shared references (graph mode) or refuse them.

    Examples:
        >>> import treetap as tt
        >>> with tt.set_graph_mode(True):
        ...     tt.set_graph_mode.current_value()
        True
        >>> tt.set_graph_mode.current_value()
        False
    """


class set_graph_updates(Setting, key="nnx_graph_updates", variable="NNX_GRAPH_UPDATES"):
    """Sets whether transforms carry changes of structure out to the caller."""


class sow_capture_noop(
    Setting, key="nnx_sow_capture_noop", variable="NNX_SOW_CAPTURE_NOOP"
):
    """Sets whether `sow` and `perturb` do nothing while no capture is open."""


class use_eager_sharding(Setting, key="eager_sharding", default=True):
    """Sets whether Variables with `out_sharding` are placed when they are made."""


def using_eager_sharding() -> bool:
    """Whether Variables with `out_sharding` are placed when they are made."""
    return use_eager_sharding.current_value()


class Mode(IntEnum):
    """How a transform sees its arguments; true when shared references are kept."""

    TREE = 0
    GRAPH = 1
    UPDATES = 2  # changes of structure are carried out to the caller, too


def resolve_graph(graph: bool | None) -> bool:
    """The mode for a call: its argument, else the setting."""
    return set_graph_mode.current_value() if graph is None else graph


def resolve_mode(graph: bool | None, graph_updates: bool | None) -> Mode:
    """The mode of a transform: by its arguments, else by the settings."""
    if not resolve_graph(graph):
        return Mode.TREE
    if graph_updates is None:
        graph_updates = set_graph_updates.current_value()
    return Mode.UPDATES if graph_updates else Mode.GRAPH
