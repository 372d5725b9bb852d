# SPDX-License-Identifier: Apache-2.0
"""Calls: which methods of Modules run in a call of a model, and with what.

The model is traced, not run, on copies of its objects: nothing is written on a class or
an object. Each method emits one tap at its start, whose structure holds a `Note` of the
call. These taps are left in the jaxpr, so they are found where no capture can go, too,
as in the condition of a `while`; and a function that is traced once and called for many
layers has one in each of its calls. `recorded` reads them off, in the order in which
the calls start, and counts how often loops and mappings run each.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType
from jax.tree_util import register_dataclass

from treetap._capture.listener import leave_marked
from treetap._capture.listening import Listening, around_methods
from treetap._capture.marks import TICKET, Label, bind_tap, tap_p
from treetap._capture.module_paths import Roots, inside, resolve
from treetap._capture.name_stacks import Scope, scopes_in
from treetap._capture.walk import jax_compat
from treetap._capture.walk.operations import operation_of
from treetap._core.paths import Path
from treetap._core.settings import Mode
from treetap._core.trees.attributes import Node
from treetap._core.trees.build import regrow
from treetap._core.trees.sharing import places
from treetap._core.variables.values import is_ref
from treetap._modules.methods import is_wrapped
from treetap._observe.handlers import QUIET, Handler
from treetap._report.texts import arguments_text, is_array, text_of
from treetap._transforms.lift.lift import Lift


class MethodCall(NamedTuple):
    """A call of a method of an object, without its values.

    Attributes:
        method: The name of the method.
        definition: What to rebuild object and arguments from.
        tree: The structure of what the Variables and other leaves hold.
        leaves: What is in that: arrays as shapes and types, and what is static.
    """

    method: str
    definition: Any
    tree: Any
    leaves: tuple[Any, ...]

    @property
    def arrays(self) -> list[Any]:
        """The arrays, as shapes and types."""
        return [leaf for leaf in self.leaves if is_array(leaf)]

    @property
    def node(self) -> Any:
        """The object, around shapes and types."""
        return self.rebuilt(self.arrays)[0]["args"][0]

    def rebuilt(self, arrays: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Object and arguments around other arrays, and their Variables and leaves."""
        supply = iter(arrays)
        leaves = [next(supply) if is_array(leaf) else leaf for leaf in self.leaves]
        return regrow(self.definition, self.tree.unflatten(leaves))

    def run(
        self, arrays: Sequence[Any], asked: Listening = QUIET
    ) -> tuple[Any, list[Any], Roots]:
        """Calls the method as in a capture; taps that are asked for stay in its jaxpr.

        As in a capture `sow` and `perturb` store nothing, and raise no error.

        Returns:
            The result, the Variables and plain values of the arguments, and what is
            known of the paths of Modules.
        """
        tree, leaves = self.rebuilt(arrays)
        (node, args), kwargs = tree["args"], tree["kwargs"]
        bound = getattr(node, self.method)

        def call(_: Any, *args: Any, **kwargs: Any) -> Any:
            return bound(*args, **kwargs)

        @functools.wraps(bound)
        def noted(*args: Any, **kwargs: Any) -> Any:
            with inside(node):
                return _with_note(self.method, call, node, args, kwargs)

        # A wrapped method goes through `around_methods`; any other is noted here.
        is_wanted = asked is CALLS and not is_wrapped(getattr(type(node), self.method))
        fn, handler = noted if is_wanted else bound, Handler(asked)
        with handler.around(fn, args, kwargs, run=leave_marked) as out:
            return out, leaves, handler.session.known


def taken_apart(
    node: Any, method: str, args: Any, kwargs: Any, name: str = "summary"
) -> tuple[MethodCall, list[Any]]:
    """A call of a method, and the values that are left out of it.

    Args:
        node: The object.
        method: The name of its method.
        args: The arguments, concrete or abstract; what is not an array is static.
        kwargs: Keyword arguments.
        name: The public function at work, for messages.
    """
    inputs = Lift(name, Mode.GRAPH).inputs((node, args), kwargs)
    values, tree = jax.tree.flatten(inputs.values(), is_leaf=is_ref)
    leaves = tuple(map(_abstract, values))
    return MethodCall(method, inputs.definition, tree, leaves), values


def _abstract(value: Any) -> Any:
    """An array as its shape and type; anything else as it is."""
    if not is_array(value) and not is_ref(value):
        return value
    made = jax.ShapeDtypeStruct(value.shape, value.dtype)
    if not isinstance(value, jax.Array):
        return made
    kind: Any = jax.typeof(value)
    made = made.update(weak_type=kind.weak_type)
    # Where shardings are part of types, operations check them.
    axes = set(kind.sharding.mesh.axis_types)
    return made.update(sharding=kind.sharding) if axes == {AxisType.Explicit} else made


@dataclass(eq=False, slots=True)
class Note:
    """What is known of a call of a method.

    Attributes:
        kind: The class of the Module.
        inputs: The arguments, as text.
        all_inputs: The same as NNX writes it: with keyword arguments that are None,
            and strings without quotes.
        given: Module, method and arguments.
        shapes: The shapes of the values that the tap was given.
        outputs: The result, as text; None if the method did not return.
        rank: The number of the call in the order in which calls return.
    """

    kind: type
    inputs: str
    all_inputs: str
    given: MethodCall
    shapes: tuple[tuple[int, ...], ...]
    outputs: str | None = None
    rank: float = math.inf


_RETURNED = itertools.count()


@register_dataclass
@dataclass(frozen=True, eq=False)
class Start:
    """The value that is tapped where a method starts: arrays, and a note."""

    arrays: list[Any]
    note: Note = field(metadata={"static": True})


CALLS = Listening(frozenset({Start}), None, False)


