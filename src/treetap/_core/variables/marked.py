# SPDX-License-Identifier: Apache-2.0
"""Marked: what `data(x)` and `static(x)` return, on its way into an attribute.

Assigning it to an attribute stores the value inside; anywhere else it is a mistake, and
is refused by name.
"""

from typing import Any


class Marked:
    """A value together with the wish to be data, or static."""

    __slots__ = ("is_data", "value")

    def __init__(self, value: Any, is_data: bool):
        self.value = value
        self.is_data = is_data

    def __repr__(self) -> str:
        return f"{'data' if self.is_data else 'static'}({self.value!r})"
