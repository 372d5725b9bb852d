# SPDX-License-Identifier: Apache-2.0
"""ids: numbers that no other object has, for telling objects apart."""

import itertools

_numbers = itertools.count(1)


class UUID:
    """A number that was given out once.

    Args:
        rawid: The number.
    """

    def __init__(self, rawid: int):
        self.id = rawid

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UUID) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"UUID({self.id})"


class UUIDManager:
    """Gives out a new number at each call."""

    def __call__(self) -> UUID:
        """A number that was not given out before."""
        return UUID(next(_numbers))


uuid = UUIDManager()
