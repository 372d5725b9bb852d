# SPDX-License-Identifier: Apache-2.0
"""Recurrent cells as equations in numpy, of the carry and the inputs of one step."""

import numpy as np
from formulas import raw

import treetap as tt

ACTIVATIONS = {"sigmoid": lambda x: 1 / (1 + np.exp(-x)), "tanh": np.tanh}
ACTIVATIONS |= {"sin": np.sin, "cos": np.cos}


def activation(fn):
    return ACTIVATIONS[fn.__name__]


def linear(layer, x):
    y = x @ raw(layer.kernel)
    return y if layer.bias is None else y + raw(layer.bias)


def memory(cell, carry, parts):
    """A step of long short-term memory, from the sums for its gates."""
    gate, act = activation(cell.gate_fn), activation(cell.activation_fn)
    i, f, g, o = parts
    c = gate(f) * carry[0] + gate(i) * act(g)
    h = gate(o) * act(c)
    return (c, h), h


def lstm(cell, carry, x):
    of_inputs = (cell.ii, cell.if_, cell.ig, cell.io)
    of_carry = (cell.hi, cell.hf, cell.hg, cell.ho)
    parts = (linear(a, x) + linear(b, carry[1]) for a, b in zip(of_inputs, of_carry))
    return memory(cell, carry, parts)


def optimized_lstm(cell, carry, x):
    both = linear(cell.dense_i, x) + linear(cell.dense_h, carry[1])
    return memory(cell, carry, np.split(both, 4, -1))


def gru(cell, h, x):
    gate, act = activation(cell.gate_fn), activation(cell.activation_fn)
    x_r, x_z, x_n = np.split(linear(cell.dense_i, x), 3, -1)
    h_r, h_z, h_n = np.split(linear(cell.dense_h, h), 3, -1)
    r, z = gate(x_r + h_r), gate(x_z + h_z)
    h = (1 - z) * act(x_n + r * h_n) + z * h
    return h, h


def simple(cell, h, x):
    total = linear(cell.dense_i, x) + linear(cell.dense_h, h)
    h = activation(cell.activation_fn)(total + h if cell.residual else total)
    return h, h


FORMULAS = {
    tt.LSTMCell: lstm,
    tt.OptimizedLSTMCell: optimized_lstm,
    tt.GRUCell: gru,
    tt.SimpleCell: simple,
}


def over_time(cell, carry, x):
    """All steps of `[batch..., time, features]`: the last carry, and all outputs."""
    step, outputs = FORMULAS[type(cell)], []
    for t in range(x.shape[-2]):
        carry, y = step(cell, carry, x[..., t, :])
        outputs.append(y)
    return carry, np.stack(outputs, -2)
