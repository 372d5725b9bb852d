# SPDX-License-Identifier: Apache-2.0
"""Descriptions: all of a Record but its numbers, as plain JSON.

`described` takes a Record apart into a description and a list of leaves; `rebuilt` puts
one together from what a file says. A file may come from anybody: nothing is imported or
called by a name that it holds, and what is not as it should be raises `Malformed`.
"""

import collections
import dataclasses
import itertools
import unicodedata
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from treetap._capture.walk.spots import Axis
from treetap._core.earlier_names import present_name
from treetap._core.errors import CaptureError
from treetap._core.paths import is_named_tuple
from treetap._core.variables.kinds import all_kinds
from treetap._core.variables.values import is_key, is_ref, why_missing
from treetap._core.variables.variable import Variable
from treetap._observe.records import FirstAxes, Record, Site

PARTS = ("value", "grad", "taken", "count")
DEEPEST = 64  # levels of a value, or of a key
_FIELDS: dict[str, type] = {  # attributes of a site, and their types in JSON
    "path": list,
    "name": str,
    "index": int,
    "how": str,
    "wraps": list,
    "module": str,
}
_SCALARS = {kind.__name__: kind for kind in (bool, int, float, complex)}
_NAMES = (
    "bool int2 int4 int8 int16 int32 int64 uint2 uint4 uint8 uint16 uint32 uint64 "
    "float16 float32 float64 complex64 complex128 bfloat16 float8_e3m4 float8_e4m3 "
    "float8_e4m3fn float8_e4m3fnuz float8_e4m3b11fnuz float8_e5m2 float8_e5m2fnuz "
    "float8_e8m0fnu float4_e2m1fn"
)
DTYPES = {text: np.dtype(getattr(jnp, text)) for text in _NAMES.split()}


class Malformed(Exception):
    """A file describes something that cannot exist; the text says why."""


class Leaf(NamedTuple):
    """One array or number of a Record.

    Attributes:
        text: What it is called in a file.
        value: The array, or the data of random keys.
        site: Where it belongs.
        part: The attribute of the site that holds it.
    """

    text: str
    value: Any
    site: Site
    part: str


def leaf_text(site: str, keys: Sequence[Any], part: str) -> str:
    """What a leaf is called: `mlp:__call__`, `mlp:__call__.0`, `mlp:__call__@grad`."""
    tail = "".join(f".{key}" for key in keys)
    return f"{site}{tail}" if part == "value" else f"{site}{tail}@{part}"


# Taking apart.


def described(record: Record, name: str) -> tuple[list[Any], list[Leaf]]:
    """A Record as a description and a list of leaves.

    The description refers to a leaf by its number in the list.

    Args:
        record: What to take apart.
        name: The public function at work, for messages.
    """
    if not isinstance(record, Record):
        raise TypeError(
            f"{name}: a Record is wanted, not a {type(record).__name__}. `observe` "
            "gives one, beside the result."
        )
    leaves: dict[str, Leaf] = {}
    # `_site` adds to the leaves, which are read after it.
    return [_site(site, leaves, name) for site in record], list(leaves.values())


def _own_name(text: str, taken: Container[str]) -> str:
    """A name that no other leaf has: paths with 1 and with "1" give the same text."""
    if text == "__metadata__":  # safetensors reserves this name
        text = "__metadata__~"
    others = (f"{text}~{number}" for number in itertools.count(2))
    return next(own for own in itertools.chain([text], others) if own not in taken)


def _site(site: Site, leaves: dict[str, Leaf], name: str) -> dict[str, Any]:
    where = f"{name}: {site.text}"
    about: dict[str, Any] = {field: getattr(site, field) for field in _FIELDS}
    about["path"] = [_key(key, where) for key in site.path]
    about["wraps"] = list(site.wraps)
    bases = () if site.kind is None else site.kind.__mro__
    about["kind"] = [_full_name(cls) for cls in bases if issubclass(cls, Variable)]
    _refuse_statistics(site, where)
    for part in PARTS:
        value = getattr(site, part)
        if value is not None:
            about[part] = _Place(site, part, where, leaves).node(value, ())
    if site.first_axes is not None and site.value is not None:
        about["axes"] = _axes(site.first_axes)
    return about


def _axes(first: FirstAxes) -> dict[str, Any]:
    """First axes as JSON. Sizes are left out: the shapes of the arrays have them."""
    names = [[axis.kind, axis.name] for axis in first.levels]
    grads = [[[axis.kind, axis.name] for axis in axes] for axes in first.grads]
    value, taken, count = list(map(list, first.leaves)), first.taken, first.turns
    flags = {"taken": list(taken), "count": list(count)}
    return {"levels": names, "value": value, "grad": grads, **flags}


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _refuse_statistics(site: Site, where: str) -> None:
    """Refuses a site with statistics: files do not keep them, so they would be lost."""
    for field in dataclasses.fields(site):
        is_data = not field.metadata.get("static") and field.name not in PARTS
        if is_data and getattr(site, field.name) is not None:
            raise CaptureError(
                f"{where} has statistics (`{field.name}`), which are not kept. Keep "
                "values, or write `site.stats` by other means."
            )


