# SPDX-License-Identifier: Apache-2.0
"""The table of captures: each transform, what it does to shapes, what it cannot do."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import treetap as tt
from capture_steps import (
    SHARDS,
    TIMES,
    Block,
    branch_by_hand,
    cond,
    custom_jvp,
    custom_vjp,
    fori,
    fori_by_hand,
    fori_traced,
    grad,
    grad_by_hand,
    jit,
    layers_by_hand,
    pmap,
    remat,
    rows_of_both,
    rows_of_x,
    rule_by_hand,
    scan_layers,
    scan_time,
    shard_map,
    switch,
    time_by_hand,
    unchanged,
    value_and_grad,
    value_and_grad_by_hand,
    vmap_broadcast,
    vmap_mapped,
    while_by_hand,
    while_loop,
)


class Case(NamedTuple):
    """A row of the table.

    Attributes:
        wrap: The transform, from a namespace and a step to a step.
        hand: The same by hand.
        of_w: The axes it adds to the parameter.
        of_x: The axes it adds to the input.
        of_value: The axes it adds to the value that is heard.
        differentiates: Whether gradients are there without more ado.
        no_grads: Why the value has no gradient; CaptureError if it is asked for.
        no_reverse: Why JAX cannot differentiate it.
        no_ours: Why treetap has no transform of its own for it.
    """

    wrap: Callable[..., Any]
    hand: Callable[..., Any]
    of_w: tuple[int, ...] = ()
    of_x: tuple[int, ...] = ()
    of_value: tuple[int, ...] = ()
    differentiates: bool = False
    no_grads: str = ""
    no_reverse: str = ""
    no_ours: str = ""

    def inputs(self, *inner):
        """Model and input for this case around others."""
        w_shape = [*self.of_w, *(n for case in inner for n in case.of_w), 2]
        x_shape = [*self.of_x, *(n for case in inner for n in case.of_x), 2]
        w = 0.5 + jnp.arange(float(np.prod(w_shape))).reshape(w_shape) / 8
        x = 0.25 + jnp.arange(float(np.prod(x_shape))).reshape(x_shape) / 4
        return Block(w), x


def shape_of(*cases):
    """The shape of the value that is heard."""
    return (*(n for case in cases for n in case.of_value), 2)


ROWS = {"of_x": (TIMES,), "of_value": (TIMES,)}
LAYERS = {"of_w": (TIMES,), "of_value": (TIMES,)}
PARTS = {"of_x": (SHARDS,), "of_value": (SHARDS,)}
IN_A_RULE = {"no_grads": "it lies inside a custom rule"}
A_WHILE = {"no_reverse": "JAX does not differentiate a while loop in reverse"}
ONLY_JAX = {"no_ours": "treetap has no custom_jvp: Modules pass through JAX's"}

PAIRED = {
    "jit": Case(jit, unchanged),
    "vmap_broadcast": Case(vmap_broadcast, rows_of_x, **ROWS),
    "vmap_mapped": Case(vmap_mapped, rows_of_both, of_w=(TIMES,), **ROWS),
    "grad": Case(grad, grad_by_hand, differentiates=True),
    "value_and_grad": Case(value_and_grad, value_and_grad_by_hand, differentiates=True),
    "scan_layers": Case(scan_layers, layers_by_hand, **LAYERS),
    "scan_time": Case(scan_time, time_by_hand, of_value=(TIMES,)),
    "remat": Case(remat, unchanged),
    "cond": Case(cond, branch_by_hand),
    "switch": Case(switch, branch_by_hand),
    "while": Case(while_loop, while_by_hand, **A_WHILE),
    "fori": Case(fori, fori_by_hand, of_value=(TIMES,)),
    "fori_traced": Case(fori_traced, while_by_hand, **A_WHILE),
    "custom_vjp": Case(custom_vjp, rule_by_hand, **IN_A_RULE),
    "custom_jvp": Case(custom_jvp, rule_by_hand, **IN_A_RULE, **ONLY_JAX),
    "shard_map": Case(shard_map, rows_of_x, **PARTS),
    "pmap": Case(pmap, rows_of_x, **PARTS),
}


def around(outer, inner):
    """One transform around another, as a single case."""
    return lambda ns, step: outer(ns, inner(ns, step))


BACKWARDS = {"reverse": True}
REVERSED = partial(scan_layers, **BACKWARDS), partial(layers_by_hand, **BACKWARDS)
REVERSED_TIME = partial(scan_time, **BACKWARDS), partial(time_by_hand, **BACKWARDS)
NO_TIMES = partial(while_loop, times=0), partial(while_by_hand, times=0)
NOT_TAKEN = partial(branch_by_hand, taken=False)

SINGLES = PAIRED | {
    "scan_layers_reverse": Case(*REVERSED, **LAYERS),
    "scan_time_reverse": Case(*REVERSED_TIME, of_value=(TIMES,)),
    "grad_of_remat": Case(around(grad, remat), grad_by_hand, differentiates=True),
    "remat_of_scan": Case(around(remat, scan_layers), layers_by_hand, **LAYERS),
    "cond_not_taken": Case(partial(cond, taken=False), NOT_TAKEN),
    "switch_not_taken": Case(partial(switch, index=0), NOT_TAKEN),
    "while_no_iteration": Case(*NO_TIMES, **A_WHILE),
}


# The four ways to hear: from a step to a function that gives the value as well


def by_sow(step):
    def call(model, x):
        out, state = tt.capture(step, tt.Intermediate)(model, x)
        return out, state["sown"][0]

    return call


def by_perturb(step):
    """The value of a perturbation before it is given one."""

    def call(model, x):
        out, state = tt.capture(step, tt.Perturbation)(model, x)
        return out, state["moved"][...]

    return call


def by_output(step):
    def call(model, x):
        out, state = tt.capture(step, method_outputs=tt.Intermediate)(model, x)
        return out, state["seen"][0]

    return call


def by_tap(step):
    def call(model, x):
        out, record = tt.observe(step, "tapped")(model, x)
        return out, record["tapped"].value

    return call


HEARD = {"sow": by_sow, "perturb": by_perturb, "output": by_output, "tap": by_tap}


def hearing(step, ways=HEARD):
    """A step whose extras are what captures of it heard."""

    def call(model, x):
        found = {how: hear(step)(model, x) for how, hear in ways.items()}
        (y, _), _ = found["tap"]
        return y, {how: value for how, (_, value) in found.items()}

    return call


def moving(step, shape):
    """A step with a perturbation of ones."""

    def call(model, x):
        given = tt.State({"moved": tt.Perturbation(jnp.ones(shape))})
        return tt.capture(step, init=given)(model, x)

    return call