def _with_note(name: str, fn: Any, module: Any, args: Any, kwargs: Any) -> Any:
    """Runs a method, and emits a tap with a `Note` of it before; for `around_methods`.

    The result is written into the note when the method returns. The jaxpr holds the
    same object, so whoever reads the note there finds it.
    """
    given, values = taken_apart(module, name, args, kwargs)
    arrays = [value for value in values if isinstance(value, jax.Array)] or [TICKET]
    shapes = tuple(np.shape(value) for value in arrays)
    told, every = (arguments_text(args, kwargs, is_all) for is_all in (False, True))
    note = Note(type(module), told, every, given, shapes)
    leaves, tree = jax.tree.flatten(Start(arrays, note))
    bind_tap(Label(name, Start, "call", tree), leaves)
    out = fn(module, *args, **kwargs)
    note.outputs, note.rank = text_of(out), next(_RETURNED)
    return out


class Call(NamedTuple):
    """A call that would be made.

    Attributes:
        path: The Module, as the model holds it.
        note: What is known of the call.
        times: How often it runs, in loops and mappings; None if that is not known.
    """

    path: Path
    note: Note
    times: int | None


def recorded(node: Any, method: str, args: Any, kwargs: Any, name: str) -> list[Call]:
    """The calls in a call of a method, itself first, in the order they start.

    The object is not changed; the arguments are as for `taken_apart`.
    """
    given, _ = taken_apart(node, method, args, kwargs, name)
    known: list[Roots] = []

    def pure(arrays: list[Any]) -> None:
        with around_methods(around_methods.value), around_methods(_with_note):
            known.append(given.run(arrays, CALLS)[2])

    jaxpr = jax.make_jaxpr(pure)(given.arrays)
    names, roots = _Names(node), known[0]
    found = _notes_in(jaxpr, (), 1)
    return [names.call(resolve(s, roots).path, note, times) for s, note, times in found]


def _notes_in(
    jaxpr: Any, scopes: tuple[Scope, ...], times: int | None
) -> Iterator[tuple[tuple[Scope, ...], Note, int | None]]:
    """The notes in a jaxpr and those inside it, with the scopes around them."""
    for eqn in jaxpr.eqns:
        here = (*scopes, *scopes_in(eqn.source_info.name_stack))
        if eqn.primitive is tap_p and eqn.params["label"].kind is Start:
            tree = eqn.params["label"].tree
            tapped = tree.unflatten(eqn.invars[: tree.num_leaves])
            yield here, tapped.note, None if times is None else times * _rows_of(tapped)
            continue
        more, _ = operation_of(eqn.primitive, eqn.params).repeats(eqn.params)
        inner = None if times is None or more is None else times * more
        for body in jax_compat.bodies_in(eqn.params):
            yield from _notes_in(body.jaxpr, here, inner)


def _rows_of(start: Start) -> int:
    """How many rows of mappings a call stands for: the axes that values got in front.

    A mapping gives an axis to the values that it maps, and only to those.
    """
    sizes: Counter[int] = Counter()
    for var, own in zip(start.arrays, start.note.shapes):
        shape = var.aval.shape
        sizes |= Counter(shape[: len(shape) - len(own)])
    return math.prod(sizes.elements())


def nodes_of(root: Any) -> dict[Path, Any]:
    """The objects of ours below a value, by path."""
    return {path: value for path, value in places(root) if isinstance(value, Node)}


class _Names:
    """Paths for Modules that a function got as arguments: scopes name these by class.

    Inside a loop such a Module is a slice of one that the model holds. Which one, is
    known only if the model has a single one, of the same class, that it can be a slice
    of; otherwise the call keeps the path that its scope gives.
    """

    def __init__(self, root: Any):
        self.nodes = nodes_of(root)
        self.known: dict[Path, Path] = {}  # from paths in scopes to those in the model

    def call(self, scope: Path, note: Note, times: int | None) -> Call:
        """A call, under the path that the model has for the path in its scope."""
        path = scope
        for end in range(len(scope) - 1, 0, -1):
            if scope[:end] in self.known:
                path = (*self.known[scope[:end]], *scope[end:])
                break
        if path not in self.nodes and path and path[-1] == note.kind.__name__:
            self.known.pop(scope, None)
            found = self._sliced(path[:-1], note, times)
            if found is not None:
                path = self.known[scope] = found
        return Call(path, note, times)

    def _sliced(self, around: Path, note: Note, times: int | None) -> Path | None:
        """The only object below a path that may be a stack of such Modules.

        Objects that hold exactly as many as the call has iterations go first.
        """
        below = {p: x for p, x in self.nodes.items() if p[: len(around)] == around}
        counts = {p: _slices(note, x) for p, x in below.items() if type(x) is note.kind}
        as_many = [place for place, count in counts.items() if count == times]
        fitting = as_many or [place for place, count in counts.items() if count]
        return fitting[0] if len(fitting) == 1 else None


def _slices(note: Note, node: Any) -> int:
    """How many Modules such as was called an object may hold, stacked; 0 if none."""
    pair = note.given.node, node
    parts, wholes = (taken_apart(each, "", (), {})[0].leaves for each in pair)
    if len(parts) != len(wholes) or not all(map(_is_part, parts, wholes)):
        return 0
    pairs = [(x.size, y.size) for x, y in zip(parts, wholes) if is_array(x)]
    return max((whole // max(part, 1) for part, whole in pairs), default=1)


def _is_part(part: Any, whole: Any) -> bool:
    if not (is_array(part) and is_array(whole)):
        return not is_array(part) and not is_array(whole)
    left = iter(whole.shape)
    in_order = all(size in left for size in part.shape)
    return in_order and part.dtype == whole.dtype
