# SPDX-License-Identifier: Apache-2.0
"""Descriptions: all of a Record but its numbers, as plain JSON.

`described` takes a Record apart into a description and a list of leaves; `rebuilt` puts
one together from what a file says. A file may come from anybody: nothing is imported or
called by a name that it holds, and what is not as it should be raises `Strange`.
"""

import collections
import dataclasses
import keyword
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from treetap._core.errors import CaptureError
from treetap._core.paths import is_named_tuple
from treetap._core.variables.values import is_gone, is_ref
from treetap._core.variables.variable import Variable
from treetap._observe.records import Record, Site

PARTS = ("value", "grad", "taken", "count")
DEEPEST = 64  # levels of a value, or of a key
_SCALARS: dict[str, type] = {
    "bool": bool,
    "int": int,
    "float": float,
    "complex": complex,
}
_KINDS = {bool: "b", int: "i", float: "f", complex: "c"}  # as numpy writes them


class Strange(Exception):
    """A description that none of ours can be; says how."""


class Leaf(NamedTuple):
    """One array or number of a Record.

    Attributes:
        text: What it is called in a file.
        value: The array, or the data of random keys.
        site: The number of its site.
        part: The attribute of the site that holds it.
    """

    text: str
    value: Any
    site: int
    part: str


def leaf_text(site: str, keys: Sequence[Any], part: str) -> str:
    """What a leaf is called: `mlp:__call__`, `mlp:__call__.0`, `mlp:__call__@grad`."""
    tail = "".join(f".{key}" for key in keys)
    return f"{site}{tail}" if part == "value" else f"{site}{tail}@{part}"


