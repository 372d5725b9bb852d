# SPDX-License-Identifier: Apache-2.0
"""NNX's defaults: functions keep shared references, and transforms carry changes out.

The functions of treetap take `graph`, and transforms `graph_updates` as well. Where
nobody gives them, `treetap` decides by its settings, whose default is tree mode. Here
are the same settings with NNX's defaults, and `give_defaults`, by which the namespaces
`treetap.nnx` and `treetap.nnx.compat` decide otherwise: each says once what an option
is when a call leaves it out. A change of structure that stays inside a transform is no
error here, and draws no warning, unless a policy was set.
"""

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

from treetap._core import settings
from treetap._core.variables.kinds import Param
from treetap._train import ema, optimizer
from treetap._transforms.lift.lift import open_signature
from treetap._transforms.lift.structure_watch import IGNORE_UNLESS_SET

M = TypeVar("M")
Default = Callable[[], Any]


class set_graph_mode(settings.set_graph_mode, key="nnx_graph_mode", default=True):
    """As `treetap.set_graph_mode`; on here when nobody has set it."""


class set_graph_updates(
    settings.set_graph_updates, key="nnx_graph_updates", default=True
):
    """As `treetap.set_graph_updates`; on here when nobody has set it."""


def give_defaults(namespace: dict[str, Any], graph: Default, updates: Default) -> None:
    """Wraps the functions of a namespace that take a mode, in place.

    Args:
        namespace: Functions by name; those whose signature has `graph` are wrapped.
        graph: What `graph` is in a call that leaves it out, or gives None.
        updates: The same for `graph_updates`.
    """
    modes = _modes(graph, updates)
    for name, fn in list(namespace.items()):
        if name[0] != "_":
            namespace[name] = _with_modes(fn, modes)


def _modes(graph: Default, updates: Default) -> dict[str, Default]:
    modes = {"graph": graph, "graph_updates": updates}
    return {**modes, "on_structure_change": lambda: IGNORE_UNLESS_SET}


_NNX_MODES = _modes(set_graph_mode.current_value, set_graph_updates.current_value)


def with_default_modes(fn: Any) -> Any:
    """A function that takes a mode, with NNX's defaults; anything else as it is."""
    return _with_modes(fn, _NNX_MODES)


def _with_modes(fn: Any, modes: dict[str, Default]) -> Any:
    if not isinstance(fn, FunctionType):
        return fn
    wanted = modes.keys() & open_signature(fn).parameters
    given = {mode: modes[mode] for mode in wanted}
    return _with_defaults(fn, given) if given else fn


def _with_defaults(
    fn: Callable[..., Any], given: dict[str, Callable[[], Any]]
) -> Callable[..., Any]:
    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        for option, default in given.items():
            if kwargs.get(option) is None:
                kwargs[option] = default()
        return fn(*args, **kwargs)

    return call


def _graph_mode(graph: bool | None) -> bool:
    return set_graph_mode.current_value() if graph is None else graph


class Optimizer(optimizer.Optimizer[M]):
    """As `treetap.Optimizer`; in graph mode unless an argument or a setting says else.

    Args:
        model: What is trained, as for `treetap.Optimizer`.
        tx: An optax transformation.
        wrt: A filter: which Variables are trained.
        graph: Keep shared references.
    """

    def __init__(self, model: Any, tx: Any, *, wrt: Any, graph: bool | None = None):
        super().__init__(model, tx, wrt=wrt, graph=_graph_mode(graph))


class ModelAndOptimizer(optimizer.ModelAndOptimizer[M]):
    """A model with its optimizer in one object; new programs use `Optimizer`.

    Args:
        model: The model.
        tx: An optax transformation.
        wrt: A filter: what is trained.
    """

    def __init__(self, model: Any, tx: Any, *, wrt: Any = Param):
        super().__init__(model, tx, wrt=wrt, graph=_graph_mode(None))


class EMA(ema.EMA):
    """As `treetap.EMA`; in graph mode unless an argument or a setting says else.

    Args:
        params: What to average, as for `treetap.EMA`.
        decay: How much of the average stays.
        only: Which Variables to average.
        graph: Keep shared references.
    """

    def __init__(
        self, params: Any, decay: float, *, only: Any = ..., graph: bool | None = None
    ):
        super().__init__(params, decay, only=only, graph=_graph_mode(graph))
