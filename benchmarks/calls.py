# SPDX-License-Identifier: Apache-2.0
"""What calling and tracing a jitted function costs, against `jax.jit` on a flat list.

Arrays are tiny, so only overhead is seen. Both sides hold arrays that came out of a
compiled program; the floor is measured twice, to show the spread. Run by `make bench`.
"""

import argparse
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import timing

import treetap as tt
from treetap._core.variables.variable import pack_of

try:
    import equinox as eqx
    from flax import nnx
except ImportError:
    eqx = nnx = None

SIZES = (20, 100, 500, 2000)
CALLS = "jit, "  # how the groups of calls begin
Contenders = dict[str, Callable[[], Any]]


def array() -> jax.Array:
    return jnp.ones((8, 8))


class Layer(tt.Module):
    def __init__(self) -> None:
        self.w = tt.Param(array())
        self.b = tt.Param(array())


class Model(tt.Module):
    def __init__(self, layers: int):
        self.layers = tt.List([Layer() for _ in range(layers)])
        self.count = tt.Variable(jnp.zeros(()))


if nnx is not None and eqx is not None:

    class NnxLayer(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(array())
            self.b = nnx.Param(array())

    class NnxModel(nnx.Module):
        def __init__(self, layers: int):
            self.layers = nnx.List([NnxLayer() for _ in range(layers)])
            self.count = nnx.Variable(jnp.zeros(()))

    class EqxLayer(eqx.Module):
        w: Any
        b: Any

    class EqxModel(eqx.Module):
        layers: list[Any]
        count: Any


def write_all(model: Any) -> None:
    for layer in model.layers:
        layer.w[...] += 1
        layer.b[...] += 1
    model.count[...] += 1


def write_one(model: Any) -> None:
    model.count[...] += sum(layer.w[0, 0] + layer.b[0, 0] for layer in model.layers)


def flat_all(values: list[Any]) -> list[Any]:
    return [value + 1 for value in values]


def flat_one(values: list[Any]) -> Any:
    *arrays, count = values
    return count + sum(value[0, 0] for value in arrays)


def eqx_all(model: Any) -> Any:
    return jax.tree.map(lambda x: x + 1, model)


def eqx_one(model: Any) -> Any:
    return model.count + sum(x.w[0, 0] + x.b[0, 0] for x in model.layers)


class FlatAll:
    """The floor: every value goes in and out, and is kept."""

    def __init__(self, values: list[Any]):
        self.values = values
        self.run = jax.jit(flat_all)

    def __call__(self) -> Any:
        self.values = self.run(self.values)
        return self.values


class FlatOne(FlatAll):
    """The floor: every value goes in, one comes out, and is kept."""

    def __init__(self, values: list[Any]):
        super().__init__(values)
        self.run = jax.jit(flat_one)

    def __call__(self) -> Any:
        self.values[-1] = self.run(self.values)
        return self.values


def after(run: Any, model: Any) -> Callable[[], Any]:
    """A call, and what there is to wait for when it is over."""

    def call() -> Any:
        run(model)
        return model

    return call


def packed_call(run: Any, model: Any) -> Callable[[], Any]:
    """The same with packs; to look at the model would unpack it."""

    def call() -> Any:
        run(model)
        pack = pack_of(model.count)
        return None if pack is None else pack.contents.buffers

    for _ in range(5):  # until it is compiled
        call()
    return call


def contenders(
    size: int, write: Any, floor: type[FlatAll], functional: Any
) -> Contenders:
    layers = size // 2
    settle = tt.jit(write_all)  # arrays that came out of a program are slower to pass

    def made() -> Any:
        model = Model(layers)
        settle(model)
        return model

    def flat(model: Any) -> FlatAll:
        count, *arrays = jax.tree.leaves(model)
        return floor([*arrays, count])

    model = made()
    run = tt.jit(write)
    found: Contenders = {
        "jax.jit, flat list": flat(model),  # the same arrays: where they are counts
        "the same again": flat(made()),
        "treetap": after(run, model),
    }
    donated = made()
    run_donated = tt.jit(write, donate_argnums=0)
    found["treetap, donated"] = after(run_donated, donated)
    found["treetap, packed"] = packed_call(tt.jit(write, pack=True), Model(layers))
    if nnx is None or eqx is None:
        return found
    tree, graph = NnxModel(layers), NnxModel(layers)
    run_tree = nnx.jit(write, graph=False)
    run_graph = nnx.jit(write)
    found["nnx.jit tree"] = after(run_tree, tree)
    found["nnx.jit default"] = after(run_graph, graph)
    made = [EqxLayer(array(), array()) for _ in range(layers)]
    state = [EqxModel(made, jnp.zeros(()))]
    run_eqx = eqx.filter_jit(functional)

    def call_eqx() -> Any:
        out = run_eqx(state[0])
        if functional is eqx_all:
            state[0] = out
        return out

    found["eqx.filter_jit"] = call_eqx
    return found


TARGETS = {"every": {20: 1.3}, "one": {20: 1.45}}
DEFAULT_TARGET = {"every": 1.2, "one": 1.3}
PACKED_FROM, PACKED_TARGET = 500, 0.4


def calls(rounds: int) -> list[timing.Row]:
    rows = []
    for kind, write, floor, functional in (
        ("every", write_all, FlatAll, eqx_all),
        ("one", write_one, FlatOne, eqx_one),
    ):
        for size in SIZES:
            targets = {"treetap": TARGETS[kind].get(size, DEFAULT_TARGET[kind])}
            if size >= PACKED_FROM:
                targets["treetap, packed"] = PACKED_TARGET
            rows += timing.compare(
                f"{CALLS}{kind} Variable written, N={size}",
                contenders(size, write, floor, functional),
                targets,
                rounds,
            )
    return rows


def mlp(weights: list[Any], x: Any) -> Any:
    for w, b in zip(weights[::2], weights[1::2]):
        x = jnp.tanh(x @ w + b)
    return x.sum()


def module_mlp(model: Any, x: Any) -> Any:
    for layer in model.layers:
        x = jnp.tanh(x @ layer.w + layer.b)
    return x.sum()


def traces(rounds: int) -> list[timing.Row]:
    """Tracing a deep network, forwards and with gradients; nothing is compiled."""
    model, values = Model(250), [array() for _ in range(500)]
    x = array()

    def fresh(fn: Any) -> Any:  # JAX keeps what it has traced
        return lambda *args: fn(*args)  # noqa: PLW0108 - another function each time

    rows = timing.compare(
        "trace of a forward pass, N=500",
        {
            "jax.jit, flat list": lambda: jax.jit(fresh(mlp)).trace(values, x),
            "treetap": lambda: tt.jit(fresh(module_mlp)).trace(model, x),
        },
        {"treetap": 1.15},
        rounds,
    )
    return rows + timing.compare(
        "trace of a gradient, N=500",
        {
            "jax.jit, flat list": lambda: jax.jit(jax.grad(fresh(mlp))).trace(
                values, x
            ),
            "treetap": lambda: tt.jit(tt.grad(fresh(module_mlp))).trace(model, x),
        },
        {"treetap": 1.1},
        rounds,
    )


def over_floor(rows: list[timing.Row], kind: str, name: str) -> list[float]:
    """Microseconds over the floor, for each size."""
    found = []
    for size in SIZES:
        group = f"{CALLS}{kind} Variable written, N={size}"
        times = {row.name: row.microseconds for row in rows if row.group == group}
        found.append(times[name] - times["jax.jit, flat list"])
    return found


def lines(rows: list[timing.Row]) -> str:
    """The cost over the floor as a number plus a number for each Variable."""
    found = ["| written | contender | over the floor |", "|---|---|---|"]
    for kind in ("every", "one"):
        names = dict.fromkeys(row.name for row in rows if f", {kind} " in row.group)
        for name in list(names)[1:]:
            over = over_floor(rows, kind, name)
            slope, start = np.polyfit(SIZES, over, 1, w=1 / np.asarray(SIZES))
            text = f"{start:+.1f} µs {slope:+.3f} µs per Variable"
            found.append(f"| {kind} | {name} | {text} |")
    return "\n".join(found)


def plot(rows: list[timing.Row], path: pathlib.Path) -> None:
    """Draws the cost of a call against the number of Variables."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for panel, kind in zip(panels, ("every", "one")):
        mine = [row for row in rows if f", {kind} " in row.group]
        names = dict.fromkeys(row.name for row in mine)
        for name in names:
            if name == "the same again":
                continue
            times = [row.microseconds for row in mine if row.name == name]
            is_ours = name.startswith("treetap")
            width, dots = (2.2, "o-") if is_ours or "flat" in name else (1.0, "o--")
            panel.loglog(SIZES, times, dots, linewidth=width, markersize=3, label=name)
        panel.set_title(f"{kind} Variable written", fontsize=10)
        panel.set_xlabel("Variables")
        panel.set_xticks(SIZES, [str(size) for size in SIZES])
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("µs per call")
    panels[1].legend(fontsize=7, loc="upper left")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--plot", type=pathlib.Path, help="an SVG file")
    options = parser.parse_args()
    called = calls(options.rounds)
    rows = called + traces(options.rounds)
    print(timing.table(rows))
    print()
    print(lines(called))
    if options.plot:
        plot(called, options.plot)
    timing.write(options.json, rows)


if __name__ == "__main__":
    main()
