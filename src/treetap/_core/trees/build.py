# SPDX-License-Identifier: Apache-2.0
"""New objects from a description: around values in order, by name, or from a copy.

`take_apart` and `take_leaves` describe an object once; everything that makes objects
again is `regrow`, which goes through the description and takes one value after another.
Values that come back from JAX are in that order already. Values with names, as `merge`
is given them, are checked and put in order first (`Merging`), so nothing is made or
changed before all of them are known to fit. And a copy is what is built from an
object's own description and leaves (`rebuilt`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from operator import is_, is_not
from typing import Any

import jax

from treetap._core.errors import StructureError
from treetap._core.paths import Path, show_path
from treetap._core.settings import resolve_graph
from treetap._core.trace_level import TraceState, current_trace
from treetap._core.trees.flatten import Flattening
from treetap._core.trees.graphdef import (
    ContainerSpec,
    GraphDef,
    ObjectSpec,
    SharedSpec,
    VariableSpec,
)
from treetap._core.trees.layout import Structure
from treetap._core.trees.pytree import adopt_all, bare, fill, flat_of, set_spec
from treetap._core.trees.state import flat_items, is_branch
from treetap._core.variables.change_marks import note_change
from treetap._core.variables.metadata import MISSING
from treetap._core.variables.values import is_ref, without_ref
from treetap._core.variables.variable import (
    Variable,
    array_types,
    make,
)
from treetap._core.wording import first_few


@dataclass(slots=True, eq=False)
class Builder:
    """One building of objects around values.

    Attributes:
        values: Bare values, or Variables, in order.
        made: Objects by number; shared by descriptions that were made in one walk.
        owners: Objects and Variables by number that are to be filled, instead of new
            ones being made.
        nodes: Gets the objects, as `objects_in` orders them.
        recreate: Whether a bare value becomes a Variable where one is described, and
            the objects and leaves that were made are noted. If not, the leaves stand
            as they are.
        grouped: Whether the leaves of an object of Variables come as one tuple.
        leaves: Gets the leaves.
        trace: The trace level of what is made.
    """

    values: Iterator[Any]
    made: dict[int, Any] = field(default_factory=dict)
    owners: Mapping[Any, Any] = field(default_factory=dict)
    nodes: list[Any] = field(default_factory=list)
    recreate: bool = True
    grouped: bool = False
    leaves: list[Any] = field(default_factory=list)
    trace: TraceState = field(default_factory=current_trace)

    def any(self, spec: Any) -> Any:
        """What a description stands for, around the next values."""
        return self.children((spec,))[0]

    def children(self, specs: Iterable[Any]) -> list[Any]:
        """What several descriptions stand for, around the next values."""
        found: list[Any] = []
        for spec in specs:
            kind = type(spec)
            if kind is ObjectSpec:
                is_common = spec.kinds is not None
                value = (self.object_of_variables if is_common else self.object)(spec)
            elif kind is SharedSpec:
                value = self.made[spec.shared_with]
            elif kind is ContainerSpec:
                value = spec.close(self.children(spec.children))
            else:  # a leaf; it is taken here, without one more call
                value = next(self.values)
                if kind is VariableSpec:
                    if self.recreate and not isinstance(value, Variable):
                        value = make(spec.type, value, spec.metadata, self.trace)
                    owned = self.owners.get(spec.number) if self.owners else None
                    if owned is not None and isinstance(value, Variable):
                        owned.copy_from(value)
                        value = owned
                self.leaves.append(value)
                if spec.number is not None:
                    self.made[spec.number] = value
            found.append(value)
        return found

    def object(self, spec: ObjectSpec) -> Any:
        """An object of ours; numbered first, as its children may lead back to it."""
        owned = self.owners.get(spec.number)
        node = bare(spec.type, self.trace) if owned is None else owned
        self.nodes.append(node)
        if spec.number is not None:
            self.made[spec.number] = node
        children = self.children(spec.children)
        if owned is None:
            fill(node, spec.structure, children)
            adopt_all(node, spec.structure, children)
        elif not _holds(node, spec.structure, children):
            refill(node, spec.structure, children)
        return node

    def object_of_variables(self, spec: Any) -> Any:
        """The common object, made quickly: nothing in it is shared or has a place."""
        values, trace, count = self.values, self.trace, len(spec.children)
        node = bare(spec.type, trace)
        given = next(values) if self.grouped else tuple(islice(values, count))
        children = given
        if self.recreate:
            children = tuple(
                x if isinstance(x, Variable) else make(own.type, x, own.metadata, trace)
                for x, own in zip(given, spec.children)
            )
            if not any(map(is_, children, given)):  # all new: what a walk would find
                set_spec(node, (children, spec))
            self.nodes.append(node)
            self.leaves += children
        fill(node, spec.structure, children)
        return node


def _holds(node: Any, structure: Structure, children: Iterable[Any]) -> bool:
    """Whether an object has these very attributes already."""
    held, (layout, statics, _) = flat_of(node)
    before, after = (*held, *statics), (*children, *structure[1])
    is_same = layout is structure[0] and len(before) == len(after)
    return is_same and not any(map(is_not, before, after))


def refill(node: Any, structure: Structure, children: Iterable[Any]) -> None:
    """Gives an object its attributes, in place of those it has."""
    node._check_trace()
    set_spec(node, None)
    fill(node, structure, children)
    note_change()
    adopt_all(node, structure, children)


def regrow(
    graphdef: GraphDef, values: Iterable[Any], **known: Any
) -> tuple[Any, list[Any]]:
    """Builds new objects around values.

    Args:
        graphdef: What to build.
        values: Bare values, or Variables, in order.
        **known: What else a `Builder` is given: `made`, `owners` or `nodes`.

    Returns:
        The object, and its leaves in order: new Variables (or those given), and the
        plain values.
    """
    work = Builder(iter(values), **known)
    return work.any(graphdef.spec), work.leaves


@dataclass(slots=True, eq=False)
class Merging:
    """Leaves by name, checked against a description and put into its order.

    Attributes:
        copy: Whether Variables are copied.
        recreate: Whether bare values become Variables.
        leaves: The leaves in the order of the description, those of an object of
            Variables as one tuple; of use without problems.
        problems: What does not fit.
    """

    copy: bool
    recreate: bool
    leaves: list[Any] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    trace: TraceState = field(default_factory=current_trace)

    def any(self, spec: Any, state: Any, path: Path) -> None:
        """Takes the leaves of a description from its state."""
        kind = type(spec)
        if kind is ObjectSpec or kind is ContainerSpec:
            self.children(spec, state, path)
        elif kind is SharedSpec:
            if state is not MISSING and not (is_branch(state) and not state):
                self.problems.append(f"unexpected {show_path(path)}")
        elif state is MISSING:
            self.problems.append(f"missing {show_path(path)}")
        elif kind is VariableSpec:
            self.leaves.append(self.variable(spec, state))
        else:
            is_variable = isinstance(state, Variable)
            if is_variable or is_branch(state):
                name = type(state).__name__ if is_variable else "mapping"
                self.problem(path, f"a {name} where a plain value belongs")
            self.leaves.append(state)

    def variable(self, spec: VariableSpec, state: Any) -> Any:
        """A Variable from a Variable, which may be of another kind, or from a value."""
        if isinstance(state, Variable):
            return state.copy() if self.copy else state
        if not self.recreate:
            return state
        if spec.metadata["ref"] and not is_ref(state):
            state = jax.new_ref(state)
        return make(spec.type, state, spec.metadata, self.trace)

    def children(self, spec: Any, state: Any, path: Path) -> None:
        """Takes the entries of a mapping, which must be exactly the children's."""
        is_group = type(spec) is ObjectSpec and spec.kinds is not None
        is_usual = is_group and type(state) is dict and not self.copy
        if is_usual and (found := _matching(spec, state)) is not None:
            self.leaves.append(found)
            return
        if not is_branch(state):
            if state is not MISSING:
                self.problem(path, f"a {type(state).__name__} where a mapping belongs")
            state = {}
        keys, absent, start = spec.keys, 0, len(self.leaves)
        for key, child in zip(keys, spec.children):
            inner = state.get(key, MISSING)
            absent += inner is MISSING
            if isinstance(child, ObjectSpec):
                self.children(child, inner, (*path, key))
            elif isinstance(child, VariableSpec) and type(inner) is child.type:
                self.leaves.append(inner.copy() if self.copy else inner)
            else:
                self.any(child, inner, (*path, key))
        if len(state) + absent != len(keys):
            extra = [(*path, key) for key in state if key not in keys]
            self.problems += [f"unexpected {show_path(each)}" for each in extra]
        if is_group:
            self.leaves[start:] = [tuple(self.leaves[start:])]

    def problem(self, path: Path, what: str) -> None:
        """Notes an entry of the wrong kind."""
        self.problems.append(f"{show_path(path)} is {what}")


