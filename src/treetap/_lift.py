# SPDX-License-Identifier: Apache-2.0
"""The lift: how every transform handles Variables, in one place.

A lifted call has two sides. Outside, `Inputs` takes the Variables out of the
arguments, refuses the same one twice, and hands JAX a flat list of values. Inside,
`run` builds the arguments anew for the current trace, calls the function, and returns
the result together with the values of the Variables that changed; which ones did, and
their metadata, are static, so they cost nothing when the compiled program runs. Outside
again, `write_back` puts them into the caller's Variables, all in one step.

Changed Variables come back in *lanes*, one for each different prefix (an axis of vmap,
a sharding of jit) among the inputs, because a transform must know where its outputs lie
before it runs.
"""

import functools
import inspect
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from jax.tree_util import register_static

from treetap._attributes import Node
from treetap._changes import Policy, Structure, policy_of, with_policy
from treetap._errors import AliasError, StructureError
from treetap._graphs import Apart, GraphDef, take_leaves
from treetap._metadata import MISSING
from treetap._regrowing import regrow
from treetap._settings import resolve_graph, resolve_graph_updates
from treetap._sharing import first_two_places, places
from treetap._traces import current_trace, refuse_foreign_variable
from treetap._trees import show_path
from treetap._values import is_ref
from treetap._variables import Variable, set_box


def resolve_mode(graph: bool | None, graph_updates: bool | None, name: str) -> bool:
    """Whether a transform keeps shared references; graph updates are not offered."""
    graph = resolve_graph(graph)
    if graph and resolve_graph_updates(graph_updates):
        raise NotImplementedError(
            f"{name}: graph updates are not supported. Use `graph_updates=False`."
        )
    return graph


def refuse_bound_method(fn: Any, name: str) -> None:
    """Refuses a method bound to an object, whose changes would be lost."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    if inspect.ismethod(fn) and isinstance(fn.__self__, Node):
        owner = type(fn.__self__).__name__
        raise StructureError(
            f"{name}: bound methods are not supported: {owner}.{fn.__name__} is bound "
            f"to an object, whose Variables would be constants. Decorate the method in "
            f"the class, or pass `{owner}.{fn.__name__}` and the object as an argument."
        )


F = TypeVar("F", bound=Callable[..., Any])


def transform(fn: F) -> F:
    """Gives a transform what all of them share.

    Without a function it is a decorator; the mode is resolved once, when the arguments
    are given; bound methods are refused; and `on_structure_change` says, for this
    function, what `treetap.set_structure_policy` says for all.
    """
    name = fn.__name__

    @functools.wraps(fn)
    def call(
        f: Any = MISSING,
        *args: Any,
        graph: bool | None = None,
        graph_updates: bool | None = None,
        on_structure_change: Policy | None = None,
        **options: Any,
    ) -> Any:
        mode = resolve_mode(graph, graph_updates, name)
        if f is MISSING:
            options |= {"graph": mode, "graph_updates": False}
            policy = on_structure_change
            return functools.partial(call, on_structure_change=policy, **options)
        refuse_bound_method(f, name)
        return fn(with_policy(f, on_structure_change), *args, graph=mode, **options)

    return call  # pyright: ignore[reportReturnType] - the signature is that of `fn`


def refuse_returned(name: str, root: Any, value: Any) -> AliasError:
    """The error for a Variable of the arguments that is also in the result."""
    found = [show_path(path) for path, _ in first_two_places(root, value)]
    kind = type(value).__name__
    return AliasError(
        f"{name}: Duplicate {kind} found at paths {' and '.join(found)}: {name} does "
        "not support Variable aliasing between arguments and result. The caller has "
        "the Variable already, with its new value; return its value, or a copy "
        "(`treetap.clone`)."
    )


@register_static
class Written:
    """Which Variables changed, by lane: their numbers and their metadata."""

    __slots__ = ("lanes",)

    def __init__(self, lanes: tuple[tuple[tuple[int, Any], ...], ...]):
        self.lanes = lanes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Written) and self.lanes == other.lanes

    def __hash__(self) -> int:
        return hash(tuple(tuple(number for number, _ in lane) for lane in self.lanes))


class Updates(NamedTuple):
    """What comes back beside the result: values by lane, and whose they are."""

    values: tuple[list[Any], ...]
    written: Written


class Lanes:
    """Distinct prefixes among the Variables of a call, in order of appearance."""

    __slots__ = ("of_leaf", "prefixes")

    def __init__(self, prefixes: Sequence[Any]):
        self.prefixes: list[Any] = []
        self.of_leaf: list[int] = []
        for prefix in prefixes:
            if prefix not in self.prefixes:
                self.prefixes.append(prefix)
            self.of_leaf.append(self.prefixes.index(prefix))


class Inputs:
    """The arguments of a lifted call, taken apart.

    Attributes:
        definition: What to rebuild the arguments from; static.
        leaves: The caller's Variables, and plain values, in order.
    """

    __slots__ = ("definition", "leaves", "name", "tree")

    def __init__(self, tree: Any, graph: bool, name: str):
        self.name = name
        self.tree = tree
        try:
            self.definition, self.leaves = take_leaves(tree, graph, name)
        except AliasError as error:
            raise _as_transform_error(error, name) from None

    def values(self) -> list[Any]:
        """The raw values for JAX."""
        return raw_values(self.leaves)

    def write_back(self, updates: Updates) -> None:
        """Writes changed values and metadata into the caller's Variables."""
        trace = current_trace()
        variables: list[Variable[Any]] = []
        boxes: list[tuple[Any]] = []
        changes: list[tuple[Variable[Any], Any]] = []
        for lane, values in zip(updates.written.lanes, updates.values):
            for (number, metadata), value in zip(lane, values):
                variable = self.leaves[number]
                if variable._trace is not trace:
                    raise refuse_foreign_variable(type(variable).__name__)
                variables.append(variable)
                boxes.append((value,))
                if metadata is not variable._metadata:
                    changes.append((variable, metadata))
        deque(map(set_box, variables, boxes), 0)  # one call: all or nothing
        for variable, metadata in changes:
            variable._replace_metadata(metadata)


