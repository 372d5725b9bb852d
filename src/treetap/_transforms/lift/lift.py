# SPDX-License-Identifier: Apache-2.0
"""The lift: how every transform handles Variables, in one place.

A lifted call has two sides. Outside, `Inputs` takes the Variables out of the
arguments, refuses the same one twice, and hands JAX a flat list of values. Inside,
`run` builds the arguments anew for the current trace, calls the function, and returns
the result together with the values of the Variables that changed; which ones did, and
their metadata, are static, so they cost nothing when the compiled program runs. Outside
again, `Inputs.finish` puts them into the caller's Variables, all in one step.

A transform must know where its outputs lie before it runs. So changed Variables come
back in groups, one for each different prefix (an axis of vmap, a sharding of jit) among
the inputs: see `PrefixGroups`. With graph updates, objects whose structure changed ride
along: see `structure_updates`.
"""

import copy
import functools
import inspect
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from itertools import compress
from operator import is_not
from typing import Any, NamedTuple, TypedDict, TypeVar, get_args

import jax
from jax.tree_util import register_static

from treetap._capture.listening import listening
from treetap._capture.module_paths import name_shared, put_in_place
from treetap._core.errors import AliasError, StructureError
from treetap._core.paths import show_path
from treetap._core.settings import Mode, resolve_mode
from treetap._core.trace_level import current_trace, refuse_foreign_variable
from treetap._core.trees.attributes import Node
from treetap._core.trees.build import regrow
from treetap._core.trees.flatten import Flattening, take_leaves
from treetap._core.trees.graphdef import GraphDef, leaf_paths
from treetap._core.trees.pytree import variables_below
from treetap._core.trees.sharing import first_two_places, places
from treetap._core.variables.metadata import MISSING
from treetap._core.variables.values import is_ref
from treetap._core.variables.variable import Variable, raw_values, write_boxes
from treetap._core.wording import near_to
from treetap._transforms.lift.prefixes import (
    PrefixGroups,
    Spread,
    distinct,
    filter_values,
)
from treetap._transforms.lift.results import WHOLE, Results, has_flat_parts, rebuild
from treetap._transforms.lift.structure_updates import (
    ObjectUpdate,
    StructureUpdates,
    apply,
    is_captured,
    refuse_captured,
)
from treetap._transforms.lift.structure_watch import (
    Policy,
    StructureWatch,
    check_policy,
)


class Options(TypedDict, total=False):
    """What every transform takes beside its own arguments.

    Attributes:
        graph: Keep shared references in the arguments instead of refusing them.
        graph_updates: With `graph`, carry changes of structure out to the caller.
        on_structure_change: What to do when attributes change inside and the change
            would be lost: `"error"`, `"warn"` or `"ignore"`; see
            `treetap.set_structure_policy`.
    """

    graph: bool | None
    graph_updates: bool | None
    on_structure_change: Policy | None


