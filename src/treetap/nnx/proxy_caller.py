# SPDX-License-Identifier: Apache-2.0
"""proxy_caller: writing down a path of attributes and items, to be followed later."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

A_co = TypeVar("A_co", covariant=True)


@dataclass(frozen=True)
class GetItem:
    """One step of a path: an item."""

    key: Any


@dataclass(frozen=True)
class GetAttr:
    """One step of a path: an attribute."""

    name: str


@dataclass(frozen=True)
class DelayedAccessor:
    """A path; called with an object, it gives what stands there."""

    actions: tuple[GetItem | GetAttr, ...] = ()

    def __call__(self, x: Any) -> Any:
        """What stands at the path in an object."""
        for action in self.actions:
            is_name = isinstance(action, GetAttr)
            x = getattr(x, action.name) if is_name else x[action.key]
        return x

    def __getattr__(self, name: str) -> "DelayedAccessor":
        if name[:2] == "__":
            raise AttributeError(name)
        return DelayedAccessor((*self.actions, GetAttr(name)))

    def __getitem__(self, key: Any) -> "DelayedAccessor":
        return DelayedAccessor((*self.actions, GetItem(key)))


class ApplyCaller(Protocol, Generic[A_co]):
    """What has every attribute and item, and gives `(result, A)` when called."""

    def __getattr__(self, name: str) -> "ApplyCaller[A_co]": ...

    def __getitem__(self, key: Any) -> "ApplyCaller[A_co]": ...

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, A_co]:
        """The result of the call, and what became of the object."""
        ...


class CallableProxy:
    """A function of a path and arguments, called at the end of a path.

    Args:
        callable: The function.
        accessor: The path so far.
    """

    def __init__(
        self, callable: Callable[..., Any], accessor: DelayedAccessor | None = None
    ):
        self._callable = callable
        self._accessor = accessor or DelayedAccessor()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function with the path."""
        return self._callable(self._accessor, *args, **kwargs)

    def __getattr__(self, name: str) -> "CallableProxy":
        if name[:2] == "__":
            raise AttributeError(name)
        return CallableProxy(self._callable, getattr(self._accessor, name))

    def __getitem__(self, key: Any) -> "CallableProxy":
        return CallableProxy(self._callable, self._accessor[key])