def _as_transform_error(error: AliasError, name: str) -> AliasError:
    text = str(error).replace(
        "tree mode does not support shared references",
        f"{name} does not support Variable aliasing in tree mode (a tree does not "
        "support shared references)",
    )
    return type(error)(text)


def has_changed(variable: Variable[Any], box: tuple[Any], metadata: Any) -> bool:
    """Whether a Variable holds something else than at the start, by identity."""
    if variable._metadata is not metadata and variable._metadata != metadata:
        return True
    before, after = box[0], variable._box[0]
    if before is after or is_ref(after):
        return False
    if type(after) not in (dict, list, tuple):
        return True
    leaves, structure = jax.tree.flatten(before)
    others, other_structure = jax.tree.flatten(after)
    return structure != other_structure or any(
        one is not two for one, two in zip(leaves, others)
    )


class Inside:
    """The traced side of a lifted call: the arguments rebuilt, and what became of them.

    Args:
        definition: The arguments' description.
        values: Their values at this level, in order.
        name: The transform, for messages.
    """

    __slots__ = ("before", "leaves", "name", "tree")

    def __init__(self, definition: GraphDef, values: Sequence[Any], name: str):
        self.name = name
        self.tree, self.leaves = regrow(definition, values)
        self.before = [
            (leaf._box, leaf._metadata) if isinstance(leaf, Variable) else None
            for leaf in self.leaves
        ]

    def check_output(self, out: Any, graph: bool) -> None:
        """Refuses input Variables, captured ones and, in a tree, duplicates."""
        own = {id(leaf) for leaf in self.leaves if isinstance(leaf, Variable)}
        trace = current_trace()
        for path, value, _ in places({"out": out}):
            if not isinstance(value, Variable):
                continue
            if id(value) in own:
                raise refuse_returned(self.name, {**self.tree, "out": out}, value)
            if value._trace is not trace and not value._metadata["ref"]:
                raise StructureError(
                    f"{self.name}: Cannot return captured Variable: the "
                    f"{type(value).__name__} at {show_path(path)} was made outside the "
                    "function. Pass it as an argument, or return its value."
                )
        if not graph:
            try:
                take_leaves({"out": out}, False, self.name)
            except AliasError as error:
                raise _as_transform_error(error, self.name) from None

    def changed(self, number: int) -> bool:
        """Whether the Variable with this number was written."""
        before = self.before[number]
        return before is not None and has_changed(self.leaves[number], *before)

    def updates(
        self,
        lanes: Sequence[int],
        count: int,
        keep: Callable[[int], bool] | None = None,
        only: Callable[[int], bool] | None = None,
    ) -> Updates:
        """The values to carry out: of changed Variables, and of those to be kept.

        Args:
            lanes: The lane of each leaf.
            count: How many lanes there are.
            keep: Tells which Variables come out even if nobody changed them.
            only: Tells which Variables come out at all.
        """
        values: list[list[Any]] = [[] for _ in range(count)]
        written: list[list[tuple[int, Any]]] = [[] for _ in range(count)]
        for number, leaf in enumerate(self.leaves):
            if not isinstance(leaf, Variable) or is_ref(leaf._box[0]):
                continue
            if only is not None and not only(number):
                continue
            if self.changed(number) or (keep is not None and keep(number)):
                values[lanes[number]].append(leaf._box[0])
                written[lanes[number]].append((number, leaf._metadata))
        return Updates(tuple(values), Written(tuple(map(tuple, written))))