def is_key(value: Any) -> bool:
    """Whether a value is an array of typed random keys."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


# Taking apart.


def described(record: Record, name: str) -> tuple[list[Any], list[Leaf]]:
    """A Record as a description and its leaves, which the description counts.

    Args:
        record: What to take apart.
        name: The public function at work, for messages.
    """
    if not isinstance(record, Record):
        raise TypeError(
            f"{name}: a Record is wanted, not a {type(record).__name__}. `observe` "
            "gives one, beside the result."
        )
    leaves: list[Leaf] = []
    sites = [_site(site, number, leaves, name) for number, site in enumerate(record)]
    return sites, _distinct(leaves)


def _distinct(leaves: list[Leaf]) -> list[Leaf]:
    """Leaves with names of their own; paths with 1 and with "1" read alike."""
    found: dict[str, Leaf] = {}
    for leaf in leaves:
        start = leaf.text
        if start == "__metadata__":  # which the format has for itself
            start = "__metadata__~"
        own, count = start, 1
        while own in found:
            count += 1
            own = f"{start}~{count}"
        found[own] = leaf._replace(text=own)
    return list(found.values())


def _site(site: Site, number: int, leaves: list[Leaf], name: str) -> dict[str, Any]:
    where = f"{name}: {site.text}"
    about: dict[str, Any] = {
        "path": [_key(key, where) for key in site.path],
        "name": site.name,
        "index": site.index,
        "how": site.how,
        "wraps": list(site.wraps),
        "module": site.module,
    }
    if site.kind is not None:
        about["kind"] = [*_kind_names(site.kind)]
    _refuse_statistics(site, where)
    for part in PARTS:
        value = getattr(site, part)
        if value is not None:
            place = _Place(site.text, number, part, where, ())
            about[part] = _node(value, place, leaves)
    return about


def _refuse_statistics(site: Site, where: str) -> None:
    """Refuses what is neither value, gradient nor flag, rather than lose it."""
    for field in dataclasses.fields(site):
        is_data = not field.metadata.get("static") and field.name not in PARTS
        if is_data and getattr(site, field.name) is not None:
            raise CaptureError(
                f"{where} has statistics (`{field.name}`), which are not kept. Keep "
                "values, or write `site.stats` by other means."
            )


class _Place(NamedTuple):
    """Where in a Record something stands."""

    text: str
    site: int
    part: str
    where: str
    keys: tuple[Any, ...]

    def below(self, key: Any) -> "_Place":
        """The place of a child."""
        return self._replace(keys=(*self.keys, key))


def _node(value: Any, place: _Place, leaves: list[Leaf]) -> Any:
    if value is None:
        return None
    if len(place.keys) > DEEPEST:
        raise CaptureError(f"{place.where} is nested more than {DEEPEST} levels deep.")
    children = None
    if is_named_tuple(type(value)):
        children = [[f, getattr(value, f)] for f in type(value)._fields]
        found = [[f, _node(v, place.below(f), leaves)] for f, v in children]
        return {"named": type(value).__name__, "fields": found}
    if type(value) in (tuple, list):
        found = [_node(v, place.below(n), leaves) for n, v in enumerate(value)]
        return {type(value).__name__: found}
    if type(value) is dict:
        found = [
            [_key(k, place.where), _node(v, place.below(k), leaves)]
            for k, v in value.items()
        ]
        return {"dict": found}
    return _leaf(value, place, leaves)


def _leaf(value: Any, place: _Place, leaves: list[Leaf]) -> Any:
    about: dict[str, Any] = {"leaf": len(leaves)}
    if type(value) in _SCALARS.values():
        about["python"] = type(value).__name__
        if type(value) is int and not -(2**63) <= value < 2**63:
            raise CaptureError(f"{place.where} is {value}, too large for 64 bits.")
        held: Any = np.asarray(value)
    elif is_key(value):
        about["key"] = str(jax.random.key_impl(value))
        held = value
    else:
        held = value
    if why := _refused(held):
        raise CaptureError(
            f"{place.where} {why}. Take it apart, or leave it out with `select`."
        )
    if is_key(held):
        held = jax.random.key_data(held)
    text = leaf_text(place.text, place.keys, place.part)
    leaves.append(Leaf(text, held, place.site, place.part))
    return about


def _refused(value: Any) -> str:
    """Why a value cannot be kept; empty when it can."""
    if isinstance(value, Tracer):
        return "is being traced; keep it outside of transforms"
    if isinstance(value, jax.ShapeDtypeStruct):
        return "is abstract: it has a shape and no values"
    if is_ref(value) or not isinstance(value, jax.Array | np.ndarray | np.generic):
        return f"holds a {type(value).__name__}, not arrays in tuples, lists and dicts"
    if is_gone(value):
        return "was donated or deleted"
    if is_key(value) or value.dtype.name in DTYPES:
        return ""
    return f"holds {value.dtype}, which is no type of numbers to keep"


_NUMPY = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 "
_NUMPY += "float64 complex64 complex128"
_SMALL = "int2 int4 uint2 uint4 bfloat16 float8_e3m4 float8_e4m3 float8_e4m3fn "
_SMALL += "float8_e4m3fnuz float8_e4m3b11fnuz float8_e5m2 float8_e5m2fnuz "
_SMALL += "float8_e8m0fnu float4_e2m1fn"
DTYPES: dict[str, np.dtype[Any]] = {
    **{text: np.dtype(text) for text in _NUMPY.split()},
    **{
        text: np.dtype(getattr(jnp, text))
        for text in _SMALL.split()
        if hasattr(jnp, text)
    },
}


def _key(key: Any, where: str) -> Any:
    """A key of a path or a dict, as JSON that tells 1 from "1"."""
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


def _kind_names(kind: type) -> Iterator[str]:
    for cls in kind.__mro__:
        if issubclass(cls, Variable):
            yield f"{cls.__module__}.{cls.__qualname__}"


# Putting together.


def rebuilt(description: Any, leaves: Sequence[Any]) -> Record:
    """A Record from what a file says and its leaves; `Strange` if it says too little.

    The kind of Variable is one that this program knows: the nearest base, if it does
    not have the very class. A named tuple is one of the same name and fields.
    """
    kinds: dict[str, type] = {}
    waiting: list[type] = [Variable]
    while waiting:
        cls = waiting.pop()
        if kinds.setdefault(f"{cls.__module__}.{cls.__qualname__}", cls) is cls:
            waiting += cls.__subclasses__()
    sites = _wanted(description, list, "the list of sites")
    return Record(tuple(_rebuilt_site(about, leaves, kinds) for about in sites))


def _wanted(value: Any, kind: type, what: str) -> Any:
    if type(value) is not kind:
        raise Strange(f"{what} is {value!r:.60}, not a {kind.__name__}")
    return value


def _rebuilt_site(about: Any, leaves: Sequence[Any], kinds: dict[str, type]) -> Site:
    about = _wanted(about, dict, "a site")
    texts = {
        field: _wanted(about.get(field), str, f"`{field}` of a site")
        for field in ("name", "how", "module")
    }
    names = _wanted(about.get("kind", []), list, "`kind` of a site")
    found = [kinds[n] for n in names if isinstance(n, str) and n in kinds]
    wraps = _wanted(about.get("wraps"), list, "`wraps` of a site")
    return Site(
        **{part: _rebuilt_node(about.get(part), leaves, 0) for part in PARTS},
        path=tuple(map(_rebuilt_key, _wanted(about.get("path"), list, "`path`"))),
        index=_wanted(about.get("index"), int, "`index` of a site"),
        kind=found[0] if found else None,
        wraps=tuple(_wanted(wrap, str, "an item of `wraps`") for wrap in wraps),
        **texts,
    )


def _rebuilt_node(node: Any, leaves: Sequence[Any], depth: int) -> Any:
    if node is None:
        return None
    node = _wanted(node, dict, "a value")
    if depth > DEEPEST + 1:
        raise Strange(f"a value is nested more than {DEEPEST} levels deep")
    if "leaf" in node:
        return _rebuilt_leaf(node, leaves)
    pairs: Any = node.get("dict", node.get("fields"))
    if pairs is None:
        kind = list if "list" in node else tuple
        items = _wanted(node.get(kind.__name__), list, "a sequence of values")
        return kind(_rebuilt_node(item, leaves, depth + 1) for item in items)
    pairs = [_wanted(pair, list, "an item") for pair in _wanted(pairs, list, "items")]
    if any(len(pair) != 2 for pair in pairs):
        raise Strange("an item is not a key and a value")
    items = [(_rebuilt_key(k), _rebuilt_node(v, leaves, depth + 1)) for k, v in pairs]
    if "dict" in node:
        return _rebuilt_dict(items)
    fields = [key for key, _ in items]
    names = [node.get("named"), *fields]
    if not all(_is_name(n) for n in names) or len(set(fields)) < len(fields):
        raise Strange(f"no named tuple is {names!r:.80}")
    made = collections.namedtuple(names[0], fields)
    return made(*(value for _, value in items))


def _rebuilt_dict(items: list[tuple[Any, Any]]) -> dict[Any, Any]:
    found = dict(items)
    if len(found) < len(items):  # 1 and True are one key, too
        raise Strange("a dict has a key twice")
    return found


def _is_name(name: Any) -> bool:
    is_word = isinstance(name, str) and name.isidentifier()
    # Python reads a name in this form, in which two may be the same, or a keyword
    is_word = is_word and unicodedata.normalize("NFKC", name) == name
    return is_word and not keyword.iskeyword(name) and not name.startswith("_")


def _rebuilt_leaf(node: dict[str, Any], leaves: Sequence[Any]) -> Any:
    index = _wanted(node["leaf"], int, "the number of a leaf")
    if not 0 <= index < len(leaves):
        raise Strange(f"there is no leaf {index}")
    value = leaves[index]
    if "python" in node:
        kind = _SCALARS.get(str(node["python"]))
        if kind is None or np.shape(value) != () or value.dtype.kind != _KINDS[kind]:
            raise Strange(f"leaf {index} is no Python number")
        return kind(value)
    if "key" not in node:
        return value
    if value.dtype != np.uint32:
        raise Strange(f"leaf {index} is {value.dtype}, which is no random key")
    try:
        return jax.random.wrap_key_data(jnp.asarray(value), impl=str(node["key"]))
    except (TypeError, ValueError) as error:
        told = str(error)
        raise Strange(f"leaf {index} is no random key: {told!a:.200}") from error


def _rebuilt_key(key: Any, depth: int = 0) -> Any:
    if type(key) in (str, int):
        return key
    key = _wanted(key, dict, "a key")
    if "tuple" in key and depth < DEEPEST:
        parts = _wanted(key["tuple"], list, "a key")
        return tuple(_rebuilt_key(part, depth + 1) for part in parts)
    plain = key.get("plain", key)
    if plain is not None and type(plain) not in (bool, float):
        raise Strange(f"a key is {key!r:.60}")
    return plain