def _matching(spec: ObjectSpec, state: dict[Any, Any]) -> tuple[Any, ...] | None:
    """The common case, in C: Variables alone, all there and of the right kinds."""
    try:
        found = spec.structure[0].children_of(state)
    except KeyError:
        return None
    is_all = len(found) == len(state) and tuple(map(type, found)) == spec.kinds
    return found if is_all else None


def put_together(
    graphdef: GraphDef,
    state: Any,
    name: str,
    *,
    copy: bool = False,
    recreate: bool = True,
    **known: Any,
) -> Any:
    """Builds new objects from a description and nested dicts of leaves.

    Every name must be right; all that is wrong is listed in one StructureError, and
    then nothing was made. Variables may be of another kind than was described. See
    `regrow` for what may be `known`.
    """
    named = Merging(copy, recreate)
    named.any(graphdef.spec, state, ())
    if named.problems:
        shown = first_few(named.problems, 12, before="  - ", end="\n")
        found, expected = len([*flat_items(state)]), graphdef.num_leaves
        counts = f" Incorrect number of leaves: {found}, expected {expected}."
        raise StructureError(
            f"{name}: the state does not fit the GraphDef."
            f"{'' if found == expected else counts}\n{shown}\n"
            "Pass the State(s) that `split` gave with this GraphDef, all of them."
        )
    work = Builder(iter(named.leaves), **known, recreate=False, grouped=True)
    return work.any(graphdef.spec)


