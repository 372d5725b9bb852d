# SPDX-License-Identifier: Apache-2.0
"""Scopes: what a context variable holds while a block runs.

A setting that is in force for a block, or a note of what is being done, is a
`ContextVar`: each thread and each task sees its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def scoped(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Gives a context variable a value while a block runs, and then its old one."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