@dataclass(frozen=True, slots=True)
class Lift:
    """The choices of one transform, which every step of its lift goes by.

    Attributes:
        name: The transform, for messages.
        mode: How it sees its arguments.
        policy: What it does about changes of structure that would be lost; None for
            what is set for the block or the process.
        label: What it calls its positional arguments; paths in messages begin with it.
        copies: Whether what was made outside may be returned, for the result is a copy.
    """

    name: str
    mode: Mode
    policy: Policy | None = None
    label: str = "args"
    copies: bool = False

    def __post_init__(self) -> None:
        if self.policy is not None:
            check_policy(self.policy)

    @classmethod
    def of(
        cls, name: str, options: Options, kind: Any = Options, label: str = "args"
    ) -> "Lift":
        """The lift of a transform with these options; settings decide what is left."""
        refuse_unknown(name, options, kind.__annotations__)
        mode = resolve_mode(options.get("graph"), options.get("graph_updates"))
        return cls(name, mode, options.get("on_structure_change"), label)

    def inputs(self, args: Any, kwargs: Any) -> "Inputs":
        """The arguments of a call, labelled for messages and taken apart."""
        return Inputs({self.label: args, "kwargs": kwargs}, self)

    def run(
        self,
        fn: Callable[..., Any],
        source: "Inputs | GraphDef",
        values: Sequence[Any],
        groups: PrefixGroups | None = None,
        **choices: Any,
    ) -> "tuple[Any, Updates]":
        """The traced side of most transforms: rebuild, call, check, collect.

        Args:
            fn: The function.
            source: Its arguments, or their description: see `Inside`.
            values: Their values at this level.
            groups: As for `Inside.finish`, which takes the further arguments.
            **choices: `keep`, `numbers` and `results`.

        Returns:
            The result, packed for JAX, and the updates.
        """
        inside = Inside(source, values, self)
        with inside.watched():
            out = fn(*inside.tree[self.label], **inside.tree["kwargs"])
        return inside.finish(out, groups, **choices)

    def abstract(self, fn: Callable[..., Any], inputs: "Inputs") -> Any:
        """The result of a call with abstract leaves; nothing is computed or written."""
        pure = functools.partial(self.run, fn, inputs)
        out, updates = jax.eval_shape(pure, inputs.values())
        return inputs.abstract().finish(out, updates)  # it may hold the arguments


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

    Without a function it is a decorator; the mode is resolved when the options are
    given; and bound methods are refused.
    """

    signature = open_signature(fn)
    takes_all = any(x.kind is x.VAR_KEYWORD for x in signature.parameters.values())

    @functools.wraps(fn)
    def call(f: Any = MISSING, *args: Any, **options: Any) -> Any:
        if not takes_all:
            refuse_unknown(fn.__name__, options, signature.parameters)
        mode = resolve_mode(options.get("graph"), options.get("graph_updates"))
        options |= {"graph": bool(mode), "graph_updates": mode is Mode.UPDATES}
        if f is MISSING:
            return functools.partial(call, **options)
        refuse_bound_method(f, fn.__name__)
        made = fn(f, *args, **options)
        if getattr(made, "__wrapped__", None) is f:  # not a result: a function
            made.__treetap_mode__ = mode
        return made

    call.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue] - read by inspect
    return call  # pyright: ignore[reportReturnType] - the signature is that of `fn`


def refuse_unknown(name: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuses options that a transform does not have."""
    known = [*known]
    unknown = [option for option in given if option not in known]
    if unknown:
        near = near_to(unknown[0], known, 1)
        text = (
            f"Did you mean {near[0]!r}?" if near else f"There are {', '.join(known)}."
        )
        raise TypeError(f"{name}: there is no option {unknown[0]!r}. {text}")


_FLAGS = (bool, bool | int)  # types of options that are off by default


def open_signature(fn: Any) -> inspect.Signature:
    """The signature of a function, with `**options: Unpack[...]` as so many names."""
    signature = inspect.signature(fn)
    options = getattr(signature.parameters.get("options"), "annotation", None)
    if not get_args(options):
        return signature
    *parameters, _ = signature.parameters.values()
    made = functools.partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
    parameters += [
        made(name, default=False if kind in _FLAGS else None, annotation=kind)
        for name, kind in get_args(options)[0].__annotations__.items()
    ]
    return signature.replace(parameters=parameters)


@register_static
@dataclass(frozen=True, slots=True)
class Written:
    """What a call changed; static, so that it costs nothing when a program runs.

    Attributes:
        groups: For each prefix, the Variables that come out: their numbers, and their
            metadata if those have changed, else None.
        objects: The objects whose structure changed.
        has_flat_parts: Whether a part of the result is a `FlatPart`.
        refs: Variables with a Ref that got metadata: their numbers, and those. The
            value of a Ref is changed where it is, and need not come out.
        idle: Which of `objects` nobody changed.
    """

    groups: tuple[tuple[tuple[int, Any], ...], ...]
    objects: tuple[ObjectUpdate, ...] = ()
    has_flat_parts: bool = True
    refs: tuple[tuple[int, Any], ...] = ()
    idle: frozenset[int] = frozenset()

    def __hash__(self) -> int:
        return hash(frozenset(self.numbers()))

    @property
    def has_values_only(self) -> bool:
        """Whether there is no more to write than values."""
        metadata = [facts for group in self.groups for _, facts in group]
        has_more = self.objects or self.has_flat_parts or self.refs
        return not has_more and all(facts is None for facts in metadata)

    def numbers(self) -> set[int]:
        """The Variables that come out."""
        return {number for group in self.groups for number, _ in group}


class Updates(NamedTuple):
    """What comes back beside the result: values by group, and whose they are."""

    values: tuple[list[Any], ...]
    written: Written