@jax.tree_util.register_pytree_with_keys_class
class Packed:
    """A result with shared parts on its way out: leaves, and how to put them together.

    A prefix may stand for the whole of it.
    """

    __slots__ = ("graphdef", "values")

    def __init__(self, graphdef: GraphDef, values: Sequence[Any]):
        self.graphdef = graphdef
        self.values = values

    def tree_flatten_with_keys(self) -> Any:
        """Values by position."""
        keyed = [
            (jax.tree_util.SequenceKey(place), value)
            for place, value in enumerate(self.values)
        ]
        return keyed, self.graphdef

    @classmethod
    def tree_unflatten(cls, graphdef: GraphDef, values: Sequence[Any]) -> "Packed":
        """The inverse."""
        return cls(graphdef, values)


def _is_object(value: Any) -> bool:
    return isinstance(value, Variable | Node)


def pack_output(out: Any, graph: bool, name: str) -> Any:
    """A result as JAX can carry it: itself, or Packed parts if it shares something."""
    if not graph:
        return out
    try:
        take_leaves(out, False, name)
        return out
    except (AliasError, StructureError):
        pass
    walk = Apart(out, True, name)

    def pack(part: Any) -> Any:
        if not _is_object(part):
            return part
        start = len(walk.leaves)
        spec, _ = walk.any(part)
        return Packed(
            GraphDef(spec, len(walk.leaves) - start, True),
            raw_values(walk.leaves[start:]),
        )

    return jax.tree.map(pack, out, is_leaf=_is_object)


def unpack_output(out: Any) -> Any:
    """The result with its Packed parts put together, sharing kept between them."""
    made: dict[int, Any] = {}

    def unpack(part: Any) -> Any:
        if not isinstance(part, Packed):
            return part
        return regrow(part.graphdef, part.values, made)[0]

    return jax.tree.map(unpack, out, is_leaf=lambda part: isinstance(part, Packed))


def raw_values(leaves: Sequence[Any]) -> list[Any]:
    """The raw values of Variables, and plain values as they are."""
    return [x._box[0] if isinstance(x, Variable) else x for x in leaves]


def run(
    fn: Callable[..., Any],
    definition: GraphDef,
    values: Sequence[Any],
    *,
    name: str,
    lanes: Sequence[int] | None = None,
    count: int = 1,
    keep: Callable[[int], bool] | None = None,
) -> tuple[Any, Updates]:
    """The traced side of most transforms: rebuild, call, check, collect.

    Returns:
        The result, packed for JAX, and the updates.
    """
    inside = Inside(definition, values, name)
    with Structure(inside.tree, name, policy_of(fn)):
        out = fn(*inside.tree["args"], **inside.tree["kwargs"])
    inside.check_output(out, definition.graph)
    lanes = lanes or [0] * len(inside.leaves)
    packed = pack_output(out, definition.graph, name)
    return packed, inside.updates(lanes, count, keep)


def inputs_of(args: Any, kwargs: Any, graph: bool, name: str) -> Inputs:
    """The arguments of a call, labelled for messages and taken apart."""
    return Inputs({"args": args, "kwargs": kwargs}, graph, name)
