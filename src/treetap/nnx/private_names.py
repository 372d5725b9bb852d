# SPDX-License-Identifier: Apache-2.0
"""Private names of NNX that programs use all the same, and old names of Variables.

Importing this module gives them to `Variable`, `Pytree`, `GraphDef` and `GraphState`;
`treetap.nnx` imports it. Reading them shows what treetap keeps in its own way; what may
be assigned is written back.
"""

import warnings
from collections.abc import Callable
from typing import Any

from treetap._core.trace_level import is_foreign
from treetap._core.trees.graphdef import GraphDef, LeafSpec, Spec, parts_of
from treetap._core.trees.pytree import Pytree
from treetap._core.trees.split import GraphState
from treetap._core.trees.state import State
from treetap._core.variables.variable import Variable, further_attributes
from treetap.nnx.tracers import TraceState


class LiveMetadata(dict[str, Any]):
    """The metadata of a Variable as a dict; what is changed in it changes there."""

    def __init__(self, variable: Variable[Any]):
        super().__init__(variable.get_metadata())
        self._variable = variable


def _written_back(name: str) -> Callable[..., Any]:
    change = getattr(dict, name)

    def method(self: LiveMetadata, *args: Any, **kwargs: Any) -> Any:
        changed = dict(self)
        out = change(changed, *args, **kwargs)
        self._variable.set_metadata(changed)
        change(self, *args, **kwargs)
        return out

    return method


for _name in "__setitem__ __delitem__ update pop popitem setdefault clear".split():
    setattr(LiveMetadata, _name, _written_back(_name))


def _sharding_names(variable: Variable[Any]) -> Any:
    text = "'sharding_names' is deprecated, use 'out_sharding' instead."
    warnings.warn(text, DeprecationWarning, 3)
    return variable.get_metadata("out_sharding", None)


further_attributes.update(
    type=type,
    var_type=type,
    sharding_names=_sharding_names,
    to_state=lambda variable: variable.copy,
    _raw_value=lambda variable: variable.get_raw_value(),
    _can_update=lambda variable: not is_foreign(variable._trace),
)


class PytreeState:
    """What NNX keeps on an object beside its attributes.

    Attributes:
        trace_state: The level that the object belongs to.
        initializing: Only Linen's bridge sets it.
        is_setup: The same.
    """

    initializing = is_setup = _initializing = _is_setup = False

    def __init__(self, node: Pytree):
        self.trace_state = TraceState(node._pytree__trace)


def _status(node: Pytree) -> dict[str, bool]:
    """Which attributes are data; NNX lists its own two as well."""
    own = {str(name): is_data for name, is_data in node._pytree__status.items()}
    return {"_pytree__state": True, **own, "_pytree__nodes": False}


def _nodes(graphdef: GraphDef) -> list[Spec]:
    """The descriptions of objects, containers and Variables, outer ones first."""
    specs = (spec for _, spec in parts_of(graphdef.spec))
    return [spec for spec in specs if not isinstance(spec, LeafSpec)]


def _give_names() -> None:
    replace: Any = Variable.set_metadata
    given: dict[tuple[type, str], Any] = {
        (Variable, "_var_metadata"): property(LiveMetadata, replace),
        (Pytree, "_pytree__state"): property(PytreeState),
        (Pytree, "_pytree__nodes"): property(_status),
        (GraphDef, "nodes"): property(_nodes),
        (GraphState, "_state"): property(lambda state: State(state.raw_mapping)),
    }
    for (cls, name), held in given.items():
        setattr(cls, name, held)


_give_names()
