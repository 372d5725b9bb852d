# SPDX-License-Identifier: Apache-2.0
"""Rows: the distinct calls in a model, each with what its Module holds.

Calls of one method of one Module with arguments of the same types make one row; a
Module that stands at several places has one path, the first. Sizes are counted by kind
of Variable, each Variable once, the states of random streams together, arrays that no
Variable holds as kind `Array`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from treetap._core.display import Size, size_of
from treetap._core.errors import StructureError
from treetap._core.paths import Path
from treetap._core.trees.attributes import Node
from treetap._core.trees.pytree import by_kind, opened
from treetap._core.trees.sharing import places
from treetap._core.variables.kinds import Param
from treetap._core.variables.variable import Variable, raw_values
from treetap._modules.containers import Dict, List
from treetap._report.calls import Call, nodes_of, recorded
from treetap._report.flops import Flops
from treetap._report.texts import is_array


@dataclass(frozen=True)
class Row:
    """One method of one Module, called with arguments of some types.

    Attributes:
        path: Where the model holds the Module.
        type: Its class.
        method: The name of the method.
        inputs: The arguments, as text.
        outputs: The result, as text; empty if the method raised.
        calls: How often it is called, in loops and mappings too; None if that depends
            on values.
        sizes: What the Module and everything inside it holds, by kind of Variable.
        parameters: Elements of the Params among that.
        nbytes: Bytes of those Params.
        own_parameters: Elements of the Params that no object inside it holds.
        flops: FLOPs of one call; None if they were not asked for, or are not known.
        vjp_flops: The same with derivatives.
    """

    path: Path
    type: type
    method: str
    inputs: str
    outputs: str
    calls: int | None
    sizes: tuple[tuple[str, Size], ...]
    parameters: int
    nbytes: int
    own_parameters: int
    flops: int | None = None
    vjp_flops: int | None = None

    @property
    def text(self) -> str:
        """Path and method: `blocks/3/attn`, `blocks/3:encode`."""
        return self.text_below(0)

    def text_below(self, level: int, as_key: bool = False) -> str:
        """The same, without the first keys of the path.

        Args:
            level: How many keys to leave out.
            as_key: Whether the method is written as one more key, as NNX does.
        """
        method = [] if self.method == "__call__" else [self.method]
        keys = [*map(str, self.path[level:]), *(method if as_key else ())]
        return "/".join(keys) + "".join(f":{name}" for name in method if not as_key)

    def to_dict(self) -> dict[str, Any]:
        """Names, numbers and texts only."""
        found = {**vars(self), "path": "/".join(map(str, self.path))}
        found["type"] = self.type.__name__
        found["bytes"] = found.pop("nbytes")
        return {**found, "sizes": sizes_dict(self.sizes)}


def sizes_dict(sizes: Iterable[tuple[str, Size]]) -> dict[str, dict[str, int]]:
    """Sizes by kind, as plain numbers."""
    return {k: {"elements": x.elements, "bytes": x.nbytes} for k, x in sizes}


def leaves_below(root: Any) -> Iterable[Any]:
    """Variables, and arrays outside of them, each once."""
    values = (value for _, value in places(root))
    found = (x for x in values if isinstance(x, Variable) or is_array(x))
    return {id(leaf): leaf for leaf in found}.values()


def sizes_of(root: Any) -> tuple[tuple[str, Size], ...]:
    """Sizes by kind of Variable of all that is below a value, kinds sorted."""
    found = by_kind(leaves_below(root))
    return tuple((kind, size_of(found[kind])) for kind in sorted(found))


def parameters_of(leaves: Iterable[Any]) -> Size:
    """The size of the Params among Variables and arrays."""
    return size_of(raw_values(value for value in leaves if isinstance(value, Param)))


def own_leaves(value: Any, path: Path = ()) -> Iterator[tuple[str, Any]]:
    """Variables and arrays that an object holds itself, in containers too.

    Args:
        value: The object, or what was found in it.
        path: Where in the object that was.
    """
    if isinstance(value, Variable) or is_array(value):
        yield "/".join(map(str, path)), value
    elif not path or isinstance(value, List | Dict) or not isinstance(value, Node):
        for key, child in zip(*(opened(value) or ((), ()))):
            yield from own_leaves(child, (*path, key))


def rows_of(
    node: Any,
    method: str,
    args: Any,
    kwargs: Any,
    name: str,
    *,
    depth: int | None,
    figures: Sequence[str],
    as_nnx: bool = False,
) -> list[tuple[Row, Any]]:
    """The rows of a call, each with its Module (or an abstract copy of it).

    They are in the order in which the calls start.

    Args:
        node: The model; it is not changed.
        method: The method to call.
        args: Its arguments.
        kwargs: Its keyword arguments.
        name: The public function at work, for messages.
        depth: How long the paths of rows may be.
        figures: What is counted of `flops` and `vjp_flops`.
        as_nnx: As in NNX's tables: methods but `__call__` count as a key of the path,
            inputs that are None are shown, and of the calls of a Module with the same
            inputs, whatever the methods, there is the one that returned first.
    """
    _check(node, method, depth, name)
    at = nodes_of(node)
    counter = Flops(as_nnx)
    found: list[tuple[Row, Any]] = []
    for call in _distinct(recorded(node, method, args, kwargs, name), as_nnx):
        note, path = call.note, call.path
        is_key = as_nnx and note.given.method != "__call__"
        if depth is not None and found and len(path) + is_key > depth:
            continue
        module = at.get(call.path)
        if module is None:  # not part of the model: an argument, or made on the way
            module = note.given.node
        parameters = parameters_of(leaves_below(module))
        row = Row(
            path=call.path,
            type=note.kind,
            method=note.given.method,
            inputs=note.all_inputs if as_nnx else note.inputs,
            outputs=note.outputs or "",
            calls=call.times,
            sizes=sizes_of(module),
            parameters=parameters.elements,
            nbytes=parameters.nbytes,
            own_parameters=parameters_of(x for _, x in own_leaves(module)).elements,
            flops=counter.forward(note) if "flops" in figures else None,
            vjp_flops=counter.backward(note) if "vjp_flops" in figures else None,
        )
        found.append((row, module))
    return found


def _distinct(calls: Iterable[Call], as_nnx: bool) -> list[Call]:
    """One call for each Module, method and types of arguments; times are added."""
    found: dict[Any, Call] = {}
    for call in calls:
        note = call.note
        of = note.all_inputs if as_nnx else (note.given.method, note.inputs)
        key = call.path, of
        known = found.get(key)
        if known is None or (as_nnx and note.rank < known.note.rank):
            found[key] = call
        elif known.times is not None:
            times = None if call.times is None else known.times + call.times
            found[key] = known._replace(times=times)
    return list(found.values())


def _check(node: Any, method: str, depth: int | None, name: str) -> None:
    """Refuses what has no such method, with what there is."""
    if not isinstance(node, Node):
        raise TypeError(
            f"{name}: expected a Module or another Pytree object, got a "
            f"{type(node).__name__}. Pass the object whose method is to be called."
        )
    if not callable(getattr(type(node), method, None)):
        raise AttributeError(
            f"{name}: {type(node).__name__} has no method {method!r}. Name one of its "
            "methods with `method=`."
        )
    if depth is not None and depth < 0:
        raise StructureError(
            f"{name}: `depth` is {depth}; it is the length of the longest path to "
            "show: 0 for the object itself, 1 for what it holds, and so on."
        )
