# SPDX-License-Identifier: Apache-2.0
"""Changes of structure inside a transform, which would otherwise be lost silently.

A transform without graph updates carries out the values of Variables and nothing else.
A data attribute that is created, removed or replaced on an argument is therefore an
error, found when the function is traced. So is a change in a list or dict that a data
attribute holds. A changed static attribute stays local to the call; it draws a warning,
unless `train`, `eval` or `set_attributes` made it.

**The idea.** An object drops the cached tuple of its children when an attribute is
changed. So the tuples are taken when the function starts, and when it returns only
those objects are looked at whose tuple is another one: tracing pays one comparison by
identity for each object. What an object was like before is read off its old tuple; an
object that has no cache has its attributes copied instead.

Lists and dicts drop nothing. So what is in those that stand among the children is kept
and compared, item by item.

**Why it is sound.** Nothing sets an attribute of a Module without dropping the tuple. A
Variable that changes is no change of structure: it is the same child before and after.
"""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from operator import is_not
from typing import Any, Literal

import jax
from jax.tree_util import all_leaves

from treetap._core.errors import StructureError
from treetap._core.paths import Path, show_path
from treetap._core.scopes import scoped
from treetap._core.trace_level import set_on_purpose
from treetap._core.trees.attributes import is_object
from treetap._core.trees.graphdef import GraphDef, objects_in
from treetap._core.trees.pytree import attributes_of, flat_of
from treetap._core.variables.metadata import MISSING

Policy = Literal["error", "warn", "ignore"]

_policy: ContextVar[Policy | None] = ContextVar("on_structure_change", default=None)
_process: list[Policy | None] = [None]

# What a namespace asks for that says nothing unless somebody has set a policy.
IGNORE_UNLESS_SET: Any = "ignore unless set"


def set_structure_policy(policy: Policy | None) -> None:
    """Sets, for the whole process, what a change of structure in a transform does.

    Args:
        policy: `"error"` refuses changed data attributes and warns of static ones,
            `"warn"` warns of both, `"ignore"` says nothing. None, as at first: an
            error, and in `treetap.nnx` nothing, as in NNX.
    """
    if policy is not None:
        check_policy(policy)
    _process[0] = policy


def check_policy(policy: Any) -> None:
    """Refuses what is no policy."""
    if policy not in ("error", "warn", "ignore", IGNORE_UNLESS_SET):
        raise ValueError(
            "A policy for changes of structure is 'error', 'warn' or 'ignore', not "
            f"{policy!r}."
        )


@contextmanager
def structure_policy(policy: Policy) -> Iterator[None]:
    """As `set_structure_policy`, while a block runs."""
    check_policy(policy)
    with scoped(_policy, policy):
        yield


def policy_for(policy: Policy | None) -> Policy:
    """The policy that holds now for a transform that asks for this one."""
    if policy is not None and policy != IGNORE_UNLESS_SET:
        return policy
    unset: Policy = "error" if policy is None else "ignore"
    return _policy.get() or _process[0] or unset


class StructureWatch:
    """Watches the objects in the arguments of a function while it runs.

    Args:
        nodes: The objects, in the order of their description.
        definition: The description of the arguments.
        name: The transform, for messages.
        policy: What to do; None for what is set for the block or the process.
    """

    def __init__(
        self, nodes: list[Any], definition: GraphDef, name: str, policy: Policy | None
    ):
        self.name = name
        self.policy = policy_for(policy)
        self.definition = definition
        self.nodes = [] if self.policy == "ignore" else nodes
        self.flats = list(map(flat_of, self.nodes))
        self.carried: set[int] = set()  # whose data are carried: objects, by identity
        # An object drops its children when it is changed; of one that does not, the
        # attributes are kept.
        self.kept = {
            number: dict(attributes_of(node))
            for number, node in enumerate(self.nodes)
            if not (node._pytree__cached and node._pytree__is_pytree)
        }
        # By the number of an object: the lists and dicts in its data attributes, each
        # with what is in it.
        self.contents = {
            number: found
            for number, (children, (layout, *_)) in enumerate(self.flats)
            if (found := list(_contents(layout.keys, children)))
        }

    def __enter__(self) -> None:
        self.noted: set[tuple[int, Any]] = set()
        self.token = set_on_purpose.set(self.noted)

    def __exit__(self, kind: Any, *exception: object) -> None:
        set_on_purpose.reset(self.token)
        if kind is not None:
            return
        pairs = enumerate(zip(self.nodes, self.flats))
        touched = {n for n, (node, flat) in pairs if flat_of(node) is not flat}
        if not touched and not self.contents:
            return
        for number, (path, _) in enumerate(objects_in(self.definition.spec)):
            if number in touched:
                self._compare(path, number)
            for key, child, leaves, structure in self.contents.get(number, ()):
                found, after = jax.tree.flatten(child, is_leaf=is_object)
                new = [pair for pair in zip(leaves, found) if is_not(*pair)]
                is_lost = new and not self._are_carried(number, *new)
                if structure != after or is_lost:
                    self._refuse(show_path((*path, key)), "was changed in place")

    def _are_carried(self, number: int, *pairs: tuple[Any, Any]) -> bool:
        """Whether a loop hands on what came in place of something: plain arrays."""
        parts = jax.tree.leaves(pairs, is_leaf=is_object)
        is_plain = not any(is_object(x) or x is MISSING for x in parts)
        return id(self.nodes[number]) in self.carried and is_plain

    def _compare(self, path: Path, number: int) -> None:
        """Reports what became of the attributes of one object."""
        node = self.nodes[number]
        children, (layout, statics, _) = self.flats[number]
        before = dict(zip(layout.keys, children))
        before.update(zip(layout.static_names, statics))
        before = self.kept.get(number, before)
        after = attributes_of(node)
        data = {*layout.keys, *flat_of(node)[1][0].keys}
        for key in sorted({*before, *after}, key=str):
            old, new = before.get(key, MISSING), after.get(key, MISSING)
            where = show_path((*path, key))
            if old is new or (id(node), key) in self.noted:
                continue
            if key in data:
                if self._are_carried(number, (old, new)):
                    continue
                what = "was replaced" if new is not MISSING else "was removed"
                self._refuse(where, "was created" if old is MISSING else what)
            elif old != new:
                text = f"{self.name}: the static attribute {where} changed inside the "
                text += "function; the change stays inside."
                warnings.warn(text, UserWarning, stacklevel=3)

    def _refuse(self, where: str, what: str) -> None:
        text = (
            f"{self.name}: the data attribute {where} {what} inside the function, and "
            "would be lost: only the values of Variables come out of a transform. "
            "Change a Variable in place (`v[...] = x`), or return the new value."
        )
        if self.policy != "warn":
            raise StructureError(text)
        warnings.warn(text, UserWarning, stacklevel=2)


def _contents(
    keys: Iterable[Any], children: Iterable[Any]
) -> Iterator[tuple[Any, Any, list[Any], Any]]:
    """The children that are lists and the like: key, child, leaves, structure."""
    for key, child in zip(keys, children):
        if not is_object(child) and not all_leaves((child,)):
            yield key, child, *jax.tree.flatten(child, is_leaf=is_object)