def _same(value: Any) -> Any:
    return value


def rebuilt(
    root: Any,
    graph: bool,
    name: str,
    *,
    variable: Callable[[Variable[Any]], Any] = _same,
    leaf: Callable[[Any], Any] = _same,
) -> Any:
    """New objects and containers of the same structure, around other leaves.

    What is shared stays shared in graph mode; in tree mode it is refused, but for
    objects without leaves, which stay shared as well.

    Args:
        root: What is rebuilt.
        graph: Whether shared objects are kept as such, or refused.
        name: The public function at work, for messages.
        variable: Gives what stands in the place of a Variable.
        leaf: Gives what stands in the place of any other leaf.
    """
    walk = Flattening(root, graph, name, states=False)
    definition = walk.definition(root)
    if walk.has_twins:
        return rebuilt(root, True, name, variable=variable, leaf=leaf)
    new = [variable(x) if isinstance(x, Variable) else leaf(x) for x in walk.leaves]
    return Builder(iter(new), recreate=False).any(definition.spec)


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
    trace = current_trace()

    def copy_variable(variable: Variable[Any]) -> Variable[Any]:
        raw = variable._box[0]
        is_array = type(raw) in array_types or isinstance(raw, jax.Array)
        if arrays or not is_array:
            return variable.copy(jax.tree.map(_copied, raw) if arrays else raw)
        return make(type(variable), raw, variable._metadata, trace)

    variable = copy_variable if variables else _same
    leaf = _copied if arrays else _same
    return rebuilt(node, resolve_graph(graph), "clone", variable=variable, leaf=leaf)


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

    return rebuilt(tree, True, "as_pure", variable=value_of, leaf=without_ref)
