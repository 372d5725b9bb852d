# SPDX-License-Identifier: Apache-2.0
"""Random models for the laws: trees of Modules, Variables, containers and statics."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import treetap as tt


class Node(tt.Module):
    """A Module with whatever attributes it is given."""

    def __init__(self, **attributes: Any):
        for name, value in attributes.items():
            setattr(self, name, value)


class Other(Node):
    """Another class, so that trees differ by type."""


class Special(tt.Param[Any]):
    """A kind of its own."""


KINDS = [tt.Variable, tt.Param, tt.BatchStat, Special]
NAMES = st.sampled_from(["a", "b", "c", "w10", "w9", "_hidden", "kernel"])

arrays = st.builds(
    lambda shape, fill, dtype: jnp.full(shape, fill, dtype),
    st.sampled_from([(), (2,), (2, 3)]),
    st.integers(-3, 3),
    st.sampled_from([jnp.float32, jnp.int32]),
)
metadata = st.dictionaries(
    st.sampled_from(["role", "group"]), st.integers(0, 2), max_size=1
)
values = st.one_of(arrays, st.integers(0, 5), st.floats(0, 1, width=32))
variables = st.builds(
    lambda kind, value, facts: kind(value, **facts),
    st.sampled_from(KINDS),
    values,
    metadata,
)
statics = st.one_of(st.integers(0, 9), st.text("xyz", max_size=2), st.none())
leaves = st.one_of(variables, variables, arrays)


def _containers(inner: Any) -> Any:
    plain = st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=2).map(tuple),
        st.dictionaries(NAMES, inner, max_size=3),
    )
    attributes = st.dictionaries(
        NAMES, st.one_of(inner, statics, plain.map(tt.data)), max_size=4
    )
    return st.one_of(
        attributes.map(lambda given: Node(**given)),
        attributes.map(lambda given: Other(**given)),
        st.lists(st.one_of(inner, statics), max_size=3).map(tt.List),
        st.dictionaries(NAMES, inner, max_size=3).map(tt.Dict),
    )


def _wrapped(inner: Any) -> Any:
    return _containers(inner).filter(lambda made: isinstance(made, tt.Module))


modules = st.recursive(_wrapped(leaves), _wrapped, max_leaves=8)

filters = st.lists(
    st.one_of(
        st.sampled_from(KINDS),
        st.sampled_from([tt.PathContains("a"), tt.Not(tt.Param), None]),
        st.just(lambda path, value: len(path) > 1),
    ),
    max_size=3,
).map(lambda chosen: [*chosen, ...])


def describe(value: Any, seen: dict[int, int] | None = None) -> Any:
    """Everything that can be seen of a value, in plain Python, sharing included."""
    if isinstance(value, tt.Variable | tt.Pytree) and seen is not None:
        if id(value) in seen:
            return "again", seen[id(value)]
        seen[id(value)] = len(seen)
    if isinstance(value, tt.Variable):
        inside = describe(value.get_raw_value(), seen)
        return type(value), inside, value.get_metadata()
    if isinstance(value, tt.Pytree):
        attributes = dict(vars(value))
        return type(value), [(k, describe(v, seen)) for k, v in attributes.items()]
    if isinstance(value, dict):
        # The order of a plain dict does not count, so it must not number objects.
        return dict, {key: describe(value[key], seen) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return type(value), [describe(item, seen) for item in value]
    if isinstance(value, jax.Array | np.ndarray):
        return value.dtype.name, value.shape, np.asarray(value).tolist()
    return type(value), value


def all_variables(model: Any) -> list[tt.Variable[Any]]:
    """The Variables of a model, each once."""
    found = [v for _, v in tt.iter_graph(model, graph=True)]
    return [value for value in found if isinstance(value, tt.Variable)]


@st.composite
def graphs(draw: Any) -> tt.Module:
    """Models with shared Variables and Modules, and cycles."""
    model = draw(modules)
    nodes = [
        value
        for _, value in tt.iter_graph(model, graph=True)
        if isinstance(value, Node)
    ]
    parts = [*all_variables(model), *nodes]
    if not nodes or not parts:
        return model
    for number in range(draw(st.integers(0, 3))):
        owner = draw(st.sampled_from(nodes))
        setattr(owner, f"alias{number}", draw(st.sampled_from(parts)))
    return model
