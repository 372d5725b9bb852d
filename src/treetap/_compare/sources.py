# SPDX-License-Identifier: Apache-2.0
"""Sides: what is compared, as a list of named arrays, wherever it comes from.

A side is made from a Record, a mapping of names to arrays, or a safetensors file: one
of `save_record`, or of any other program. Nothing is read before it is measured.
"""

import functools
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.tree_util import tree_flatten_with_path

from treetap._capture.selectors import Select, as_select
from treetap._capture.walk.spots import Axis
from treetap._core.errors import CaptureError
from treetap._core.paths import plain_key
from treetap._core.variables.values import is_key, why_missing
from treetap._core.wording import escaped, shown
from treetap._io.record_descriptions import PARTS, leaf_text
from treetap._io.record_file import ABOUT, ORDER, record_in
from treetap._io.safetensors_file import tensors_and_texts
from treetap._observe.records import Record, Site, axes_of


@dataclass(frozen=True)
class Entry:
    """One array of a side.

    Attributes:
        text: Its name, as people and rules write it; without the part.
        part: `value`, `grad`, `taken` or `count`.
        site: What selectors look at.
        shape: Of the array.
        dtype: Of its numbers.
        read: Gives the array.
        axes: What its first axes are.
        layers: Which iterations of the loops around it are meant, outermost first.
        own_shape: The shape where it comes from, when `shape` is that of a partner.
        pieces: What it is stacked of along its first axis, if it is.
    """

    text: str
    part: str
    site: Site
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[], np.ndarray]
    axes: tuple[Axis, ...] = ()
    layers: tuple[int, ...] = ()
    own_shape: tuple[int, ...] | None = None
    pieces: tuple["Entry", ...] = ()

    @property
    def label(self) -> str:
        """Its name in tables and messages."""
        layers = "".join(f"[{number}]" for number in self.layers)
        return escaped(leaf_text(f"{self.text}{layers}", (), self.part))


Side = list[Entry]


def without_call(text: str) -> str:
    """A name with `:__call__` left out, as people write it for short."""
    return re.sub(r"(^|:)__call__(?=$|[.#])", "", text)


def side_of(given: Any, what: str) -> Side:
    """The arrays of something that can be compared.

    Args:
        given: A Record, a mapping, or the path of a file.
        what: Which argument it is, for messages.
    """
    if isinstance(given, Record):
        found = _of_record(given, f"compare: `{what}`")
    elif isinstance(given, Mapping):
        found = _of_mapping(given, f"compare: `{what}`")
    elif isinstance(given, str | os.PathLike):
        found = _of_file(given)
    else:
        raise TypeError(
            f"compare: `{what}` is a Record, a mapping of names to arrays, or the path "
            f"of a safetensors file, not a {type(given).__name__}."
        )
    if not found:
        raise CaptureError(f"compare: `{what}` has no values to compare.")
    return found


def by_selector(given: Any) -> list[tuple[Select, Any]]:
    """An option for all sites, or for those of some selectors, as rules to go through.

    Rules that are None are left out.
    """
    rules = given if isinstance(given, Mapping) else {"**": given}
    return [(as_select(k), value) for k, value in rules.items() if value is not None]


# Records.


def _of_record(record: Record, where: str) -> Side:
    found: Side = []
    for site, part in itertools.product(record, PARTS):
        found += _below(getattr(site, part), site.text, part, site, where)
    return found


def _below(value: Any, text: str, part: str, site: Site, where: str) -> Iterator[Entry]:
    """What a value holds, each array by its name inside the value."""
    try:
        leaves, _ = tree_flatten_with_path(value)
    except ValueError as error:
        raise CaptureError(
            f"{where}: {shown(text)} has a dict that JAX takes no values from: its "
            "keys are of several types, and have no order."
        ) from error
    for number, (keys, leaf) in enumerate(leaves):
        below = leaf_text(text, [plain_key(key) for key in keys], "value")
        axes = axes_of(site, part, number)
        yield replace(_entry(below, part, site, leaf, where), axes=axes)


def _entry(text: str, part: str, site: Site, leaf: Any, where: str) -> Entry:
    leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    if reason := _refused(leaf):
        raise CaptureError(f"{where}: {shown(leaf_text(text, (), part))} {reason}.")
    leaf = jax.random.key_data(leaf) if is_key(leaf) else leaf
    shape, dtype = np.shape(leaf), np.dtype(leaf.dtype)
    return Entry(text, part, site, shape, dtype, lambda: np.asarray(leaf))


def _refused(leaf: Any) -> str:
    """Why an array cannot be compared; empty when it can."""
    if reason := why_missing(leaf, "compare it"):
        return reason
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return "lies on devices of other processes; gather it first"
    if not is_key(leaf) and np.dtype(leaf.dtype).kind in "OSUM":
        return f"is {leaf.dtype}, which is no array of numbers"
    return ""


# Names and arrays.


def _of_mapping(given: Mapping[Any, Any], where: str) -> Side:
    found: Side = []
    for key, value in given.items():
        if not isinstance(key, str):
            raise TypeError(f"{where} maps names to arrays; {key!r:.60} is no name.")
        text, part = _parted(key)
        found += _below(value, text, part, _site_named(text), where)
    return found


def _parted(key: str) -> tuple[str, str]:
    """The name of a site, and which part of it is meant."""
    text, _, part = key.partition("@")
    return (text, part) if part in PARTS else (key, "value")


def _site_named(text: str) -> Site:
    """A site for selectors, from a name that may be of any program."""
    body, _, index = text.partition("#")
    path, colon, name = body.rpartition(":")
    if not colon:
        path, name = body, "__call__"
    parts = [part for part in re.split(r"[/.]", path) if part]
    keys = tuple(int(p) if re.fullmatch(r"\d{1,9}", p) else p for p in parts)
    number = re.match(r"\d{1,9}", index)
    return Site(None, path=keys, name=name, index=int(number[0]) if number else 0)


# Files.


def _of_file(path: str | os.PathLike[str]) -> Side:
    stored, texts = tensors_and_texts(path, "compare")
    if ABOUT in texts:
        record = record_in(path, stored, texts[ABOUT], lambda a, _: a, "compare")
        return _of_record(record, f"compare: {path}")
    found: Side = []
    for key in _ordered(stored, texts.get(ORDER)):
        tensor = stored[key]
        if (dtype := tensor.dtype) is None:
            raise CaptureError(
                f"compare: {key!r:.80} in {path} is {tensor.code}, which JAX does not "
                "have."
            )
        text, part = _parted(key)
        read = functools.partial(tensor.view, "compare")
        found.append(Entry(text, part, _site_named(text), tensor.shape, dtype, read))
    values = [entry.text for entry in found if entry.part == "value"]
    ranks = {text: rank for rank, text in enumerate(values)}
    # gradients stand as their values do, whatever the order they came in
    return sorted(found, key=lambda entry: ranks.get(entry.text, len(ranks)))


def _ordered(stored: Mapping[str, Any], text: str | None) -> list[str]:
    """Names in the order in which they were computed, if the file has it."""
    try:
        order = json.loads(text or "[]")
    except (ValueError, RecursionError):
        order = []
    names = order if isinstance(order, list) else []
    known = [key for key in names if isinstance(key, str) and key in stored]
    return [*dict.fromkeys([*known, *sorted(stored)])]
