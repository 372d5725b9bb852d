# SPDX-License-Identifier: Apache-2.0
"""helpers: containers that are Modules, and `TrainState`.

Most are names of treetap, as NNX has them in this module.
"""

# ruff: noqa: PLC0414 - `as` says that a name is public here

import inspect
from collections.abc import Callable
from typing import Any

from treetap.nnx import A as A
from treetap.nnx import Dict as Dict
from treetap.nnx import GraphDef as GraphDef
from treetap.nnx import List as List
from treetap.nnx import M as M
from treetap.nnx import Module as Module
from treetap.nnx import Rngs as Rngs
from treetap.nnx import Sequential as Sequential
from treetap.nnx import State as State
from treetap.nnx import TrainState as TrainState
from treetap.nnx import Variable as Variable
from treetap.nnx.proxy_caller import ApplyCaller as ApplyCaller


def has_keyword_arg(func: Callable[..., Any], name: str) -> bool:
    """Whether a function takes an argument of that name as a keyword."""
    kinds = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = inspect.signature(func).parameters.values()
    return any(
        p.kind is p.VAR_KEYWORD or (p.name == name and p.kind in kinds)
        for p in parameters
    )
