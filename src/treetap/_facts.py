# SPDX-License-Identifier: Apache-2.0
"""Facts: what a Variable is beside its value, in one object that many can share.

A model has thousands of Variables and few different metadata, so a Variable refers to
its Facts instead of holding them, and stays small.
"""

from typing import Any

from treetap._metadata import PLAIN
from treetap._traces import EAGER


class Facts:
    """What a Variable is, beside its value: metadata and trace level; never changed.

    Variables of one level with the same metadata share their Facts.
    """

    __slots__ = ("metadata", "trace")

    def __init__(self, metadata: dict[str, Any], trace: Any):
        self.metadata = metadata
        self.trace = trace


_EAGER_FACTS = Facts(PLAIN, EAGER)
_latest_facts = _EAGER_FACTS


def facts_of(metadata: dict[str, Any], trace: Any) -> Facts:
    """Facts for these metadata at this level; one of the two ready ones if it fits."""
    global _latest_facts  # noqa: PLW0603 - a cache of one; a race only misses it
    if metadata is PLAIN and trace is EAGER:
        return _EAGER_FACTS
    latest = _latest_facts
    if latest.metadata is metadata and latest.trace is trace:
        return latest
    made = _latest_facts = Facts(metadata, trace)
    return made
