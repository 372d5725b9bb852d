# SPDX-License-Identifier: Apache-2.0
"""Functions in graph mode and transforms with graph updates, whatever the settings.

    from treetap import compat

    @compat.jit
    def step(model): ...

A keyword still wins: `compat.split(model, graph=False)` is tree mode.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from treetap import (
    _batching,
    _branching,
    _compiling,
    _copies,
    _custom_rules,
    _differentiating,
    _fixing,
    _inspecting,
    _looping,
    _modules,
    _reseeding,
    _scanning,
    _sharding,
    _splitting,
    _views,
    _walks,
)


def _graph(fn: Callable[..., Any]) -> Callable[..., Any]:
    return partial(fn, graph=True)


def _updates(fn: Callable[..., Any]) -> Callable[..., Any]:
    return partial(fn, graph=True, graph_updates=True)


backup_keys = _graph(_reseeding.backup_keys)
clone = _graph(_copies.clone)
flatten = _graph(_splitting.flatten)
get_abstract_model = _graph(_sharding.get_abstract_model)
graphdef = _graph(_splitting.graphdef)
iter_children = _graph(_modules.iter_children)
iter_graph = _graph(_walks.iter_graph)
iter_modules = _graph(_modules.iter_modules)
recursive_map = _graph(_walks.recursive_map)
reseed = _graph(_reseeding.reseed)
split = _graph(_splitting.split)
state = _graph(_splitting.state)
view = _graph(_views.view)
view_info = _graph(_views.view_info)

cached_partial = _updates(_fixing.cached_partial)
checkify = _updates(_branching.checkify)
cond = _updates(_branching.cond)
custom_vjp = _updates(_custom_rules.custom_vjp)
eval_shape = _updates(_inspecting.eval_shape)
fori_loop = _updates(_looping.fori_loop)
fork_rngs = _updates(_reseeding.fork_rngs)
grad = _updates(_differentiating.grad)
jit = _updates(_compiling.jit)
jvp = _updates(_differentiating.jvp)
pmap = _updates(_batching.pmap)
remat = _updates(_differentiating.remat)
scan = _updates(_scanning.scan)
shard_map = _updates(_batching.shard_map)
split_rngs = _updates(_reseeding.split_rngs)
switch = _updates(_branching.switch)
value_and_grad = _updates(_differentiating.value_and_grad)
vjp = _updates(_differentiating.vjp)
vmap = _updates(_batching.vmap)
while_loop = _updates(_looping.while_loop)
