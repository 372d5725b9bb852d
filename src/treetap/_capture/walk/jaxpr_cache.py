# SPDX-License-Identifier: Apache-2.0
"""JaxprCache: what was made of a jaxpr, kept for as long as the jaxpr lives.

JAX caches the jaxprs it makes, and lets go of them when it will; what is known of one
is of no use after that. So everything that is found out of a jaxpr, or made from it, is
kept in one of these, and none of them needs a bound of its own. A value may not hold
the jaxpr it is kept for: it would keep it alive, and itself.
"""

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


class JaxprCache(Generic[T]):
    """Values by jaxpr, and by a key for the rest of what they depend on."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: WeakKeyDictionary[Any, dict[Hashable, T]] = WeakKeyDictionary()

    def get(self, jaxpr: Any, key: Hashable, make: Callable[[], T]) -> T:
        """The value for a jaxpr and a key, made if it is not there."""
        kept = self._held.setdefault(jaxpr, {})
        if key not in kept:
            kept.setdefault(key, make())
        return kept[key]
