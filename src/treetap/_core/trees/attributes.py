# SPDX-License-Identifier: Apache-2.0
"""Attributes: which are data (children of the tree) and which are static.

Data are arrays, Variables, objects of ours, and values of types registered with
`register_data_type`; everything else is static and becomes part of the tree's
structure. The first assignment decides, `data(x)` and `static(x)` decide otherwise, and
so does an annotation in the class body. A static attribute never holds data: what would
be lost silently is refused.
"""

import dataclasses
import inspect
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, TypeVar, overload

import jax
import numpy as np

from treetap._core.errors import AttributeStatusError
from treetap._core.paths import find_leaves
from treetap._core.static_values import count_by_identity
from treetap._core.variables.metadata import MISSING
from treetap._core.variables.values import Marked
from treetap._core.variables.variable import Variable

T = TypeVar("T")
A = TypeVar("A")
C = TypeVar("C", bound=type)

_PLAIN_TYPES = frozenset(
    {bool, int, float, complex, str, bytes, type(None), types.FunctionType, type}
    | {types.BuiltinFunctionType, types.MethodType, type(...), range, slice, np.dtype}
)
_registered: set[type] = set()


class Node:
    """Base of every object of ours: what it keeps outside its attributes.

    `flat` caches children and static part, `spec` the description made from them,
    `place` is where it is in its parent, `status` maps attribute to is-data, and
    `trace` is the level the object belongs to. An object that may change unseen keeps
    `watched` in the place of `flat`; `exposed` says that its dict was handed out.
    """

    __slots__ = (
        "__dict__",
        "__weakref__",
        "_pytree__exposed",
        "_pytree__flat",
        "_pytree__place",
        "_pytree__spec",
        "_pytree__status",
        "_pytree__trace",
        "_pytree__watched",
    )
    _pytree__is_pytree: ClassVar[bool] = True  # whether JAX may flatten it


count_by_identity(Node)


def is_object(value: Any) -> bool:
    """Whether a value has an identity of ours: a Variable, or an object around some."""
    return isinstance(value, Node | Variable)


_DATA_TYPES = (Variable, Node, np.ndarray, np.generic, jax.Array, jax.Ref)


def _marked(name: str, value: Any, options: dict[str, Any]) -> Any:
    """What `data` and `static` give: a marked value, or a marked field."""
    is_data = name == "data"
    if value is not MISSING and options:
        raise TypeError(
            f"{name}(): give either a value or the options of `dataclasses.field`, "
            f"not both (got {sorted(options)})."
        )
    if value is not MISSING:
        return Marked(value, is_data)
    metadata = dict(options.pop("metadata", None) or {})
    if "static" in metadata:
        raise AttributeStatusError(
            f"{name}(): `metadata` may not contain 'static'; the function's name says "
            "it."
        )
    return dataclasses.field(metadata={**metadata, "static": not is_data}, **options)


def data(value: T = MISSING, /, **options: Any) -> T:
    """Marks a value, or a field of a class, as data.

    Args:
        value: The value to assign; `self.blocks = data([...])`.
        **options: Options of `dataclasses.field`, for use in a class body.

    Examples:
        >>> import treetap as tt
        >>> class Sum(tt.Module):
        ...     def __init__(self):
        ...         self.parts = tt.data([tt.Param(1.0), tt.Param(2.0)])
        >>> len(tt.to_flat_state(tt.state(Sum())))
        2
    """
    return _marked("data", value, options)


def static(value: T = MISSING, /, **options: Any) -> T:
    """Marks a value, or a field of a class, as static.

    Args:
        value: The value to assign; `self.shape = static((2, 3))`.
        **options: Options of `dataclasses.field`, for use in a class body.
    """
    return _marked("static", value, options)


def register_data_type(kind: C) -> C:
    """Makes values of exactly this type count as data; usable as a decorator."""
    _registered.add(kind)
    return kind


def is_data(value: Any) -> bool:
    """Whether an attribute holding `value` is data by itself.

    Examples:
        >>> import numpy as np, treetap as tt
        >>> tt.is_data(np.zeros(2)), tt.is_data(1.0), tt.is_data([np.zeros(2)])
        (True, False, False)
    """
    kind = type(value)
    if kind in _PLAIN_TYPES:
        return False
    return isinstance(value, _DATA_TYPES) or kind in _registered


def _is_data_inside(value: Any) -> bool:
    # A numpy scalar in a container, such as a shape, is as good as a number.
    return is_data(value) and not isinstance(value, np.generic)


def has_data(value: Any) -> list[Any]:
    """The data inside a value: itself, or found in its containers."""
    if type(value) in _PLAIN_TYPES:  # quick, and so for most statics
        return []
    return [value] if is_data(value) else find_leaves(value, _is_data_inside)


def _has_marked(value: Any) -> bool:
    return bool(find_leaves(value, lambda x: isinstance(x, Marked), (Variable, Node)))


def _where(owner: str, name: Any) -> str:
    """An attribute or item, as people would write it."""
    return f"{owner}[{name}]" if isinstance(name, int) else f"{owner}.{name}"


