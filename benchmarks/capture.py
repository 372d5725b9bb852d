# SPDX-License-Identifier: Apache-2.0
"""What it costs to see intermediate values and their gradients.

Run with `make bench`. The floor is written by hand: a function of a flat list of arrays
that returns its intermediate values, or takes zeros to differentiate with respect to.
flax.nnx stands beside it when it is installed.
"""

import argparse
import functools
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import timing

import treetap as tt

try:
    from flax import nnx
except ImportError:
    nnx = None

LAYERS = 24
X = jnp.ones((4, 8))
WEIGHTS = [0.1 * jnp.ones((8, 8)) for _ in range(LAYERS)]
BIASES = [jnp.zeros(8) for _ in range(LAYERS)]


def floor(params: Any, x: Any) -> Any:
    kept = []
    for w, b in params:
        x = jnp.tanh(x @ w + b)
        kept.append(x)
    return x, kept


def floor_loss(params: Any, zeros: Any, x: Any) -> Any:
    kept = []
    for (w, b), zero in zip(params, zeros):
        x = jnp.tanh(x @ w + b) + zero
        kept.append(x)
    return (x**2).sum(), kept


class Layer(tt.Module):
    def __init__(self, w: Any, b: Any):
        self.w, self.b = tt.Param(w), tt.Param(b)

    def __call__(self, x: Any) -> Any:
        return tt.tap(jnp.tanh(x @ self.w[...] + self.b[...]), "h")


class SowingLayer(Layer):
    def __call__(self, x: Any) -> Any:
        x = jnp.tanh(x @ self.w[...] + self.b[...])
        self.sow(tt.Intermediate, "h", x)
        return x


class Model(tt.Module):
    def __init__(self, layer: type[Layer] = Layer):
        self.layers = tt.List([layer(w, b) for w, b in zip(WEIGHTS, BIASES)])

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def loss(model: Any, x: Any) -> Any:
    return (model(x) ** 2).sum()


def observed(model: Any, x: Any) -> Any:
    out, record = tt.observe(lambda model, x: model(x), "**:h")(model, x)
    return out, [site.value for site in record]


def observed_gradients(model: Any, x: Any) -> Any:
    step = tt.observe(jax.value_and_grad(loss), "**:h", grads=True)
    (value, grads), record = step(model, x)
    kept = [site.value for site in record], [site.grad for site in record]
    return value, jax.tree.leaves(grads), kept


if nnx is not None:

    class NnxLayer(nnx.Module):
        def __init__(self, w: Any, b: Any):
            self.w, self.b = nnx.Param(w), nnx.Param(b)

        def __call__(self, x: Any) -> Any:
            x = jnp.tanh(x @ self.w[...] + self.b[...])
            self.sow(nnx.Intermediate, "h", x)
            return x

    class NnxModel(nnx.Module):
        def __init__(self):
            layers = [NnxLayer(w, b) for w, b in zip(WEIGHTS, BIASES)]
            self.layers = nnx.List(layers)

        def __call__(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x


def called(fn: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    jitted = jax.jit(fn)
    return lambda: jax.block_until_ready(jitted(*args))


def traced(fn: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """A fresh trace at every call."""
    return lambda: jax.jit(functools.partial(fn)).trace(*args)


def contenders(how: Callable[..., Any]) -> dict[str, Any]:
    params = list(zip(WEIGHTS, BIASES))
    model, sowing = Model(), Model(SowingLayer)
    capture = tt.capture(lambda model, x: model(x), tt.Intermediate)
    made = {
        "floor": how(floor, params, X),
        "treetap observe, values": how(observed, model, X),
        "treetap capture, State": how(capture, sowing, X),
    }
    if nnx is not None:
        nnx_capture = nnx.capture(lambda model, x: model(x), nnx.Intermediate)

        def pure(state: Any, x: Any) -> Any:
            return nnx_capture(nnx.merge(graphdef, state), x)

        graphdef, state = nnx.split(NnxModel())
        made["nnx capture, functional"] = how(pure, state, X)
    return made


def gradient_contenders(how: Callable[..., Any]) -> dict[str, Any]:
    params = list(zip(WEIGHTS, BIASES))
    zeros = [jnp.zeros((4, 8))] * LAYERS
    by_hand = jax.value_and_grad(floor_loss, argnums=(0, 1), has_aux=True)
    return {
        "floor": how(by_hand, params, zeros, X),
        "treetap observe, grads": how(observed_gradients, Model(), X),
    }


def counts(fn: Callable[..., Any], *args: Any) -> dict[str, float]:
    """What a compiled program is, without running it."""
    compiled = jax.jit(fn).lower(*args).compile()
    cost, lines = compiled.cost_analysis(), compiled.as_text().splitlines()
    return {
        "FLOPs": cost["flops"],
        "bytes accessed": cost["bytes accessed"],
        "temporary bytes": compiled.memory_analysis().temp_size_in_bytes,
        "instructions": sum(" = " in line for line in lines),
    }


def count_figures() -> list[timing.Figure]:
    params = list(zip(WEIGHTS, BIASES))
    by_hand = jax.value_and_grad(floor_loss, argnums=(0, 1), has_aux=True)
    floor_counts = counts(by_hand, params, [jnp.zeros((4, 8))] * LAYERS, X)
    ours = counts(observed_gradients, Model(), X)
    what = "values and gradients"
    figures = [timing.Figure(what, ours["FLOPs"], floor_counts["FLOPs"], "FLOPs", {})]
    bare = counts(lambda params, x: floor(params, x)[0], params, X)
    marked = counts(lambda model, x: model(x), Model(), X)
    what = "taps while nobody listens"
    return figures + [
        timing.Figure(what, marked[unit], bare[unit], unit, {}) for unit in bare
    ]


def eager_milliseconds() -> tuple[float, float]:
    """An eager forward pass, alone and observed."""
    model, samples = Model(), ([], [])
    for _ in range(15):
        for fn, times in zip((model, tt.observe(model, "**:h")), samples):
            start = time.perf_counter()
            jax.block_until_ready(jax.tree.leaves(fn(X)))
            times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(samples[0]), statistics.median(samples[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    target = {"treetap observe, values": 1.15, "treetap capture, State": 1.15}
    slower = dict.fromkeys(target, 1.6)
    many = {"rounds": 60}  # a call is short, and the machine noisy
    rows = timing.compare("captured forward: call", contenders(called), target, **many)
    rows += timing.compare("captured forward: trace", contenders(traced), slower)
    name = "treetap observe, grads"
    made = gradient_contenders(called)
    rows += timing.compare("values and gradients: call", made, {name: 1.1}, **many)
    made = gradient_contenders(traced)
    rows += timing.compare("values and gradients: trace", made, {name: 1.6})
    print(timing.table(rows))
    figures = count_figures()
    print(timing.figure_table(figures))
    alone, seen = eager_milliseconds()
    print(f"eager forward pass: {alone:.2f} ms, observed {seen:.2f} ms")
    timing.write(options.json, rows, figures)


if __name__ == "__main__":
    main()