class _Place(NamedTuple):
    """One tree of a site that is being described; `leaves` collects those of all."""

    site: Site
    part: str
    where: str
    leaves: dict[str, Leaf]

    def node(self, value: Any, keys: tuple[Any, ...]) -> Any:
        """The description of a tree, or of its subtree under some keys."""
        if value is None:
            return None
        if len(keys) > DEEPEST:
            raise CaptureError(
                f"{self.where} is nested more than {DEEPEST} levels deep."
            )
        kind = type(value)
        if kind in (tuple, list):
            items = [self.node(item, (*keys, n)) for n, item in enumerate(value)]
            return {kind.__name__: items}
        is_named = is_named_tuple(kind)
        if not is_named and kind is not dict:
            return self._leaf(value, keys)
        items = (value._asdict() if is_named else value).items()
        pairs = [[_key(k, self.where), self.node(x, (*keys, k))] for k, x in items]
        if is_named:
            return {"named": kind.__name__, "fields": pairs}
        return {"dict": pairs}

    def _leaf(self, value: Any, keys: tuple[Any, ...]) -> dict[str, Any]:
        about: dict[str, Any] = {"leaf": len(self.leaves)}
        held = value
        if type(value) in _SCALARS.values():
            about["python"] = type(value).__name__
            if type(value) is int and not -(2**63) <= value < 2**63:
                raise CaptureError(f"{self.where} is {value}, too large for 64 bits.")
            held = np.asarray(value)
        if why := _refused(held):
            raise CaptureError(
                f"{self.where} {why}. Take it apart, or leave it out with `select`."
            )
        if is_key(held):
            about["key"] = str(jax.random.key_impl(held))
            held = jax.random.key_data(held)
        text = _own_name(leaf_text(self.site.text, keys, self.part), self.leaves)
        self.leaves[text] = Leaf(text, held, self.site, self.part)
        return about


def _refused(value: Any) -> str:
    """Why a value cannot be kept; empty when it can."""
    if reason := why_missing(value, "keep it"):
        return reason
    if is_ref(value) or not isinstance(value, jax.Array | np.ndarray | np.generic):
        return f"holds a {type(value).__name__}, not arrays in tuples, lists and dicts"
    if is_key(value) or value.dtype.name in DTYPES:
        return ""
    return f"holds {value.dtype}, which is no type of numbers to keep"


def _key(key: Any, where: str) -> Any:
    """A key of a path or a dict as JSON, in which 1 and "1" differ."""
    if type(key) in (str, int):
        return key
    if key is None or type(key) in (bool, float):
        return {"plain": key}
    if type(key) is tuple:
        return {"tuple": [_key(part, where) for part in key]}
    raise CaptureError(
        f"{where} is at a key {key!r:.60}, which a file cannot hold. Use texts and "
        "numbers as keys."
    )


# Putting together.


def rebuilt(description: Any, leaves: Sequence[Any]) -> Record:
    """Builds a Record from its description and leaves; refuses it as `Malformed`.

    A kind of Variable is looked up by name among the classes that this program has. If
    it does not have the class, its nearest base counts. A named tuple becomes a new
    class of the same name and fields.
    """
    kinds: dict[str, type] = {_full_name(kind): kind for kind in all_kinds()}
    try:
        sites = wanted(description, list, "the list of sites")
        return Record(tuple(_rebuilt_site(about, leaves, kinds) for about in sites))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Malformed(f"{error!r:.200}") from error


def wanted(value: Any, kind: type, what: str) -> Any:
    """A value, which must be of that very type."""
    if type(value) is not kind:
        raise Malformed(f"{what} is {value!r:.60}, not a {kind.__name__}")
    return value


def checked_site(about: Any) -> dict[str, Any]:
    """Checks the description of a site; kinds get the names they have today."""
    wanted(about, dict, "a site")
    for field, kind in _FIELDS.items():
        wanted(about.get(field), kind, f"`{field}` of a site")
    names = wanted(about.get("kind", []), list, "`kind` of a site")
    kinds = [present_name(wanted(name, str, "a kind")) for name in names]
    return {**about, "kind": kinds}


def _rebuilt_site(about: Any, leaves: Sequence[Any], kinds: dict[str, type]) -> Site:
    about = checked_site(about)
    found = {field: about[field] for field in _FIELDS}
    found["path"] = tuple(map(_rebuilt_key, about["path"]))
    found["wraps"] = tuple(wanted(w, str, "an item of `wraps`") for w in about["wraps"])
    found["kind"] = next((kinds[n] for n in about["kind"] if n in kinds), None)
    parts = {part: _rebuilt_node(about.get(part), leaves, 0) for part in PARTS}
    if about.get("axes") is not None:
        found["first_axes"] = _rebuilt_axes(wanted(about["axes"], dict, "axes"), parts)
    return Site(**parts, **found)


