# SPDX-License-Identifier: Apache-2.0
"""Functions in graph mode and transforms with graph updates, whatever the settings.

    from treetap.nnx import compat as compat

    @compat.jit
    def step(model): ...

A keyword still wins: `compat.split(model, graph=False)` is tree mode.
"""

# ruff: noqa: PLC0414 - `as` says that a name is public here

from treetap._core.trees.build import clone as clone
from treetap._core.trees.split import flatten as flatten
from treetap._core.trees.split import graphdef as graphdef
from treetap._core.trees.split import split as split
from treetap._core.trees.split import state as state
from treetap._core.trees.traverse import iter_graph as iter_graph
from treetap._core.trees.traverse import recursive_map as recursive_map
from treetap._modules.module import iter_children as iter_children
from treetap._modules.module import iter_modules as iter_modules
from treetap._modules.random_rules import backup_keys as backup_keys
from treetap._modules.random_rules import fork_rngs as fork_rngs
from treetap._modules.random_rules import reseed as reseed
from treetap._modules.random_rules import split_rngs as split_rngs
from treetap._modules.views import view as view
from treetap._modules.views import view_info as view_info
from treetap._transforms.cond import checkify as checkify
from treetap._transforms.cond import cond as cond
from treetap._transforms.cond import switch as switch
from treetap._transforms.custom_vjp import custom_vjp as custom_vjp
from treetap._transforms.grad import grad as grad
from treetap._transforms.grad import jvp as jvp
from treetap._transforms.grad import remat as remat
from treetap._transforms.grad import value_and_grad as value_and_grad
from treetap._transforms.grad import vjp as vjp
from treetap._transforms.inspect import eval_shape as eval_shape
from treetap._transforms.jit import jit as jit
from treetap._transforms.jit_partial import cached_partial as cached_partial
from treetap._transforms.loops import fori_loop as fori_loop
from treetap._transforms.loops import while_loop as while_loop
from treetap._transforms.scan import scan as scan
from treetap._transforms.sharding import get_abstract_model as get_abstract_model
from treetap._transforms.vmap import pmap as pmap
from treetap._transforms.vmap import shard_map as shard_map
from treetap._transforms.vmap import vmap as vmap
from treetap.nnx.defaults import give_defaults as _give_defaults

_give_defaults(globals(), graph=lambda: True, updates=lambda: True)
