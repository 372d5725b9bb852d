# SPDX-License-Identifier: Apache-2.0
"""BoundedCache: a mapping that keeps the entries used last, safe under threads.

Every cache of the library that could grow without end is one of these. The least
recently used entry goes first. A lock is held while entries move, never while a value
is made: two threads that miss the same key may both make a value, and then use the one
that was stored first.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """At most `size` entries, the ones used last.

    Args:
        size: How many entries to keep.
        dropped: Called with each value that had to go, after it has gone.

    Attributes:
        peek: As `get`, in the time of a look into a dict: it takes no lock, and the
            entry does not count as used.

    Examples:
        >>> from treetap._core.bounded_cache import BoundedCache
        >>> cache = BoundedCache(2)
        >>> for name in "abc":
        ...     _ = cache.add(name, name.upper())
        >>> cache.get("a"), cache.get("c")
        (None, 'C')
    """

    __slots__ = ("_dropped", "_entries", "_lock", "_size", "peek")

    def __init__(self, size: int, dropped: Callable[[V], object] | None = None):
        self._size = size
        self._dropped = dropped
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.RLock()
        self.peek: Callable[[K], V | None] = self._entries.get

    def get(self, key: K) -> V | None:
        """The value kept for a key, or None; it counts as used."""
        with self._lock:
            value = self._entries.get(key)
            if value is not None:
                self._entries.move_to_end(key)
            return value

    def add(self, key: K, value: V) -> V:
        """Keeps a value; gives the one that is kept, which may be another thread's."""
        with self._lock:
            kept = self._entries.setdefault(key, value)
            self._entries.move_to_end(key)
            is_over = len(self._entries) > self._size
            oldest = self._entries.popitem(last=False)[1] if is_over else value
        if is_over and self._dropped is not None:
            self._dropped(oldest)
        return kept

    def made(self, key: K, make: Callable[[], V]) -> V:
        """The value kept for a key, made now if there is none."""
        value = self.get(key)
        return self.add(key, make()) if value is None else value

    def discard(self, key: K) -> None:
        """Drops an entry, if it is there."""
        with self._lock:
            self._entries.pop(key, None)

    def clear(self) -> None:
        """Drops all entries."""
        with self._lock:
            self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[V]:
        """The values that are kept now, those used last at the end."""
        with self._lock:
            return iter([*self._entries.values()])
