# SPDX-License-Identifier: Apache-2.0
"""Texts: values by their types, as tables show them.

An array is its type and shape, `float32[2,3]`; an object of ours is its class; a
structure that holds any of these is written item by item, over several lines.
"""

from typing import Any

import jax
import numpy as np

from treetap._core.paths import (
    find_leaves,
    is_container,
    is_named_tuple,
    open_container,
)
from treetap._core.trees.attributes import Node
from treetap._core.variables.values import is_ref
from treetap._core.variables.variable import Variable
from treetap._core.wording import typed


def is_array(value: Any) -> bool:
    """Whether a value is an array, concrete, traced or abstract."""
    return isinstance(value, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def arguments_text(args: Any, kwargs: Any, is_all: bool = False) -> str:
    """Arguments of a call, a line for each unless there is only one.

    Keyword arguments that are None are left out, unless all are asked for: most are
    defaults, written out. If all are, strings have no quotes.
    """
    kwargs = {name: x for name, x in kwargs.items() if is_all or x is not None}
    if not kwargs and len(args) < 2:
        return text_of(args[0], not is_all) if args else ""
    lines = [_item("-", value, not is_all) for value in args]
    lines += [_item(f"{name}:", value, not is_all) for name, value in kwargs.items()]
    return "\n".join(lines)


def text_of(value: Any, quotes: bool = True) -> str:
    """A value by its types: arrays by shape, structures item by item.

    Args:
        value: The value.
        quotes: Whether a string has quotes.
    """
    if is_array(value) or is_ref(value):
        return typed(value)
    if isinstance(value, Variable):
        return f"{type(value).__name__} {text_of(value.get_raw_value())}"
    if isinstance(value, Node | type):
        return type(value).__name__ if isinstance(value, Node) else value.__name__
    if not is_container(value) or not find_leaves(value, _is_typed):
        return _short(value, quotes)
    return _container_text(value)


def _is_typed(value: Any) -> bool:
    return is_array(value) or isinstance(value, Variable | Node | jax.Ref)


def _container_text(value: Any) -> str:
    opened = open_container(value)
    if opened.type in (list, tuple):
        return "\n".join(_item("-", child) for child in opened.children)
    pairs = zip(opened.keys, opened.children)
    if opened.type is dict:  # in the order of insertion
        pairs = value.items()
    lines = [_item(f"{key}:", child) for key, child in pairs]
    if opened.type is dict or is_named_tuple(opened.type):
        return "\n".join(lines)
    return "\n".join([opened.type.__name__, *(f"  {line}" for line in lines)])


def _item(label: str, value: Any, quotes: bool = True) -> str:
    """One item of a structure: beside its label, or below it if it has many lines."""
    text = text_of(value, quotes)
    if "\n" not in text:
        return f"{label} {text}".rstrip()
    body = text.replace("\n", "\n  ")
    return f"{label} {body}" if label == "-" else f"{label}\n  {body}"


def _short(value: Any, quotes: bool) -> str:
    is_name = isinstance(value, str) and not quotes
    name = value if is_name else getattr(value, "__name__", None)
    text = (name if isinstance(name, str) else repr(value)).partition("\n")[0]
    return text if len(text) <= 40 else f"{text[:37]}..."
