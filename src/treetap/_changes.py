# SPDX-License-Identifier: Apache-2.0
"""Changes of structure inside a transform, which would otherwise be lost silently.

A transform carries out the values of Variables and nothing else. A data attribute that
is created, removed or replaced on an argument is therefore an error, found when the
function is traced. A changed static attribute stays local to the call; it draws a
warning, unless `train`, `eval` or `set_attributes` made it.
"""

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from operator import is_
from typing import Any, Literal

from treetap._attributes import Node
from treetap._errors import StructureError
from treetap._metadata import MISSING
from treetap._pytrees import attributes_of, flat_of
from treetap._sharing import places
from treetap._traces import set_on_purpose
from treetap._trees import Path, show_path

Policy = Literal["error", "warn", "ignore"]

_policy: ContextVar[Policy | None] = ContextVar("on_structure_change", default=None)
_process: list[Policy] = ["error"]


def set_structure_policy(policy: Policy) -> None:
    """Sets, for the whole process, what a change of structure in a transform does.

    Args:
        policy: `"error"` refuses changed data attributes and warns of static ones,
            `"warn"` warns of both, `"ignore"` says nothing.
    """
    _check_policy(policy)
    _process[0] = policy


def _check_policy(policy: Any) -> None:
    if policy not in ("error", "warn", "ignore"):
        raise ValueError(
            "A policy for changes of structure is 'error', 'warn' or 'ignore', not "
            f"{policy!r}."
        )


@contextmanager
def structure_policy(policy: Policy) -> Iterator[None]:
    """As `set_structure_policy`, while a block runs."""
    _check_policy(policy)
    token = _policy.set(policy)
    try:
        yield
    finally:
        _policy.reset(token)


def with_policy(fn: Any, policy: Policy | None) -> Any:
    """`fn` with a policy of its own, or `fn` itself."""
    if policy is None:
        return fn
    _check_policy(policy)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    setattr(call, _ATTRIBUTE, policy)
    return call


def policy_of(fn: Any) -> Policy | None:
    """The policy a function has of its own."""
    return getattr(fn, _ATTRIBUTE, None)


_ATTRIBUTE = "__on_structure_change__"


class Structure:
    """Watches the objects in the arguments of a function while it runs.

    Args:
        tree: The arguments.
        name: The transform, for messages.
        policy: What to do; as set for the block or the process by default.
    """

    __slots__ = ("name", "nodes", "noted", "policy", "token")

    def __init__(self, tree: Any, name: str, policy: Policy | None = None):
        self.name = name
        self.policy: Policy = policy or _policy.get() or _process[0]
        self.nodes: list[tuple[Path, Any, dict[Any, Any], frozenset[Any]]] = []
        seen: set[int] = set()
        for path, value, _ in places(tree):
            if isinstance(value, Node) and id(value) not in seen:
                seen.add(id(value))
                keys = frozenset(flat_of(value)[1][0].keys)
                self.nodes.append((path, value, dict(attributes_of(value)), keys))

    def __enter__(self) -> None:
        self.noted: set[tuple[int, Any]] = set()
        self.token = set_on_purpose.set(self.noted)

    def __exit__(self, kind: Any, *exception: object) -> None:
        set_on_purpose.reset(self.token)
        if kind is not None or self.policy == "ignore":
            return
        for path, node, before, data in self.nodes:
            self._compare(path, node, before, data)

    def _compare(self, path: Path, node: Any, before: Any, data: Any) -> None:
        """Reports what became of the attributes of one object."""
        after = attributes_of(node)
        if before.keys() == after.keys() and all(
            map(is_, before.values(), after.values())
        ):
            return
        data = data | frozenset(flat_of(node)[1][0].keys)
        for key in sorted({*before, *after}, key=str):
            old, new = before.get(key, MISSING), after.get(key, MISSING)
            where = show_path((*path, key))
            if old is new or (id(node), key) in self.noted:
                continue
            if key in data:
                what = "was replaced" if new is not MISSING else "was removed"
                self._refuse(where, "was created" if old is MISSING else what)
            elif old != new:
                self._warn(f"the static attribute {where} changed")

    def _refuse(self, where: str, what: str) -> None:
        text = (
            f"{self.name}: the data attribute {where} {what} inside the function, and "
            "would be lost: only the values of Variables come out of a transform. "
            "Change a Variable in place (`v[...] = x`), or return the new value."
        )
        if self.policy == "error":
            raise StructureError(text)
        warnings.warn(text, UserWarning, stacklevel=2)

    def _warn(self, what: str) -> None:
        warnings.warn(
            f"{self.name}: {what} inside the function; the change stays inside.",
            UserWarning,
            stacklevel=2,
        )
