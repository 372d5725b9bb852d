# SPDX-License-Identifier: Apache-2.0
"""Functions in graph mode and transforms with graph updates, whatever the settings.

    from treetap.nnx import compat as compat

    @compat.jit
    def step(model): ...

A keyword still wins: `compat.split(model, graph=False)` is tree mode.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from treetap._core.trees import copies as _copies
from treetap._core.trees import split as _split
from treetap._core.trees import traverse as _traverse
from treetap._modules import module as _module
from treetap._modules import random_rules as _random_rules
from treetap._modules import views as _views
from treetap._transforms import cond as _cond
from treetap._transforms import custom_vjp as _custom_vjp
from treetap._transforms import grad as _grad
from treetap._transforms import inspect as _inspect
from treetap._transforms import jit as _jit
from treetap._transforms import jit_partial as _jit_partial
from treetap._transforms import loops as _loops
from treetap._transforms import scan as _scan
from treetap._transforms import sharding as _sharding
from treetap._transforms import vmap as _vmap


def _graph(fn: Callable[..., Any]) -> Callable[..., Any]:
    return partial(fn, graph=True)


def _updates(fn: Callable[..., Any]) -> Callable[..., Any]:
    return partial(fn, graph=True, graph_updates=True)


backup_keys = _graph(_random_rules.backup_keys)
clone = _graph(_copies.clone)
flatten = _graph(_split.flatten)
get_abstract_model = _graph(_sharding.get_abstract_model)
graphdef = _graph(_split.graphdef)
iter_children = _graph(_module.iter_children)
iter_graph = _graph(_traverse.iter_graph)
iter_modules = _graph(_module.iter_modules)
recursive_map = _graph(_traverse.recursive_map)
reseed = _graph(_random_rules.reseed)
split = _graph(_split.split)
state = _graph(_split.state)
view = _graph(_views.view)
view_info = _graph(_views.view_info)

cached_partial = _updates(_jit_partial.cached_partial)
checkify = _updates(_cond.checkify)
cond = _updates(_cond.cond)
custom_vjp = _updates(_custom_vjp.custom_vjp)
eval_shape = _updates(_inspect.eval_shape)
fori_loop = _updates(_loops.fori_loop)
fork_rngs = _updates(_random_rules.fork_rngs)
grad = _updates(_grad.grad)
jit = _updates(_jit.jit)
jvp = _updates(_grad.jvp)
pmap = _updates(_vmap.pmap)
remat = _updates(_grad.remat)
scan = _updates(_scan.scan)
shard_map = _updates(_vmap.shard_map)
split_rngs = _updates(_random_rules.split_rngs)
switch = _updates(_cond.switch)
value_and_grad = _updates(_grad.value_and_grad)
vjp = _updates(_grad.vjp)
vmap = _updates(_vmap.vmap)
while_loop = _updates(_loops.while_loop)
