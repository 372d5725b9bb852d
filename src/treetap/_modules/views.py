# SPDX-License-Identifier: Apache-2.0
"""Views: new objects around the same Variables, with other modes set.

A view has Modules and containers of its own and shares Variables and arrays with the
original, so `view(model, deterministic=True)` is the same model, set to evaluate.
A class takes part by defining `set_view`, whose parameters all default to None ("leave
as is") and which may return the keywords it did not use.
"""

import inspect
import re
import textwrap
from collections.abc import Mapping
from typing import Any, TypeVar

from treetap._core.errors import StructureError
from treetap._core.settings import resolve_graph
from treetap._core.trees.attributes import Node
from treetap._core.trees.build import rebuilt
from treetap._core.trees.filters import Filter, predicate_of
from treetap._core.trees.traverse import nodes_below
from treetap._modules.module import Module, assign

M = TypeVar("M")

_ARGUMENTS = re.compile(r"^\s*(?:Args|Arguments):\s*\n((?:[ \t]+.*\n?|\n)*)", re.M)
_PARAMETER = re.compile(r"\*{0,2}(\w+)\s*(?:\(.*?\))?:\s*(.*?)\s*$")
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def has_view(node: Any) -> bool:
    """Whether an object takes part: by its class, not by what an instance makes up."""
    return callable(getattr(type(node), "set_view", None))


def _use(node: Any, kwargs: dict[str, Any]) -> set[str]:
    """Calls `set_view` with the keywords it takes; returns those it used."""
    parameters = inspect.signature(node.set_view).parameters.values()
    named = {p.name for p in parameters if p.kind in _NAMED}
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    given = kwargs if takes_all else {k: v for k, v in kwargs.items() if k in named}
    unused = node.set_view(**given)
    if isinstance(unused, Mapping):
        return set(given) - set(unused)
    return set(given)


def view(
    node: M,
    /,
    *,
    only: Filter = ...,
    raise_if_not_found: bool = True,
    graph: bool | None = None,
    **kwargs: Any,
) -> M:
    """A copy of `node` that shares its Variables, with modes set through `set_view`.

    Args:
        node: A Module, or any tree of them.
        only: Which objects to set.
        raise_if_not_found: Whether a keyword that nobody used is an error. What a
            `set_view` returns it did not use; whatever else it was given it used.
        graph: Keep shared references instead of refusing them.
        **kwargs: What to hand to `set_view`.

    Examples:
        >>> import treetap as tt
        >>> class Noise(tt.Module):
        ...     def __init__(self):
        ...         self.deterministic = False
        ...     def set_view(self, deterministic: bool | None = None):
        ...         if deterministic is not None:
        ...             self.deterministic = deterministic
        >>> noise = Noise()
        >>> tt.view(noise, deterministic=True).deterministic, noise.deterministic
        (True, False)
    """
    wanted = predicate_of(only)
    copied = rebuilt(node, resolve_graph(graph), "view")
    used: set[str] = set()
    for path, value in nodes_below(copied, Node, True, "view"):
        if has_view(value) and wanted(path, value):
            used |= _use(value, kwargs)
    unused = sorted(kwargs.keys() - used)
    if unused and raise_if_not_found:
        raise StructureError(
            f"Unused keys found in nnx.view: {unused}. No `set_view` in the "
            f"{type(node).__name__} takes them; `view_info` lists what can be set."
        )
    return copied


def with_attributes(
    node: M,
    /,
    *,
    only: Filter = ...,
    raise_if_not_found: bool = True,
    graph: bool | None = None,
    **attributes: Any,
) -> M:
    """A copy of `node` that shares its Variables, with attributes of Modules set.

    Args:
        node: A Module, or any tree of them.
        only: Which Modules.
        raise_if_not_found: Whether an attribute that no Module has is an error.
        graph: Keep shared references instead of refusing them.
        **attributes: Names and their new values.
    """
    copied = rebuilt(node, resolve_graph(graph), "with_attributes")
    modules = nodes_below(copied, Module, True, "with_attributes")
    assign(modules, (only,), attributes, raise_if_not_found, "with_attributes")
    return copied


def view_info(node: Any, /, *, only: Filter = ..., graph: bool | None = None) -> str:
    """Tells what `view` can set: the parameters of every `set_view` found.

    Args:
        node: A Module, or any tree of them.
        only: Which objects to look at.
        graph: Allow shared references.
    """
    wanted = predicate_of(only)
    found = nodes_below(node, Node, resolve_graph(graph), "view_info")
    classes = {
        type(value) for path, value in found if has_view(value) and wanted(path, value)
    }
    return "\n".join(map(_class_info, sorted(classes, key=lambda c: c.__qualname__)))


def _class_info(cls: type) -> str:
    """The part of `view_info` about one class."""
    method = cls.set_view
    signature = inspect.signature(method)
    lines = [f"{cls.__qualname__}:"]
    if (doc := inspect.getdoc(method)) is None:
        return "\n".join([*lines, f"  set_view{signature}"])
    texts = _described(doc)
    parameters = list(signature.parameters.values())[1:]
    for parameter in [each for each in parameters if each.kind in _NAMED]:
        kind = parameter.annotation
        line = f"  {parameter.name}"
        if kind is not parameter.empty:
            line += f": {kind.__name__ if isinstance(kind, type) else kind}"
        if parameter.default is not parameter.empty:
            line += f" = {parameter.default!r}"
        lines += [line, *texts.get(parameter.name, [])]
    return "\n".join(lines)


def _described(doc: str) -> dict[str, list[str]]:
    """Descriptions of parameters from the `Args:` section of a docstring."""
    section = _ARGUMENTS.search(doc)
    texts: dict[str, list[str]] = {}
    current: list[str] = []
    for line in textwrap.dedent(section[1]).splitlines() if section else ():
        if entry := _PARAMETER.match(line):
            current = texts.setdefault(entry[1], [])
        text = entry[2] if entry else line.strip()
        if text:
            current.append(f"    {text}")
    return texts