def classify(
    owner: str, name: Any, value: Any, status: bool | None
) -> tuple[Any, bool]:
    """Decides what an assignment stores, and whether as data.

    Args:
        owner: The class whose attribute it is.
        name: The attribute, or the position in a List.
        value: What is assigned.
        status: True or False when the attribute is data or static already.
    """
    kind = type(value)
    if kind in _PLAIN_TYPES:
        return value, bool(status)
    if kind is Marked:
        return _unmarked(_where(owner, name), value)
    if is_data(value):
        if status is False:
            if isinstance(value, np.generic):
                return value, False
            raise AttributeStatusError(
                f"{_where(owner, name)}: cannot assign data of type {kind.__name__} to "
                "a static attribute. Wrap it with `data(...)`, or make the attribute "
                f"data from the start: `self.{name} = data(None)`."
            )
        return value, True
    if _has_marked(value):
        raise AttributeStatusError(
            f"{_where(owner, name)}: `data(...)` or `static(...)` inside a "
            f"{kind.__name__}. Wrap the whole value, or use `List` or `Dict`."
        )
    if not status and (found := has_data(value)):
        raise AttributeStatusError(
            f"{_where(owner, name)}: Found data on value of type {kind.__name__}: it "
            f"holds {_kinds(found)}, but a {kind.__name__} is static. Wrap it with "
            "`data(...)`, annotate the class (`x: T = data()`), use `List` or `Dict`, "
            "take the data out, or declare the class with `pytree=False`."
        )
    return value, bool(status)


def _unmarked(where: str, marked: Marked) -> tuple[Any, bool]:
    value = marked.value
    if isinstance(value, Marked) or _has_marked(value):
        raise AttributeStatusError(f"{where}: `data` or `static` inside {marked!r}.")
    if not marked.is_data and (found := has_data(value)):
        raise AttributeStatusError(
            f"{where}: Found data in value of type {type(value).__name__} given as "
            f"static: {_kinds(found)}. Use `data(...)`, or take the data out."
        )
    return value, marked.is_data


def _kinds(found: list[Any]) -> str:
    return ", ".join(sorted({type(leaf).__name__ for leaf in found}))


def check_statics(node: Node, held: dict[Any, Any], status: dict[Any, bool]) -> None:
    """Raises when a static attribute of an object has come to hold data."""
    for name, is_data_attribute in status.items():
        if is_data_attribute or isinstance(held[name], np.generic):
            continue  # numpy's numbers may be assigned to static attributes
        if found := has_data(held[name]):
            raise AttributeStatusError(
                f"{_where(type(node).__name__, name)}: Found unexpected data on value "
                f"of type {type(held[name]).__name__}: the attribute is static and now "
                f"holds {_kinds(found)}. Wrap the value with `data(...)` when it is "
                "assigned, or use `List` or `Dict`."
            )


# NNX's former way to mark a field of a class: `x: Data[int]`.
Data = Annotated[A, "__data__"]
Static = Annotated[A, "__static__"]
_MARKS = {"__data__": True, "__static__": False}
_MARKS |= {"Data": True, "nnx.Data": True, "Static": False, "nnx.Static": False}


def _annotated_status(cls: type) -> dict[str, bool]:
    """The status of the attributes that are annotated as `Data` or `Static`."""
    try:
        hints = inspect.get_annotations(cls)
    except NameError:  # of a name that is defined later
        return {}
    status: dict[str, bool] = {}
    for name, hint in hints.items():
        told = getattr(hint, "__metadata__", ())
        if isinstance(hint, str):
            told = (hint.strip("'\"").partition("[")[0],)
        for mark in told:
            if not (isinstance(mark, str) and mark in _MARKS):
                continue
            status[name] = _MARKS[mark]
            kind = "data" if status[name] else "static"
            text = f"`{name}: {kind.title()}[...]` is deprecated; write `{name}: ... = "
            warnings.warn(f"{cls.__name__}: {text}{kind}()`.", DeprecationWarning, 5)
    return status


def class_status(cls: type, inherited: Mapping[str, bool]) -> dict[str, bool]:
    """The status that annotations in a class body give its attributes."""
    status = {**inherited, **_annotated_status(cls)}
    for name, value in list(vars(cls).items()):
        if isinstance(value, Marked):
            own = value.is_data
            type.__setattr__(cls, name, value.value)
        elif isinstance(value, dataclasses.Field) and "static" in value.metadata:
            if not isinstance(value.metadata["static"], bool):
                raise AttributeStatusError(
                    f"{cls.__name__}.{name}: the field's metadata 'static' must be "
                    f"True or False, not {value.metadata['static']!r}."
                )
            own = not value.metadata["static"]
        else:
            continue
        if status.setdefault(name, own) != own:
            raise AttributeStatusError(
                f"{cls.__name__}.{name} is annotated as "
                f"{'data' if own else 'static'}, but a base class says the opposite."
            )
    return status


@overload
def dataclass(cls: C, /) -> C: ...
@overload
def dataclass(**options: Any) -> Callable[[C], C]: ...
def dataclass(cls: Any = None, /, **options: Any) -> Any:
    """`dataclasses.dataclass` for Modules: keeps the readable `repr`.

    Examples:
        >>> import treetap as tt
        >>> @tt.dataclass
        ... class Scale(tt.Module):
        ...     factor: tt.Param
        ...     power: int = 1
        >>> Scale(tt.Param(2.0)).power
        1
    """
    options.setdefault("repr", False)
    return dataclasses.dataclass(cls, **options)
