# SPDX-License-Identifier: Apache-2.0
"""Calls: which methods of Modules run in a call of a model, and with what.

The model is traced, not run, on copies of its objects. Each method emits one tap at its
start, whose structure holds a `Note` of the call; so the notes are in the jaxpr, and a
function that is traced once and called for many layers tells of each. `recorded` reads
them off, in the order in which the calls start, loops and mappings counted. Nothing is
written on a class or an object.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType
from jax.tree_util import register_dataclass

from treetap._capture.callee import roots_of
from treetap._capture.listening import Listening, around_methods, listening
from treetap._capture.marks import TICKET, Label, bind_tap, tap_p
from treetap._capture.module_paths import Roots, inside, resolve, rooted
from treetap._capture.name_stacks import scopes_in
from treetap._capture.walk import jax_compat
from treetap._core.paths import Path
from treetap._core.settings import Mode
from treetap._core.trees.attributes import Node
from treetap._core.trees.build import regrow
from treetap._core.trees.sharing import places
from treetap._core.variables.values import is_ref
from treetap._modules.methods import is_wrapped
from treetap._report.texts import arguments_text, is_array, text_of
from treetap._transforms.lift.lift import Inputs, Lift


class Frozen(NamedTuple):
    """Arguments without their values: a description, and abstract or static leaves.

    Attributes:
        definition: What to rebuild them from.
        leaves: In order; an array is its shape and type.
    """

    definition: Any
    leaves: tuple[Any, ...]

    def thawed(self) -> Any:
        """The arguments, around abstract values."""
        return regrow(self.definition, self.leaves)[0]


class Note:
    """What a call of a method says of itself.

    Attributes:
        kind: The class of the Module.
        method: The name of the method.
        inputs: The arguments, as text.
        outputs: The result, as text; None if the method did not return.
        given: Module and arguments, as `Frozen`.
        shapes: The shapes of the values that the tap was given.
    """

    __slots__ = ("given", "inputs", "kind", "method", "outputs", "shapes")

    def __init__(self, kind: type, method: str, inputs: str, given: Frozen):
        self.kind = kind
        self.method = method
        self.inputs = inputs
        self.outputs: str | None = None
        self.given = given
        self.shapes: tuple[tuple[int, ...], ...] = ()


@register_dataclass
@dataclass(frozen=True, eq=False)
class Start:
    """The value that is tapped where a method starts: arrays, and a note."""

    arrays: list[Any]
    note: Note = field(metadata={"static": True})


CALLS = Listening(frozenset({Start}), None, False)


class Call(NamedTuple):
    """A call that would be made.

    Attributes:
        path: The Module, as the model holds it.
        note: What the call said.
        times: How often it runs, in loops and mappings; None if that is not known.
    """

    path: Path
    note: Note
    times: int | None


def abstract(value: Any) -> Any:
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


SUMMARY = Lift("summary", Mode.GRAPH)


def frozen(inputs: Inputs) -> Frozen:
    """Arguments that were taken apart, without their values."""
    leaves = jax.tree.map(abstract, tuple(inputs.values()), is_leaf=is_ref)
    return Frozen(inputs.definition, leaves)


def told(name: str, fn: Any, module: Any, args: Any, kwargs: Any) -> Any:
    """Runs a method, and tells of it: what `around_methods` is given."""
    inputs = SUMMARY.inputs((module, args), kwargs)
    note = Note(type(module), name, arguments_text(args, kwargs), frozen(inputs))
    found = jax.tree.leaves(inputs.values(), is_leaf=is_ref)
    arrays = [value for value in found if isinstance(value, jax.Array)]
    arrays = arrays or [TICKET]
    note.shapes = tuple(np.shape(value) for value in arrays)
    leaves, tree = jax.tree.flatten(Start(arrays, note))
    bind_tap(Label(name, Start, "call", tree), leaves)
    out = fn(module, *args, **kwargs)
    note.outputs = text_of(out)
    return out


def recorded(node: Any, method: str, args: Any, kwargs: Any, name: str) -> list[Call]:
    """The calls in a call of a method, itself first, in the order they start.

    Args:
        node: The object; it is not changed.
        method: The name of its method.
        args: The arguments, concrete or abstract; what is not an array is static.
        kwargs: Keyword arguments.
        name: The public function at work, for messages.
    """
    inputs = Lift(name, Mode.GRAPH).inputs((node, args), kwargs)
    arrays, restore = parted(inputs.values())
    known: list[Roots] = []

    def pure(arrays: list[Any]) -> None:
        with around_methods(around_methods.value), around_methods(told):
            run = run_quietly(inputs.definition, restore(arrays), method, CALLS)
        known.append(run.known)

    jaxpr = jax.make_jaxpr(pure)(arrays)
    names = _Names(node)
    found = _notes_in(jax_compat.opened(jaxpr)[0], (), 1)
    calls = (
        Call(resolve(scopes, known[0]).path, note, times)
        for scopes, note, times in found
    )
    return [call._replace(path=names.path_of(call)) for call in calls]


class Run(NamedTuple):
    """A call that was traced.

    Attributes:
        out: The result.
        leaves: The Variables and plain values of the arguments.
        known: What the capture knows that was open.
    """

    out: Any
    leaves: list[Any]
    known: Roots


QUIET = Listening(frozenset(), None, False)


def run_quietly(
    definition: Any, leaves: Any, method: str, asked: Listening = QUIET
) -> Run:
    """Calls a method of an object that is built anew, as in a capture.

    So `sow` and `perturb` do not store anything, and do not complain.

    Args:
        definition: Of object and arguments, as `told` takes them apart.
        leaves: Their values.
        method: The name of the method.
        asked: Which taps are heard.
    """
    tree, built = regrow(definition, leaves)
    (node, args), kwargs = tree["args"], tree["kwargs"]
    bound = getattr(node, method)
    roots = roots_of(bound, args, kwargs)

    def call(_: Any, *args: Any, **kwargs: Any) -> Any:
        return bound(*args, **kwargs)

    with listening(listening.value), rooted(roots) as known, listening(asked):
        if asked is QUIET or is_wrapped(getattr(type(node), method)):
            out = bound(*args, **kwargs)
        else:  # nobody else tells of it
            with inside(node):
                out = told(method, call, node, args, kwargs)
    return Run(out, built, known)


def parted(values: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The arrays in a tree, and what puts them back among the static leaves."""
    leaves, tree = jax.tree.flatten(values, is_leaf=is_ref)
    traced = [is_array(leaf) or is_ref(leaf) for leaf in leaves]

    def restore(arrays: list[Any]) -> Any:
        supply = iter(arrays)
        pairs = zip(leaves, traced)
        return tree.unflatten(next(supply) if flag else x for x, flag in pairs)

    return [leaf for leaf, flag in zip(leaves, traced) if flag], restore