class Inputs:
    """The arguments of a lifted call, taken apart.

    Attributes:
        definition: What to rebuild the arguments from; static.
        leaves: The caller's Variables, and plain values, in order.
        owners: With graph updates, the caller's objects by number.
    """

    __slots__ = ("definition", "leaves", "lift", "name", "numbers", "owners", "tree")

    def __init__(self, tree: Any, lift: Lift):
        self.lift = lift
        self.name = lift.name
        self.tree = tree
        reason = _no_aliases(lift.name)
        walk = Flattening(
            tree, lift.mode, lift.name, states=False, reason=reason, looks=True
        )
        self.definition = walk.definition(tree)
        self.leaves = walk.leaves
        self.numbers = walk.numbers
        members = walk.members if lift.mode is Mode.UPDATES else ()
        self.owners: dict[int, Any] = dict(enumerate(members))

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional arguments."""
        return self.tree[self.lift.label]

    def values(self) -> list[Any]:
        """The raw values for JAX."""
        return raw_values(self.leaves)

    def spread(self, prefix: Any, argument: str) -> PrefixGroups:
        """The groups that a prefix makes of the leaves."""
        work = Spread(self.name, argument)
        work.follow(prefix, self.tree, ())
        # What is made inside may have any prefix that a filter gives.
        prefixes = distinct((*work.values, *filter_values(prefix)))
        of_leaf = list(map(prefixes.index, work.values))
        if self.definition.graph is not Mode.UPDATES:
            return PrefixGroups(of_leaf, prefixes, {}, {})
        owners = {self.numbers[key]: value for key, value in work.owners.items()}
        known = {self.numbers[key]: value for key, value in work.known.items()}
        return PrefixGroups(of_leaf, prefixes, owners, known)

    def outline(self) -> "Inputs | GraphDef":
        """What `run` rebuilds them from, without their values.

        JAX keeps functions that it has traced, and would keep the values with them. A
        capture needs to know where objects are, so it gets objects without values.
        """
        if listening.value is None:
            return self.definition
        bare = copy.copy(self)
        bare.tree, bare.leaves = regrow(self.definition, [None] * len(self.leaves))
        bare.owners = {}
        put_in_place(self.tree, bare.tree)
        return bare

    def abstract(self) -> "Inputs":
        """The same in objects of their own, with shapes in the place of arrays."""
        values = self.values()
        parts = Parted(values, map(is_ref, values))
        leaves = parts.all(jax.eval_shape(list, parts.handled(values)))
        return Inputs(regrow(self.definition, leaves)[0], self.lift)

    def with_plain(self, values: Mapping[int, Any], moved: Any = ((), ())) -> Any:
        """The arguments with other plain values, where there are some, by number.

        Around the caller's Variables are new objects; with graph updates, the caller's
        own.

        Args:
            values: The values.
            moved: What of the caller's stands in another place: see `carry.Moved`.
        """
        places, nodes = map(dict, moved)

        def placed(number: int, leaf: Any) -> Any:
            place = places.get(number, number)
            if isinstance(leaf, Variable) and place is not None:
                return self.leaves[place]
            return values.get(number, leaf)

        leaves = [placed(number, leaf) for number, leaf in enumerate(self.leaves)]
        owned = {n: self.owners.get(nodes.get(n, n)) for n in self.owners}
        owned = {n: x for n, x in owned.items() if isinstance(x, Node)}
        return regrow(self.definition, leaves, owners=owned)[0]

    def finish(self, out: Any, updates: Updates) -> Any:
        """Writes what changed into the caller's objects, and rebuilds the result.

        Values, metadata and objects are written; all that can fail comes first.
        """
        written, leaves = updates.written, self.leaves
        made = dict(self.owners)  # by number; new ones are added
        supplies = [iter(values) for values in updates.values]
        pairs = [pair for each in zip(written.groups, supplies) for pair in zip(*each)]
        facts = [facts for facts, _ in pairs] + [*written.refs]
        check_traces([leaves[number] for number, _ in facts], current_trace())
        steps = apply(written.objects, supplies, leaves, made)
        boxes = [(value,) for _, value in pairs]
        write_boxes([leaves[number] for (number, _), _ in pairs], boxes)
        for number, metadata in facts:
            if metadata is not None:
                leaves[number]._replace_metadata(metadata)
        for step in steps:
            step()
        return rebuild(out, made) if written.has_flat_parts else out


def check_traces(variables: Sequence[Variable[Any]], trace: Any) -> None:
    """Refuses to write Variables of another level."""
    for variable in variables:
        if variable._trace is not trace:
            raise refuse_foreign_variable(type(variable).__name__)


def filled(fixed: dict[int, Any], values: Iterable[Any], count: int) -> list[Any]:
    """All values in order: those that JAX handles, and between them the fixed ones."""
    supply = iter(values)
    return [fixed[n] if n in fixed else next(supply) for n in range(count)]


class Parted:
    """Values in order, of which JAX handles some and the others are fixed.

    Attributes:
        fixed: Those that JAX does not handle, by number.
    """

    def __init__(self, values: Sequence[Any], is_fixed: Iterable[bool]):
        self.count = len(values)
        self.fixed = dict(compress(enumerate(values), is_fixed))

    def handled(self, values: Iterable[Any]) -> list[Any]:
        """Of as many values, those that JAX handles."""
        return [value for n, value in enumerate(values) if n not in self.fixed]

    def all(self, handled: Iterable[Any]) -> list[Any]:
        """The inverse: those, and between them the fixed ones."""
        return filled(self.fixed, handled, self.count)


def _no_aliases(name: str) -> str:
    """Why the arguments and results of a transform share nothing in tree mode."""
    return (
        f"{name} does not support Variable aliasing in tree mode (a tree does not "
        "support shared references)"
    )


class Before(NamedTuple):
    """What a Variable was when the function began.

    A list or dict can change in place. So of a value that is no array there is also
    what was in it: a Variable counts as changed when it holds a different array, or the
    same container with different arrays in it.

    Attributes:
        box: What holds the value; each write makes another one.
        metadata: The metadata.
        content: The leaves and the structure of a container; None for an array.
    """

    box: tuple[Any]
    metadata: Any
    content: tuple[list[Any], Any] | None

    @classmethod
    def of(cls, variable: Variable[Any]) -> "Before":
        """A Variable as it is now."""
        value = variable._box[0]
        content = None if isinstance(value, jax.Array) else jax.tree.flatten(value)
        return cls(variable._box, variable._metadata, content)

    def has_changed(self, variable: Variable[Any]) -> bool:
        """Whether the Variable holds something else by now."""
        metadata, value = variable._metadata, variable._box[0]
        if metadata is not self.metadata and metadata != self.metadata:
            return True
        if self.content is None or isinstance(value, jax.Array):
            return self.box[0] is not value and not is_ref(value)
        leaves, structure = jax.tree.flatten(value)
        return structure != self.content[1] or any(map(is_not, leaves, self.content[0]))


class Inside:
    """The traced side of a lifted call: the arguments rebuilt, and what became of them.

    Args:
        source: The arguments, or their description where the traced function is kept
            for other arguments of the same structure.
        values: Their values at this level, in order.
        lift: The lift.
    """

    def __init__(self, source: Inputs | GraphDef, values: Sequence[Any], lift: Lift):
        self.lift = lift
        self.name = lift.name
        self.definition = source if isinstance(source, GraphDef) else source.definition
        members: dict[int, Any] = {}
        self.nodes: list[Any] = []
        known = {"made": members, "nodes": self.nodes}
        self.tree, self.leaves = regrow(self.definition, values, **known)
        self.before = [
            Before.of(leaf) if isinstance(leaf, Variable) else None
            for leaf in self.leaves
        ]
        has_updates = lift.mode is Mode.UPDATES
        self.structure = StructureUpdates(members, lift.name) if has_updates else None
        if listening.value is not None:
            if lift.mode is not Mode.TREE:
                name_shared(self.tree)
            if isinstance(source, Inputs):
                put_in_place(source.tree, self.tree)

    def watched(self, carried: Collection[Any] = ()) -> StructureWatch:
        """A block in which changes of structure that would be lost are noticed.

        Args:
            carried: Objects whose data are handed on to the next step of a loop.
        """
        policy = self.lift.policy if self.structure is None else "ignore"
        watch = StructureWatch(self.nodes, self.definition, self.name, policy)
        watch.carried = set(map(id, carried))
        return watch

    def check_output(self, out: Any) -> None:
        """Refuses input Variables, captured ones and, in a tree, duplicates."""
        own = {id(leaf) for leaf in self.leaves if isinstance(leaf, Variable)}
        trace, variables = current_trace(), variables_below(out)
        is_clear = all(v._trace is trace and id(v) not in own for v in variables)
        for path, value in () if is_clear else places({"out": out}):
            if id(value) in own:
                raise refuse_returned(self.name, {**self.tree, "out": out}, value)
            is_refused = isinstance(value, Variable) and not self.lift.copies
            if is_refused and is_captured(value):
                raise StructureError(
                    f"{self.name}: Cannot return captured Variable: the "
                    f"{type(value).__name__} at {show_path(path)} was made outside the "
                    "function. Pass it as an argument, or return its value."
                )
        if self.lift.mode is Mode.TREE:
            take_leaves({"out": out}, False, self.name, _no_aliases(self.name))

    def changed(
        self, numbers: Iterable[int], keep: Collection[int] = ()
    ) -> dict[int, Any]:
        """Those of some leaves that come out: by number, new metadata or None.

        Args:
            numbers: The leaves.
            keep: Variables, by number, that come out even if nobody changed them. A
                Ref does not: it is changed where it is.
        """
        found: dict[int, Any] = {}
        for number in numbers:
            leaf, before = self.leaves[number], self.before[number]
            if before is None:
                continue
            is_kept = number in keep and not is_ref(leaf._box[0])
            if is_kept or before.has_changed(leaf):
                has_new = leaf._metadata is not before.metadata
                found[number] = leaf._metadata if has_new else None
        return found

    def carried(self, numbers: Iterable[int]) -> dict[int, Any]:
        """As `changed`, for a loop: each step gets what the step before it left.

        So a Variable that holds a list or dict must keep its structure.
        """
        found = self.changed(numbers)
        for number in found:
            before, value = self.before[number], self.leaves[number]._box[0]
            structure = before and before.content and before.content[1]
            if structure and structure != jax.tree.structure(value):
                path = list(leaf_paths(self.definition.spec))[number]
                kind = type(self.leaves[number]).__name__
                raise StructureError(
                    f"{self.name}: the {kind} at {show_path(path)} held {structure} "
                    f"before a step, and {jax.tree.structure(value)} after it. A loop "
                    "carries values of one structure: make room for all items before "
                    "the loop, and set them inside."
                )
        return found

    def finish(
        self,
        out: Any,
        groups: PrefixGroups | None = None,
        *,
        keep: Collection[int] = (),
        numbers: Iterable[int] | None = None,
        results: Results = WHOLE,
        all_objects: bool = False,
    ) -> tuple[Any, Updates]:
        """The result as JAX can carry it, and the values to carry out beside it.

        Args:
            out: What the function returned.
            groups: The groups of the leaves; one for all by default.
            keep: Leaves, by number, that come out even if nobody changed them.
            numbers: The leaves that may come out; all by default.
            results: Where the results lie.
            all_objects: Whether all objects come out, with all of their leaves, also
                those that nobody changed.
        """
        idle: set[int] | None = set() if all_objects else None
        count = len(groups.prefixes) if groups else 1
        of_leaf = groups.of_leaf if groups else [0] * len(self.leaves)
        # Refs are a group of their own, the last one, which does not come out.
        values: list[list[Any]] = [[] for _ in range(count + 1)]
        written: list[list[tuple[int, Any]]] = [[] for _ in range(count + 1)]
        every = range(len(self.leaves)) if numbers is None else numbers
        for number, metadata in self.changed(every, keep).items():
            value = self.leaves[number]._box[0]
            group = count if is_ref(value) else of_leaf[number]
            values[group].append(value)
            written[group].append((number, metadata))
        objects: list[ObjectUpdate] = []
        structure, work = self.structure, None
        if structure is None:
            self.check_output(out)
            walk = Flattening(out, self.lift.mode, self.name, states=False)
        else:
            walk = structure.walk()
            stay = enumerate(self.leaves) if idle is None else ()
            own = {id(x): n for n, x in stay if n not in keep}
            objects = [*structure.collect(walk, groups, own, values, idle)]
            if groups:
                work = structure.spread(groups, "the out prefix")
        flat = results.flatten(out, walk, work)
        if structure is not None:
            new = () if self.lift.copies else walk.members[len(structure.members) :]
            refuse_captured(new, self.name)
        *by_group, refs = map(tuple, written)
        rest = has_flat_parts(flat), refs, frozenset(idle or ())
        note = Written(tuple(by_group), tuple(objects), *rest)
        return flat, Updates(tuple(values[:count]), note)


def refuse_returned(name: str, root: Any, value: Any) -> AliasError:
    """The error for a Variable of the arguments that is also in the result."""
    paths = [show_path(path) for path in first_two_places(root, value)[0]]
    kind = type(value).__name__
    text = (
        f"{name}: Duplicate {kind} found at paths {' and '.join(paths)}: {name} does "
        "not support Variable aliasing between arguments and result. The caller has "
        "the Variable already, with its new value; return its value, or a copy "
        "(`treetap.clone`)."
    )
    return AliasError(text, name, kind, paths)
