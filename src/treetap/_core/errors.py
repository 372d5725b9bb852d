# SPDX-License-Identifier: Apache-2.0
"""Every exception the library raises on purpose.

    TreetapError
    ├── TraceContextError      an object was changed from another trace level
    ├── AttributeStatusError   data where something static belongs, or the reverse
    ├── AliasError             one object at two places where a tree was asked for
    │   └── CycleError         an object that contains itself
    ├── StructureError         names, kinds or shapes that do not fit
    ├── FilterError            a filter that leaves values over, or stands wrongly
    ├── MetadataError          metadata that cannot be set or removed
    ├── CaptureError           a value asked for that cannot be had, a wrong tap
    └── WeightsError           a file of weights is broken, or does not fit

All but the first are ValueErrors as well, so `except ValueError` keeps working.
Plain `TypeError`, `KeyError`, `IndexError` and
`AttributeError` are raised as such where Python itself would raise them.
"""

from collections.abc import Sequence


class TreetapError(Exception):
    """Base of the library's own exceptions."""


class TraceContextError(TreetapError):
    """An object made at one trace level was changed at another."""


class AttributeStatusError(TreetapError, ValueError):
    """A static attribute would hold data, or a status is contradicted."""


class AliasError(TreetapError, ValueError):
    """One object stands at two places where a tree was asked for.

    Attributes:
        name: The function that was asked for a tree.
        kind: The class of the object.
        paths: Where it stands, as people write paths.
    """

    def __init__(
        self, text: str, name: str = "", kind: str = "", paths: Sequence[str] = ()
    ):
        super().__init__(text, name, kind, tuple(paths))  # all of it is pickled
        self.name, self.kind, self.paths = name, kind, tuple(paths)

    def __str__(self) -> str:
        return self.args[0]


class CycleError(AliasError):
    """An object contains itself."""


class StructureError(TreetapError, ValueError):
    """Names, kinds, shapes or counts that do not fit the object."""


class FilterError(TreetapError, ValueError):
    """Filters that leave values over, or stand in the wrong order."""


class MetadataError(TreetapError, ValueError):
    """Metadata that cannot be set, changed or removed."""


class CaptureError(TreetapError, ValueError):
    """A value that was asked for cannot be had, or a tap is used wrongly."""


class WeightsError(TreetapError, ValueError):
    """A file of weights is broken, unsafe to read, or does not fit the model."""