def _notes_in(
    jaxpr: Any, scopes: tuple[str, ...], times: int | None
) -> Iterator[tuple[tuple[str, ...], Note, int | None]]:
    """The notes in a jaxpr and those inside it, with the scopes around them."""
    for eqn in jaxpr.eqns:
        here = (*scopes, *scopes_in(eqn.source_info.name_stack))
        if eqn.primitive is tap_p and eqn.params["label"].kind is Start:
            tree = eqn.params["label"].tree
            tapped = tree.unflatten(eqn.invars[: tree.num_leaves])
            rows = _rows_of(tapped)
            yield here, tapped.note, None if times is None else times * rows
            continue
        more = _iterations(eqn)
        inner = None if times is None or more is None else times * more
        for body in jaxprs_in_params(eqn.params):
            yield from _notes_in(jax_compat.opened(body)[0], here, inner)


def _iterations(eqn: Any) -> int | None:
    """How often an operation runs what is inside it; None if that is not known."""
    if eqn.primitive.name == "while":
        return None
    return jax_compat.scan_options(eqn.params).get("length", 1)


def _rows_of(start: Start) -> int:
    """How many rows of mappings a call stands for: the axes that values got in front.

    A mapping gives an axis to the values that it maps, and only to those.
    """
    sizes: Counter[int] = Counter()
    for var, own in zip(start.arrays, start.note.shapes):
        shape = var.aval.shape
        sizes |= Counter(shape[: len(shape) - len(own)])
    return math.prod(sizes.elements())


class _Names:
    """The paths of Modules that a function got as arguments, and scopes call by class.

    Inside a loop a Module is a slice of the one that the model holds. It can be no
    other if the model has only one, of the same class, that it could be a slice of.
    """

    def __init__(self, root: Any):
        self.nodes: dict[Path, Any] = {}
        for path, value, _ in places(root):
            if isinstance(value, Node):
                self.nodes.setdefault(path, value)
        self.known: dict[Path, Path] = {}

    def path_of(self, call: Call) -> Path:
        """The path that the model has for the Module of a call."""
        path, note = call.path, call.note
        for end in range(len(path) - 1, 0, -1):
            if path[:end] in self.known:
                path = (*self.known[path[:end]], *path[end:])
                break
        if path in self.nodes or not path or path[-1] != note.kind.__name__:
            return path
        around = path[:-1]
        slices = {
            place: _slices(note, node)
            for place, node in self.nodes.items()
            if type(node) is note.kind and place[: len(around)] == around
        }
        as_many = [place for place, count in slices.items() if count == call.times]
        fitting = as_many or [place for place, count in slices.items() if count]
        self.known.pop(call.path, None)
        if len(fitting) != 1:
            return path
        self.known[call.path] = fitting[0]
        return fitting[0]


def _slices(note: Note, node: Any) -> int:
    """How many Modules such as was called an object may hold, stacked; 0 if none."""
    module, _ = note.given.thawed()["args"]
    one, two = (frozen(Inputs(x, SUMMARY)) for x in (module, node))
    parts, wholes = jax.tree.leaves(one.leaves), jax.tree.leaves(two.leaves)
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
