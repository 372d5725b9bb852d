# SPDX-License-Identifier: Apache-2.0
"""What the library costs in Python, outside any compiled program.

Run with `make bench`. The floor of each group does the same on nested dicts; flax.nnx
and equinox stand beside it when they are installed.
"""

import argparse
import itertools
import pathlib
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import timing

import treetap as tt

try:
    import equinox as eqx
    from flax import nnx
except ImportError:
    eqx = nnx = None

ARRAY = jnp.ones((8, 8))


class Layer(tt.Module):
    def __init__(self, w: Any, b: Any):
        self.w = tt.Param(w)
        self.b = tt.Param(b)


class Model(tt.Module):
    def __init__(self, layers: int):
        self.layers = tt.List([Layer(ARRAY, ARRAY) for _ in range(layers)])


def dict_layer(w: Any, b: Any) -> Any:
    return {"w": w, "b": b}


def dict_model(layers: int) -> Any:
    return {"layers": [dict_layer(ARRAY, ARRAY) for _ in range(layers)]}


def named_dict_model(layers: int) -> Any:
    return {"layers": {f"layer_{i}": dict_layer(ARRAY, ARRAY) for i in range(layers)}}


if nnx is not None and eqx is not None:

    class NnxLayer(nnx.Module):
        def __init__(self, w: Any, b: Any):
            self.w = nnx.Param(w)
            self.b = nnx.Param(b)

    class NnxModel(nnx.Module):
        def __init__(self, layers: int):
            self.layers = nnx.List([NnxLayer(ARRAY, ARRAY) for _ in range(layers)])

    class EqxLayer(eqx.Module):
        w: Any
        b: Any

    class EqxModel(eqx.Module):
        layers: list[EqxLayer]

    def eqx_model(layers: int) -> EqxModel:
        return EqxModel([EqxLayer(ARRAY, ARRAY) for _ in range(layers)])


def shifted(tree: Any, by: float) -> Any:
    return jax.tree.map(lambda leaf: leaf + by, tree)


def same(leaf: Any) -> Any:
    return leaf


def assign(target: Any, source: Any) -> None:
    for key, value in source.items() if type(source) is dict else enumerate(source):
        if isinstance(value, (dict, list)):
            assign(target[key], value)
        else:
            target[key] = value


def walk(path: tuple[Any, ...], value: Any) -> Iterator[tuple[Any, Any]]:
    for key, child in value.items() if type(value) is dict else enumerate(value):
        if isinstance(child, (dict, list)):
            yield from walk((*path, key), child)
    yield path, value


def round_trip(split: Callable[..., Any], merge: Callable[..., Any]) -> Any:
    graphdef, state = split()
    return merge(graphdef, state)


def eager_rows(layers: int) -> list[timing.Row]:
    n = 2 * layers
    model, plain = Model(layers), dict_model(layers)
    changed = [tt.state(shifted(model, by)) for by in (1, 2)]
    states = itertools.cycle(changed)  # in turns, so that every call has to write
    raw_states = itertools.cycle([tt.to_pure_dict(state) for state in changed])
    groups: dict[str, tuple[dict[str, Callable[[], Any]], float]] = {
        "split + merge": (
            {
                "floor: dict flatten + unflatten": lambda: jax.tree.unflatten(
                    *reversed(jax.tree.flatten(plain))
                ),
                "treetap": lambda: tt.merge(*tt.split(model)),
                "treetap graph": lambda: tt.merge(*tt.split(model, graph=True)),
            },
            12,
        ),
        "state()": (
            {
                "floor: dict tree.map": lambda: jax.tree.map(same, plain),
                "treetap": lambda: tt.state(model),
                "treetap, filter Param": lambda: tt.state(model, tt.Param),
            },
            6,
        ),
        "update()": (
            {
                "floor: nested dict assignment": lambda: assign(plain, plain),
                "treetap": lambda: tt.update(model, next(states)),
                "treetap, bare arrays": lambda: tt.update(model, next(raw_states)),
            },
            4,
        ),
        "clone()": (
            {
                "floor: dict tree.map": lambda: jax.tree.map(same, plain),
                "treetap": lambda: tt.clone(model),
            },
            10,
        ),
        "iter_modules()": (
            {
                "floor: recursive generator": lambda: list(walk((), plain)),
                "treetap": lambda: list(tt.iter_modules(model)),
            },
            3,
        ),
        "building": (
            {
                "floor: nested dict, by name": lambda: named_dict_model(layers),
                "treetap": lambda: Model(layers),
            },
            40,
        ),
        "jax.tree.flatten": (
            {
                "floor: nested dict": lambda: jax.tree.flatten(plain),
                "treetap": lambda: jax.tree.flatten(model),
            },
            2.5,
        ),
        "jax.tree.map": (
            {
                "floor: nested dict": lambda: jax.tree.map(same, plain),
                "treetap": lambda: jax.tree.map(same, model),
            },
            0,
        ),
    }
    if nnx is not None and eqx is not None:
        add_peers(groups, layers)
    rows: list[timing.Row] = []
    for name, (contenders, target) in groups.items():
        targets = {"treetap": target} if target else {}
        rows += timing.compare(f"{name}, N = {n}", contenders, targets)
    return rows