def _rebuilt_axes(about: dict[str, Any], parts: dict[str, Any]) -> FirstAxes:
    """Builds first axes. Arrays that have an axis in common must agree on its size."""
    names = [_axis_name(name) for name in wanted(about["levels"], list, "levels")]
    sizes: dict[int, int] = {}

    def held(numbers: Any, array: Any) -> tuple[int, ...]:
        for number, size in _with_sizes(numbers, array):
            if sizes.setdefault(wanted(number, int, "a level"), size) != size:
                raise Malformed(f"level {number} has the sizes {sizes[number]}, {size}")
        return tuple(numbers)

    def own(axes: Any, array: Any) -> tuple[Axis, ...]:
        found = [(*_axis_name(axis), size) for axis, size in _with_sizes(axes, array)]
        return tuple(Axis(kind, size, name) for kind, name, size in found)

    leaves = _of_each(held, about["value"], parts["value"])
    grads = _of_each(own, about["grad"], parts["grad"])
    taken, turns = (held(about[part], parts[part]) for part in ("taken", "count"))
    if sorted(sizes) != list(range(len(names))):
        raise Malformed(f"axes of {sorted(sizes)}, and {len(names)} levels")
    levels = tuple(Axis(kind, sizes[n], name) for n, (kind, name) in enumerate(names))
    return FirstAxes(levels, leaves, taken, turns, grads)


def _with_sizes(axes: Any, array: Any) -> list[tuple[Any, int]]:
    """What a file says of the first axes of an array, each with its length."""
    shape = getattr(array, "shape", ())
    if len(wanted(axes, list, "axes of an array")) > len(shape):
        raise Malformed(f"an array of shape {shape} has {len(axes)} first axes")
    return list(zip(axes, shape))


def _of_each(read: Callable[..., Any], told: Any, tree: Any) -> tuple[Any, ...]:
    arrays = jax.tree.leaves(tree)
    if len(wanted(told, list, "axes of arrays")) != len(arrays):
        raise Malformed(f"axes of {len(told)} arrays, and there are {len(arrays)}")
    return tuple(map(read, told, arrays))


def _axis_name(told: Any) -> tuple[str, str | None]:
    kind, name = wanted(told, list, "an axis")
    if name is not None:
        wanted(name, str, "a name")
    return wanted(kind, str, "the kind of an axis"), name


def _rebuilt_node(node: Any, leaves: Sequence[Any], depth: int) -> Any:
    if node is None:
        return None
    if depth > DEEPEST + 1:
        raise Malformed(f"a value is nested more than {DEEPEST} levels deep")
    if "leaf" in wanted(node, dict, "a value"):
        return _rebuilt_leaf(node, leaves)
    for kind in (tuple, list):
        if kind.__name__ in node:
            items = wanted(node[kind.__name__], list, "a sequence of values")
            return kind(_rebuilt_node(item, leaves, depth + 1) for item in items)
    pairs = node["dict"] if "dict" in node else node["fields"]
    items = [(_rebuilt_key(k), _rebuilt_node(v, leaves, depth + 1)) for k, v in pairs]
    found = dict(items)
    if len(found) < len(items):  # 1 and True are one key, too
        raise Malformed("two items have the same key")
    if "dict" in node:
        return found
    names = [node["named"], *found]
    # Python reads a name in this form, in which two may be the same, or a keyword;
    # `namedtuple` itself refuses all else that is no name.
    if any(unicodedata.normalize("NFKC", name) != name for name in names):
        raise Malformed(f"no named tuple is {names!r:.80}")
    return collections.namedtuple(names[0], names[1:])(**found)


def _rebuilt_leaf(node: dict[str, Any], leaves: Sequence[Any]) -> Any:
    index = wanted(node["leaf"], int, "the number of a leaf")
    if not 0 <= index < len(leaves):
        raise Malformed(f"there is no leaf {index}")
    value = leaves[index]
    if "python" in node:
        kind = _SCALARS.get(str(node["python"]))
        if kind is None or value.shape != () or value.dtype.kind != np.dtype(kind).kind:
            raise Malformed(f"leaf {index} is no Python number")
        return kind(value)
    if "key" not in node:
        return value
    if value.dtype != np.uint32:
        raise Malformed(f"leaf {index} is {value.dtype}, which is no random key")
    try:
        return jax.random.wrap_key_data(jnp.asarray(value), impl=str(node["key"]))
    except (TypeError, ValueError) as error:
        told = str(error)
        raise Malformed(f"leaf {index} is no random key: {told!a:.200}") from error


def _rebuilt_key(key: Any, depth: int = 0) -> Any:
    if type(key) in (str, int):
        return key
    wanted(key, dict, "a key")
    if "tuple" in key and depth < DEEPEST:
        return tuple(_rebuilt_key(part, depth + 1) for part in key["tuple"])
    plain = key.get("plain", key)
    if plain is not None and type(plain) not in (bool, float):
        raise Malformed(f"a key is {key!r:.60}")
    return plain
