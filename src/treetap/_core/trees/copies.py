# SPDX-License-Identifier: Apache-2.0
"""Copies: new objects of the same structure around old, new or mapped leaves.

`Rebuild` is the one walk behind `clone`, `view` and their kin: every object and
container is made anew, Variables and other leaves go through two functions. What is
shared stays shared in graph mode; in tree mode it is refused.
"""

from collections.abc import Callable
from typing import Any

import jax

from treetap._core.errors import StructureError
from treetap._core.paths import is_container, open_container
from treetap._core.settings import resolve_graph
from treetap._core.trace_level import current_trace
from treetap._core.trees.attributes import Node
from treetap._core.trees.pytree import adopt_all, bare, fill, flat_of
from treetap._core.trees.sharing import refuse_pytree_false, refuse_shared
from treetap._core.variables.values import is_ref
from treetap._core.variables.variable import Variable, array_types, twin


def _same(value: Any) -> Any:
    return value


class Rebuild:
    """One rebuilding of a tree or graph of objects.

    Args:
        root: What is rebuilt.
        graph: Whether shared objects are kept as such, or refused.
        name: The public function at work, for messages.
        variable: Makes the new Variable from the old one.
        leaf: Makes the new leaf from any other.
    """

    def __init__(
        self,
        root: Any,
        graph: bool,
        name: str,
        *,
        variable: Callable[[Variable[Any]], Any] = _same,
        leaf: Callable[[Any], Any] = _same,
    ):
        self.root = root
        self.graph = graph
        self.name = name
        self.variable = variable
        self.leaf = leaf
        self.trace = current_trace()
        self.made: dict[int, Any] = {}
        self.leaves = 0

    def run(self) -> Any:
        """The rebuilt root."""
        return self.any(self.root)

    def any(self, value: Any) -> Any:
        """The rebuilt form of any value."""
        if isinstance(value, Node):
            return self.object(value)
        if isinstance(value, Variable):
            return self.variable_at(value)
        if is_container(value):
            opened = open_container(value)
            return opened.close([self.any(child) for child in opened.children])
        self.leaves += 1
        if not is_ref(value):
            return self.leaf(value)
        if id(value) in self.made:
            return self.again(value)
        made = self.made[id(value)] = self.leaf(value)
        return made

    def variable_at(self, variable: Variable[Any]) -> Any:
        """The new form of a Variable."""
        identity = id(variable)
        if identity in self.made:
            return self.again(variable)
        self.leaves += 1
        made = self.made[identity] = self.variable(variable)
        return made

    def object(self, node: Any) -> Any:
        """The rebuilt form of an object of ours."""
        identity = id(node)
        if identity in self.made:
            return self.again(node)
        if not (self.graph or node._pytree__is_pytree):
            raise refuse_pytree_false(self.name, self.root, node)
        made = self.made[identity] = bare(type(node), self.trace)
        before = self.leaves
        children, structure = flat_of(node)
        new, done, variable = [], self.made, self.variable
        for child in children:
            if not isinstance(child, Variable):
                new.append(self.any(child))
            elif id(child) in done:
                new.append(self.again(child))
            else:  # as `variable_at`, which would be a call for each
                self.leaves += 1
                copied = done[id(child)] = variable(child)
                new.append(copied)
        fill(made, structure, new)
        adopt_all(made, structure, new)
        if self.leaves == before and not self.graph:
            self.made[identity] = _Leafless(made)
        return made

    def again(self, value: Any) -> Any:
        """What stands for something met before; refused in tree mode."""
        made = self.made[id(value)]
        if type(made) is _Leafless:  # a copy could not be told from the original
            return made.node
        if not self.graph:
            raise refuse_shared(self.name, self.root, value)
        return made


class _Leafless:
    """Marks a rebuilt object without leaves, which may be shared in tree mode too."""

    __slots__ = ("node",)

    def __init__(self, node: Any):
        self.node = node


def clone(
    node: Any,
    variables: bool = True,
    *,
    arrays: bool = False,
    graph: bool | None = None,
) -> Any:
    """Returns a copy of `node` with Variables of its own.

    Args:
        node: Any tree of Modules, Variables and arrays.
        variables: Make new Variables; otherwise the copy shares them.
        arrays: Copy the arrays as well.
        graph: Keep shared references instead of refusing them.

    Examples:
        >>> import treetap as tt
        >>> a = tt.Param(1.0)
        >>> b = tt.clone(a)
        >>> b[...] = 2.0
        >>> a[...]
        1.0
    """
    if arrays and not variables:
        raise StructureError(
            "clone: `arrays=True` copies what is inside Variables, so it needs "
            "`variables=True`."
        )
    copy_leaf = _copied if arrays else _same
    trace = current_trace()

    def copy_variable(variable: Variable[Any]) -> Variable[Any]:
        raw = variable._box[0]
        is_array = type(raw) in array_types or isinstance(raw, jax.Array)
        if arrays or not is_array:
            return variable.copy(jax.tree.map(_copied, raw) if arrays else raw)
        return twin(variable, trace)

    return Rebuild(
        node,
        resolve_graph(graph),
        "clone",
        variable=copy_variable if variables else _same,
        leaf=copy_leaf,
    ).run()


def _copied(leaf: Any) -> Any:
    if is_ref(leaf):
        return jax.new_ref(leaf[...])
    return leaf.copy() if hasattr(leaf, "shape") and hasattr(leaf, "copy") else leaf


def as_pure(tree: Any) -> Any:
    """Replaces every Variable by its value and every Ref by its array, at any depth.

    Examples:
        >>> import treetap as tt
        >>> tt.as_pure({"a": tt.Param(1.0)})
        {'a': 1.0}
    """

    def value_of(variable: Variable[Any]) -> Any:
        return as_pure(variable.get_value())

    def leaf_of(leaf: Any) -> Any:
        return leaf[...] if is_ref(leaf) else leaf

    return Rebuild(tree, True, "as_pure", variable=value_of, leaf=leaf_of).run()