def add_peers(groups: Any, layers: int) -> None:
    assert nnx is not None
    assert eqx is not None
    model, arrays = NnxModel(layers), eqx_model(layers)
    changed = [nnx.state(shifted(model, by)) for by in (1, 2)]
    states = itertools.cycle(changed)
    groups["split + merge"][0].update(
        {
            "nnx tree": lambda: nnx.merge(*nnx.split(model, graph=False)),
            "nnx graph": lambda: nnx.merge(*nnx.split(model)),
            "eqx partition + combine": lambda: eqx.combine(
                *eqx.partition(arrays, eqx.is_array)
            ),
        }
    )
    groups["state()"][0].update(
        {
            "nnx tree": lambda: nnx.state(model, graph=False),
            "nnx graph": lambda: nnx.state(model),
            "eqx.filter": lambda: eqx.filter(arrays, eqx.is_array),
        }
    )
    groups["update()"][0]["nnx"] = lambda: nnx.update(model, next(states))
    groups["clone()"][0].update(
        {
            "nnx tree": lambda: nnx.clone(model, graph=False),
            "nnx graph": lambda: nnx.clone(model),
            "eqx: tree.map": lambda: jax.tree.map(same, arrays),
        }
    )
    groups["iter_modules()"][0].update(
        {
            "nnx tree": lambda: list(nnx.iter_modules(model, graph=False)),
            "nnx graph": lambda: list(nnx.iter_modules(model)),
        }
    )
    for name in ("jax.tree.flatten", "jax.tree.map"):
        run = jax.tree.flatten if name.endswith("flatten") else _mapped
        groups[name][0].update(
            {"nnx": lambda run=run: run(model), "eqx": lambda run=run: run(arrays)}
        )
    groups["building"][0].update(
        {"nnx": lambda: NnxModel(layers), "eqx": lambda: eqx_model(layers)}
    )


def _mapped(tree: Any) -> Any:
    return jax.tree.map(same, tree)


def method_rows() -> list[timing.Row]:
    """The cost of the wrapper around a Module's methods."""

    class Bare:
        def __call__(self, x: Any) -> Any:
            return x

    class Wrapped(tt.Module):
        def __call__(self, x: Any) -> Any:
            return x

    bare, wrapped = Bare(), Wrapped()
    return timing.compare(
        "calling a method, eagerly",
        {"floor: plain class": lambda: bare(1), "treetap": lambda: wrapped(1)},
    )


def bytes_per_object(make: Callable[[], Any], count: int = 20_000) -> float:
    make()
    tracemalloc.start()
    kept = [make() for _ in range(count)]
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (size - sys.getsizeof(kept)) / count


def memory() -> dict[str, float]:
    sizes = {
        "treetap Param": bytes_per_object(lambda: tt.Param(ARRAY)),
        "treetap layer of 2": bytes_per_object(lambda: Layer(ARRAY, ARRAY)),
    }
    if nnx is not None:
        sizes["nnx Param"] = bytes_per_object(lambda: nnx.Param(ARRAY))
        sizes["nnx layer of 2"] = bytes_per_object(lambda: NnxLayer(ARRAY, ARRAY))
    return sizes


def import_times(rounds: int = 7) -> dict[str, float]:
    """Milliseconds to import each package after jax, in fresh interpreters.

    treetap imports a name when it is asked for: what counts is what a program that
    trains a model asks for.
    """
    program = (
        "import time, jax, jax.numpy; s = time.perf_counter(); import {};"
        "print((time.perf_counter() - s) * 1e3)"
    )
    used = (
        "Module Param Rngs Linear Dropout Sequential jit value_and_grad observe state"
    )
    asked = "".join(f"; treetap.{name}" for name in used.split())
    names = [f"treetap{asked}"]
    names += ["flax.nnx", "equinox"] if nnx is not None else []
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            command = [sys.executable, "-c", program.format(name)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            times[name].append(float(done.stdout))
    return {
        name.partition(";")[0]: sorted(samples)[rounds // 2]
        for name, samples in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=250)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    rows = eager_rows(options.layers) + method_rows()
    print(timing.table(rows))
    call, wrapped = rows[-2:]
    figures = [
        timing.Figure(
            "wrapper around a method, each eager call",
            round(wrapped.microseconds - call.microseconds, 2),
            2,
            "µs",
            {},
        ),
        figure("Python objects of a Variable", memory(), 120, "bytes"),
        figure("import over jax", import_times(), 80, "ms"),
    ]
    print(timing.figure_table(figures))
    timing.write(options.json, rows, figures)


def figure(
    what: str, found: dict[str, float], target: float, unit: str
) -> timing.Figure:
    """What was counted for the first, with what was counted for others beside it."""
    ours, *beside = ((name, round(value)) for name, value in found.items())
    return timing.Figure(what, ours[1], target, unit, dict(beside))


if __name__ == "__main__":
    main()
